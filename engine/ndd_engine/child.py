"""Child processes that answer commands over a pipe, one JSON object per line: both ends of it. Does not import torch.

Out-of-memory errors, crashes and process-wide settings in a child do not affect the parent. A child exits when its pipe
closes, however the parent ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

from pydantic import TypeAdapter

from ndd_engine.config import Draft, read
from ndd_engine.errors import NddError
from ndd_engine.text import printable

Json = dict[str, Any]
T = TypeVar("T")
# Called every TICK_S while the parent waits for an answer, with the child's current stage if it is new, else None.
Tick = Callable[[str | None], None]

TICK_S = 0.1
EXIT_S = 5.0
_LOG_LINES = 3


def spec_of(
    config: Path | None, workload: str | None, sets: Sequence[str], overrides: Json | None = None
) -> Json:
    """The arguments of `config.read` as part of a command."""
    path = None if config is None else str(config.absolute())
    return {"config": path, "workload": workload, "sets": list(sets), "overrides": overrides}


def draft_of(spec: Json, more: Sequence[str] = ()) -> Draft:
    """The draft that a command asks for. more: further settings. Raises ConfigError."""
    path = spec["config"]
    return read(Path(path) if path else None, [*spec["sets"], *more], spec["workload"], spec["overrides"])


def decoded(kind: type[T], body: Json) -> T:
    """A dataclass from its `asdict` after a way through JSON; the reverse for nested ones and tuples too."""
    return TypeAdapter(kind).validate_python(body)


class ChildError(Exception):
    """The child cannot continue.

    kind: "oom", "failed" or "late" (no answer within the time limit). status: exit status of the error as in `errors`,
    or None.
    """

    def __init__(self, kind: str, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.status = status


class StoppedError(NddError):
    """The stop event is set."""


def ticker(stage: str, tell: Callable[[str], None], stop: threading.Event | None) -> Tick:
    """A tick that reports `stage`, followed by the child's own stage. Raises StoppedError once `stop` is set."""
    words = stage

    def tick(text: str | None) -> None:
        nonlocal words
        if stop is not None and stop.is_set():
            raise StoppedError("stopped")
        if text is not None:
            words = f"{stage}: {text}"
        tell(words)

    return tick


# The parent's end.


class ChildProcess:
    """A running child. `ask` it, then `close` it, or use it as a context manager.

    module: run with the two pipe descriptors and the folder for everything it writes, which `close` removes.
    place: where that folder is created; None: the system's temporary folder. environment: added to the parent's.
    Raises ChildError if the process cannot be started.
    """

    def __init__(
        self, module: str, place: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix=".ndd-", dir=place, ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self._log = self.folder / "log"
        self._rest = b""
        their_source, self._target = os.pipe()
        self._source, their_target = os.pipe()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(their_source), str(their_target), str(self.folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(their_source, their_target),
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                    # Ctrl-C is for the parent. With a process group of its own, the kernel wakes and ends the stopped
                    # members of the group when the child is killed.
                    process_group=0,
                )
        except OSError as error:
            for end in (self._source, self._target):
                os.close(end)
            self._temporary.cleanup()
            raise ChildError("failed", f"its process cannot be started: {error.strerror}") from None
        finally:
            os.close(their_source)
            os.close(their_target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, command: Json, limit_s: float | None, tick: Tick) -> Json:
        """The answer to a command. Raises ChildError, also after `limit_s` seconds, and what `tick` raises."""
        data = json.dumps(command).encode() + b"\n"
        # After a broken pipe, reading shows why the child ended.
        with contextlib.suppress(BrokenPipeError):
            _write(self._target, data)
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
        """Whether the process has exited."""
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def hang_up(self) -> None:
        """Close the pipe, so that the process exits; does not wait for it."""
        with contextlib.suppress(OSError):
            os.close(self._target)
        self._target = -1

    def close(self) -> None:
        """End the process and remove what it wrote; safe to call twice."""
        self.hang_up()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._kill()
        if self._source >= 0:
            os.close(self._source)
            self._source = -1
        self._temporary.cleanup()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self, deadline: float | None, tick: Tick) -> Json:
        while b"\n" not in self._rest:
            if not select.select([self._source], [], [], TICK_S)[0]:
                tick(None)
                if deadline is not None and time.monotonic() > deadline:
                    self._kill()
                    raise ChildError("late", "no answer within the time limit")
                continue
            part = os.read(self._source, 65536)
            if not part:
                raise self._cause_of_exit()
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        answer: Json = json.loads(line)
        return answer

    def _cause_of_exit(self) -> ChildError:
        """What is known about a process that exited without an answer."""
        code = self._process.wait()
        tail = self._tail()
        if code == -9:
            return ChildError("oom", "its process was killed by signal 9, usually by the kernel's OOM killer")
        if any(words in tail for words in ("bad_alloc", "Cannot allocate memory", "can't allocate memory")):
            return ChildError("oom", f"its process ran out of memory: {tail}")
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        return ChildError("failed", f"its process {how}" + (f": {tail}" if tail else ""))

    def _tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self._log.read_bytes()[-8192:].decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        found = [printable(line.strip()) for line in lines if line.strip()]
        return " | ".join(found[-_LOG_LINES:])


