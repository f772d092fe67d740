"""The environment of a case: other processes on the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Each exits when the suite is gone, so that no process outlives a killed suite.
_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(200_000))\n"
_ASLEEP = "import os, sys, time\nwhile os.getppid() == int(sys.argv[1]):\n    time.sleep(0.2)\n"


@contextmanager
def neighbours(busy: int, asleep: int = 0) -> Iterator[tuple[int, ...]]:
    """Other processes alongside a run: `busy` of them compute, `asleep` of them sleep.

    Yields the process ids of the busy ones.
    """
    # One thread each, regardless of the environment.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for program in (_BUSY,) * busy + (_ASLEEP,) * asleep:
            command = [sys.executable, "-c", program, str(os.getpid())]
            started.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment
                )
            )
        yield tuple(process.pid for process in started[:busy])
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
