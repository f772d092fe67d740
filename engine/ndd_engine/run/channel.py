"""Control of a live run from another terminal: its control.sock; request and answer are one line of JSON each."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ndd_engine.errors import UsageError
from ndd_engine.record.events import Event, TrialEvent, decoded
from ndd_engine.text import printable

ACTIONS = ("pause", "resume", "checkpoint", "evaluate", "kernels", "stop", "kill", "ping")
# In addition, {"action": "record", "event": {…}} adds the result of a trial to the run's record.
RECORD = "record"
# Maximum bytes of a line; a trial event has about 2000.
MAX_LINE = 32_768
# A path in sockaddr_un has 108 bytes on Linux and 104 on macOS, including the terminating NUL.
_MAX_PATH = 100
_MAX_PID = 2**31 - 1
# Maximum seconds from the connection to the complete request.
REQUEST_S = 2.0
# Maximum number of open connections; a further one replaces the oldest.
MAX_PEERS = 64
CLOSE_S = 1.0  # maximum wait for the thread


class ControlServer(socketserver.ThreadingUnixStreamServer):
    """Answers requests {"action": …} with {"ok": true} or {"ok": false, "error": …} in threads of its own.

    handler: called with the action and the holder of a pause (process id or None), one at a time; must not block; may
    raise UsageError. record: called with a trial event; None rejects them. Only the owner can access the socket.

    Each connection has a thread, so that a silent or slow one delays nobody.
    """

    daemon_threads = True
    request_queue_size = 128  # clients get an error if the queue is full

    def __init__(
        self,
        path: Path,
        handler: Callable[[str, int | None], None],
        record: Callable[[Event], None] | None = None,
    ) -> None:
        super().__init__("", socketserver.BaseRequestHandler, bind_and_activate=False)
        self.path = path
        self._handler = handler
        self._record = record
        self._answering = threading.Lock()
        self._peers: list[socket.socket] = []
        self._bound = self._closed = False
        self._thread = threading.Thread(target=self._serve, name="ndd-control", daemon=True)

    def start(self) -> None:
        """Start listening. Raises OSError if the file system does not support sockets."""
        self.path.unlink(missing_ok=True)
        # Restrict access at creation: there must be no moment in which others can connect.
        mask = os.umask(0o177)
        try:
            with _reachable(self.path) as self.server_address:
                self.server_bind()
        finally:
            os.umask(mask)
        self._bound = True
        self.server_activate()
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._thread.ident is not None:
            with contextlib.suppress(OSError), _connected(self.path, CLOSE_S):  # wakes the thread
                self._thread.join(CLOSE_S)
        self.server_close()
        if self._bound:
            self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closed:
            self.handle_request()

    def get_request(self) -> tuple[socket.socket, str]:
        """Accept a connection. One too many takes the place of the oldest, which has had its time."""
        try:
            connection, address = super().get_request()
        except OSError:
            time.sleep(0.05)  # out of file descriptors, for example
            raise
        self._peers.append(connection)
        for oldest in self._peers[:-MAX_PEERS]:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        return connection, address

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Read a request and answer it."""
        line = _line(request, time.monotonic() + REQUEST_S)
        with self._answering:
            answer = self._answer(line)
        request.sendall(json.dumps(answer).encode() + b"\n")

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with contextlib.suppress(ValueError):
            self._peers.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """It has left or was too slow, or no thread could be started for it."""

    def _answer(self, line: bytes) -> dict[str, object]:
        try:
            body = json.loads(line.partition(b"\n")[0])
            action = body["action"]
            holder = body.get("holder")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return _refused('invalid request; expected {"action": "…"}')
        try:
            if action == RECORD and self._record is not None:
                self._record(_trial(body.get("event")))
            elif action not in ACTIONS:
                raise UsageError(f"unknown action {_short(action)}; allowed: {', '.join(ACTIONS)}")
            elif holder is not None and (type(holder) is not int or not 0 < holder <= _MAX_PID):
                raise UsageError(f"holder {_short(holder)} is not a process id")
            elif action != "ping":
                self._handler(action, holder)
        except UsageError as error:
            return _refused(str(error))
        except Exception as error:  # noqa: BLE001  the asking process has to know
            return _refused(f"the request failed: {type(error).__name__}: {error}")
        return {"ok": True}


def _refused(error: str) -> dict[str, object]:
    return {"ok": False, "error": error}


def _short(value: object) -> str:
    return printable(repr(value)[:200])


def _trial(body: object) -> TrialEvent:
    """The event of a request. Raises UsageError if it is no trial event, or has values of the wrong type."""
    try:
        item = decoded(body)
    except ValueError:
        item = None
    if item is None or not isinstance(item[1], TrialEvent):
        raise UsageError("only trial events can be recorded")
    return item[1]


def send(path: Path, action: str, timeout_s: float = 3.0, **more: object) -> None:
    """Send an action to a run. Raises UsageError with the reason if the run is not reachable or refuses.

    more: further fields of the request: holder for pause and resume, event for record.
    """
    data = json.dumps({"action": action, **more}).encode() + b"\n"
    if len(data) > MAX_LINE:
        raise UsageError(f"the request has {len(data):,} bytes; maximum: {MAX_LINE:,}")
    deadline = time.monotonic() + timeout_s
    try:
        with _connected(path, timeout_s) as connection:
            connection.sendall(data)
            answer = json.loads(_line(connection, deadline))
    except (FileNotFoundError, ConnectionRefusedError):
        raise UsageError(
            "the run is not listening: it has ended, or its file system has no sockets"
        ) from None
    except TimeoutError:
        raise UsageError(f"the run did not answer within {timeout_s:g} s") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the run cannot be reached: {error}") from None
    if not isinstance(answer, dict):
        raise UsageError("the run cannot be reached: its answer is invalid")
    if not answer.get("ok"):
        raise UsageError(printable(str(answer.get("error"))))


def _line(connection: socket.socket, deadline: float) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < MAX_LINE:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(4096)
        if not part:
            break
        data += part
    return data


@contextlib.contextmanager
def _connected(path: Path, timeout_s: float) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        with _reachable(path) as address:
            connection.connect(address)
        yield connection


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


# Statuses of runs that did not end as intended: an error, or a process that was killed.
