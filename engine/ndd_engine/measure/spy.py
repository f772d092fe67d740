"""Reads the Python stack of another process from outside, with py-spy, which neither stops nor changes it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndd_engine.text import printable

# py-spy reads the symbols of the interpreter first.
LIMIT_S = 30.0
# Files of a Python and of installed packages, whichever Python runs the script.
_FOREIGN = re.compile(
    r"^<|/lib(64)?/python\d|/(site|dist)-packages/|/_?ndd_(watch|engine(?!/workloads)|console)/|/bin/[^/.]+$"
)
# A frame as py-spy describes it: filename, line, name.
Frame = dict[str, Any]


class UnreadableError(Exception):
    """Why a process cannot be read, in words."""


def find() -> str | None:
    """The path of py-spy: in the environment of this program, or else on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def threads(spy: str, pid: int, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """The threads of a process, as `py-spy dump --json` describes them. spy: its path. Raises UnreadableError."""
    try:
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False,
        )  # fmt: skip
        if not done.returncode:
            return list(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise UnreadableError(type(error).__name__) from error
    last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    raise UnreadableError(printable(last)[:200])


def of_thread(identity: int) -> list[Frame]:
    """The stack of a thread of this process, the innermost frame first."""
    frame, found = sys._current_frames().get(identity), []
    while frame is not None:
        code = frame.f_code
        found.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return found


def of_process(stack: Sequence[Frame]) -> list[Frame]:
    """The frames of a process itself: a forked one has those of its parent below."""
    begins = [
        place
        for place, frame in enumerate(stack)
        if str(frame["name"]).endswith("_bootstrap") and "multiprocessing/" in str(frame["filename"])
    ]
    return list(stack[: begins[0]] if begins else stack)


def own(frame: Frame) -> bool:
    """Whether a frame is of the user's own code."""
    return not _FOREIGN.search(str(frame["filename"]))


def place_of(stack: Sequence[Frame] | None) -> tuple[str, int, str] | None:
    """File, line and function of the script's own code in a stack, or else of any."""
    if not stack:
        return None
    found = next((frame for frame in stack if own(frame)), stack[0])
    return str(found["filename"]), int(found["line"]), str(found["name"])
