"""Which errors mean that memory ran out."""

from __future__ import annotations

import errno
import re
import sys

from ndd_engine.errors import text_of
from ndd_watch.allocations import OF_GPU

_OF_GPU = re.compile(OF_GPU, re.IGNORECASE)
# Of the host: torch's allocator and the system.
_OF_HOST = re.compile(
    r"can't allocate memory|not enough memory|DefaultCPUAllocator|Cannot allocate memory", re.IGNORECASE
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error means that an allocation failed, on a GPU or on the host."""
    if isinstance(error, MemoryError) or _is_of_torch(error):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    return is_out_of_gpu_memory(error) or bool(_OF_HOST.search(text_of(error)))


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Whether it was the memory of a GPU, also where a library such as cuDNN, MIOpen, rocBLAS or cuFFT asked for it."""
    return _is_of_torch(error) or (
        isinstance(error, RuntimeError) and _OF_GPU.search(text_of(error)) is not None
    )


def _is_of_torch(error: BaseException | None) -> bool:
    """Also in a process that has not imported torch, such as the console of a script."""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())
    return isinstance(error, kind)
