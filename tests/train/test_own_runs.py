"""Runs of a user's own workload: its optimizers and steps, what its model keeps, mistakes, the examples of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import few
from tests.waiting import LIMIT_S
from train_help import EVERY_STEP, NDD, Trainer, Written, resumed

from ndd_engine.config import read
from ndd_engine.errors import UsageError
from ndd_engine.predict.fakes import traced
from ndd_engine.train.step.optimizers import decay_groups
from ndd_engine.workloads.factory_data import prepare

START = """
from torch.optim import *
from torch.optim.lr_scheduler import *

def loss(output, batch):
    return nn.functional.mse_loss(output.squeeze(-1), batch[1])

"""


# Optimizers, schedulers and steps

WORDS = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(9, 4, sparse=True), nn.LayerNorm(4), nn.Linear(4, 1)
    def forward(self, x):
        return self.head(self.norm(self.table(x)))

def parts(model, **more):
    x = torch.arange(40) % 9
    return dict(model=model, train_data=TensorDataset(x, x.sin()), loss=loss, **more)

def factory(settings):
    model = Net()
"""
DENSE = "model.table.sparse = False\n"


@pytest.fixture
def words(written: Written) -> Written:
    """words(body) writes a factory with this body, in which `model` is the model."""

    def sets(body: str) -> tuple[str, ...]:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        more = ("batch.micro=4", "run.threads=1", "checkpoint.every_epochs=0")
        return (*written(START + WORDS + lines), *more, *EVERY_STEP)

    return sets


SGD = f"{DENSE}sgd = SGD(model.parameters(), 0.1, momentum=0.9)\n"
SCHEDULERS = (
    "OneCycleLR(sgd, 0.05, total_steps=30)",
    "SequentialLR(sgd, [LinearLR(sgd, 0.1, 1.0, 4), ExponentialLR(sgd, 0.9)], [4])",
    "LambdaLR(sgd, lambda step: 1 / (1 + step))",
    "[StepLR(sgd, 2, 0.5)]",
)


@pytest.mark.long
@pytest.mark.parametrize(
    "scheduler", [pytest.param(SCHEDULERS[0], marks=pytest.mark.promise), *few(SCHEDULERS[1:], 1)]
)
def test_schedulers_step_and_resume(trainer: Trainer, words: Written, scheduler: str) -> None:
    sets = words(f"{SGD}return parts(model, optimizer=sgd, scheduler={scheduler})")
    result = resumed(trainer, sets, 11, 23)
    parameter = torch.nn.Parameter(torch.zeros(1))
    scope: dict[str, Any] = {"sgd": torch.optim.SGD([parameter], 0.1, momentum=0.9)}
    made = eval(scheduler, {**vars(torch.optim.lr_scheduler), **scope})
    expected = []
    for _ in range(23):
        scope["sgd"].step()
        (made[0] if isinstance(made, list) else made).step()
        expected.append(round(scope["sgd"].param_groups[0]["lr"], 6))
    assert result.rates == expected


@pytest.mark.long
def test_a_scheduler_of_epochs(trainer: Trainer, words: Written) -> None:
    more = 'optimizer=sgd, scheduler=StepLR(sgd, 1, 0.5), scheduler_every="epoch"'
    result = resumed(trainer, words(f"{SGD}return parts(model, {more})"), 11, 23)
    assert result.rates == [0.1] * 8 + [0.05] * 9 + [0.025] * 6


@pytest.mark.long
def test_several_optimizers_all_step(trainer: Trainer, words: Written) -> None:
    body = (
        "rest = [*model.norm.parameters(), *model.head.parameters()]\n"
        "both = {'sparse': SparseAdam(model.table.parameters(), 0.01), 'dense': NAdam(rest, 0.02)}\n"
    )
    sets = (*words(f"{body}return parts(model, optimizer=both)"), "schedule.warmup_steps=5")
    result = resumed(trainer, sets, 11, 23)
    assert result.state(23)["optimizer"].keys() == {"sparse", "dense"}
    assert result.rates[:6] == [0.002, 0.004, 0.006, 0.008, 0.01, 0.01]
    assert result.state(23)["optimizer"]["dense"]["param_groups"][0]["lr"] == 0.02
    assert min(result.losses.values()) < 0.8 * result.losses[1]


def test_lr_may_know_the_number_of_steps(trainer: Trainer, words: Written) -> None:
    made = f"{DENSE}return parts(model, lr=lambda {{}})"
    sets = words(made.format("step, total: 0.1 * (1 - step / total)"))
    assert trainer.train(*sets, "run.max_steps=4").rates == [0.1, 0.075, 0.05, 0.025]
    wrong = trainer.train(*words(made.format("step: -step")), "run.max_steps=4").end
    assert wrong.status == "failed" and "lr(1)" in wrong.reason


