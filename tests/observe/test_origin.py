"""What is not finite first in a step that is looked at closely, and what a healthy gradient scaler does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ndd_watch.clock import S
from ndd_watch.finite import Finite, Origin
from ndd_watch.looks import Looks
from ndd_watch.mapped import SKIPPED

NAN = float("nan")
mse = nn.functional.mse_loss


class Divides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.log(self.first(x).abs() * -1))
        return found


class Masked(nn.Module):
    """Attention to nothing but the first position, by a mask of -inf."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x + torch.zeros(8).index_fill(0, torch.arange(1, 8), -math.inf)
        return scores.softmax(-1).sum(-1, keepdim=True)


def plain(last: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *([last] if last is not None else []), nn.Linear(8, 1))


def ratio(out: Tensor, target: Tensor) -> Tensor:
    return ((out - out) / (out - out)).mean() + target.mean()


def logarithm(out: Tensor, target: Tensor) -> Tensor:
    """-inf."""
    return (0.0 * (out - target).abs()).mean().log()


def with_column(x: Tensor) -> Tensor:
    return x.index_fill(1, torch.tensor([3]), NAN)


def with_item(x: Tensor) -> Tensor:
    return x.index_fill(0, torch.tensor([5]), math.inf)


def damaged(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model[1].bias.fill_(NAN)  # type: ignore[index, union-attr, operator]
    return model


@pytest.mark.parametrize(
    ("model", "of_x", "of_y", "loss", "right"),
    [
        (plain, with_column, None, mse, {"what": "input", "axis": "column", "at": [3], "size": 8}),
        (plain, with_item, None, nn.MSELoss(), {"what": "input", "axis": "item", "at": [5], "infinite": True}),
        (plain, None, with_item, mse, {"what": "input", "name": "y", "axis": "item"}),
        (lambda: plain(Divides()), None, None, mse, {"what": "output", "name": "1", "kind": "Divides"}),
        (Between, None, None, mse, {"what": "before", "name": "last", "function": "forward"}),
        (plain, None, None, ratio, {"what": "function", "name": "ratio"}),
        (plain, None, None, logarithm, {"what": "loss", "infinite": True}),
        (lambda: damaged(plain()), None, None, mse, {"what": "parameter", "name": "1.bias", "of": 4}),
        (lambda: damaged(plain()), with_column, None, mse, {"what": "input"}),
        (lambda: nn.Sequential(Masked(), nn.Linear(1, 1)), None, None, ratio, {"what": "function", "name": "ratio"}),
        (plain, None, None, mse, {}),
    ],
)  # fmt: skip
def test_the_first_thing_that_is_not_finite_is_named(
    model: Callable[[], nn.Module], of_x: Any, of_y: Any, loss: Any, right: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    made = model()
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    x, y = (of_x or (lambda one: one))(x), (of_y or (lambda one: one))(y)
    before = torch.random.get_rng_state()
    found = Origin(torch, Looks(torch)).of(made, (x, y), lambda: loss(made(x), y))
    assert {name: found.get(name) for name in right} == right
    assert bool(found) == bool(right)
    assert torch.equal(before, torch.random.get_rng_state())


def test_values_that_have_grown_without_a_bound_are_told_with_their_magnitude() -> None:
    model = plain()
    with torch.no_grad():
        model[0].weight.fill_(1e30)  # type: ignore[index, union-attr, operator]
    x = torch.full((4, 8), 1e12)
    found = Origin(torch, Looks(torch)).of(model, (x,), lambda: model(x).sum())
    assert found["what"] == "output" and found["name"] == "0" and found["largest"] == pytest.approx(1e30)


def skips(*rows: tuple[int, int]) -> tuple[int, bool, int | None]:
    """(skipped updates that count, whether a closer look is due, since when) of (skipped, made) updates in turn."""
    finite, asked = Finite(), []
    finite.suspicious = lambda: asked.append(True)
    before, done = S[SKIPPED], 0
    for skipped, made in rows:
        for one in [True] * skipped + [False] * made:
            finite.updated(one, done)
            done += 1
    count, S[SKIPPED] = S[SKIPPED] - before, before
    return int(count), bool(asked), finite.since


def test_a_scaler_that_looks_for_its_scale_is_not_suspicious() -> None:
    assert skips((5, 100)) == (0, False, None)
    # It doubles its scale every 2,000 steps, and takes that back.
    assert skips((3, 2000), *[(1, 2000)] * 20) == (20, False, None)
    assert skips((5, 495), (40, 0)) == (40, True, 500)
    assert skips((3, 100), *[(1, 9)] * 30) == (30, True, None)
    # It never finds one.
    assert skips((60, 0)) == (60, True, 0)


def test_losses_that_are_not_finite_begin_with_the_first_one() -> None:
    finite = Finite()
    for step, loss in enumerate([2.0, 1.0, 50.0, NAN, math.inf]):
        assert finite.read(step, loss) == math.isfinite(loss)
    assert finite.loss == ("infinite", 3, 2, 50.0, 1.0)
    assert finite.read(5, 1.0) and finite.loss is None
