"""A side of a trial, seen from the trial: its process started, asked and ended. No torch here."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ndd_engine.record.events import Json
from ndd_engine.text import printable

from .side import SideFacts

# How often a wait looks whether the trial was stopped.
TICK_S = 0.1
# Alike for both sides, so that nothing differs but the change: the order of sets of text, and how glibc's allocator
# treats freed memory: it otherwise gives it back and takes it again, more or less of it as the heap happens to lie.
ALIKE = {
    "PYTHONHASHSEED": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "PYTHONUNBUFFERED": "1",
}
_LOG_LINES = 3

Tick = Callable[[str | None], None]


class SideError(Exception):
    """A side could not go on. kind: "oom", "failed" or "late" (it took longer than it was given)."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class SideProcess:
    """One side. Made, its process imports what it needs; `prepare` it, `train` blocks, `close` it.

    spec: which configuration, see Side. place: the folder that gets a temporary one for everything it writes, removed
    with `close`; None: the system's.
    """

    def __init__(self, spec: Mapping[str, Any], place: Path | None = None) -> None:
        self.spec = spec
        self.facts = SideFacts()
        self._folder = tempfile.TemporaryDirectory(
            prefix=".ndd-trial-", dir=place, ignore_cleanup_errors=True
        )
        self._log = Path(self._folder.name, "log")
        self._rest = b""
        their_source, self._target = os.pipe()
        self._source, their_target = os.pipe()
        module = "ndd_engine.trial.side"
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(their_source), str(their_target), self._folder.name],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(their_source, their_target),
                    env={**os.environ, **ALIKE},
                    # Ctrl-C is for the trial. In a group of its own within the session, stopped workers are woken
                    # and ended by the kernel when the side is killed.
                    process_group=0,
                )
        except OSError:
            for end in (self._source, self._target):
                os.close(end)
            self._folder.cleanup()
            raise
        finally:
            os.close(their_source)
            os.close(their_target)

    def choose(self, tick: Tick) -> str | None:
        """The configuration with its size chosen, as TOML; None where the size is given. Raises SideError."""
        found = self._ask({"do": "choose", **self.spec}, None, tick)["config"]
        return None if found is None else str(found)

    def prepare(self, limit_s: float, tick: Tick) -> None:
        """Up to the first step. Raises SideError."""
        self.facts = SideFacts(**self._ask({"do": "prepare", **self.spec}, limit_s, tick)["ready"])

    def train(
        self,
        steps: int,
        limit_s: float,
        tick: Tick,
        *,
        lead: int = 1,
        until_s: float | None = None,
        least: int = 1,
        within: bool = False,
    ) -> tuple[float, int]:
        """(seconds, steps) of a block; with until_s it may end before `steps`, and not before `least`."""
        command = {"do": "train", "steps": steps, "lead": lead, "until_s": until_s, "least": least}
        answer = self._ask({**command, "within": within}, limit_s, tick)
        return float(answer["seconds"]), int(answer["steps"])

    def learn(self, tick: Tick) -> None:
        """Bring `facts` up to date. Raises SideError."""
        self.facts = SideFacts(**self._ask({"do": "facts"}, 60.0, tick))

    def close(self) -> None:
        """End the process and remove what it wrote; safe to call twice."""
        with contextlib.suppress(OSError):
            os.close(self._target)  # to the process its pipe is closed: it leaves
        self._target = -1
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._source >= 0:
            os.close(self._source)
            self._source = -1
        self._folder.cleanup()

    def _ask(self, command: Json, limit_s: float | None, tick: Tick) -> Json:
        data = json.dumps(command).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._target, data) :]
        except BrokenPipeError:
            pass  # why, its answer or its end will tell
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            answer = self._line(deadline, tick)
            if "stage" in answer:
                tick(str(answer["stage"]))
            elif "error" in answer:
                raise SideError(str(answer["kind"]), str(answer["error"]))
            else:
                return answer

    def _line(self, deadline: float | None, tick: Tick) -> Json:
        while b"\n" not in self._rest:
            if not select.select([self._source], [], [], TICK_S)[0]:
                tick(None)
                if deadline is not None and time.monotonic() > deadline:
                    self._process.kill()
                    raise SideError("late", "it did not answer in time")
                continue
            part = os.read(self._source, 65536)
            if not part:
                raise self._ended()
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        answer: Json = json.loads(line)
        return answer

    def _ended(self) -> SideError:
        """What is known of a process that ended without a word."""
        code = self._process.wait()
        tail = self._tail()
        if code == -9:
            return SideError(
                "oom",
                "its process was killed by signal 9, which is what the kernel does when memory runs out",
            )
        if any(words in tail for words in ("bad_alloc", "Cannot allocate memory", "can't allocate memory")):
            return SideError("oom", f"its process ended when memory ran out: {tail}")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return SideError("failed", f"its process {how}" + (f": {tail}" if tail else ""))

    def _tail(self) -> str:
        try:
            lines = self._log.read_bytes()[-8192:].decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return " | ".join(
            printable(line.strip()) for line in [line for line in lines if line.strip()][-_LOG_LINES:]
        )
