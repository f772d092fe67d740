"""The rules, and `diagnose`, which applies them, sorts the findings and says whose change is not worthwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ndd_engine.record.events import TrialEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import duration, times

from . import formats, gpu, hazards, healthy, loader, model, processor, ranks, script, step
from .finding import Evidence, Finding
from .view import CLOCK, View, ceiling, rounded_up

IN_VAIN = ("no difference", "slower", "out of memory", "failed")


def leave(view: View, item: Finding) -> Finding:
    """The finding with the reason why its change is not worthwhile, if there is one."""
    if item.leave:
        return item
    if (trial := tried(view, item)) is not None:
        return replace(item, leave=f"already tried: {trial.text}")
    return too_short_for(view, item)


def tried(view: View, item: Finding) -> TrialEvent | None:
    """The newest trial of the proposed change if it was not faster, else None."""
    trial = _newest(view, item)
    return trial if trial is not None and trial.verdict in IN_VAIN else None


def proved(view: View, item: Finding) -> float | None:
    """The speedup of the proposed change by its newest trial, if it was faster."""
    trial = _newest(view, item)
    return trial.ratio if trial is not None and trial.verdict == "faster" else None


def _newest(view: View, item: Finding) -> TrialEvent | None:
    wanted = sorted(item.sets)
    trials = [trial for trial in view.snapshot.trials if wanted and sorted(trial.sets) == wanted]
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

# Findings with a lower ceiling are dropped.
LEAST = 1.04
# Rules that apply to short runs as well.
ALWAYS: tuple[Rule, ...] = (*hazards.RULES, model.compile_cost)
RULES: tuple[Rule, ...] = (
    *loader.RULES,
    *processor.RULES,
    *(GPU_RULES := (*gpu.RULES, *formats.FORMAT_RULES)),
    *ranks.RULES,
    *model.RULES,
    *script.SCRIPT_RULES,
    *step.STEP_RULES,
)


def diagnose(snapshot: Snapshot, *, few_steps: bool = False) -> tuple[Finding, ...]:
    """All findings of a run, the most important first; never empty.

    few_steps: judge any number of steps, such as those of a trace.

    Order: hazards, a model that is compiled no more, bottlenecks, bottlenecks whose change was tried and not faster,
    findings that cost no time. Bottlenecks are sorted by the measured speedup of their change; if there is none, by
    ceiling or share of the time.
    """
    view = View(snapshot)
    found = [item for rule in ALWAYS if (item := rule(view)) is not None]
    short = None if few_steps else healthy.too_short(view)
    if short is not None:
        found.append(short)
    else:
        asked = (rule(view) for rule in RULES if view.gpu or rule not in GPU_RULES)
        found += [item for item in asked if item is not None and (item.ceiling or LEAST) >= LEAST]
    if not found:
        found.append(healthy.healthy(view))
    found.sort(key=lambda item: _rank(view, item))
    return tuple(leave(view, item) for item in found)


def _rank(view: View, item: Finding) -> tuple[int, float]:
    if item.cause in ("leak", "near-limit"):
        return 0, 0.0
    if item.cause == "recompile" and item.ceiling is None:  # what was to run compiled runs without
        return 1, float("-inf")
    if item.ceiling is not None or item.share is not None:
        bound = proved(view, item) or item.ceiling or ceiling(item.share or 0.0)
        return (1 if tried(view, item) is None else 2), -bound
    return (3 if item.cause == "too-short" else 4), 0.0
