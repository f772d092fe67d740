"""Whether a change is still worthwhile in this run: not if the run ends soon or a trial was not faster."""

from __future__ import annotations

from dataclasses import replace

from ndd_engine.record.events import TrialEvent
from ndd_engine.text import duration, times

from .finding import Finding
from .view import View

IN_VAIN = ("no difference", "slower", "out of memory", "failed")


def leave(view: View, item: Finding) -> Finding:
    """The finding with the reason why its change is not worthwhile, if there is one."""
    if item.leave:
        return item
    if (trial := tried(view, item)) is not None:
        return replace(item, leave=f"already tried: {trial.text}")
    text = too_late(view, item)
    return replace(item, leave=text) if text else item


def tried(view: View, item: Finding) -> TrialEvent | None:
    """The newest trial of the proposed change if it was not faster, else None."""
    wanted = sorted(item.sets)
    trials = [trial for trial in view.snapshot.trials if wanted and sorted(trial.sets) == wanted]
    return trials[-1] if trials and trials[-1].verdict in IN_VAIN else None


def too_late(view: View, item: Finding) -> str:
    """Why the change does not break even before the run ends; "" if it does or if that is unknown."""
    snapshot = view.snapshot
    left, cost = snapshot.left.seconds, restart_s(view, item)
    if left is None or cost is None or snapshot.final or item.ceiling is None or not item.sets:
        return ""
    saved = left * (1 - 1 / item.ceiling)
    if saved >= cost:
        return ""
    return (
        f"the run ends in {duration(left)}; a restart takes {duration(cost)}, and a speedup of {times(item.ceiling)} "
        f"would save at most {duration(saved)}"
    )


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
