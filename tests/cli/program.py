"""The program as a process of its own, without a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# A tiny step and no end in sight.
ENDLESS = ("--set", "workload.size=tiny", "--set", "run.epochs=100000", "--set", "run.threads=1")


def environment(**extra: str) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
    for name in ("NDD_RUNS", "NO_COLOR"):
        if name not in extra:
            env.pop(name, None)
    return env


def run(*arguments: str, folder: Path, timeout: float = 90, **extra: str) -> subprocess.CompletedProcess[str]:
    """The finished program, with `folder` as its runs folder and working directory."""
    return subprocess.run(
        [sys.executable, "-m", "ndd_console", "--runs", str(folder / "runs"), *arguments],
        cwd=folder,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def start(*arguments: str, folder: Path, group: bool = False) -> subprocess.Popen[str]:
    """The running program. group: in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "ndd_console", "--runs", str(folder / "runs"), *arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=group,
    )
