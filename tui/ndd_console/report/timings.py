"""Where the time goes: phases, ranks, idle time by cause, throughput and compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ndd_console.words.blocks import Block, Layer, NamedValues, Stack, Table, Text, at_most, ns
from ndd_console.words.finding import POTENTIAL_GAIN
from ndd_console.words.ranks import phases_table, ranks_facts, slowest
from ndd_console.words.run import rates
from ndd_console.words.step import (
    METHODS,
    capture,
    colour,
    functions,
    idle_bars,
    stacks,
    step_time,
    work_facts,
)
from ndd_console.words.workers import are_known, workers_blocks
from ndd_engine.diagnose.process_rules import milliseconds
from ndd_engine.record.event import ASIDES
from ndd_engine.record.events import RunEvent
from ndd_engine.record.figures import idle as idle_of
from ndd_engine.record.figures import on_gpu, phase_shares, place_in_step
from ndd_engine.text import MISSING, number, percent, plural

from .model import SLICES, Report, Slice

RANK_0 = " These are the phases of rank 0, with its waiting for other ranks; see Ranks."
NO_STEPS = "No step was measured."
SMALLEST = 0.01  # layers below this share of the whole run are drawn as one
Shares = dict[str, float]


def phases(report: Report) -> list[Block]:
    """Phases over time and in figures, the time of a step, and the functions that take it."""
    data = report.data
    whole = data.timeline.whole
    if not whole.wall_ns:
        return [Text(NO_STEPS, "note")]
    by_rank = sorted(whole.host.items(), key=lambda item: place_in_step(item[0]))
    total = {name: value / whole.wall_ns for name, value in by_rank if "/" not in name}

    def shares(item: Slice) -> Shares:
        return {name: value / item.wall_ns for name, value in item.host.items()}

    stack = _stack(report, "Share of wall time by phase", shares, total)
    note = "Host clock. Excludes pauses, profiler captures and profiled steps; gaps were not recorded."
    note += RANK_0 if report.snapshot.ranks is not None else ""
    code: list[Block] = []
    if data.functions is not None:
        code.append(functions(report.snapshot, data.functions))
    elif data.stacks is not None:
        code.append(stacks(data.stacks))
    if are_known(report.snapshot):
        code += workers_blocks(report.snapshot)
    series = (("p50", "median (p50)", "blue"), ("p95", "p95", "orange"), ("max", "max", "vermillion"))
    lines = [report.line(f"step_{key}_ns", name, tint, 1e-9) for key, name, tint in series]
    about = "Each is computed per measuring interval of the record; a point is the mean of neighbouring ones."
    times = report.plot("Time of an optimizer step", "seconds", *lines, zero=True, log_above=20, note=about)
    return [replace(stack, note=note), _table(report, whole), *times, *code]


def _stack(report: Report, title: str, shares: Callable[[Slice], Shares], whole: Shares) -> Stack:
    """The shares of each slice as layers in the order of `whole`; small ones are summed."""
    width, slices = report.data.timeline.slices(SLICES)
    columns = {index: shares(item) for index, item in slices.items()}
    small = [name for name, share in whole.items() if 0 < share < SMALLEST]
    small = small if len(small) > 1 else []
    large = [name for name, share in whole.items() if share > 0 and name not in small]
    groups = [(name, colour(name, index), [name]) for index, name in enumerate(large)]
    groups += [("below 1 % each", "faint", small)] if small else []
    layers = []
    for name, tint, names in groups:
        values = {index: sum(column.get(part, 0.0) for part in names) for index, column in columns.items()}
        layers.append(Layer(name, tint, values, sum(whole[part] for part in names)))
    return Stack(title, tuple(layers), tuple(slices), width, report.time)


def _table(report: Report, whole: Slice) -> Table:
    recent = {phase.name: phase for phase in report.snapshot.phases}
    gpu = ("GPU per step",) if whole.device else ()
    columns = ("phase", "time", "share", "per step", *gpu, "recent mean", "p50", "p95", "max")
    rows = []
    for name, value in sorted(whole.host.items(), key=lambda item: place_in_step(item[0])):
        if value <= 0:
            continue
        parent, slash, part = name.partition("/")
        now = recent.get(name)
        figures: list[float | None] = [whole.device_step_ns(name)] if gpu else []
        # Time before the first step or after the last one of an interval is in the mean only, as of evaluations.
        inside = now is not None and now.max_ns is not None and now.max_ns >= now.host_ns
        figures.append(now.host_ns if now else None)
        figures += [now.p50_ns, now.p95_ns, now.max_ns] if now and inside else [None] * 3
        label = f"· {part}" if slash else parent
        each = ns(value / whole.steps if whole.steps else None)
        if parent in ASIDES and whole.steps:
            each = f"+{each}"
        rows.append((label, ns(value), percent(value / whole.wall_ns), each, *map(ns, figures)))
    mean = f", a mean of {ns(whole.stepping_ns / whole.steps)} per step" if whole.steps else ""
    note = (
        f"Over {number(round(whole.steps))} steps{mean}, in {ns(whole.wall_ns)} of wall time, of which the shares are. "
        "Evaluations and checkpoints come on top of a step (+). The last four columns cover the most recent part of "
        "the record; p50, p95 and max are of its steps, and n/a for time between them. Rows marked · are part of the "
        "phase above."
    )
    return Table("Phases", columns, tuple(rows), frozenset(range(1, len(columns))), note, wide=0)


def ranks(report: Report) -> list[Block]:
    """Exchange and skew over time, the slowest ranks, and which ranks were stragglers; [] for a run with one rank."""
    latest = report.snapshot.ranks
    if latest is None:
        return []
    shares = (("exchange", "blue"), ("skew", "orange"))
    lines = (report.line(f"ranks {name}", name, tint) for name, tint in shares)
    over = report.plot("Exchange and skew", "share", *lines, zero=True, note="Share of the wall time.")
    delay = report.line("ranks late_ns", "work beyond that of the median rank", "vermillion", 1e-9)
    late = report.plot("Delay of the straggler in a step", "seconds", delay, zero=True)
    rows = tuple(
        (
            f"{number(span.first_step)} to {number(span.last_step)}", str(span.rank), span.host, span.phase,
            milliseconds(span.most_ns), at_most(span.ceiling),
        )
        for span in report.data.late
    )  # fmt: skip
    columns = ("steps", "rank", "host", "phase", "later by up to", "without it")
    spans = Table("Stragglers", columns, rows, frozenset({0, 1, 4, 5}))
    tables = (phases_table(report.snapshot, latest), slowest(latest.newest), spans)
    return [ranks_facts(report.snapshot, latest), *over, *late, *tables]


def idle(report: Report) -> list[Block]:
    """Idle time of the whole run by cause, over time, and exactly for each profiler capture."""
    data = report.data
    run = data.run or report.snapshot.run
    whole = data.timeline.whole
    captures = [block for at, item in list(data.captures)[-3:] for block in capture(item, at.step)]
    if not whole.wall_ns or run is None:
        return captures or [Text(NO_STEPS, "note")]
    what = "GPU idle" if on_gpu(run) else "Compute idle"
    window = whole.as_window()
    idle_time = idle_of(run, [window], phase_shares([window]), None)
    if idle_time.share is None:
        busy = report.line("gpu util_percent", "share of time with a running kernel", "blue", 0.01)
        if busy is None:
            return [*captures, Text(f"{what} {MISSING}: {idle_time.reason}", "note")]
        text = f"{what} {percent(1 - (busy.mean or 0.0))} ({METHODS['nvml']})."
        return [Text(text), *report.plot("GPU utilization", "share", busy, zero=True), *captures]
    causes = {cause: share for cause, share in idle_time.causes if share > 0}
    title = f"{what} {percent(idle_time.share)} of the whole run"
    method = METHODS.get(idle_time.method, idle_time.method)
    bars = idle_bars(title, causes, f"Share of wall time. Measured with {method}.")
    return [bars, *_idle_over_time(report, run, causes, what), *captures]


def _idle_over_time(report: Report, run: RunEvent, causes: Shares, what: str) -> list[Block]:
    def shares(item: Slice) -> Shares:
        part = item.as_window()
        return dict(idle_of(run, [part], phase_shares([part]), None).causes)

    stack = _stack(report, f"{what} over time, by cause", shares, causes)
    heights = sorted(sum(layer.values[slot] for layer in stack.layers) for slot in stack.slots)
    if not heights or heights[-1] <= 0:
        return []
    # A single high column, as at the end of a run, would flatten all others.
    usual = heights[min(len(heights) - 1, int(0.98 * len(heights)))]
    top = next((mark for mark in (0.05, 0.1, 0.2, 0.5) if usual <= mark), 1.0)
    note = "Share of wall time." + (" The highest columns are cut off." if heights[-1] > top else "")
    return [replace(stack, top=top, note=note)]


def speed(report: Report) -> list[Block]:
    """Throughput over time, the rates, and the compute of a step against the peak of the device."""
    data, snapshot = report.data, report.snapshot
    whole = data.timeline.whole
    mean = whole.items / (whole.stepping_ns * 1e-9) if whole.stepping_ns > 0 else 0.0

    def items_per_s(item: Slice) -> float | None:
        """None where there was hardly any training."""
        trained = item.steps > 0 and item.stepping_ns > 0.05 * item.wall_ns
        return item.items / (item.stepping_ns * 1e-9) if trained else None

    line = report.sliced("training", "blue", mean, items_per_s)
    unit = f"{plural(snapshot.run.item) if snapshot.run is not None else 'items'}/s"
    note = "Training only: excludes evaluation, checkpoints and pauses."
    out = report.plot("Throughput", "plain", line, unit=unit, zero=True, note=note)
    if snapshot.step_ns is None:
        return out or [Text(NO_STEPS, "note")]
    out.append(NamedValues.of(("recent", f"{step_time(snapshot)}: {', '.join(rates(snapshot))}")))
    return [*out, work_facts(snapshot, snapshot.work)] if snapshot.work is not None else out


def methods(report: Report) -> list[Block]:
    """One row for each kind of figure in this report."""
    data, snapshot = report.data, report.snapshot
    cuda = on_gpu(data.run or snapshot.run)
    work, isolated = snapshot.work, snapshot.baseline is not None or snapshot.loader is not None
    idle = snapshot.idle
    method = f" ({work.method})" if work and work.method else ""
    # (whether the report has it, label, text)
    rows: list[tuple[object, str, str]] = [
        (True, "phases", "host clock at phase boundaries; `other` is the rest, so phases add up to the wall time"),
        (cuda, "GPU time", "pairs of CUDA events, read some steps later so that measuring never synchronises"),
        (idle.share is not None, "idle time", METHODS.get(idle.method, idle.method)),
        *((True, f"capture at step {item.step or at.step:,}", METHODS.get(item.method, item.method))
          for at, item in list(data.captures)[-1:]),
        (True, "p50, p95, max", "steps of one measuring interval of the record, host clock"),
        (True, "throughput", "items over wall time, excluding evaluation, checkpoints, pauses and profiler captures"),
        (True, "loss", "mean of the losses that were read back; reading every loss would slow down training"),
        (data.marked("evaluation"), "evaluations", "on the evaluation data; durations by host clock"),
        (cuda, "memory", "torch's allocator for allocated, reserved and peak; the driver for free and others"),
        (not cuda, "memory", "RSS of the process and of its loader workers; shared pages count in each"),
        (work, "FLOP and bytes", f"counted once{method}, over the measured step time"),
        (work and work.peak_tflops, "share of peak", "of the published dense peak, which was not measured on this GPU"),
        (data.gc_watched, "garbage collection", "callbacks of the Python interpreter; included in the phases"),
        (data.functions, "functions", "one step under Python's profiler, about every 30 s; in no other figure"),
        (data.stacks and not data.functions, "stack samples", "stack of the training thread, a few times per second"),
        (snapshot.workers, "workers", "stamps of batches inside each worker; some batches under the profiler"),
        (isolated, "isolated times", "measured once before training in this process, the fastest of a few"),
        (data.trials, "measured gains", "ABBA blocks in one process or several; CI of the mean log-ratio"),
        (True, "at most", POTENTIAL_GAIN),
        (snapshot.headroom.fits_micro, "PREDICTED", "only the batch that fits: memory grows in proportion to it"),
        (snapshot.workers, "predicted", "of workers: the loader played with the measured times of batches"),
    ]  # fmt: skip
    text = "All figures were measured in this run unless marked as predicted. n/a means not measured."
    return [Text(text), NamedValues.of(*((label, text) for present, label, text in rows if present))]
