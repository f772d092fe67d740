"""Signals of runs that are no thread of this process: scripts and several ranks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ndd_console.sessions.headless import Signals
from ndd_engine.run import Executor

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
