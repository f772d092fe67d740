"""The gate: a loop trains in runs on command, and only what it was told to time counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ndd_watch.trying import Trainer, gate


class Loop(Trainer):
    """Each step takes a second and waits a tenth of it; between runs, an hour passes."""

    def __init__(self, commands: list[dict[str, Any]]) -> None:
        self.commands = iter(commands)
        self.told: list[dict[str, Any]] = []
        self.seconds, self.steps, self.side, self.rests = 0.0, 0, -1, False
        self.by_side: list[int] = []
        self.gate = gate(self, self.receive, self.told.append)

    def receive(self) -> dict[str, Any]:
        assert self.rests
        self.seconds += 3600
        if (command := next(self.commands, None)) is None:
            raise EOFError
        return command

    def settle(self) -> Iterator[None]:
        yield
        yield

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        self.rests = True
        yield
        self.rests = False

    def begin(self, command: dict[str, Any]) -> None:
        self.side = command["side"]

    def now(self) -> float:
        return self.seconds

    def waited(self) -> float:
        return self.steps / 10

    def facts(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def run(self) -> None:
        """Train as long as the gate lets it."""
        self.gate()
        while True:
            assert not self.rests
            self.seconds, self.steps = self.seconds + 1, self.steps + 1
            self.by_side.append(self.side)
            self.gate()


def test_runs_are_trained_and_timed_on_command() -> None:
    train = {"do": "train", "side": 0, "lead": 2, "steps": 3}
    loop = Loop([train, {"do": "facts"}, {**train, "side": 1, "lead": 0, "steps": 1}])
    with pytest.raises(EOFError):
        loop.run()
    assert loop.told == [
        {"ready": {"steps": 2}},
        {"seconds": 3.0, "waited_s": pytest.approx(0.3)},
        {"steps": 7},
        {"seconds": 1.0, "waited_s": pytest.approx(0.1)},
    ]
    assert loop.by_side == [-1, -1, *[0] * 5, 1]
