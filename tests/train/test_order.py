"""The order of a user's own data: the same as a plain PyTorch loop's, and resumed where it was."""

# ruff: noqa: E501  one loader or fault per line
from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.states import equal
from tests.tiers import few
from train_help import EVERY_STEP, QUIET, Result, Trainer, Written, resumed, training_state

from ndd_engine.record.events import MarkEvent

SOURCE = '''
ITEMS = 50

class Data(Dataset):
    def __len__(self):
        return ITEMS
    def __getitem__(self, index):
        x = torch.sin(torch.arange(1.0, 5.0) * (index + 1))
        return x, x.sum()

class Endless(Sampler):
    """Indices without an end; its state is that of its generator and its place in the present order."""
    def __init__(self, seed=3):
        self.generator = torch.Generator().manual_seed(seed)
        self.order, self.at = [], 0
    def __iter__(self):
        while True:
            if self.at >= len(self.order):
                self.order, self.at = torch.randperm(ITEMS, generator=self.generator).tolist(), 0
            self.at += 1
            yield self.order[self.at - 1]
    def state_dict(self):
        return {"generator": self.generator.get_state(), "order": self.order, "at": self.at}
    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.order, self.at = state["order"], state["at"]

class Buckets(Sampler):
    """Batches of neighbours of different sizes, in a random order; draws from the global generators."""
    def __init__(self):
        self.batches = [list(range(at, at + size)) for at, size in zip(range(0, 48, 6), itertools.cycle((3, 6, 5)))]
        self.left = None
    def __len__(self):
        return len(self.batches)
    def __iter__(self):
        if not self.left:
            self.left = random.sample(range(len(self.batches)), len(self.batches))
        while self.left:
            yield self.batches[self.left.pop(0)]
    def state_dict(self):
        return {"left": self.left}
    def load_state_dict(self, state):
        self.left = state["left"]

class Items(IterableDataset):
    """Its length is known to nobody; random numbers are part of the items."""
    def __init__(self, count=50, noise=False, shard=True):
        self.count, self.at, self.noise, self.shard = count, 0, noise, shard
    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None and self.shard else (0, 1)
        while self.at < self.count:
            at = self.at
            self.at += 1
            if at % step == first:
                x = torch.sin(torch.arange(1.0, 5.0) * (at + 1))
                if self.noise:
                    x = x + torch.rand(4) * random.random()
                yield x, x.sum()
        self.at = 0
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

class Forgetful(Items):
    """The same without a state."""
    state_dict = load_state_dict = None

def loss(output, batch):
    return nn.functional.mse_loss(output.squeeze(-1), batch[1])

def parts(**more):
    torch.manual_seed(5)
    return dict(model=nn.Sequential(nn.Linear(4, 1)), train_data=Data(), eval_data=Data(), loss=loss, **more)
'''
SETS = (
    "batch.micro=4", "batch.sequence=4", "run.threads=1", "run.device=cpu", "optimizer.name=sgd", "optimizer.lr=0.05",
    "optimizer.weight_decay=0", *EVERY_STEP, *QUIET,
)  # fmt: skip
Sets = Callable[..., tuple[str, ...]]


@pytest.fixture
def ordered(written: Written) -> Sets:
    """ordered("parts(shuffle=False)") writes a module whose factory returns that, and returns a run's settings."""
    return lambda result, source="": (
        *written(f"{SOURCE}{source}\ndef factory(settings):\n    return {result}\n"),
        *SETS,
    )


@pytest.fixture
def refused(trainer: Trainer, ordered: Sets) -> Callable[..., str]:
    """refused(result, *sets, source="") trains, and returns the reason why that failed."""

    def train(result: str, *sets: str, source: str = "") -> str:
        end = trainer.train(*ordered(result, source), *sets).end
        assert end.status == "failed" and "\n" not in end.reason
        return end.reason

    return train


def plain_losses(sets: tuple[str, ...], steps: int) -> list[float]:
    """The losses of a plain loop over the DataLoader that the factory returns, pass after pass."""
    module = importlib.import_module(sets[0].partition("=")[2].partition(":")[0])
    made: Any = module.factory(SimpleNamespace())
    optimizer = torch.optim.SGD(made["model"].parameters(), lr=0.05)
    found: list[float] = []
    while len(found) < steps:
        for batch in made["train_data"]:
            value = made["loss"](made["model"](batch[0]), batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(value.detach()))
            if len(found) == steps:
                break
    return found


