"""A run in words: what it trains, how far and how fast it is, its ranks and settings, and how it ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ndd_engine.diagnose import ENDINGS, Finding, diagnose
from ndd_engine.record.event import ASIDES
from ndd_engine.record.events import EndEvent, RunEvent
from ndd_engine.record.figures import bad_loss_text, estimated_rate, is_script, setting
from ndd_engine.record.rundir import RunDir, resume_text
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import (
    MISSING,
    counted,
    duration,
    finite,
    foreign,
    number,
    percent,
    plural,
    printable,
    rate,
    size,
)

from .blocks import NamedValues, Text, moment, small
from .finding import Diagnosis, Rules, command_text, finding_line, first_command
from .ranks import late_words
from .step import PAUSED, micro_steps, step_time, work_short, work_texts

# In the summary of a run.
MOST_FINDINGS = 3
LOST = "the process ended unexpectedly (kill -9 or power loss?)"


def item_name(snapshot: Snapshot) -> str:
    """The plural of the workload's item."""
    return plural(foreign(snapshot.run.item)) if snapshot.run else "items"


def steps_rate(snapshot: Snapshot) -> str:
    """ "18.3 steps/s"; a step is an optimizer step."""
    return PAUSED if snapshot.status == PAUSED else rate(snapshot.steps_per_s, "steps")


def items_rate(snapshot: Snapshot) -> str:
    """ "4,687 segments/s"."""
    return PAUSED if snapshot.status == PAUSED else rate(snapshot.items_per_s, item_name(snapshot))


def tokens_rate(snapshot: Snapshot) -> str:
    """ "1,199,872 characters/s"; "" if items have no tokens."""
    run = snapshot.run
    if run is None or not run.token or not run.tokens_per_item or snapshot.status == PAUSED:
        return ""
    return rate(snapshot.tokens_per_s, plural(foreign(run.token)))


def estimated_text(snapshot: Snapshot) -> str:
    """ "4,100 to 7,800 segments/s estimated"; "" if nothing tells."""
    found = estimated_rate(snapshot)
    if found is None or snapshot.status == PAUSED:
        return ""
    return f"{number(found[0])} to {rate(found[1], item_name(snapshot))} estimated"


def rates(snapshot: Snapshot) -> list[str]:
    """All rates that apply to this run, and the time of an epoch."""
    texts = [steps_rate(snapshot), items_rate(snapshot), tokens_rate(snapshot)]
    if snapshot.run is not None and snapshot.run.steps_per_epoch:
        texts.append(f"epoch {duration(snapshot.epoch_s)}")
    return [text for text in texts if text]


def epoch_of(snapshot: Snapshot) -> str:
    """ "epoch 3/25"; without the total if it is unknown, "" for what has no epochs."""
    run = snapshot.run
    if run is None or is_script(run):
        return ""
    if not run.epochs:
        return "" if run.steps_per_epoch else f"epoch {snapshot.epoch + 1}"
    return f"epoch {min(snapshot.epoch + 1, run.epochs)}/{run.epochs}"


def time_left(snapshot: Snapshot) -> str:
    """ "1 h 12 m left"; "+" if evaluations or checkpoints are not included yet; "" while the run is paused."""
    if snapshot.status == PAUSED:
        return ""
    if snapshot.left.seconds is None:
        return f"time left {MISSING}"
    return f"{duration(snapshot.left.seconds)}{'+' if snapshot.left.without else ''} left"


def loss_text(snapshot: Snapshot) -> str:
    """ "loss 1.482", or "loss NaN since step 500"."""
    known = snapshot.not_finite
    return f"loss {small(snapshot.loss, 4) if known.loss is None else bad_loss_text(known)}"


def introduction(snapshot: Snapshot) -> list[str]:
    run = snapshot.run
    assert run is not None
    threads = counted(run.threads, "thread") if run.device == "cpu" and run.threads else ""
    lines = [
        f"run {run.name}: {run.workload}, {number(run.parameters or None)} parameters ({run.model})",
        f"on {', '.join(filter(None, (run.device_name, threads, precision_text(run))))}; {run.data}",
        f"{steps_text(snapshot, run)}; {epoch_text(snapshot, run)}",
    ]
    if run.resumed_step is not None:
        source = f" ({run.resumed_from})" if run.resumed_from else ""
        lines.append(f"resumed at step {number(run.resumed_step)}{source}")
    return lines


def steps_text(snapshot: Snapshot, run: RunEvent) -> str:
    """ "6,900 optimizer steps of 512 segments of 256 characters (2 micro-steps of 128 on each of 2 ranks)"."""
    accumulation, micro = setting(run, "batch", "accumulation"), setting(run, "batch", "micro")
    ranks = setting(run, "parallel", "ranks")
    parts = []
    if isinstance(accumulation, int) and accumulation > 1:
        parts.append(f"{number(accumulation)} micro-steps of {number(micro)}")
    if isinstance(ranks, int) and ranks > 1:
        parts.append(f"on each of {counted(ranks, 'rank')}" if parts else f"on {counted(ranks, 'rank')}")
    total = f"{number(run.total_steps)} " if run.total_steps else ""
    text = f"{total}optimizer steps of {number(run.items_per_step)} {item_name(snapshot)}"
    if run.token and run.tokens_per_item:
        about = "" if float(run.tokens_per_item).is_integer() else "about "
        text += f" of {about}{number(run.tokens_per_item)} {plural(printable(run.token))}"
    return f"{text} ({' '.join(parts)})" if parts else text


