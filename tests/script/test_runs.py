"""`ndd-console run` with real scripts: status, output, signals, record, hangs, and what the diagnosis says of it.

What the rules say of each kind of run is tested in tests/diagnose/test_kinds_of_runs.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pytest
from qa.faults.script_faults import FAULTS, Fault, observe
from script_help import CONSOLE, SUBJECTS, environment, events, report, run, start
from tests.fake_wandb import Told
from tests.runs import OUTPUT, SCRIPT_RUN, SLOW
from tests.tiers import few
from tests.waiting import LIMIT_S, contains, lives, until

from ndd_console.__main__ import status_of
from ndd_engine.measure.stalls import STOPPED
from ndd_engine.record.events import (
    EndEvent,
    KernelsEvent,
    MarkEvent,
    RunEvent,
    ScalarsEvent,
    StallEvent,
    WindowEvent,
)
from ndd_engine.script import stack_samples

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.mark.long
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
    assert "convolutions" not in identity.config["script"]
    assert seen[-1].status == "done" and "Traceback" not in done.stderr
    (row,) = json.loads(run(tmp_path, "runs", "--json").stdout)["runs"]
    assert (row["name"], row["status"], row["step"]) == ("plain-001", "done", steps)
    assert "forward" in run(tmp_path, "report", "plain-001", "--text").stdout


@pytest.mark.long
@pytest.mark.promise
@pytest.mark.parametrize(
    ("code", "status", "words"),
    few(
        [
            ("raise SystemExit(3)", 3, "status 3"),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
            ("pass", 0, "no training was seen"),
            ("import os; os._exit(7)", 7, "status 7"),
        ],
        3,
    ),
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


@pytest.mark.long
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


@pytest.mark.long
def test_slow_data_is_named_with_its_function(script_run: Path) -> None:
    # On a busy machine, other processes are a finding as well.
    (first,) = (item for item in report(script_run, SCRIPT_RUN)["findings"] if item["cause"] == "data-wait")
    assert "waiting for" in (script_run / OUTPUT).read_text()
    assert "decode" in json.dumps(first)
    assert any(change["where"] and "slow.py:" in change["where"] for change in first["changes"])
    process = start(script_run, "try", SCRIPT_RUN)  # without a setting
    assert "--set loader." in process.communicate(timeout=LIMIT_S)[1] and process.returncode == 2


@pytest.mark.long
@pytest.mark.promise
@pytest.mark.parametrize("number", few([signal.SIGINT, signal.SIGTERM], 1))
def test_a_signal_reaches_the_script_and_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    process = start(tmp_path, "run", "--", sys.executable, "slow.py")
    record = tmp_path / "runs" / "slow-001" / "events.jsonl"
    until(lambda: contains(record, '"window"'))
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number
    end = events(tmp_path, "slow-001")[-1]
    assert end.status == ("interrupted" if number == signal.SIGINT else "terminated") and end.step > 0


@pytest.mark.long
@pytest.mark.promise
@LINUX
def test_killing_the_console_ends_the_script(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    process = start(tmp_path, "run", "--", sys.executable, "slow.py")
    until((tmp_path / "pid").exists)
    time.sleep(0.5)
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.communicate()
    until(lambda: not lives(pid))


@pytest.mark.long
@pytest.mark.promise
def test_on_the_screen(tmp_path: Path) -> None:
    """In a real terminal: phases, the output of the script on the log page, a capture, a pause, and Ctrl-C."""
    (tmp_path / "slow.py").write_text(SLOW)
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


@pytest.mark.long
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


# A script observes itself in a line, and says what hooks cannot know. It trains without an observer before.
LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train(each=lambda step, epoch, loss: None):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
    step = 0
    for epoch in range(4):
        for x, y in DataLoader(data, batch_size=16):
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            step += 1
        each(step, epoch, loss)
    print("LOSS", float(loss.detach()).hex())

train()
"""
TELLS = """
from ndd_engine import observe

def each(step, epoch, loss):
    seen.epoch(step, epoch + 1)
    seen.log(step, size=epoch)
    seen.evaluation(step, loss=float(loss))

with observe("mine") as seen:
    seen.totals(total_steps=64, epochs=4)
    train(each)
"""
FAILS = """
import ndd_engine
ndd_engine.observe()
train()
raise ValueError("too late")
"""