# Orders that a DataLoader expresses, with the same losses as a plain loop over it.
LOADERS = {
    "in order": "DataLoader(Data(), batch_size=4)",
    "in order, without the last": "DataLoader(Data(), batch_size=4, drop_last=True)",
    "shuffled with a generator": "DataLoader(Data(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))",
    "weighted": "DataLoader(Data(), batch_size=4, sampler=WeightedRandomSampler(range(1, 51), 30, generator=torch.Generator().manual_seed(2)))",
    "with replacement": "DataLoader(Data(), batch_size=4, sampler=RandomSampler(range(50), True, 22, generator=torch.Generator().manual_seed(2)))",
    "a list of batches": "DataLoader(Data(), batch_sampler=[[0, 1, 2], [7], [3, 3, 4, 5]])",
    "endless": "DataLoader(Data(), batch_size=4, sampler=Endless())",
    "a stream": "DataLoader(Items(), batch_size=4)",
    "a stream without the last": "DataLoader(Items(), batch_size=4, drop_last=True)",
    "a stream of batches": "DataLoader(DataLoader(Items(48), batch_size=4, drop_last=True).dataset, batch_size=4)",
}
# These are only known to be resumed: a plain loop draws their random numbers from the model's generators.
OTHERS = {
    "shuffle=False": "parts(shuffle=False)",
    "buckets": "parts(batch_sampler=Buckets())",
    "weighted without a generator": "parts(sampler=WeightedRandomSampler(range(1, 51), 30))",
    "endless sampler as a part": "parts(sampler=Endless())",
    "a noisy stream": "parts() | dict(train_data=Items(noise=True))",
    "shuffled, with a smaller last batch": "parts() | dict(train_data=DataLoader(Data(), batch_size=4, shuffle=True))",
}
MADE = {name: f"parts() | dict(train_data={text})" for name, text in LOADERS.items()}
# One of each kind, in `make test`.
PROMISED = ("shuffled with a generator", "buckets", "a noisy stream", "endless sampler as a part")
STEPS = 28


def losses(result: Result) -> list[float]:
    return [loss for _, loss in sorted(result.losses.items())]


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_trains_as_a_plain_loop_over_it(trainer: Trainer, ordered: Sets, name: str) -> None:
    sets = ordered(MADE[name])
    result = trainer.train(*sets, f"run.max_steps={STEPS}")
    assert losses(result) == pytest.approx(plain_losses(sets, STEPS), rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        *few([name for name in (*MADE, *OTHERS) if name not in PROMISED], 1),
        *(pytest.param(name, marks=pytest.mark.promise) for name in PROMISED),
    ],
)
def test_a_resumed_run_sees_the_data_that_it_would_have_seen(
    trainer: Trainer, ordered: Sets, name: str
) -> None:
    resumed(trainer, ordered({**MADE, **OTHERS}[name]), 7, 14, STEPS)


@pytest.mark.long
def test_a_stream_read_by_workers_resumes_bit_for_bit(trainer: Trainer, ordered: Sets) -> None:
    sets = ordered("parts() | dict(train_data=DataLoader(Items(noise=True), batch_size=4))")
    resumed(trainer, (*sets, "loader.workers=2"), 3, 16)


# The methods of a sampler, and what the message names.
FAULTS = {
    "raises": ("def __iter__(self):\n        yield from (1, 2, 3, 4, 5)\n        raise ValueError('lost')", "lost"),
    "too large": ("def __iter__(self):\n        return iter([1, 2, 3, 99])", "99"),
    "negative": ("def __iter__(self):\n        return iter([1, -2, 3, 4])", "-2"),
    "no number": ("def __iter__(self):\n        return iter(['a', 'b', 'c', 'd'])", "'a'"),
    "too few": ("def __iter__(self):\n        return iter([1, 2])", "train_data"),
    "fewer than len()": ("def __len__(self):\n        return 40\n    def __iter__(self):\n        return iter(range(20))", "len()"),
    "endless, with a length": ("def __len__(self):\n        return 8\n    def __iter__(self):\n        return itertools.cycle(range(20))", "__len__"),
    "once": ("def __init__(self):\n        self.it = iter(range(20))\n    def __iter__(self):\n        return self.it", "pass 2"),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "workers"), [*((fault, 0) for fault in FAULTS), ("raises", 1)])
def test_a_fault_of_a_sampler_is_one_clear_message(
    refused: Callable[..., str], fault: str, workers: int
) -> None:
    body, named = FAULTS[fault]
    source = f"\nclass Own(Sampler):\n    {body}\n"
    assert named in refused(
        "parts(sampler=Own())", "run.max_steps=12", f"loader.workers={workers}", source=source
    )


ODD = "\nclass Odd(Items):\n    def state_dict(self):\n        return {'file': object()}\n"


