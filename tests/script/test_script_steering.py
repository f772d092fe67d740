"""Requests to a running script, from elsewhere: captures, pauses and stops; its losses stay the same.

What the console makes of a trace of the script, and what it says without one, is here as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pexpect
import pytest
from script_help import environment, events, start
from tests.records import run_event
from tests.tiers import few
from tests.waiting import LIMIT_S, contains, lives, until

from ndd_console.__main__ import status_of
from ndd_engine.errors import UsageError
from ndd_engine.measure.model_work import ELSEWHERE, OTHER
from ndd_engine.record.events import Event, KernelsEvent, MarkEvent, RunEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState
from ndd_engine.recordings.recorded_files import read_trace
from ndd_engine.run.channel import send
from ndd_engine.run.control import Control
from ndd_engine.script.follower import RunCaptures
from ndd_engine.script.records import Process
from ndd_engine.script.script_run import Steering
from ndd_watch import mapped

# Trains until a file is there and a number of steps is done; writes its steps as it goes, and prints its last loss.
SCRIPT = """
import os, pathlib, sys
import torch
from torch import nn
{before}
torch.manual_seed(0)
torch.set_num_threads(1)
open("pid", "w").write(str(os.getpid()))
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 1))
optimizer = torch.optim.AdamW(model.parameters())
steps = open("steps", "w", buffering=1)
count = 0
try:
    while not pathlib.Path("enough").exists() or count % 1000:
        optimizer.zero_grad()
        loss = (model(torch.randn(32, 1, 8, 8)) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        count += 1
        if not count % 10:
            print(count, file=steps)
except KeyboardInterrupt:
    print("INTERRUPTED")
    sys.exit(3)
print("LAST", count, loss.item().hex())
"""


def steps(folder: Path) -> int:
    return (folder / "steps").stat().st_size


def written(folder: Path, before: str = "") -> RunDir:
    """Write the script; the folder of its run."""
    (folder / "train.py").write_text(SCRIPT.format(before=before))
    return RunDir(folder / "runs" / "it")


def paused(folder: Path, directory: RunDir) -> None:
    """Pause it, and see that it stands."""
    until(lambda: contains(directory.events, '"window"'))
    send(directory.control_socket, "pause")
    until(lambda: contains(directory.events, '"pause"'))
    at = steps(folder)
    time.sleep(1.0)
    assert steps(folder) == at


def marks(folder: Path, kind: str) -> list[MarkEvent]:
    return [one for one in events(folder, "it") if isinstance(one, MarkEvent) and one.kind == kind]


@pytest.mark.long
@pytest.mark.promise
@pytest.mark.budget(20)
def test_a_script_pauses_and_goes_on_with_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is captured before; a checkpoint is refused, since only a framework could save one."""
    directory = written(tmp_path)
    with start(
        tmp_path, "run", "--run", "it", "--", sys.executable, "train.py", NDD_WATCH_STALLED_S="0.5"
    ) as process:
        try:
            until(lambda: contains(directory.events, '"window"'))
            with pytest.raises(UsageError, match="Lightning"):
                send(directory.control_socket, "checkpoint")
            send(directory.control_socket, "kernels")
            until(lambda: contains(directory.events, '"kernels"'))
            paused(tmp_path, directory)
            at = steps(tmp_path)
            send(directory.control_socket, "resume")
            until(lambda: steps(tmp_path) > at)
        finally:
            (tmp_path / "enough").touch()
        out, shown = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and "Traceback" not in shown, shown
    # The same steps without an observer.
    last = out.split()
    bare = SCRIPT.replace('not pathlib.Path("enough").exists() or count % 1000', f"count < {last[1]}")
    (tmp_path / "train.py").write_text(bare.format(before=""))
    assert subprocess.check_output([sys.executable, "train.py"], cwd=tmp_path, text=True).split() == last
    (pause,), (resume,) = marks(tmp_path, "pause"), marks(tmp_path, "resume")
    assert pause.step == resume.step and "seconds" in resume.data
    # Standing still was no hang.
    found = events(tmp_path, "it")
    kinds = [one.kind for one in found if isinstance(one, MarkEvent)]
    assert "warning" not in kinds[kinds.index("pause") : kinds.index("resume")]
    windows = [one for one in found if isinstance(one, WindowEvent)]
    assert sum(one.steps for one in windows) == int(last[1])
    assert all(
        sum(one.phases[name]["host_ns"] for name in one.phases if "/" not in name) == one.wall_ns
        for one in windows
    )
    # The capture.
    (event,) = [one for one in found if isinstance(one, KernelsEvent)]
    assert (event.method, event.steps, event.trace) == ("operators", 3, "runs/it/capture.json")
    assert {row[0] for row in event.modules} >= {"0", "3"}
    assert {Path(row[0]).name for row in event.lines} == {"train.py"}
    assert any(one.profiled for one in windows) and not all(one.profiled for one in windows)
    assert [path.name for path in directory.path.glob("capture*")] == ["capture.json"]
    assert status_of(["trace", str(directory.trace)]) == 0 and "Optimizer.step" in capsys.readouterr().out
    # What may be tried depends on it.
    assert [one for one in found if isinstance(one, RunEvent)][-1].config["script"]["convolutions"] is True


@pytest.mark.long
@pytest.mark.parametrize("number", few([signal.SIGINT, signal.SIGTERM], 1))
def test_a_signal_reaches_a_paused_script_at_once(tmp_path: Path, number: signal.Signals) -> None:
    directory = written(tmp_path)
    with start(tmp_path, "run", "--run", "it", "--", sys.executable, "train.py") as process:
        paused(tmp_path, directory)
        os.kill(int((tmp_path / "pid").read_text()), number)
        process.wait(LIMIT_S)
        assert process.stdout is not None
        assert ("INTERRUPTED" in process.stdout.read()) == (number == signal.SIGINT)
    assert process.returncode == (3 if number == signal.SIGINT else 128 + number)


@pytest.mark.long
def test_a_script_goes_on_when_its_console_is_gone(tmp_path: Path) -> None:
    """It observes itself, so that it does not end with the console."""
    before = "from ndd_engine import observe\nobserve('it')"
    directory = written(tmp_path, before=before)
    script = pexpect.spawn(
        sys.executable, ["train.py"], cwd=str(tmp_path), env=environment(), timeout=LIMIT_S
    )
    try:
        paused(tmp_path, directory)
        owner: Any = directory.live_owner()
        assert lives(owner["pid"])
        os.kill(owner["pid"], signal.SIGKILL)
        at = steps(tmp_path)
        until(lambda: steps(tmp_path) > at)
    finally:
        (tmp_path / "enough").touch()
    script.expect("LAST")
    script.expect(pexpect.EOF)


# Captures, without a script.


def taken(steps: int, file: str = "capture-1-1.json") -> MarkEvent:
    """What a process says of a capture that it has taken."""
    return MarkEvent("note", 9, "a profiler capture was taken", {"trace": file, "steps": steps})


@pytest.mark.parametrize(("device", "asked"), [("cuda:0", 3), ("cpu", 0), ("", 0)])
def test_periodic_captures_happen_where_a_gpu_trains(tmp_path: Path, device: str, asked: int) -> None:
    memory, path = mapped.MappedMemory(), tmp_path / "pid-1.map"
    memory.attach(str(tmp_path), "pid-1")
    with path.open("rb") as file:
        process = Process("pid-1", path, mapped.MappedReader(file.fileno()))
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
    (told,) = RunCaptures(RunDir(tmp_path)).taken(taken(3))
    assert isinstance(told, MarkEvent) and told.kind == "warning"
    assert not list(tmp_path.glob("capture*"))
    with pytest.raises(ValueError, match="not a name"):  # a file elsewhere is not read
        list(RunCaptures(RunDir(tmp_path / "run")).taken(taken(3, "../capture.json")))


def test_a_trace_of_a_gpu(tmp_path: Path) -> None:
    """Kernels, a copy and a collective, as Kineto writes them; its clock is 5 us ahead of that of the process."""

    def entry(category: str, name: str, ts: float, dur: float, **given: int) -> dict[str, Any]:
        thread = 7 if given.get("device") == 0 else 1
        return {
            "ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": ts, "dur": dur, "args": given,
        }  # fmt: skip

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
        "begin": 15_000, "end": 95_000, "ends": [95_000], "anchors": [5_000], "device": 0, "compiled": False,
        "marks": [[10_000, "to_device"], [24_000, "forward"], [50_000, "backward"]],
        "modules": [["", "Net", 0], ["0", "Linear", 8]], "trail": [], "unused": [],
        "lines": [["/home/me/train.py", 12, "main"]],
        "calls": [[24_500, 0, 0, 1], [24_600, 1, 0, 1], [34_000, 0, 0, 0], [35_000, -1, -1, 0]],
    }  # fmt: skip
    (tmp_path / "capture-1-1.json").write_text(json.dumps({"traceEvents": entries, "ndd": noted}))
    event, note = RunCaptures(RunDir(tmp_path)).taken(taken(1))
    assert isinstance(event, KernelsEvent) and isinstance(note, MarkEvent)
    assert (event.method, event.wall_ns, event.busy_ns, event.copy_ns) == ("kernels", 80_000, 39_000, 4_000)
    assert (event.collective_ns, event.exposed_ns, event.launches) == (10_000, 5_000, 3)
    assert event.busy_ns + sum(event.idle_ns.values()) == event.wall_ns
    assert event.modules == [
        ("0", "Linear", 10_000, 20_000, 1, 0, 8), (ELSEWHERE[OTHER], "", 0, 10_000, 0, 0, 0),
    ]  # fmt: skip
    assert event.lines == [("/home/me/train.py", 12, "main", 10_000, 20_000, 1)]


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
