"""Denormal numbers of a model and its optimizer, and whether the processor is slow with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ndd_watch import slowing as module
from ndd_watch.looks import Looks
from ndd_watch.slowing import denormals, shares, slower

LOOKS = Looks(torch)


def trained(scale: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after a step, with gradients of about this size."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    (model(torch.ones(2, 64)).sum() * scale).backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    yield
    torch.set_flush_denormal(False)


def test_usual_numbers_are_not_denormal() -> None:
    _, optimizer = trained()
    assert not shares(LOOKS, [optimizer])


@pytest.mark.parametrize("scale", [1e-20, 1e-19])
def test_squares_of_small_gradients_are(scale: float) -> None:
    _, optimizer = trained(scale)
    assert shares(LOOKS, [optimizer]) == {"exp_avg_sq": pytest.approx(1.0)}


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_the_share_of_parameters_and_gradients(part: float) -> None:
    model, optimizer = trained()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0).view(-1)[: round(part * parameter.numel())] = 1e-40
            assert parameter.grad is not None
            parameter.grad.fill_(1.0)
    assert shares(LOOKS, [optimizer]) == {"parameters": pytest.approx(part, abs=0.05)}


def test_zeros_and_other_kinds_of_numbers_are_not_counted() -> None:
    model = nn.Linear(8, 8).to(torch.bfloat16)
    nn.init.zeros_(model.weight)
    assert not shares(
        LOOKS, [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([torch.zeros(4)], lr=0.1)]
    )


def test_a_processor_that_takes_them_as_zero_has_none(flushed: None) -> None:
    _, optimizer = trained(1e-20)
    assert not shares(LOOKS, [optimizer])


@pytest.mark.parametrize(
    ("multiply", "root", "told"), [(1.0, 20.0, True), (30.0, 1.0, False), (1.0, 1.2, False)]
)
def test_they_count_where_the_processor_is_slow(
    monkeypatch: pytest.MonkeyPatch, multiply: float, root: float, told: bool
) -> None:
    monkeypatch.setattr(module, "slower", lambda: (multiply, root))
    _, optimizer = trained(1e-20)
    found = denormals(LOOKS, [optimizer])
    assert found == ({"exp_avg_sq": (pytest.approx(1.0), 20.0)} if told else {})


def test_the_processor_is_measured() -> None:
    assert all(times > 0 for times in slower())
