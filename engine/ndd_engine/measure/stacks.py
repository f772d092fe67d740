"""Where in the code the training thread is, by a look at its stack a few times a second.

A look costs the training a few microseconds of the interpreter lock and nothing else: no tracing, no hooks. What
it sees is where time goes, line by line, down to the innermost frame that people can change.
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

import ndd_engine
from ndd_engine.record.events import Event, StacksEvent

from .clock import PhaseClock

EVERY_S = 10.0
# The first one comes sooner: a run that is slow should soon know where.
FIRST_S = 3.0
TOP = 12
# Fewer looks than this say nothing beside those that were told before.
FEW = 20

Place = tuple[str, str, int, str, int]  # phase, file, line, function, own


class StackWatch:
    """Looks at one thread `hz` times a second from a daemon thread, and puts a StacksEvent now and then.

    thread: its identity. step: optimizer steps done. resting: whether what it does now is of no interest (a pause).
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
        self._workloads = _inside(Path(ndd_engine.__file__).parent / "workloads")
        self._here = _cwd()
        self._stopping = threading.Event()
        self._looker: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look; does nothing at 0 looks a second."""
        if self._hz > 0:
            self._looker = threading.Thread(target=self._work, name="ndd-stacks", daemon=True)
            self._looker.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End, and tell what was seen since the last event; safe to call twice."""
        self._stopping.set()
        looker, self._looker = self._looker, None
        if looker is not None:
            looker.join(timeout_s)
            if not self._told or self._seen.total() >= FEW:
                self._tell()

    def look(self) -> None:
        """One look. Never raises: a thread that has ended shows nothing."""
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
        # Below the loop is whoever started it, and that costs no time.
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
        """Whether a file is the user's or a workload's, and not torch's, Python's or the engine's machinery."""
        if file.startswith("<"):  # made by Python at run time
            return False
        if file.startswith(self._product):
            return file.startswith(self._workloads)
        return not file.startswith(self._foreign)

    def _short(self, file: str) -> str:
        """Relative to where the run was started when inside, otherwise its last two parts."""
        if file.startswith(self._here):
            return file[len(self._here) :]
        return "/".join(Path(file).parts[-2:])


def _product_folders() -> tuple[str, ...]:
    """The product's own packages."""
    packages = (ndd_engine, sys.modules.get("ndd_console"))
    files = [package.__file__ for package in packages if package is not None]
    return tuple(_inside(Path(file).parent) for file in files if file is not None)


def _foreign_folders() -> tuple[str, ...]:
    """Where Python and what is installed lies."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    folders = {Path(paths[name]) for name in names if name in paths}
    folders |= {Path(torch.__file__).parent, Path(os.__file__).parent}
    # A frame may name the folder that a link leads to.
    folders |= {folder.resolve() for folder in folders}
    # What torch.compile writes is nobody's own: it lies in the folder that is named, or in a temporary one.
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(Path(tempfile.gettempdir(), "torchinductor_"))
    return (*sorted(map(_inside, folders)), compiled)


def _inside(folder: Path) -> str:
    """What the name of every file in the folder begins with."""
    return f"{folder}{os.sep}"


def _cwd() -> str:
    try:
        return _inside(Path.cwd())
    except OSError:  # it was deleted
        return os.sep
