"""A process of our own that is asked over a pipe, a JSON object a line: both ends of it. No torch here.

What is tried in it can neither disturb nor end what asks: memory that runs out, a crash, settings for a whole process.
When the pipe closes, however the other end died, the process leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ndd_engine.text import printable

Json = dict[str, Any]
# Called often while an answer is waited for, with what is being done where that is news, else None. May raise.
Tick = Callable[[str | None], None]

# How often a wait calls its tick.
TICK_S = 0.1
LEAVES_S = 5.0
_LOG_LINES = 3


class ChildError(Exception):
    """The process could not go on. kind: "oom", "failed" or "late" (it took longer than it was given). status: the exit
    status that the error stands for, as in `errors`; None where it is not one of ours."""

    def __init__(self, kind: str, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.status = status


class ChildProcess:
    """The process, seen from outside. Made, it imports what it needs; `ask` it, `close` it.

    module: run with the numbers of the pipe's two ends and the folder for everything it writes, which `close` removes.
    place: where that folder is made; None: the system's. environment: what is added to ours. Raises OSError.
    """

    def __init__(
        self, module: str, place: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=".ndd-", dir=place, ignore_cleanup_errors=True)
        self._log = Path(self._folder.name, "log")
        self._rest = b""
        their_source, self._target = os.pipe()
        self._source, their_target = os.pipe()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(their_source), str(their_target), self._folder.name],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(their_source, their_target),
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                    # Ctrl-C is for us. In a group of its own within the session, what it has stopped is woken and
                    # ended by the kernel when it is killed.
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

    def ask(self, command: Json, limit_s: float | None, tick: Tick) -> Json:
        """The answer to a command, within `limit_s` seconds. Raises ChildError, and what `tick` raises."""
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
                raise ChildError(str(answer["kind"]), str(answer["error"]), answer.get("status"))
            else:
                return answer

    @property
    def ended(self) -> bool:
        """Whether there is nobody left to ask."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process and remove what it wrote; safe to call twice."""
        with contextlib.suppress(OSError):
            os.close(self._target)  # to the process its pipe is closed: it leaves
        self._target = -1
        try:
            self._process.wait(LEAVES_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._source >= 0:
            os.close(self._source)
            self._source = -1
        self._folder.cleanup()

    def _line(self, deadline: float | None, tick: Tick) -> Json:
        while b"\n" not in self._rest:
            if not select.select([self._source], [], [], TICK_S)[0]:
                tick(None)
                if deadline is not None and time.monotonic() > deadline:
                    self._process.kill()
                    self._process.wait()
                    raise ChildError("late", "it did not answer in time")
                continue
            part = os.read(self._source, 65536)
            if not part:
                raise self._ended()
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        answer: Json = json.loads(line)
        return answer

    def _ended(self) -> ChildError:
        """What is known of a process that ended without a word."""
        code = self._process.wait()
        tail = self._tail()
        if code == -9:
            return ChildError(
                "oom",
                "its process was killed by signal 9, which is what the kernel does when memory runs out",
            )
        if any(words in tail for words in ("bad_alloc", "Cannot allocate memory", "can't allocate memory")):
            return ChildError("oom", f"its process ended when memory ran out: {tail}")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return ChildError("failed", f"its process {how}" + (f": {tail}" if tail else ""))

    def _tail(self) -> str:
        try:
            lines = self._log.read_bytes()[-8192:].decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return " | ".join(
            printable(line.strip()) for line in [line for line in lines if line.strip()][-_LOG_LINES:]
        )


class Pipe:
    """The process's own end; any thread may send."""

    def __init__(self, source: int, target: int) -> None:
        # Neither the loader's workers nor their server may hold an end open.
        os.set_inheritable(source, False)
        os.set_inheritable(target, False)
        self._source, self._target = source, target
        self._rest = b""
        self._lock = threading.Lock()

    def receive(self) -> Json:
        """The next command; sleeps until it comes. Raises EOFError when the other end is closed."""
        while b"\n" not in self._rest:
            part = os.read(self._source, 65536)
            if not part:
                raise EOFError
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        command: Json = json.loads(line)
        return command

    def send(self, body: Json) -> None:
        """Answer. Raises OSError when nobody listens."""
        data = json.dumps(body).encode() + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._target, data) :]

    def tell(self, text: str) -> None:
        """What is being done, for people."""
        with contextlib.suppress(OSError):
            self.send({"stage": text})

    def leave_when_closed(self, leave: Callable[[], object]) -> None:
        """From now on `leave` is called, on a thread of its own, once the other end is closed."""

        def wait() -> None:
            poll = select.poll()
            poll.register(self._source, 0)  # nothing but a hang-up
            while not poll.poll():
                continue
            leave()

        threading.Thread(target=wait, name="ndd-leave", daemon=True).start()


def first_to_go() -> None:
    """If memory runs out, the kernel should take this process and not the one that asks."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