@pytest.mark.parametrize(
    ("result", "sets", "named"),
    [
        ("parts(batch_sampler=[[1, 2], []])", (), "empty"),
        ("parts(batch_sampler=[3, 4])", (), "yielded 3"),
        ("parts() | dict(train_data=Items(shard=False))", ("loader.workers=2",), "workers 0 and 1"),
        # A state that no checkpoint can contain.
        ("parts() | dict(train_data=Odd())", (), "position.stream.file"),
    ],
)
def test_an_order_that_would_be_wrong_or_lost_is_refused(
    refused: Callable[..., str], result: str, sets: tuple[str, ...], named: str
) -> None:
    assert named in refused(result, "run.max_steps=4", *sets, source=ODD)


@pytest.mark.long
@pytest.mark.parametrize("result", few(["parts(sampler=Own())", "parts() | dict(train_data=Forgetful())"], 1))
def test_without_a_state_the_run_says_before_training_that_a_pass_starts_anew(
    trainer: Trainer, ordered: Sets, result: str
) -> None:
    source = "\nclass Own(Sampler):\n    def __iter__(self):\n        return iter(range(50))\n"
    half = trainer.train(*ordered(result, source), "run.max_steps=15")
    rest = trainer.train("run.max_steps=30", resume=half)
    assert any(mark.step == 0 and "state_dict" in mark.text for mark in half.marks("note"))
    assert rest.end.status == "done"
    # A pass has 12 steps, and the second one is begun again after 3 of its steps.
    assert rest.snapshot.epoch == 2


@pytest.mark.long
def test_a_run_over_a_stream_of_unknown_length_ends_after_its_passes(trainer: Trainer, ordered: Sets) -> None:
    sets = ordered("parts() | dict(train_data=DataLoader(Items(50), batch_size=4), eval_data=Items(10))")
    more = ("evaluate.every_epochs=1", "checkpoint.every_epochs=1")
    whole = trainer.train(*sets, "run.epochs=3", *more)
    assert (whole.end.status, whole.end.step) == ("done", 39)
    run = whole.identity
    assert (run.total_steps, run.steps_per_epoch, run.items_per_epoch, run.epochs) == (0, 0, 0, 3)
    for kind in ("epoch", "evaluation", "checkpoint"):
        assert [mark.step for mark in whole.marks(kind)] == [13, 26, 39]
    assert whole.snapshot.items == 150  # the last batch of a pass is smaller
    assert whole.snapshot.left.seconds is None and whole.snapshot.epoch_s is None
    rest = trainer.train(resume=whole, from_step=13)
    assert len(losses(rest)) == 39 and rest.identity.resumed_epoch == 1


def test_accumulation_leaves_out_an_incomplete_last_step_of_a_pass(trainer: Trainer, ordered: Sets) -> None:
    sets = (*ordered("parts() | dict(train_data=Items(50), eval_data=Items(10))"), "batch.accumulation=5")
    whole = trainer.train(*sets, "run.max_steps=8")
    assert [mark.step for mark in whole.marks("epoch")] == [2, 4, 6]


@pytest.mark.parametrize("data", ["Items(50)", "DataLoader(Data(), batch_size=4, sampler=Endless())"])
def test_evaluations_of_a_stream_or_a_sampler_see_the_same_items_each_time(
    trainer: Trainer, ordered: Sets, data: str
) -> None:
    sets = ordered(f"parts() | dict(eval_data={data})")
    frozen = ("optimizer.lr=1e-30", "evaluate.every_steps=2", "evaluate.batches=3")
    result = trainer.train(*sets, *frozen, "run.max_steps=6")
    assert len({mark.data["metrics"]["loss"] for mark in result.marks("evaluation")}) == 1


@pytest.mark.parametrize(
    ("result", "before", "after", "named"),
    [
        ("parts()", "loader.shuffle=false", "loader.shuffle=true", "the order"),
        ("parts()", "loader.shuffle=true", "loader.shuffle=false", "the order"),
        ("parts() | dict(train_data=Items())", "loader.workers=0", "loader.workers=1", "loader.workers = 0"),
        ("parts(sampler=Endless())", "batch.accumulation=2", "batch.micro=2", "batch.micro = 4"),
    ],
)
def test_what_would_change_the_order_is_refused_on_a_resume(
    trainer: Trainer, ordered: Sets, result: str, before: str, after: str, named: str
) -> None:
    half = trainer.train(*ordered(result), before, "run.max_steps=3")
    accumulation = "batch.accumulation=4" if "micro" in after else "batch.accumulation=1"
    end = trainer.train("run.max_steps=6", after, accumulation, resume=half).end
    assert end.status == "failed" and named in end.reason, end.reason


def test_a_worker_init_fn_runs_in_each_worker(trainer: Trainer, ordered: Sets, tmp_path: Path) -> None:
    source = f"\ndef begin(worker):\n    open(f'{tmp_path}/worker-{{worker}}', 'w').close()\n"
    data = "DataLoader(Data(), batch_size=4, num_workers=2, worker_init_fn=begin)"
    sets = (*ordered(f"parts() | dict(train_data={data})", source), "loader.workers=2", "run.max_steps=2")
    end = trainer.train(*sets).end
    assert end.status == "done"
    assert sorted(path.name for path in tmp_path.glob("worker-*")) == ["worker-0", "worker-1"]


