"""Runs of a user's own workload: what its model keeps, and what its data does wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.states import equal
from tests.tiers import few
from tests.waiting import LIMIT_S
from train_help import EVERY_STEP, Trainer, Written, resumed

SOURCE = """
import math
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))
        self.n = 0
    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1  # replaced, not changed in place
            self.n += 1
        return self.linear(x) * (1 + self.calls / 100 + self.n / 100)
    def get_extra_state(self):
        return {"n": self.n}
    def set_extra_state(self, state):
        self.n = state["n"]

class Data(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        x = torch.sin(torch.arange(4.0) * index)
        return x, x.sum()

def loss(output, batch):
    return nn.functional.mse_loss(output.squeeze(-1), batch[1])
"""
FACTORY = "\ndef factory(settings):\n    return dict(model=Net(), train_data=Data(), loss=loss)\n"
SETS = (
    "batch.micro=4",
    "batch.sequence=4",
    "run.threads=1",
    "evaluate.every_epochs=0",
    "checkpoint.every_steps=1",
)


@pytest.fixture
def own(written: Written) -> Written:
    """own(source) writes a module with this source below SOURCE, and returns the settings of a run with it."""
    return lambda source: (*written(SOURCE + source + FACTORY), *SETS)


def test_a_sampler_that_fills_no_step_is_a_usage_error(trainer: Trainer, own: Written) -> None:
    factory = """
def made(settings):
    data = torch.utils.data.DataLoader(Data(), batch_size=4, sampler=range(8), drop_last=True)
    return dict(model=Net(), train_data=data, eval_data=Data(), loss=loss)
"""
    name, *sets = own(factory)
    end = trainer.train(name.replace(":factory", ":made"), *sets, "run.epochs=1", "batch.accumulation=3").end
    assert (end.status, end.exit_status) == ("failed", 2)
    assert "batch.micro" in end.reason and "batch.accumulation" in end.reason


@pytest.mark.long
def test_a_causal_mask_and_extra_states_are_saved_and_resume_bit_for_bit(
    trainer: Trainer, own: Written
) -> None:
    result = resumed(trainer, (*own(""), *EVERY_STEP), 3, 6)
    state = result.state(6)["model"]
    assert bool(torch.isinf(state["mask"]).any())
    # The test step before the first one leaves no trace, in a new run or in a resumed one.
    assert (float(state["calls"]), state["_extra_state"]) == (6.0, {"n": 6})


def test_a_buffer_that_was_finite_has_to_stay_finite(trainer: Trainer, own: Written) -> None:
    source = "class Net(Net):\n    def forward(self, x):\n        self.seen.fill_(math.inf)\n"
    source += "        return super().forward(x)\n"
    end = trainer.train(*own(source), "run.max_steps=3").end
    assert (end.status, end.checkpoint) == ("failed", None) and "seen" in end.reason


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("get_extra_state = lambda self: object()", "_extra_state"),
        ("set_extra_state = nn.Module.set_extra_state", "get_extra_state"),
        ("set_extra_state = lambda self, state: {}['unset']", "'unset'"),
        ("def __init__(self):\n        super().__init__()\n"
         "        self.register_buffer('wide', torch.ones(1).expand(8))", "wide"),
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_resumed_is_refused_before_training(
    trainer: Trainer, own: Written, source: str, named: str
) -> None:
    end = trainer.train(*own(f"class Net(Net):\n    {source}\n"), "run.max_steps=3").end
    assert (end.status, end.step, end.exit_status) == ("failed", 0, 2)
    assert named in end.reason


def test_a_state_that_changes_its_layout_is_not_saved(trainer: Trainer, own: Written) -> None:
    source = """
class Net(Net):
    def forward(self, x):
        self.late = nn.Parameter(torch.ones(1))
        return super().forward(x)
"""
    end = trainer.train(*own(source), "run.max_steps=3").end
    assert (end.status, end.checkpoint) == ("failed", None) and "late" in end.reason


def test_an_evaluation_leaves_no_trace_in_pythons_random_numbers(trainer: Trainer, own: Written) -> None:
    source = "import random\nclass Net(Net):\n    def forward(self, x):\n"
    source += "        return super().forward(x) * random.uniform(0.5, 1.5)\n"
    sets = own(source)
    without = trainer.train(*sets, "run.max_steps=3", "evaluate.at_end=false")
    each = trainer.train(*sets, "run.max_steps=3", "evaluate.every_steps=1")
    for part in ("model", "random"):
        assert equal(without.state(3)[part], each.state(3)[part])


LATE = """
import sys

class Data(Data):
    def __getitem__(self, index):
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name not in ("_train", "_worker_loop"):
            frame = frame.f_back
        if frame is not None:
            next(iter(()))
        return super().__getitem__(index)
"""
FEWER = """
class Data(Data):
    def __getitems__(self, indices):
        return [self[0]]
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_in_an_item_does_not_end_the_epoch(
    trainer: Trainer, own: Written, workers: int
) -> None:
    end = trainer.train(*own(LATE), "run.max_steps=3", f"loader.workers={workers}").end
    assert end.status == "failed" and "StopIteration" in end.reason


def test_too_few_items_at_once_are_refused(trainer: Trainer, own: Written) -> None:
    end = trainer.train(*own(FEWER), "run.max_steps=3").end
    assert end.status == "failed" and "Data.__getitems__" in end.reason


FIRST_STEP = """
import sys
from ndd_console.__main__ import status_of
status = status_of(["--runs", sys.argv[1], "train", "--headless", "--max-steps", "2", "--set", "workload.size=tiny"])
late = [name for name in ("torch._inductor", "torch._dynamo") if name in sys.modules]
print("found", status, late)
"""


@pytest.mark.long
@pytest.mark.parametrize("optimizer", few(["adamw", "sgd"], 1))
def test_a_run_that_compiles_nothing_does_not_import_the_compiler(tmp_path: Path, optimizer: str) -> None:
    """Its import takes over a second, which optimizers, dispatch modes and determinism would add to every start."""
    code = FIRST_STEP.replace(
        '"workload.size=tiny"', f'"workload.size=tiny", "--set", "optimizer.name={optimizer}"'
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.strip().splitlines()[-1] == "found 0 []", done.stderr