def epoch_text(snapshot: Snapshot, run: RunEvent) -> str:
    """ "one epoch is 276 steps, 70,656 segments, 18,087,936 characters"."""
    if not run.steps_per_epoch:
        until = f" (the run ends after {run.epochs})" if run.epochs and not run.total_steps else ""
        return f"the length of an epoch is unknown{until}"
    items = f"{number(run.items_per_epoch or None)} {item_name(snapshot)}"
    text = f"one epoch is {number(run.steps_per_epoch)} steps, {items}"
    each = finite(run.tokens_per_item)  # of a damaged record, it may be NaN
    if run.token and each and run.items_per_epoch:
        tokens = run.items_per_epoch * each
        text += f", {number(round(tokens) if abs(tokens) < 1e18 else tokens)} {plural(printable(run.token))}"
    return text


def model_text(run: RunEvent) -> str:
    return f"{run.model or MISSING}; {number(run.parameters or None)} parameters"


def versions_text(run: RunEvent) -> str:
    """ "torch 2.6.0, python 3.11.7"."""
    return ", ".join(f"{name} {value}" for name, value in run.versions.items()) or MISSING


def metrics_text(metrics: Mapping[str, float | None]) -> str:
    """ "loss 1.520, bits 2.19"."""
    return ", ".join(f"{name} {number(value, 4)}" for name, value in metrics.items()) or MISSING


def run_facts(
    snapshot: Snapshot,
    run: RunEvent,
    times: Sequence[tuple[float | None, str]],
    resumed: Sequence[tuple[int, float]],
    folder: Path,
) -> NamedValues:
    """Model, data, machine and versions. times: seconds, and of what. resumed: from which step, and when."""
    end, memory = snapshot.end, (run.gpu or {}).get("memory_total_bytes")
    device = (
        run.device,
        counted(run.threads, "thread") if run.threads else "",
        f"{number(run.usable_cores)} usable cores" if run.usable_cores else "",
        size(memory) if memory else "",
    )
    return NamedValues.of(
        ("workload", run.workload),
        ("model", model_text(run)),
        ("command" if is_script(run) else "data", run.data),
        ("machine", f"{run.device_name} ({', '.join(filter(None, device))}) on host {run.host}"),
        ("precision", precision_text(run)),
        ("steps", steps_text(snapshot, run)),
        ("epoch", "" if is_script(run) else epoch_text(snapshot, run)),
        ("versions", versions_text(run)),
        ("started", moment(snapshot.started_t)),
        ("time", ", ".join(f"{duration(seconds)} {kind}" for seconds, kind in times if seconds)),
        *(("resumed", f"from step {number(step)}, {moment(t)}") for step, t in resumed),
        ("ended", f"{end.status}, exit status {end.exit_status}" if end else ""),
        ("checkpoint", (end.checkpoint or MISSING) if end and not is_script(run) else ""),
        ("record", str(folder)),
    )


def ended_text(snapshot: Snapshot, preparation_s: float) -> Text:
    """How the run ended, or that it is live."""
    end = end_text(snapshot)
    reason = LOST if snapshot.status == "lost" else snapshot.reason
    if not snapshot.final:
        reason = f"the run is live ({snapshot.stage})" if snapshot.stage else "the run is live"
    elif not snapshot.step:
        end = f"{snapshot.status} before the first step"
        if preparation_s:
            end += f", after {duration(preparation_s)} of preparation"
    text = f"{end[:1].upper()}{end[1:]}" + (f": {reason}." if reason else ".")
    return Text(text, "bad" if snapshot.status in ("failed", "lost") else "")


def end_text(snapshot: Snapshot) -> str:
    """ "failed at step 33 of 1,500 after 1 min 32 s"."""
    run = snapshot.run
    text = f"{snapshot.status} at step {number(snapshot.step)}"
    if run is not None and run.total_steps:
        text += f" of {number(run.total_steps)}"
    return text + (f" after {duration(snapshot.elapsed_s)} of training" if snapshot.elapsed_s else "")


def progress_line(snapshot: Snapshot) -> str:
    """step 1,200/43,050  epoch 3/25  loss 1.482  18.3 steps/s  2,343 segments/s  idle 12 % (host)  1 h 12 m left"""
    run = snapshot.run
    total = f"/{number(run.total_steps)}" if run and run.total_steps else ""
    idle, left = percent(snapshot.idle.share), time_left(snapshot)
    if left and snapshot.left.without:
        left += f", excluding {' and '.join(snapshot.left.without)} (not measured yet)"
    parts = [
        f"step {number(snapshot.step)}{total}",
        epoch_of(snapshot),
        loss_text(snapshot),
        steps_rate(snapshot),
        items_rate(snapshot),
        tokens_rate(snapshot),
        micro_steps(snapshot),
        work_short(snapshot),
        late_words(snapshot),
        f"idle {idle} ({snapshot.idle.method})",
        left,
    ]
    return "  ".join(part for part in parts if part)