@pytest.mark.long
def test_a_changed_option_takes_effect_on_resume_unless_a_scheduler_continues(
    trainer: Trainer, words: Written
) -> None:
    body = SGD.replace("0.1", "settings.optimizer.lr")
    first = trainer.train(*words(f"{body}return parts(model, optimizer=sgd)"), "run.max_steps=3")
    again = trainer.train("run.max_steps=6", "optimizer.lr=0.5", resume=first)
    assert again.rates[-3:] == [0.5] * 3
    sets = words(f"{body}return parts(model, optimizer=sgd, scheduler=StepLR(sgd, 2))")
    first = trainer.train(*sets, "run.max_steps=3")
    refused = trainer.train("run.max_steps=6", "optimizer.lr=0.5", resume=first).end
    assert refused.status == "failed" and "initial_lr" in refused.reason


def test_decay_spares_biases_and_norms(words: Written) -> None:
    config = read(None, [*words(f"{DENSE}return parts(model)"), "run.max_steps=3"]).resolve()
    decayed, spared = decay_groups(prepare(config).model)
    assert [tuple(item.shape) for item in decayed["params"]] == [(9, 4), (1, 4)]
    assert [tuple(item.shape) for item in spared["params"]] == [(4,), (4,), (1,)]
    assert spared["weight_decay"] == 0
    assert "weight_decay" not in decayed


MIXED = """
def step(batch, train):
    with train.phase("forward"):
        value = loss(model(batch[0]), batch)
        kinds.append(model.head(torch.ones(1, 4)).dtype)
    train.backward(value)
    train.update()
    return value
kinds = []
return parts(model, step=step, on_step=lambda train: train.log("half", float(kinds[-1] == torch.float16)))
"""


@pytest.mark.long
def test_a_step_with_the_configured_optimizer_scales_its_loss(trainer: Trainer, words: Written) -> None:
    sets = (*words(DENSE + MIXED), "precision.amp=fp16", "clip.max_norm=1.0")
    result = resumed(trainer, sets, 11, 23)
    windows = [window for window in result.windows if window.steps]
    # Halved on overflow.
    assert {window.loss_scale for window in windows} <= {2.0**power for power in range(17)}
    assert any(window.grad_norm for window in windows)
    assert dict(result.snapshot.scalars)["half"][-1][1] == 1.0


STEP = f"""{DENSE}def step(batch, train):
    value = loss(train.model(batch[0]), batch)
    {{backward}}
    if train.step >= 2:
        {{update}}
    return value
return parts(model, step=step)
"""


@pytest.mark.parametrize(
    ("backward", "update", "amp", "refused"),
    [
        ("value.backward()", "train.optimizer.step()", "fp16", 'precision.amp = "fp16"'),
        ("train.backward(value)", "train.optimizer.step()", "fp16", "clip.max_norm = 0.5 is not used"),
        ("value.backward()", "train.update()", "bf16", ""),
        ("train.backward(value)", "train.update()", "fp16", ""),
    ],
)
def test_a_step_of_its_own_that_clips_or_scales_nothing_is_refused(
    words: Written, trainer: Trainer, backward: str, update: str, amp: str, refused: str
) -> None:
    source = STEP.format(backward=backward, update=update)
    sets = ("clip.max_norm=0.5", f"precision.amp={amp}", "run.epochs=2", "run.max_steps=18")
    result = trainer.train(*words(source), *sets)
    assert result.end.status == ("failed" if refused else "done"), result.end
    assert refused in result.end.reason
    if not refused:
        assert result.settings["clip.max_norm"].in_effect


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("step=lambda batch, train: None", "NoneType"),
        ("step=lambda batch, train: train.phase('walk').__enter__()", "'walk'"),
        ("step=lambda batch, train: train.update('x')", "'x'"),
        ("state=lambda batch: 0, forward=lambda model, batch, state: model(batch[0])", "state"),
    ],
)
def test_mistakes_in_a_step_are_named(trainer: Trainer, words: Written, body: str, named: str) -> None:
    end = trainer.train(*words(f"{DENSE}return parts(model, {body})"), "run.max_steps=3").end
    assert end.status == "failed" and named in end.reason


def test_a_step_cannot_be_traced_for_an_absent_gpu(words: Written) -> None:
    sets = words(f"{DENSE}return parts(model, step=lambda batch, train: 0.0)")
    config = read(None, [*sets, "run.max_steps=3"]).resolve()
    with pytest.raises(UsageError, match="own step"):
        traced(config, prepare(config), None)


# What the model keeps, and mistakes

KEEPS = """class Net(nn.Module):
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
"""
FACTORY = "\ndef factory(settings):\n    return dict(model=Net(), train_data=Data(), loss=loss)\n"


