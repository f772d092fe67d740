"""Hazards that can end the run, settings that are not in effect, and modes and waits of observed scripts."""

from __future__ import annotations

from statistics import median

from ndd_engine.text import counted, duration, percent, printable, size, span

from .finding import Confidence, Finding
from .gpu_rules import smaller_batches
from .trends import condensed, line_through
from .view import (
    BETWEEN,
    COMPUTING,
    CONFIG,
    FLOOR,
    MODEL,
    PROFILER,
    Draft,
    View,
    place,
    taken,
)

Trend = tuple[tuple[int, float], ...]

# Minimum points of the memory curve, and the number of points it is reduced to.
LEAST_POINTS = 7
GROUPS = 12
COMPILING_POINTS = 40
# Minimum growth: a fraction of the memory in use or this many bytes, and a multiple of the noise.
GROWN = 0.05
GROWN_BYTES = 50 << 20
TIMES_NOISE = 4.0
# Fraction of point pairs that must rise, and how steep the end must be relative to the whole: a curve that levels
# off is not a leak.
RISING = 0.9
STEADY = 0.5
# Memory is released where it falls to this part of its rise, and rises are alike up to this factor.
RELEASED = 0.5
ALIKE = 2.0
# Memory is almost full when less than this part of it is free.
NEARLY = 0.04


def leak(view: View) -> Finding | None:
    """Memory that grows steadily and does not level off."""
    snapshot = view.snapshot
    if snapshot.totals.steps < LEAST_POINTS:
        return None
    if snapshot.totals.recompiles and len(snapshot.memory_trend) < COMPILING_POINTS:
        return None  # compiled code takes memory as well
    least, released = 0 if view.gpu else GROWN_BYTES, 0
    kept = snapshot.totals.kept_steps
    growth = steady_growth(snapshot.memory_trend, least)
    if growth is None:
        trend = snapshot.memory_trend if view.gpu else snapshot.heap_trend
        growth, released = growth_between_releases(trend, GROWN_BYTES)
    if growth is None and kept:
        growth, released = growth_of_graphs(snapshot.memory_trend, kept), kept
    if growth is None:
        return None
    slope, noise, last = growth
    free, when, leave = snapshot.headroom.free_bytes, "", ""
    if free is not None and not released:
        steps = free / slope
        when = f"memory is full in about {steps:,.0f} steps"
        if view.step_ns:
            when += f", {duration(steps * view.step_ns * 1e-9)}"
        total = snapshot.run.total_steps if snapshot.run is not None else 0
        if total and not snapshot.final and total - snapshot.step < steps / 2:
            leave = f"this run ends in {total - snapshot.step:,} steps, before memory is full"
    confidence: Confidence = "certain" if snapshot.epoch else "likely"
    until = f" until it is released, after about {released:,} steps" if released else ""
    draft = Draft("leak", f"memory grows by {size(slope)} per step{until}", None, confidence, leave)
    source = "allocator" if view.gpu else "memory of the process"
    draft.saw(f"{size(last)} in use, growing by {size(slope)} per step (noise {size(noise)})", source)
    if kept:
        draft.saw(f"autograd graphs of {kept:,} steps were kept at a time", "autograd")
    if released:
        draft.saw(f"it grows by {size(slope * released)} before it is released", source)
    if when:
        draft.saw(f"{when} ({size(free)} free)", "extrapolated")
    draft.change(
        "detach tensors that are kept between steps (loss.item() instead of loss, output.detach())",
        where=view.script_line("keeps") or view.line(*MODEL, "other", "log"),
    )
    return draft.done()


def growth_of_graphs(trend: Trend, kept: int) -> tuple[float, float, float] | None:
    """As `steady_growth`, of a curve that stays level after its first rise, since freed memory is used again.

    kept: the most steps whose graphs existed at a time. None if the curve rose by too little.
    """
    values = [value for _, value in trend[1:]]
    if len(trend) < LEAST_POINTS:
        return None
    rise = max(values) - values[0]
    if rise < max(GROWN * max(values), GROWN_BYTES):
        return None
    return rise / kept, 0.0, values[-1]


