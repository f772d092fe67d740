"""control.sock: controls a live run from another terminal. Request and answer are one line of JSON each."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ndd_engine.errors import UsageError

from .events import Event, Json, TrialEvent, parse

ACTIONS = ("pause", "resume", "checkpoint", "evaluate", "kernels", "stop", "kill", "ping")
# In addition, {"action": "record", "event": {…}} adds the result of a trial to the run's record.
RECORD = "record"
# Maximum bytes of a line; a trial event has about 2000.
MAX_LINE = 32_768
# A path in sockaddr_un has 108 bytes on Linux and 104 on macOS, including the terminating NUL.
_MAX_PATH = 100


class ControlServer:
    """Answers requests {"action": …} with {"ok": true} or {"ok": false, "error": …} in its own thread.

    handler: called with the action and the holder of a pause (process id or None); must not block; may raise
    UsageError. record: called with a trial event; None rejects them. Only the owner can access the socket.
    """

    def __init__(
        self,
        path: Path,
        handler: Callable[[str, int | None], None],
        record: Callable[[Event], None] | None = None,
    ) -> None:
        self.path = path
        self._handler = handler
        self._record = record
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="ndd-control", daemon=True)

    def start(self) -> None:
        """Start listening. Raises OSError if the file system does not support sockets."""
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Restrict access at creation: there must be no moment in which others can connect.
        mask = os.umask(0o177)
        try:
            with _reachable(self.path) as address:
                listener.bind(address)
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(mask)
        listener.listen(128)  # clients get an error if the queue is full
        self._socket = listener
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket; safe to call twice."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None
            self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while (listener := self._socket) is not None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            # One request at a time; the timeout keeps a silent client from blocking others.
            with connection:
                connection.settimeout(2.0)
                with contextlib.suppress(OSError, ValueError):
                    connection.sendall(json.dumps(self._answer(_line(connection))).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, object]:
        try:
            body = json.loads(line)
            action = body["action"]
            holder = body.get("holder")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {"ok": False, "error": 'invalid request; expected {"action": "…"}'}
        if action == RECORD and self._record is not None:
            return self._answer_record(body)
        if action not in ACTIONS:
            return {"ok": False, "error": f"unknown action {action!r}; allowed: {', '.join(ACTIONS)}"}
        if holder is not None and type(holder) is not int:
            return {"ok": False, "error": f"holder {holder!r} is not a process id"}
        if action != "ping":
            try:
                self._handler(action, holder)
            except UsageError as error:
                return {"ok": False, "error": str(error)}
        return {"ok": True}

    def _answer_record(self, body: Json) -> dict[str, object]:
        assert self._record is not None
        try:
            item = parse(json.dumps(body["event"]))
        except (KeyError, RecursionError):
            item = None
        if item is None or not isinstance(item[1], TrialEvent):
            return {"ok": False, "error": "only trial events can be recorded"}
        self._record(item[1])
        return {"ok": True}


def send(path: Path, action: str, timeout_s: float = 3.0, **more: object) -> None:
    """Send an action to a run. Raises UsageError with the reason if the run is not reachable or refuses.

    more: further fields of the request: holder for pause and resume, event for record.
    """
    data = json.dumps({"action": action, **more}).encode() + b"\n"
    if len(data) > MAX_LINE:
        raise UsageError(f"the request has {len(data):,} bytes; maximum: {MAX_LINE:,}")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            with _reachable(path) as address:
                connection.connect(address)
            connection.sendall(data)
            answer = json.loads(_line(connection))
    except (FileNotFoundError, ConnectionRefusedError):
        raise UsageError(
            "the run is not listening: it has ended, or its file system has no sockets"
        ) from None
    except TimeoutError:
        raise UsageError(f"the run did not answer within {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"the run cannot be reached: {error}") from None
    if not answer.get("ok"):
        raise UsageError(str(answer.get("error")))


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < MAX_LINE:
        part = connection.recv(4096)
        if not part:
            break
        data += part
    return data


@contextlib.contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """The path in a form that is short enough for a socket address."""
    if len(os.fsencode(path)) <= _MAX_PATH:
        yield str(path)
        return
    # Use a symbolic link with a short name; the socket itself is in the run's directory.
    with tempfile.TemporaryDirectory(prefix="ndd-") as folder:
        link = Path(folder) / "r"
        link.symlink_to(path.parent.absolute(), target_is_directory=True)
        yield str(link / path.name)
