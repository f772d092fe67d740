"""What is measured before the first step draws random numbers without a trace, also Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train_help import EVERY_STEP, Trainer, Written, resumed

from ndd_engine.train.checkpoint_state import kept_random, random_state, restore_random_state

CPU = torch.device("cpu")

SOURCE = """
import random
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
    def forward(self, x):
        return self.linear(x + random.random() / 10)

def join(items):
    x, y = default_collate(items)
    return x + random.random() / 10, y

def factory(settings):
    torch.manual_seed(0)
    x = torch.rand(160, 3)
    return dict(model=Net(), train_data=TensorDataset(x, x.sum(1, keepdim=True)), collate=join,
                loss=lambda output, batch: (output - batch[1]).square().mean())
"""


class Numbers:
    """A stand-in for numpy.random: a generator with its own state, unseeded at first."""

    def __init__(self) -> None:
        self.generator = random.Random()

    def seed(self, value: int) -> None:
        self.generator.seed(value)

    def get_state(self) -> tuple[str, Any, int, int, float]:
        _, internal, _ = self.generator.getstate()
        return "MT19937", SimpleNamespace(tolist=lambda: list(internal)), 0, 0, 0.0

    def set_state(self, state: tuple[str, list[int], int, int, float]) -> None:
        self.generator.setstate((3, tuple(state[1]), None))

    def rand(self) -> float:
        return self.generator.random()


@pytest.fixture
def numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Numbers]:
    """NumPy as a module that can be imported, but is not yet."""
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    numbers = Numbers()
    monkeypatch.setattr(
        "ndd_engine.train.checkpoint_state.importlib.import_module",
        lambda name: use(name, numbers, monkeypatch),
    )
    yield numbers


def use(name: str, numbers: Numbers, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = SimpleNamespace(random=numbers)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_numbers_of_all_generators_leave_no_trace(numpy: Numbers, monkeypatch: pytest.MonkeyPatch) -> None:
    use("numpy", numpy, monkeypatch)
    numpy.seed(4)
    before = random_state(CPU)
    with kept_random(CPU):
        first = torch.rand(1), random.random(), numpy.rand()
    assert str(random_state(CPU)) == str(before)
    assert (torch.rand(1), random.random(), numpy.rand()) == first


def test_a_numpy_that_the_test_step_imports_is_seeded_as_the_run(
    numpy: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    for _ in range(2):
        monkeypatch.delitem(sys.modules, "numpy", raising=False)
        torch.manual_seed(8)
        with kept_random(CPU):
            use("numpy", numpy, monkeypatch)
            numpy.generator = random.Random()  # from the system's entropy, as at NumPy's import
            numpy.rand()
        drawn.append(numpy.rand())
    assert drawn[0] == drawn[1]


def test_a_resumed_run_imports_numpy_if_the_first_one_had_it(
    numpy: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("numpy", numpy, monkeypatch)
    numpy.seed(3)
    state = random_state(CPU)
    expected = numpy.rand()
    monkeypatch.delitem(sys.modules, "numpy")
    numpy.seed(9)
    restore_random_state(state, CPU)
    assert "numpy" in sys.modules and numpy.rand() == expected


def test_a_run_whose_data_and_model_draw_pythons_numbers_resumes_exactly(
    trainer: Trainer, written: Written
) -> None:
    sets = (*written(SOURCE), *EVERY_STEP, "run.threads=1", "batch.micro=4", "evaluate.at_end=false")
    assert len(resumed(trainer, sets, 12, 60).losses) == 60
