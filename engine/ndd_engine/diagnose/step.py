"""Time besides the model: optimizer step, clipping, logging, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from ndd_engine.text import number, percent, span

from .finding import Change, Evidence, Finding
from .loader_facts import slower
from .view import CLOCK, CONFIG, FLOOR, Draft, View, taken

# Target share of the time for evaluations and for checkpoints.
AIM = 0.05
# Minimum share of an update that is already fused.
MUCH = 0.3
# Below these settings the run logs often.
SHORT_WINDOW_S = 0.1
FEW_STEPS = 5
# Section of the configuration -> (cause, what is done).
ASIDES = {"evaluate": ("evaluation", "evaluate"), "checkpoint": ("checkpoint", "save checkpoints")}


def optimizer(view: View) -> Finding | None:
    """The parameter update, including zeroing the gradients."""
    cost = view.cost("optimizer", "zero_grad")
    if not cost.clear:
        return None
    applied = [item.applied for item in view.snapshot.settings if item.name == "optimizer.implementation"]
    used = (applied[0] if applied else "") or view.get("optimizer.implementation")
    edits = {}
    # PyTorch's fused SGD does not update sharded parameters.
    sharded = (view.whole("parallel.ranks") or 1) > 1 and view.get("parallel.strategy") == "fsdp2"
    if used in ("loop", "foreach") and not (sharded and view.get("optimizer.name") == "sgd"):
        text = "use the fused optimizer (one kernel for all parameters)"
        edits["optimizer.implementation=fused"] = text
    if view.get("optimizer.set_to_none") is False and view.cost("zero_grad").share >= FLOOR / 2:
        edits["optimizer.set_to_none=true"] = "set gradients to None instead of zero"
    if not edits and (cost.share < MUCH or view.crowded):
        return None  # its threads may wait for cores that others use
    title = f"the optimizer (with zero_grad) takes {percent(cost.share)} of each step"
    draft = Draft("optimizer", title, cost, "certain" if used in ("loop", "foreach") else "likely")
    draft.add(taken(cost, "the parameter update takes"))
    if isinstance(used, str):
        draft.saw(f"optimizer.implementation is {used}", CONFIG)
    draft.add(_parameters(view))
    if edits:
        draft.change(" and ".join(edits.values()), *edits)
    draft.change(
        "use a larger effective batch for fewer updates (changes the training; adjust the learning rate)"
    )
    return draft.done()


def clip(view: View) -> Finding | None:
    """Clipping the gradient's norm."""
    cost, limit, norm = view.cost("clip"), view.get("clip.max_norm"), view.snapshot.grad_norm
    limited = isinstance(limit, (int, float)) and limit > 0
    # Disabling it changes the training: require a larger share.
    if not cost.clear or cost.share < 2 * FLOOR or not (limited or view.is_script):
        return None
    draft = Draft("clip", f"gradient clipping takes {percent(cost.share)} of each step", cost)
    draft.add(taken(cost, "clipping takes"))
    if norm:
        draft.saw(f"the latest gradient norm is {number(norm)}, the limit is {limit:g}", "record")
    draft.add(_parameters(view))
    text = "disable clipping (changes the training at steps whose norm is above the limit)"
    draft.change(text, *(["clip.max_norm=0.0"] if limited else []))
    return draft.done()


def logging(view: View) -> Finding | None:
    """Recording or reading the loss at almost every step."""
    # On a GPU, host time costs nothing while it computes, and reading losses is synchronisation: see gpu.sync.
    cost = view.device_cost("other") if view.gpu else view.cost("log", "other")
    # Setting -> (whether it is costly, its usual value).
    often: dict[str, tuple[Callable[[float], bool], str]] = {
        "log.window_s": (lambda seconds: seconds < SHORT_WINDOW_S, "1.0"),
        "log.every_steps": (lambda steps: steps < FEW_STEPS, "10"),
    }
    values = {key: value for key in often if isinstance(value := view.get(key), (int, float))}
    costly = {key: value for key, value in values.items() if often[key][0](value)}
    if not cost.clear or not costly:
        return None
    draft = Draft("logging", f"logging takes {percent(cost.share)} of each step", cost)
    draft.add(taken(cost, "reading losses and writing the record takes"))
    draft.saw(", ".join(f"{key} is {value:g}" for key, value in costly.items()), CONFIG)
    draft.change("log less often", *(f"{key}={often[key][1]}" for key in costly))
    # The recorder's thread shares the interpreter lock with the training thread.
    if (slowdown := view.slowdown()) is not None and (slow := slower(view)) is not None and not view.gpu:
        title = "logging costs up to {share} of each step"
        draft.widen(cost.share + slowdown, title, slow.text, slow.source)
    return draft.done()


