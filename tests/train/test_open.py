"""Opening a run where that is not possible, and losing its folder: one message, and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from train_help import Trainer

from ndd_engine.config import read
from ndd_engine.errors import MachineError, UsageError
from ndd_engine.record.rundir import RunLock
from ndd_engine.run import Run
from ndd_engine.train.request import RunRequest
from ndd_engine.train.training_run import TrainingRun


def test_a_run_that_cannot_be_opened_leaves_no_folder(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_threads(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def no_space(_lock: RunLock, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_threads)
        with pytest.raises(MachineError, match="can't start new"):
            trainer.open(*trainer.ndd, "run.name=one")
    with monkeypatch.context() as patched:
        patched.setattr(RunLock, "acquire", no_space)
        with pytest.raises(UsageError, match="No space left"):
            trainer.open(*trainer.ndd, "run.name=one")
    assert list(trainer.root.iterdir()) == []


def test_a_full_disk_at_the_start_leaves_no_folder_whose_name_is_taken(
    trainer: Trainer, small_disk: Callable[[int], Path]
) -> None:
    trainer.root = small_disk(16)
    (trainer.root / "filler").write_bytes(b"x" * 8192)
    with contextlib.suppress(OSError):
        (trainer.root / "more").write_bytes(b"x" * 65536)
    with contextlib.suppress(UsageError):
        trainer.train(*trainer.ndd, "run.name=one", "run.max_steps=1")
    assert not (trainer.root / "one").exists()


@pytest.mark.parametrize("name", ["lock", "events.jsonl", "console.log", "config.toml"])
def test_a_fifo_among_the_files_of_a_run_is_one_error(trainer: Trainer, name: str) -> None:
    result = trainer.train(*trainer.ndd, "run.max_steps=1")
    path = result.directory.path / name
    draft = read(result.directory.config)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(UsageError, match=name):
        Run.open(TrainingRun(RunRequest(draft, trainer.root, result.directory)))
