"""Pairs of the standard library and of users' files: what is read, how it is numbered, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from problems_help import refused

from ndd_engine.config import read as load
from ndd_engine.config.schema import Config
from ndd_engine.workloads.interface import Settings, facts
from ndd_engine.workloads.summarise_data import (
    END,
    START,
    UNKNOWN,
    Pair,
    PairData,
    Vocabulary,
    documented,
    library_pairs,
    read,
    tokens,
)

MakeConfig = Callable[..., Config]

ROWS = [(f"the cat number {number} sees a dog", f"cat {number} sees") for number in range(20)]


def pairs_of(make_config: MakeConfig, sequence: int = 16, micro: int = 1, **section: Any) -> PairData:
    config = make_config({"name": "summarise", **section}, micro=micro, sequence=sequence)
    return read(Settings.of(config))


def told(make_config: MakeConfig, data: Path | str, micro: int = 1, **section: Any) -> str:
    """The problems of a configuration with this data, as text; building the workload must refuse it too."""
    config = make_config({"name": "summarise", "data": str(data), **section}, micro=micro, sequence=16)
    return refused(config)


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"article": a, "abstract": b}) + "\n" for a, b in ROWS), "utf-8")
    return path


def test_tokens() -> None:
    assert tokens("Don't call foo_bar(x='é', 2.5)") == (
        "don't", "call", "foo_bar", "(", "x", "=", "'", "é", "'", ",", "2", ".", "5", ")",
    )  # fmt: skip


def test_source_words_outside_of_the_vocabulary_can_be_copied() -> None:
    vocabulary = Vocabulary(["the", "cat"], 10)
    source, summary = ("the", "ocelot", "and", "ocelot", "cat"), ("cat", "ocelot", "lynx")
    found = vocabulary.encode(Pair(source, summary, ""), 8)
    assert found.source == [4, UNKNOWN, UNKNOWN, UNKNOWN, 5]
    assert found.extended == [4, 10, 11, 10, 5]
    assert found.target_in == [START, 5, UNKNOWN, UNKNOWN]
    # A summary's word that neither the vocabulary nor the source has stays unknown.
    assert found.target_out == [5, 10, UNKNOWN, END]
    assert found.unknowns == ["ocelot", "and"]
    # Rows 6 to 9 stand for no word.
    assert vocabulary.decode([5, 10, 7, UNKNOWN, 11], found.unknowns) == ["cat", "ocelot", "and"]


def test_a_summary_that_is_cut_has_no_end() -> None:
    vocabulary = Vocabulary(["a", "b", "c"], 10)
    pair = Pair(("a",), ("a", "b", "c"), "")
    assert vocabulary.encode(pair, 4).target_out == [4, 5, 6, END]
    cut = vocabulary.encode(pair, 3)
    assert (cut.target_in, cut.target_out) == ([START, 4, 5], [4, 5, 6])


def test_documented_functions_and_classes() -> None:
    body = "\n".join(f"        total = self.add(value_{number}, total)" for number in range(6))
    source = (
        'class Sum:\n    """Adds up many\n    values.\n  \n    More of it."""\n\n    def all(self):\n'
        f'        """Adds all of the values."""\n{body}\n\n    def none(self):\n{body}\n\n'
        '    def short(self):\n        """Much too short to tell."""\n        return 1\n'
    )
    whole, method = documented(source)
    assert whole.reference == "Adds up many\nvalues."
    assert whole.summary == ("adds", "up", "many", "values", ".")
    assert whole.source[:6] == ("class", "sum", ":", "def", "all", "(")
    assert method.reference == "Adds all of the values."
    assert "adds" not in method.source and method.source.count("total") == 12
    assert documented("def broken(:") == ()


def test_library_is_read_in_one_order_and_no_further_than_asked() -> None:
    said: list[str] = []
    few = library_pairs(30, said.append)
    assert len(few) == 30 and len(said) == 1
    assert library_pairs(60)[:30] == few
    assert all(len(pair.source) >= 30 and len(pair.summary) >= 4 for pair in few)


def test_functions_are_joined_to_the_length_of_a_source(make_config: MakeConfig) -> None:
    data = pairs_of(make_config, 200, pairs=120, vocabulary=300)
    raw = library_pairs(120)
    lengths = [len(pair.source) for pair in data.train]
    assert max(lengths) == 200 and all(length == 200 for length in lengths[:-1])
    assert len(data.train) < 114 and data.notes
    # The first item holds the first functions from the beginning, with all of their summaries.
    taken: tuple[str, ...] = ()
    count = 0
    while len(taken) < 200:
        taken, count = taken + raw[count].source, count + 1
    assert data.train[0].source == taken[:200]
    assert data.train[0].reference == "\n".join(pair.reference for pair in raw[:count])
    # Nothing that is trained on is evaluated with: the last 5 % of the pairs are kept apart before joining.
    assert data.evaluation[0].source[:30] == raw[114].source[:30]


@pytest.mark.long
@pytest.mark.parametrize("size", ["tiny", "small", "narrow", "middle", "guide"])
def test_library_feeds_every_size(size: str) -> None:
    """Whole, and as the little of it that a size is tried with where none was named."""
    draft = load(None, [f"workload.size={size}"], "summarise")
    config = draft.resolve()
    for each in (config, draft.resolve(few=True)):
        found = facts(each)
        assert found is not None and found.train_items >= 16 and found.eval_items > 0
        assert found.tokens_per_item > each.batch.sequence * 0.95
    assert config.batch.items == (8 if size == "tiny" else 16)


def test_both_kinds_of_file_give_the_same_pairs(make_config: MakeConfig, tmp_path: Path, jsonl: Path) -> None:
    expected = pairs_of(make_config, data=str(jsonl))
    assert (len(expected.train), len(expected.evaluation)) == (19, 1)
    assert expected.train[3] == Pair(tokens(ROWS[3][0]), tokens(ROWS[3][1]), ROWS[3][1])
    plain = "".join(f"{source}\t{summary}\r\n" for source, summary in ROWS)
    turned = "id\tSummary\ttext\n" + "".join(f"x\t{b}\t{a}\n\n" for a, b in ROWS)
    for text in (plain, turned, "source\ttarget\n" + plain):
        path = tmp_path / "pairs.tsv"
        path.write_text(text, "utf-8")
        found = pairs_of(make_config, data=str(path))
        assert (found.train, found.evaluation) == (expected.train, expected.evaluation)
    assert pairs_of(make_config, data=str(jsonl), pairs=10).train == expected.train[:9]


def test_vocabulary_has_the_most_frequent_training_words(make_config: MakeConfig, jsonl: Path) -> None:
    """Words as frequent as each other in the order of the alphabet; the table always has all of its rows."""
    data = pairs_of(make_config, data=str(jsonl), vocabulary=16)
    assert data.vocabulary.size == 16
    assert data.vocabulary.words[:7] == ("cat", "sees", "a", "dog", "number", "the", "0")
    assert len(data.vocabulary.words) == 12 and not data.notes
    wide = pairs_of(make_config, data=str(jsonl), vocabulary=100)
    # The 20th pair is kept for evaluation: its number is no training word.
    assert set(wide.vocabulary.words) == {"the", "cat", "number", "sees", "a", "dog", *map(str, range(19))}
    assert any("vocabulary" in note and "100" in note for note in wide.notes)


def test_facts_count_what_is_trained_on(make_config: MakeConfig, jsonl: Path) -> None:
    config = make_config({"name": "summarise", "data": str(jsonl), "target": 3}, micro=2, sequence=5)
    found = facts(config)
    assert found is not None
    assert (found.train_items, found.eval_items, found.item, found.token) == (19, 1, "pair", "token")
    assert found.tokens_per_item == 5 + 3
    notes = pairs_of(make_config, 5, 2, data=str(jsonl), target=3).notes
    assert any("20 of 20" in note for note in notes) and not any("summaries" in note for note in notes)


def test_all_mistakes_are_told_with_their_lines(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    good = json.dumps({"source": "a b", "summary": "a"})
    path.write_text(
        "\n".join([
            good, "{broken", "[1]", '{"source": "a"}', '{"text": 3, "target": "x"}', '{"source": " ", "summary": ""}',
            "", *["nonsense"] * 4, good,
        ])
    )  # fmt: skip
    text = told(make_config, path)
    for expected in ("column 2", "line 3: ", "line 4: ", "line 5: ", "line 6: ", "4 more lines"):
        assert expected in text
    assert "line 8" not in text


def test_files_that_cannot_be_used(make_config: MakeConfig, tmp_path: Path, jsonl: Path) -> None:
    for name in (tmp_path / "nothing.jsonl", "bultin"):
        assert "workload.data" in told(make_config, name)
    other = tmp_path / "pairs.csv"
    other.write_text("a,b\n")
    assert ".tsv" in told(make_config, other) and ".jsonl" in told(make_config, other)
    table = tmp_path / "pairs.tsv"
    table.write_text("one two\tone\n" * 3 + "a\tb\tc\n" + "alone\n" + "a b\t\x1b[2Jred\tc\n")
    text = told(make_config, table)
    assert "line 4: 3" in text and "line 5: 1" in text and "\x1b" not in text
    for content in ("source\tsummary\n", "\n \n", "one two\tone\n"):
        table.write_text(content)
        assert "workload.data" in told(make_config, table)
    text = told(make_config, jsonl, micro=20)
    assert "batch.micro" in text and "at most 19" in text
