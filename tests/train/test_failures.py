"""A failure of training, or of a loader worker, is one message that says what to change; good state is saved."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import few
from tests.waiting import LIMIT_S
from torch.utils.data import Dataset
from train_help import ENDLESS, EVERY_STEP, Trainer

from ndd_engine.config import read
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.record.events import Event, WindowEvent
from ndd_engine.run.run import Run
from ndd_engine.train.data import loader as workers_module
from ndd_engine.train.data.loader import Batches
from ndd_engine.train.failures import explain, less_memory
from ndd_engine.train.loop import Loop
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.factory_data import prepare

CPU = torch.device("cpu")


def config_of(*sets: str) -> Any:
    return read(None, ["workload.size=tiny", *sets]).resolve()


@pytest.mark.parametrize("read_every", [1, 10])
def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(trainer: Trainer, read_every: int) -> None:
    result = trainer.train(
        *trainer.chartext, f"log.every_steps={read_every}", "log.window_s=0", "run.max_steps=60", "optimizer.name=sgd",
        "optimizer.lr=1e30", "clip.max_norm=0.0", "checkpoint.every_steps=1", "checkpoint.keep=100",
        "schedule.warmup_steps=1000000000",
    )  # fmt: skip
    end = result.end
    assert (end.status, end.exit_status) == ("failed", 1)
    found = re.search(r"at step (\d+)", end.reason)
    assert found and "optimizer.lr" in end.reason, end.reason
    bad, good = int(found[1]), result.checkpoints
    assert 1 <= bad <= 60
    assert end.checkpoint == (f"step-{good[-1]:08d}" if good else None)
    # Every step was saved: the last good one is the one before the bad one, and none holds what is not finite.
    assert good == list(range(1, bad))
    for step in good:
        assert all(bool(torch.isfinite(value).all()) for value in result.state(step)["model"].values())
    assert all(window.loss is None or math.isfinite(window.loss) for window in result.windows)


OUT_OF_MEMORY = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from train_help import Trainer
trainer = Trainer(Path(sys.argv[2]), Path("unused"))
trainer.train(*trainer.ndd, "run.max_steps=2")  # everything that is loaded late is loaded now
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 400_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
end = trainer.train(
    *trainer.ndd, "run.max_steps=3", "workload.samples=30000", "workload.hidden=[4096]",
    "batch.micro=8000", "batch.accumulation=3",
).end
print(end.exit_status, end.reason)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to set a limit on memory")
def test_out_of_memory_says_what_filled_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, str(Path(__file__).parent), str(tmp_path)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = done.stdout.strip().splitlines()[-1]
    assert text.startswith("1 out of memory"), text
    # What was asked for, and what fills the memory.
    assert len(re.findall(r"[\d.]+ (?:[KMG]i)?B", text)) >= 3, text
    assert "Traceback" not in done.stdout


@given(st.integers(1, 4096), st.integers(1, 64))
def test_the_smaller_batch_is_smaller_and_the_step_the_same(micro: int, accumulation: int) -> None:
    text = less_memory(config_of(f"batch.micro={micro}", f"batch.accumulation={accumulation}"))
    found = re.search(r"batch\.micro=(\d+) --set batch\.accumulation=(\d+)", text)
    if micro == 1:
        assert found is None
        assert "batch.sequence" in text
    else:
        assert found is not None
        assert int(found[1]) < micro
        assert int(found[1]) * int(found[2]) == micro * accumulation


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise KeyError


@pytest.mark.parametrize(
    ("error", "kind", "parts"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity"),
         "oom", ["step 7", "20.00 MiB"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes."),
         "oom", ["1.0 GiB"]),
        (MemoryError(), "oom", ["step 7"]),
        (RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. "),
         "killed", ["worker 4711", "SIGKILL", "loader.workers=2"]),
        (RuntimeError("DataLoader worker (pid 4711) is killed by signal: Segmentation fault. It is possible"),
         "worker", ["worker 4711"]),
        (RuntimeError("DataLoader worker (pid(s) 4711, 4712) exited unexpectedly"), "worker", ["4711, 4712"]),
        (RuntimeError("DataLoader worker (pid(s) 4711) exited unexpectedly with status 3"),
         "worker", ["worker 4711", "status 3", "loader.workers=0"]),
        (RuntimeError("DataLoader timed out after 2 seconds"), "worker", ["1 min", "loader.timeout_s"]),
        (OSError(errno.EMFILE, "Too many open files"), "error", ["ulimit -n", "step 7"]),
        (RuntimeError("received 0 items of ancdata"), "error", ["ulimit -n"]),
        (RuntimeError("can't start new thread"), "error", ["ulimit -u"]),
        (OSError(errno.EFBIG, "File too large"), "error", ["ulimit -f"]),
        (ValueError("x" * 1_000_000), "error", ["ValueError", "xxx…"]),
        (UnspeakableError(), "error", ["UnspeakableError", "__str__", "KeyError"]),
        (ValueError(
            "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
            '  File "/x/data.py", line 3, in __getitem__\n    raise ValueError("row 3: no label")\n'
            "ValueError: row 3: no label\n"
         ), "error", ["ValueError", ": row 3: no label"]),
        (FileNotFoundError(2, "No such file or directory", "/data/\x1b[1mx"), "error", ["/data/\\x1b[1mx: No such"]),
        (ValueError(), "error", ["ValueError"]),
    ],
)  # fmt: skip
def test_each_failure_names_its_kind_and_what_to_change(
    error: Exception, kind: str, parts: list[str]
) -> None:
    config = config_of("loader.workers=4", "loader.timeout_s=90")
    failure = explain(error, 7, "forward", config, CPU, None)
    assert failure.kind == kind
    for part in parts:
        assert part in failure.text
    assert failure.text.isprintable() and len(failure.text) < 600


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "HIP out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 63.98 GiB",
        "HIP error: out of memory",
        "HIP error: hipErrorOutOfMemory",
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "HIPBLAS_STATUS_ALLOC_FAILED",
        "rocBLAS error: rocblas_status_memory_error",
        "miopenStatusAllocFailed",
        "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error, Cuda failure 'out of memory'",
        "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_memory_that_runs_out_is_known_in_the_words_of_every_library(text: str) -> None:
    error = RuntimeError(text)
    assert is_out_of_memory(error)
    assert explain(error, 3, "backward", config_of(), CPU, None).kind == "oom"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "out of resource: shared memory, Required: 147456, Hardware limit: 101376",
        "the table out_of_memory does not exist",
        "memory format channels_last",
    ],
)
def test_not_every_error_about_memory_is_one(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


def test_memory_that_runs_out_is_explained_though_the_gpu_answers_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", broken)
    config = config_of("batch.micro=8")
    stepper = Stepper(prepare(config), config, CPU, total_steps=1)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    failure = explain(error, 3, "forward", config, torch.device("cuda:0"), stepper)
    assert failure.kind == "oom" and "step 3 in forward" in failure.text


def test_a_full_disk_costs_checkpoints_but_not_the_training(
    trainer: Trainer, small_disk: Callable[[int], Path]
) -> None:
    trainer.root = small_disk(1024) / "runs"
    result = trainer.train(
        *trainer.ndd, *EVERY_STEP, "run.epochs=100", "run.max_steps=40", "workload.hidden=[256,64]",
        "checkpoint.every_steps=4", "checkpoint.keep=100", "evaluate.every_epochs=0",
    )  # fmt: skip
    end, good = result.end, result.checkpoints
    # Every step was done; the last checkpoint that fitted is named.
    assert (end.status, end.exit_status, end.step) == ("failed", 1, 40)
    assert good and good[-1] < 40
    assert end.checkpoint == f"step-{good[-1]:08d}" and end.checkpoint in end.reason
    assert os.strerror(errno.ENOSPC) in end.reason
    assert list(result.directory.checkpoints.glob("*.tmp")) == []


def test_a_stop_that_cannot_be_saved_is_a_failure(trainer: Trainer) -> None:
    def steer(run: Run, event: Event) -> None:
        if isinstance(event, WindowEvent) and event.step == 5:
            # The folder is lost: a file lies where it should be.
            run.directory.checkpoints.write_text("")
            run.control.request("stop")

    result = trainer.train(*trainer.ndd, *EVERY_STEP, *ENDLESS, "checkpoint.every_minutes=0", steer=steer)
    assert (result.end.status, result.end.exit_status) == ("failed", 1)
    assert str(result.end.step) in result.end.reason and result.end.checkpoint is None


def test_a_look_at_what_is_kept_that_fails_does_not_end_training() -> None:
    looked, skipped, notes = [], [], []

    def look(step: int, frame: object) -> None:
        looked.append(step)
        raise RecursionError("planted")

    loop: Any = SimpleNamespace(
        step=7, _window=lambda: None, _holders=SimpleNamespace(look=look),
        reporter=SimpleNamespace(skip=lambda: skipped.append(1)), _apart=lambda look: Loop._apart(loop, look),
        put=notes.append,
    )  # fmt: skip
    Loop._look(loop)
    assert (looked, skipped) == ([7], [1])
    assert [(note.kind, note.step) for note in notes] == [("note", 7)] and "planted" in notes[0].text


# Loader workers


def workers_of(before: set[int]) -> list[int]:
    """Loader workers that came since: grandchildren, because the fork server is in between."""
    mine = os.getpid()
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.pid not in before and child.ppid() != mine]


@pytest.mark.parametrize("persistent", few(["true", "false"], 1))
def test_a_killed_worker_is_named_and_the_moment_is_saved(trainer: Trainer, persistent: str) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    victims: list[int] = []

    def steer(run: Run, event: Event) -> None:
        if isinstance(event, WindowEvent) and event.step >= 30 and not victims:
            victims.extend(workers_of(before)[:1])
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

    workers = ("loader.workers=2", f"loader.persistent={persistent}", "workload.samples=40000")
    result = trainer.train(*trainer.ndd, *EVERY_STEP, *ENDLESS, *workers, steer=steer)
    end = result.end
    assert (end.status, end.exit_status) == ("failed", 1)
    place = f"at step {end.step + 1} in data_wait"
    for part in (f"worker {victims[0]} ", "SIGKILL", place, "--resume eeg-001"):
        assert part in end.reason
    assert result.checkpoints == [end.step]
    sets = ("loader.workers=0", "loader.persistent=false", f"run.max_steps={end.step + 5}")
    again = trainer.train(*sets, resume=result)
    assert (again.end.status, again.end.step) == ("done", end.step + 5)
    assert sorted(again.losses) == list(range(1, end.step + 6))
    # The other worker may wait for ever for a lock that the killed one held.
    for pid in workers_of(before):
        os.kill(pid, signal.SIGKILL)


class Slow(Dataset[int]):
    """One item takes longer than the workers are left unwatched."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            time.sleep(1.0)
        return index


def test_a_stuck_worker_is_given_up_and_a_slow_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "CHECK_S", 0.1)
    config = config_of("batch.micro=1", "loader.workers=1")
    assert sorted(int(batch) for batch in Batches(Slow(), config).epoch(0)) == [0, 1, 2, 3]
    hasty = config_of("batch.micro=1", "loader.workers=1", "loader.timeout_s=0.3")
    with pytest.raises(RuntimeError) as caught:
        list(Batches(Slow(), hasty).epoch(0))
    failure = explain(caught.value, 3, "data_wait", hasty, CPU, None)
    assert failure.kind == "worker" and "300 ms" in failure.text
