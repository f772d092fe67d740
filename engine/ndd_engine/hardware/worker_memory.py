"""The memory of loader workers: what each has for itself, and what it still shares with the process that forked it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

# Workers that are read. Of more, the others count as the mean of these.
MOST = 4
# Maximum share of the time for reading: at first, for so many readings, and later.
FEW, FIRST_SHARE, SHARE = 6, 2e-2, 2e-3


class WorkerMemory:
    """Reads /proc/PID/smaps_rollup, for which Linux goes through all pages of a process. Not thread-safe.

    Of 1 GiB that takes 5 to 20 ms, so it is read less often where there is more.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._readings, self._due = 0, 0.0

    def read(self, pids: Sequence[int]) -> dict[str, int]:
        """Call once per sample. workers_private_bytes, workers_shared_bytes: sums over all workers.

        {} if it is too early, there are no workers, one of them has ended, or the system does not tell.
        """
        now = time.monotonic()
        if not pids or now < self._due:
            return {}
        begin = time.thread_time()
        read = [self._of(pid) for pid in sorted(pids)[:MOST]]
        self._readings += 1
        share = FIRST_SHARE if self._readings <= FEW else SHARE
        self._due = now + (time.thread_time() - begin) / share
        found = [one for one in read if one is not None]
        if len(found) < len(read):
            return {}
        private, shared = (sum(values) * len(pids) // len(found) for values in zip(*found, strict=True))
        return {"workers_private_bytes": private, "workers_shared_bytes": shared}

    def _of(self, pid: int) -> tuple[int, int] | None:
        """(private, shared) bytes; shared: pages that were written, as Python's objects, without those of files."""
        try:
            lines = (self._proc / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()
            sizes = {
                name: int(rest.split()[0]) << 10
                for name, _, rest in (line.partition(":") for line in lines[1:])
            }
            return sizes["Private_Dirty"] + sizes["Private_Clean"], sizes["Shared_Dirty"]
        except (OSError, ValueError, KeyError, IndexError):
            return None
