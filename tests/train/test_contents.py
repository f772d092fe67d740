"""What a checkpoint may contain: finite values where they were finite, and nothing that torch refuses to load."""

from __future__ import annotations

import io
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ndd_engine.train.checkpoint_state import finite_buffers, not_finite, unloadable

Point = namedtuple("Point", "x y")


class Masked(nn.Module):
    """A causal mask with -inf, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("best", torch.tensor(math.nan), persistent=False)


def test_only_what_was_finite_at_the_start_has_to_stay_finite() -> None:
    model = Masked()
    buffers = finite_buffers(model)
    assert buffers == {"mean"}
    assert not_finite(model, buffers) is None
    model.get_buffer("mean")[1] = math.inf
    assert not_finite(model, buffers) == "mean"
    with torch.no_grad():
        model.linear.weight[0, 0] = math.nan
    assert not_finite(model, buffers) == "linear.weight"


@pytest.mark.parametrize(
    "value", [torch.tensor([1.0, math.inf]).to_sparse(), torch.tensor(complex(0, math.nan))]
)
def test_infinity_is_found_in_other_layouts(value: Tensor) -> None:
    model = nn.Module()
    model.register_buffer("value", value)
    assert finite_buffers(model) == frozenset()


def loads(value: Any) -> bool:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001
        return False
    return True


@pytest.mark.parametrize(
    "value",
    [
        1, -(2**62), 1.5, math.nan, True, None, "text", b"bytes", bytearray(b"x"), 1j, (1, 2), [1, [2]], {1, 2},
        {"a": {"b": torch.ones(2)}}, OrderedDict(a=1), Counter("ab"), torch.Size([1]), torch.float32,
        nn.Parameter(torch.ones(1)), 10**5000, frozenset({1}), range(3), defaultdict(list), Point(1, 2), int, object(),
        {Point(1, 2): 1}, [[slice(1)]], ...,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_it_is_known_what_torch_loads(value: Any) -> None:
    assert (unloadable({"model": {"_extra_state": value}}) is None) == loads({"_extra_state": value})


def test_what_cannot_be_loaded_is_named() -> None:
    found = unloadable({"step": 1, "model": OrderedDict({"encoder._extra_state": {"at": Point(1, 2)}})})
    assert found is not None and "encoder._extra_state.at" in found and "Point" in found
    deep: Any = None
    for _ in range(500):
        deep = [deep]
    assert unloadable({"model": deep}) is not None
    around: list[Any] = []
    around.append(around)
    assert unloadable({"model": around}) is not None
