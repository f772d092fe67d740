"""Scripts that are only observed: slow functions of their own, and checkpoints and evaluations by their time."""

from __future__ import annotations

from ndd_engine.text import counted, percent, span

from .finding import Finding
from .view import CLOCK, FLOOR, Draft, View, place

PROFILER = "Python profiler, one step"
# Minimum part of a wait for data that a function must take to be its cause.
MOST_OF = 0.5


def slow_function(view: View) -> Finding | None:
    """A function of the script that takes much of a step by itself, outside torch."""
    found = view.slowest_function
    if found is None or found.share < 2 * FLOOR:
        return None
    if view.wait.clear and MOST_OF * view.wait.ns <= found.ns:
        return None  # `data_wait` names it
    where = place(found.file, found.line, found.name)
    title = f"{where} takes {percent(found.share)} of each step"
    draft = Draft("slow-function", title, view.part(found.share))
    draft.saw(f"{counted(found.calls, 'call')} in one step take {span(found.ns)} outside torch", PROFILER)
    draft.saw(f"a step takes {span(view.step_ns)}", CLOCK)
    draft.change(
        "do its work once before training, cache its results, or use tensor operations instead of Python loops",
        where=where,
    )
    return draft.done()


def aside(view: View) -> Finding | None:
    """Checkpoints or evaluations of the script, whose number and interval are its own."""
    if not view.is_script:
        return None
    totals = view.snapshot.totals
    if not totals.wall_ns:
        return None
    name = max(("checkpoint", "evaluate"), key=lambda phase: totals.phases.get(phase, 0))
    spent = totals.phases.get(name, 0)
    share = spent / totals.wall_ns
    if share < 2 * FLOOR:
        return None
    what = "saving checkpoints" if name == "checkpoint" else "evaluating"
    cause = "checkpoint" if name == "checkpoint" else "evaluation"
    draft = Draft(cause, f"{what} takes {percent(share)} of the time", view.part(share))
    draft.saw(f"{span(spent)} of {span(totals.wall_ns)}", CLOCK)
    draft.change("save less often" if name == "checkpoint" else "evaluate less often, or on fewer batches")
    return draft.done()


RULES = (slow_function, aside)
