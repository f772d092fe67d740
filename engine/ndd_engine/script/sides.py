"""The sides of a trial of a script: processes of its command that train in runs, when they are told to."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ndd_engine.child import ChildError, Tick
from ndd_engine.trial.process import SHARED_ENVIRONMENT, SideProcess
from ndd_engine.trial.request import Base
from ndd_engine.trial.side import SideFacts
from ndd_engine.trial.sides import Sides, failures_of
from ndd_watch import SITE

from .command import Command, environment
from .contained import OFFLINE, copy
from .launch import becoming
from .starting import Start

POLL_S = 0.1
_GUARD = str(Path(__file__).with_name("guard.py"))
# Observing is the same on both sides: every step is timed by phase, and none is profiled.
PLAIN = {"NDD_WATCH_SHARE": "0", "NDD_WATCH_PROFILE_S": "0"}


class ScriptProcess(SideProcess):
    """A process of the command in a scratch copy of its folder. sides: the changes of each side that it can be.

    outside: whether it may write outside that copy.
    """

    def __init__(
        self,
        command: Command,
        sides: Sequence[Mapping[str, Any]],
        extra: Mapping[str, str],
        but: Path,
        outside: bool,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix=".ndd-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self._log, self._rest = self.folder / "log", b""
        self._source = self._target = -1
        self.facts = SideFacts()
        self.both = [self.facts]
        address = str(self.folder / "s")
        try:
            work = self.folder / "work"
            work.mkdir()
            (self.folder / "ranks").mkdir()
            copy(command.folder, work, but)
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(address)
            self._listener.listen(1)
            spec = {
                "socket": address, "sides": [dict(side) for side in sides], "original": str(command.folder),
                "outside": outside,
            }  # fmt: skip
            made = environment(
                self.folder / "ranks", SITE, {**os.environ, **SHARED_ENVIRONMENT, **OFFLINE, **extra}
            )
            guard = [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), str(self.folder)]
            guarded = [*guard, *becoming(command.words, 0)]
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    guarded, cwd=work, env={**made, **PLAIN, "NDD_WATCH_TRY": json.dumps(spec)},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
                )  # fmt: skip
        except OSError as error:
            self._temporary.cleanup()
            raise ChildError("failed", f"its process cannot be started: {error.strerror}") from None
        except BaseException:
            self._temporary.cleanup()
            raise

    def prepare(self, limit_s: float, tick: Tick) -> None:
        """Wait until it trains, and for its first steps."""
        deadline = time.monotonic() + limit_s
        self._listener.settimeout(POLL_S)
        tick("waiting for the first step")
        while self._source < 0:
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                self._source = self._target = connection.detach()
                continue
            tick(None)
            if self._process.poll() is not None:
                raise self._cause_of_exit()
            if time.monotonic() > deadline:
                self._kill()
                raise ChildError("late", "it did not begin to train within the time limit")
        tick("warming up")
        self._know(self._line(deadline, tick)["ready"])

    def choose(self, tick: Tick) -> str:
        """Not for a script."""
        raise NotImplementedError

    def close(self) -> None:
        """End the process with everything that it started, and remove what it wrote; safe to call twice."""
        self._listener.close()
        if self._source >= 0:
            os.close(self._source)  # it exits when its connection closes
            self._source = self._target = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._kill()
        self._temporary.cleanup()

    def _kill(self) -> None:
        """The guard ends the whole group of the command."""
        self._process.terminate()
        self._process.wait()


class ScriptSides(Sides):
    """The processes of both sides.

    command: of the script; kept: changes of both; start, changes: of the candidate. outside: whether they may write
    outside their folders.
    """

    def __init__(
        self,
        command: Command,
        start: Start,
        kept: Mapping[str, Any],
        changes: Mapping[str, Any],
        outside: bool,
        base: Base,
        sets: Sequence[str],
        budget_s: float,
        left_s: Callable[[], float],
        tick: Callable[[str], Tick],
    ) -> None:
        super().__init__(base, sets, [*changes, *start.changed], budget_s, left_s, tick)
        self._command, self._start = command, start
        self._changes: tuple[Mapping[str, Any], ...] = (kept, {**kept, **changes})
        self._outside = outside
        # First losses of the script as it is, of its first process.
        self._usual: list[float] | None = None
        self._but = base.run.path.parent if base.run is not None else Path(os.devnull)

    def open(self, *indices: int) -> None:
        """Start processes."""
        for index in indices:
            command = self._start.command if index else self._command
            more = {**self._environment(index), **(self._start.environment if index else {})}
            with failures_of(index):
                self._open[index] = ScriptProcess(
                    command, [self._changes[index]], more, self._but, self._outside
                )

    def prepare(self, index: int) -> float:
        """As for other sides. Losses that differ between two starts of the unchanged script say nothing."""
        found = super().prepare(index)
        if not index:
            losses = list(self._open[index].facts.losses)
            if self._usual is None:
                self._usual = losses
            elif losses != self._usual:
                for facts in self.facts:
                    facts.losses = []
                self.note = "two starts of the unchanged script differ in their losses (is it seeded?)"
        return found

    def _both(self) -> SideProcess:
        """Start a process that changes between the sides."""
        return ScriptProcess(self._command, self._changes, self._environment(0), self._but, self._outside)
