"""The summariser as a workload: batches, the metric, and that it learns."""

from __future__ import annotations

import json
import math
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learning_help import evaluate, train

from ndd_engine.config.schema import Config
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.summarise import PairDataset, rouge
from ndd_engine.workloads.summarise_data import END, PADDING

MakeConfig = Callable[..., Config]

TINY: dict[str, Any] = {
    "name": "summarise", "embedding": 24, "hidden": 32, "layers": 1, "vocabulary": 500, "target": 24, "pairs": 500,
}  # fmt: skip


def make(make_config: MakeConfig, sequence: int = 48, micro: int = 8, **section: Any) -> Workload:
    torch.manual_seed(1)
    return prepare(make_config({**TINY, **section}, micro=micro, sequence=sequence))


@pytest.mark.parametrize("pad", ["longest", "full"])
def test_gathered_batches_are_the_collated_ones(make_config: MakeConfig, pad: str) -> None:
    workload = make(make_config, pad=pad)
    data = workload.train_data
    assert isinstance(data, PairDataset) and workload.collate is not None
    picked = [5, 0, len(data) - 1, 7]
    collated = workload.collate([data[index] for index in picked])
    for left, right in zip(collated, data.batch(torch.tensor(picked)), strict=True):
        assert left.dtype == right.dtype == torch.int64 and torch.equal(left, right)
    if pad == "full":
        assert [part.shape[1] for part in collated] == [48, 48, 24, 24]
    moved = data.to(torch.device("cpu"))
    assert all(map(torch.equal, moved.batch(torch.tensor(picked)), collated))
    assert data.nbytes == moved.nbytes > 0
    with pytest.raises(IndexError):
        data[len(data)]
    # Loader processes are sent both.
    again = pickle.loads(pickle.dumps((data, workload.collate)))
    assert all(map(torch.equal, again[1]([again[0][index] for index in picked]), collated))


def test_items_say_what_their_unknown_words_are(make_config: MakeConfig) -> None:
    workload = make(make_config)
    for source, extended, target_in, target_out in workload.train_data:  # type: ignore[attr-defined]
        assert torch.equal(source, torch.where(extended < 500, extended, 0))
        assert torch.equal(target_in[1:], torch.where(target_out < 500, target_out, 0)[:-1])
        copied = target_out[target_out >= 500]
        assert torch.isin(copied, extended).all()
        assert PADDING not in source and len(source) <= 48 and len(target_out) <= 24


def test_metric_writes_the_first_summaries_and_compares_them(make_config: MakeConfig, tmp_path: Path) -> None:
    """A source of one unknown word, which the model is made to copy and then to end."""
    names = ["ocelot", "lynx", "puma"]
    rows = [{"source": "a a a b", "summary": "a"}] * 12 + [
        {"source": name, "summary": f"{name} cat {name}"} for name in names
    ]
    path = tmp_path / "cats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    workload = make(
        make_config, data=str(path), pairs=None, vocabulary=16, eval_fraction=0.2, summaries=2, target=4
    )
    assert workload.better == "higher"
    model: Any = workload.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.pointer.gate.bias.fill_(-3.0)  # copies, nearly always
    found = evaluate(workload, micro=2)
    # "ocelot ocelot ocelot ocelot" against "ocelot cat ocelot": 2 of 4 and 2 of 3 words.
    expected = rouge("ocelot " * 4, "ocelot cat ocelot")
    assert expected["rouge_1"] == pytest.approx(4 / 7)
    assert next(iter(found)) == "rouge_l"
    for name, value in expected.items():
        assert found[name] == found[f"greedy_{name}"] == pytest.approx(value)
    assert set(found) == {*expected, *(f"greedy_{name}" for name in expected), "loss"}
    assert "greedy_rouge_l" not in evaluate(
        make(make_config, data=str(path), pairs=None, vocabulary=16, eval_fraction=0.2, beam=1)
    )


def test_without_summaries_the_loss_is_what_counts(make_config: MakeConfig) -> None:
    workload = make(make_config, summaries=0)
    assert workload.better == "lower"
    assert list(evaluate(workload, micro=8)) == ["loss"]


def unigram_loss(workload: Workload) -> float:
    """The loss of knowing only how frequent each summary word is in training, weighted as the workload's loss.

    Words outside of the vocabulary count as one word, which flatters it.
    """

    def words(data: Any) -> list[list[int]]:
        return [torch.where(item[3] < 500, item[3], 0).tolist() for item in data]

    counts = Counter(word for summary in words(workload.train_data) for word in summary)
    assert counts[END]
    total = counts.total() + 500
    losses = [
        sum(-math.log((counts[word] + 1) / total) for word in summary) / len(summary)
        for summary in words(workload.eval_data)
    ]
    return sum(losses) / len(losses)


@pytest.mark.long
def test_it_beats_the_unigram_entropy(make_config: MakeConfig) -> None:
    """On functions of the standard library, with most summary words outside of so small a vocabulary."""
    workload = make(make_config, summaries=6, beam=2)
    baseline = unigram_loss(workload)
    before = evaluate(workload, micro=8)
    train(workload, 150, 5e-3, 8, clip=1.0)
    after = evaluate(workload, micro=8)
    assert after["loss"] < baseline - 0.3 < baseline < before["loss"]
    assert after["rouge_1"] > before["rouge_1"]
