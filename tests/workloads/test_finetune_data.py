"""The documents of the fine-tuning workload: the manual's topics, a user's own, and every mistake in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from finetune_help import configured, documents, own, prepared, told

from ndd_engine.errors import ConfigError
from ndd_engine.workloads.interface import problems

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
        configured("workload.document_chars=63")


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


def test_odd_characters_of_json_survive(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    odd = ["\ud83d lone \udc00 surrogates, zero \0 and 😀 " * 3 + str(number) for number in range(3)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in odd))
    workload = prepared(*own(path))
    data: Any = workload.train_data
    assert [data.encoder.decode(data.encoder.encode(text)) for text in data.texts] == odd[:2]


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
    assert "no text files" in told(*own(tmp_path))
    for number in range(7):
        (tmp_path / f"{number}.txt").write_bytes(b"\xff" if number else b"")
    os.mkfifo(tmp_path / "pipe.md")
    text = told(*own(tmp_path))
    assert "0.txt" in text and "0xff at offset" in text and "3 more files" in text


def test_missing_and_short_data(tmp_path: Path) -> None:
    for name in ("bultin", tmp_path / "no.jsonl", "x" * 5000):
        assert "workload.data" in told(f"workload.data={name}")
    path = tmp_path / "data.txt"
    path.write_text("\n---\n".join(TEXTS))
    text = told(f"workload.data={path}")
    assert "only 3" in text and "examples to 2" in text and "examples to 1" in text
    assert problems(configured(*own(path)), "x") == []
    path.write_text("too short")
    assert "only 0" in told(*own(path))
