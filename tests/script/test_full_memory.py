"""A script that runs out of GPU memory: its snapshot is written on request, and its owners are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A GPU whose memory two lines have filled, as `torch.cuda.memory._snapshot` tells it.
SCRIPT = """
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
print("recorded", calls)
if "full" in sys.argv:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
raise ValueError("another error")
"""


def observed(folder: Path, *words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "ndd_console",
        "run",
        "--headless",
        "--runs",
        "runs",
        "--run",
        "r",
        *options,
    ]
    return subprocess.run(
        [*command, "--", sys.executable, "train.py", *words], cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.long
def test_the_lines_that_filled_the_memory_are_named(tmp_path: Path) -> None:
    done = observed(tmp_path, "full", options=("--memory-history",))
    assert done.returncode == 1
    assert "recorded [('all',)]" in done.stdout
    assert "largest owners of GPU memory: 3.0 GB me/model.py:3 forward" in done.stderr.replace("\n", " ")
    assert "ndd-console memory" in done.stderr
    assert (tmp_path / "runs" / "r" / "memory.pickle").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "options"),
    [(("full",), ()), (("other",), ("--memory-history",))],
    ids=["not-asked", "other-error"],
)
def test_no_snapshot_is_written_without_the_option_or_for_another_error(
    tmp_path: Path, words: tuple[str, ...], options: tuple[str, ...]
) -> None:
    done = observed(tmp_path, *words, options=options)
    assert done.returncode == 1
    assert ("recorded []" in done.stdout) is not bool(options)
    assert "largest owners" not in done.stderr
    assert not list((tmp_path / "runs" / "r").glob("*.pickle"))
