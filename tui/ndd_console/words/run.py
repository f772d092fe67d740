"""A run in words: what it trains, how far and how fast it is, its ranks and settings, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ndd_engine.diagnose import ENDINGS, Finding
from ndd_engine.diagnose.process_rules import milliseconds, subject
from ndd_engine.record.event import ASIDES, Ranks, RanksEvent
from ndd_engine.record.events import EndEvent, RunEvent, SettingEvent, WorkEvent
from ndd_engine.record.figures import bad_loss_text
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

from .blocks import NamedValues, Table, at_most, ns, small
from .finding import finding_line, first_command

# The status in which a run has no speed and no time left.
PAUSED = "paused"
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))

_STRATEGIES = {"ddp": "DDP", "fsdp2": "FSDP2"}
_ABOUT = (
    "Work is the wall time of a step without waiting for other ranks. Exchange is the shortest wait of any rank in a "
    "step; skew is the mean wait beyond it. Phases exclude waiting; their means, exchange and skew add up to the step."
)
# Columns of the table before the phases, with their headings.
_FIRST = {"own": "work", "wait": "wait", "cpu": "cpu"}
# In the summary of a run.
MOST_FINDINGS = 3
LOST = "the process ended unexpectedly (kill -9 or power loss?)"
# in_effect: as shown. Those without effect come first.
_EFFECTS = {False: "✖ not in effect", True: "✔ in effect", None: "· not requested"}
_UNREQUESTED = "Not requested: left at its default, so nothing is verified."


def on_gpu(run: RunEvent | None) -> bool:
    return run is not None and run.device.startswith("cuda")


def is_script(run: RunEvent | None) -> bool:
    return run is not None and "script" in run.config


def setting(run: RunEvent | None, section: str, key: str) -> Any:
    """A value of the resolved configuration; None if it is missing."""
    table = run.config.get(section) if run is not None and isinstance(run.config, dict) else None
    return table.get(key) if isinstance(table, dict) else None


def fits_text(snapshot: Snapshot, width: int = 100) -> str:
    """ "about batch 288 fits (predicted)", or a shorter form."""
    fits = snapshot.headroom.fits_micro
    if fits is None:
        return ""
    text = f"about batch {number(fits)} fits (predicted)"
    return text if len(text) <= width else f"predicted: batch {number(fits)} fits"


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


def step_time(snapshot: Snapshot) -> str:
    """ "step 54.6 ms (16 micro-steps of 3.41 ms)"; without accumulation only the step."""
    if snapshot.step_ns is None:
        return f"step {MISSING}"
    text = f"step {duration(snapshot.step_ns * 1e-9)}"
    micro = micro_steps(snapshot)
    return f"{text} ({micro})" if micro else text


def micro_steps(snapshot: Snapshot) -> str:
    """ "16 micro-steps of 3.41 ms", "" if a step has only one."""
    count = snapshot.micro_steps
    if count is None or count <= 1 or snapshot.step_ns is None:
        return ""
    return f"{number(count)} micro-steps of {duration(snapshot.step_ns / count * 1e-9)}"


def time_left(snapshot: Snapshot) -> str:
    """ "1 h 12 m left"; "+" if evaluations or checkpoints are not included yet; "" while the run is paused."""
    if snapshot.status == PAUSED:
        return ""
    if snapshot.left.seconds is None:
        return f"time left {MISSING}"
    return f"{duration(snapshot.left.seconds)}{'+' if snapshot.left.without else ''} left"


def flops(value: float | None) -> str:
    """ "1.24 TFLOP/s"."""
    return f"{prefixed(value)}FLOP/s"


def prefixed(value: float | None) -> str:
    """A count with an SI prefix: "4.21 T"."""
    if value is None:
        return f"{MISSING} "
    scale, letter = next(((scale, letter) for scale, letter in _PREFIXES if value >= scale), (1, ""))
    return f"{number(value / scale)} {letter}"


def _of_peak(share: float | None) -> str:
    """Two significant digits below 10 %, since tiny models stay far below 1 %: "34 %", "0.00053 %"."""
    return percent(share) if share is None or share >= 0.1 else f"{share * 100:.2g} %"


def work_texts(snapshot: Snapshot) -> list[str]:
    """FLOP/s, MFU of which peak, or why it is unknown, and the side of the roofline; [] before FLOPs are counted."""
    if snapshot.work is None or snapshot.work.flops_per_step is None or snapshot.status == PAUSED:
        return []
    throughput = snapshot.throughput
    mfu = f"MFU {MISSING}: {foreign(throughput.reason)}"
    if throughput.peak_flops_per_s is not None:
        peak = f"{flops(throughput.peak_flops_per_s)} ({foreign(throughput.peak_kind)} dense)"
        mfu = f"MFU {_of_peak(throughput.mfu)} of {peak}"
    intensity = f"intensity {MISSING}"
    if throughput.intensity is not None:
        side = f": {throughput.side}-bound side" if throughput.side else ""
        intensity = f"intensity {number(throughput.intensity)} FLOP/B{side}"
    return [flops(throughput.flops_per_s), mfu, intensity]


def work_short(snapshot: Snapshot) -> str:
    """ "1.24 TFLOP/s, MFU 34 %"; without a peak only FLOP/s, "" before FLOPs are counted."""
    throughput = snapshot.throughput
    if throughput.flops_per_s is None or snapshot.status == PAUSED:
        return ""
    mfu = "" if throughput.mfu is None else f", MFU {_of_peak(throughput.mfu)}"
    return flops(throughput.flops_per_s) + mfu


def work_facts(snapshot: Snapshot, work: WorkEvent) -> NamedValues:
    """The counts behind FLOP/s and MFU, and how they were made."""
    counted = work.flops_per_step
    forward = ""
    if counted and work.flops_forward is not None:
        forward = f", {percent(work.flops_forward / counted)} in the forward pass"
    total = sum(work.dtypes.values())
    types = ", ".join(
        f"{name} {percent(value / total)}" if total else name
        for name, value in sorted(work.dtypes.items(), key=lambda item: -item[1])
    )
    peak = f"{MISSING}: {work.reason}" if work.reason else MISSING
    if work.peak_tflops is not None:
        memory = f", memory {number(work.bandwidth_gb_s)} GB/s" if work.bandwidth_gb_s else ""
        source = f"; {work.peak_source}" if work.peak_source else ""
        peak = f"{number(work.peak_tflops)} TFLOP/s ({work.peak_kind} dense){memory}{source}"
    return NamedValues.of(
        ("operations", f"{prefixed(counted)}FLOP{forward}"),
        ("bytes", f"{size(work.bytes_per_step)} read and written without fusion (upper bound)"),
        ("now", ", ".join(work_texts(snapshot)) or MISSING),
        ("matmul types", types or MISSING),
        ("attention", ", ".join(work.attention) or "none detected"),
        ("not counted", ", ".join(work.uncounted)),
        ("peak", peak),
        ("method", work.method),
        title="Work per step",
    )


def ranks_words(snapshot: Snapshot) -> str:
    """ "8 ranks, DDP, 2 hosts", "8 of 16 ranks, DDP, 1 host"; "" for a single one."""
    if snapshot.ranks is not None:
        newest = snapshot.ranks.newest
        seen = counted(newest.world, "rank")
        if newest.launched is not None:
            seen = f"{newest.world:,} of {counted(newest.launched, 'rank')}"
        strategy, hosts = newest.strategy, counted(newest.hosts, "host")
    else:
        world, strategy = (setting(snapshot.run, "parallel", key) for key in ("ranks", "strategy"))
        if not isinstance(world, int) or world < 2:
            return ""
        seen, hosts = counted(world, "rank"), ""
    parts = (seen, _STRATEGIES.get(str(strategy), foreign(strategy or "")), hosts)
    return ", ".join(part for part in parts if part)


def late_words(snapshot: Snapshot) -> str:
    """ "2 ranks, slowest 1 (+7.9 ms data_wait)", "8 ranks, no straggler"; "" for a single one."""
    ranks = snapshot.ranks
    if ranks is None:
        return ""
    text = counted(ranks.newest.world, "rank")
    if (late := ranks.late) is None:
        return f"{text}, no straggler"
    slowest = str(late["rank"]) if int(late.get("count", 1)) == 1 else subject(late)[0]
    return f"{text}, slowest {slowest} (+{milliseconds(late['late_ns'])} {foreign(late['phase'])})"


def rank_rows(event: RanksEvent) -> dict[int, dict[str, float]]:
    """The recorded rows, slowest first: rank -> figures in microseconds per step by name."""
    rows = {
        int(rank): dict(zip(event.row_names, figures, strict=False))
        for rank, figures in event.rows_us.items()
        if rank.isdecimal() and len(rank) < 10
    }
    return dict(sorted(rows.items(), key=lambda item: -item[1].get("own", 0.0)))


def late_text(ranks: Ranks) -> str:
    """The straggler with its host, phase, code and ceiling, in one sentence."""
    late = ranks.late
    if late is None:
        return "none"
    who, several = subject(late)
    host = f" on {late['host']}" if late.get("host") and not late.get("same_host") else ""
    text = (
        f"{who}{host}: +{milliseconds(late['late_ns'])} a step, +{milliseconds(late['phase_ns'])} in {late['phase']}, "
        f"since step {number(late.get('since_step'))}; without {'them' if several else 'it'} {at_most(late['ceiling'])}"
    )
    return text + (f"; {late['where']}" if late.get("where") else "")


def ranks_facts(snapshot: Snapshot, ranks: Ranks) -> NamedValues:
    """The parts of a step, the straggler, and the memory of the ranks."""
    step, hidden = ranks.step_ns or 1.0, f"{ns(ranks.hidden_ns)} of exchange, hidden by work"
    parts = (
        (label, f"{ns(value)} ({percent(value / step)})")
        for label, value in (("work", ranks.own_ns), ("exchange", ranks.exchange_ns), ("skew", ranks.skew_ns))
    )
    memory = (
        (label, f"{size(figures[0])} to {size(figures[3])} (rank {number(figures[4])})")
        for name, label in (("rss", "RSS"), ("allocated", "GPU memory"))
        if (figures := ranks.newest.memory_bytes.get(name))
    )
    return NamedValues.of(
        ("ranks", f"{ranks_words(snapshot)}, at step {number(ranks.newest.step)}"),
        ("step", f"{ns(ranks.step_ns)} on average of the ranks"),
        *parts,
        ("overlapped", MISSING if ranks.hidden_ns is None else hidden),
        ("straggler", late_text(ranks)),
        *memory,
        warn=frozenset({"straggler"} if ranks.late is not None else ()),
    )


def slowest(newest: RanksEvent) -> Table:
    """The recorded rows, slowest first, and a summary of all ranks; the longest phases come first."""
    first = [name for name in _FIRST if name in newest.row_names]
    phases = [name for name in newest.row_names if name not in _FIRST]
    means = {name: newest.columns_us[name][2] if name in newest.columns_us else 0.0 for name in phases}
    names = [*first, *sorted(phases, key=lambda name: -means[name])]
    least, median = newest.columns_us.get("own", (0.0, 0.0))[:2]
    usual = least if newest.world == 2 else median
    hosts = ("host",) if newest.row_hosts else ()
    rows = []
    ranks = rank_rows(newest)
    for rank, row in ranks.items():
        later = row.get("own", 0.0) - usual
        figures = [ns(row[name] * 1e3) if name in row else MISSING for name in names]
        host = (newest.row_hosts.get(str(rank), ""),) if hosts else ()
        rows.append((str(rank), *host, f"{later / 1e3:+.1f} ms", *figures))
    for at, word in enumerate(("least", "median", "mean", "most")):
        summary = (newest.columns_us.get(name) for name in names)
        cells = (ns(figures[at] * 1e3) if figures else MISSING for figures in summary)
        rows.append((word, *("" for _ in hosts), "", *cells))
    columns = ("rank", *hosts, "later", *(_FIRST.get(name, name) for name in names))
    note = f"The newest window, per step; the rows below the ranks are of all {counted(newest.world, 'rank')}. {_ABOUT}"
    right = frozenset(range(1 + len(hosts), len(columns)))
    late = frozenset(index for index, rank in enumerate(ranks) if newest.late and newest.late["rank"] == rank)
    return Table("Slowest ranks", columns, tuple(rows), right, note, wide=len(hosts), warn=late)


def phases_table(snapshot: Snapshot, ranks: Ranks) -> Table:
    """The phases of a step: means over the ranks, and the longest."""
    rows = []
    for phase in snapshot.phases:
        longest, rank = ranks.longest.get(phase.name, (None, None))
        whose = MISSING if longest is None else "varies" if rank is None else f"rank {number(rank)}"
        if phase.host_ns > 0:
            share = percent(phase.host_ns / (ranks.step_ns or 1.0))
            rows.append((phase.name, ns(phase.host_ns), share, ns(longest), whose))
    columns = ("phase", "mean per step", "share", "longest", "of")
    note = f"The most recent {counted(ranks.windows, 'window')}."
    return Table("Phases of all ranks", columns, tuple(rows), frozenset({1, 2, 3}), note, wide=0)


def loss_text(snapshot: Snapshot) -> str:
    """ "loss 1.482", or "loss NaN since step 500"."""
    known = snapshot.not_finite
    return f"loss {small(snapshot.loss, 4) if known.loss is None else bad_loss_text(known)}"


def introduction(snapshot: Snapshot) -> list[str]:
    run = snapshot.run
    assert run is not None
    threads = f", {counted(run.threads, 'thread')}" if run.device == "cpu" and run.threads else ""
    lines = [
        f"run {run.name}: {run.workload}, {number(run.parameters or None)} parameters ({run.model})",
        f"on {run.device_name}{threads}{f', {run.precision}' if run.precision else ''}; {run.data}",
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


def summary(
    snapshot: Snapshot, end: EndEvent | None, folder: str, findings: Iterable[Finding], trouble: str = ""
) -> list[str]:
    """The result of a run, printed at its end, with control characters escaped. trouble: why there are no findings."""
    said = [finding for finding in findings if finding.cause != "too-short"][:MOST_FINDINGS]
    lines = [*_summary(snapshot, end, folder, said), *([trouble] if trouble else [])]
    return [printable(line) for line in lines]


def _summary(
    snapshot: Snapshot, end: EndEvent | None, folder: str, findings: Sequence[Finding]
) -> Iterator[str]:
    status = end.status if end else snapshot.status
    reason = end.reason if end else "the run continues"
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
        if work := work_texts(snapshot):
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
        yield resume_text(name)


def settings_table(settings: Sequence[SettingEvent]) -> Table:
    """Those that are not in effect first, defaults last."""
    order = list(_EFFECTS)
    ordered = sorted(settings, key=lambda setting: order.index(setting.in_effect))
    rows = []
    for setting in ordered:
        values = setting.requested, setting.applied, setting.verified or ""
        rows.append((_EFFECTS[setting.in_effect], setting.name, *values))
    lost = frozenset(index for index, setting in enumerate(ordered) if setting.in_effect is False)
    columns = ("effect", "setting", "requested", "applied", "verified by")
    note = _UNREQUESTED if ordered and ordered[-1].in_effect is None else ""
    return Table("", columns, tuple(rows), note=note, warn=lost)
