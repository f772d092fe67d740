"""The rules, and `diagnose`, which applies them, sorts the findings and says whose change is not worthwhile.

`FindingWatch` runs them on a live run. Only findings that two checks in a row agree on are reported, since findings
near their threshold flicker with the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ndd_engine.record.event import MeasuredChange
from ndd_engine.record.events import FindingEvent, KernelsEvent, TrialEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import counted, duration, percent, span, times
from ndd_watch.changes import TABLE

from . import (
    code_rules,
    copy_rules,
    data_rules,
    gpu_rules,
    host_rules,
    memory_rules,
    model_rules,
    needless_rules,
    pace_rules,
    process_rules,
    work_rules,
)
from .finding import ENDINGS, Change, Evidence, Finding, advice_of
from .view import CLOCK, MODEL, Cost, View, ceiling, rounded_up, taken

LEAST_STEPS = 20
LEAST_S = 2.0
# Fewer steps are enough if they are long.
FEW_STEPS = 8
LONG_S = 6.0
# Of a trace without steps.
LEAST_LAUNCHES, LEAST_TRACE_NS = 5, 10_000_000
# Minimum share of the time of what is named besides the model.
LEAST_NAMED = 0.005


def too_short(view: View) -> Finding | None:
    """Too few steps or too little measured time."""
    totals = view.snapshot.totals
    seconds = totals.wall_ns * 1e-9
    enough = totals.steps >= LEAST_STEPS and seconds >= LEAST_S
    if view.step_ns > 0 and (enough or (totals.steps >= FEW_STEPS and seconds >= LONG_S)):
        return None
    measured = f"{totals.steps:,} steps in {duration(seconds)} measured" if totals.steps else "no step yet"
    needed = f"needs {LEAST_STEPS} steps and {LEAST_S:g} s"
    evidence = f"the analysis {needed}, or {FEW_STEPS} steps and {LONG_S:g} s"
    return Finding(
        "too-short", f"too short to judge: {measured}; {needed}", (Evidence(evidence, CLOCK),), "certain"
    )


def healthy(view: View) -> Finding:
    """No bottleneck: the model takes the time. Proposes settings that may still speed it up."""
    model = on_device(view) or view.model
    limit = gpu_rules.of_this_gpu(view)
    more, seen_of_gpu = ("", ()) if limit is None else (f"; {limit[0]}", (limit[1],))
    if view.trace is not None and (capture := view.snapshot.kernels) is not None:
        if (short := _too_little(view, capture)) is not None:
            return short
        what = "the GPU is busy" if capture.method == "kernels" else "the CPU computes"
        text = f"{what} {percent(capture.busy_ns / capture.wall_ns)} of the time"
        beside = "its kernels" if capture.method == "kernels" else "its operators"
        seen = Evidence(f"little is to be gained outside of {beside}", gpu_rules.TRACE)
        return Finding("healthy", f"no bottleneck found: {text}{more}", (seen, *seen_of_gpu), "likely")
    title = f"no bottleneck found: {busy(view)}{more}"
    ideas = tuple(
        Change(row.idea.text, (f"{key}={row.idea.value}",))
        for key, row in TABLE.items()
        if row.idea is not None and row.idea.when(view.gpu, _in_effect(view, key))
    )
    if (change := work_rules.channels_last(view)) is not None and not _in_effect(view, "speed.channels_last"):
        ideas = (change, *ideas)
    seen = taken(model, "forward and backward take")
    return Finding("healthy", title, (seen, *seen_of_gpu), "likely", changes=ideas)


def _too_little(view: View, capture: KernelsEvent) -> Finding | None:
    """That a trace without steps has hardly any work; None if it has more."""
    assert view.trace is not None
    if view.trace.get("steps") or (capture.launches >= LEAST_LAUNCHES and capture.wall_ns >= LEAST_TRACE_NS):
        return None
    work = counted(capture.launches, "kernel" if capture.method == "kernels" else "operator")
    seen = f"a trace without steps needs {LEAST_LAUNCHES} of them and {span(LEAST_TRACE_NS)}"
    change = Change("record a few whole steps: call profiler.step() at the end of each")
    title = f"too short to judge: {work} in {span(capture.wall_ns)}"
    return Finding("too-short", title, (Evidence(seen, gpu_rules.TRACE),), "certain", changes=(change,))


def _in_effect(view: View, key: str) -> object:
    """The value of a setting. Threads only of a script: before a run of our own, other numbers of them are measured."""
    if key == "run.threads":
        return view.snapshot.run.threads if view.is_script and view.snapshot.run is not None else None
    return view.get(key)


def busy(view: View) -> str:
    """ "the model takes 95 % of the time": by the device clock if there is one, else by the host clock.

    Idle time inside of it is named, so that the figure agrees with the idle time shown beside it.
    """
    snapshot = view.snapshot
    aside = 1 - view.in_steps
    device = on_device(view)
    share = device.share * max(1 - aside, 0.0) if device is not None else view.model.wall
    text = f"the model takes {percent(share)} of the time"
    inside = share + (snapshot.idle.share or 0.0) - 1
    if inside >= LEAST_NAMED:
        text += f" ({percent(inside)} idle within it)"
    if aside >= LEAST_NAMED:
        text += f", evaluations and checkpoints {percent(aside)}"
    return text


def on_device(view: View) -> Cost | None:
    """Forward, loss and backward by the device clock; None without one."""
    costs = [cost for name in MODEL if (cost := view.device_cost(name)).ns] if view.gpu else []
    if not costs:
        return None
    ns, share = sum(cost.ns for cost in costs), sum(cost.share for cost in costs)
    return Cost(ns, share, None, share, costs[0].source)


FASTER = "faster"
IN_VAIN = ("no difference", "slower", "out of memory", "failed")


def leave(view: View, item: Finding) -> Finding:
    """The finding with the reason why its change is not worthwhile, if there is one."""
    if item.leave:
        return item
    if tried(item):
        trial = _newest(view, item.sets)
        assert trial is not None
        return replace(item, leave=f"already tried: {trial.text}")
    return too_short_for(view, item)


def with_trials(view: View, item: Finding) -> Finding:
    """The finding with what trials have measured of its changes: faster ones come first, and those without a gain last.

    What the factory offers against its cause is among them, and other values of its settings if they were faster.
    """
    if (offered := view.alternatives.get(item.cause)) is not None:
        item = replace(item, changes=(*item.changes, Change(offered[1], (offered[0],))))
    changes = []
    for change in (*item.changes, *_others_measured(view, item)):
        if (trial := _newest(view, change.sets)) is not None:
            measured = MeasuredChange(trial.verdict, trial.ratio, trial.low, trial.high)
            change = replace(change, measured=measured)
        changes.append(change)
    return replace(item, changes=tuple(sorted(changes, key=_use)))


def _others_measured(view: View, item: Finding) -> Iterator[Change]:
    """Faster changes of the same settings, or of others of the loader, that the finding does not propose."""
    proposed = {tuple(sorted(change.sets)) for change in item.changes if change.sets}
    subjects = set(map(_subject, proposed))
    for sets in dict.fromkeys(tuple(sorted(trial.sets)) for trial in view.snapshot.trials):
        newest = _newest(view, sets)
        if (
            newest is not None
            and newest.verdict == FASTER
            and sets not in proposed
            and _subject(sets) in subjects
        ):
            yield Change("this was measured as well", tuple(newest.sets))


def _subject(sets: Sequence[str]) -> frozenset[str]:
    """What settings are about: their keys, or the loader."""
    keys = (one.partition("=")[0] for one in sets)
    return frozenset("loader" if key.startswith("loader.") else key for key in keys)


def _use(change: Change) -> tuple[int, float]:
    measured = change.measured
    if measured is None or measured.verdict not in (FASTER, *IN_VAIN):
        return 1, 0.0
    return (0, -(measured.ratio or 1.0)) if measured.verdict == FASTER else (2, 0.0)


def tried(item: Finding) -> bool:
    """Whether no setting that the finding proposes is left to try: none was faster."""
    measured = [change.measured for change in item.changes if change.sets]
    return bool(measured) and all(one is not None and one.verdict in IN_VAIN for one in measured)


def proved(item: Finding) -> float | None:
    """The largest speedup that a trial has measured of one of its changes."""
    ratios = [
        one.ratio for change in item.changes if (one := change.measured) is not None and one.verdict == FASTER
    ]
    return ratios[0] if ratios else None


def _newest(view: View, sets: Sequence[str]) -> TrialEvent | None:
    """The newest trial of a change that was in effect."""
    wanted = sorted(sets)
    trials = [
        trial
        for trial in view.snapshot.trials
        if wanted and sorted(trial.sets) == wanted and trial.in_effect is not False
    ]
    return trials[-1] if trials else None


def too_short_for(view: View, item: Finding) -> Finding:
    """The finding with the number of steps from which its change breaks even, if the rest of this run is shorter.

    Unchanged if the run is long enough, or if the time of a restart is unknown. The advice remains: this run may be a
    short try of a longer one.
    """
    snapshot, step_s = view.snapshot, view.step_ns * 1e-9
    left, cost = snapshot.left.seconds, restart_s(view, item)
    if left is None or cost is None or snapshot.final or item.ceiling is None or not item.sets or not step_s:
        return item
    gain = 1 - 1 / item.ceiling
    if gain <= 0 or left * gain >= cost:
        return item
    steps = rounded_up(cost / (step_s * gain))
    why = (
        f"a restart takes {duration(cost)}; in the {duration(left)} left of this run, a speedup of "
        f"{times(item.ceiling)} would save at most {duration(left * gain)}"
    )
    return replace(item, from_steps=steps, evidence=(*item.evidence, Evidence(why, CLOCK)))


def restart_s(view: View, item: Finding) -> float | None:
    """Seconds until a restarted run trains again: the measured preparation and the encoding that the change adds.

    None if the preparation was not measured.
    """
    begin, ready, loader = view.snapshot.preparing_t, view.snapshot.started_t, view.snapshot.loader
    if begin is None or ready is None or ready < begin:
        return None
    seconds = ready - begin
    if "loader.cache=true" in item.sets and loader is not None and loader.item_ns is not None:
        seconds += loader.items * loader.item_ns * 1e-9
    return seconds


Rule = Callable[[View], Finding | None]

# Causes outside the run: they never take the first place from what can be changed in it.
NEIGHBOURS = ("neighbour-cores", "neighbour-gpu")
# From this share on, steps that become slower are named before anything else.
MUCH_SLOWER = 0.2
# Findings with a lower ceiling are dropped.
LEAST = 1.04
# Rules that apply to short runs as well.
ALWAYS: tuple[Rule, ...] = (
    *process_rules.RULES,
    *model_rules.FINITE_RULES,
    *memory_rules.RULES,
    *code_rules.EFFECT_RULES,
    *data_rules.PASS_RULES,
    model_rules.recompile,
    model_rules.compile_cost,
)
RULES: tuple[Rule, ...] = (
    *data_rules.RULES,
    *host_rules.RULES,
    *(GPU_RULES := (*copy_rules.RULES, *gpu_rules.RULES, *gpu_rules.FORMAT_RULES, gpu_rules.queue_gaps)),
    gpu_rules.gpu_unseen,
    *process_rules.RANK_RULES,
    pace_rules.slowing,
    pace_rules.piling_up,
    *model_rules.RULES,
    *work_rules.RULES,
    *code_rules.SCRIPT_RULES,
    *needless_rules.RULES,
    *code_rules.RULES,
    *host_rules.STEP_RULES,
)


def diagnose(snapshot: Snapshot, *, few_steps: bool = False) -> tuple[Finding, ...]:
    """All findings of a run, the most important first; never empty.

    few_steps: judge any number of steps, such as those of a trace.

    Order: what has ended the run, keeps it from going on, or is not finite; steps that have become much slower;
    hazards; a model that is compiled no more. Then bottlenecks of the run, what takes memory without need, other
    processes, bottlenecks whose change was tried and not faster, and findings that cost no time. Bottlenecks are sorted
    by the measured speedup of their change; if there is none, by ceiling or share of the time.
    """
    view = View(snapshot)
    found = [item for rule in ALWAYS if (item := rule(view)) is not None]
    short = None if few_steps else too_short(view)
    if short is not None:
        found.append(short)
    else:
        asked = (rule(view) for rule in RULES if view.gpu or rule not in GPU_RULES)
        found += [item for item in asked if item is not None and (item.ceiling or LEAST) >= LEAST]
    if view.trace is not None or not found:
        idle = (gpu_rules.gpu_idle(view, not found), gpu_rules.host_idle(view))
        found += [item for item in idle if item is not None]
    if not found:
        found.append(healthy(view))
    found = [with_trials(view, item) for item in found]
    found.sort(key=_rank)
    return tuple(leave(view, item) for item in found)


def _rank(item: Finding) -> tuple[int, float]:
    if item.cause in ENDINGS:
        return -1, float(ENDINGS.index(item.cause))
    if item.cause == "slowing" and (item.share or 0.0) >= MUCH_SLOWER and item.confidence != "possible":
        return 0, -1.0  # it becomes worse, and what grows takes memory as well
    freed = (
        item.cause == "fragmentation" and item.confidence == "possible"
    )  # on the host, where it may end by itself
    if not freed and item.cause in ("leak", "fragmentation", "worker-memory", "near-limit", "repeated-items"):
        return 0, 0.0
    if item.cause == "out-of-memory":  # after what has filled it
        return 0, 1.0
    # What takes memory, of the run itself: after what costs time, and before other processes.
    if freed or item.cause in ("evaluation-memory", "checkpoint-memory", "retain-graph", "piling-up"):
        return 1, 0.0
    if item.cause == "recompile" and item.ceiling is None:  # what was to run compiled runs without
        return 1, float("-inf")
    if item.ceiling is not None or item.share is not None:
        bound = proved(item) or item.ceiling or ceiling(item.share or 0.0)
        if tried(item):
            return 3, -bound
        outside = item.cause in NEIGHBOURS and proved(item) is None
        return (2 if outside else 1), -bound
    return (4 if item.cause == "too-short" else 5), 0.0


# A finding is unchanged while its possible gain (ceiling - 1) stays within this factor.
MATERIAL = 2.0
LEAST_GAIN = 0.02
# The finding for "not enough data yet".
UNTOLD = "too-short"
HEALTHY = "healthy"


class FindingWatch:
    """Call it with a Snapshot every few seconds; it returns the events to record. Not thread-safe."""

    def __init__(self, look: Callable[[Snapshot], Sequence[Finding]] = diagnose) -> None:
        self._look = look
        self._before: dict[str, Finding] = {}
        self._reported: dict[str, Finding] = {}

    def __call__(self, snapshot: Snapshot, last: bool = False) -> list[FindingEvent]:
        """Return what changed. last: no check follows, so findings count without a second one.

        Raises whatever a rule raises.
        """
        found = self._look(snapshot)
        # "healthy" is only reported if there is nothing else.
        now = {
            finding.cause: finding
            for place, finding in enumerate(found)
            if finding.cause != UNTOLD and (finding.cause != HEALTHY or place == 0)
        }
        before, self._before = self._before, now
        step, events = snapshot.step, []
        for cause, finding in now.items():
            told = self._reported.get(cause)
            if told is not None and not _changed(told, finding):
                continue
            if not last and (cause not in before or (told is not None and not _changed(told, before[cause]))):
                continue
            self._reported[cause] = finding
            events.append(FindingEvent(step, cause, finding.title, False, finding))
        for cause in [cause for cause in self._reported if cause not in now and cause not in before]:
            gone = self._reported.pop(cause)
            if cause != HEALTHY:  # the finding that replaces it says so
                events.append(FindingEvent(step, cause, gone.title, True, gone))
        return events


def _changed(told: Finding, now: Finding) -> bool:
    if advice_of(told) != advice_of(now):
        return True
    if now.cause == "leak" and told.changes != now.changes:  # what holds the memory has become known
        return True
    if told.ceiling is None or now.ceiling is None:
        return told.ceiling is not now.ceiling
    gains = sorted((told.ceiling - 1, now.ceiling - 1))
    return gains[1] > MATERIAL * max(gains[0], LEAST_GAIN)
