"""The parts of a report, in the order in which a reader asks: what holds it back, what it is, where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable

from ndd_console.view.diagnosis import command_text
from ndd_console.view.findings import CALM, ceiling_text
from ndd_console.view.learning import LOST
from ndd_console.view.style import STATUS
from ndd_engine.diagnose import CAUSES, Finding
from ndd_engine.text import MISSING, duration, number, size

from . import happened, learned, machine, methods, timings
from .blocks import Block, Card, Facts, Page, Section, Table, Text, Tone
from .differences import differences
from .model import Report

# A record may hold anything: what cannot be shown costs its own section, never the page.
_DAMAGE = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError)
_TONES: dict[str, Tone] = {"good": "good", "warn": "warn", "bad": "bad"}


def page(report: Report) -> Page:
    """The whole report."""
    snapshot = report.snapshot
    parts: tuple[tuple[str, str, Callable[[Report], list[Block]]], ...] = (
        ("verdict", "Verdict", verdict),
        ("run", "The run", identity),
        ("time", "Where the time goes", timings.phases),
        ("idle", "Idle, by cause", timings.idle),
        ("speed", "Speed and work", timings.speed),
        ("learning", "Learning", learned.learning),
        ("memory", "Memory", machine.memory),
        ("machine", "The machine", machine.machine),
        ("findings", "Findings over time", happened.findings),
        ("trials", "Trials", happened.trials),
        ("events", "What happened", happened.events),
        ("settings", "Settings", machine.settings),
        ("methods", "How it was measured", methods.methods),
    )
    run = snapshot.run
    words = [run.workload, run.device_name, run.precision] if run is not None else []
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.made_t))
    return Page(
        name=report.name,
        subtitle=", ".join(str(word) for word in words if word),
        status=(snapshot.status, _TONES.get(STATUS.get(snapshot.status, ("", ""))[1], "")),
        made=f"made {made} from {number(report.data.bytes_read)} bytes of record",
        sections=tuple(Section(key, title, _guarded(build, report)) for key, title, build in parts),
    )


def _guarded(build: Callable[[Report], list[Block]], report: Report) -> tuple[Block, ...]:
    try:
        return tuple(build(report))
    except _DAMAGE as error:
        text = f"This part of the record cannot be shown: {type(error).__name__}: {error}"
        return (Text(text, "warn"),)


# What holds it back.


def verdict(report: Report) -> list[Block]:
    """How it stands, then every finding, the verdict first."""
    out: list[Block] = [_standing(report)]
    if report.told.trouble:
        out.append(Text(report.told.trouble, "warn"))
    out += [_card(item, report.name, index == 0) for index, item in enumerate(report.told.findings)]
    return out


def _standing(report: Report) -> Text:
    snapshot = report.snapshot
    end = f"{snapshot.status} at step {number(snapshot.step)}"
    if snapshot.run is not None and snapshot.run.total_steps:
        end += f" of {number(snapshot.run.total_steps)}"
    if snapshot.elapsed_s:
        end += f" after {duration(snapshot.elapsed_s)} of training"
    reason = LOST if snapshot.status == "lost" else snapshot.reason
    if not snapshot.final:
        reason = f"the run goes on ({snapshot.stage})" if snapshot.stage else "the run goes on"
    elif not snapshot.step:
        end = f"{snapshot.status} before the first step"
    tone: Tone = "bad" if snapshot.status in ("failed", "lost") else ""
    return Text(f"{end[:1].upper()}{end[1:]}: {reason}." if reason else f"{end}.", tone)


def _card(finding: Finding, name: str, first: bool) -> Card:
    rows = [("evidence", f"{item.text} ({item.source})") for item in finding.evidence]
    for change in finding.changes:
        rows.append(("to try", change.text + (f" (in {change.where})" if change.where else "")))
        if change.sets:
            rows.append(("measure it", command_text(name, change.sets)))
    if finding.leave:
        rows.append(("leave it", finding.leave))
    badges = [CAUSES.get(finding.cause, finding.cause), finding.confidence]
    if finding.ceiling is not None:
        badges.append(f"removing it gains {ceiling_text(finding)}")
    tone: Tone = (
        "good" if finding.cause == "healthy" else "" if finding.cause in CALM or finding.leave else "warn"
    )
    return Card(finding.title, tuple(badges), tuple(rows), tone, first)


# What it is.


def identity(report: Report) -> list[Block]:
    """Model, data, machine, versions, and what differs from the defaults."""
    snapshot, data = report.snapshot, report.data
    run = snapshot.run
    if run is None:
        out: list[Block] = [
            Text("The run ended before it was prepared: it has no identity on record.", "note")
        ]
        return out
    threads = f", {number(run.threads)} thread{'' if run.threads == 1 else 's'}" if run.threads else ""
    cores = f", {number(run.usable_cores)} usable cores" if run.usable_cores else ""
    memory = (run.card or {}).get("memory_total_bytes")
    card = f", {size(memory)}" if memory else ""
    started = MISSING
    if snapshot.started_t is not None:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.started_t))
    rows = [
        ("workload", run.workload),
        ("model", f"{run.model}; {number(run.parameters)} parameters"),
        ("data", run.data),
        ("machine", f"{run.device_name} ({run.device}{threads}{cores}{card}) on host {run.host}"),
        ("precision", run.precision),
        (
            "a step",
            f"{number(run.items_per_step)} items ({run.item}), {number(run.steps_per_epoch)} steps an epoch",
        ),
        ("length", f"{number(run.total_steps)} steps, {number(run.epochs)} epochs"),
        ("versions", ", ".join(f"{name} {value}" for name, value in run.versions.items()) or MISSING),
        ("started", started),
    ]
    rows += [
        ("went on", f"from step {number(at.step)}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(at.t))}")
        for at in data.resumed
    ]
    if snapshot.end is not None:
        rows.append(("ended", f"{snapshot.end.status}, exit status {snapshot.end.exit_status}"))
        rows.append(("checkpoint", snapshot.end.checkpoint or MISSING))
    rows.append(("record", str(report.directory.path)))
    out = [Facts(tuple(rows))]
    if data.skipped:
        out.append(
            Text(
                f"{number(data.skipped)} lines of the record are damaged or of another kind; left out.",
                "warn",
            )
        )
    if snapshot.dropped_events:
        out.append(Text(f"{number(snapshot.dropped_events)} events could not be written.", "warn"))
    found = differences(run)
    if isinstance(found, str):
        out.append(Text(f"What differs from the defaults is not known: {found}", "note"))
    elif found:
        out.append(
            Table("Configuration that differs from the defaults", ("key", "this run", "default"), found)
        )
    else:
        out.append(Text("The configuration is that of the defaults.", "note"))
    return out
