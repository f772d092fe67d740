"""Converts the state of a run to a fold event and back, so that long records open fast."""

from __future__ import annotations

from typing import Any

from .events import EVENT_TYPES, Event, FoldEvent, Json, MarkEvent, SettingEvent
from .snapshot import Evaluation, TimedMark
from .state import RunState
from .timeleft import Aside
from .trend import Trend

# Fields with the newest event of the type of the same name.
_NEWEST = ("run", "end", "sample", "memory", "work", "loader", "baseline", "kernels", "stacks")
# Fields with several events -> their type.
_SEVERAL = {"recent": "window", "samples": "sample", "trials": "trial"}
_TRENDS = ("losses", "rates", "memories")
# Fields that are stored unchanged.
_PLAIN = (
    "status", "stage", "started_t", "preparing_t", "t", "step", "epoch", "epoch_step", "items", "tokens", "wall_ns",
    "loss", "lr", "grad_norm", "loss_scale", "lower_is_better", "warnings",
)  # fmt: skip


def to_event(state: RunState) -> FoldEvent:
    """The state as an event; `from_event` restores an equal state."""
    body: Json = {name: getattr(state, name) for name in _PLAIN}
    for name in _NEWEST:
        body[name] = _body(getattr(state, name))
    for name in _SEVERAL:
        body[name] = [_body(event) for event in getattr(state, name)]
    body["totals"] = {**state.totals, "phases": dict(state.totals["phases"])}
    body["asides"] = [state.evaluating.to_list(), state.saving.to_list()]
    body["settings"] = [_body(setting) for setting in state.settings.values()]
    body["evaluations"] = [_plain_evaluation(item) for item in state.evaluations]
    body["best"] = _plain_evaluation(state.best) if state.best else None
    body["checkpoint"] = [state.checkpoint.t, _body(state.checkpoint.mark)] if state.checkpoint else None
    body["marks"] = [[item.t, _body(item.mark)] for item in state.marks]
    for name in _TRENDS:
        body[name] = getattr(state, name).to_dict()
    return FoldEvent(body)


def from_event(event: FoldEvent) -> RunState:
    """The state from a fold event. Raises KeyError or TypeError if it was written by an incompatible version."""
    body = dict(event.state)
    state = RunState()
    for name in _NEWEST:
        value = body.pop(name)
        setattr(state, name, EVENT_TYPES[name].from_dict(value) if value is not None else None)
    for name, kind in _SEVERAL.items():
        getattr(state, name).extend(EVENT_TYPES[kind].from_dict(item) for item in body.pop(name))
    state.totals = body.pop("totals")
    state.evaluating, state.saving = map(Aside.from_list, body.pop("asides"))
    for item in body.pop("settings"):
        setting = SettingEvent.from_dict(item)
        state.settings[setting.name] = setting
    state.evaluations.extend(Evaluation(*item) for item in body.pop("evaluations"))
    best = body.pop("best")
    state.best = Evaluation(*best) if best else None
    saved = body.pop("checkpoint")
    state.checkpoint = TimedMark(saved[0], MarkEvent.from_dict(saved[1])) if saved else None
    state.marks.extend(TimedMark(t, MarkEvent.from_dict(mark)) for t, mark in body.pop("marks"))
    for name in _TRENDS:
        setattr(state, name, Trend.from_dict(body.pop(name)))
    if body.keys() != set(_PLAIN):
        raise KeyError(*body.keys() ^ set(_PLAIN))
    for name, value in body.items():
        setattr(state, name, value)
    return state


def _body(event: Event | None) -> Json | None:
    return None if event is None else {name: getattr(event, name) for name in event.__dataclass_fields__}


def _plain_evaluation(item: Evaluation) -> list[Any]:
    return [item.step, item.metrics, item.seconds]
