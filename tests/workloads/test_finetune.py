"""The fine-tuning workload: examples tokenised on the fly, their padding, perplexity, and that it learns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from finetune_help import configured, documents, prepared
from torch import Tensor

from ndd_engine.config import read
from ndd_engine.measure.phase_clock import PhaseClock
from ndd_engine.train.data.loader import Batches, EvalBatches
from ndd_engine.train.evaluate import evaluate
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.finetune import Pad, Perplexity, scored_tokens
from ndd_engine.workloads.interface import facts

CPU = torch.device("cpu")


def items(workload: Workload) -> list[Tensor]:
    return [workload.train_data[index] for index in range(len(workload.train_data))]  # type: ignore[arg-type]


# The model.


def test_prepared_workload() -> None:
    config = configured()
    workload = prepare(config)
    assert (workload.name, workload.item, workload.token, workload.better) == (
        "finetune", "example", "token", "lower",
    )  # fmt: skip
    known = facts(config)
    assert known is not None
    counts = [len(item) - 1 for item in items(workload)]  # type: ignore[arg-type]
    assert (known.train_items, known.eval_items) == (len(counts), len(workload.eval_data)) == (25, 5)  # type: ignore[arg-type]
    assert workload.tokens_per_item == sum(counts) / 25 <= known.tokens_per_item <= 64
    assert workload.collate is not None
    batch = workload.collate([workload.train_data[0]])
    output = workload.forward(workload.model, batch)
    assert output.shape == (1, 64, 1024)
    loss = workload.loss(output, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(math.log(1024), rel=0.02)  # it starts out knowing nothing
    metric = workload.metric()
    metric.update(output, batch, loss)
    assert list(metric.result()) == ["perplexity", "loss", "bits_per_byte"]
    assert set(workload.parts) == {"attention", "feed_forward", "head"}


# Items and batches.


def test_an_item_is_the_beginning_of_its_encoded_text() -> None:
    workload, data = prepared(), documents()
    encoder = workload.train_data.encoder  # type: ignore[attr-defined]
    for text, item in zip(data.train, items(workload), strict=True):
        tokens = encoder.encode(text)
        assert item.dtype == torch.int64 and item.tolist() == tokens[:65]
        assert text.startswith(encoder.decode(tokens))
    with pytest.raises(IndexError):
        workload.train_data[25]


def test_padding_stands_at_the_end_and_is_not_scored() -> None:
    examples = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    inputs, labels = Pad()(examples)
    assert inputs.tolist() == [[5, 6], [8, 0]] and labels.tolist() == [[6, 7], [9, -100]]
    inputs, labels = Pad(4)(examples)
    assert inputs.shape == labels.shape == (2, 4)
    assert labels.tolist() == [[6, 7, -100, -100], [9, -100, -100, -100]]


def test_full_padding_gives_one_shape() -> None:
    sets = ("workload.document_chars=64", "batch.sequence=48")
    shapes = {}
    for pad in ("longest", "full"):
        workload = prepared(*sets, f"workload.pad={pad}")
        assert workload.collate is not None
        shapes[pad] = {workload.collate([item])[0].shape for item in items(workload)}
    assert shapes["full"] == {(1, 48)} and len(shapes["longest"]) > 3


@pytest.mark.parametrize("length", [None, 48])
def test_loss_of_a_padded_batch_is_that_of_its_tokens(length: int | None) -> None:
    workload = prepared("workload.document_chars=64", "batch.sequence=48")
    examples = items(workload)[:6]
    assert len({len(item) for item in examples}) > 1
    total = 0.0
    for item in examples:  # one by one there is no padding
        batch = (item[:-1].unsqueeze(0), item[1:].unsqueeze(0))
        loss = workload.loss(workload.forward(workload.model, batch), batch)
        total += float(loss.detach()) * (len(item) - 1)
    batch = Pad(length)(examples)
    loss = workload.loss(workload.forward(workload.model, batch), batch)
    assert float(loss.detach()) == pytest.approx(total / sum(len(item) - 1 for item in examples), rel=1e-5)


# The metric.


def test_perplexity_by_hand() -> None:
    """One token at a loss of ln 2 and three at ln 8: 2.5 bits a token, and not 2 as the mean of the means."""
    metric = Perplexity(weight=scored_tokens, piece_bytes=torch.tensor([1, 2, 3]))
    first = torch.tensor([[1, -100, -100]])  # 2 bytes
    second = torch.tensor([[2, 0], [1, -100]])  # 3 + 1 + 2 bytes
    metric.update(None, (first, first), torch.tensor(math.log(2)))
    metric.update(None, (second, second), torch.tensor(math.log(8)))
    result = metric.result()
    assert result["loss"] == pytest.approx(2.5 * math.log(2))
    assert result["perplexity"] == pytest.approx(2**2.5)
    assert result["bits_per_byte"] == pytest.approx(10 / 8)


def test_cut_examples_are_told() -> None:
    notes = prepared().notes()
    assert any("25 of 25" in note and "64 tokens" in note for note in notes)
    assert not any("are cut" in note for note in prepared("workload.document_chars=64").notes())


# Learning.


def learned(*sets: str, epochs: int) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Figures of (the frequency of tokens alone, the untrained model, the trained one)."""
    config = read(None, ["workload.name=finetune", "loader.cache=true", *sets]).resolve()
    torch.manual_seed(1)
    workload: Any = prepare(config)
    batches = Batches(workload.train_data, config, workload.collate)
    steps = epochs * batches.per_epoch
    stepper = Stepper(workload, config, CPU, steps)

    def figures() -> dict[str, float]:
        held_out = EvalBatches(workload.eval_data, config, workload.collate)
        return evaluate(stepper, held_out, lambda: None).metrics

    counts = torch.ones(
        len(workload.train_data.encoder)
    )  # once more than seen, so that no token is impossible
    for item in items(workload):
        counts += torch.bincount(item, minlength=len(counts))
    metric = workload.metric()
    for batch in EvalBatches(workload.eval_data, config, workload.collate):
        output = (counts / counts.sum()).log().expand(*batch[0].shape, len(counts))
        with torch.no_grad():
            metric.update(output, batch, workload.loss(output, batch))
    before = figures()
    clock = PhaseClock()
    for epoch in range(epochs):
        iterator = batches.epoch(epoch)
        for step in range(batches.per_epoch):
            assert stepper.step(iterator, clock, epoch * batches.per_epoch + step) is not None
            clock.end_step()
    return metric.result(), before, figures()


@pytest.mark.long
def test_learning_the_manual_beats_the_frequency_of_its_tokens() -> None:
    unigram, before, after = learned(
        "workload.size=small",
        "workload.vocabulary=512",
        "batch.sequence=128",
        "workload.document_chars=1500",
        "optimizer.lr=1e-3",
        epochs=10,
    )
    assert after["perplexity"] < 0.7 * unigram["perplexity"] < 0.7 * before["perplexity"]
    assert after["bits_per_byte"] < unigram["bits_per_byte"] - 0.2