def near_limit(view: View) -> Finding | None:
    """So little free memory that a larger batch, an evaluation or another process can end the run."""
    snapshot = view.snapshot
    headroom, memory = snapshot.headroom, snapshot.memory
    if headroom.free_bytes is None or not headroom.total_bytes or not snapshot.totals.steps or snapshot.final:
        return None
    free, on_gpu = headroom.free_bytes, headroom.kind == "gpu"
    if on_gpu:
        if memory is None:
            return None
        # Memory that the allocator has cached can be reused.
        free += max(memory.reserved_bytes - memory.peak_allocated_bytes, 0)
    share = free / headroom.total_bytes
    if share > NEARLY:
        return None
    title = f"{'GPU' if on_gpu else 'host'} memory is almost full: {size(free)} of {size(headroom.total_bytes)} free"
    draft = Draft("near-limit", title, None, "certain")
    used = f"this run uses {size(headroom.used_bytes)}, other processes {size(headroom.others_bytes)}"
    draft.saw(f"{percent(share)} free; {used}", "allocator" if on_gpu else "host counters")
    draft.add(smaller_batches(view))
    if not on_gpu and view.get("loader.cache"):
        draft.change("do not cache encoded items", "loader.cache=false")
    elif not on_gpu and view.workers > 1:
        fewer = f"loader.workers={view.workers // 2}"
        draft.change("use fewer loader workers: each has its own memory", fewer)
    return draft.done()


def no_effect(view: View) -> Finding | None:
    """Requested settings that are not in effect."""
    failed = [setting for setting in view.snapshot.settings if setting.in_effect is False]
    if not failed:
        return None
    names = ", ".join(printable(setting.name) for setting in failed)
    title = f"setting{'' if len(failed) == 1 else 's'} not in effect: {names}"
    draft = Draft("no-effect", title, None, "certain")
    for setting in failed:
        text = f"{setting.name}: requested {setting.requested}, applied {setting.applied}"
        draft.saw(printable(text + (f" ({setting.verified})" if setting.verified else "")), "verified")
    return draft.done()


RULES = (leak, near_limit, no_effect)


