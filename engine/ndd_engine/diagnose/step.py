"""Time besides the model: optimizer step, clipping, logging, evaluations and checkpoints."""

from __future__ import annotations

from math import ceil
from typing import Any

from ndd_engine.text import number

from .finding import Change, Evidence, Finding
from .view import CLOCK, CONFIG, FLOOR, NOTHING, Cost, View, ceiling, finding, percent, span, taken

# Target share of the time for evaluations and for checkpoints.
AIM = 0.05
# Minimum share of an update that is already fused.
MUCH = 0.3
# Below these settings the run logs often.
SHORT_WINDOW_S = 0.1
FEW_STEPS = 5
# One evaluation or checkpoint may take this much longer than their mean.
UNEVEN = 1.1


def optimizer(view: View) -> Finding | None:
    """The parameter update, including zeroing the gradients."""
    cost = view.cost("optimizer", "zero_grad")
    if not cost.clear:
        return None
    sets: tuple[str, ...] = ()
    parts = []
    applied = _applied(view, "optimizer.implementation") or view.get("optimizer.implementation")
    slow = applied in ("loop", "foreach")
    if slow:
        sets += ("optimizer.implementation=fused",)
        parts.append("use the fused optimizer (one kernel for all parameters)")
    if view.get("optimizer.set_to_none") is False and view.cost("zero_grad").share >= FLOOR / 2:
        sets += ("optimizer.set_to_none=true",)
        parts.append("set gradients to None instead of zero")
    if not sets and cost.share < MUCH:
        return None
    changes = [Change(" and ".join(parts), sets)] if sets else []
    changes.append(
        Change(
            "use a larger effective batch for fewer updates (changes the training; adjust the learning rate)"
        )
    )
    return finding(
        "optimizer",
        f"the optimizer takes {percent(cost.share)} of each step",
        cost,
        [
            taken(cost, "the parameter update takes"),
            Evidence(f"optimizer.implementation is {applied}", CONFIG) if isinstance(applied, str) else None,
            _parameters(view),
        ],
        changes,
        "certain" if slow else "likely",
    )


def clip(view: View) -> Finding | None:
    """Clipping the gradient's norm."""
    cost = view.cost("clip")
    limit = view.get("clip.max_norm")
    # Disabling it changes the training: require a larger share.
    if not cost.clear or cost.share < 2 * FLOOR or not isinstance(limit, (int, float)) or limit <= 0:
        return None
    norm = view.snapshot.grad_norm
    changes = [
        Change(
            "disable clipping (changes the training at steps whose norm is above the limit)",
            ("clip.max_norm=0.0",),
        )
    ]
    return finding(
        "clip",
        f"gradient clipping takes {percent(cost.share)} of each step",
        cost,
        [
            taken(cost, "clipping takes"),
            Evidence(f"the latest gradient norm is {number(norm)}, the limit is {limit:g}", "record")
            if norm
            else None,
            _parameters(view),
        ],
        changes,
    )


def logging(view: View) -> Finding | None:
    """Recording or reading the loss at almost every step."""
    # On a GPU, reading losses is synchronisation: see gpu.sync.
    cost = view.cost("log", "other") if not view.card else _device_gap(view, "other")
    if not cost.clear:
        return None
    sets: tuple[str, ...] = ()
    parts = []
    window_s, every = view.get("log.window_s"), view.whole("log.every_steps")
    if isinstance(window_s, (int, float)) and window_s < SHORT_WINDOW_S:
        sets += ("log.window_s=1.0",)
        parts.append(f"log.window_s is {window_s:g}")
    if every is not None and every < FEW_STEPS:
        sets += ("log.every_steps=10",)
        parts.append(f"log.every_steps is {every}")
    stacks = view.get("log.stacks_hz")
    if isinstance(stacks, (int, float)) and stacks > 20:
        sets += ("log.stacks_hz=10.0",)
        parts.append(f"log.stacks_hz is {stacks:g}")
    if not sets:
        return None
    # The recorder's thread shares the interpreter lock with the training thread.
    bound = max(view.undisturbed() or 1.0, ceiling(min(2 * cost.share, 0.9)))
    return finding(
        "logging",
        f"logging takes {percent(cost.share)} of each step",
        cost,
        [taken(cost, "reading losses and writing the record takes"), Evidence(", ".join(parts), CONFIG)],
        [Change("log less often", sets)],
        bound=bound,
    )


