"""An evaluation whose memory grows is looked at twice, and only then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ndd_watch import collecting, holders, profiler
from ndd_watch.clock import CHECKPOINT, EVALUATE
from ndd_watch.collecting import APART, EACH_NS, GROWN, Collecting
from ndd_watch.holders import Holders
from ndd_watch.looks import Looks, variables
from ndd_watch.mapped import in_use
from ndd_watch.profiler import Asides


class Evaluations:
    """Evaluations on a clock of their own, in which each batch takes EACH_NS, with the memory that they use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.t, self.used, self.apart = 0, 0, 0
        self.put: list[dict[str, Any]] = []
        monkeypatch.setattr(holders, "LOOK_NS", 10**10)
        monkeypatch.setattr(holders, "NAME_NS", 10**10)
        for module in (profiler, collecting):
            monkeypatch.setattr(module, "now", lambda: self.t)
        self.asides = Asides(lambda: False, lambda _: {}, lambda _: None)
        self.asides.collecting = Collecting(
            lambda: Holders(Looks(torch), lambda code: code.co_filename == __file__),
            lambda: self.used, self.put.append, self.left_out,
        )  # fmt: skip

    def left_out(self, work: Callable[[], None]) -> None:
        self.apart += 1
        work()

    def batch(self, grows: int) -> None:
        self.t += EACH_NS
        self.used += grows
        self.asides.goes_on()


def evaluate(
    runs: Evaluations, grows: int, batches: int = 40, phase: int = EVALUATE, keep: bool = True
) -> None:
    model = nn.Linear(2, 2)
    model.eval()
    outputs: list[Tensor] = []
    runs.asides.begins(phase)
    for _ in range(batches):
        out = model(torch.zeros(1, 2))
        if keep:
            outputs.append(out)
        runs.batch(grows)
    runs.asides.ends(phase)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Evaluations:
    return Evaluations(monkeypatch)


def test_the_list_that_an_evaluation_collects_in_is_named(runs: Evaluations) -> None:
    evaluate(runs, GROWN // 2)
    (found,) = runs.put
    held = found["holders"][0]
    assert (held["kind"], held["name"], held["owner"]) == ("local", "outputs", "evaluate")
    assert held["graphs"] and found["gradients"] and found["inside"] == "evaluate" and found["steps"] >= APART
    assert found["grown_bytes"] >= GROWN
    # It is known now.
    looks = runs.apart
    evaluate(runs, GROWN)
    assert len(runs.put) == 1 and runs.apart == looks == 2


@pytest.mark.parametrize(
    ("grows", "batches", "phase"),
    [(0, 40, EVALUATE), (GROWN // 100, 40, EVALUATE), (GROWN, 6, EVALUATE), (GROWN, 40, CHECKPOINT)],
    ids=["flat", "little", "few batches", "a checkpoint"],
)
def test_an_evaluation_that_does_not_grow_is_left_alone(
    runs: Evaluations, grows: int, batches: int, phase: int
) -> None:
    evaluate(runs, grows, batches, phase)
    assert not runs.apart and not runs.put


def test_memory_that_is_released_again_is_no_growth(runs: Evaluations) -> None:
    runs.asides.begins(EVALUATE)
    for index in range(60):
        runs.batch(GROWN if index % 12 < 8 else -2 * GROWN)
    runs.asides.ends(EVALUATE)
    assert all(not found["holders"] or found["holders"][0]["name"] != "outputs" for found in runs.put)


def test_looks_in_vain_end(runs: Evaluations) -> None:
    for _ in range(8):
        evaluate(runs, GROWN // 2, keep=False)
    assert runs.apart <= 2 * collecting.ATTEMPTS


def test_memory_of_a_gpu_is_what_its_allocator_has_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.current": 7})
    assert in_use(torch.device("cuda", 0)) == 7
    assert in_use(torch.device("cpu")) != 7 and in_use(None) != 7


def test_a_function_that_calls_the_method_eval_may_be_looked_at() -> None:
    def evaluates(model: nn.Module) -> dict[str, Any]:
        model.eval()
        return variables(sys._getframe())

    def sees_itself() -> dict[str, Any]:
        locals()
        return variables(sys._getframe())

    assert "model" in evaluates(nn.ReLU())
    if sys.version_info < (3, 13):
        assert sees_itself() == {}
