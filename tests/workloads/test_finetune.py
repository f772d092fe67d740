"""The fine-tuning workload: examples tokenised on the fly, their padding, perplexity, and a user's own documents."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ndd_engine.config import read
from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError
from ndd_engine.train.clock import PhaseClock
from ndd_engine.train.evaluate import evaluate
from ndd_engine.train.loader import Batches, EvalBatches
from ndd_engine.train.step import Stepper
from ndd_engine.workloads import finetune_data
from ndd_engine.workloads.base import parameter_count
from ndd_engine.workloads.facts import facts, problems
from ndd_engine.workloads.finetune import Finetune, Pad, Perplexity, build_model
from ndd_engine.workloads.registry import prepare
from ndd_engine.workloads.windows import Complaints

TINY = (
    "workload.size=tiny", "workload.layers=1", "workload.width=16", "workload.document_chars=600",
    "batch.sequence=64",
)  # fmt: skip
CPU = torch.device("cpu")


def configured(*sets: str) -> Config:
    return read(None, ["workload.name=finetune", *TINY, *sets]).resolve()


def prepared(*sets: str) -> Finetune:
    torch.manual_seed(1)
    workload = prepare(configured(*sets))
    assert isinstance(workload, Finetune)
    return workload


def items(workload: Finetune) -> list[Tensor]:
    return [workload.train_data[index] for index in range(len(workload.train_data))]  # type: ignore[arg-type]


def documents(*sets: str) -> finetune_data.DocumentData:
    config = configured(*sets)
    complaints = Complaints("x")
    data = finetune_data.read(config, config.workload, complaints)  # type: ignore[arg-type]
    assert data is not None and not complaints.problems, complaints.problems
    return data


def told(*sets: str) -> str:
    """The problems of a configuration, which building the workload must refuse too."""
    config = configured(*sets)
    found = problems(config, "run.toml")
    assert found and all(problem.where == "run.toml" and problem.key for problem in found)
    for refuse in (facts, prepare):
        with pytest.raises(ConfigError) as caught:
            refuse(config)
        assert [p.message for p in caught.value.problems] == [p.message for p in found]
    return "\n".join(map(str, found))


# The model.


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("tiny", 180_544), ("small", 557_696), ("medium", 3_541_248), ("large", 19_929_600)],
)
def test_parameters_of_each_size(size: str, parameters: int) -> None:
    """Embeddings of tokens (shared with the output) and places, blocks of 12 width^2 and two norms, a last norm."""
    config = read(None, ["workload.name=finetune", f"workload.size={size}"]).resolve()
    section: Any = config.workload
    width = section.width
    block = 3 * width**2 + width**2 + 4 * width**2 + 4 * width**2 + 2 * width
    expected = (1024 + config.batch.sequence) * width + section.layers * block + width
    with torch.device("meta"):
        model = build_model(section, section.vocabulary, config.batch.sequence)
    assert parameter_count(model) == expected == parameters
    assert 2 <= section.layers <= 6


def test_prepared_workload() -> None:
    config = configured()
    messages: list[str] = []
    workload = prepare(config, messages.append)
    assert messages[0] == "reading the manual topics" and messages[-1] == "building the model"
    assert "learning byte pairs" in messages
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


def test_parts_make_up_forward() -> None:
    workload = prepared("workload.layers=2")
    seen: list[str] = []
    for name, modules in workload.parts.items():
        for module in modules if isinstance(modules, Sequence) else [modules]:
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    workload.forward(workload.model, Pad()([workload.train_data[0]]))
    assert seen == ["attention", "feed_forward"] * 2 + ["head"]


# Items and batches.


def test_an_item_is_the_beginning_of_its_encoded_text() -> None:
    workload, data = prepared(), documents()
    for text, item in zip(data.train, items(workload), strict=True):
        tokens = workload.encoder.encode(text)
        assert item.dtype == torch.int64 and item.tolist() == tokens[:65]
        assert text.startswith(workload.encoder.decode(tokens))
    with pytest.raises(IndexError):
        workload.train_data[25]


def test_items_depend_on_their_index_alone() -> None:
    first = prepared()
    torch.manual_seed(99)
    again = prepare(configured("run.seed=7"))
    copy = pickle.loads(pickle.dumps((first.train_data, first.collate)))  # as a loader's worker gets them
    for index in (24, 0, 24):
        assert torch.equal(first.train_data[index], again.train_data[index])
        assert torch.equal(first.train_data[index], copy[0][index])
    assert torch.equal(copy[1]([copy[0][3]])[1], Pad()([first.train_data[3]])[1])


@pytest.mark.parametrize(("cache", "during"), [("false", 50), ("true", 0)])
def test_whole_texts_are_encoded_at_every_use_unless_the_loader_keeps_them(
    monkeypatch: pytest.MonkeyPatch, cache: str, during: int
) -> None:
    workload, data = prepared(), documents()
    config = configured(f"loader.cache={cache}")
    batches = Batches(workload.train_data, config, workload.collate)
    encoded: list[str] = []
    encode = type(workload.encoder).encode

    def counted(self: Any, text: str) -> list[int]:
        encoded.append(text)
        return encode(self, text)

    monkeypatch.setattr(type(workload.encoder), "encode", counted)
    found = [[pair[0] for pair in batches.epoch(epoch)] for epoch in (0, 1)]
    assert len(encoded) == during and set(encoded) <= set(data.train)
    plain = Batches(workload.train_data, configured(), workload.collate)
    for epoch, inputs in enumerate(found):
        assert all(map(torch.equal, inputs, (pair[0] for pair in plain.epoch(epoch))))


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
        assert any("shapes vary" in note for note in workload.notes()) == (pad == "longest")
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


def test_loss_is_taken_in_fp32() -> None:
    workload = prepared()
    batch = Pad()([workload.train_data[0]])
    with torch.autocast("cpu", torch.bfloat16):
        output = workload.forward(workload.model, batch)
        assert output.dtype == torch.bfloat16
        assert workload.loss(output, batch).dtype == torch.float32


# The metric.


def test_perplexity_by_hand() -> None:
    """One token at a loss of ln 2 and three at ln 8: 2.5 bits a token, and not 2 as the mean of the means."""
    metric = Perplexity(torch.tensor([1, 2, 3]))
    first = torch.tensor([[1, -100, -100]])  # 2 bytes
    second = torch.tensor([[2, 0], [1, -100]])  # 3 + 1 + 2 bytes
    metric.update(None, (first, first), torch.tensor(math.log(2)))
    metric.update(None, (second, second), torch.tensor(math.log(8)))
    result = metric.result()
    assert result["loss"] == pytest.approx(2.5 * math.log(2))
    assert result["perplexity"] == pytest.approx(2**2.5)
    assert result["bits_per_byte"] == pytest.approx(10 / 8)


def test_perplexity_of_nothing_and_of_a_diverged_model() -> None:
    assert all(math.isnan(value) for value in Perplexity(torch.ones(2)).result().values())
    labels = torch.tensor([[1]])
    for loss, expected in ((1e4, math.inf), (math.inf, math.inf)):
        metric = Perplexity(torch.ones(2, dtype=torch.int64))
        metric.update(None, (labels, labels), torch.tensor(loss))
        assert metric.result()["perplexity"] == expected


# The builtin documents.


def test_builtin_examples_are_the_longest_topics() -> None:
    from pydoc_data.topics import topics

    data = documents("workload.document_chars=0")
    assert sorted(data.train, key=len) == sorted(topics.values(), key=len)[-25:]
    assert len(data.evaluation) == 5


@pytest.mark.parametrize("examples", [2, 25, 40])
def test_nothing_evaluated_on_was_trained_on(examples: int) -> None:
    data = documents(f"workload.examples={examples}", "workload.document_chars=0")
    trained = {line for text in data.train for line in paragraphs(text)}
    for text in data.evaluation:
        assert text not in data.train and trained.isdisjoint(paragraphs(text))
    joined = documents(f"workload.examples={examples}", "workload.document_chars=30000")
    assert joined.evaluation == tuple(text[:30000] for text in data.evaluation)
    assert not any(text in example for text in joined.evaluation for example in joined.train)


def paragraphs(text: str) -> set[str]:
    """Of some length, whatever their indentation."""
    plain = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return {paragraph for paragraph in plain if len(paragraph) >= 40}


@pytest.mark.parametrize("chars", [64, 3_000, 60_000])
def test_document_chars_sets_the_length_of_examples(chars: int) -> None:
    whole = documents("workload.document_chars=0")
    data = documents(f"workload.document_chars={chars}")
    assert {len(text) for text in data.train} == {chars}
    for example, document in zip(data.train, whole.train, strict=True):
        assert example.startswith(document[:chars])
    note = "go on with the documents after them"
    assert any(note in each for each in data.notes) == (chars == 60_000)


def test_joining_uses_each_document_once() -> None:
    data = documents("workload.examples=2", "workload.document_chars=1000000")
    one, two = documents("workload.examples=2", "workload.document_chars=0").train
    assert data.train == (f"{one}\n\n{two}", f"{two}\n\n{one}")


def test_cut_examples_are_told() -> None:
    notes = prepared().notes()
    assert any(note.startswith("Of 25 examples 25 are longer than 64 tokens and are cut") for note in notes)
    notes = prepared("workload.document_chars=64").notes()
    assert not any("are cut" in note for note in notes)


def test_too_many_examples_of_the_manual() -> None:
    assert "workload.examples = 5000: the manual has " in told("workload.examples=5000")
    text = told("workload.eval_examples=70", "batch.micro=32")
    assert "manual topics are no part of the 25 that are trained on; allowed: at most " in text
    assert "one optimizer step takes 32 examples" in text and "at most 25" in text
    with pytest.raises(ConfigError, match="document_chars 63 is too short"):
        configured("workload.document_chars=63")


# A user's own documents.


def own(path: Path, *sets: str, examples: int = 2, evaluation: int = 1) -> tuple[str, ...]:
    return (
        f"workload.data={path}", f"workload.examples={examples}", f"workload.eval_examples={evaluation}", *sets,
    )  # fmt: skip


TEXTS = ["short answer, " * 6, "a longer one, " * 8, "the longest of all, " * 9]


def test_json_lines_of_both_kinds(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [
        json.dumps({"prompt": TEXTS[0][:20], "completion": TEXTS[0][20:], "id": 1}), "",
        json.dumps({"text": TEXTS[2]}), json.dumps({"text": TEXTS[1]}),
        json.dumps({"text": TEXTS[1]}), json.dumps({"text": "\u00e9" * 10}),
    ]  # fmt: skip
    path.write_text("\r\n".join(lines), "utf-8")
    data = documents(*own(path))
    assert data.train == (TEXTS[2], TEXTS[1]) and data.evaluation == (TEXTS[0],)
    assert data.notes == (
        "Left out: 1 documents of fewer than 64 characters.",
        "Left out: 1 documents that are the same as another one.",
    )


def test_odd_characters_of_json_survive(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    odd = ["\ud83d lone \udc00 surrogates, zero \0 and 😀 " * 3 + str(number) for number in range(3)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in odd))
    workload = prepared(*own(path))
    data: Any = workload.train_data
    assert [workload.encoder.decode(workload.encoder.encode(text)) for text in data.texts] == odd[:2]


def test_text_with_separators_and_without(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes("\n--- \n".join([*TEXTS, ""]).replace("\n", "\r\n").encode())
    data = documents(*own(path))
    assert data.train == (TEXTS[2], TEXTS[1]) and data.evaluation == (TEXTS[0],)
    text = "".join(f"line {number} --- of a text\n" for number in range(100))
    path.write_text(text)
    third = len(text) // 3
    data = documents(*own(path, "workload.document_chars=0"))
    assert data.train + data.evaluation == tuple(text[n * third : (n + 1) * third] for n in range(3))
    data = documents(*own(path, "workload.document_chars=100"))
    assert data.train + data.evaluation == (text[:100], text[100:200], text[200:300])
    share = 300 / len(text)
    assert f"3 pieces of 100 characters, which are {share:.0%} of it" in data.notes[0]


def test_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.txt").write_text(TEXTS[0] + "\n")
    (tmp_path / "inner" / "b.md").write_text("---\n" + TEXTS[1])  # front matter separates nothing
    (tmp_path / "inner" / "c.text").write_text(TEXTS[2])
    (tmp_path / "d.bin").write_bytes(b"\0\1")
    (tmp_path / ".hidden.txt").write_bytes(b"\0\1")
    data = documents(*own(tmp_path))
    assert data.train == (TEXTS[2], "---\n" + TEXTS[1]) and data.evaluation == (TEXTS[0],)


def test_own_documents_are_cut_and_never_joined(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("\n---\n".join(TEXTS))
    data = documents(*own(path, "workload.document_chars=100"))
    assert data.train == (TEXTS[2][:100], TEXTS[1][:100]) and data.evaluation == (TEXTS[0],)


def test_unused_documents_and_a_small_vocabulary_are_told(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("\n---\n".join([*TEXTS, "z" * 64, "y" * 64]))
    workload = prepared(*own(path))
    notes = workload.notes()
    assert any(note.startswith("Documents that are not used: 2 ") for note in notes)
    assert len(workload.encoder) < 1024
    assert any(f"give {len(workload.encoder):,} tokens instead of 1,024" in note for note in notes)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2: this is not JSON: Expecting property name enclosed in double quotes at column 2"),
        ("[" * 100_000, "line 2: this is not JSON"),
        ("[1]", "line 2: this is a list, not an object"),
        ("3", "line 2: this is a number, not an object"),
        ('{"txt": "x"}', 'line 2: there is no "text"'),
        ('{"prompt": "x"}', 'line 2: there is no "completion"'),
        ('{"text": null}', 'line 2: "text" is null, not a text'),
        ('{"prompt": "x", "completion": ["y"]}', 'line 2: "completion" is a list, not a text'),
    ],
)
def test_mistakes_in_json_lines(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": TEXTS[0]}) + "\n" + line + "\n")
    assert expected in told(*own(path))


def test_every_mistake_is_told_and_the_many_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("[]\n" * 9)
    text = told(*own(path, "batch.accumulation=3"))
    assert "line 5:" in text and "line 6:" not in text and "4 more lines like these" in text
    assert "batch.accumulation = 3: one optimizer step takes 3 examples" in text
    path.write_text("\n \n")
    assert "there are no examples in this file" in told(*own(path))


def test_mistakes_in_a_folder(tmp_path: Path) -> None:
    assert "there are no text files in this folder" in told(*own(tmp_path))
    for number in range(7):
        (tmp_path / f"{number}.txt").write_bytes(b"\xff" if number else b"")
    os.mkfifo(tmp_path / "pipe.md")
    text = told(*own(tmp_path))
    assert "the file is empty" in text and "byte 0xff at offset 0" in text and "3 more mistakes" in text


def test_missing_and_short_data(tmp_path: Path) -> None:
    assert 'did you mean "builtin"?' in told("workload.data=bultin")
    assert "there is no such file" in told(f"workload.data={tmp_path / 'no.jsonl'}")
    assert "File name too long" in told(f"workload.data={'x' * 5000}")
    path = tmp_path / "data.txt"
    path.write_text("\n---\n".join(TEXTS))
    text = told(f"workload.data={path}")
    assert "25 examples to train on and 5 to evaluate on are wanted, and the data holds 3 usable" in text
    assert "set workload.examples to 2 and workload.eval_examples to 1" in text
    assert problems(configured(*own(path)), "x") == []
    path.write_text("too short")
    text = told(*own(path))
    assert "the data holds 0 usable documents" in text and "fewer than 64 characters" in text


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
        return evaluate(workload, held_out, CPU, stepper.precision, 1, None, True, lambda: None).metrics

    counts = torch.ones(len(workload.encoder))  # once more than seen, so that no token is impossible
    for item in items(workload):
        counts += torch.bincount(item, minlength=len(counts))
    metric = workload.metric()
    for batch in EvalBatches(workload.eval_data, config, workload.collate):
        output = (counts / counts.sum()).log().expand(*batch[0].shape, len(counts))
        metric.update(output, batch, workload.loss(output, batch))
    before = figures()
    clock = PhaseClock()
    for epoch in range(epochs):
        iterator = batches.epoch(epoch)
        for step in range(batches.per_epoch):
            assert stepper.step(iterator, clock, epoch * batches.per_epoch + step) is not None
            clock.end_step()
    return metric.result(), before, figures()


def test_learning_the_manual_beats_the_frequency_of_its_tokens() -> None:
    unigram, before, after = learned(
        "workload.size=small", "workload.document_chars=1500", "optimizer.lr=1e-3", epochs=10
    )
    assert after["perplexity"] < 0.7 * unigram["perplexity"] < 0.7 * before["perplexity"]
    assert after["bits_per_byte"] < unigram["bits_per_byte"] - 0.2


def test_learning_shakespeare_beats_the_frequency_of_its_tokens(real_data: Path) -> None:
    unigram, before, after = learned(
        "workload.size=tiny", f"workload.data={real_data / 'text' / 'tinyshakespeare.txt'}",
        "workload.vocabulary=512", "workload.document_chars=2000", "optimizer.lr=2e-3", epochs=8,
    )  # fmt: skip
    assert after["perplexity"] < 0.7 * unigram["perplexity"] < 0.7 * before["perplexity"]


def test_same_seed_gives_the_same_bits() -> None:
    sets = ("workload.size=tiny", "workload.document_chars=600", "batch.sequence=64", "workload.dropout=0.1")
    assert learned(*sets, epochs=1) == learned(*sets, epochs=1)


def test_facts_are_found_without_torch() -> None:
    code = (
        "import sys; from ndd_engine.config import read; from ndd_engine.workloads.facts import facts; "
        "print(facts(read(None, ['workload.name=finetune']).resolve()).text); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("25 examples of 48,000 characters, 5 to evaluate; at most 256 tokens")
