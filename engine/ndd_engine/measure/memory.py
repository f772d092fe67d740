"""Which errors mean that memory ran out."""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

import torch

from ndd_engine.errors import text_of

if TYPE_CHECKING:
    import torch


# Of the host: torch's allocator and the system. Of a GPU: where torch does not raise its own OutOfMemoryError, because
# a library, the driver or the compiler allocates.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|DefaultCPUAllocator|Cannot allocate memory"
    r"|\b(?:CUDA|HIP|cuDNN|MIOpen|NCCL|RCCL)\b[^\n]{0,40}\bout of memory|\bfailed to allocate (?:GPU|device) memory"
    r"|\b(?:CU|HIP)[A-Z]+_(?:STATUS_)?ALLOC_FAILED|CUDNN_STATUS_\w*ALLOC(?:ATION)?_FAILED"
    r"|rocblas_status_memory_error|rocsparse_status_memory_error|miopenStatusAllocFailed"
    r"|\b(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)\b|\b(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY\b",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error means that an allocation failed, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(text_of(error)))
