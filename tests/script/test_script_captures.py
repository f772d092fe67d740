"""Profiler captures of a script, from the console: requests, what it makes of a trace, and what it says without one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from script_help import events, run, start
from tests.records import run_event
from tests.waiting import contains, until

from ndd_engine.errors import UsageError
from ndd_engine.measure.module_times import ELSEWHERE, OTHER
from ndd_engine.record.channel import send
from ndd_engine.record.events import Event, KernelsEvent, MarkEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState
from ndd_engine.recordings.recorded_files import read_trace
from ndd_engine.run import Control
from ndd_engine.script.follower import Captures
from ndd_engine.script.records import Process
from ndd_engine.script.script_run import Steering
from ndd_watch import mapped

ENDLESS = """
import pathlib, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(32, 64)
while not pathlib.Path("enough").exists():
    optimizer.zero_grad()
    loss = (model(x) - 1.0).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.long
def test_on_request(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    with start(tmp_path, "run", "--run", "it", "--", sys.executable, "train.py") as process:
        directory = RunDir(tmp_path / "runs" / "it")
        try:
            until(lambda: contains(directory.events, '"window"'))
            with pytest.raises(UsageError, match="Lightning"):
                send(directory.control_socket, "checkpoint")
            send(directory.control_socket, "kernels")
            until(lambda: contains(directory.events, '"kernels"'))
        finally:
            (tmp_path / "enough").touch()
        assert process.stderr is not None
        shown = process.stderr.read()
    assert process.returncode == 0 and "Traceback" not in shown, shown
    seen = events(tmp_path, "it")
    (event,) = [one for one in seen if isinstance(one, KernelsEvent)]
    assert (event.method, event.steps, event.trace) == ("operators", 3, "runs/it/capture.json")
    assert {row[0] for row in event.modules} >= {"0", "2"}
    assert {Path(row[0]).name for row in event.lines} == {"train.py"}
    assert any(isinstance(one, MarkEvent) and one.kind == "note" for one in seen)
    windows = [one for one in seen if isinstance(one, WindowEvent)]
    assert any(one.profiled for one in windows) and not all(one.profiled for one in windows)
    assert [path.name for path in directory.path.glob("capture*")] == ["capture.json"]
    assert "Optimizer.step" in run(tmp_path, "trace", str(directory.trace)).stdout


def process_of(folder: Path) -> tuple[mapped.Memory, Process]:
    memory = mapped.Memory()
    memory.attach(str(folder), "pid-1")
    path = folder / "pid-1.map"
    with path.open("rb") as file:
        return memory, Process("pid-1", path, mapped.Reader(file.fileno()))


def taken(steps: int, file: str = "capture-1-1.json") -> MarkEvent:
    """What a process says of a capture that it has taken."""
    return MarkEvent("note", 9, "a profiler capture was taken", {"trace": file, "steps": steps})


@pytest.mark.parametrize(("device", "asked"), [("cuda:0", 3), ("cpu", 0), ("", 0)])
def test_periodic_captures_happen_where_a_gpu_trains(tmp_path: Path, device: str, asked: int) -> None:
    memory, process = process_of(tmp_path)
    told: list[Event] = []
    control = Control()
    steering = Steering(control, told.append, kernels_every=100)
    training = replace(RunState().snapshot(), run=run_event(device=device) if device else None)
    for step in (10, 99, 100, 150, 230, 299, 305):
        steering.look([process], lambda: training, step)
    assert memory.values[mapped.CAPTURES] == asked
    control.request("kernels")
    steering.look([process], lambda: training, 310)
    assert memory.values[mapped.CAPTURES] == asked + 1
    notes = [one for one in told if isinstance(one, MarkEvent) and one.kind == "note"]
    assert len(notes) == (device == "cpu")  # which says why there are none


@pytest.mark.parametrize(
    "content",
    [
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "na',
        "",
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1}]}',
        None,
    ],
)
def test_a_trace_that_cannot_be_read_is_a_warning(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "capture-1-1.json").write_text(content)
    (told,) = Captures(RunDir(tmp_path)).taken(taken(3))
    assert isinstance(told, MarkEvent) and told.kind == "warning"
    assert not list(tmp_path.glob("capture*"))


