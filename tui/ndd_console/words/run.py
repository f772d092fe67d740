"""A run in words: what it trains, how far it is, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ndd_engine.diagnose import ENDINGS, Finding, diagnose
from ndd_engine.record.events import EndEvent, RunEvent
from ndd_engine.record.figures import bad_loss_text
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import MISSING, counted, duration, number, plural, printable

from . import step
from .figures import percent, small
from .finding import finding_line, first_command
from .ranks import late_words

# In the summary of a run.
MOST_FINDINGS = 3
LOST = "the process ended unexpectedly (kill -9 or power loss?)"


def loss_text(snapshot: Snapshot) -> str:
    """ "loss 1.482", or "loss NaN since step 500"."""
    known = snapshot.not_finite
    return f"loss {small(snapshot.loss, 4) if known.loss is None else bad_loss_text(known)}"


def _last_loss_text(snapshot: Snapshot, steps: int) -> str:
    """ "last loss 1.482", "last loss 1.482 at step 298" if steps came after it. steps: of the run."""
    if snapshot.last_loss is None or snapshot.not_finite.loss is not None:
        return f"last {loss_text(snapshot)}"
    at, value = snapshot.last_loss
    return f"last loss {small(value, 4)}" + (f" at step {number(at)}" if at < steps else "")


def introduction(snapshot: Snapshot) -> list[str]:
    """The run, its device, and the size of a step and an epoch."""
    run = snapshot.run
    assert run is not None
    threads = f", {counted(run.threads, 'thread')}" if run.device == "cpu" and run.threads else ""
    lines = [
        f"run {run.name}: {run.workload}, {number(run.parameters or None)} parameters ({run.model})",
        f"on {run.device_name}{threads}, {run.precision}; {run.data}",
        f"{steps_text(snapshot, run)}; {epoch_text(snapshot, run)}",
    ]
    if run.resumed_step is not None:
        source = f" ({run.resumed_from})" if run.resumed_from else ""
        lines.append(f"resumed at step {number(run.resumed_step)}{source}")
    return lines


def steps_text(snapshot: Snapshot, run: RunEvent) -> str:
    """ "6,900 optimizer steps of 512 windows of 256 characters (2 micro-steps of 128 on each of 2 ranks)"."""
    accumulation, micro = step.setting(run, "batch", "accumulation"), step.setting(run, "batch", "micro")
    ranks = step.setting(run, "parallel", "ranks")
    parts = []
    if isinstance(accumulation, int) and accumulation > 1:
        parts.append(f"{number(accumulation)} micro-steps of {number(micro)}")
    if isinstance(ranks, int) and ranks > 1:
        parts.append(f"on each of {counted(ranks, 'rank')}" if parts else f"on {counted(ranks, 'rank')}")
    total = f"{number(run.total_steps)} " if run.total_steps else ""
    text = f"{total}optimizer steps of {number(run.items_per_step)} {step.item_name(snapshot)}"
    if run.token and run.tokens_per_item:
        about = "" if float(run.tokens_per_item).is_integer() else "about "
        text += f" of {about}{number(run.tokens_per_item)} {plural(printable(run.token))}"
    return f"{text} ({' '.join(parts)})" if parts else text


def epoch_text(snapshot: Snapshot, run: RunEvent) -> str:
    """ "one epoch is 276 steps, 70,656 windows, 18,087,936 characters"."""
    if not run.steps_per_epoch:
        until = f" (the run ends after {run.epochs})" if run.epochs and not run.total_steps else ""
        return f"the length of an epoch is unknown{until}"
    items = f"{number(run.items_per_epoch or None)} {step.item_name(snapshot)}"
    text = f"one epoch is {number(run.steps_per_epoch)} steps, {items}"
    if run.token and run.tokens_per_item and run.items_per_epoch:
        tokens = number(round(run.items_per_epoch * run.tokens_per_item))
        text += f", {tokens} {plural(printable(run.token))}"
    return text


def model_text(run: RunEvent) -> str:
    """The model and its size."""
    return f"{run.model or MISSING}; {number(run.parameters or None)} parameters"


def versions_text(run: RunEvent) -> str:
    """ "torch 2.6.0, python 3.11.7"."""
    return ", ".join(f"{name} {value}" for name, value in run.versions.items()) or MISSING


def metrics_text(metrics: Mapping[str, float | None]) -> str:
    """ "loss 1.520, bits 2.19"."""
    return ", ".join(f"{name} {number(value, 4)}" for name, value in metrics.items()) or MISSING


def end_text(snapshot: Snapshot) -> str:
    """ "failed at step 33 of 1,500 after 1 min 32 s"."""
    run = snapshot.run
    text = f"{snapshot.status} at step {number(snapshot.step)}"
    if run is not None and run.total_steps:
        text += f" of {number(run.total_steps)}"
    return text + (f" after {duration(snapshot.elapsed_s)} of training" if snapshot.elapsed_s else "")


def progress_line(snapshot: Snapshot) -> str:
    """step 1,200/43,050  epoch 3/25  loss 1.482  18.3 steps/s  2,343 windows/s  idle 12 % (host)  1 h 12 m left"""
    run = snapshot.run
    total = f"/{number(run.total_steps)}" if run and run.total_steps else ""
    idle = percent(snapshot.idle.share)
    parts = [
        f"step {number(snapshot.step)}{total}",
        step.epoch_of(snapshot),
        loss_text(snapshot),
        step.steps_rate(snapshot),
        step.items_rate(snapshot),
        step.tokens_rate(snapshot),
        step.micro_steps(snapshot),
        step.work_short(snapshot),
        late_words(snapshot),
        f"idle {idle} ({snapshot.idle.method})",
        step.time_left_in_words(snapshot),
    ]
    return "  ".join(part for part in parts if part)


def summary(snapshot: Snapshot, end: EndEvent | None, folder: str) -> list[str]:
    """The result of a run, printed at its end, with control characters escaped."""
    return [printable(line) for line in _summary(snapshot, end, folder)]


def _summary(snapshot: Snapshot, end: EndEvent | None, folder: str) -> Iterator[str]:
    status = end.status if end else snapshot.status
    reason = end.reason if end else "the run continues"
    findings = first_findings(snapshot)
    ending = [finding for finding in findings if finding.cause in ENDINGS]
    yield from map(finding_line, ending)
    yield reason if reason.startswith(status) else f"{status}: {reason}"
    run = snapshot.run
    yield from map(str, (end.data or {}).get("not_shown", ())) if end else ()
    # Of a script, also the steps of threads and processes that the figures leave out.
    steps = max(snapshot.step, end.step if end else 0)
    if run is not None and steps:
        items = f", {number(snapshot.items)} {step.item_name(snapshot)}" if snapshot.items else ""
        done = f"{counted(steps, 'optimizer step')}{items}"
        parts = [f"{done} in {duration(snapshot.elapsed_s)}", _last_loss_text(snapshot, steps)]
        if skipped := snapshot.not_finite.skipped:
            parts.append(f"{counted(skipped, 'update')} skipped by the gradient scaler")
        if steps == 1:  # its time says little
            parts.reverse()
        yield "; ".join(parts)
        aside = ("evaluate", "checkpoint")
        phases = [phase for phase in snapshot.phases if "/" not in phase.name and phase.name not in aside]
        top = sorted(phases, key=lambda phase: -phase.host_ns)[:4]
        if top and snapshot.step_ns:
            step_ns = snapshot.step_ns
            shares = ", ".join(f"{phase.name} {percent(phase.host_ns / step_ns)}" for phase in top)
            yield f"recent steps by phase: {shares}"
    if snapshot.step_ns is not None:
        yield f"{step.step_time(snapshot)}: {', '.join(step.rates(snapshot))}"
        if work := step.work_texts(snapshot):
            yield ", ".join(work)
    if snapshot.best is not None:
        yield f"best evaluation at step {number(snapshot.best.step)}: {metrics_text(snapshot.best.metrics)}"
    lost = [setting.name for setting in snapshot.settings if setting.in_effect is False]
    if lost:
        yield f"requested but not in effect: {', '.join(lost)}"
    script = RunDir(Path(folder)).command.exists()
    for finding in findings:
        if run is not None and finding not in ending:
            command = first_command(run.name, [finding])
            yield finding_line(finding) + (f": {command}" if command else "")
    yield f"{'record' if script else 'record and checkpoints'}: {folder}"
    if end is not None and end.checkpoint and status not in ("done", "failed"):
        name = run.name if run is not None else Path(folder).name
        yield f"resume with: ndd-console train --resume {name}"


def first_findings(snapshot: Snapshot) -> list[Finding]:
    """The first findings of a run; [] where nothing is found."""
    try:
        return [finding for finding in diagnose(snapshot) if finding.cause != "too-short"][:MOST_FINDINGS]
    except Exception:  # noqa: BLE001  a defect in a rule must not cost the summary
        return []
