"""`ndd-console run` with real scripts: status, output, signals, record, and what the diagnosis says of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pexpect
import pytest
from script_help import CONSOLE, SUBJECTS, environment, events, report, run, start
from tests.fake_wandb import Told
from tests.tiers import few
from tests.waiting import LIMIT_S, contains, lives, until

from ndd_console.__main__ import status_of
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpus import Gpu
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.record.events import EndEvent, KernelsEvent, MarkEvent, RunEvent, ScalarsEvent, WindowEvent
from ndd_engine.run import Run
from ndd_engine.script.command import Command
from ndd_engine.script.script_run import Script, ScriptRequest

pytestmark = pytest.mark.long

SLOW = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

def decode(index):
    end = time.perf_counter() + 0.002
    while time.perf_counter() < end:
        pass
    return torch.full((8,), float(index))

class Files(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return decode(index), torch.ones(1)

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(STEPS // 8):
    for x, y in DataLoader(Files(), batch_size=8):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
print("LAST", float(loss))
"""
# It waits without a processor, until it is ended.
ENDLESS = SLOW.replace("STEPS", "80000").replace("        pass\n", "        time.sleep(0.001)\n")


@pytest.mark.promise
def test_the_output_goes_through_and_the_record_is_a_run(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--", sys.executable, str(SUBJECTS / "plain.py"))
    words = done.stdout.split()
    steps = int(words[words.index("STEPS") + 1])
    seen = events(tmp_path, "plain-001")
    windows = [event for event in seen if isinstance(event, WindowEvent)]
    assert sum(event.steps for event in windows) == steps
    for event in windows:
        whole = [body["host_ns"] for name, body in event.phases.items() if "/" not in name]
        assert sum(whole) == event.wall_ns
    # Written again when the observer has learned more of the script.
    identity = [event for event in seen if isinstance(event, RunEvent)][-1]
    assert identity.workload == "plain.py" and identity.parameters > 0 and identity.items_per_step == 512
    assert seen[-1].status == "done" and "Traceback" not in done.stderr
    (row,) = json.loads(run(tmp_path, "runs", "--json").stdout)["runs"]
    assert (row["name"], row["status"], row["step"]) == ("plain-001", "done", steps)
    assert "forward" in run(tmp_path, "report", "plain-001", "--text").stdout


@pytest.mark.promise
@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("raise SystemExit(3)", 3, "status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
        ("import os; os._exit(7)", 7, "status 7"),
        ("pass", 0, "no training was seen"),
    ],
)
def test_the_status_of_the_script_is_ours(tmp_path: Path, code: str, status: int, words: str) -> None:
    done = run(tmp_path, "run", "--run", "it", "--", sys.executable, "-c", code, status=status)
    end = events(tmp_path, "it")[-1]
    assert isinstance(end, EndEvent) and end.exit_status == status
    assert words in end.reason and end.reason in done.stderr.replace("\n", " ")


def test_what_cannot_be_observed_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, named in (
        (("--", sys.executable, "-I", "train.py"), "-I"),
        (("--", "no-such-program"), "no-such-program"),
        (("--run", "a/b", "--", sys.executable), "a/b"),
        (("--log", "loki", "--", sys.executable), "loki"),
        (("--log", "wandb=perhaps", "--", sys.executable), "offline"),
    ):
        assert status_of(["--runs", str(tmp_path / "runs"), "run", *words]) == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_loggers_follow_the_record_of_a_script(tmp_path: Path) -> None:
    told = Told(tmp_path)
    words = ("run", "--log", "wandb=offline", "--run", "it", "--", sys.executable, str(SUBJECTS / "plain.py"))
    run(tmp_path, *words, **told.environment)
    seen = events(tmp_path, "it")
    assert not [event for event in seen if isinstance(event, MarkEvent) and "writing to" in event.text]
    losses = {each["step"]: each["train/loss"] for each in told.all("log") if "train/loss" in each}
    recorded = {
        event.step: event.loss
        for event in seen
        if isinstance(event, WindowEvent) and event.loss is not None and not event.profiled
    }
    assert losses == pytest.approx(recorded) and losses
    assert told.all("init")[0]["project"] == "plain" and told.all("finish") == [0]


def test_slow_data_is_named_with_its_function(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW.replace("STEPS", "240"))
    done = run(tmp_path, "run", "--", sys.executable, "slow.py")
    # On a busy machine, other processes are a finding as well.
    (first,) = (item for item in report(tmp_path, "slow-001")["findings"] if item["cause"] == "data-wait")
    assert "waiting for" in done.stderr
    assert "decode" in json.dumps(first)
    assert any(change["where"] and "slow.py:" in change["where"] for change in first["changes"])


@pytest.mark.promise
@pytest.mark.parametrize("number", few([signal.SIGINT, signal.SIGTERM], 1))
def test_a_signal_reaches_the_script_and_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "slow.py").write_text(ENDLESS)
    process = start(tmp_path, "run", "--", sys.executable, "slow.py")
    record = tmp_path / "runs" / "slow-001" / "events.jsonl"
    until(lambda: contains(record, '"window"'))
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number
    end = events(tmp_path, "slow-001")[-1]
    assert end.status == ("interrupted" if number == signal.SIGINT else "terminated") and end.step > 0