def evaluation(view: View) -> Finding | None:
    """Evaluations between the steps."""
    left, done = view.snapshot.left, view.snapshot.totals.evaluations
    return _aside(view, "evaluate", done, left.evaluations, left.evaluation_s, _shorter_evaluations(view))


def checkpoint(view: View) -> Finding | None:
    """Checkpoints between the steps."""
    left, done = view.snapshot.left, view.snapshot.totals.checkpoints
    return _aside(view, "checkpoint", done, left.checkpoints, left.checkpoint_s)


STEP_RULES = (optimizer, clip, logging, evaluation, checkpoint)


def _aside(
    view: View, section: str, done: int, to_come: int, each_s: float | None, more: Sequence[Change] = ()
) -> Finding | None:
    """Cost of evaluations or checkpoints. done, to_come: counts; each_s: mean seconds of one; more: other changes."""
    totals, periods = view.snapshot.totals, _periods(view, section)
    if not done or not each_s or not periods or not totals.wall_ns or done + to_come < 2:
        return None
    period_s, measured = min(periods.values()), totals.share(section)
    expected = each_s / (each_s + period_s)
    share = max(expected, measured)
    if share < FLOOR or expected < FLOOR / 2:
        return None
    cause, verb = ASIDES[section]
    draft = Draft(cause, f"{cause}s take {percent(share)} of the time", view.part(share), "certain")
    draft.saw(f"each takes {span(each_s * 1e9)}, after every {span(period_s * 1e9)} of training", CLOCK)
    draft.saw(f"{done} {cause}s took {percent(measured)} of the time so far", CLOCK)
    sets, aim_s = [], each_s * (1 - AIM) / AIM
    for key, seconds in periods.items():
        if seconds < aim_s:
            value = view.get(f"{section}.{key}") * ceil(aim_s / seconds)
            sets.append(
                f"{section}.{key}={value:.1f}" if key == "every_minutes" else f"{section}.{key}={value}"
            )
    draft.change(f"{verb} less often, to take less than {percent(AIM)} of the time", *sets)
    draft.add(*more)
    return draft.done()


def _periods(view: View, section: str) -> dict[str, float]:
    """Seconds of training between two of them, by setting."""
    step_s, run = view.step_ns * 1e-9, view.snapshot.run
    found: dict[str, float] = {}
    if every := view.whole(f"{section}.every_steps"):
        found["every_steps"] = every * step_s
    if (every := view.whole(f"{section}.every_epochs")) and run is not None and run.steps_per_epoch > 0:
        found["every_epochs"] = every * run.steps_per_epoch * step_s
    minutes = view.get(f"{section}.every_minutes")
    if isinstance(minutes, (int, float)) and minutes > 0:
        found["every_minutes"] = minutes * 60.0
    return {key: seconds for key, seconds in found.items() if seconds > 0}


def _shorter_evaluations(view: View) -> list[Change]:
    """Changes that make an evaluation shorter."""
    changes = []
    marks = reversed(view.snapshot.marks)
    batches = next((item.mark.data.get("batches") for item in marks if item.mark.kind == "evaluation"), None)
    periods, each_s = _periods(view, "evaluate"), view.snapshot.left.evaluation_s
    if isinstance(batches, int) and batches > 1 and periods and each_s:
        count = max(int(batches * AIM * min(periods.values()) / each_s), 1)
        if count < batches:
            text = f"evaluate on {count} of {batches} batches"
            changes.append(Change(text, (f"evaluate.batches={count}",)))
    if view.get("workload.name") == "summarise" and view.whole("workload.summaries"):
        text = "do not generate summaries for ROUGE during training"
        changes.append(Change(text, ("workload.summaries=0",)))
    return changes


def _parameters(view: View) -> Evidence | None:
    run = view.snapshot.run
    return (
        Evidence(f"the model has {run.parameters:,} parameters", "model")
        if run is not None and run.parameters
        else None
    )
