"""What the user's lines call: the functions of libraries that take the time of a step and of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ndd_watch import profiler as asides
from ndd_watch.clock import CHECKPOINT, EVALUATE
from ndd_watch.profiler import MOST_NS, Asides, StepProfiler

LONG = [list(range(200))] * 400


def record(values: list[list[int]]) -> str:
    return json.dumps(values)


def work() -> None:
    record(LONG)


def calls(function: Any, inside: str = "", **roots: str) -> dict[str, list[Any]]:
    profiler = StepProfiler(lambda code: not isinstance(code, str) and code.co_filename == __file__)
    assert not profiler.begin()
    try:
        function()
    finally:
        found = profiler.end({nn.Module.__call__.__code__: "forward", **roots}, {}, inside)
    return {row[3]: row for row in found["calls"]}


def test_a_call_of_a_library_has_the_line_that_makes_it() -> None:
    file, line, name, _, library, count, ns, phase = calls(work)["dumps"]
    assert (file, name, library, count, phase) == (__file__, "record", "", 1, "other") and ns > 0
    assert Path(file).read_text().splitlines()[line - 1].strip() == "return json.dumps(values)"


def prepares_and_trains() -> None:
    json.dumps([])  # before the training
    for _ in range(3):
        sorted(LONG)
    for _ in range(3):
        json.dumps(LONG)  # in it
    json.dumps([])  # after it


def test_a_call_in_a_loop_is_that_of_the_loop() -> None:
    """A script whose loop is not in a function calls the same before its training."""
    file, line = calls(prepares_and_trains)["dumps"][:2]
    assert Path(file).read_text().splitlines()[line - 1].strip() == "json.dumps(LONG)  # in it"


def test_of_a_step_the_model_is_no_call_and_of_an_evaluation_it_is_one_with_its_phase() -> None:
    model, x = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 512)), torch.ones(256, 64)

    def evaluate() -> None:
        kept = torch.zeros(0, 512)
        for _ in range(30):
            kept = torch.cat([kept, model(x)])

    assert not [row for row in calls(evaluate).values() if row[7] == "forward"]
    found = calls(evaluate, "evaluate")
    assert "torch.cat" in found and found["torch.cat"][5] == 30
    assert "forward" in {row[7] for row in found.values()}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Nanoseconds of the clock; a test moves it on."""
    t = [10**9]
    monkeypatch.setattr(asides, "now", lambda: t[0])
    yield t


class Profiles:
    def __init__(self) -> None:
        self.begun = 0
        self.put: list[str] = []
        rows = {"functions": [1], "calls": []}
        self.asides = Asides(self.begin, lambda _: rows, lambda found: self.put.append(found["inside"]))

    def begin(self) -> bool:
        self.begun += 1
        return True

    def evaluate(self, clock: list[int], batches: int, batch_ns: int) -> None:
        self.asides.begins(EVALUATE)
        for _ in range(batches):
            clock[0] += batch_ns
            self.asides.goes_on()
        self.asides.ends(EVALUATE)


def test_the_second_short_evaluation_is_profiled_and_then_rarely(clock: list[int]) -> None:
    one = Profiles()
    for _ in range(20):
        one.evaluate(clock, 4, 10**7)
        one.asides.settle(False)
        clock[0] += 10**7
    assert one.put == ["evaluate"] and one.begun == 1


def test_the_first_long_evaluation_is_profiled_and_no_longer_than_ten_seconds(clock: list[int]) -> None:
    one = Profiles()
    one.evaluate(clock, 40, 10**9)
    one.asides.settle(False)
    assert one.put == ["evaluate"] and MOST_NS < 40 * 10**9


def test_a_teacher_in_each_step_is_no_evaluation_and_a_checkpoint_is_one_of_its_own(clock: list[int]) -> None:
    one = Profiles()
    for _ in range(3):
        one.evaluate(clock, 2, 10**6)
        one.asides.settle(True)
    assert one.begun == 1 and not one.put
    for _ in range(2):
        one.asides.begins(CHECKPOINT)
        clock[0] += 10**6
        one.asides.ends(CHECKPOINT)
    one.asides.finish()
    assert one.put == ["checkpoint"]
