"""Which lines allocate GPU memory, from torch's memory history; a memory snapshot when it runs out."""

from __future__ import annotations

import errno
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ndd_engine.errors import text_of
from ndd_engine.files import replacing
from ndd_engine.text import printable, size
from ndd_watch.allocations import record

if TYPE_CHECKING:
    import torch


FILE = "memory.pickle"
# Steps after which the recording ends, unless it is to last.
FIRST_STEPS = 3

_folder: Path | None = None
_lasting = False
_recording = False


def start(device: torch.device, mode: str, folder: Path) -> None:
    """Start recording on a GPU. mode: "start" (the first steps), "always" or "off". folder: for the snapshot."""
    global _folder, _lasting
    if device.type != "cuda" or mode == "off":
        return
    _folder, _lasting = folder, mode == "always"
    _begin()


@contextmanager
def paused() -> Iterator[None]:
    """Record nothing in the body, which is measured: a stack for each allocation would slow it down."""
    was = _recording
    if was:
        _end()
    try:
        yield
    finally:
        if was:
            _begin()


def settle(steps: int) -> None:
    """End the recording after the first steps, unless it is to last. Memory in use keeps its stacks."""
    if _recording and not _lasting and steps >= FIRST_STEPS:
        _end()


def stop() -> None:
    """Stop recording, and write no snapshot from now on; safe to call twice."""
    global _folder
    _folder = None
    if _recording:
        _end()


def out_of_memory(error: BaseException) -> str:
    """Write the snapshot of an out-of-memory error on a GPU: its largest owners and its name, or "".

    Call it while the error is handled, because then the memory of the failed step is still in use.
    """
    if _folder is None or not _on_gpu(error):
        return ""
    parts: list[str] = []
    with suppress(Exception):
        body = _memory()._snapshot()
        if named := largest(_live(body)):
            parts.append(f"largest owners: {named}")
        path = _folder / FILE
        with replacing(path) as file:
            pickle.dump(body, file)
        parts.append(f"explain with: ndd-console memory {printable(str(path))}")
        if not _recording:
            parts.append("to record the lines of every step: --set log.memory_history=always")
    return "; ".join(parts)


def _on_gpu(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or any(
        name in str(error) for name in ("CUDA", "CUBLAS", "HIP")
    )


def _live(body: dict[str, Any]) -> list[tuple[Any, int]]:
    """(stack, requested bytes) of each block in use."""
    blocks = [block for segment in body["segments"] for block in segment["blocks"]]
    return [
        (block.get("frames"), int(block.get("requested_size", block["size"])))
        for block in blocks
        if block["state"] != "inactive"
    ]


def _begin() -> None:
    global _recording
    with suppress(Exception):
        record(_memory())
        _recording = True


def _end() -> None:
    global _recording
    _recording = False
    with suppress(Exception):
        _memory()._record_memory_history(None)


def _memory() -> Any:
    import torch

    return torch.cuda.memory


Frames = object  # as in a snapshot: a list of dicts, innermost frame first, if it is not damaged

# Python, installed packages and a torch built from source, on any machine.
_FOREIGN = re.compile(
    r"(^|/)(site-packages|dist-packages)/|/lib(64)?/python\d|^<frozen |"
    r"/torch/(_\w+|amp|autograd|cuda|distributed|func|fx|library|nn|optim|profiler|utils)[/.]|torchinductor_"
)
# This product's packages, except the workloads.
_PRODUCT = re.compile(r"(^|/)ndd_(engine/(?!workloads/)|console/|profiles/)")
_NOTEBOOK = re.compile(r"/ipykernel_\d+/|^<ipython-input|^Cell ")
_BACKWARD = re.compile(r"torch::autograd::(Engine|python::PythonEngine)")

LONGEST = 400  # characters of a path and of a function
TOP = 3  # owners that a message names

NO_STACK = "no Python stack (backward pass, or not recorded)"
BACKWARD = "backward pass (autograd, no Python frame)"
NO_PYTHON = "no Python frame"


@dataclass(frozen=True)
class Owner:
    """A line with the memory that it allocated. place: "file:line function", or why there is none. count: blocks."""

    place: str
    requested_bytes: int
    count: int


def owners(live: Iterable[tuple[Frames, int]]) -> tuple[Owner, ...]:
    """The owners of memory in use, as (stack, requested bytes), largest first."""
    known: dict[int, str] = {}
    found: dict[str, list[int]] = {}
    for frames, requested in live:
        identity = id(frames)  # equal stacks are often one object
        if identity not in known:
            known[identity] = place(frames)
        total = found.setdefault(known[identity], [0, 0])
        total[0] += requested
        total[1] += 1
    named = (Owner(name, requested, count) for name, (requested, count) in found.items())
    return tuple(sorted(named, key=lambda owner: (-owner.requested_bytes, owner.place)))


def largest(live: Iterable[tuple[Frames, int]]) -> str:
    """The largest owners that have a line, in words: "9.1 GB model.py:31 forward, 3.2 GB ..."; "" without one."""
    named = [one for one in owners(live) if one.place not in (NO_STACK, NO_PYTHON)]
    return ", ".join(f"{size(one.requested_bytes)} {one.place}" for one in named[:TOP])


def place(frames: Frames) -> str:
    """The innermost line of the user's own code in a stack (innermost frame first), or why there is none.

    Without one, the innermost line of this product's training loop, then of any Python code.
    """
    if not isinstance(frames, (list, tuple)) or not frames:
        return NO_STACK
    product = library = ""
    backward = False
    for frame in frames:
        if not isinstance(frame, dict):
            continue
        file, name, line = frame.get("filename"), frame.get("name"), frame.get("line")
        if not isinstance(file, str) or not isinstance(name, str) or not isinstance(line, int):
            continue
        plain = file[-LONGEST:].replace("\\", "/")
        if not plain.endswith(".py") and not _NOTEBOOK.search(plain):
            backward = backward or bool(_BACKWARD.search(name))
            continue
        text = f"{shortened(plain)}:{line % 10**9} {name[:LONGEST]}"
        if _PRODUCT.search(plain):
            product = product or text
        elif _FOREIGN.search(plain) or plain.startswith("<"):
            library = library or text
        else:
            return printable(text)
    return printable(product or library) or (BACKWARD if backward else NO_PYTHON)


def shortened(path: str) -> str:
    """The last two parts of a path."""
    return "/".join(path.split("/")[-2:])


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
