"""A folder in the memory of the system, for files through which processes of a run tell of themselves.

Nothing that is stored there ever waits for a disk. What a process has left that was killed is removed by the next one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil

# Where it has so much space: loaders need it, too.
SHARED = Path("/dev/shm")
LEAST_FREE = 256 << 20
_PREFIX = "ndd-"
_OWNER = "owner"


def shared_folder() -> Path | None:
    """A new one; None where the system has no memory to spare."""
    try:
        if shutil.disk_usage(SHARED).free < LEAST_FREE:
            return None
        for left in SHARED.glob(f"{_PREFIX}*/{_OWNER}"):
            _remove_left(left)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=SHARED))
        (folder / _OWNER).write_text(f"{os.getpid()} {psutil.Process().create_time()}", encoding="ascii")
    except OSError:
        return None
    return folder


def _remove_left(owner: Path) -> None:
    """Remove the folder of a console that was killed."""
    try:
        pid, created = owner.read_text(encoding="ascii").split()
        if owner.stat().st_uid != os.getuid():
            return
        if not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).create_time() != float(created):
            shutil.rmtree(owner.parent, ignore_errors=True)
    except (OSError, ValueError, psutil.Error):
        return