def observes(folder: Path, more: str, name: str, status: int = 0) -> tuple[str, list[Any]]:
    """What a script that observes itself prints, and the events of its run, once its follower has ended it."""
    (folder / "train.py").write_text(LOOP + more)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
        env=environment(NDD_WATCH_WINDOW_S="0.02"), check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    until(lambda: isinstance(events(folder, name)[-1], EndEvent))
    return done.stdout, events(folder, name)


@pytest.mark.long
def test_a_script_that_observes_itself_tells_epochs_and_metrics(tmp_path: Path) -> None:
    out, found = observes(tmp_path, TELLS, "mine")
    bare, observed = out.splitlines()
    assert bare == observed
    assert sum(event.steps for event in found if isinstance(event, WindowEvent)) == 64
    runs = [event for event in found if isinstance(event, RunEvent)]
    assert (runs[-1].total_steps, runs[-1].epochs, runs[-1].workload) == (64, 4, "train.py")
    assert next(event.values for event in found if isinstance(event, ScalarsEvent)) == {"size": 0.0}
    assert sum(isinstance(event, MarkEvent) and event.kind == "evaluation" for event in found) == 4
    assert found[-1].status == "done" and found[-1].step == 64


@pytest.mark.slow
def test_an_error_of_a_script_that_observes_itself_is_the_reason_of_its_end(tmp_path: Path) -> None:
    *_, end = observes(tmp_path, FAILS, "train-001", status=1)[1]
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
    observer.steps.next_study = sys.maxsize  # a closer look would lose several figures in one step
    if step == 20: observer.BROKEN = None
    if observer.steps._misses and vars(observer.looks).get("first_tensor", 0) is None: del observer.looks.first_tensor
print("done", step + 1)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "window_s", "said"),
    [("looks.first_tensor", "0.2", False), ("emitter.facts", "0.01", True)],
    ids=["for one step", "for good"],
)
def test_an_error_of_the_observer_costs_a_figure_or_the_observation_and_no_step(
    tmp_path: Path, broken: str, window_s: str, said: bool
) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS.replace("BROKEN", broken))
    words = ("run", "--headless", "--run", "base", "--", sys.executable, "breaks.py")
    done = run(tmp_path, *words, NDD_WATCH_WINDOW_S=window_s)
    assert "done 60" in done.stdout
    # At once, and in the summary.
    assert ("ndd-console: the observation" in done.stderr) == said
    assert ("these figures" in done.stderr) == said
    if not said:
        assert "60 optimizer steps" in done.stderr
        record = (tmp_path / "runs" / "base" / "events.jsonl").read_text()
        assert re.search(r" step \d+ is lost: TypeError", record)


@pytest.mark.long
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


# Others may come first on a busy machine: `python -m benchmarks script_faults` plants all, and counts what is named
# first.
FOUND = [
    fault
    for name in ("garbage", "slow-item", "leak")
    for fault in FAULTS
    if (fault.name, fault.ranks) == (name, 1)
]


@pytest.mark.long
@pytest.mark.budget(40)
@pytest.mark.parametrize("fault", few(FOUND, 1), ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_with_its_function(tmp_path: Path, fault: Fault) -> None:
    seconds = fault.seconds if fault.name == "leak" else 6.0
    findings = observe(tmp_path, "planted.py", fault.name, f"{fault.levels[-1]:g}", seconds=seconds)
    found = next((item for item in findings if item["cause"] in fault.causes), None)
    assert found is not None, findings
    assert fault.function in found["title"] + "".join(change["where"] or "" for change in found["changes"])


# Processes that can tell nothing: a call holds the interpreter lock, or they are stopped.

LOCKS = SUBJECTS / "locks.py"
HANGS = Path(__file__).parents[2] / "qa" / "scripts" / "hangs.py"
HEADLESS = ("run", "--headless", "--run", "it", "--", sys.executable)
SOON = {"NDD_WATCH_WINDOW_S": "0.1", "NDD_WATCH_STALLED_S": "1"}


def warned(folder: Path, *words: str) -> bool:
    """Whether a stall of the run has all of these words."""
    stalls = [one for one in events(folder, "it") if isinstance(one, StallEvent)]
    return any(all(word in stall.text for word in words) for stall in stalls)


@LINUX
@pytest.mark.slow
@pytest.mark.long
def test_a_call_that_keeps_the_interpreter_lock(tmp_path: Path) -> None:
    running = start(tmp_path, *HEADLESS, str(LOCKS), "15", **SOON)
    _, said = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 0, said
    assert warned(tmp_path, "locks.py:12 in", "stuck", "interpreter")


@LINUX
@pytest.mark.long
def test_a_stopped_process_is_named_as_such_and_goes_on(tmp_path: Path) -> None:
    running = start(tmp_path, *HEADLESS, str(LOCKS), "1", **SOON)
    found: list[int] = []

    def trains() -> list[int]:
        children = psutil.Process(running.pid).children(recursive=True)
        found[:] = [one.pid for one in children if one.cmdline()[1:2] == [str(LOCKS)]]
        return found

    until(trains)
    until(lambda: contains(tmp_path / "runs" / "it" / "events.jsonl", '"window"'))
    (pid,) = found
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: warned(tmp_path, STOPPED, str(pid)))
    finally:
        os.kill(pid, signal.SIGCONT)
    _, said = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 0, said