# The child's end.


class Pipe:
    """The child's end of the pipe; `send` is thread-safe."""

    def __init__(self, source: int, target: int) -> None:
        # Loader workers and their server must not inherit the descriptors.
        os.set_inheritable(source, False)
        os.set_inheritable(target, False)
        self._source, self._target = os.fdopen(source, "rb"), target
        self._lock = threading.Lock()

    def receive(self) -> Json:
        """Block until the next command. Raises EOFError when the parent has closed the pipe."""
        line = self._source.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        command: Json = json.loads(line)
        return command

    def send(self, body: Json) -> None:
        """Send an answer. Raises OSError when the parent is gone."""
        data = json.dumps(body).encode() + b"\n"
        with self._lock:
            _write(self._target, data)

    def tell(self, text: str) -> None:
        """Report the current stage."""
        with contextlib.suppress(OSError):
            self.send({"stage": text})

    def leave_when_closed(self, leave: Callable[[], object]) -> None:
        """Call `leave` on a thread of its own once the parent's end closes."""

        def wait() -> None:
            poll = select.poll()
            poll.register(self._source, 0)  # reports hang-ups only
            while not poll.poll():
                continue
            leave()

        threading.Thread(target=wait, name="ndd-leave", daemon=True).start()


class ChildServer:
    """The process itself: answers commands one at a time, and exits once the pipe closes.

    commands: by their "do", what answers them; None sends no answer. keeps_serving: whether it stays after an error.
    one_line: whether to shorten the message of an NddError to its first line.
    """

    commands: Mapping[str, Callable[[Json], Json | None]]
    keeps_serving = True
    one_line = False

    def __init__(self, pipe: Pipe, folder: Path) -> None:
        self.pipe, self.folder = pipe, folder

    @classmethod
    def main(cls, arguments: Sequence[str]) -> NoReturn:
        """Run the process. arguments: the two pipe descriptors, and the folder for everything it writes."""
        _prefer_as_oom_victim()
        server = cls(Pipe(int(arguments[0]), int(arguments[1])), Path(arguments[2]))
        server.pipe.leave_when_closed(server.leave)
        with contextlib.suppress(EOFError):
            server.serve()
        server.leave()

    def serve(self) -> None:
        """Answer commands. Raises EOFError when the pipe closes."""
        while True:
            command = self.pipe.receive()
            try:
                answer = self.commands[command["do"]](command)
            except BaseException as error:  # noqa: BLE001  reports every failure, sys.exit in a dataset included
                traceback.print_exc()
                answer = self._error(error)
            with contextlib.suppress(OSError):
                if answer is not None:
                    self.pipe.send(answer)
            if answer is not None and "error" in answer and not self.keeps_serving:
                return

    def _error(self, error: BaseException) -> Json:
        if isinstance(error, ChildError):
            return {"error": str(error), "kind": error.kind, "status": error.status}
        from ndd_engine.train.failures import told

        kind, text = told(error)
        if not isinstance(error, NddError):
            return {"error": text, "kind": kind}
        return {"error": text if self.one_line else str(error), "kind": kind, "status": error.exit_status}

    def leave(self) -> NoReturn:
        """Remove what the process wrote and exit at once; if the parent was killed, nobody else would."""
        with contextlib.suppress(Exception):
            self.clean_up()
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)

    def clean_up(self) -> None:
        """Called before the folder is removed."""


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def _prefer_as_oom_victim() -> None:
    """If memory runs out, the kernel should kill this process rather than its parent."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
