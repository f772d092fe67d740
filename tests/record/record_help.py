"""Events made by hand for the record's tests, random sequences of them, and another process that writes a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests.records import CONFIG, phase, run_event, window

from ndd_engine.record.events import (
    PHASES,
    EndEvent,
    Event,
    MarkEvent,
    MemoryEvent,
    RunEvent,
    SampleEvent,
    ScalarsEvent,
    SettingEvent,
    StageEvent,
    TextsEvent,
    WorkEvent,
    parse,
)
from ndd_engine.record.state import RunState

GIB = 1 << 30
_HOLDS = """
import sys, time
from pathlib import Path
from ndd_engine.record.rundir import RunDir, RunLock
RunLock(RunDir(Path(sys.argv[1]).parent), Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def held(lock: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds a lock of a run."""
    command = [sys.executable, "-c", _HOLDS, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def mark(kind: str, step: int = 0, text: str = "", **data: Any) -> MarkEvent:
    return MarkEvent(kind, step, text, data)


def status(name: str) -> MarkEvent:
    return mark("status", status=name)


def setting(name: str, in_effect: bool | None = True, **changes: Any) -> SettingEvent:
    body = {"requested": "4", "applied": "4", "verified": "seen", **changes}
    return SettingEvent(name, in_effect=in_effect, **body)


def work(**changes: Any) -> WorkEvent:
    """10^9 operations and 10^8 bytes per step, on a GPU with 100 TFLOP/s and 1000 GB/s."""
    body: dict[str, Any] = {
        "flops_per_step": 10**9, "bytes_per_step": 10**8, "peak_tflops": 100.0, "peak_kind": "bf16",
        "bandwidth_gb_s": 1000.0, "attention": ["flash"], "dtypes": {"bfloat16": 10**9},
    }  # fmt: skip
    return WorkEvent(**{**body, **changes})


def end(state: str = "done", step: int = 0) -> EndEvent:
    return EndEvent(state, "because", step, 0)


def through_json(event: Event, t: float = 1.0) -> Event:
    """The event as a reader of the log gets it."""
    item = parse(event.to_json(t))
    assert item is not None
    return item[1]


def folded(*events: Event, state: RunState | None = None) -> RunState:
    """The state after the events, one second apart."""
    state = state or RunState()
    for index, event in enumerate(events):
        state.fold(float(index), event)
    return state


_FIGURE = st.floats(-1e6, 1e6, allow_nan=False)
_COUNT = st.integers(0, 2**40)
_PHASES = st.dictionaries(
    st.sampled_from([*PHASES, "forward/encoder"]),
    st.builds(phase, st.integers(0, 10**9), st.none() | st.integers(0, 10**8)),
    max_size=5,
)
_SAMPLE = st.builds(
    SampleEvent,
    gpu=st.none()
    | st.fixed_dictionaries(
        {"util_percent": st.none() | st.integers(0, 100), "memory_free_bytes": st.none() | _COUNT}
    ),
    host=st.fixed_dictionaries(
        {
            key: st.none() | _COUNT
            for key in ("memory_limit_bytes", "memory_available_bytes", "rss_bytes", "workers_rss_bytes")
        }
    ),
)
_MEMORY = st.builds(MemoryEvent, *[_COUNT] * 4, st.none() | _COUNT, _COUNT, _COUNT, *[st.none() | _COUNT] * 3)


def _windows(step: int) -> st.SearchStrategy[Event]:
    return st.builds(
        window, st.just(step), st.integers(0, 40), st.integers(1, 10**9), st.none() | _FIGURE, phases=_PHASES,
        lr=st.none() | _FIGURE, grad_norm=st.none() | _FIGURE, device_steps=st.integers(0, 3),
        last_loss=st.none() | st.tuples(st.integers(0, 99), _FIGURE),
    )  # fmt: skip


def _runs(step: int) -> st.SearchStrategy[Event]:
    """A run that begins, or that resumes at an earlier step or at this one."""
    configs = st.integers(0, 3).map(lambda n: {**CONFIG, "evaluate": {"every_steps": n, "at_end": True}})
    devices = st.sampled_from(["cpu", "cuda:0"])
    return st.builds(run_event, resumed_step=st.none() | st.integers(0, step), device=devices, config=configs)


_NAMES = st.sampled_from(["loader.workers", "speed.compile", "precision.amp"])
_KINDS = st.sampled_from(["epoch", "warning", "error", "note"])
# What can be recorded after a step.
_EVENTS: tuple[Callable[[int], st.SearchStrategy[Event]], ...] = (
    lambda step: _SAMPLE,
    lambda step: _MEMORY,
    lambda step: st.builds(mark, _KINDS, st.just(step), st.text(max_size=5)),
    lambda step: st.builds(
        mark, st.just("evaluation"), st.just(step), seconds=st.just(1.0), better=st.sampled_from(["lower", "higher"]),
        metrics=st.dictionaries(st.sampled_from(["rmse", "loss"]), _FIGURE, max_size=2),
    ),
    lambda step: st.builds(
        ScalarsEvent, st.just(step), st.dictionaries(st.sampled_from(["own", "x" * 20]), _FIGURE, max_size=2)
    ),
    lambda step: st.builds(TextsEvent, st.just(step), st.lists(st.text(max_size=5), max_size=2)),
    lambda step: st.just(mark("checkpoint", step, file="f.pt", bytes=3)),
    lambda step: st.sampled_from(["paused", "training", "evaluating"]).map(status),
    lambda step: st.builds(setting, _NAMES, st.sampled_from([True, False, None]), step=st.just(step)),
    lambda step: st.builds(work, flops_per_step=st.none() | _COUNT, peak_tflops=st.none() | st.just(9.0)),
    lambda step: st.builds(StageEvent, st.sampled_from(["prepare", "resume"]), st.just("reading")),
    lambda step: st.builds(end, st.sampled_from(["done", "failed", "stopped"]), st.just(step)),
    _runs,
)  # fmt: skip


@st.composite
def event_sequences(draw: st.DrawFn) -> list[Event]:
    """What a run could record: steps rise, and a resume takes them back. Every third event is a window."""
    step = 0
    events: list[Event] = []
    for kind in draw(st.lists(st.integers(-6, len(_EVENTS) - 1), min_size=1, max_size=60)):
        step += draw(st.integers(0, 40)) if kind < 0 else 0
        event = draw((_windows if kind < 0 else _EVENTS[kind])(step))
        step = event.resumed_step if isinstance(event, RunEvent) and event.resumed_step is not None else step
        events.append(event)
    return events
