"""Graphs of earlier steps that a script keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from observed import run
from tests.tiers import few

from ndd_watch.slowing import RETAINED_STEPS, KeptGraphs, Retained

STEPS = 60


def kept_after(
    keep: Callable[[torch.Tensor, torch.Tensor], None], scale: float = 1.0, steps: int = STEPS
) -> int:
    """Train, and tell from how many steps graphs are kept. keep: called with the output and the loss of each step."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    graphs = KeptGraphs()
    for step in range(steps):
        optimizer.zero_grad()
        output = model(torch.randn(3, 4))
        loss = output.pow(2).mean()
        scaled = loss * scale if scale != 1.0 else loss
        graphs.mark(scaled, step)
        scaled.backward()
        optimizer.step()
        keep(output, loss)
    return graphs.steps(steps)


class Total:
    """The sum of the losses, as a script computes it."""

    def __init__(self) -> None:
        self.value: torch.Tensor | float = 0.0

    def add(self, output: torch.Tensor, loss: torch.Tensor) -> None:
        self.value += loss


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_sum_of_losses_keeps_the_graphs_of_all_steps(scale: float) -> None:
    assert kept_after(Total().add, scale) == STEPS


def test_a_list_of_outputs_keeps_them_too() -> None:
    outputs: list[torch.Tensor] = []
    assert kept_after(lambda output, loss: outputs.append(output)) == STEPS


@pytest.mark.parametrize(
    "keep",
    [
        lambda output, loss: None,
        lambda output, loss, total=[0.0]: total.append(loss.item()),
        lambda output, loss, total=[]: total.append(output.detach()),
    ],
    ids=["nothing", "numbers", "detached"],
)
def test_what_has_no_graph_keeps_none(keep: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    assert kept_after(keep) == 0


def test_graphs_of_a_few_steps_are_usual() -> None:
    """Truncated backpropagation through time, or losses that are summed up for a few steps."""
    recent: list[torch.Tensor] = []

    def keep(output: torch.Tensor, loss: torch.Tensor) -> None:
        recent.append(loss)
        del recent[:-5]

    assert kept_after(keep) == 0


def test_a_part_that_all_steps_share_is_no_growth() -> None:
    model = torch.nn.Linear(4, 4)
    shared = model(torch.randn(3, 4))
    head = torch.nn.Linear(4, 1)
    graphs = KeptGraphs()
    for step in range(STEPS):
        loss = head(shared).sum()
        graphs.mark(loss, step)
        loss.backward(retain_graph=True)
    assert graphs.steps(STEPS) == 0


def test_marks_are_thinned_out_and_freed_with_their_graphs() -> None:
    total = Total()
    model = torch.nn.Linear(2, 1)
    graphs = KeptGraphs()
    for step in range(2000):
        loss = model(torch.ones(1, 2)).sum()
        graphs.mark(loss, step)
        total.add(loss, loss)
    assert graphs.steps(2000) >= 1990
    assert len(graphs._marks) <= 512
    total.value = 0.0
    del loss
    assert graphs.steps(2000) == 0 and not graphs._marks


def reached(carry: Callable[[torch.Tensor], torch.Tensor], steps: int = 40) -> list[int]:
    """How many steps back the graph reaches, in each step of a model that gets its state from the step before."""
    model = torch.nn.GRUCell(4, 4)
    graphs, state, found = KeptGraphs(), torch.zeros(3, 4), []
    for step in range(steps):
        state = model(torch.randn(3, 4), carry(state))
        loss = state.square().mean()
        graphs.wanted = True
        graphs.mark(loss, step)
        found.append(graphs.reached)
        loss.backward(retain_graph=True)
    return found


def test_a_state_that_is_not_detached_leads_to_all_earlier_steps() -> None:
    assert reached(lambda state: state) == list(range(40))


def test_a_state_that_is_detached_leads_nowhere() -> None:
    assert not any(reached(lambda state: state.detach()))


def test_a_large_graph_is_not_followed_to_its_end() -> None:
    x = torch.zeros(3, requires_grad=True)
    graphs = KeptGraphs()
    for step in range(2):
        loss = x.sum()
        for _ in range(5000):
            loss = loss + x.sum()
        graphs.wanted = True
        graphs.mark(loss, step)
    assert graphs.reached == 0


LINE = ("train.py", 9)


def retained(
    losses: Callable[[torch.Tensor, int], list[torch.Tensor]],
    retains: Callable[[int], bool] = lambda step: True,
    steps: int = RETAINED_STEPS + 1,
) -> tuple[str, int] | None:
    """What is known after these steps. losses: of each step, from the output of the model."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    found = Retained()
    found.begin()
    for step in range(steps):
        for loss in losses(model(torch.randn(3, 4)), step):
            found.hear(loss, retains(step), LINE)
            loss.backward(retain_graph=True)
        found.step_ended()
    return found.where


def test_graphs_that_no_later_pass_goes_through_are_retained_without_need() -> None:
    assert retained(lambda output, step: [output.square().mean()]) == LINE
    # Micro-batches, or models of their own.
    assert (
        retained(lambda output, step: [output.square().mean(), torch.ones(1, requires_grad=True).sum()])
        == LINE
    )
    assert retained(lambda output, step: [output.square().mean()], steps=RETAINED_STEPS - 1) is None


def test_a_graph_that_is_needed_again_is_no_finding() -> None:
    assert retained(lambda output, step: [output.square().mean(), output.abs().mean()]) is None
    kept: list[torch.Tensor] = []

    def of_an_earlier_step(output: torch.Tensor, step: int) -> list[torch.Tensor]:
        kept.append(output.square())
        return [kept[step // 2 * 2].mean()]

    assert retained(of_an_earlier_step) is None


def test_graphs_that_are_not_retained_in_each_step_or_too_large_are_not_judged() -> None:
    assert retained(lambda output, step: [output.square().mean()], lambda step: step != 5) is None
    assert retained(lambda output, step: []) is None

    def large(output: torch.Tensor, step: int) -> list[torch.Tensor]:
        for _ in range(11_000):
            output = output + 1
        return [output.sum()]

    assert retained(large, steps=3) is None


def test_it_is_told_once_and_not_looked_for_forever() -> None:
    found = Retained()
    for _ in range(10):
        found.begin()
        for _ in range(2):
            if found.active:
                found.hear(torch.ones(1, requires_grad=True).sum(), True, LINE)
            found.step_ended()
        found.end()
    found.begin()
    assert not found.active and found.where is None


@pytest.mark.long
@pytest.mark.parametrize("word", few(["", "twice", "later", "grad", "creates", "some", "carries"], 2))
def test_retained_graphs_of_a_script(tmp_path: Path, word: str) -> None:
    ran = run(tmp_path, "retains.py", *word.split(), NDD_WATCH_PROFILE_S="0.05", NDD_WATCH_WINDOW_S="0.05")
    assert not ran.status, ran.errors
    assert not word or word == "carries" or ran.of("functions")
    told = [one["config"]["script"].get("retains") for one in ran.of("run")]
    assert bool(told[-1]) is (not word)
    if not word:
        assert told[-1][0].endswith("retains.py")
