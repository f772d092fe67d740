"""Losses, gradients and weights that are not finite, and the updates that are skipped because of them."""

from __future__ import annotations

from pathlib import PurePath

from ndd_engine.errors import shortened
from ndd_engine.record.events import NotFiniteEvent
from ndd_engine.record.figures import bad_loss_text
from ndd_engine.record.snapshot import NotFinite
from ndd_engine.text import counted, number, percent, printable

from .finding import Finding
from .view import Draft, View

LOOK = "closer look at a step"
# Skipped updates, and their share, that are more than a scaler skips to find the largest scale: one in 2,000.
MANY, SHARE = 20, 0.005
# A loss that has grown so many times before it was not finite has diverged.
DIVERGED = 100.0
# Values of this magnitude have grown without a bound: their products overflow.
LARGE = 1e10
# Of a text of the user's own, such as the name of a module.
LONGEST = 60


def not_finite(view: View) -> Finding | None:
    """Skipped updates, or losses that are not finite: since when, and what was not finite first."""
    known = view.snapshot.not_finite
    skips = known.skipped >= MANY and known.skipped > SHARE * known.updates
    if not skips and known.loss is None:
        return None
    title = skipped_text(known) if skips else f"the loss is {bad_loss_text(known)}"
    origin = known.origin
    cause = "" if origin is None else cause_text(origin)
    grown = _grown(known) if origin is None or origin.what in ("", "parameter") else None
    if grown is not None:
        cause = f"it had grown from {small(grown[0])} to {small(grown[1])} before"
    draft = Draft("not-finite", f"{title}: {cause}" if cause else title, None, "certain")
    if known.loss is not None:
        value, first, before, last, _ = known.loss
        finite = (
            "no finite loss was seen before"
            if before is None
            else f"it was {small(last or 0.0)} at step {before:,}"
        )
        draft.saw(
            f"the loss was {value} at step {first:,}; {finite}", "losses that are read ten times a second"
        )
    if known.skipped:
        scale = view.snapshot.loss_scale
        draft.saw(f"{counted(known.skipped, 'update')} skipped by the gradient scaler", "gradient scaler")
        if known.scales is not None and scale is not None:
            first_scale, lowest = (small(one) for one in known.scales)
            text = f"its scale was {first_scale} at first, {lowest} at the lowest, and is {small(scale)}"
            draft.saw(text, "gradient scaler")
    if origin is not None:
        draft.saw(_seen(origin), LOOK)
    text, where = advice_text(origin, known.skipped > 0, grown is not None)
    draft.change(text, where=where)
    return draft.done()


def skipped_text(known: NotFinite) -> str:
    """ "23,180 of 23,680 updates skipped (98 %) since step 500"."""
    share = percent(known.skipped / max(known.updates, known.skipped))
    text = f"{known.skipped:,} of {known.updates:,} updates skipped ({share})"
    return text if known.begun is None else f"{text} since step {known.begun:,}"


def cause_text(origin: NotFiniteEvent) -> str:
    """ "the input x is not finite (NaN in column 3 of 128)"."""
    name, part = _named(origin.name), _part(origin)
    module = f"{name or 'the model'}" + (f" ({_named(origin.kind)})" if origin.kind else "")
    where = f" at {_place(origin)}" if origin.file else ""
    grown = f", up to {small(origin.largest)}" if origin.largest >= LARGE else ""
    match origin.what:
        case "input":
            return f"the input {name or 'of the model'} is not finite ({part})"
        case "output":
            return f"the output of {module} is not finite ({part}), while its inputs are{grown}"
        case "before":
            return f"what is computed{where} is not finite ({part}), before {module}"
        case "function":
            return f"{name}{where} returns values that are not finite ({part}) from finite arguments{grown}"
        case "loss":
            return f"the loss{where} is not finite, while the outputs of the model are"
        case "gradient":
            return (
                f"the gradients of {origin.count:,} of {origin.of:,} parameters are not finite, such as {name} "
                f"({part}), while the loss is"
            )
        case "parameter":
            return f"{origin.count:,} of {origin.of:,} parameters are not finite, such as {name} ({part})"
    return ""


def _part(origin: NotFiniteEvent) -> str:
    """ "NaN in column 3 of 128", "infinite in 12 of 64 items"."""
    what = (
        "NaN" if origin.nan and not origin.infinite else "infinite" if not origin.nan else "NaN or infinite"
    )
    if origin.axis and origin.places <= len(origin.at):
        words = [f"{one:,}" for one in origin.at]
        joined = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
        text = f"{what} in {origin.axis}{'s' * (len(words) > 1)} {joined} of {origin.size:,}"
        inside = origin.share * origin.size / max(origin.places, 1)
        return (
            text
            if inside >= 1 or origin.axis == "item"
            else f"{text}, in {percent(inside)} of the values there"
        )
    if origin.axis:
        return f"{what} in {origin.places:,} of {counted(origin.size, origin.axis)}"
    return f"{what} in {'all' if origin.share >= 1 else percent(origin.share) + ' of its'} values"


def _seen(origin: NotFiniteEvent) -> str:
    """The evidence of a closer look."""
    step = f"step {origin.step:,}"
    if not origin.what:
        return f"up to {step}, everything was finite in the steps that were looked at"
    text = f"{step}: {cause_text(origin)}"
    if origin.made is not None:
        file, line, function = origin.made
        text += f"; {_named(function)} returns it ({printable(PurePath(file).name)}:{line})"
    elif origin.file and origin.what in ("input", "output"):
        text += f" ({_place(origin)})"
    return text


def advice_text(
    origin: NotFiniteEvent | None, scaled: bool = False, diverged: bool = False
) -> tuple[str, str | None]:
    """(what to do, where)."""
    what = "" if origin is None else origin.what
    where = _place(origin) if origin is not None and origin.file else None
    if origin is not None and origin.made is not None:
        file, line, function = origin.made
        where = printable(f"{PurePath(file).name}:{line} in {function}")
    if what == "input":
        return "repair such values where the batch is made, or leave these items out", where
    diverged |= origin is not None and origin.largest >= LARGE
    if what in ("output", "before", "function", "loss") and not diverged:
        half = ", or of values beyond 65,504 in float16" if scaled else ""
        return (
            f"look there for a division by zero, the logarithm of zero, or an overflow of exp(){half}",
            where,
        )
    if scaled and what in ("", "gradient"):
        return (
            "use bfloat16, which needs no scaler, a lower learning rate, or clip gradients after scaler.unscale_()",
            where,
        )
    if what == "parameter" or diverged:
        return (
            "continue from a checkpoint before that step, with a lower learning rate or clipped gradients "
            "(torch.nn.utils.clip_grad_norm_)",
            where,
        )
    return (
        "train a few steps with torch.autograd.set_detect_anomaly(True), which names the operation",
        where,
    )


def _grown(known: NotFinite) -> tuple[float, float] | None:
    """(lowest, last finite loss), if the loss had diverged before it was not finite."""
    last, lowest = known.loss[3:] if known.loss is not None else (None, None)
    if last is None or lowest is None or last <= DIVERGED * max(abs(lowest), 1e-6):
        return None
    return lowest, last


def small(value: float) -> str:
    """A number of any size, in a few digits: "65,536", "2.31", "6e-05", "1.2e+09"."""
    return number(value, 3) if value == 0 or 1e-2 <= abs(value) < 1e6 else f"{value:.2g}"


def _place(origin: NotFiniteEvent) -> str:
    return printable(f"{PurePath(origin.file).name}:{origin.line}")


def _named(name: str) -> str:
    return shortened(printable(name), LONGEST)


RULES = (not_finite,)
