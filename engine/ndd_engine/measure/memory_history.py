"""Which lines allocate GPU memory, from torch's memory history; a memory snapshot when it runs out."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndd_engine.files import replacing
from ndd_engine.text import printable
from ndd_watch.allocations import record

from .memory import is_out_of_gpu_memory
from .memory_owners import largest

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
    if _folder is None or not is_out_of_gpu_memory(error):
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