@pytest.mark.promise
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_killing_the_console_ends_the_script(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os\nopen('pid', 'w').write(str(os.getpid()))\n" + ENDLESS)
    process = start(tmp_path, "run", "--", sys.executable, "slow.py")
    until((tmp_path / "pid").exists)
    time.sleep(0.5)
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.communicate()
    until(lambda: not lives(pid))


@pytest.mark.promise
def test_on_the_screen(tmp_path: Path) -> None:
    """In a real terminal: phases, the output of the script on the log page, a capture, a pause, and Ctrl-C."""
    (tmp_path / "slow.py").write_text("print('hello from the script', flush=True)\n" + ENDLESS)
    child = pexpect.spawn(
        sys.executable, ["-m", "ndd_console", "run", "--", sys.executable, "slow.py"], cwd=str(tmp_path),
        timeout=LIMIT_S, env=environment(TERM="xterm-256color"), dimensions=(30, 100), encoding="utf-8",
    )  # fmt: skip
    child.expect("data_wait")
    child.send("l")
    child.expect("hello from the script")
    child.send("q")
    child.expect("data_wait")
    child.send("c")  # a script cannot be asked to save a checkpoint
    child.send("k")
    child.expect("profiler capture")
    child.send("p")
    child.expect("paused at step")
    child.send("p")
    child.expect("resumed after")
    child.send("\x03")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    *before, end = events(tmp_path, "slow-001")
    assert end.status == "interrupted" and end.step > 0
    assert any(isinstance(event, KernelsEvent) for event in before)
    assert not any(isinstance(event, MarkEvent) and event.kind == "checkpoint" for event in before)


def test_the_gpu_that_the_script_trains_on_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console would choose the first one; "cuda:0" of the script is the second, as its UUID says."""
    uuids = ("GPU-bbbbbbbb-0000-0000-0000-000000000002", "GPU-aaaaaaaa-0000-0000-0000-000000000001")
    gpus = tuple(Gpu(place, place, uuid, "NVIDIA L4", 1000, (8, 9)) for place, uuid in enumerate(uuids))
    machine = replace(detect("cpu", use_torch=False), gpus=gpus, chosen=gpus[0])
    sampled: list[Gpu | None] = []

    class Samples(Sampler):
        def __init__(self, gpu: Gpu | None, *given: Any, **named: Any) -> None:
            sampled.append(gpu)
            super().__init__(gpu, *given, **named)

        def follow(self, pid: int | None, gpu: Gpu | None) -> None:
            sampled.append(gpu)
            super().follow(pid, gpu)

    monkeypatch.setattr("ndd_engine.script.script_run.detect", lambda **_: machine)
    monkeypatch.setattr("ndd_engine.script.script_run.Sampler", Samples)
    monkeypatch.setenv("NDD_WATCH_WINDOW_S", "0.2")
    words = (sys.executable, str(SUBJECTS / "on_gpu.py"), "2", "1", "1", "1")
    run_of_script = Run.open(Script(ScriptRequest(Command(words, tmp_path), tmp_path / "runs", screen=True)))
    try:
        assert run_of_script.execute().status == "done"
    finally:
        run_of_script.close()
    assert [gpu.uuid for gpu in sampled if gpu is not None] == [uuids[1]]
    seen = [event for event in events(tmp_path, "on_gpu-001") if isinstance(event, RunEvent)]
    assert seen and seen[0].gpu is not None and seen[0].gpu["uuid"] == uuids[1]


# A GPU whose memory two lines have filled, as `torch.cuda.memory._snapshot` tells it.
FULL = """
import sys

import torch

calls = []
blocks = [
    {"address": line << 30, "size": line << 30, "requested_size": line << 30, "state": "active_allocated",
     "frames": [{"filename": "/me/model.py", "line": line, "name": "forward"}]}
    for line in (1, 3)
]
segment = {
    "address": 1 << 30, "total_size": 4 << 30, "stream": 0, "segment_type": "large", "device": 0, "blocks": blocks,
}
torch.cuda.memory._record_memory_history = lambda *given, **more: calls.append(given)
torch.cuda.memory._snapshot = lambda: {"segments": [segment], "device_traces": [[]]}
torch.cuda.is_initialized = lambda: True
torch.cuda._lazy_init()
print(len(calls))
if "full" in sys.argv:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
raise ValueError("another error")
"""


@pytest.mark.parametrize(("word", "asked"), few([("full", True), ("full", False), ("other", True)], 1))
def test_the_lines_that_filled_the_memory_are_named_on_request(
    tmp_path: Path, word: str, asked: bool
) -> None:
    (tmp_path / "train.py").write_text(FULL)
    options = ("--memory-history",) if asked else ()
    words = ("run", "--headless", "--run", "r", *options, "--", sys.executable, "train.py", word)
    done = run(tmp_path, *words, status=1)
    named = asked and word == "full"
    assert done.stdout == f"{int(asked)}\n"
    assert ("me/model.py:3" in done.stderr) == named
    assert [path.name for path in (tmp_path / "runs" / "r").glob("*.pickle")] == ["memory.pickle"] * named


# A script observes itself in a line, and says what hooks cannot know.
LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{before}
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
step = 0
{begin}
for epoch in range(4):
    for x, y in DataLoader(data, batch_size=16):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        step += 1
    {each}
{end}
print("LOSS", float(loss.detach()).hex())
"""


def observes(folder: Path, status: int = 0, **parts: str) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(LOOP.format(**{"before": "", "begin": "", "each": "pass", "end": "", **parts}))
    done = subprocess.run(
        [sys.executable, path.name], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
        env=environment(NDD_WATCH_WINDOW_S="0.02"), check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done


def ended(folder: Path, name: str) -> list[Any]:
    """The events of a run, once its follower has ended it."""
    until(lambda: isinstance(events(folder, name)[-1], EndEvent))
    return events(folder, name)


def test_a_script_that_observes_itself_tells_epochs_and_metrics(tmp_path: Path) -> None:
    done = observes(
        tmp_path, before="from ndd_engine import observe\nseen = observe('mine').__enter__()",
        begin="seen.totals(total_steps=64, epochs=4)",
        each="seen.epoch(step, epoch + 1); seen.log(step, size=epoch); seen.evaluation(step, loss=float(loss))",
        end="seen.close()",
    )  # fmt: skip
    assert done.stdout == observes(tmp_path).stdout
    found = ended(tmp_path, "mine")
    assert sum(event.steps for event in found if isinstance(event, WindowEvent)) == 64
    runs = [event for event in found if isinstance(event, RunEvent)]
    assert (runs[-1].total_steps, runs[-1].epochs, runs[-1].workload) == (64, 4, "train.py")
    assert next(event.values for event in found if isinstance(event, ScalarsEvent)) == {"size": 0.0}
    assert sum(isinstance(event, MarkEvent) and event.kind == "evaluation" for event in found) == 4
    assert found[-1].status == "done" and found[-1].step == 64


@pytest.mark.slow
def test_an_error_of_a_script_that_observes_itself_is_the_reason_of_its_end(tmp_path: Path) -> None:
    before = "import ndd_engine\nndd_engine.observe()"
    observes(tmp_path, status=1, before=before, end="raise ValueError('too late')")
    end = ended(tmp_path, "train-001")[-1]
    assert end.status == "failed" and "too late" in end.reason and end.step == 64


BREAKS = """
import sys, time
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.11 if 20 <= step < 24 else 0.002)  # then each loss is looked at, and there are several windows
    observer = sys.modules["_ndd_watch.install"].observer
    BREAK
print("done", step + 1)
"""
# For good, and for one step.
ENDS = BREAKS.replace("BREAK", "if step == 20: observer.emitter._heap = None")
LOSES = BREAKS.replace(
    "BREAK",
    "if step == 20: observer.looks.first_tensor = None\n    if step == 21: del observer.looks.first_tensor",
)


@pytest.mark.long
def test_an_error_of_the_observer_costs_a_figure_and_no_step(tmp_path: Path) -> None:
    (tmp_path / "loses.py").write_text(LOSES)
    done = run(tmp_path, "run", "--headless", "--run", "base", "--", sys.executable, "loses.py")
    assert "done 60" in done.stdout and done.returncode == 0
    assert "60 optimizer steps" in done.stderr and "observation ended" not in done.stderr
    assert (
        "a figure of step 21 is lost: TypeError" in (tmp_path / "runs" / "base" / "events.jsonl").read_text()
    )


@pytest.mark.long
def test_where_the_observation_ends_the_terminal_says_so(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(ENDS)
    words = ("run", "--headless", "--run", "base", "--", sys.executable, "breaks.py")
    done = run(tmp_path, *words, NDD_WATCH_WINDOW_S="0.01")
    assert "done 60" in done.stdout and done.returncode == 0
    # At once, and in the summary.
    assert "ndd-console: the observation ended at step" in done.stderr
    assert "what came later is not in these figures" in done.stderr


def test_output_in_a_file_is_in_the_log_of_the_run_as_well(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, sys, torch\nprint(os.fstat(1).st_ino)\nprint('last words', file=sys.stderr)\nsys.exit(3)\n"
    )
    words = (*CONSOLE, "run", "--run", "it", "--", sys.executable, "fails.py")
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("ab") as err:
        err.write(b"from an earlier run\n")
        err.flush()
        status = subprocess.run(
            words, cwd=tmp_path, stdout=out, stderr=err, env=environment(), timeout=100, check=False
        ).returncode
    assert status == 3
    log = (tmp_path / "runs" / "it" / "console.log").read_text()
    # The script has the file itself, and the log what it wrote into it.
    assert str((tmp_path / "out").stat().st_ino) in log.splitlines()
    assert "last words" in log and "earlier run" not in log
    end = events(tmp_path, "it")[-1]
    assert isinstance(end, EndEvent) and "last output: last words" in end.reason
