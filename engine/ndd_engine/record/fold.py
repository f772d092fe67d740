"""Converts the state of a run to a fold event and back, so that long records open fast."""

from __future__ import annotations

from typing import Any, TypedDict

from .events import (
    EVENT_TYPES,
    BaselineEvent,
    EndEvent,
    Event,
    FoldEvent,
    FunctionsEvent,
    Json,
    KernelsEvent,
    LoaderEvent,
    MarkEvent,
    MemoryEvent,
    RanksEvent,
    RunEvent,
    SampleEvent,
    SettingEvent,
    StacksEvent,
    TextsEvent,
    TrialEvent,
    WindowEvent,
    WorkEvent,
)
from .parts import Ended, Running
from .shape import Time, check_of
from .snapshot import Evaluation, TimedMark, Totals
from .state import RunState
from .timeleft import Aside
from .trend import Trend

# Fields with the newest event of the type of the same name.
_NEWEST = ("run", "end", "sample", "memory", "work", "loader", "baseline", "kernels", "stacks")
# The same, left out when there is none.
_NEWEST_LATER = ("texts", "functions")
# Fields with several events -> their type.
_SEVERAL = {"recent": "window", "samples": "sample", "trials": "trial"}
# The same, left out when there are none.
_SEVERAL_LATER = {"recent_ranks": "ranks"}
_TRENDS = ("losses", "rates", "memories", "heaps")


class _Trend(TypedDict):
    stride: int
    points: list[tuple[int, float]]
    open: tuple[int, float, int]


_Aside = tuple[int, int, int, int, int]
_Evaluation = tuple[int, dict[str, float | None], float | None]
_Mark = tuple[Time, MarkEvent]


class _Plain(TypedDict):
    """Fields that are stored unchanged."""

    status: Running | Ended
    stage: str
    started_t: Time | None
    preparing_t: Time | None
    t: Time | None
    step: int
    epoch: int
    epoch_step: int
    items: int
    tokens: int
    wall_ns: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    loss_scale: float | None
    lower_is_better: bool
    warnings: int


class _Later(TypedDict, total=False):
    """Fields that records of earlier versions do not have, and that are left out when they are empty."""

    scalars: dict[str, _Trend]
    texts: TextsEvent
    functions: FunctionsEvent
    recent_ranks: list[RanksEvent]
    first_clocks: list[int]


class _State(_Plain, _Later):
    """The `state` of a fold event."""

    run: RunEvent | None
    end: EndEvent | None
    sample: SampleEvent | None
    memory: MemoryEvent | None
    work: WorkEvent | None
    loader: LoaderEvent | None
    baseline: BaselineEvent | None
    kernels: KernelsEvent | None
    stacks: StacksEvent | None
    recent: list[WindowEvent]
    samples: list[SampleEvent]
    trials: list[TrialEvent]
    totals: Totals
    asides: tuple[_Aside, _Aside]
    settings: list[SettingEvent]
    evaluations: list[_Evaluation]
    best: _Evaluation | None
    checkpoint: _Mark | None
    marks: list[_Mark]
    losses: _Trend
    rates: _Trend
    memories: _Trend
    heaps: _Trend


def to_event(state: RunState) -> FoldEvent:
    """The state as an event; `from_event` restores an equal state."""
    body: Json = {name: getattr(state, name) for name in _Plain.__annotations__}
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
    if state.scalars:
        body["scalars"] = {name: trend.to_dict() for name, trend in state.scalars.items()}
    for name in _NEWEST_LATER:
        if (value := getattr(state, name)) is not None:
            body[name] = _body(value)
    for name in _SEVERAL_LATER:
        if events := getattr(state, name):
            body[name] = [_body(event) for event in events]
    if state.first_clocks:
        body["first_clocks"] = list(state.first_clocks)
    return FoldEvent(body)


def from_event(event: FoldEvent) -> RunState:
    """The state from a fold event. Raises ValueError if it is damaged or was written by an incompatible version."""
    body = dict(event.state)
    later = _Later.__annotations__.keys()
    if not check_of(_State)(body) or body.keys() - later != _State.__required_keys__:
        raise ValueError("not the state of a run")
    state = RunState()
    for name in _NEWEST:
        value = body.pop(name)
        setattr(state, name, EVENT_TYPES[name].of_checked(value) if value is not None else None)
    for name, kind in (_SEVERAL | _SEVERAL_LATER).items():
        getattr(state, name).extend(EVENT_TYPES[kind].of_checked(item) for item in body.pop(name, ()))
    totals = body.pop("totals")
    state.totals = {name: totals.get(name, value) for name, value in state.totals.items()}
    state.evaluating, state.saving = map(Aside.from_list, body.pop("asides"))
    for item in body.pop("settings"):
        setting = SettingEvent.of_checked(item)
        state.settings[setting.name] = setting
    state.evaluations.extend(Evaluation(*item) for item in body.pop("evaluations"))
    best = body.pop("best")
    state.best = Evaluation(*best) if best else None
    saved = body.pop("checkpoint")
    state.checkpoint = TimedMark(saved[0], MarkEvent.of_checked(saved[1])) if saved else None
    state.marks.extend(TimedMark(t, MarkEvent.of_checked(mark)) for t, mark in body.pop("marks"))
    for name in _TRENDS:
        setattr(state, name, Trend.from_dict(body.pop(name)))
    state.scalars = {name: Trend.from_dict(trend) for name, trend in body.pop("scalars", {}).items()}
    for name in _NEWEST_LATER:
        if (value := body.pop(name, None)) is not None:
            setattr(state, name, EVENT_TYPES[name].of_checked(value))
    for name, value in body.items():
        setattr(state, name, value)
    return state


def _body(event: Event | None) -> Json | None:
    return None if event is None else {name: getattr(event, name) for name in event.__dataclass_fields__}


def _plain_evaluation(item: Evaluation) -> list[Any]:
    return [item.step, item.metrics, item.seconds]