def evaluation(view: View) -> Finding | None:
    """Evaluations between the steps."""
    left, totals = view.snapshot.left, view.snapshot.totals
    return _aside(
        view,
        "evaluation",
        "evaluate",
        totals.evaluations,
        left.evaluations,
        left.evaluation_s,
        _evaluation_changes(view),
    )


def checkpoint(view: View) -> Finding | None:
    """Checkpoints between the steps."""
    left, totals = view.snapshot.left, view.snapshot.totals
    return _aside(
        view, "checkpoint", "checkpoint", totals.checkpoints, left.checkpoints, left.checkpoint_s, []
    )


RULES = (optimizer, clip, logging, evaluation, checkpoint)


def _aside(
    view: View, cause: str, section: str, done: int, to_come: int, each_s: float | None, more: list[Change]
) -> Finding | None:
    """Cost of evaluations or checkpoints. done, to_come: counts; each_s: mean seconds of one; more: other changes."""
    totals = view.snapshot.totals
    periods = _periods(view, section)
    if not done or each_s is None or not periods or not totals.wall_ns or done + to_come < 2:
        return None
    period_s = min(periods.values())
    share = each_s / (each_s + period_s)
    measured = totals.share(section)
    if max(share, measured) < FLOOR or share < FLOOR / 2:
        return None
    share = max(share, measured)
    name = {"evaluate": "evaluations", "checkpoint": "checkpoints"}[section]
    aim_s = each_s * (1 - AIM) / AIM
    sets = tuple(
        _rarer(view, section, key, aim_s / seconds) for key, seconds in periods.items() if seconds < aim_s
    )
    verb = "evaluate" if section == "evaluate" else "save checkpoints"
    text = f"{verb} less often, to take less than {percent(AIM)} of the time"
    return finding(
        cause,
        f"{name} take {percent(share)} of the time",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(
                f"each takes {span(each_s * 1e9)}, after every {span(period_s * 1e9)} of training", CLOCK
            ),
            Evidence(f"{done} {name} took {percent(measured)} of the time so far", CLOCK),
        ],
        [Change(text, sets), *more],
        "certain",
        bound=ceiling(UNEVEN * share),
    )


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


def _rarer(view: View, section: str, key: str, factor: float) -> str:
    value: Any = view.get(f"{section}.{key}")
    if key == "every_minutes":
        return f"{section}.{key}={value * ceil(factor):.1f}"
    return f"{section}.{key}={value * ceil(factor)}"


def _evaluation_changes(view: View) -> list[Change]:
    """Changes that make an evaluation shorter."""
    changes = []
    marks = reversed(view.snapshot.marks)
    batches = next((item.mark.data.get("batches") for item in marks if item.mark.kind == "evaluation"), None)
    periods, each_s = _periods(view, "evaluate"), view.snapshot.left.evaluation_s
    if isinstance(batches, int) and batches > 1 and periods and each_s:
        count = max(int(batches * AIM * min(periods.values()) / each_s), 1)
        if count < batches:
            changes.append(
                Change(f"evaluate on {count} of {batches} batches", (f"evaluate.batches={count}",))
            )
    if view.get("workload.name") == "summarise" and view.whole("workload.summaries"):
        changes.append(
            Change("do not generate summaries for ROUGE during training", ("workload.summaries=0",))
        )
    return changes


def _device_gap(view: View, name: str) -> Cost:
    """Idle time of the GPU in a phase; host time costs nothing while the GPU computes."""
    phase = view.phases.get(name)
    total = sum(item.device_ns or 0.0 for item in view.phases.values() if "/" not in item.name)
    if phase is None or phase.device_ns is None or not total:
        return NOTHING
    return Cost(phase.device_ns, phase.device_ns / total, phase.share_error, phase.device_ns / total)


def _applied(view: View, name: str) -> str | None:
    """The applied value of a setting, as read back."""
    return next((setting.applied for setting in view.snapshot.settings if setting.name == name), None)


def _parameters(view: View) -> Evidence | None:
    run = view.snapshot.run
    return Evidence(f"the model has {run.parameters:,} parameters", "model") if run is not None else None
