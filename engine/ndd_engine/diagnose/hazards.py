"""What costs no time until it ends the run, and settings that do nothing."""

from __future__ import annotations

from statistics import median

from ndd_engine.text import duration, printable, size

from .finding import Change, Evidence, Finding
from .gpu import halved
from .view import MODEL, View, percent

StepValue = tuple[float, float]

# Points of the memory curve that a judgement needs, and into how many it is condensed.
LEAST_POINTS = 7
GROUPS = 12
COMPILING_POINTS = 40
# Growth that counts: a part of what is used, or so many bytes; and above the noise, so many times.
GROWN = 0.05
GROWN_BYTES = 50 << 20
TIMES_NOISE = 4.0
# Nearly every pair of points rises, and the end rises like the rest: what levels off is no leak.
RISING = 0.9
STEADY = 0.5
# Free memory below this part of all of it is nearly none.
NEARLY = 0.04
NEARLY_HOST_BYTES = 256 << 20


def leak(view: View) -> Finding | None:
    """Memory that grows steadily, and does not level off."""
    snapshot = view.snapshot
    if snapshot.totals.steps < LEAST_POINTS:
        return None
    if snapshot.totals.recompiles and len(snapshot.memory_trend) < COMPILING_POINTS:
        return None  # what is compiled takes memory as well
    growth = steady_growth(snapshot.memory_trend, 0 if view.card else GROWN_BYTES)
    if growth is None:
        return None
    slope, noise, last = growth
    headroom = snapshot.headroom
    evidence = [
        Evidence(
            f"{size(last)} in use, {size(slope)} more with each step (noise {size(noise)})",
            "allocator" if view.card else "resident memory",
        )
    ]
    leave = ""
    total = snapshot.run.total_steps if snapshot.run is not None else 0
    if headroom.free_bytes is not None:
        steps = headroom.free_bytes / slope
        when = f"memory is full in about {steps:,.0f} steps"
        if view.step_ns:
            when += f", {duration(steps * view.step_ns * 1e-9)}"
        evidence.append(Evidence(f"{when} ({size(headroom.free_bytes)} are free)", "extrapolated"))
        if total and not snapshot.final and total - snapshot.step < steps / 2:
            leave = f"this run ends in {total - snapshot.step:,} steps, before memory is full"
    line = view.line(*MODEL, "other", "log")
    return Finding(
        "leak",
        f"memory grows by {size(slope)} with each step",
        tuple(evidence),
        "certain" if snapshot.epoch else "likely",
        changes=(
            Change(
                "detach what is kept between steps (loss.item() instead of loss, outputs with .detach())",
                (),
                line,
            ),
        ),
        leave=leave,
    )


def near_limit(view: View) -> Finding | None:
    """So little memory left that the next larger batch, evaluation or neighbour ends the run."""
    snapshot = view.snapshot
    headroom, memory = snapshot.headroom, snapshot.memory
    if headroom.free_bytes is None or not headroom.total_bytes or not snapshot.totals.steps or snapshot.final:
        return None
    free = headroom.free_bytes
    if headroom.kind == "card":
        if memory is None:
            return None
        # What the allocator keeps and does not use can be used again.
        free += max(memory.reserved_bytes - memory.peak_allocated_bytes, 0)
    elif free > NEARLY_HOST_BYTES and free > NEARLY * headroom.total_bytes:
        return None
    share = free / headroom.total_bytes
    if share > NEARLY:
        return None
    changes = []
    if half := halved(view):
        changes.append(Change("smaller micro-batches, and as many items in a step as now", half))
    if headroom.kind == "host" and view.get("loader.cache"):
        changes.append(Change("do not keep encoded items", ("loader.cache=false",)))
    elif headroom.kind == "host" and view.workers > 1:
        changes.append(
            Change(
                "fewer workers, each of which has memory of its own", (f"loader.workers={view.workers // 2}",)
            )
        )
    where = "on the card" if headroom.kind == "card" else "on the host"
    return Finding(
        "near-limit",
        f"memory {where} is nearly full: {size(free)} of {size(headroom.total_bytes)} left",
        (
            Evidence(
                f"{percent(share)} are free; this run uses {size(headroom.used_bytes)}, others "
                f"{size(headroom.others_bytes)}",
                "allocator" if headroom.kind == "card" else "host counters",
            ),
        ),
        "certain",
        changes=tuple(changes),
    )


def no_effect(view: View) -> Finding | None:
    """Settings that were asked for and are not in effect."""
    failed = [setting for setting in view.snapshot.settings if setting.in_effect is False]
    if not failed:
        return None
    names = ", ".join(printable(setting.name) for setting in failed)
    evidence = tuple(
        Evidence(
            printable(
                f"{setting.name}: asked for {setting.requested}, it is {setting.applied}"
                + (f" ({setting.verified})" if setting.verified else "")
            ),
            "verified",
        )
        for setting in failed
    )
    title = f"{'a setting' if len(failed) == 1 else 'settings'} without effect: {names}"
    return Finding("no-effect", title, evidence, "certain")


RULES = (leak, near_limit, no_effect)


def steady_growth(
    trend: tuple[tuple[int, float], ...], least_bytes: float = 0
) -> tuple[float, float, float] | None:
    """(bytes a step, noise in bytes, newest value) of the later two thirds of a curve that grows to its end.

    None where it does not: too few points, within the noise, less than least_bytes, levelling off, or not rising all
    along. A process's resident memory creeps for a while as its allocator spreads; a card's allocated memory does not.
    """
    later = trend[len(trend) // 3 :]
    if len(trend) < LEAST_POINTS or later[-1][0] <= later[0][0]:
        return None
    points = _condensed(later)
    slope = _slope(points)
    if slope is None or slope <= 0:
        return None
    at = median(y - slope * x for x, y in points)
    noise = 1.5 * median(abs(y - slope * x - at) for x, y in points)
    used, growth = points[-1][1], slope * (points[-1][0] - points[0][0])
    if growth < max(min(GROWN * used, GROWN_BYTES), least_bytes) or growth < TIMES_NOISE * noise:
        return None
    pairs = [(b[1] - a[1]) > 0 for index, a in enumerate(points) for b in points[index + 1 :]]
    if sum(pairs) < RISING * len(pairs):
        return None
    end = points[-max(len(points) // 3, 2) :]
    end_slope = (end[-1][1] - end[0][1]) / (end[-1][0] - end[0][0])
    if end_slope < STEADY * slope:
        return None
    return slope, noise, later[-1][1]


def _condensed(points: tuple[tuple[int, float], ...]) -> list[StepValue]:
    """At most GROUPS points, each the median of its neighbours; one a step."""
    size_of = -(-len(points) // GROUPS)
    groups = [points[start : start + size_of] for start in range(0, len(points), size_of)]
    out: list[StepValue] = []
    for group in groups:
        x, y = group[len(group) // 2][0], median(point[1] for point in group)
        if not out or x > out[-1][0]:
            out.append((x, y))
    return out


def _slope(points: list[StepValue]) -> float | None:
    """The median slope of all pairs, which a few outliers do not move."""
    slopes = [
        (b[1] - a[1]) / (b[0] - a[0])
        for index, a in enumerate(points)
        for b in points[index + 1 :]
        if b[0] > a[0]
    ]
    return median(slopes) if len(points) >= 4 else None
