"""Which lines of a program allocated GPU memory, from the stacks that torch's memory history records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ndd_engine.text import printable, size

if TYPE_CHECKING:
    pass


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
