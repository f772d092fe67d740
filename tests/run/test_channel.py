"""Controlling a run over its socket: one line each way, for its owner only."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ndd_engine.errors import UsageError
from ndd_engine.run import channel
from ndd_engine.run.channel import ACTIONS, ControlServer, send


class Server:
    """A listening ControlServer and the actions it was asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[str] = []
        self.server = ControlServer(path, lambda action, _: self.asked.append(action))
        self.server.start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "control.sock")
    yield made
    made.server.close()


def test_every_action_arrives_and_a_ping_asks_for_nothing(server: Server) -> None:
    for action in ACTIONS:
        send(server.path, action)
    assert server.asked == [action for action in ACTIONS if action != "ping"]
    with pytest.raises(UsageError, match=r"dance.*ping"):
        send(server.path, "dance")
    assert len(server.asked) == len(ACTIONS) - 1


def test_a_run_that_has_ended_is_not_listening(server: Server, tmp_path: Path) -> None:
    server.server.close()
    server.server.close()
    assert not server.path.exists()
    for path in (server.path, tmp_path / "never" / "control.sock", tmp_path / ("x" * 120) / "control.sock"):
        with pytest.raises(UsageError, match="not listening"):
            send(path, "pause")


def test_a_socket_that_a_killed_process_left_is_not_listening_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    with pytest.raises(UsageError, match="not listening"):
        send(path, "pause")
    again = Server(path)
    send(path, "pause")
    assert again.asked == ["pause"]
    again.server.close()


def test_a_run_that_does_not_answer_is_told_after_the_timeout(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(str(path))
        mute.listen(1)
        with pytest.raises(UsageError, match=r"0\.2 s"):
            send(path, "pause", timeout_s=0.2)


def test_only_the_owner_may_talk_to_it_and_its_path_may_be_too_long_for_an_address(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    path = folder / "control.sock"
    assert len(str(path)) > 200
    made = Server(path)
    mode = path.stat().st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
    send(path, "stop")
    assert made.asked == ["stop"]
    made.server.close()
    assert not path.exists()


def test_a_request_that_takes_too_long_is_dropped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "REQUEST_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow:
        slow.settimeout(10)
        slow.connect(str(server.path))
        slow.sendall(b'{"action":')
        assert slow.recv(100) == b""


def test_a_failing_handler_is_reported_and_ends_nothing(tmp_path: Path) -> None:
    def fail(action: str, _: int | None) -> None:
        raise RuntimeError("broken")

    server = ControlServer(tmp_path / "control.sock", fail)
    server.start()
    try:
        for _ in range(2):
            with pytest.raises(UsageError, match="broken"):
                send(server.path, "pause")
        send(server.path, "ping")
    finally:
        server.close()


def test_a_socket_without_a_thread_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = ControlServer(tmp_path / "control.sock", lambda action, holder: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            server.start()
    server.close()
    server.close()
    assert not (tmp_path / "control.sock").exists()
