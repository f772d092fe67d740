"""A step has the gradient of its items, however they are divided into micro-batches."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_help import Trainer

from ndd_engine.config import Config, read
from ndd_engine.measure.phase_clock import PhaseClock, no_phase
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import MeanLoss
from ndd_engine.workloads.factory_data import prepare

CPU = torch.device("cpu")
NUMBERS = itertools.count()  # a module's name can be imported from one file only
DIVISIONS = ((8, 1), (4, 2), (2, 4), (1, 8))

OWN = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
    def forward(self, words):
        return self.head(self.embedding(words))

class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        length = (0 if index % 8 == 5 else 1 + index * 7 % 13)  # some have no word at all
        return torch.arange(1, 1 + length) % 29 + 1

def join(items):
    return pad_sequence(items, batch_first=True) if max(map(len, items)) else torch.zeros(len(items), 1).long()

def loss(output, words):
    # NaN for a batch without a word, as in torch
    return F.cross_entropy(output.flatten(0, 1), words.flatten(), ignore_index=0)

def factory(settings):
    parts = dict(model=Net(), train_data=Lines(), loss=loss, collate=join)
    if settings.option("weigh", True):
        parts["weight"] = lambda words: WEIGHT
    return parts
"""


def own_sets(folder: Path, weight: str = "(words != 0).sum()") -> tuple[str, ...]:
    """A workload of lines of 0 to 13 words, padded to the longest."""
    name = f"ragged_{next(NUMBERS)}"
    (folder / f"{name}.py").write_text(OWN.replace("WEIGHT", weight))
    return (
        f"workload.name={name}:factory",
        f'workload.path=["{folder}"]',
        "run.epochs=1",
        "batch.sequence=13",
    )


