"""Controlling a run over its socket: one line each way, for its owner only."""

from __future__ import annotations

import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ndd_engine.errors import UsageError
from ndd_engine.record.channel import ACTIONS, ControlServer, send


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


def talk(path: Path, data: bytes) -> dict[str, object]:
    """The answer to raw bytes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer: dict[str, object] = json.loads(connection.makefile().readline())
        return answer


def test_every_action_arrives_and_a_ping_asks_for_nothing(server: Server) -> None:
    for action in ACTIONS:
        send(server.path, action)
    assert server.asked == [action for action in ACTIONS if action != "ping"]


def test_only_the_owner_may_talk_to_it(server: Server) -> None:
    mode = server.path.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_an_unknown_action_is_told_what_there_is(server: Server) -> None:
    with pytest.raises(UsageError, match=r"unknown action 'dance'; allowed: pause, resume, .*ping"):
        send(server.path, "dance")
    assert server.asked == []


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"pause\n",
        b"[]\n",
        b"{}\n",
        b'{"action"',
        b"\xff\xfe\x00\n",
        b"x" * 10_000,
        b"[" * 4000 + b"\n",
        b"",
    ],
)
def test_garbage_gets_an_answer_and_does_no_harm(server: Server, data: bytes) -> None:
    assert talk(server.path, data)["ok"] is False
    send(server.path, "pause")
    assert server.asked == ["pause"]


@pytest.mark.parametrize("action", [None, 3, ["pause"], {"a": 1}, "\ud800", "x" * 3000])
def test_an_action_of_any_type_gets_an_answer(server: Server, action: object) -> None:
    answer = talk(server.path, json.dumps({"action": action}).encode() + b"\n")
    assert answer["ok"] is False
    assert "unknown action" in str(answer["error"])


def test_a_peer_that_says_nothing_holds_nobody_up_for_long(server: Server) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(server.path))
        silent.sendall(b'{"action":')  # and no more
        begin = time.monotonic()
        send(server.path, "pause", timeout_s=20)
        assert time.monotonic() - begin < 10
    assert server.asked == ["pause"]


def test_a_peer_that_leaves_at_once_does_no_harm(server: Server) -> None:
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hasty:
            hasty.connect(str(server.path))
            hasty.sendall(b'{"action": "pause"}\n')
    send(server.path, "resume")
    assert server.asked == ["pause"] * 20 + ["resume"]


def test_many_at_once_are_all_heard(server: Server) -> None:
    threads = [threading.Thread(target=send, args=(server.path, "checkpoint", 20)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.asked == ["checkpoint"] * 16


def test_a_run_that_has_ended_is_not_listening(server: Server, tmp_path: Path) -> None:
    server.server.close()
    server.server.close()
    assert not server.path.exists()
    for path in (server.path, tmp_path / "never" / "control.sock", tmp_path / ("x" * 120) / "control.sock"):
        with pytest.raises(UsageError, match="is not listening: it has ended"):
            send(path, "pause")


def test_a_socket_that_a_killed_process_left_is_not_listening_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    with pytest.raises(UsageError, match="is not listening"):
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
        with pytest.raises(UsageError, match=r"did not answer within 0\.2 s"):
            send(path, "pause", timeout_s=0.2)


def test_a_path_too_long_for_a_socket_address_works(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    path = folder / "control.sock"
    assert len(str(path)) > 200
    made = Server(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    send(path, "stop")
    assert made.asked == ["stop"]
    made.server.close()
    assert not path.exists()


def test_a_folder_without_room_for_a_socket_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        ControlServer(tmp_path / "missing" / "control.sock", print).start()
