"""When there is nothing to say: too little was measured, or nothing holds the run back."""

from __future__ import annotations

from ndd_engine.text import duration

from .finding import Change, Evidence, Finding
from .view import CLOCK, View, percent, taken

LEAST_STEPS = 20
LEAST_S = 2.0
# Of long steps fewer will do.
FEW_STEPS = 8
LONG_S = 6.0


def too_short(view: View) -> Finding | None:
    """Fewer steps, or less measured time, than a judgement needs."""
    totals = view.snapshot.totals
    seconds = totals.wall_ns * 1e-9
    enough = totals.steps >= LEAST_STEPS and seconds >= LEAST_S
    if view.step_ns > 0 and (enough or (totals.steps >= FEW_STEPS and seconds >= LONG_S)):
        return None
    measured = f"{totals.steps} steps in {duration(seconds)} were measured" if totals.steps else "no step yet"
    needed = f"a judgement takes {LEAST_STEPS} steps and {LEAST_S:g} s"
    return Finding("too-short", f"too short to judge: {measured}", (Evidence(needed, CLOCK),), "certain")


def healthy(view: View) -> Finding:
    """The model takes the time; what might still move it here."""
    model = view.model
    title = f"nothing holds it back: the model takes {percent(model.share)} of each step"
    return Finding(
        "healthy", title, (taken(model, "forward and backward take"),), "likely", changes=_ideas(view)
    )


def _ideas(view: View) -> tuple[Change, ...]:
    """Settings that move a run whose time is all the model's; nobody knows by how much before they are tried."""
    ideas = []
    if view.card and view.get("precision.amp") == "off":
        ideas.append(Change("bf16 may be faster on this card", ("precision.amp=bf16",)))
    if view.get("speed.compile") == "off":
        ideas.append(Change("a compiled model may be faster", ("speed.compile=default",)))
    return tuple(ideas)
