"""On request, has torch record which lines allocate GPU memory, and writes its snapshot when the memory runs out.

The snapshot is written where the error ends the script: the memory of the failed step is still in use then. torch's
recording takes about 2 microseconds per allocation, which is why it is not on by itself.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

from . import MEMORY
from .exceptions import Dropped
from .probes import Probes

# The start of the names of snapshots.
NAME = "memory"
# Entries of the history that are kept, the newest ones.
ENTRIES = 20_000


class Allocations:
    """Of this process."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._folder = os.environ.get(MEMORY, "")
        self._recording = False

    def begin(self, probes: Probes) -> None:
        """Record from the moment on at which the script uses CUDA."""

        def initialised(_probe: Any, zero: int) -> int:
            with Dropped():
                self._record()
            return zero

        if self._folder:
            probes.put(self._torch.cuda._lazy_init, None, initialised, False)

    def failed(self, error: Any) -> None:
        """This error ends the script. Where the GPU's memory ran out, write the snapshot."""
        if not self._recording or not isinstance(error, self._torch.OutOfMemoryError):
            return
        with Dropped():
            body = self._torch.cuda.memory._snapshot()
            rank = os.environ.get("RANK", "")
            place = os.path.join(
                self._folder, f"{NAME}-{rank}.pickle" if rank.isdigit() else f"{NAME}.pickle"
            )
            unfinished = f"{place}.{os.getpid()}.tmp"
            with open(unfinished, "wb") as file:
                pickle.dump(body, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, place)

    def _record(self) -> None:
        if not self._recording and self._torch.cuda.is_initialized():
            self._recording = True
            record(self._torch.cuda.memory)


def record(memory: Any) -> None:
    """Have torch record a Python stack for each allocation. memory: torch.cuda.memory."""
    memory._record_memory_history("all", context="alloc", stacks="python", max_entries=ENTRIES)
