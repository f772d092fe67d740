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
from dataclasses import fields
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
# Seconds after the first failure among several processes in which another one may tell that it was the cause.
ARRIVAL_S = 1.0
# Errors of a process whose partner is gone: of gloo, and of NCCL.
PARTNER_GONE = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "remote process exited",
    "connection refused",
)
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
    """A dataclass after a way through JSON, with nested ones and tuples."""
    return TypeAdapter(kind).validate_python(body)


def _values(one: Any) -> Json:
    """The fields of a dataclass. `asdict` would copy each entry of long traces."""
    return {field.name: getattr(one, field.name) for field in fields(one)}


class ChildError(Exception):
    """The child cannot continue.

    kind: "oom", "failed", "late" (no answer within the time limit) or "ended" (a script ended).
    status: exit status of the error as in `errors`, or None.
    """

    def __init__(self, kind: str, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.status = status

    @property
    def follows(self) -> bool:
        """Whether it is the consequence of another process's end."""
        return any(words in str(self).lower() for words in PARTNER_GONE)


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


class Wire:
    """A connection to a child. lost: makes the error once the child has closed its end."""

    def __init__(self, source: int, target: int, lost: Callable[[], ChildError]) -> None:
        self._source, self._target, self._lost = source, target, lost
        self._rest = b""

    def fileno(self) -> int:
        """For select."""
        return self._source

    def send(self, command: Json) -> None:
        """Send a command."""
        # After an error, reading shows why the child ended.
        with contextlib.suppress(OSError):
            _write(self._target, json.dumps(command).encode() + b"\n")

    def read(self) -> list[Json]:
        """The lines that have arrived; waits for at least a part of one. Raises ChildError at the end."""
        part = b""
        with contextlib.suppress(ConnectionResetError):
            part = os.read(self._source, 65536)
        if not part:
            raise self._lost()
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [json.loads(line) for line in lines]

    def hang_up(self) -> None:
        """Close the child's input."""
        if self._target >= 0:
            os.close(self._target)
        self._target = -1

    def close(self) -> None:
        """Close it; safe to call twice."""
        self.hang_up()
        if self._source >= 0:
            os.close(self._source)
        self._source = -1


def answers(wires: Sequence[Wire], limit_s: float | None, tick: Tick) -> list[Json]:
    """One answer from each child, which work together. The first one reports its stages.

    Raises ChildError of the one that failed first, without waiting for the others, which may hang without it; "late"
    after `limit_s` seconds; and what `tick` raises.
    """
    begin = time.monotonic()
    found: dict[int, Json] = {}
    failed: dict[int, ChildError] = {}
    failed_at = begin
    while len(found) + len(failed) < len(wires):
        waiting = [place for place in range(len(wires)) if place not in found and place not in failed]
        ready = select.select([wires[place] for place in waiting], [], [], TICK_S)[0]
        now = time.monotonic()
        if failed and now > failed_at + ARRIVAL_S:
            break
        if not ready:
            tick(None)
            if limit_s is not None and now > begin + limit_s:
                raise ChildError("late", "no answer within the time limit")
        for place in waiting:
            if wires[place] not in ready:
                continue
            try:
                for line in wires[place].read():
                    if "error" in line:
                        raise ChildError(str(line["kind"]), str(line["error"]), line.get("status"))
                    if "stage" not in line:
                        found[place] = line
                    elif not place:
                        tick(str(line["stage"]))
            except ChildError as failure:
                failed_at = failed_at if failed else now
                failed[place] = failure
    if failed:
        place, error = next(
            (item for item in failed.items() if not item[1].follows), next(iter(failed.items()))
        )
        raise ChildError(error.kind, f"rank {place}: {error}" if place else str(error), error.status)
    return [found[place] for place in range(len(wires))]


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
        their_source, target = os.pipe()
        source, their_target = os.pipe()
        self.wire = Wire(source, target, lambda: cause_of_exit(self._process, self._log))
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
            self.wire.close()
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
        self.wire.send(command)
        try:
            return answers([self.wire], limit_s, tick)[0]
        except ChildError as error:
            if error.kind == "late":
                self._kill()
            raise

    @property
    def ended(self) -> bool:
        """Whether the process has exited."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process and remove what it wrote; safe to call twice."""
        self.wire.hang_up()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self.wire.close()
        self._temporary.cleanup()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()


def cause_of_exit(process: subprocess.Popen[bytes], log: Path) -> ChildError:
    """What is known about a process that ends without an answer."""
    code = process.wait()
    tail = tail_of(log)
    if code == -9:
        return ChildError("oom", "its process was killed by signal 9, usually by the kernel's OOM killer")
    if any(words in tail for words in ("bad_alloc", "Cannot allocate memory", "can't allocate memory")):
        return ChildError("oom", f"its process ran out of memory: {tail}")
    how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
    return ChildError("failed", f"its process {how}" + (f": {tail}" if tail else ""))


def tail_of(log: Path) -> str:
    """The last lines of a log."""
    try:
        lines = log.read_bytes()[-8192:].decode("utf-8", "replace").splitlines()
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
        data = json.dumps(body, default=_values).encode() + b"\n"
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
        from ndd_engine.train.failures import kind_and_text

        kind, text = kind_and_text(error)
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
