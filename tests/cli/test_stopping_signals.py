"""Signals of runs that are no thread of this process: scripts and several ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ndd_console.jobs.headless import stop_on_signals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def asked() -> Iterator[list[tuple[str, str]]]:
    """What a run was asked for: (command, status)."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    asked: list[tuple[str, str]] = []
    yield asked
    for number, handler in before.items():
        signal.signal(number, handler)


def run(asked: list[tuple[str, str]]) -> Any:
    class Control:
        @property
        def stopping(self) -> bool:
            return bool(asked)

        def request(self, command: str, reason: str, status: str) -> None:
            asked.append((command, status))

    return SimpleNamespace(control=Control())


def test_the_first_signal_stops_and_the_second_kills(asked: list[tuple[str, str]]) -> None:
    said: list[str] = []
    stop_on_signals(run(asked), said.append)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
    assert asked == [("stop", "interrupted"), ("kill", "terminated")] and len(said) == 1


def test_a_hang_up_stops_where_the_configuration_says_so(asked: list[tuple[str, str]]) -> None:
    stop_on_signals(run(asked), hangup=True)
    signal.raise_signal(signal.SIGHUP)
    assert asked == [("stop", "terminated")]