@LINUX
@pytest.mark.long
@pytest.mark.promise
def test_a_worker_that_hangs_is_named_at_once_and_first_in_the_summary(tmp_path: Path) -> None:
    running = start(tmp_path, *HEADLESS, str(HANGS), "storage", "1", **SOON)
    until((tmp_path / "runs" / "it" / "events.jsonl").exists)
    until(lambda: warned(tmp_path, "loader worker 1", "items.bin", "hangs.py"))
    running.terminate()
    _, said = running.communicate(timeout=LIMIT_S)
    lines = [line for line in said.splitlines() if "no progress for" in line]
    assert lines[0].startswith("ndd-console: no progress")
    assert lines[-1].startswith("finding: no progress")
    assert "FIFO" in lines[-1]


# A workload of one's own, whose loader worker takes a lock twice.
LOCKED = """
import threading
import torch
from torch.utils.data import Dataset, get_worker_info
LOCK = threading.Lock()
class Items(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if get_worker_info() is not None:
            LOCK.acquire()
        return torch.full((8,), index / 64), torch.full((1,), index / 64)
def factory(settings):
    loss = lambda out, batch: (out - batch[1]).square().mean()
    return {"model": torch.nn.Linear(8, 1), "train_data": Items(), "loss": loss}
"""


@LINUX
@pytest.mark.long
def test_a_worker_of_an_own_model_that_hangs_before_the_first_step_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked.py").write_text(LOCKED)
    sets = [f"--set={one}" for one in ("run.device=cpu", "run.epochs=1", "loader.workers=1")]
    running = start(
        tmp_path, "train", "--headless", "--run", "it", "--workload", "locked:factory", *sets, **SOON
    )
    try:
        until((tmp_path / "runs" / "it" / "events.jsonl").exists)
        until(lambda: warned(tmp_path, "loader worker 1", "locked.py:11 in Items.__getitem__"))
        assert not [one for one in events(tmp_path, "it") if isinstance(one, WindowEvent) and one.steps]
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@LINUX
@pytest.mark.long
def test_a_worker_that_is_killed_is_named_with_its_signal_and_no_frame_of_ours(tmp_path: Path) -> None:
    running = start(tmp_path, *HEADLESS, str(HANGS), "killed", "20", SCRIPT_S="100")
    _, said = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 1
    assert "loader worker" in next(line for line in said.splitlines() if line.startswith("finding: "))
    assert "SIGKILL" in said or "Killed" in said  # the system may forget it before anybody looks
    assert not [line for line in said.splitlines() if line.lstrip().startswith("File") and "ndd_" in line]


def frame(name: str, file: str, line: int = 1) -> dict[str, object]:
    return {"name": name, "filename": file, "short_filename": file, "line": line, "locals": None}


def test_the_phase_of_a_stack_is_that_of_the_outermost_function_that_has_one() -> None:
    torch = "/x/lib/python3.11/site-packages/torch"
    loop, item = frame("<module>", "/home/me/train.py"), frame("__getitem__", "/home/me/data.py")
    call = frame("_wrapped_call_impl", f"{torch}/nn/modules/module.py")
    loader = frame("__next__", f"{torch}/utils/data/dataloader.py")
    assert stack_samples.phase_of([call, item, loader, loop], set()) == "data_wait"
    assert stack_samples.phase_of([item, call, loop], set()) == "forward"
    assert stack_samples.phase_of([item, loop], set()) == "other"
    assert stack_samples.phase_of([call, item, loop], {("/home/me/data.py", "__getitem__")}) == "data_wait"
