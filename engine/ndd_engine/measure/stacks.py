"""Samples the training thread's stack a few times a second, to show which lines take the time.

A sample holds the interpreter lock for a few microseconds; there is no tracing and no hook. It names the innermost
frame in code that the user can change.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from ndd_engine.record.events import Event, StacksEvent

from .clock import PhaseClock

EVERY_S = 10.0
# The first event comes sooner, so that a slow run is explained early.
FIRST_S = 3.0
TOP = 12
# Fewer samples than this add nothing to those already recorded.
FEW = 20

Place = tuple[str, str, int, str, int]  # phase, file, line, function, own


class StackWatch:
    """Samples one thread `hz` times a second from a daemon thread, and puts a StacksEvent every few seconds.

    thread: its identity. step: returns the optimizer steps done. paused: returns whether to skip samples now.
    loop_file: source file of the training loop; frames outside it are not searched.
    """

    def __init__(
        self,
        thread: int,
        hz: float,
        clock: PhaseClock,
        put: Callable[[Event], None],
        step: Callable[[], int],
        paused: Callable[[], bool],
        loop_file: str = "",
    ) -> None:
        self._thread, self._hz, self._clock, self._put = thread, hz, clock, put
        self._step, self._paused, self._loop_file = step, paused, loop_file
        self._seen: Counter[Place] = Counter()
        self._told = False
        self._own: dict[CodeType, bool] = {}
        self._foreign = _foreign_folders()
        self._product = _product_folders()
        self._workloads = _inside(Path(__file__).parents[1] / "workloads")
        self._here = _cwd()
        self._stopping = threading.Event()
        self._looker: threading.Thread | None = None

    def start(self) -> None:
        """Start sampling; does nothing if hz is 0."""
        if self._hz > 0:
            self._looker = threading.Thread(target=self._work, name="ndd-stacks", daemon=True)
            self._looker.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop, and record the samples since the last event; safe to call twice."""
        self._stopping.set()
        looker, self._looker = self._looker, None
        if looker is not None:
            looker.join(timeout_s)
            if not self._told or self._seen.total() >= FEW:
                self._tell()

    def look(self) -> None:
        """Take one sample. Never raises; a thread that has ended yields nothing."""
        with suppress(Exception):
            frame = sys._current_frames().get(self._thread)
            if frame is not None and not self._paused():
                self._seen[self._place(frame)] += 1

    def _work(self) -> None:
        period = 1 / self._hz
        looks_left = max(round(FIRST_S * self._hz), 1)
        while not self._stopping.wait(period):
            self.look()
            looks_left -= 1
            if looks_left <= 0:
                looks_left = max(round(EVERY_S * self._hz), 1)
                self._tell()

    def _tell(self) -> None:
        seen, self._seen = self._seen, Counter()
        if not seen:
            return
        frames: list[list[Any]] = [
            [phase, self._short(file), line, function, looks, own]
            for (phase, file, line, function, own), looks in seen.most_common(TOP)
        ]
        self._told = True
        with suppress(Exception):
            self._put(StacksEvent(self._step(), seen.total(), frames))

    def _place(self, innermost: FrameType) -> Place:
        phase = self._clock.current
        frame: FrameType | None = innermost
        # Outside the loop are only its callers.
        while frame is not None and (code := frame.f_code).co_filename != self._loop_file:
            own = self._own.get(code)
            if own is None:
                own = self._own[code] = self._is_own(code.co_filename)
            if own:
                return phase, code.co_filename, frame.f_lineno, code.co_qualname, 1
            frame = frame.f_back
        code = innermost.f_code
        return phase, code.co_filename, innermost.f_lineno, code.co_qualname, 0

    def _is_own(self, file: str) -> bool:
        """Whether a file is the user's or a workload's, rather than torch's, Python's or the engine's."""
        if file.startswith("<"):  # generated at run time
            return False
        if file.startswith(self._product):
            return file.startswith(self._workloads)
        return not file.startswith(self._foreign)

    def _short(self, file: str) -> str:
        """The path relative to the working directory if inside it, otherwise its last two parts."""
        inside = file.startswith(self._here)
        return file[len(self._here) :] if inside else "/".join(Path(file).parts[-2:])


def _product_folders() -> tuple[str, ...]:
    """Folders of this product's packages."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in ("ndd_engine", "ndd_console"))
    return tuple(_inside(Path(file).parent) for file in files if file is not None)


def _foreign_folders() -> tuple[str, ...]:
    """Folders of Python and of installed packages."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    folders = {Path(paths[name]) for name in names if name in paths}
    folders |= {Path(torch.__file__).parent, Path(os.__file__).parent}
    # A frame may name the target of a symbolic link.
    folders |= {folder.resolve() for folder in folders}
    # Code generated by torch.compile lies in the named cache folder or in a temporary one.
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(Path(tempfile.gettempdir(), "torchinductor_"))
    return (*sorted(map(_inside, folders)), compiled)


def _inside(folder: Path) -> str:
    """The prefix of every path in the folder."""
    return f"{folder}{os.sep}"


def _cwd() -> str:
    with suppress(OSError):  # the folder was deleted
        return _inside(Path.cwd())
    return os.sep