@pytest.fixture
def own(written: Written) -> Written:
    """own(source) writes a module with this source below KEEPS, and returns the settings of a run with it."""
    more = ("batch.micro=4", "batch.sequence=4", "run.threads=1", "evaluate.every_epochs=0")
    return lambda source: (*written(START + KEEPS + source + FACTORY), *more, "checkpoint.every_steps=1")


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


def test_a_causal_mask_and_extra_states_are_saved_and_resume_bit_for_bit(
    trainer: Trainer, own: Written
) -> None:
    result = resumed(trainer, (*own(""), *EVERY_STEP), 3, 6)
    state = result.state(6)["model"]
    assert bool(torch.isinf(state["mask"]).any())
    # The test step before the first one leaves no trace, in a new run or in a resumed one.
    assert (float(state["calls"]), state["_extra_state"]) == (6.0, {"n": 6})


# A statement of the forward pass, and what it is said of.
@pytest.mark.parametrize(
    ("statement", "named"),
    [("self.seen.fill_(math.inf)", "seen"), ("self.late = nn.Parameter(torch.ones(1))", "late")],
)
def test_a_state_that_becomes_infinite_or_changes_its_layout_is_not_saved(
    trainer: Trainer, own: Written, statement: str, named: str
) -> None:
    source = "class Net(Net):\n    def forward(self, x):\n        {}\n        return super().forward(x)\n"
    end = trainer.train(*own(source.format(statement)), "run.max_steps=3").end
    assert (end.status, end.checkpoint) == ("failed", None) and named in end.reason


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
sets = [word for each in sys.argv[2:] for word in ("--set", each)]
status = status_of(["--runs", sys.argv[1], "train", "--headless", "--max-steps", "2", *sets])
late = [name for name in ("torch._inductor", "torch._dynamo") if name in sys.modules]
print("found", status, late)
"""


@pytest.mark.long
@pytest.mark.parametrize("optimizer", few(["adamw", "sgd"], 1))
def test_a_run_that_compiles_nothing_does_not_import_the_compiler(tmp_path: Path, optimizer: str) -> None:
    """Its import takes over a second, which optimizers, dispatch modes and determinism would add to every start."""
    command = [sys.executable, "-c", FIRST_STEP, str(tmp_path), *NDD, f"optimizer.name={optimizer}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.strip().splitlines()[-1] == "found 0 []", done.stderr


# The examples of docs/own-model.md

DOCS = Path(__file__).parents[2] / "docs" / "own-model.md"
AROUND = """
from torch.optim.swa_utils import get_ema_multi_avg_fn

class Gpt(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 9))

class Generator(nn.Linear):
    def __init__(self):
        super().__init__(64, 2)

class Discriminator(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)
    def zero_state(self, batch):
        return self.head.weight.new_zeros(1, batch, 4)
    def forward(self, x, state):
        out, state = self.cell(x, state)
        return self.head(out).mean(dim=(1, 2)), state

def Tokens(settings):
    words = torch.arange(400).reshape(40, 10) % 9
    return TensorDataset(words[:, :-1], words[:, 1:])

def Images():
    return TensorDataset(torch.rand(40, 2))

def Series():
    x = torch.rand(40, 5, 3)
    return TensorDataset(x, x.sum(dim=(1, 2)))

def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())

def mean_square(output, batch):
    return nn.functional.mse_loss(output.flatten(), batch[1].flatten())

def real_or_fake(output, real):
    return nn.functional.binary_cross_entropy_with_logits(output, torch.full_like(output, float(real)))

def rate(step):
    return 1e-3 / (1 + step)
"""
WITHIN = {
    'parts["state"]': "model = Recurrent()\nparts = dict(model=model, train_data=Series(), loss=mean_square)",
    "AveragedModel": "net = nn.Linear(2, 2)\nx = torch.rand(40, 2)\n"
    "parts = dict(train_data=TensorDataset(x, x), loss=mean_square)",
}


def example(text: str) -> str:
    """The code block of the page that contains this text."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if text in block]
    return str(found)


@pytest.mark.parametrize("text", ["AdamW(groups", "def eval_step", *WITHIN])
@pytest.mark.long
def test_an_example_trains_and_resumes(trainer: Trainer, written: Written, text: str) -> None:
    code = example(text)
    if text in WITHIN:
        lines = "\n".join([WITHIN[text], *code.splitlines(), "return parts"])
        code = "def factory(settings):\n" + "".join(f"    {line}\n" for line in lines.splitlines())
    sets = (*written(AROUND + code), "batch.micro=4", *EVERY_STEP)
    assert resumed(trainer, sets, 5, 12).marks("evaluation")
