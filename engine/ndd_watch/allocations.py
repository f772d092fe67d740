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

# Out of memory on a GPU where torch does not raise its own OutOfMemoryError, because a library, the driver or the
# compiler allocates. A pattern, in any case of its letters.
OF_GPU = (
    r"\b(?:CUDA|HIP|cuDNN|MIOpen|NCCL|RCCL)\b[^\n]{0,40}\bout of memory|\bfailed to allocate (?:GPU|device) memory"
    r"|\b(?:CU|HIP)[A-Z]+_(?:STATUS_)?ALLOC_FAILED|CUDNN_STATUS_\w*ALLOC(?:ATION)?_FAILED"
    r"|rocblas_status_memory_error|rocsparse_status_memory_error|miopenStatusAllocFailed"
    r"|\b(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)\b|\b(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY\b"
)
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
        if not self._recording:
            return
        with Dropped():
            if not self._of_gpu(error):
                return
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

    def _of_gpu(self, error: Any) -> bool:
        """Whether a GPU's memory ran out. A class of the script is not asked for its text: that would run its code."""
        if isinstance(error, self._torch.OutOfMemoryError):
            return True
        torchs = RuntimeError, getattr(self._torch, "AcceleratorError", RuntimeError)
        text = error.args[0] if type(error) in torchs and error.args else None
        if type(text) is not str:
            return False
        import re  # the script has ended

        return re.search(OF_GPU, text, re.IGNORECASE) is not None

    def _record(self) -> None:
        if not self._recording and self._torch.cuda.is_initialized():
            self._recording = True
            record(self._torch.cuda.memory)


def record(memory: Any) -> None:
    """Have torch record a Python stack for each allocation. memory: torch.cuda.memory."""
    memory._record_memory_history("all", context="alloc", stacks="python", max_entries=ENTRIES)
