"""The process that starts the ranks of `ndd-console train --ranks`, by torch's elastic launcher, and restarts them.

    python -m ndd_engine.train.parallel.agent RANKS RESTARTS FOLDER COMMAND...

It does not depend on the console, and holds a lock on the run while ranks restart. SIGINT and SIGTERM are passed on to
the ranks, which save a checkpoint and stop; further ones stop them immediately, and kill those that do not. If the
ranks end without recording why, it records which of them failed first.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, NddError
from ndd_engine.record.events import EndEvent
from ndd_engine.record.rundir import RunDir, RunLock
from ndd_engine.text import counted, printable

from .rank_place import ENV_NOTES, ENV_OWN_LAUNCHER, ENV_STOPPED, ended_since, record_end

# A restart shares the store of the launcher, which still has addresses of the ranks before (PyTorch issue 135712).
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
MONITOR_S = 0.1
# SIGTERMs within this time are one: a service manager sends it to all processes, and some of them pass it on.
SAME_TERM_S = 1.0
# From the second signal to SIGKILL.
KILL_S = 3.0


class Signals:
    """Passes SIGINT and SIGTERM on to the ranks. first: the first one that arrived, None before."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._last_term_s = -SAME_TERM_S
        self._kill_at: float | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def look(self) -> None:
        """Kill ranks that have not stopped in time."""
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            _send(signal.SIGKILL)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM:
            before, self._last_term_s = self._last_term_s, now
            if now - before < SAME_TERM_S:
                return
        if self.first is None:
            self.first = number
            # For ranks that this ends before they listen, and that would be started again.
            os.environ[ENV_STOPPED] = "1"
            _send(number)
            return
        self._kill_at = self._kill_at or now + KILL_S
        _send(signal.SIGINT)


def _send(number: int) -> None:
    with contextlib.suppress(psutil.Error):
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                rank.send_signal(number)


def launch(ranks: int, restarts: int, folder: Path, command: Sequence[str]) -> int:
    """Run the ranks to their end. Returns 0 if they recorded how the run ended, otherwise 1."""
    signals, run, begun = Signals(), RunDir(folder), time.time()
    lock = RunLock(run, run.launcher)
    try:
        lock.acquire()
    except (NddError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    notes = tempfile.mkdtemp(prefix="ndd-ranks-")
    os.environ |= {ENV_OWN_LAUNCHER: str(folder), ENV_NOTES: notes, OWN_STORE: "1"}
    # torch's threads are set by each rank; this is for libraries that read it when they are loaded.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
    failures: list[str] = []
    try:
        # In a thread, torch's launcher leaves the signals alone: it would kill ranks that write a checkpoint.
        thread = threading.Thread(
            target=_elastic, args=(ranks, restarts, command, failures.append), daemon=True
        )
        thread.start()
        while thread.is_alive():
            thread.join(MONITOR_S)
            signals.look()
        end = ended_since(run, begun)
        if end is None:
            record_end(run, _end(signals.first, failures, restarts))
        return EXIT_DONE if end is not None else EXIT_FAILED
    finally:
        shutil.rmtree(notes, ignore_errors=True)
        lock.release()


def _elastic(ranks: int, restarts: int, command: Sequence[str], failed: Callable[[str], object]) -> None:
    """Run the ranks under torch's launcher. failed: called with what it reports as the failure."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # That signals are left alone is intended.
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(lambda record: "signal handlers" not in record.getMessage())
    known = inspect.signature(LaunchConfig).parameters
    more: dict[str, Any] = {"shutdown_timeout": int(KILL_S)} if "shutdown_timeout" in known else {}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=MONITOR_S,
        local_addr="localhost",  # the name of the host may have no address
        logs_specs=DefaultLogsSpecs(),
        **more,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda item: item[1].timestamp)
        failed(_words(rank, first.pid, first.exitcode))
    except Exception as error:  # noqa: BLE001  torch's launcher itself
        failed(f"the launcher of the ranks failed: {type(error).__name__}: {printable(str(error))}")


def _words(rank: int, pid: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} (process {pid}) ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    usual = ", usually by the kernel's OOM killer or by hand" if name == "SIGKILL" else ""
    return f"rank {rank} (process {pid}) was killed by {name}{usual}"


def _end(stopped: int | None, failures: Sequence[str], restarts: int) -> EndEvent:
    """The end of a run whose ranks recorded none."""
    if stopped == signal.SIGTERM:
        return EndEvent("terminated", "terminated (SIGTERM), immediately", 0, EXIT_TERMINATED)
    if stopped is not None:
        return EndEvent("interrupted", "interrupted (Ctrl-C), immediately", 0, EXIT_INTERRUPTED)
    again = f" after {counted(restarts, 'restart')}" if restarts and failures else ""
    text = failures[0] if failures else "the ranks ended without saying why"
    return EndEvent("failed", f"{text}{again}; see console.log", 0, EXIT_FAILED)


if __name__ == "__main__":
    status = launch(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # ending the interpreter with torch takes a second
