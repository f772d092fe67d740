"""Values of a script that are not as torch makes them cost their own field, never the observation."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from observed import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ndd_watch.apart import dumps
from ndd_watch.looks import Looks, Places, groups_of, whole
from ndd_watch.slowing import Sizes


class Scalar:
    """As a number of NumPy 2: it has a device, which is text."""

    device = "cpu"

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __eq__(self, other: object) -> bool:
        return self.value == other

    __hash__ = None  # type: ignore[assignment]


class Whole(Scalar):
    """A whole number of it."""


@pytest.fixture
def numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("numpy")
    module.float64, module.int64 = Scalar, Whole
    monkeypatch.setitem(sys.modules, "numpy", module)


@pytest.mark.usefixtures("numpy")
def test_numbers_of_numpy_are_read() -> None:
    looks = Looks(torch)
    assert looks.number(Scalar(0.1)) == 0.1 and looks.number(Whole(3)) == 3.0
    assert (whole(Whole(2)), whole(2), whole(Scalar(2.5)), whole("2")) == (2, 2, None, None)
    assert looks.number(Scalar(float("nan"))) is None


def test_what_only_behaves_like_a_number_is_not_asked() -> None:
    class Asked:
        device = "cpu"

        def __float__(self) -> float:
            raise AssertionError

        __int__ = __index__ = __bool__ = __float__

    assert Looks(torch).number(Asked()) is None and whole(Asked()) is None
    # A field that is no JSON is null, and the others of its line stay.
    assert json.loads(dumps({"workers": Asked(), "steps": 3})) == {"workers": None, "steps": 3}


def test_groups_that_are_not_as_torch_makes_them_are_left_out() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    good = optimizer.param_groups[0]
    optimizer.param_groups += [None, {"lr": 1.0}, {"params": iter(())}]  # type: ignore[list-item]
    assert groups_of(optimizer) == [good]
    sizes = Sizes(Looks(torch))
    sizes.optimizers([optimizer])
    assert sizes.counts() == {"parameters:SGD": 2}
    optimizer.param_groups = tuple(optimizer.param_groups)  # type: ignore[assignment]
    assert groups_of(optimizer) == []


@pytest.mark.usefixtures("numpy")
def test_settings_of_a_loader_are_plain_numbers() -> None:
    class Named(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise AssertionError

    class Data(TensorDataset, metaclass=Named):
        pass

    loader = DataLoader(Data(torch.zeros(8, 1)), batch_size=4)
    iterator: Any = iter(loader)
    iterator._num_workers = Whole(0)
    found, _ = Places(lambda _: False).loader_of(iterator)
    assert (found["workers"], found["batch_size"], found["dataset"]) == (0, 4, "Data")


SCRIPT = """
import sys, types
from common import *

class Scalar:
    device = "cpu"
    def __init__(self, value): self.value = value
    def __float__(self): return self.value
    def __getattr__(self, name): raise RuntimeError(name)
    def __rmul__(self, other): return other * self.value
    def __bool__(self): raise RuntimeError("bool")

class Odd(torch.optim.Optimizer):
    def __init__(self, parameters): super().__init__(parameters, {"lr": Scalar(0.1), "foreach": Scalar(1.0)})
    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group.get("params", ()): parameter -= parameter.grad * group["lr"].value

model = net()
optimizer = Odd(model.parameters())
optimizer.param_groups.append({"lr": Scalar(0.1)})
for step in range(40):
    optimizer.zero_grad = lambda: [p.__setattr__("grad", None) for p in model.parameters()]
    optimizer.zero_grad(); model(torch.randn(4, 8)).sum().backward(); optimizer.step()
print("STEPS", step + 1)
"""


@pytest.mark.long
def test_a_learning_rate_of_any_class_costs_the_learning_rate_only(tmp_path: Path) -> None:
    ran = run(tmp_path, "-c", SCRIPT)
    assert ran.status == 0 and ran.word("STEPS") == "40", ran.errors
    assert sum(window["steps"] for window in ran.of("window")) == 40
    assert not ran.marks("the observation ended")
    assert all(window["lr"] is None for window in ran.of("window"))
    assert ran.of("run")[-1]["parameters"] > 0
