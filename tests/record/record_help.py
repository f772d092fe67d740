"""Events made by hand for the record's tests, random sequences of them, and another process that writes a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
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


@st.composite
def event_sequences(draw: st.DrawFn) -> list[Event]:
    """What a run could record: steps rise, and a resume takes them back."""
    step = 0
    events: list[Event] = []
    for kind in draw(st.lists(st.sampled_from("wwwwwwsmkeckrtpxgovy"), min_size=1, max_size=60)):
        if kind == "w":
            steps = draw(st.integers(0, 40))
            step += steps
            events.append(
                window(
                    step,
                    steps,
                    draw(st.integers(1, 10**9)),
                    draw(st.none() | _FIGURE),
                    phases=draw(_PHASES),
                    lr=draw(st.none() | _FIGURE),
                    grad_norm=draw(st.none() | _FIGURE),
                    device_steps=draw(st.integers(0, 3)),
                    last_loss=draw(st.none() | st.tuples(st.integers(0, 99), _FIGURE)),
                )
            )
        elif kind == "s":
            events.append(draw(_SAMPLE))
        elif kind == "m":
            events.append(draw(_MEMORY))
        elif kind == "k":
            events.append(
                mark(
                    draw(st.sampled_from(["epoch", "warning", "error", "note"])),
                    step,
                    draw(st.text(max_size=5)),
                )
            )
        elif kind == "e":
            metrics = draw(st.dictionaries(st.sampled_from(["rmse", "loss"]), _FIGURE, max_size=2))
            events.append(
                mark(
                    "evaluation",
                    step,
                    metrics=metrics,
                    seconds=1.0,
                    better=draw(st.sampled_from(["lower", "higher"])),
                )
            )
        elif kind == "v":
            values = draw(st.dictionaries(st.sampled_from(["own", "x" * 20]), _FIGURE, max_size=2))
            events.append(ScalarsEvent(step, values))
        elif kind == "y":
            events.append(TextsEvent(step, draw(st.lists(st.text(max_size=5), max_size=2))))
        elif kind == "c":
            events.append(mark("checkpoint", step, file="f.pt", bytes=3))
        elif kind == "p":
            events.append(status(draw(st.sampled_from(["paused", "training", "evaluating"]))))
        elif kind == "g":
            name = draw(st.sampled_from(["loader.workers", "speed.compile", "precision.amp"]))
            events.append(setting(name, draw(st.sampled_from([True, False, None])), step=step))
        elif kind == "o":
            events.append(
                work(flops_per_step=draw(st.none() | _COUNT), peak_tflops=draw(st.none() | st.just(9.0)))
            )
        elif kind == "t":
            events.append(StageEvent(draw(st.sampled_from(["prepare", "resume"])), "reading"))
        elif kind == "x":
            events.append(end(draw(st.sampled_from(["done", "failed", "stopped"])), step))
        else:
            resumed = draw(st.none() | st.integers(0, step))
            step = resumed if resumed is not None else step
            device = draw(st.sampled_from(["cpu", "cuda:0"]))
            config = {**CONFIG, "evaluate": {"every_steps": draw(st.integers(0, 3)), "at_end": True}}
            events.append(run_event(resumed_step=resumed, device=device, config=config))
    return events
