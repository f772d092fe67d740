"""Whether a change is worthwhile: not if a trial was not faster; in a short run, from how many steps on."""

from __future__ import annotations

from dataclasses import replace

from ndd_engine.record.events import TrialEvent
from ndd_engine.text import duration, times

from .finding import Evidence, Finding
from .view import CLOCK, View, rounded_up

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
