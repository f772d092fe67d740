"""Memory: which errors mean that it ran out, which lines allocate it, and what a process keeps.

Lines that allocate GPU memory come from the stacks of torch's memory history; a snapshot is written when the memory
runs out. A look at what a process keeps is an event of the record, with the lines of the source where it grows.
"""

from __future__ import annotations

import errno
import pickle
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndd_engine.errors import text_of
from ndd_engine.files import replacing
from ndd_engine.record.events import Holder, HoldersEvent
from ndd_engine.text import printable, size
from ndd_watch.holders import OF_GPU, OF_HOST, record
from ndd_watch.looks import user_file

from .source import growing_line

if TYPE_CHECKING:
    import torch

_OF_GPU = re.compile(OF_GPU, re.IGNORECASE)
# Of the host: torch's allocator and the system.
_OF_HOST = re.compile(OF_HOST, re.IGNORECASE)


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


Frames = object  # as in a snapshot: a list of dicts, innermost frame first, if it is not damaged


# Python, installed packages and a torch built from source, on any machine.
_FOREIGN = re.compile(
    r"(^|/)(site-packages|dist-packages)/|/lib(64)?/python\d|^<frozen |"
    r"/torch/(_\w+|amp|autograd|cuda|distributed|func|fx|library|nn|optim|profiler|utils)[/.]|torchinductor_"
)


# This product's packages, except the workloads.
_PRODUCT = re.compile(r"(^|/)_?ndd_(engine/(?!workloads/)|watch/|console/|profiles/)")


_NOTEBOOK = re.compile(r"/ipykernel_\d+/|^<ipython-input|^Cell ")


_BACKWARD = re.compile(r"torch::autograd::(Engine|python::PythonEngine)")


LONGEST = 400  # characters of a path and of a function


TOP = 3  # owners that a message names
# From this part of the memory on, a message says how much has no recorded line.
UNKNOWN = 0.1


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
    """The largest owners that have a line, in words: "9.1 GiB model.py:31 forward, 3.2 GiB ..."; "" without one.

    What has no line comes first where it is a large part, since the lines then explain little.
    """
    every = owners(live)
    named = [one for one in every if one.place not in (NO_STACK, NO_PYTHON)]
    if not named:
        return ""
    total = sum(one.requested_bytes for one in every)
    rest = total - sum(one.requested_bytes for one in named)
    texts = [f"{size(rest)} of {size(total)} without a recorded line"] if rest >= UNKNOWN * total else []
    return ", ".join([*texts, *(f"{size(one.requested_bytes)} {one.place}" for one in named[:TOP])])


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


# Files beside those that are known to belong to the training, in which a line is searched.
MOST_FILES = 40


def placed(event: HoldersEvent, files: Iterable[str]) -> HoldersEvent:
    """The event with the lines where its holders grow. files: of the user's own code, as far as they are known."""
    known = list(dict.fromkeys(file for file in files if file))
    return replace(event, holders=[_placed(one, known) for one in event.holders])


def holders_event(found: dict[str, Any], files: Iterable[str]) -> HoldersEvent:
    """The event of a look, see `ndd_watch.holders`."""
    return placed(HoldersEvent(**{**found, "holders": [Holder(**one) for one in found["holders"]]}), files)


def _placed(holder: Holder, files: list[str]) -> Holder:
    if holder.kind == "cache":
        return replace(holder, at=(holder.file, holder.line))
    if not holder.name:
        return holder
    attribute = holder.kind in ("attribute", "class")
    own = [holder.file] if holder.file and user_file(holder.file) else []
    # The function that a variable belongs to is the place to look first.
    if own and holder.line and (line := growing_line(holder.file, holder.name, attribute, holder.line)):
        return replace(holder, at=(holder.file, line))
    for file in dict.fromkeys([*own, *files, *_beside(files)]):
        if line := growing_line(file, holder.name, attribute):
            return replace(holder, at=(file, line))
    return holder


def _beside(files: list[str]) -> list[str]:
    """Other files in the folders of these."""
    folders = dict.fromkeys(Path(file).parent for file in files)
    try:
        return [str(path) for folder in folders for path in sorted(folder.glob("*.py"))][:MOST_FILES]
    except OSError:
        return []
