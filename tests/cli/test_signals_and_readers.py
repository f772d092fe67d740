"""In this process: signals of scripts and ranks, which are no thread of it, and a reader of the output that is slow."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ndd_console.output import run_log
from ndd_console.output.run_log import Output
from ndd_console.sessions.headless import Signals
from ndd_engine.run.run import Executor

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def asked() -> Iterator[list[tuple[str, str]]]:
    """What a run was asked for: (command, status)."""
    before, report = {number: signal.getsignal(number) for number in NUMBERS}, sys.unraisablehook
    asked: list[tuple[str, str]] = []
    yield asked
    for number, handler in before.items():
        signal.signal(number, handler)
    sys.unraisablehook = report


def run(asked: list[tuple[str, str]]) -> Any:
    class Control:
        def request(self, command: str, reason: str, status: str) -> None:
            asked.append((command, status))

    return SimpleNamespace(control=Control(), executor=Executor())


def test_the_first_signal_stops_and_the_second_kills(asked: list[tuple[str, str]]) -> None:
    said: list[str] = []
    Signals().obey(run(asked), said.append, survive_hangup=True)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)
    assert (
        asked == [("stop", "interrupted"), ("kill", "terminated"), ("kill", "interrupted")] and len(said) == 2
    )


def test_a_hang_up_stops_where_the_configuration_says_so(asked: list[tuple[str, str]]) -> None:
    Signals().obey(run(asked), lambda _: None, survive_hangup=False)
    signal.raise_signal(signal.SIGHUP)
    assert asked == [("stop", "terminated")]


F_SETPIPE_SZ = 1031


def test_the_end_is_the_last_document_for_a_reader_that_was_too_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_log, "PATIENT_LINES", 2)
    read, write = os.pipe()
    with contextlib.suppress(OSError):  # where the size of a pipe cannot be set
        fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
    with os.fdopen(write, "w") as stream:
        output = Output(stream, "output")
        lines = [f"{number} {'x' * 3000}" for number in range(20)]
        for line in lines:
            output.data(line)
        seen: list[bytes] = []
        reader = threading.Thread(
            target=lambda: seen.append(b"".join(iter(lambda: os.read(read, 4096), b"")))
        )
        reader.start()
        lost = output.finish()
    reader.join()
    os.close(read)
    words = seen[0].decode().splitlines()
    assert words[-1] == lines[-1] and words[0] == lines[0] and len(words) < len(lines)
    assert lost.startswith(f"{len(lines) - len(words)} lines")


def test_a_signal_handler_may_write_while_its_thread_writes(tmp_path: Path) -> None:
    said, ended = 0, threading.Event()
    before = signal.getsignal(signal.SIGUSR1)
    with (tmp_path / "out").open("w") as stream:
        output = Output(stream, "output")

        def interrupt() -> None:
            while not ended.wait(0.0005):
                os.kill(os.getpid(), signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, lambda *_: output.say("signal"))
        sender = threading.Thread(target=interrupt)
        sender.start()
        try:
            while said < 20_000:
                output.say("line")
                said += 1
        finally:
            ended.set()
            sender.join()
            signal.signal(signal.SIGUSR1, before)
        output.finish()
    assert "signal" in (tmp_path / "out").read_text()