def test_a_trace_of_a_gpu(tmp_path: Path) -> None:
    """Kernels, a copy and a collective, as Kineto writes them; its clock is 5 us ahead of that of the process."""

    def entry(category: str, name: str, ts: float, dur: float, **given: int) -> dict[str, Any]:
        thread = 7 if given.get("device") == 0 else 1
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 1,
            "tid": thread,
            "ts": ts,
            "dur": dur,
            "args": given,
        }

    def launched(name: str, at: float, ts: float, dur: float, number: int, kind: str = "kernel") -> list[Any]:
        call = entry("cuda_runtime", "cudaLaunchKernel", at, 1.0, correlation=number)
        return [call, entry(kind, name, ts, dur, device=0, correlation=number)]

    entries = [
        entry("cpu_op", "ndd: anchor", 10.0, 1.0),
        *launched("Memcpy HtoD (Pinned -> Device)", 21.0, 22.0, 4.0, 1, "gpu_memcpy"),
        entry("cpu_op", "aten::mm", 30.0, 8.0, **{"Sequence number": 3, "Fwd thread id": 0}),
        *launched("gemm", 32.0, 40.0, 10.0, 2),
        entry(
            "cpu_op", "autograd::engine::evaluate_function: MmBackward0", 60.0, 9.0,
            **{"Sequence number": 3, "Fwd thread id": 1},
        ),
        *launched("gemm_backward", 62.0, 63.0, 20.0, 3),
        *launched("ncclDevKernel_AllReduce", 70.0, 78.0, 10.0, 4),
    ]  # fmt: skip
    noted = {
        "begin": 15_000, "end": 95_000, "anchors": [5_000], "device": 0, "compiled": False,
        "marks": [[10_000, "to_device"], [24_000, "forward"], [50_000, "backward"]],
        "modules": [["", "Net"], ["0", "Linear"]], "lines": [["/home/me/train.py", 12, "main"]],
        "calls": [[24_500, 0, 0, True], [24_600, 1, 0, True], [34_000, 0, 0, False], [35_000, -1, -1, False]],
    }  # fmt: skip
    (tmp_path / "capture-1-1.json").write_text(json.dumps({"traceEvents": entries, "ndd": noted}))
    event, note = Captures(RunDir(tmp_path)).taken(taken(1))
    assert isinstance(event, KernelsEvent) and isinstance(note, MarkEvent)
    assert (event.method, event.wall_ns, event.busy_ns, event.copy_ns) == ("kernels", 80_000, 39_000, 4_000)
    assert (event.collective_ns, event.exposed_ns, event.launches) == (10_000, 5_000, 3)
    assert event.busy_ns + sum(event.idle_ns.values()) == event.wall_ns
    assert event.modules == [("0", "Linear", 10_000, 20_000, 1), (ELSEWHERE[OTHER], "", 0, 10_000, 0)]
    assert event.lines == [("/home/me/train.py", 12, "main", 10_000, 20_000, 2)]


def test_a_file_elsewhere_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a name"):
        list(Captures(RunDir(tmp_path / "run")).taken(taken(3, "../capture.json")))


def test_the_threads_of_forward_are_those_of_the_trace(tmp_path: Path) -> None:
    def operator(ts: int, tid: int, sequence: int, forward: int = 0) -> dict[str, Any]:
        given = {"Sequence number": sequence, "Fwd thread id": forward}
        return {
            "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": tid, "ts": ts, "dur": 1, "args": given,
        }  # fmt: skip

    # torch numbers threads from 1: 1 is the thread 700 here, which has more of the numbers than the thread 500.
    entries = [operator(0, 500, 2), *(operator(1 + n, 700, n) for n in range(3)),
               *(operator(9 + n, 900, n, 1) for n in range(3)), operator(20, 900, 7, 4)]  # fmt: skip
    for given in (None, {"Sequence number": "many"}):  # an operator stays one without these numbers
        entries.insert(0, {**operator(0, 500, 0), "args": given})
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": entries}))
    seen = read_trace(tmp_path / "trace.json").events
    assert len(seen) == len(entries)
    forward = {item.thread for item in seen if item.begin in (1000, 2000, 3000)}
    assert {item.forward_thread for item in seen if item.begin in (9000, 10000, 11000)} == forward
    assert seen[-1].forward_thread == 0
