"""control.sock: controls a live run from another terminal. Request and answer are one line of JSON each."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ndd_engine.errors import UsageError
from ndd_engine.text import printable

from .events import Event, TrialEvent, decoded

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


@dataclass
class _Peer:
    """A connection whose request has not arrived completely."""

    connection: socket.socket
    deadline: float
    data: bytes = b""


class ControlServer:
    """Answers requests {"action": …} with {"ok": true} or {"ok": false, "error": …} in its own thread.

    handler: called with the action and the holder of a pause (process id or None); must not block; may raise
    UsageError. record: called with a trial event; None rejects them. Only the owner can access the socket.

    Many connections are served at once, so that a silent or slow one delays nobody.
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
        self._stop: socket.socket | None = None  # closing it ends the thread
        self._peers: dict[socket.socket, _Peer] = {}
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
            listener.listen(128)  # clients get an error if the queue is full
            listener.setblocking(False)
            self._stop, self._stopped = socket.socketpair()
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(mask)
        self._socket = listener
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket; safe to call twice."""
        if self._stop is not None:
            self._stop.close()
            self._stop = None
            if self._thread.ident is not None:
                self._thread.join(CLOSE_S)
            elif self._socket is not None:  # no thread could be started
                self._socket.close()
                self._stopped.close()
            self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        assert self._socket is not None
        with self._socket as listener, self._stopped as stopped, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(stopped, selectors.EVENT_READ)
            while True:
                try:
                    if not self._turn(selector, listener, stopped):
                        break
                except Exception:  # noqa: BLE001  no request may end the thread
                    time.sleep(0.05)  # out of file descriptors, for example
            for peer in list(self._peers.values()):
                self._drop(selector, peer)

    def _turn(
        self, selector: selectors.BaseSelector, listener: socket.socket, stopped: socket.socket
    ) -> bool:
        """Wait for something to do, and do it. False when the server was closed."""
        first = min((peer.deadline for peer in self._peers.values()), default=None)
        ready = selector.select(None if first is None else max(first - time.monotonic(), 0.0))
        for key, _ in ready:
            if key.fileobj is stopped:
                return False
            if key.fileobj is listener:
                self._accept(selector, listener)
            elif (peer := self._peers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._receive(selector, peer)
        now = time.monotonic()
        for peer in [peer for peer in self._peers.values() if peer.deadline <= now]:
            self._drop(selector, peer)
        return True

    def _accept(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        if len(self._peers) >= MAX_PEERS:
            self._drop(selector, next(iter(self._peers.values())))  # the oldest one has had its time
        self._peers[connection] = _Peer(connection, time.monotonic() + REQUEST_S)
        selector.register(connection, selectors.EVENT_READ)

    def _receive(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        try:
            part = peer.connection.recv(MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            self._drop(selector, peer)
            return
        peer.data += part
        if part and b"\n" not in part and len(peer.data) < MAX_LINE:
            return
        try:
            answer = json.dumps(self._answer(peer.data[:MAX_LINE])).encode() + b"\n"
            peer.connection.send(answer)  # fits into the socket's buffer
        except OSError:
            pass  # it has left
        finally:
            self._drop(selector, peer)

    def _drop(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        del self._peers[peer.connection]
        selector.unregister(peer.connection)
        peer.connection.close()

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
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            with _reachable(path) as address:
                connection.connect(address)
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
