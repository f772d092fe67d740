"""Messages to the control socket of a run: malformed, huge, slow, silent, many at once, trials of wrong types."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ndd_engine.record.events import TrialEvent, WindowEvent
from ndd_engine.record.file import EventLog, Recorder
from ndd_engine.run.channel import ACTIONS, MAX_LINE, ControlServer, send
from ndd_engine.run.control import Control
from ndd_engine.trial.outcome import SideFacts
from qa.hostile._strange import NASTY, NONSENSE, PLACE, VALUES, damaged, line
from qa.hostile.attempts import Attempt, Kind

PING_S = 1.0
_SIDE = SideFacts(
    "cpu", "CPU", 1, 16, 100, 1.0, None, 0.1, 2, 0.01, 1600.0, 10**9, None, [1.0, 0.5]
).to_dict()
_TRIAL = TrialEvent(
    ["loader.workers=2"], "run one", "faster", "faster: 1.42x", 1.42, 1.3, 1.5, abba_blocks=6,
    seconds=24.0, budget_s=60.0, device="CPU", in_effect=True, loss="same", loss_text="equal",
    break_even_steps=10, base=_SIDE, change=_SIDE,
)  # fmt: skip

# Sends something over new connections, which stay open until the stack is closed.
Message = Callable[[Path, ExitStack], None]


class _Run:
    """The listening end of a run: a server, its control and its record."""

    def __init__(self, folder: Path) -> None:
        self.control = Control()
        self.recorder = Recorder(folder / "events.jsonl")
        self.log = EventLog(folder / "events.jsonl")
        self.socket = folder / "control.sock"
        self._server = ControlServer(self.socket, self._asked, self.recorder.put)
        self.recorder.start()
        self._server.start()

    def _asked(self, action: str, holder: int | None) -> None:
        self.control.request(action, holder=holder)

    def close(self) -> None:
        self._server.close()
        self.recorder.close()

    def check(self) -> None:
        """It answers, and its record can be read."""
        send(self.socket, "ping", timeout_s=PING_S)
        step = self.recorder.snapshot().step + 1
        self.recorder.put(
            WindowEvent(step, 0, step, 1, 1, 16, 0, 10**6, 1, 1, 1, {"forward": {"host_ns": 10**6}})
        )
        assert self.recorder.flush(), "the recorder does not write"
        found = [event for _, event in self.log.new()]
        assert self.log.damaged == 0, "the record is damaged"
        assert any(isinstance(event, WindowEvent) for event in found)
        for event in found:
            assert isinstance(event, (WindowEvent, TrialEvent)), f"{event} was recorded"
        assert not self.recorder.errors, self.recorder.errors
        assert self.recorder.snapshot().step == step


def attempts(rng: random.Random, folder: Path) -> Iterator[Attempt]:
    run = _Run(folder)
    try:
        while True:
            own = random.Random(rng.getrandbits(64))
            name, message = own.choice(_KINDS)(own)
            yield Attempt(name, partial(_check, run, message))
    finally:
        run.close()


def _check(run: _Run, message: Message) -> None:
    with ExitStack() as stack:
        message(run.socket, stack)
        run.check()
    run.check()


def _connected(path: Path, stack: ExitStack) -> socket.socket:
    connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    connection.settimeout(5.0)
    connection.connect(str(path))
    return connection


def _sent(data: bytes) -> Message:
    """A whole message, whose answer is read."""

    def message(path: Path, stack: ExitStack) -> None:
        connection = _connected(path, stack)
        with contextlib.suppress(BrokenPipeError):  # it was too long
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            answer = json.loads(connection.makefile().readline())
            assert type(answer["ok"]) is bool

    return message


def _json(body: object, place: str = "null") -> bytes:
    return line(body, place) + b"\n"


def _trial(rng: random.Random) -> tuple[str, Message]:
    """A trial event with one damaged value."""
    done, event = damaged(rng, json.loads(_TRIAL.to_json(time.time())))
    return f"trial with {done}", _sent(b'{"action":"record","event":' + event + b"}\n")


def _request(rng: random.Random) -> tuple[str, Message]:
    """A request with an action, a holder or an event of any type."""
    key, new = rng.choice(("action", "holder", "event", NASTY)), rng.choice(VALUES)
    body = {"action": rng.choice((*ACTIONS, "record")), key: PLACE}
    return f"{key!r} = {new[:40]}", _sent(_json(body, new))


def _valid(rng: random.Random) -> tuple[str, Message]:
    action = rng.choice(ACTIONS)
    body = {"action": action, "holder": rng.choice((None, 1, 2**31 - 1, 2**31, 10**400))}
    return f"{action} by {str(body['holder'])[:20]}", _sent(_json(body))


def _noise(rng: random.Random) -> tuple[str, Message]:
    size = rng.choice((1, 100, MAX_LINE - 1, MAX_LINE, MAX_LINE + 1, 1 << 20))
    data = rng.choice(
        (*NONSENSE, rng.randbytes(size), b"x" * size, b"\n" * size, _json({"action": "x" * size}))
    )
    return f"{len(data)} bytes of nonsense", _sent(data)


def _several(rng: random.Random) -> tuple[str, Message]:
    return "several requests in one connection", _sent(_json({"action": "ping"}) * rng.choice((2, 50, 5000)))


def _silent(rng: random.Random) -> tuple[str, Message]:
    """Connections that send nothing or a part, and stay open."""
    count, part = rng.choice((1, 5, 20, 63, 64, 65, 100)), rng.choice((b"", b"{", b'{"action": "pa'))

    def message(path: Path, stack: ExitStack) -> None:
        for _ in range(count):
            _connected(path, stack).sendall(part)

    return f"{count} connections that say {part!r} and no more", message


def _slow(rng: random.Random) -> tuple[str, Message]:
    """A request byte by byte."""
    data, count = _json({"action": "pause"}), rng.choice((1, 5))

    def message(path: Path, stack: ExitStack) -> None:
        peers = [_connected(path, stack) for _ in range(count)]
        for index in range(len(data)):
            for peer in peers:
                peer.sendall(data[index : index + 1])
            time.sleep(0.001)
        for peer in peers:
            assert json.loads(peer.makefile().readline()) == {"ok": True}

    return f"{count} requests byte by byte", message


def _hasty(rng: random.Random) -> tuple[str, Message]:
    """Connections that are closed before the answer."""
    count, data = rng.choice((1, 30)), rng.choice((b"", b"{", _json({"action": "pause"}), b"x" * 5000))

    def message(path: Path, _: ExitStack) -> None:
        for _ in range(count):
            with ExitStack() as each:
                _connected(path, each).sendall(data)

    return f"{count} connections that leave after {data[:20]!r}", message


def _shut(rng: random.Random) -> tuple[str, Message]:
    """Connections that can no longer receive an answer."""
    data = rng.choice((_json({"action": "ping"}), _json({"action": "y" * 30_000}), b"\n"))

    def message(path: Path, stack: ExitStack) -> None:
        connection = _connected(path, stack)
        connection.shutdown(socket.SHUT_RD)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(data)

    return "a connection that cannot receive", message


_KINDS: tuple[Callable[[random.Random], tuple[str, Message]], ...] = (
    *[_trial] * 10, *[_request] * 5, _valid, _noise, _noise, _several, _silent, _silent, _slow, _hasty, _shut,
)  # fmt: skip


KIND = Kind(
    name="messages to the control socket",
    holds=f"a ping is answered within {PING_S:g} s, and the record stays readable",
    full=1_000,
    short=100,
    attempts=attempts,
)
