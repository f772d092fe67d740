"""Where the time goes: phases, idle time by cause, speed and work."""

from __future__ import annotations

from ndd_console.view.blocks import on_gpu
from ndd_console.view.throughput import plural, rates, step_time, work_texts
from ndd_engine.record.derive import idle as idle_of
from ndd_engine.record.derive import phase_shares
from ndd_engine.record.events import PHASES, KernelsEvent, StacksEvent
from ndd_engine.text import MISSING, duration, number, size

from .axis import share_text
from .blocks import Bars, Block, Facts, Line, Lines, Stack, Table, Text
from .drawing import CAUSE_COLOURS, COLUMNS, PHASE_COLOURS, colour, layers, line, pieces_of
from .model import Report
from .timeline import Stretch

NO_STEPS = "No step was measured."
METHODS = {
    "events": "by the gaps between timed spans on the card, a lower bound",
    "nvml": "by the card's own counter, which does not know why",
    "host": "by the host's clock: time in which the processor computes nothing for the model",
    "kernels": "by the profiler, the exact union of kernels and copies",
    "operators": "by the profiler, the exact union of operators on the host",
}
_TOP = 12


def phases(report: Report) -> list[Block]:
    """Phases over time and in figures, the time of a step, and where in the code the thread was seen."""
    data = report.data
    whole = data.timeline.whole
    if not whole.wall_ns:
        return [Text(NO_STEPS, "note")]
    width, stretches = data.timeline.columns(COLUMNS)
    total = {
        name: value / whole.wall_ns
        for name, value in sorted(whole.host.items(), key=_rank)
        if "/" not in name
    }
    columns = {
        index: {name: value / item.wall_ns for name, value in item.host.items()}
        for index, item in stretches.items()
    }
    out: list[Block] = [
        Stack(
            "Share of wall time by phase",
            layers(columns, total, PHASE_COLOURS, "smaller phases"),
            tuple(stretches),
            width,
            report.time,
            note="Host clock. Pauses and profiler bursts are left out; what is blank was not recorded.",
        ),
        _table(report, whole),
    ]
    if data.curve("step_p50_ns"):
        out.append(_step_times(report))
    if data.stacks is not None:
        out += _stacks(data.stacks)
    return out


def _rank(item: tuple[str, float]) -> tuple[int, int, str]:
    name = item[0].partition("/")[0]
    return PHASES.index(name) if name in PHASES else len(PHASES), item[0].count("/"), item[0]


def _table(report: Report, whole: Stretch) -> Table:
    lately = {phase.name: phase for phase in report.snapshot.phases}
    timed = bool(whole.device)
    columns = ["phase", "time", "share", "a step"] + (["on the card"] if timed else [])
    columns += ["p50 lately", "p95 lately", "longest lately"]
    rows = []
    for name, value in sorted(whole.host.items(), key=_rank):
        if value <= 0:
            continue
        parent, slash, part = name.partition("/")
        cells = [f"· {part}" if slash else parent, duration(value * 1e-9), share_text(value / whole.wall_ns)]
        cells.append(_ns(value / whole.steps if whole.steps else None))
        if timed:
            cells.append(_ns(whole.device[name] / whole.device_steps) if name in whole.device else MISSING)
        now = lately.get(name)
        cells += [
            _ns(figure) for figure in ((now.p50_ns, now.p95_ns, now.max_ns) if now else (None, None, None))
        ]
        rows.append(tuple(cells))
    note = (
        f"Over {number(round(whole.steps))} steps in {duration(whole.wall_ns * 1e-9)}; the last columns are of the "
        "newest stretch. A part of a phase (·) lies inside it."
    )
    return Table("Phases", tuple(columns), tuple(rows), frozenset(range(1, len(columns))), note, wide=0)


def _ns(value: float | None) -> str:
    return MISSING if value is None else duration(value * 1e-9)


def _step_times(report: Report) -> Lines:
    data = report.data
    found: list[Line] = []
    for name, text, tint in (
        ("step_p50_ns", "half of the steps are faster (p50)", "blue"),
        ("step_p95_ns", "95 % are faster (p95)", "orange"),
        ("step_max_ns", "longest", "vermillion"),
    ):
        if curve := data.curve(name):
            found.append(line(curve, text, tint, data.x, 1e-9))
    values = [value for item in found for _, value in item.points if value > 0]
    uneven = bool(values) and max(values) > 20 * min(values)
    return Lines(
        "Time of an optimizer step", "seconds", "", tuple(found), report.time, zero=not uneven, log=uneven,
        note="Each stretch of the record has its own p50, p95 and longest step; a point is the mean of neighbours.",
    )  # fmt: skip


def _stacks(stacks: StacksEvent) -> list[Block]:
    rows = [
        (share_text(frame[4] / stacks.looks), str(frame[0]), f"{frame[1]}:{frame[2]}", str(frame[3]))
        for frame in stacks.frames[:_TOP]
        if len(frame) >= 5 and stacks.looks
    ]
    if not rows:
        return []
    title = f"Where in the code ({number(stacks.looks)} looks, the newest at step {number(stacks.step)})"
    return [Table(title, ("seen", "phase", "line", "function"), tuple(rows), frozenset({0}), wide=2)]


# Idle.


