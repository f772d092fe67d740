"""The memory snapshot of a run that runs out of GPU memory, with a fake of torch.cuda.memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ndd_console.__main__ import status_of
from ndd_engine.config import read
from ndd_engine.measure import memory as memory_history
from ndd_engine.measure.memory import largest
from ndd_engine.train.failures import explain
from ndd_watch.holders import Allocations

MIB = 1 << 20
# Size and line of an owner.
OWNER = re.compile(r"([\d.]+) MiB me/model\.py:(\d)")
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Memory:
    """torch.cuda.memory: records the calls; the snapshot has four lines of 10, 20, 30 and 40 MiB and a free block."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.broken = False

    def _record_memory_history(self, enabled: str | None, **options: Any) -> None:
        self.calls.append((enabled, options))
        if self.broken:
            raise RuntimeError("no such option")

    def _snapshot(self) -> dict[str, Any]:
        if self.broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        blocks = [
            {"address": line * 100 * MIB, "size": 10 * line * MIB, "requested_size": 10 * line * MIB,
             "state": "active_allocated", "frames": [{"filename": "/me/model.py", "line": line, "name": "forward"}]}
            for line in range(1, 5)
        ]  # fmt: skip
        blocks.append({"address": 900 * MIB, "size": 9 * MIB, "state": "inactive", "frames": []})
        segments = [
            {"device": 0, "address": block["address"], "total_size": block["size"], "stream": 0, "blocks": [block],
             "segment_type": "large", "segment_pool_id": (0, 0)}
            for block in blocks
        ]  # fmt: skip
        return {"segments": segments, "device_traces": [[]]}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    fake = Memory()
    monkeypatch.setattr(memory_history, "_memory", lambda: fake)
    yield fake
    memory_history.stop()


def message(error: BaseException) -> str:
    config = read(None, ["workload.size=tiny", "batch.micro=8", "batch.accumulation=1"], "chartext").resolve()
    return explain(error, 4, "forward", config, CPU, None).text


@pytest.mark.parametrize(
    ("text", "writes"),
    [
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuFFT error: CUFFT_ALLOC_FAILED", True),
        ("miopenStatusAllocFailed", True),
        ("rocblas_status_memory_error when calling `rocblas_create_handle`", True),
        ("HIP out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: device-side assert triggered", False),
        ("DefaultCPUAllocator: can't allocate memory", False),
    ],
)
def test_a_library_that_runs_out_of_gpu_memory_writes_the_snapshot_as_torch_does(
    memory: Memory, tmp_path: Path, text: str, writes: bool
) -> None:
    memory_history.start(GPU, "start", tmp_path)
    assert memory_history.out_of_memory(MemoryError()) == ""
    assert ("memory.pickle" in memory_history.out_of_memory(RuntimeError(text))) is writes
    assert (tmp_path / "memory.pickle").exists() is writes
    # The same of a script: the class and the text of the error are torch's own.
    watch = Allocations(torch)
    assert watch._of_gpu(RuntimeError(text)) is writes and watch._of_gpu(FULL)
    assert not watch._of_gpu(ValueError(text)) and not watch._of_gpu(RuntimeError("a CUDA error", text))


def test_memory_without_a_recorded_line_is_the_first_owner() -> None:
    line = [{"filename": "/me/model.py", "line": 3, "name": "forward"}]
    assert largest([([], 30 << 30), (line, 1 << 20)]).startswith(
        "30.0 GiB of 30.0 GiB without a recorded line, 1.0 MiB"
    )
    assert largest([([], 1 << 20), (line, 30 << 30)]) == "30.0 GiB me/model.py:3 forward"
    assert largest([([], 1 << 20)]) == ""


@pytest.mark.long
def test_a_run_that_runs_out_of_memory_writes_a_snapshot_and_names_the_owners(
    memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory_history.start(GPU, "start", tmp_path)
    text = message(FULL)
    assert OWNER.findall(text) == [("40.0", "4"), ("30.0", "3"), ("20.0", "2")]
    assert str(tmp_path / "memory.pickle") in text
    assert "memory_history" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["memory.pickle"]
    assert status_of(["memory", str(tmp_path / "memory.pickle")]) == 0
    assert "me/model.py:4" in capsys.readouterr().out


def test_the_history_is_recorded_for_the_first_steps_only(memory: Memory, tmp_path: Path) -> None:
    memory_history.start(GPU, "start", tmp_path)
    (enabled, options), *_ = memory.calls
    assert enabled == "all" and options["context"] == "alloc" and options["stacks"] == "python"
    assert options["max_entries"] <= 100_000
    memory_history.settle(1)
    assert len(memory.calls) == 1
    memory_history.settle(3)
    memory_history.settle(4)
    assert [call[0] for call in memory.calls] == ["all", None]
    # What stays allocated keeps its stack; how to get those of later steps is part of the message.
    assert OWNER.search(message(FULL)) and "memory_history=always" in message(FULL)


def test_it_is_recorded_always_or_not_at_all_and_not_while_something_is_measured(
    memory: Memory, tmp_path: Path
) -> None:
    def calls() -> list[Any]:
        return [call[0] for call in memory.calls]

    memory_history.start(GPU, "off", tmp_path)
    memory_history.start(CPU, "always", tmp_path)
    with memory_history.paused():
        pass
    assert not memory.calls and not OWNER.search(message(FULL))
    memory_history.start(GPU, "always", tmp_path)
    memory_history.settle(1000)
    assert calls() == ["all"]
    with memory_history.paused():
        assert calls() == ["all", None]
    memory_history.stop()
    assert calls() == ["all", None, "all", None]
    assert not OWNER.search(message(FULL))  # the run has ended


def test_an_error_of_the_recording_does_not_hide_the_failure(memory: Memory, tmp_path: Path) -> None:
    memory.broken = True
    memory_history.start(GPU, "always", tmp_path)
    memory_history.settle(9)
    text = message(FULL)
    assert "2.00 GiB" in text and "launch failure" not in text
    memory.broken = False
    memory_history.start(GPU, "always", tmp_path / "missing")
    assert OWNER.search(message(FULL))  # the folder does not exist, but the owners are known
    assert not list(tmp_path.iterdir())
