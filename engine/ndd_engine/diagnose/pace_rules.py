"""Training that becomes slower: how much, in which phase, and what has grown meanwhile.

Whether a noisy curve grows is told by a robust slope with an interval, apart from noise and from a rise at one moment.
The slope is the median of the slopes between all pairs of points (Theil and Sen), its interval that of Sen. A rise at
one moment is the median of the differences of all pairs from both sides of it (Hodges and Lehmann). The points are
those of equal parts of the curve, since neighbouring values of a measurement are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median

from ndd_engine.record.events import PHASES
from ndd_engine.record.snapshot import CoreUse, Point
from ndd_engine.text import duration, percent, span

from .data_facts import has_loader
from .finding import MOST_OF, Confidence, Finding
from .grown import ADDED, EACH_STEP, carried, counted, function, profiles
from .view import CLOCK, PROFILER, FindingDraft, View, place

StepValue = tuple[float, float]
Points = Sequence[StepValue]

# The fewest points that tell something.
FEWEST = 4
# Two-sided 95 % of the normal distribution.
NORMAL = 1.96


@dataclass(frozen=True, slots=True)
class FittedLine:
    """A line through a curve. slope, low, high: per step, with an interval of 95 %; begin, end: values of the line.

    noise: usual distance of a point from the line. rising: part of the pairs of points that rise, 0..1.
    """

    slope: float
    low: float
    high: float
    begin: float
    end: float
    noise: float
    rising: float


def condensed(points: Points, groups: int, part: float = 0.5) -> list[StepValue]:
    """The curve reduced to at most `groups` points by quantiles, at most one per step. part: 0.5 for medians."""
    size_of = max(-(-len(points) // groups), 1)
    out: list[StepValue] = []
    for start in range(0, len(points), size_of):
        group = points[start : start + size_of]
        x, y = group[len(group) // 2][0], quantile([value for _, value in group], part)
        if not out or x > out[-1][0]:
            out.append((x, y))
    return out


def quantile(values: Sequence[float], part: float) -> float:
    """The median for 0.5; for any other part, the value with this part of the others below it, rounded down."""
    return median(values) if part == 0.5 else sorted(values)[int((len(values) - 1) * part)]


def line_through(points: Points) -> FittedLine | None:
    """The line through points with rising steps; None if there are fewer than FEWEST."""
    count = len(points)
    if count < FEWEST:
        return None
    slopes = sorted(
        (b[1] - a[1]) / (b[0] - a[0]) for index, a in enumerate(points) for b in points[index + 1 :]
    )
    # How many of the slopes are within the interval, by the variance of Kendall's statistic.
    within = NORMAL * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(round((len(slopes) - within) / 2), 0)
    slope = median(slopes)
    at = median(y - slope * x for x, y in points)
    noise = 1.5 * median(abs(y - slope * x - at) for x, y in points)
    rising = sum(one > 0 for one in slopes) / len(slopes)
    begin, end = (at + slope * x for x in (points[0][0], points[-1][0]))
    return FittedLine(slope, slopes[low], slopes[-1 - low], begin, end, noise, rising)


def stepped(points: Points, line: FittedLine) -> float:
    """How much better a rise at one moment fits than a line through the same points; above 1 it fits better.

    It is the ratio of the distances of the points from the line, and from the medians before and after that moment.
    """
    at = line.begin - line.slope * points[0][0]
    from_line = fmean(abs(y - line.slope * x - at) for x, y in points)
    values = [y for _, y in points]
    from_steps = _apart(values, moment(values)) / len(values)
    return from_line / from_steps if from_steps else inf if from_line else 0.0


def moment(values: Sequence[float]) -> int:
    """The place from which on a curve is best described by another level than before; two values are on each side."""
    return min(range(2, len(values) - 1), key=lambda cut: _apart(values, cut))


def shift(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """By how much values after a moment are higher than those before it, with an interval of 95 %."""
    pairs = sorted(b - a for a in before for b in after)
    # How many of the differences are within the interval, by the variance of the statistic of Mann and Whitney.
    within = NORMAL * sqrt(len(pairs) * (len(before) + len(after) + 1) / 12)
    low = max(round(len(pairs) / 2 - within), 0)
    return median(pairs), pairs[low], pairs[-1 - low]


def _apart(values: Sequence[float], cut: int) -> float:
    """The distances of values from the median of those before a place, and from there on."""
    return sum(abs(one - median(part)) for part in (values[:cut], values[cut:]) for one in part)


# The first part of a run, which warms up, and the fewest points of the rest.
WARM_UP, LEAST_POINTS = 0.1, 7
# Points that are compared, and which part of the windows of each was faster: another program only slows steps down.
GROUPS, FASTER = 16, 0.25
# Steps of almost as many items are alike.
ALIKE = 0.05
# From this part of the growth on, a phase has almost all of it.
ALMOST_ALL = 0.9
# By so much of the step time it has grown where nothing shows why, and where other programs use the cores as well: they
# come and go, and take caches and memory from one phase more than from another.
UNEXPLAINED, UNEXPLAINED_SHARED = 0.2, 0.5
# So long, and for this part of the time, a rise at one moment has lasted that nothing explains: another program that
# comes takes longer from one phase than from another. So long it has lasted where all phases have grown alike.
LASTED_S, LASTED_PART, LASTED_ALIKE_S = 60.0, 0.25, 300.0
# A phase that has grown by less than this part of what the step has grown is not told.
LEAST_GROWN = 0.05
# The newest profiled step tells what has grown from this part of the rise on.
EARLIEST = 0.5
# Stack samples that show where a phase is that takes most of a step.
FEW_LOOKS = 3
# Phases that take this part of a step are busy. They grow alike if each grows by this part of the one that grows most.
BUSY, AS_MUCH = 0.1, 0.5


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a rise has to be. grown: part of the step time. times_noise: multiple of the noise.

    rising: part of the pairs of points of which the later one is higher. each_third: part of the rise by which each
    third of the points is above the one before. stepped: a rise at one moment fits at most so much better than a line.
    """

    grown: float
    times_noise: float
    rising: float
    each_third: float
    stepped: float

    def hold(self, line: FittedLine, points: Sequence[StepValue]) -> bool:
        """Whether a curve rises so."""
        rise = line.end - line.begin
        if rise <= 0 or rise < self.times_noise * line.noise or line.rising < self.rising:
            return False
        count, values = len(points), [value for _, value in points]
        first, second, third = (
            median(values[count * part // 3 : count * (part + 1) // 3]) for part in range(3)
        )
        steady = min(second - first, third - second) >= self.each_third * rise
        return steady and values[-1] >= (1 + self.grown) * values[0] and stepped(points, line) <= self.stepped


# Of a rise that speaks for itself; where a function takes it in two profiled steps; and where something piles up.
CLEAR, LIKELY, SMALL = (
    Bounds(0.05, 4.0, 0.8, 0.1, 1.1), Bounds(0.2, 2.0, 0.7, 0.1, 1.4), Bounds(0.2, 0.0, 0.55, -1.0, 10.0)
)  # fmt: skip
# What a rise at one moment has to be: part of the step time, multiple of the noise, so much better than a line, and
# points before and after it. The last one is the part of those before it that may be high.
ROSE, ROSE_NOISE, ROSE_FITS, ROSE_POINTS, ROSE_EARLY = 0.1, 4.0, 1.5, 3, 0.25


@dataclass(frozen=True, slots=True)
class PhaseGrowth:
    """Nanoseconds of a step that a phase took, takes now, and by how much it has grown, with an interval of 95 %."""

    name: str
    before: float
    now: float
    grown: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Since:
    """The moment from which on steps are slower: the last step before it, and seconds from the first step until then.

    lasted_s: how long they are slower since.
    """

    step: int
    seconds: float
    lasted_s: float


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Nanoseconds of a step at the beginning and now. line: through the times, per step.

    first, last: steps at which these were measured. phases: the one that grew most first. bounds: the narrowest ones
    that hold. since: for a rise at one moment.
    """

    begin_ns: float
    now_ns: float
    line: FittedLine
    first: int
    last: int
    phases: tuple[PhaseGrowth, ...]
    bounds: Bounds
    since: Since | None = None

    @property
    def grown_ns(self) -> float:
        """By how much a step takes longer."""
        return self.now_ns - self.begin_ns


def slowdown(pace: tuple[Point, ...]) -> Slowdown | None:
    """How steps have become slower, of a run that does so steadily until its end, or at one moment; None otherwise.

    Steps with more items than at the beginning are expected to take longer.
    """
    warm = max(round(WARM_UP * len(pace)), 1)
    later = pace[warm:]
    if len(later) < LEAST_POINTS:
        return None
    usual = median(point[2] for point in later[: max(len(later) // 4, 1)])
    scales = [
        usual / items if items and abs(items / max(usual, 1) - 1) > ALIKE else 1.0
        for _, _, items, *_ in later
    ]
    curves = [
        [
            (float(point[0]), (point[1], *point[3])[number] * scale)
            for point, scale in zip(later, scales, strict=True)
        ]
        for number in range(len(PHASES) + 1)
    ]  # of the step, and of its phases
    points, *parts = (condensed(curve, GROUPS, FASTER) for curve in curves)
    line = line_through(points)
    if line is None:
        return None
    bounds = next((one for one in (CLEAR, LIKELY) if one.hold(line, points)), None)
    if bounds is None and (cut := _rise(points, line)):
        return _at_once(later, [value for _, value in curves[0]], points, parts, line, cut)
    if bounds is None and not SMALL.hold(line, points):
        return None
    (first, begin), (last, now) = points[0], points[-1]
    part = -(-len(later) // GROUPS)
    # Warming up only makes steps slower: faster ones count.
    fastest = min(pace[: warm + part], key=lambda point: point[1])
    earlier = fastest if fastest in pace[:warm] else None
    if earlier is not None:
        first, begin = earlier[:2]
    phases = []
    for number, (name, curve) in enumerate(zip(PHASES, parts, strict=True)):
        through = line_through(curve)
        if through is not None:
            grown, low, high = (each * (last - first) for each in (through.slope, through.low, through.high))
            before = curve[0][1] if earlier is None else float(earlier[3][number])
            phases.append(PhaseGrowth(name, before, curve[-1][1], grown, low, high))
    return Slowdown(begin, now, line, int(first), int(last), _most_first(phases), bounds or SMALL)


def _most_first(phases: list[PhaseGrowth]) -> tuple[PhaseGrowth, ...]:
    return tuple(sorted(phases, key=lambda phase: phase.before - phase.now))


def _rise(points: Sequence[StepValue], line: FittedLine) -> int:
    """The place of the first point after a rise at one moment; 0 if the curve does not rise so.

    Few points before it may be as high as half of the rise, as another program makes them, and none after it as low.
    """
    values = [value for _, value in points]
    cut = moment(values)
    before, after = values[:cut], values[cut:]
    if min(len(before), len(after)) < ROSE_POINTS or stepped(points, line) < ROSE_FITS:
        return 0
    low, high = median(before), median(after)
    noise = 1.5 * median([abs(one - low) for one in before] + [abs(one - high) for one in after])
    if high - low < max(ROSE * low, ROSE_NOISE * noise):
        return 0
    middle = (low + high) / 2
    early = sum(one > middle for one in before)
    return cut if early <= ROSE_EARLY * len(before) and middle < min(after) else 0


def _at_once(
    later: Sequence[Point],
    times: list[float],
    points: Sequence[StepValue],
    parts: list[list[StepValue]],
    line: FittedLine,
    cut: int,
) -> Slowdown:
    """A rise at one moment. times: of all points; cut: of the condensed ones, the first after the moment."""
    values = [value for _, value in points]
    size = -(-len(later) // GROUPS)
    near = range(max((cut - 1) * size, 1), min((cut + 1) * size, len(later) - 1))
    middle = (median(values[:cut]) + median(values[cut:])) / 2
    # The moment between two of the points, such that most of them are on their side.
    after = min(
        near,
        key=lambda at: sum((value > middle) != (place >= at) for place, value in enumerate(times)),
    )
    last_fast = later[after - 1]
    since = Since(int(last_fast[0]), last_fast[4], later[-1][4] - last_fast[4])
    phases = []
    for name, curve in zip(PHASES, parts, strict=True):
        before, now = [value for _, value in curve[:cut]], [value for _, value in curve[cut:]]
        phases.append(PhaseGrowth(name, median(before), median(now), *shift(before, now)))
    return Slowdown(
        median(values[:cut]), median(values[cut:]), line, int(later[0][0]), int(later[-1][0]), _most_first(phases),
        LIKELY, since,
    )  # fmt: skip


ADVICE = {
    "data_wait": "find what the dataset does more of with each item: lists that it searches, files that grow",
    "forward": "find what the model does more of in each step: hooks, caches, tensors that it concatenates",
    "backward": "find which graph grows: detach what one step passes to the next",
    "optimizer": "find what the optimizer does more of in each step: parameters or state that are added",
}
NO_LOADER = (
    "find what the function that makes the batches does more of in each step: lists that it joins or searches"
)
ELSEWHERE = "find what the code does more of in each step: lists that it sorts, joins or writes as a whole"
BEGINS = "find what the training does from this step on: layers that begin to train, other data, more that is logged"
HARDWARE = (
    "compare the clocks and the temperature of the processor, and other programs, with those of the beginning"
)


def slowing(view: View) -> Finding | None:
    """Steps that take longer and longer, or longer since one moment."""
    found = slowdown(view.snapshot.pace)
    if found is None or _clocks(view, found):
        return None
    grown = carried(view) or counted(view)
    if grown is None and _judged(found, view.snapshot.cores):
        now_ns = _usual_ns(view, found)
        grown = function(view, found.begin_ns, now_ns, found.since is not None)
    alike = grown is None and _alike(found)
    if grown is None and not unexplained(found, view.snapshot.cores):
        return None
    first = found.phases[0]
    title = f"steps become slower: {span(found.begin_ns)} to {span(found.now_ns)} "
    if found.since is None:
        title += f"over {found.last - found.first:,} steps"
    else:
        title += f"since about step {found.since.step:,}, {duration(found.since.seconds)} after the first one"
    part = (first.now - first.before) / found.grown_ns
    if alike:
        title += ", in all phases"
    elif part >= MOST_OF and not view.gpu:  # a host that waits for a GPU does so in any phase
        title += f", {'all' if part >= ALMOST_ALL else percent(part)} of it in {first.name}"
    if grown is not None:
        title += f", {grown.title}"
    share = view.part(found.grown_ns / found.now_ns)
    sure: Confidence = "certain" if grown is not None else "likely" if found.since is None else "possible"
    draft = FindingDraft("slowing", title, share, sure)
    _tell(draft, found, first)
    if grown is not None:
        draft.saw(grown.evidence, PROFILER)
        draft.change(grown.advice, where=grown.where or view.line(first.name))
    elif alike:
        draft.change(HARDWARE)
    else:
        advice = ADVICE.get(first.name, ELSEWHERE) if found.since is None else BEGINS
        if advice is ADVICE["data_wait"] and not has_loader(view):
            advice = NO_LOADER
        draft.change(advice, where=view.line(first.name) or _seen(view, first.name))
    return draft.done()


def _judged(found: Slowdown, cores: CoreUse | None) -> bool:
    """Whether profiled steps tell what has grown: beside other programs, any function may look so in one of them."""
    if found.bounds is SMALL:
        return False
    if cores is None or not cores.shared or found.bounds is CLEAR:
        return True
    grew = any(one.low > 0 for one in found.phases)  # beyond the noise
    return grew and found.grown_ns >= UNEXPLAINED_SHARED * found.begin_ns


def _usual_ns(view: View, found: Slowdown) -> float:
    """The time of a step at the newest profiled one, which may be earlier than the end of the rise."""
    newest = view.snapshot.functions
    if newest is None or found.since is not None or found.last <= found.first:
        return found.now_ns
    part = (newest.step - found.first) / (found.last - found.first)
    return found.begin_ns + min(max(part, EARLIEST), 1.0) * found.grown_ns


def unexplained(found: Slowdown, cores: CoreUse | None) -> bool:
    """Whether a rise that nothing explains is one of the training, rather than of what else the machine does."""
    alike, shared = _alike(found), cores is not None and cores.shared
    if alike and shared:
        return False  # other programs take the cores
    if found.grown_ns < (UNEXPLAINED_SHARED if shared else UNEXPLAINED) * found.begin_ns:
        return False
    if found.since is None:
        return found.bounds is CLEAR
    # Another program that is not seen begins at one moment as well, and slows all phases down.
    if alike and cores is None:
        return False
    lasted = found.since.lasted_s
    return lasted >= max(LASTED_ALIKE_S if alike else LASTED_S, LASTED_PART * (lasted + found.since.seconds))


def _tell(draft: FindingDraft, found: Slowdown, first: PhaseGrowth) -> None:
    """The evidence of the times. first: the phase that has grown most."""
    line, since = found.line, found.since
    if since is not None:
        draft.saw(
            f"steps took {span(found.begin_ns)} until about step {since.step:,}, and {span(found.now_ns)} since then, "
            f"for {duration(since.lasted_s)}; a rise at one moment fits better than a steady one",
            CLOCK,
        )
    elif line.low > 0:
        each = f"{span(line.slope)} longer than the one before ({span(line.low)} to {span(line.high)})"
        draft.saw(f"since step {found.first:,}, each step takes {each}", CLOCK)
    draft.saw(f"{first.name} took {span(first.before)} of a step, and takes {span(first.now)} now", CLOCK)
    grew = [one for one in found.phases if one.low > 0 and one.grown >= LEAST_GROWN * found.grown_ns]
    if grew:
        each = ", ".join(
            f"{one.name} by {span(one.grown)} ({span(one.low)} to {span(one.high)})" for one in grew
        )
        draft.saw(f"grown beyond the noise: {each}; no other phase", CLOCK)


def _seen(view: View, phase: str) -> str | None:
    """The user's line that few stack samples in a phase show most often: there, steps spend what they have grown by."""
    frames = view.snapshot.stacks.frames if view.snapshot.stacks is not None else []
    own = [frame for frame in frames if frame[0] == phase and frame[5]]
    if sum(frame[4] for frame in own) < FEW_LOOKS:
        return None
    _, file, line, function, *_ = max(own, key=lambda frame: frame[4])
    return place(file, line, function)


def _clocks(view: View, found: Slowdown) -> bool:
    """Whether the GPU's clock has fallen by as much, which `throttling` names."""
    usual, now = view.snapshot.usual_clock_mhz, (view.snapshot.gpu or {}).get("sm_clock_mhz")
    slower = found.now_ns / found.begin_ns - 1
    return usual is not None and bool(now) and usual / float(now or usual) - 1 >= MOST_OF * slower


def _alike(found: Slowdown) -> bool:
    """Whether all busy phases grow alike."""
    busy = [one.now / one.before - 1 for one in found.phases if one.before >= BUSY * found.begin_ns]
    return bool(busy) and min(busy) >= AS_MUCH * max(busy) and max(busy) > 0


def piling_up(view: View) -> Finding | None:
    """Hooks or handlers of which each step adds some, although steps are not slower yet."""
    if (pair := profiles(view)) is None or slowing(view) is not None:
        return None
    first, newest = pair
    found = counted(view, (newest.step - first.step) * EACH_STEP, ADDED)
    if found is None:
        return None
    title = f"{found.title.removeprefix('while ')}: the training keeps adding some"
    draft = FindingDraft("piling-up", title, None, "certain")
    draft.saw(found.evidence, PROFILER)
    draft.change(found.advice, where=found.where)
    return draft.done()
