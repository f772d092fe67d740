"""The fine-tuning workload: its documents, its byte-pair encoder, batches and perplexity."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from workload_help import refused

from ndd_engine.config import read
from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError
from ndd_engine.workloads import finetune_data
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.finetune import (
    BYTES,
    LONGEST,
    BytePairs,
    Pad,
    Pair,
    Perplexity,
    learn,
    scored_tokens,
    utf8,
    words,
)
from ndd_engine.workloads.interface import Settings, problems

TINY = (
    "workload.size=tiny", "workload.layers=1", "workload.width=16", "workload.document_chars=600",
    "batch.sequence=64",
)  # fmt: skip


def tiny(*sets: str) -> Config:
    """The tiny size, and `sets` on top of it."""
    return read(None, ["workload.name=finetune", *TINY, *sets]).resolve()


def prepared(*sets: str) -> Workload:
    """The same, prepared, with weights of a fixed seed."""
    torch.manual_seed(1)
    return prepare(tiny(*sets))


def documents(*sets: str) -> finetune_data.DocumentData:
    """The data alone."""
    return finetune_data.read(Settings.of(tiny(*sets)))


def told(*sets: str) -> str:
    """The problems of a configuration, which building the workload must refuse too."""
    config = tiny(*sets)
    return refused(config)


def own(path: Path, *sets: str) -> tuple[str, ...]:
    """Settings for a user's data of which two documents train and one evaluates."""
    return (f"workload.data={path}", "workload.examples=2", "workload.eval_examples=1", *sets)


# Items and batches.


def items(workload: Workload) -> list[Tensor]:
    return [workload.train_data[index] for index in range(len(workload.train_data))]  # type: ignore[arg-type]


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


# The builtin documents.


@pytest.mark.parametrize("examples", [2, 25, 40])
def test_nothing_evaluated_on_was_trained_on(examples: int) -> None:
    data = documents(f"workload.examples={examples}", "workload.document_chars=0")
    trained = {line for text in data.train for line in paragraphs(text)}
    for text in data.evaluation:
        assert text not in data.train and trained.isdisjoint(paragraphs(text))
    joined = documents(f"workload.examples={examples}", "workload.document_chars=30000")
    assert joined.evaluation == [text[:30000] for text in data.evaluation]
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
    note = "continue with the next documents"
    assert any(note in each for each in data.notes) == (chars == 60_000)


def test_joining_uses_each_document_once() -> None:
    sets = ("workload.examples=3", "workload.eval_examples=1")
    data = documents(*sets, "workload.document_chars=1000000")
    one, two, three = documents(*sets, "workload.document_chars=0").train
    orders = ((one, two, three), (two, three, one), (three, one, two))
    assert data.train == ["\n\n".join(order) for order in orders]


def test_too_many_examples_of_the_manual() -> None:
    assert "workload.examples" in told("workload.examples=5000")
    text = told("workload.eval_examples=70", "batch.micro=32")
    assert "eval_examples" in text and "micro = 32" in text and "at most 25" in text
    with pytest.raises(ConfigError, match="document_chars"):
        tiny("workload.document_chars=63")


# A user's own documents.


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
    assert data.train == [TEXTS[2], TEXTS[1]] and data.evaluation == [TEXTS[0]]
    assert len(data.notes) == 2 and "64" in data.notes[0] and "1 duplicates" in data.notes[1]