def summary(snapshot: Snapshot, end: EndEvent | None, folder: Path, rules: Rules = diagnose) -> list[str]:
    """The result of a run with its diagnosis, printed at its end, with control characters escaped."""
    result = Diagnosis(rules).of(snapshot)
    told = [finding for finding in result.findings if finding.cause != "too-short"][:MOST_FINDINGS]
    # A run that has trained and of which nothing else is known says that it ended too early to be judged.
    if snapshot.step or (end or snapshot).step:
        told = told or list(result.findings)
    return [printable(line) for line in (*_summary(snapshot, end, folder, told), result.trouble) if line]


def _summary(
    snapshot: Snapshot, end: EndEvent | None, folder: Path, findings: Sequence[Finding]
) -> Iterator[str]:
    status = end.status if end else snapshot.status
    reason = end.reason if end else "its process is gone" if snapshot.final else "the run continues"
    ending = [finding for finding in findings if finding.cause in ENDINGS]
    yield from map(finding_line, ending)
    yield reason if reason.startswith(status) else f"{status}: {reason}"
    run = snapshot.run
    yield from map(str, (end.data or {}).get("not_shown", ())) if end else ()
    # Of a script, also the steps of threads and processes that the figures leave out.
    steps = max(snapshot.step, end.step if end else 0)
    if run is not None and steps:
        items = f", {number(snapshot.items)} {item_name(snapshot)}" if snapshot.items else ""
        done = f"{counted(steps, 'optimizer step')}{items}"
        last = loss_text(snapshot)
        if snapshot.last_loss is not None and snapshot.not_finite.loss is None:
            at, value = snapshot.last_loss
            last = f"loss {small(value, 4)}" + (f" at step {number(at)}" if at < steps else "")
        parts = [f"{done} in {duration(snapshot.elapsed_s)}", f"last {last}"]
        if skipped := snapshot.not_finite.skipped:
            parts.append(f"{counted(skipped, 'update')} skipped by the gradient scaler")
        if steps == 1:  # its time says little
            parts.reverse()
        yield "; ".join(parts)
        phases = [phase for phase in snapshot.phases if "/" not in phase.name and phase.name not in ASIDES]
        top = sorted(phases, key=lambda phase: -phase.host_ns)[:4]
        if top and snapshot.step_ns:
            step_ns = snapshot.step_ns
            shares = ", ".join(f"{phase.name} {percent(phase.host_ns / step_ns)}" for phase in top)
            yield f"recent steps by phase: {shares}"
    if snapshot.step_ns is not None:
        yield f"{step_time(snapshot)}: {', '.join(rates(snapshot))}"
        if estimated := estimated_text(snapshot):
            yield f"{estimated} for this GPU"
        if work := work_texts(snapshot):
            yield ", ".join(work)
    if snapshot.best is not None:
        yield f"best evaluation at step {number(snapshot.best.step)}: {metrics_text(snapshot.best.metrics)}"
    lost = [setting.name for setting in snapshot.settings if setting.in_effect is False]
    if lost:
        yield f"requested but not in effect: {', '.join(lost)}"
    script = RunDir(folder).command.exists()
    for finding in findings:
        if run is not None and finding.cause == "out-of-memory":
            observed = is_script(run)
            yield from needs_less(finding, run.name if observed else str(RunDir(folder).config), observed)
        elif finding.cause == "too-short":
            yield finding.title
        elif run is not None and finding not in ending:
            command = first_command(run.name, [finding])
            yield finding_line(finding) + (f": {command}" if command else "")
    yield f"{'record' if script else 'record and checkpoints'}: {folder}"
    if end is not None and end.checkpoint and status not in ("done", "failed"):
        name = run.name if run is not None else folder.name
        yield resume_text(name)


def needs_less(finding: Finding, name: str, script: bool) -> Iterator[str]:
    """What would need less memory, and the commands that apply it. name: the run of a script, or a configuration."""
    yield f"{finding.title}; what needs less, the cheapest first:"
    for change in finding.changes:
        action = "try" if script else "train"
        command = f": {command_text(name, change.sets, action)}" if change.sets else ""
        yield f"  {change.text}{command}"
    for item in finding.evidence[1:]:  # the first one is the reason of the end
        yield f"  {item.text}"
    if not script:
        yield f"  memory and time of each, predicted: ndd-console check {shlex.quote(name)}"


def precision_text(run: RunEvent) -> str:
    """ "bf16 + compile"."""
    text = foreign(run.precision)
    compiled = setting(run, "speed", "compile") not in (None, False, "off")
    return f"{text} + compile" if compiled and "compile" not in text else text
