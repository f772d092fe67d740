"""`ndd-console run` with real scripts: status, output, signals, record, and what the diagnosis says of it."""

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
from tests.waiting import contains, lives, until

from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpu import Gpu
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.record.events import EndEvent, RunEvent, WindowEvent, parse
from ndd_engine.script.command import Command
from ndd_engine.script.run import ScriptRequest, ScriptRun

pytestmark = pytest.mark.long

SUBJECTS = Path(__file__).parents[1] / "observe" / "subjects"
CONSOLE = (sys.executable, "-m", "ndd_console")
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


def environment() -> dict[str, str]:
    return {**os.environ, "NDD_WATCH_WINDOW_S": "0.2", "NO_COLOR": "1"}


def run(
    folder: Path, *words: str, stdin: str | None = None, status: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*CONSOLE, "run", *words], cwd=folder, capture_output=True, text=True, timeout=120, input=stdin,
        env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done


def events(folder: Path, name: str) -> list[Any]:
    found = map(parse, (folder / "runs" / name / "events.jsonl").read_bytes().splitlines())
    return [item[1] for item in found if item is not None]


@pytest.mark.promise
def test_the_output_goes_through_and_the_record_is_a_run(tmp_path: Path) -> None:
    done = run(tmp_path, "--", sys.executable, str(SUBJECTS / "plain.py"))
    words = done.stdout.split()
    steps = int(words[words.index("STEPS") + 1])
    seen = events(tmp_path, "plain-001")
    windows = [event for event in seen if isinstance(event, WindowEvent)]
    assert sum(event.steps for event in windows) == steps
    for event in windows:
        assert sum(body["host_ns"] for body in event.phases.values()) == event.wall_ns
    (identity,) = [event for event in seen if isinstance(event, RunEvent)]
    assert identity.workload == "plain.py" and identity.parameters > 0 and identity.items_per_step == 32
    assert seen[-1].status == "done" and "Traceback" not in done.stderr
    listed = subprocess.run(
        [*CONSOLE, "runs", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    (row,) = json.loads(listed.stdout)["runs"]
    assert (row["name"], row["status"], row["step"]) == ("plain-001", "done", steps)
    report = subprocess.run(
        [*CONSOLE, "report", "plain-001", "--text"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert report.returncode == 0 and "forward" in report.stdout, report.stderr
    assert "cannot be compared" not in report.stdout


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
    done = run(tmp_path, "--run", "it", "--", sys.executable, "-c", code, status=status)
    end = events(tmp_path, "it")[-1]
    assert isinstance(end, EndEvent) and end.exit_status == status
    assert words in end.reason and end.reason in done.stderr.replace("\n", " ")


def test_input_goes_through(tmp_path: Path) -> None:
    done = run(tmp_path, "--", sys.executable, "-c", "print(input()[::-1])", stdin="abc\n")
    assert done.stdout == "cba\n"


def test_what_cannot_be_observed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    assert "-I" in run(tmp_path, "--", sys.executable, "-I", "train.py", status=2).stderr
    assert "no such command" in run(tmp_path, "--", "no-such-program", status=2).stderr
    assert "allowed" in run(tmp_path, "--run", "a/b", "--", sys.executable, status=2).stderr
    assert not (tmp_path / "runs").exists()


def test_slow_data_is_named_with_its_function(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW.replace("STEPS", "240"))
    done = run(tmp_path, "--", sys.executable, "slow.py")
    # Where cores are free, loader workers are proposed before a change of the function.
    assert "finding: input-bound" in done.stderr
    assert "(slow.py:" in done.stderr or "try loader.workers=" in done.stderr
    shown = subprocess.run(
        [*CONSOLE, "report", "slow-001", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True,
        env=environment(),
    )  # fmt: skip
    first = json.loads(shown.stdout)["findings"][0]
    assert first["cause"] == "data-wait" and first["share"] > 0.8
    assert "decode" in json.dumps(first)
    assert any(change["where"] and "slow.py:" in change["where"] for change in first["changes"])


@pytest.mark.promise
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_script_and_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "slow.py").write_text(SLOW.replace("STEPS", "80000"))
    process = subprocess.Popen(
        [*CONSOLE, "run", "--", sys.executable, "slow.py"], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
    )  # fmt: skip
    record = tmp_path / "runs" / "slow-001" / "events.jsonl"
    until(lambda: contains(record, '"window"'))
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    end = events(tmp_path, "slow-001")[-1]
    assert end.status == ("interrupted" if number == signal.SIGINT else "terminated") and end.step > 0


@pytest.mark.promise
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_killing_the_console_ends_the_script(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os\nopen('pid', 'w').write(str(os.getpid()))\n" + SLOW.replace("STEPS", "80000")
    )
    process = subprocess.Popen(
        [*CONSOLE, "run", "--", sys.executable, "slow.py"], cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=environment(), start_new_session=True,
    )  # fmt: skip
    until((tmp_path / "pid").exists)
    time.sleep(0.5)
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    until(lambda: not lives(pid))


@pytest.mark.promise
def test_on_the_screen(tmp_path: Path) -> None:
    """In a real terminal: phases, the output of the script on the log page, and Ctrl-C."""
    (tmp_path / "slow.py").write_text(
        "print('hello from the script', flush=True)\n" + SLOW.replace("STEPS", "80000")
    )
    child = pexpect.spawn(
        sys.executable, ["-m", "ndd_console", "run", "--", sys.executable, "slow.py"], cwd=str(tmp_path), timeout=60,
        env={**environment(), "TERM": "xterm-256color"}, dimensions=(24, 80), encoding="utf-8",
    )  # fmt: skip
    child.expect("data_wait")
    child.send("l")
    child.expect("hello from the script")
    child.send("q")
    child.expect("data_wait")
    child.send("\x03")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    end = events(tmp_path, "slow-001")[-1]
    assert end.status == "interrupted" and end.step > 0


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

    monkeypatch.setattr("ndd_engine.script.run.detect", lambda **_: machine)
    monkeypatch.setattr("ndd_engine.script.run.Sampler", Samples)
    monkeypatch.setenv("NDD_WATCH_WINDOW_S", "0.2")
    words = (sys.executable, str(SUBJECTS / "on_gpu.py"), "2", "1", "1", "1")
    run_of_script = ScriptRun.open(ScriptRequest(Command(words, tmp_path), tmp_path / "runs", screen=True))
    try:
        assert run_of_script.execute().status == "done"
    finally:
        run_of_script.close()
    assert [gpu.uuid for gpu in sampled if gpu is not None] == [uuids[1]]
    seen = [event for event in events(tmp_path, "on_gpu-001") if isinstance(event, RunEvent)]
    assert seen and seen[0].gpu is not None and seen[0].gpu["uuid"] == uuids[1]