def test_text_with_separators_and_without(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes("\n--- \n".join([*TEXTS, ""]).replace("\n", "\r\n").encode())
    data = documents(*own(path))
    assert data.train == [TEXTS[2], TEXTS[1]] and data.evaluation == [TEXTS[0]]
    text = "".join(f"line {number} --- of a text\n" for number in range(100))
    path.write_text(text)
    third = len(text) // 3
    data = documents(*own(path, "workload.document_chars=0"))
    assert data.train + data.evaluation == [text[n * third : (n + 1) * third] for n in range(3)]
    data = documents(*own(path, "workload.document_chars=100"))
    assert data.train + data.evaluation == [text[:100], text[100:200], text[200:300]]
    share = 300 / len(text)
    assert f"{share:.0%}" in data.notes[0]


def test_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.txt").write_text(TEXTS[0] + "\n")
    (tmp_path / "inner" / "b.md").write_text("---\n" + TEXTS[1])  # front matter separates nothing
    (tmp_path / "inner" / "c.text").write_text(TEXTS[2])
    (tmp_path / "d.bin").write_bytes(b"\0\1")
    (tmp_path / ".hidden.txt").write_bytes(b"\0\1")
    data = documents(*own(tmp_path))
    assert data.train == [TEXTS[2], "---\n" + TEXTS[1]] and data.evaluation == [TEXTS[0]]


def test_unused_documents_and_a_small_vocabulary_are_told(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("\n---\n".join([*TEXTS, "z" * 64, "y" * 64]))
    workload = prepared(*own(path))
    notes = workload.notes()
    assert any("documents: 2" in note for note in notes)
    data: Any = workload.train_data
    assert len(data.encoder) < 1024
    assert any(f"{len(data.encoder):,} of 1,024" in note for note in notes)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "column 2"),
        ("[" * 100_000, "JSON"),
        ("[1]", "a list"),
        ("3", "a number"),
        ('{"txt": "x"}', '"text"'),
        ('{"prompt": "x"}', '"completion"'),
        ('{"text": null}', "null"),
        ('{"prompt": "x", "completion": ["y"]}', '"completion"'),
    ],
)
def test_mistakes_in_json_lines(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": TEXTS[0]}) + "\n" + line + "\n")
    text = told(*own(path))
    assert "line 2: " in text and expected in text


def test_every_mistake_is_told_and_the_many_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("[]\n" * 9)
    text = told(*own(path, "batch.accumulation=3"))
    assert "line 5:" in text and "line 6:" not in text and "4 more lines" in text
    assert "batch.accumulation" in text
    path.write_text("\n \n")
    assert "no examples" in told(*own(path))


def test_mistakes_in_a_folder(tmp_path: Path) -> None:
    assert "text files" in told(*own(tmp_path))
    for number in range(7):
        (tmp_path / f"{number}.txt").write_bytes(b"\xff" if number else b"")
    os.mkfifo(tmp_path / "pipe.md")
    text = told(*own(tmp_path))
    assert "0.txt" in text and "0xff at offset" in text and "3 more files" in text


def test_short_data(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("\n---\n".join(TEXTS))
    text = told(f"workload.data={path}")
    assert "only 3" in text and "examples to 2" in text and "examples to 1" in text
    assert problems(tiny(*own(path)), "x") == []
    path.write_text("too short")
    assert "only 0" in told(*own(path))


# The encoder.


ANY_TEXT = st.text(st.integers(0, 0x10FFFF).map(chr))  # lone surrogates too, as a JSON escape can make them
FEW_LETTERS = st.text("ab c\n1_é", max_size=60)


def taught(*texts: str, vocabulary: int = 1024) -> BytePairs:
    return learn(texts, vocabulary, lambda _: None)[0]


def replaced(tokens: list[int], pair: Pair, token: int) -> list[int]:
    """Left to right, by a stack."""
    result: list[int] = []
    fresh = False  # whether the last token was there before, and not just made
    for value in tokens:
        if result and not fresh and (result[-1], value) == pair:
            result[-1] = token
            fresh = True
        else:
            result.append(value)
            fresh = False
    return result


def naive_merges(texts: list[str], wanted: int) -> list[Pair]:
    """Counts every pair of every word again for each merge."""
    tokens = [list(utf8(word)) for text in texts for word in words(text)]
    merges: list[Pair] = []
    while len(merges) < wanted:
        counts = Counter(pair for word in tokens for pair in pairwise(word))
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 2:
            break
        tokens = [replaced(word, best, BYTES + len(merges)) for word in tokens]
        merges.append(best)
    return merges


@given(ANY_TEXT)
def test_words_are_the_whole_text_in_bounded_parts(text: str) -> None:
    parts = words(text)
    assert "".join(parts) == text
    assert all(0 < len(part) <= LONGEST + 1 for part in parts)


def test_words_keep_their_space_and_kinds_apart() -> None:
    assert words("def f(x1):\n    return  x_ 2024") == [
        "def", " f", "(", "x", "1", "):", "\n   ", " return", " ", " x", "_", " 202", "4",
    ]  # fmt: skip


@given(ANY_TEXT)
def test_any_text_comes_back(text: str) -> None:
    for encoder in (BytePairs(()), taught("the cat and the dog, naïve 😀😀", text, text)):
        tokens = encoder.encode(text)
        assert encoder.decode(tokens) == text
        assert all(0 <= token < len(encoder) for token in tokens)


def test_merges_worked_by_hand() -> None:
    # Words "ab", " ab", " abc": (a, b) three times, (space, a) twice, (b, c) once. Then (space, ab) twice, (ab, c)
    # once: the end.
    encoder, lengths = learn(["ab ab abc"], 1024, lambda _: None)
    assert encoder.merges == ((97, 98), (32, 256))
    assert len(encoder) == 258 and encoder.pieces[256:] == [b"ab", b" ab"]
    assert encoder.encode("abc ab") == [256, 99, 257]
    assert lengths == {"ab": 1, " ab": 1, " abc": 2}


@given(st.lists(FEW_LETTERS, max_size=5), st.integers(1, 30))
def test_learning_is_its_definition_in_any_order_of_texts(texts: list[str], wanted: int) -> None:
    encoder, lengths = learn(texts, BYTES + wanted, lambda _: None)
    assert list(encoder.merges) == naive_merges(texts, wanted)
    assert taught(*reversed(texts), vocabulary=BYTES + wanted).merges == encoder.merges
    assert lengths == {word: len(encoder.encode_word(word)) for text in texts for word in words(text)}


@given(FEW_LETTERS, FEW_LETTERS)
def test_encoding_is_every_merge_in_its_order(known: str, text: str) -> None:
    encoder = taught(known * 3, "a cab, a bac\n" * 3)
    expected: list[int] = []
    for word in words(text):
        tokens = list(utf8(word))
        for rank, pair in enumerate(encoder.merges):
            tokens = replaced(tokens, pair, BYTES + rank)
        expected += tokens
    assert encoder.encode(text) == expected
