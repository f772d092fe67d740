"""Several ranks on several GPUs: the exposed exchange, memory, a slow GPU, a long pause.

The cost of the marks is a figure of `make gpu`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from qa.gpu.ranks import RANKS, STRATEGIES, launched, trace
from tests.waiting import LIMIT_S, until

from ndd_engine.predict.rank_memory import pretended
from ndd_engine.record.rundir import RunDir
from ndd_engine.run.channel import send

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(GPUS < RANKS, reason=f"needs two CUDA GPUs; torch sees {GPUS}")

# CUDA's caching allocator allocates in multiples of this.
GRANULE = 512
LOCK_CLOCKS = "NDD_LOCK_CLOCKS"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exposed_exchange_by_events_agrees_with_a_profiler_capture(strategy: str) -> None:
    found = launched("exchange", "cuda", strategy)
    assert found["exposed_ns"] > 1e6, "nothing to compare: the exchange is hidden"
    assert found["events_ns"] == pytest.approx(found["exposed_ns"], rel=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_of_a_rank_is_what_one_process_predicted(strategy: str) -> None:
    sets = (
        "workload.size=guide", "workload.dropout=0.0", "batch.micro=16", "run.device=cuda", "run.max_steps=9",
        f"parallel.ranks={RANKS}", f"parallel.strategy={strategy}",
    )  # fmt: skip
    device = torch.device("cuda", 0)
    with pretended(RANKS, device):
        predicted = trace(device, *sets).peak(GRANULE)
    found = launched("memory", "cuda", *sets)
    assert predicted == pytest.approx(found["allocated"], rel=0.02)


@contextmanager
def training(root: Path, *sets: str) -> Iterator[RunDir]:
    """A run of two ranks that trains until the end of the context; it must end with a checkpoint and status 0."""
    base = ("run.device=cuda", "workload.size=small", "evaluate.every_epochs=0", "log.window_s=0.5")
    options = [word for each in (*base, *sets) for word in ("--set", each)]
    command = [
        sys.executable, "-m", "ndd_console", "--runs", str(root), "train", "--run", "ranks", "--headless",
        "--ranks", str(RANKS), "--max-steps", "100000000", *options,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = RunDir(root / "ranks")
    try:
        until(lambda: bool(events(run, "ranks")))
        yield run
        send(run.control_socket, "stop")
        output = process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == 0, output[-2000:]
        assert list(run.checkpoints.glob("step-*"))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LIMIT_S)


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    """The recorded events of a type; [] before the run exists."""
    try:
        lines = run.events.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [body for line in lines if line.endswith("}") and (body := json.loads(line))["type"] == kind]


# PyTorch's watchdog ends a process whose collective takes longer than ten minutes.
@pytest.mark.parametrize(
    "pause_s", [15, pytest.param(900, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_a_pause_is_not_taken_for_a_hang(tmp_path: Path, pause_s: int) -> None:
    with training(tmp_path, "parallel.hang_s=5") as run:
        send(run.control_socket, "pause")
        until(lambda: any(mark["kind"] == "pause" for mark in events(run, "mark")))
        time.sleep(pause_s)
        step = events(run, "window")[-1]["step"]
        send(run.control_socket, "resume")
        until(lambda: events(run, "window")[-1]["step"] > step)
        assert not [mark for mark in events(run, "mark") if mark["kind"] == "warning"]


@contextmanager
def slowed(index: int) -> Iterator[None]:
    """The gpu's clock at its least supported rate. Skips the test where that is not permitted."""
    if not os.environ.get(LOCK_CLOCKS):
        pytest.skip(f"changes the clock of a GPU, and resets it to its default: set {LOCK_CLOCKS}=1")
    gpu = f"GPU-{torch.cuda.get_device_properties(index).uuid}"

    def smi(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nvidia-smi", "-i", gpu, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    rates = smi("--query-supported-clocks=graphics", "--format=csv,noheader,nounits").stdout.split()
    least = min((int(rate) for rate in rates if rate.isdigit()), default=None)
    if least is None:
        pytest.skip("nvidia-smi lists no supported clocks")
    done = smi(f"--lock-gpu-clocks={least},{least}")
    if done.returncode:
        pytest.skip(f"nvidia-smi cannot lock the clock: {(done.stdout + done.stderr).strip()}")
    try:
        yield
    finally:
        smi("--reset-gpu-clocks")


def test_a_gpu_with_a_low_clock_is_named(tmp_path: Path) -> None:
    def named() -> list[dict[str, Any]]:
        return [event["late"] for event in events(run, "ranks") if event["late"]]

    # Large enough that the GPU, not the host, limits the step.
    with slowed(1), training(tmp_path, "workload.size=guide", "batch.micro=64") as run:
        until(lambda: bool(named()))
        assert named()[-1]["rank"] == 1
        assert named()[-1]["phase"] in ("forward", "backward")
