"""What a case needs around its run: its own module in a folder, and other processes on the cores."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODULE = "planted"
SOURCE = Path(__file__).with_name(f"{MODULE}.py")

# Each looks now and then whether the suite still lives, so that nothing spins on after it was killed.
_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(200_000))\n"
_ASLEEP = "import os, sys, time\nwhile os.getppid() == int(sys.argv[1]):\n    time.sleep(0.2)\n"


def write_module(folder: Path) -> None:
    """The own workloads as a module in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(SOURCE, folder / SOURCE.name)


@contextmanager
def neighbours(busy: int, asleep: int = 0) -> Iterator[tuple[int, ...]]:
    """Other processes beside a run, gone afterwards: so many that compute, and so many that sleep.

    Yields the process ids of those that compute.
    """
    # One thread each, whatever the environment says.
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
