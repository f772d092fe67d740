"""Findings for runs that are too short to judge or have no bottleneck."""

from __future__ import annotations

from ndd_engine.text import duration, percent
from ndd_watch.changes import TABLE

from .finding import Change, Evidence, Finding
from .view import CLOCK, MODEL, Cost, View, taken

LEAST_STEPS = 20
LEAST_S = 2.0
# Fewer steps are enough if they are long.
FEW_STEPS = 8
LONG_S = 6.0
# Minimum share of the time of what is named besides the model.
LEAST_NAMED = 0.005


def too_short(view: View) -> Finding | None:
    """Too few steps or too little measured time."""
    totals = view.snapshot.totals
    seconds = totals.wall_ns * 1e-9
    enough = totals.steps >= LEAST_STEPS and seconds >= LEAST_S
    if view.step_ns > 0 and (enough or (totals.steps >= FEW_STEPS and seconds >= LONG_S)):
        return None
    measured = f"{totals.steps} steps in {duration(seconds)} measured" if totals.steps else "no step yet"
    needed = f"the analysis needs at least {LEAST_STEPS} steps and {LEAST_S:g} s"
    return Finding("too-short", f"too short to judge: {measured}", (Evidence(needed, CLOCK),), "certain")


def healthy(view: View) -> Finding:
    """No bottleneck: the model takes the time. Proposes settings that may still speed it up."""
    model = on_device(view) or view.model
    title = f"no bottleneck found: {busy(view)}"
    ideas = tuple(
        Change(row.idea.text, (f"{key}={row.idea.value}",))
        for key, row in TABLE.items()
        if row.idea is not None and row.idea.when(view.gpu, view.get(key))
    )
    return Finding("healthy", title, (taken(model, "forward and backward take"),), "likely", changes=ideas)


def busy(view: View) -> str:
    """ "the model takes 95 % of the time": by the device clock if there is one, else by the host clock.

    Idle time inside of it is named, so that the figure agrees with the idle time shown beside it.
    """
    snapshot = view.snapshot
    aside = sum(view.cost(name).wall for name in ("evaluate", "checkpoint"))
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
