"""What commands say, and what runs leave behind."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from ndd_console.__main__ import status_of
from ndd_engine.record.rundir import RunDir, RunLock


@dataclass(frozen=True)
class Said:
    """How a command ended: its exit status, and what it printed."""

    status: int
    output: str
    errors: str = ""

    def check(self, *statuses: int) -> None:
        """It ended with one of these, without a traceback or anything that steers a terminal."""
        everything = self.output + self.errors
        assert self.status in statuses, f"status {self.status}: {everything[-2000:]}"
        assert "Traceback" not in everything, everything[-4000:]
        clean(self.output)
        clean(self.errors)


def said(*arguments: str) -> Said:
    """A command in this process."""
    # As `main` sets them up: what cannot be encoded is escaped.
    out, errors = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2)
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = status_of(list(arguments))
    return Said(status, *(stream.buffer.getvalue().decode() for stream in (out, errors)))  # type: ignore[attr-defined]


def clean(text: str) -> None:
    """No character that a terminal would obey."""
    for line in text.split("\n"):
        bad = [char for char in line if not char.isprintable()]
        assert not bad, f"{bad[:5]!r} in {line[:200]!r}"


def sound(run: RunDir) -> list[int]:
    """Nothing holds the run, and all its checkpoints can be loaded. Returns their steps."""
    from ndd_engine.train.checkpoint import CheckpointStore

    assert run.live_owner() is None, "its lock is held"
    lock = RunLock(run)
    lock.acquire(0.0)  # raises if it is held
    lock.release()
    store = CheckpointStore(run.checkpoints, 9)
    for saved in store.all():
        assert store.load(saved)["step"] == saved.step
    return [saved.step for saved in store.all()]


def state_of(run: RunDir) -> dict[str, Any]:
    """What the last checkpoint contains of training."""
    from ndd_engine.train.checkpoint import CheckpointStore

    store = CheckpointStore(run.checkpoints, 9)
    state = store.load(store.all()[-1])
    return {key: state[key] for key in ("step", "model", "optimizer", "scaler", "random")}


def processes(belongs: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Those that belong to what was started, and live."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.status() != psutil.STATUS_ZOMBIE and belongs(process):
                found.append(process)
    return found


def left_over(living: Callable[[], list[psutil.Process]], seconds: float) -> list[str]:
    """The processes that stay, after some seconds in which they may end; ends them."""
    deadline = time.monotonic() + seconds
    while (found := living()) and time.monotonic() < deadline:
        time.sleep(0.05)
    names = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
    return names
