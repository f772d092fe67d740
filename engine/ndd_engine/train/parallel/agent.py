"""The process that starts the ranks of `ndd-console train --ranks`, by torch's elastic launcher, and restarts them.

    python -m ndd_engine.train.parallel.agent RANKS RESTARTS FOLDER COMMAND...

It goes on without the console. If the ranks end without recording why, it records which of them failed first.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndd_engine.errors import EXIT_FAILED, RunLockedError
from ndd_engine.record.events import EndEvent, Event
from ndd_engine.record.reader import RunReader
from ndd_engine.record.recorder import Recorder
from ndd_engine.record.rundir import RunDir, RunLock
from ndd_engine.text import counted, printable

from .place import ENV_OWN_LAUNCHER

# From SIGTERM to SIGKILL, for ranks that outlive a failed one.
SHUTDOWN_S = 10
# A restart shares the store of the launcher, which still has addresses of the ranks before (PyTorch issue 135712).
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def launch(ranks: int, restarts: int, folder: Path, command: Sequence[str]) -> int:
    """Run the ranks to their end. Returns 0 if all of them exited with 0, otherwise 1."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ[ENV_OWN_LAUNCHER] = str(folder)
    os.environ[OWN_STORE] = "1"
    # torch's threads are set by each rank; this is for libraries that read it when they are loaded.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
    known = inspect.signature(LaunchConfig).parameters
    more: dict[str, Any] = {"shutdown_timeout": SHUTDOWN_S} if "shutdown_timeout" in known else {}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
        **more,
    )
    begun = time.time()
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        _rank, failure = error.get_first_failure()
        first = min(error.failures.items(), key=lambda item: item[1].timestamp)
        _record_end(RunDir(folder), begun, _words(first[0], first[1].pid, failure.exitcode), restarts)
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001  also torch's SignalException
        _record_end(
            RunDir(folder), begun, f"the ranks were ended: {type(error).__name__}: {printable(str(error))}", 0
        )
        return EXIT_FAILED
    return 0


def _words(rank: int, pid: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} (process {pid}) ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    usual = ", usually by the kernel's OOM killer or by hand" if name == "SIGKILL" else ""
    return f"rank {rank} (process {pid}) was killed by {name}{usual}"


def _record_end(run: RunDir, begun: float, text: str, restarts: int) -> None:
    """Record the end of a run whose rank 0 could not do so."""
    ended_t = 0.0

    def hear(t: float, event: Event) -> None:
        nonlocal ended_t
        ended_t = t if isinstance(event, EndEvent) else ended_t

    reader = RunReader(run, hear)
    reader.poll()
    snapshot = reader.snapshot()
    if snapshot.end is not None and ended_t >= begun:
        return
    lock = RunLock(run)
    try:
        lock.acquire()
    except (RunLockedError, OSError):
        return
    again = f" after {counted(restarts, 'restart')}" if restarts else ""
    how = f"; resume with: ndd-console train --resume {run.name}" if snapshot.checkpoint is not None else ""
    recorder = Recorder(run.events, reader.state)
    try:
        recorder.start()
        recorder.put(EndEvent("failed", f"{text}{again}{how}; see console.log", snapshot.step, EXIT_FAILED))
        recorder.flush()
    finally:
        recorder.close()
        lock.release()


if __name__ == "__main__":
    sys.exit(launch(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
