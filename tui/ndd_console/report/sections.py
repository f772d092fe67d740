"""The sections of a report: the verdict, the measured gains, the details, and how each figure was measured."""

from __future__ import annotations

import json
from collections.abc import Callable

from ndd_console.view.style import STATUS
from ndd_console.words.blocks import TONES, Block, Facts, Page, Section, Table, Text
from ndd_console.words.figures import moment
from ndd_console.words.finding import verdict as finding_block
from ndd_console.words.run import LOST, end_text, epoch_text, model_text, steps_text, versions_text
from ndd_console.words.step import is_script
from ndd_console.words.trial import trials_blocks
from ndd_engine.config import read
from ndd_engine.errors import ConfigError
from ndd_engine.record.events import RunEvent
from ndd_engine.record.file import damage_text
from ndd_engine.text import MISSING, counted, duration, number, size
from ndd_engine.trial.outcome import flatten

from . import events, learning, machine, timings
from .model import Report

# The name of a run is not a setting; `path` is where your own workload was found.
_LEFT_OUT = frozenset({"run.name", "workload.path"})
# A record may hold anything: a section that cannot be shown does not cost the page.
_DAMAGE = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError)


def page(report: Report) -> Page:
    """The whole report."""
    snapshot = report.snapshot
    parts: tuple[tuple[str, str, Callable[[Report], list[Block]]], ...] = (
        ("verdict", "Verdict", verdict),
        ("trials", "Measured gains", trials),
        ("run", "Run", identity),
        ("time", "Where the time goes", timings.phases),
        *((("ranks", "Ranks", timings.ranks),) if snapshot.ranks is not None else ()),
        ("idle", "Idle time by cause", timings.idle),
        ("speed", "Throughput and compute", timings.speed),
        ("learning", "Learning", learning.learning),
        ("memory", "Memory", machine.memory),
        ("machine", "Machine", machine.machine),
        ("findings", "Findings over time", events.findings),
        ("events", "Events", events.events),
        ("settings", "Settings", machine.settings),
        ("methods", "How it was measured", timings.methods),
    )
    run = snapshot.run
    words = [run.workload, run.device_name, run.precision] if run is not None else []
    return Page(
        name=report.name,
        subtitle=", ".join(str(word) for word in words if word),
        status=(snapshot.status, TONES.get(STATUS.get(snapshot.status, ("", ""))[1], "")),
        summary=_summary(report),
        made=f"written {moment(report.made_t)} from {number(report.data.bytes_read)} bytes of record",
        sections=tuple(Section(key, title, _guarded(build, report)) for key, title, build in parts),
    )


def _guarded(build: Callable[[Report], list[Block]], report: Report) -> tuple[Block, ...]:
    try:
        return tuple(block for block in build(report) if not isinstance(block, Table) or block.rows)
    except _DAMAGE as error:
        text = f"This part of the record cannot be shown: {type(error).__name__}: {error}"
        return (Text(text, "warn"),)


def _summary(report: Report) -> Text:
    """How the run ended, or that it is still running."""
    snapshot = report.snapshot
    end = end_text(snapshot)
    reason = LOST if snapshot.status == "lost" else snapshot.reason
    if not snapshot.final:
        reason = f"the run is live ({snapshot.stage})" if snapshot.stage else "the run is live"
    elif not snapshot.step:
        end = f"{snapshot.status} before the first step"
        if report.data.preparation_s:
            end += f", after {duration(report.data.preparation_s)} of preparation"
    text = f"{end[:1].upper()}{end[1:]}" + (f": {reason}." if reason else ".")
    return Text(text, "bad" if snapshot.status in ("failed", "lost") else "")


def verdict(report: Report) -> list[Block]:
    """Every finding, the bottleneck first."""
    out: list[Block] = [Text(report.trouble, "warn")] if report.trouble else []
    out += [finding_block(finding, report.name, index == 0) for index, finding in enumerate(report.findings)]
    if any(finding.share is not None for finding in report.findings):
        text = "Shares and ceilings of the findings are those of the most recent part of the record."
        out.append(Text(text, "note"))
    return out or [Text("No findings.", "note")]


def trials(report: Report) -> list[Block]:
    """Every trial with its confidence interval and its effect on memory and loss."""
    return trials_blocks([trial for _, trial in report.data.trials], report.name)


def identity(report: Report) -> list[Block]:
    """Model, data, machine, versions, and the configuration that differs from the defaults."""
    snapshot, data = report.snapshot, report.data
    run = snapshot.run
    damage: list[Block] = [Text(f"{damage_text(data.skipped)}.", "warn")] if data.skipped else []
    if run is None:
        text = "Model, data and machine were not recorded"
        return [*damage, Text(f"{text}." if damage else f"{text}: the run was not prepared.", "note")]
    end, memory = snapshot.end, (run.gpu or {}).get("memory_total_bytes")
    device = (
        run.device,
        counted(run.threads, "thread") if run.threads else "",
        f"{number(run.usable_cores)} usable cores" if run.usable_cores else "",
        size(memory) if memory else "",
    )
    times = (
        (data.preparation_s, "of preparation"),
        (snapshot.elapsed_s, "of training with evaluations and checkpoints"),
        (report.paused_s, "paused"),
    )
    facts = Facts.of(
        ("workload", run.workload),
        ("model", model_text(run)),
        ("data", run.data),
        ("machine", f"{run.device_name} ({', '.join(filter(None, device))}) on host {run.host}"),
        ("precision", run.precision),
        ("steps", steps_text(snapshot, run)),
        ("epoch", epoch_text(snapshot, run)),
        ("versions", versions_text(run)),
        ("started", moment(snapshot.started_t)),
        ("time", ", ".join(f"{duration(seconds)} {kind}" for seconds, kind in times if seconds)),
        *(("resumed", f"from step {number(at.step)}, {moment(at.t)}") for at in data.resumed),
        ("ended", f"{end.status}, exit status {end.exit_status}" if end else ""),
        ("checkpoint", (end.checkpoint or MISSING) if end else ""),
        ("record", str(report.directory.path)),
    )
    out: list[Block] = [*damage, facts]
    if snapshot.dropped_events:
        out.append(Text(f"{number(snapshot.dropped_events)} events could not be written.", "warn"))
    # A script has no configuration with defaults.
    return out if is_script(run) else [*out, differences(run)]


def differences(run: RunEvent) -> Block:
    """Every configuration value that differs from the defaults of the workload at its size."""
    workload = run.config.get("workload")
    size = workload.get("size") if isinstance(workload, dict) else None
    size = size if isinstance(size, str) else None
    own = run.config.get("run")
    length = {key: own[key] for key in ("epochs", "max_steps") if isinstance(own, dict) and own.get(key)}
    try:
        try:
            defaults = read(workload=run.workload).resolve(size)
        except ConfigError:  # a workload without a default length: that of the run
            defaults = read(workload=run.workload, overrides={"run": length}).resolve(size)
    except ConfigError as error:
        why = str(error).splitlines()[0]
        return Text(f"The configuration cannot be compared with the defaults: {why}", "note")
    base = flatten(defaults.model_dump(mode="json"))
    rows = tuple(
        (key, _toml(value), _toml(base[key]) if key in base else MISSING)
        for key, value in flatten(run.config).items()
        if key not in _LEFT_OUT and (key not in base or base[key] != value)
    )
    if not rows:
        return Text("All configuration values are the defaults.", "note")
    return Table("Configuration that differs from the defaults", ("key", "this run", "default"), rows)


def _toml(value: object) -> str:
    """The value as in TOML; None is a value that is chosen when the run is prepared."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