def test_a_stateful_loader_of_torchdata_is_read_like_torchs(trainer: Trainer, ordered: Sets) -> None:
    if not os.environ.get("REQUIRE_EXTRAS"):
        pytest.importorskip("torchdata")
    source = "\nfrom torchdata.stateful_dataloader import StatefulDataLoader\n"
    sets = ordered("parts() | dict(train_data=StatefulDataLoader(Items(), batch_size=4))", source)
    whole = trainer.train(*sets, "run.max_steps=20")
    assert losses(whole) == pytest.approx(plain_losses(sets, 20), rel=1e-6)
    resumed(trainer, sets, 7, 20)


def test_a_builtin_workload_can_keep_the_order_of_its_data(trainer: Trainer) -> None:
    result = trainer.train(*trainer.ndd, "run.max_steps=5", "loader.shuffle=false", "run.seed=1")
    other = trainer.train(*trainer.ndd, "run.max_steps=5", "run.seed=1")
    assert result.settings["loader.shuffle"].in_effect
    assert not equal(training_state(result.state(5)), training_state(other.state(5)))


def test_a_stream_has_findings_and_costs_of_its_items(trainer: Trainer, ordered: Sets) -> None:
    result = trainer.train(*ordered("parts() | dict(train_data=Items())"), "run.max_steps=20")
    loader = result.snapshot.loader
    assert loader is not None and loader.stream and loader.item_ns is not None and loader.probed == 4


def test_items_of_a_stream_may_be_whole_batches(
    trainer: Trainer, ordered: Sets, refused: Callable[..., str]
) -> None:
    source = """
class Whole(IterableDataset):
    def __iter__(self):
        for at in range(0, 40, 4):
            x = torch.stack([torch.sin(torch.arange(1.0, 5.0) * (at + i + 1)) for i in range(4)])
            yield x, x.sum(1)
"""
    data = "parts() | dict(train_data=DataLoader(Whole(), batch_size=None))"
    sets = ordered(data, source)
    result = trainer.train(*sets, "run.max_steps=20")
    assert losses(result) == pytest.approx(plain_losses(sets, 20), rel=1e-6)
    assert "batch.micro" in refused(data, "run.max_steps=20", "batch.micro=8", source=source)


def test_a_shuffled_evaluation_loader_is_used(trainer: Trainer, ordered: Sets) -> None:
    values = []
    for shuffle in (False, True):
        sets = ordered(f"parts() | dict(eval_data=DataLoader(Data(), batch_size=4, shuffle={shuffle}))")
        result = trainer.train(*sets, "run.max_steps=2", "evaluate.at_end=true", "evaluate.batches=2")
        values.append(result.marks("evaluation")[-1].data["metrics"]["loss"])
    assert values[0] != values[1]


def test_passes_of_a_known_length_are_epochs(trainer: Trainer, ordered: Sets) -> None:
    sets = ordered("parts() | dict(train_data=DataLoader(Data(), batch_size=4))")
    result = trainer.train(*sets, "run.epochs=2", "evaluate.every_epochs=1", "checkpoint.every_epochs=1")
    assert [mark.step for mark in result.marks("epoch")] == [13, 26]
    assert [mark.step for mark in result.marks("evaluation")] == [13, 26] == result.checkpoints
    run = result.identity
    assert (run.steps_per_epoch, run.total_steps, run.items_per_epoch, run.epochs) == (13, 26, 50, 2)


@pytest.mark.parametrize("order", [
    "parts()",
    "parts(sampler=RandomSampler(range(48)))",
    "parts() | dict(train_data=DataLoader(Data(), batch_size=4, drop_last=True))",
])  # fmt: skip
def test_the_end_of_an_epoch_is_reported_before_its_evaluation_and_its_checkpoint(
    trainer: Trainer, ordered: Sets, order: str
) -> None:
    sets = (*ordered(order), "checkpoint.every_epochs=1", "evaluate.every_steps=4")
    result = trainer.train(*sets, "run.epochs=2")
    marks = [event for event in result.events if isinstance(event, MarkEvent)]
    found = [(mark.step, mark.kind) for mark in marks if mark.kind in ("epoch", "evaluation", "checkpoint")]
    assert found == [
        (4, "evaluation"), (8, "evaluation"), (12, "epoch"), (12, "evaluation"), (12, "checkpoint"),
        (16, "evaluation"), (20, "evaluation"), (24, "epoch"), (24, "evaluation"), (24, "checkpoint"),
    ]  # fmt: skip