def idle(report: Report) -> list[Block]:
    """Idle time of the whole record by cause, over time, and exactly where a burst was recorded."""
    data, snapshot = report.data, report.snapshot
    run = data.run or snapshot.run
    whole = data.timeline.whole
    out: list[Block] = []
    for at, capture in list(data.captures)[-3:]:
        out += _capture(at.step, capture)
    if not whole.wall_ns or run is None:
        return out or [Text(NO_STEPS, "note")]
    what = "GPU idle" if on_gpu(run) else "Compute idle"
    window = whole.as_window()
    found = idle_of(run, [window], phase_shares([window]), None)
    if found.share is None:
        util = data.curve("card util_percent")
        if not util:
            return [*out, Text(f"{what} {MISSING}: {found.reason}", "note")]
        share = 1 - (util.mean or 0.0) / 100
        busy = line(util, "share of time in which a kernel ran", "blue", data.x, 0.01)
        return [
            *out,
            Text(f"{what} {share_text(share)}, {METHODS['nvml']}."),
            Lines("The card is busy", "share", "", (busy,), report.time, zero=True),
        ]
    causes = {cause: share for cause, share in found.causes if share > 0}
    title = f"{what} {share_text(found.share)} of the whole record"
    out.append(_bars(title, causes, f"Shares of wall time, {_method(found.method)}."))
    width, stretches = data.timeline.columns(COLUMNS)
    columns: dict[int, dict[str, float]] = {}
    for index, item in stretches.items():
        part = item.as_window()
        columns[index] = dict(idle_of(run, [part], phase_shares([part]), None).causes)
    stack = layers(columns, causes, CAUSE_COLOURS, "smaller causes")
    heights = sorted(sum(shares.values()) for shares in columns.values())
    if stack and heights[-1] > 0:
        # A lone column, as at the end of a run, would make all others flat.
        usual = heights[min(len(heights) - 1, int(0.98 * len(heights)))]
        top = next(mark for mark in (0.05, 0.1, 0.2, 0.5, 1.0) if usual <= mark or mark == 1.0)
        title = f"{what} over time, by cause"
        note = "Share of wall time." + (" The highest columns are cut." if heights[-1] > top else "")
        out.append(Stack(title, stack, tuple(stretches), width, report.time, top, note))
    return out


def _method(name: str) -> str:
    return METHODS.get(name, name)


def _bars(title: str, causes: dict[str, float], note: str) -> Bars:
    rows = tuple(
        (cause, share, share_text(share), colour(CAUSE_COLOURS, cause, index))
        for index, (cause, share) in enumerate(sorted(causes.items(), key=lambda item: -item[1]))
    )
    return Bars(title, rows, note)


def _capture(step: int, capture: KernelsEvent) -> list[Block]:
    if not capture.wall_ns:
        return []
    wall = capture.wall_ns
    causes = {cause: value / wall for cause, value in capture.idle_ns.items() if value > 0}
    steps = max(capture.steps, 1)
    title = f"Idle {share_text(sum(causes.values()))} in the profiler capture at step {number(capture.step or step)}"
    note = (
        f"Exact, over {number(capture.steps)} steps of {duration(wall / steps * 1e-9)} ({_method(capture.method)}). "
        f"The profiler makes steps slower than others. Computing {share_text(capture.busy_ns / wall)}, of it copying "
        f"{share_text(capture.copy_ns / wall)}; {number(capture.launches / steps)} launches a step."
    )
    out: list[Block] = [_bars(title, causes, note)]
    rows = tuple(
        (share_text(item[1] / wall), duration(item[1] / steps * 1e-9), number(item[2] / steps), str(item[0]))
        for item in capture.top[:_TOP]
        if len(item) >= 3
    )
    if rows:
        columns = ("share", "time a step", "times a step", "kernel or operator")
        out.append(Table("What takes longest in the burst", columns, rows, frozenset({0, 1, 2})))
    return out


# Speed and work.


def speed(report: Report) -> list[Block]:
    """Throughput over time, the rates, and what a step computes against the card's peak."""
    data, snapshot = report.data, report.snapshot
    run = snapshot.run
    out: list[Block] = []
    width, stretches = data.timeline.columns(COLUMNS)
    unit = f"{plural(run.item) if run is not None else 'items'}/s"
    speeds = {
        index: item.items / (item.stepping_ns * 1e-9)
        for index, item in stretches.items()
        if item.steps > 0 and item.stepping_ns > 0.05 * item.wall_ns
    }
    pieces = pieces_of(speeds, width)
    if pieces:
        whole = data.timeline.whole
        mean = whole.items / (whole.stepping_ns * 1e-9) if whole.stepping_ns > 0 else None
        found = Line("training", "blue", pieces, mean=mean)
        note = "Of training: evaluation, checkpoints and pauses are left out."
        out.append(Lines("Throughput", "plain", unit, (found,), report.time, zero=True, note=note))
    if snapshot.step_ns is None:
        return out or [Text(NO_STEPS, "note")]
    rows = [("lately", f"{step_time(snapshot)}: {', '.join(rates(snapshot))}")]
    if texts := work_texts(snapshot):
        rows += zip(("computing", "share of the peak", "roofline"), texts, strict=False)
    work = snapshot.work
    if work is not None:
        rows.append(("a step computes", f"{_large(work.flops_per_step)}FLOP"))
        rows.append(
            ("a step moves", f"{size(work.bytes_per_step)} read and written without fusion, an upper bound")
        )
        if work.attention:
            rows.append(("attention", ", ".join(work.attention)))
        if work.uncounted:
            rows.append(("not counted", ", ".join(work.uncounted)))
        if work.peak_source:
            rows.append(("peak from", work.peak_source))
    return [*out, Facts(tuple(rows))]


def _large(value: int | None) -> str:
    if value is None:
        return f"{MISSING} "
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{number(value / scale)} {letter}"
    return f"{number(value)} "