def steady_growth(trend: Trend, least_bytes: float = 0) -> tuple[float, float, float] | None:
    """(bytes per step, noise in bytes, newest value) of the last two thirds of a curve that grows until its end.

    None if there are too few points, or the growth is within the noise, below least_bytes, levels off or is not
    steady. Resident memory of a process grows for a while at the start; allocated GPU memory does not.
    """
    later = trend[len(trend) // 3 :]
    if len(trend) < LEAST_POINTS or later[-1][0] <= later[0][0]:
        return None
    points = condensed(later, GROUPS)
    line = line_through(points)
    if line is None or line.slope <= 0:
        return None
    slope, noise = line.slope, line.noise
    used, growth = points[-1][1], slope * (points[-1][0] - points[0][0])
    if growth < max(min(GROWN * used, GROWN_BYTES), least_bytes) or growth < TIMES_NOISE * noise:
        return None
    if line.rising < RISING:
        return None
    end = points[-max(len(points) // 3, 2) :]
    end_slope = (end[-1][1] - end[0][1]) / (end[-1][0] - end[0][0])
    if end_slope < STEADY * slope:
        return None
    return slope, noise, later[-1][1]


def growth_between_releases(
    trend: Trend, least_bytes: float
) -> tuple[tuple[float, float, float] | None, int]:
    """((as `steady_growth`), steps from one release to the next) of a curve that grows and falls, again and again.

    Something is kept for an epoch, for example. (None, 0) unless at least two rises are steady and alike.
    """
    rises: list[list[tuple[int, float]]] = [[]]
    low = high = 0.0
    for point in trend:
        if not rises[-1]:
            low = high = point[1]
        elif high - low > least_bytes and point[1] < low + RELEASED * (high - low):
            rises.append([])
            low = high = point[1]
        rises[-1].append(point)
        high = max(high, point[1])
    found = [(rise, growth) for rise in rises if (growth := steady_growth(tuple(rise), least_bytes))]
    if len(found) < 2 or len(rises) > 2 * len(found):
        return None, 0
    slopes = sorted(growth[0] for _, growth in found)
    if slopes[-1] > ALIKE * slopes[0]:
        return None, 0
    lengths = [rise[-1][0] - rise[0][0] for rise, _ in found]
    last = found[-1][1]
    return (median(slopes), last[1], last[2]), round(max(lengths))


# Reads of a tensor that are no call of a method by name.
WAITS = {
    "float": "float(tensor)", "int": "int(tensor)", "bool": "bool(tensor), which if and while call,",
    "format": 'f"{tensor}"', "to": '.to("cpu")',
}  # fmt: skip


def anomaly(view: View) -> Finding | None:
    """A debugging mode of autograd that was left on."""
    script = view.config.get("script")
    if not isinstance(script, dict) or not script.get("anomaly"):
        return None
    cost = view.cost(*MODEL)
    draft = Draft("anomaly", "anomaly detection of autograd is on", cost, "certain")
    draft.saw("torch.is_anomaly_enabled() is true", CONFIG)
    draft.saw(
        "every operator records a traceback, and every gradient is checked for NaN", "PyTorch documentation"
    )
    draft.unbounded()
    draft.change("remove torch.autograd.set_detect_anomaly(True), which is for debugging")
    return draft.done()


def oversubscribed(view: View) -> Finding | None:
    """More threads than cores. Without a measurement before training, a trial shows what it costs."""
    threads, cores = view.threads, view.whole_cores
    if not view.is_script or view.gpu or threads is None or cores is None or threads <= cores:
        return None
    computing = view.cost(*COMPUTING)
    if not computing.clear:
        return None
    part = view.part(computing.share * (1 - cores / threads))
    title = f"{threads} threads on {cores} core{'s' if cores > 1 else ''}: oversubscribed"
    draft = Draft("oversubscribed", title, part)
    draft.saw(f"torch.get_num_threads() is {threads}", CONFIG)
    draft.add(taken(computing, "computing takes"))
    draft.unbounded()
    draft.change("use one thread per core", f"run.threads={cores}")
    return draft.done()


def waited_ns(view: View) -> float:
    """Nanoseconds of the profiled step in calls that wait for the GPU."""
    return sum(view.waits.values())


def _lost_in_waits(view: View, wall_ns: int) -> float:
    """Share of a step for which the GPU waits, at most, because the host has waited for it."""
    if not view.clocked:
        return min(waited_ns(view) / wall_ns, 1.0 if view.idle is None else view.idle)
    inside = {phase: ns / wall_ns for phase, ns in view.waits.items() if phase in MODEL}
    elsewhere = waited_ns(view) / wall_ns - sum(inside.values())
    # After such a wait, the GPU has nothing to do until the host launches something again.
    lost = min(elsewhere, view.cost(*BETWEEN).share)
    return min(lost + sum(min(share, view.exposed(phase)) for phase, share in inside.items()), 1.0)


def waits_for_device(view: View) -> Finding | None:
    """Calls that wait for the GPU in every step. Only where nothing else was measured: a capture shows idle time."""
    functions, kernels = view.snapshot.functions, view.snapshot.kernels
    if (
        not view.is_script
        or not view.gpu
        or functions is None
        or not view.device_waits
        or kernels is not None
    ):
        return None
    share = _lost_in_waits(view, max(functions.wall_ns, 1))
    if share < 2 * FLOOR:
        return None
    file, line, name, method, calls, _ = max(view.device_waits, key=lambda wait: wait[5])
    where = place(file, line, name)
    draft = Draft("sync", f"{where} waits for the GPU in every step", view.part(share), "possible")
    call = WAITS.get(method, f".{method}()")
    draft.saw(f"{call} is called {counted(calls, 'time')} in a step", PROFILER)
    draft.saw(f"such calls take {span(waited_ns(view))}; the GPU may compute meanwhile", PROFILER)
    if view.clocked:
        draft.add(taken(view.cost(*BETWEEN), "between the steps the GPU waits for"))
    elif view.idle is not None:
        draft.saw(f"the GPU is idle {percent(view.idle)} of the time", "NVML")
    draft.unbounded()
    draft.change(f"call {call} every few steps only, or once for several values", where=where)
    return draft.done()


SCRIPT_RULES = (anomaly, oversubscribed, waits_for_device)
