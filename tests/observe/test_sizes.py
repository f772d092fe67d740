"""What is counted in a profiled step because it may grow, and when another step is worth a look."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ndd_watch.looks import Looks
from ndd_watch.slowing import Sizes, Slowing


def counts(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, int]:
    sizes = Sizes(Looks(torch))
    sizes.model(model)
    sizes.optimizers(optimizers)
    sizes.handlers()
    return sizes.counts()


def test_hooks_are_counted_by_the_name_of_their_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
    for _ in range(5):
        model[1][1].register_forward_hook(lambda module, given, output: None)
        model[1][1].register_full_backward_hook(lambda module, given, output: None)
        model.register_forward_pre_hook(lambda module, given: None)
    model[0].weight.register_hook(lambda gradient: gradient)
    found = counts(model)
    assert found["hooks:1.1"] == 10 and found["hooks:Sequential"] == 5 and found["hooks:0.weight"] == 1


def test_parameters_of_an_optimizer_count_as_often_as_it_has_them() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert counts(model, optimizer)["parameters:SGD"] == 3


def test_the_state_of_an_optimizer_counts_with_its_lists() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(1, 2)).sum().backward()
    assert "state:SGD" not in counts(model, optimizer)
    optimizer.step()
    assert counts(model, optimizer)["state:SGD"] == 4  # two parameters with a buffer each
    optimizer.state[model.weight]["old"] = [torch.zeros(1)] * 30
    assert counts(model, optimizer)["state:SGD"] == 35
    # What a step replaces leaves its state behind.
    for _ in range(10):
        optimizer.state[nn.Parameter(torch.zeros(1))] = {"momentum_buffer": None}
    assert counts(model, optimizer)["state:SGD"] == 55


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a process reads and writes")
def test_bytes_that_a_step_reads_and_writes_are_counted(tmp_path: Path) -> None:
    sizes = Sizes(Looks(torch))
    (tmp_path / "log.txt").write_bytes(b"x" * 100_000)
    (tmp_path / "log.txt").read_bytes()
    found = sizes.counts()
    assert 100_000 <= found["written:"] < 200_000 and 100_000 <= found["read:"] < 200_000


def test_handlers_of_a_logger() -> None:
    logger = logging.getLogger("test_handlers_of_a_logger")
    logger.handlers[:] = [logging.NullHandler() for _ in range(4)]
    assert counts(nn.ReLU())["handlers:test_handlers_of_a_logger"] == 4
    logger.handlers.clear()


def test_a_model_within_itself_and_odd_attributes_are_no_problem() -> None:
    model = nn.Sequential(nn.ReLU())
    model._modules["again"] = model
    model.__dict__["_forward_hooks"] = 7
    assert counts(model).keys() <= {"handlers:root"} | {key for key in counts(model) if "handlers" in key}


def test_steps_that_become_slower_are_looked_at_again_once_for_each_rise() -> None:
    slowing = Slowing()
    looked = [
        slowing.worth_a_look(ns) for ns in (30, 10, 11, 10, 11, 12, 13, 13, 14, 15, 15, 16, 10, 10, 0, 19)
    ]
    assert [index for index, yes in enumerate(looked) if yes] == [6, 11]