def builtin_sets(kind: str, folder: Path) -> tuple[str, ...]:
    draw = random.Random(3)
    words = [f"w{number}" for number in range(60)]

    def sentence(most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(most // 6, most)))

    if kind == "summarise":
        lines = [json.dumps({"source": sentence(40), "summary": sentence(12)}) for _ in range(80)]
        file = folder / "pairs.jsonl"
        more = ("embedding=8", "hidden=8", "layers=2", "vocabulary=200", "dropout=0.0")
    else:
        lines = [json.dumps({"text": sentence(60)}) for _ in range(80)]
        file = folder / "texts.jsonl"
        more = (
            "layers=2",
            "heads=2",
            "width=16",
            "dropout=0.0",
            "vocabulary=280",
            "pad=longest",
            "examples=40",
        )
    file.write_text("\n".join(lines) + "\n")
    sets = (f"workload.{item}" for item in (f"name={kind}", f"data={file}", *more))
    return (*sets, "run.epochs=1", "batch.sequence=300")


def made(sets: tuple[str, ...], micro: int, accumulation: int) -> tuple[Stepper, Config]:
    config = read(None, [*sets, f"batch.micro={micro}", f"batch.accumulation={accumulation}"]).resolve()
    torch.manual_seed(5)
    workload = prepare(config)
    workload.model.double()
    return Stepper(workload, config, CPU, total_steps=10), config


def micro_batches(stepper: Stepper, micro: int, items: int = 8) -> Iterator[Any]:
    data: Any = stepper.workload.train_data
    collate = stepper.workload.collate
    assert collate is not None
    for start in range(0, items, micro):
        yield collate([data[index] for index in range(start, start + micro)])


def gradients(sets: tuple[str, ...], micro: int, accumulation: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of one step of the first 8 items."""
    stepper, _ = made(sets, micro, accumulation)
    found: dict[str, Tensor] = {}

    def update(_enter: Any) -> None:
        for name, parameter in stepper.model.named_parameters():
            assert parameter.grad is not None, name
            found[name] = parameter.grad.clone()

    stepper.update = update  # type: ignore[method-assign]
    loss = stepper.step(micro_batches(stepper, micro), PhaseClock(), 0)
    assert loss is not None
    return loss, found


@pytest.mark.parametrize("kind", ["finetune", "summarise", "own"])
def test_padded_data_has_the_same_gradient_in_every_division(kind: str, tmp_path: Path) -> None:
    sets = own_sets(tmp_path) if kind == "own" else builtin_sets(kind, tmp_path)
    stepper, _ = made(sets, 1, 8)
    assert (
        len({len(batch[0]) if kind == "own" else batch[0].shape[1] for batch in micro_batches(stepper, 1)})
        > 3
    )
    loss, whole = gradients(sets, *DIVISIONS[0])
    assert max(float(gradient.abs().max()) for gradient in whole.values()) > 1e-3
    for micro, accumulation in DIVISIONS[1:]:
        other_loss, other = gradients(sets, micro, accumulation)
        assert float(other_loss) == pytest.approx(float(loss), rel=1e-12)
        for name, gradient in whole.items():
            assert torch.allclose(gradient, other[name], rtol=0, atol=1e-12), (name, micro)


def test_without_a_weight_every_micro_batch_counts_alike(tmp_path: Path) -> None:
    sets = (*own_sets(tmp_path), "workload.options.weigh=false")
    stepper, _ = made(sets, 4, 2)
    parts = [float(stepper.forward_backward(batch, no_phase)) * 2 for batch in micro_batches(stepper, 4)]
    stepper, _ = made(sets, 4, 2)
    loss = stepper.step(micro_batches(stepper, 4), PhaseClock(), 0)
    assert float(loss) == pytest.approx(sum(parts) / 2)  # type: ignore[arg-type]
    assert float(loss) != pytest.approx(float(gradients(own_sets(tmp_path), 4, 2)[0]), rel=1e-4)  # type: ignore[arg-type]


def test_clips_weighted_by_class_have_the_same_loss_in_every_division() -> None:
    sets = ["workload.name=antispoof", "workload.size=tiny", "workload.clips=48", "run.epochs=1"]
    config = read(None, [*sets, "batch.micro=2", "batch.accumulation=4"]).resolve()
    workload = prepare(config)
    stepper = Stepper(workload, config, CPU, total_steps=10)
    output = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([0, 0, 0, 1, 1, 0, 1, 1])  # 2 x spoof, one of each, ...
    batches = [(torch.zeros(2), labels[start : start + 2]) for start in range(0, 8, 2)]
    losses = [workload.loss(output[2 * index : 2 * index + 2], batch) for index, batch in enumerate(batches)]
    shares = stepper.shares(batches)
    assert sum(shares) == pytest.approx(1.0)
    assert float(sum(loss * share for loss, share in zip(losses, shares, strict=True))) == pytest.approx(
        float(workload.loss(output, (torch.zeros(8), labels))), rel=1e-6
    )


def test_the_mean_loss_of_an_evaluation_has_the_same_weights(tmp_path: Path) -> None:
    stepper, _ = made(own_sets(tmp_path), 8, 1)
    workload, results = stepper.workload, []
    for micro in (8, 3, 1):
        metric = workload.metric()
        assert isinstance(metric, MeanLoss)
        for batch in micro_batches(stepper, micro, items=9 if micro == 3 else 8):
            output = workload.forward(stepper.model, batch)
            metric.update(output, batch, workload.loss(output, batch))
        results.append(metric.result()["loss"])
    assert results[2] == pytest.approx(results[0], rel=1e-12)
    assert results[1] > 0  # one batch more


@pytest.mark.parametrize("weight", ["words != 0", "'many'", "-2.0", "torch.tensor(float('nan'))", "None"])
def test_a_weight_that_is_no_number_is_reported_with_the_factorys_file(tmp_path: Path, weight: str) -> None:
    sets = own_sets(tmp_path, weight)
    end = Trainer(tmp_path / "runs", tmp_path).train(*sets, "batch.micro=4", "batch.accumulation=2").end
    assert end.status == "failed"
    assert "weight returned" in end.reason and "ragged_" in end.reason
