"""Pairs of a text and its summary: the standard library and its docstrings, or a user's file. No torch here."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import SummariseSection

from .files import KEY, read_text
from .text_data import library_texts
from .windows import Complaints, DataFacts, split

# What comes before the words of the vocabulary.
UNKNOWN, START, END, PADDING = range(4)
FIRST_WORD = 4

SOURCE_NAMES = ("source", "article", "text", "document")
SUMMARY_NAMES = ("summary", "target", "abstract")
SUFFIXES = (".jsonl", ".ndjson", ".tsv")
# Mistakes in lines that are told one by one; the rest are counted.
_SHOWN = 5

# A function shorter than this says little beyond its name, and a summary of three words little at all.
_LEAST_SOURCE = 30
_LEAST_SUMMARY = 4

_TOKEN = re.compile(r"\w+(?:['’](?:s|t|re|ve|ll|d|m)\b)?|[^\w\s]")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

Tell = Callable[[str], None]


class Pair(NamedTuple):
    """A text and its summary, as lower-cased tokens. reference: the summary as it was written."""

    source: tuple[str, ...]
    summary: tuple[str, ...]
    reference: str


class Encoded(NamedTuple):
    """A pair as numbers. In `extended` and `target_out` the i-th distinct source word that the vocabulary lacks
    is `len(vocabulary) + i`: it can be copied. unknowns: these words, in this order."""

    source: list[int]
    extended: list[int]
    target_in: list[int]
    target_out: list[int]
    unknowns: list[str]


class Vocabulary:
    """The most frequent words, numbered from FIRST_WORD on; `size` rows, even where there are fewer words."""

    def __init__(self, words: Sequence[str], size: int) -> None:
        self.words, self.size = tuple(words), size
        self._numbers = {word: number for number, word in enumerate(words, FIRST_WORD)}

    def encode(self, pair: Pair, target: int) -> Encoded:
        """target: the longest summary in tokens. A summary that is cut has no end, so none is learned there."""
        unknowns: dict[str, int] = {}
        source, extended = [], []
        for word in pair.source:
            number = self._numbers.get(word, UNKNOWN)
            source.append(number)
            extended.append(number or unknowns.setdefault(word, self.size + len(unknowns)))
        inputs, outputs = [START], []
        for word in pair.summary:
            number = self._numbers.get(word, UNKNOWN)
            inputs.append(number)
            outputs.append(number or unknowns.get(word, UNKNOWN))
        outputs.append(END)
        return Encoded(source, extended, inputs[:target], outputs[:target], list(unknowns))

    def decode(self, numbers: Sequence[int], unknowns: Sequence[str]) -> list[str]:
        """The words of extended numbers, of a pair with these unknowns. UNKNOWN, START and PADDING are no words."""
        return [
            unknowns[number - self.size] if number >= self.size else self.words[number - FIRST_WORD]
            for number in numbers
            # A row that stands for no word is never trained towards, yet has some probability.
            if number >= self.size or FIRST_WORD <= number < FIRST_WORD + len(self.words)
        ]


@dataclass(frozen=True)
class PairData:
    """The pairs to train on and to evaluate with, sources cut to `sequence` tokens. origin: what they are."""

    train: tuple[Pair, ...]
    evaluation: tuple[Pair, ...]
    vocabulary: Vocabulary
    sequence: int
    target: int
    origin: str
    notes: tuple[str, ...]

    @property
    def tokens_per_item(self) -> float:
        """Source and target tokens of a training pair, the mean."""
        total = sum(len(pair.source) + min(len(pair.summary) + 1, self.target) for pair in self.train)
        return total / len(self.train)

    def facts(self) -> DataFacts:
        """The facts that need no torch."""
        return DataFacts(
            len(self.train), len(self.evaluation), self.tokens_per_item, "pair", "token", self.line()
        )

    def line(self) -> str:
        """The data in one line for people."""
        return (
            f"{self.origin}: {len(self.train):,} pairs a pass, {len(self.evaluation):,} to evaluate, "
            f"{self.tokens_per_item:,.0f} tokens each, vocabulary {self.vocabulary.size:,}"
        )


def source_name(section: SummariseSection) -> str:
    """What the data is called while it is read."""
    return "the standard library's docstrings" if section.data == "builtin" else f"{Path(section.data).name}"


def read(
    config: Config, section: SummariseSection, complaints: Complaints, tell: Tell = lambda _: None
) -> PairData | None:
    """The pairs, with every mistake in `complaints`; None when they cannot be trained on."""
    before = len(complaints.problems)
    builtin = section.data == "builtin"
    pairs = _library(section, complaints, tell) if builtin else _file(section, complaints)
    if pairs is None or len(complaints.problems) > before:
        return None
    if len(pairs) == 1:
        message = f"there is one pair of text and summary: {pairs[0].reference[:60]}"
        complaints.add(KEY, message, section.data, "at least 2, one to train on and one to evaluate")
        return None
    sequence = config.batch.sequence
    count = split(len(pairs), section.eval_fraction).train
    train, evaluation = pairs[:count], pairs[count:]
    origin = f"{len(pairs):,} pairs"
    if builtin:
        origin += " of the standard library, joined"
        train, evaluation = (_joined(part, sequence) for part in (train, evaluation))
    if len(train) < config.batch.items:
        _too_few(config, len(train), complaints)
        return None
    notes = _cuts((*train, *evaluation), sequence, section.target, builtin)
    train, evaluation = (
        tuple(pair._replace(source=pair.source[:sequence]) for pair in part) for part in (train, evaluation)
    )
    words = Counter(itertools.chain.from_iterable(pair.source + pair.summary for pair in train))
    kept = sorted(words, key=lambda word: (-words[word], word))[: section.vocabulary - FIRST_WORD]
    if len(kept) < section.vocabulary - FIRST_WORD:
        notes.append(
            f"The training pairs have {len(kept):,} different words: {section.vocabulary - len(kept):,} rows of "
            f"the vocabulary of {section.vocabulary:,} stand for no word."
        )
    vocabulary = Vocabulary(kept, section.vocabulary)
    return PairData(train, evaluation, vocabulary, sequence, section.target, origin, tuple(notes))


def tokens(text: str) -> tuple[str, ...]:
    """Lower-cased words, identifiers and numbers, and every other character by itself; "don't" is one word."""
    # The same word many times is one string in memory.
    return tuple(map(sys.intern, _TOKEN.findall(text.lower())))


def _too_few(config: Config, train: int, complaints: Complaints) -> None:
    batch = config.batch
    if not train:
        complaints.add(KEY, "no pair is left to train on", suggestion="give more, or a lower eval_fraction")
        return
    key = "batch.micro" if batch.micro > train else "batch.accumulation"
    message = (
        f"one optimizer step takes {batch.items:,} pairs (micro {batch.micro} x accumulation "
        f"{batch.accumulation}), there are {train:,} to train on"
    )
    found = batch.micro if key == "batch.micro" else batch.accumulation
    complaints.add(key, message, found, f"micro x accumulation of at most {train:,}")


def _cuts(pairs: Sequence[Pair], sequence: int, target: int, builtin: bool) -> list[str]:
    notes = []
    if builtin:
        notes.append(
            f"Functions that follow each other are joined to sources of {sequence:,} tokens, cut there; their "
            "summaries likewise."
        )
    elif cut := sum(len(pair.source) > sequence for pair in pairs):
        notes.append(f"{cut:,} of {len(pairs):,} sources are cut to batch.sequence, {sequence:,} tokens.")
    if cut := sum(len(pair.summary) > target for pair in pairs):
        notes.append(f"{cut:,} of {len(pairs):,} summaries are cut to workload.target, {target:,} tokens.")
    return notes


# The standard library.


def _library(section: SummariseSection, complaints: Complaints, tell: Tell) -> tuple[Pair, ...] | None:
    pairs = library_pairs(section.pairs, tell)
    if not pairs:
        advice = "give a path to a .jsonl or .tsv file"
        message = "this Python was installed without its source or its docstrings"
        complaints.add(KEY, message, "builtin", suggestion=advice)
        return None
    return pairs


def library_pairs(limit: int | None, tell: Tell = lambda _: None) -> tuple[Pair, ...]:
    """Functions and classes of the standard library (PSF licence), without their docstring, and its first paragraph.

    In the order of the file names and of the lines; about 5,500, at most `limit`.
    """
    pairs: list[Pair] = []
    for number, text in enumerate(library_texts()):
        if number % 50 == 0:
            tell(f"reading the standard library: {number:,} files, {len(pairs):,} docstrings")
        pairs += documented(text)
        if limit is not None and len(pairs) >= limit:
            break
    return tuple(pairs[:limit])


# Kept for the life of the process: choosing a model size by measuring reads the data again for each size.
@functools.cache
def documented(text: str) -> tuple[Pair, ...]:
    """The documented functions and classes of a Python source that are worth a pair; none of a broken source."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # templates, and what is not of this Python
        return ()
    lines = text.splitlines()
    definitions = [node for node in ast.walk(tree) if isinstance(node, _DEFINITIONS)]
    pairs = []
    for node in sorted(definitions, key=lambda node: node.lineno):
        if not (docstring := ast.get_docstring(node)):
            continue
        inner = node.body[0]
        code = lines[node.lineno - 1 : inner.lineno - 1] + lines[inner.end_lineno : node.end_lineno]
        reference = re.split(r"\n\s*\n", docstring.strip())[0]
        pair = Pair(tokens("\n".join(code)), tokens(reference), reference)
        if len(pair.source) >= _LEAST_SOURCE and len(pair.summary) >= _LEAST_SUMMARY:
            pairs.append(pair)
    return tuple(pairs)


def _joined(pairs: Sequence[Pair], sequence: int) -> tuple[Pair, ...]:
    """Pairs that follow each other as one, until the sources reach `sequence` tokens."""
    joined: list[Pair] = []
    open_until = 0
    for pair in pairs:
        if open_until < sequence and joined:
            last = joined[-1]
            joined[-1] = Pair(
                last.source + pair.source, last.summary + pair.summary, f"{last.reference}\n{pair.reference}"
            )
        else:
            joined.append(pair)
        open_until = len(joined[-1].source)
    return tuple(joined)


# A user's file.


def _file(section: SummariseSection, complaints: Complaints) -> tuple[Pair, ...] | None:
    text = read_text(section.data, complaints, SUFFIXES, ("builtin",))
    if text is None:
        return None
    suffix = Path(section.data).suffix.lower()
    if suffix not in SUFFIXES:
        allowed = 'a name that ends in .jsonl (one {"source": …, "summary": …} a line) or .tsv'
        complaints.add(KEY, "the name does not say what kind of file this is", section.data, allowed)
        return None
    # Not splitlines(): it also cuts at characters that a JSON string may hold.
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    rows = _tsv(lines) if suffix == ".tsv" else ((number, _json(line)) for number, line in lines)
    pairs: list[Pair] = []
    wrong = 0
    for number, row in rows:
        if section.pairs is not None and len(pairs) == section.pairs:
            break
        found = _pair(row)
        if isinstance(found, Pair):
            pairs.append(found)
            continue
        wrong += 1
        if wrong <= _SHOWN:
            complaints.add(KEY, f"line {number:,}: {found}", section.data)
    if wrong > _SHOWN:
        complaints.add(KEY, f"{wrong - _SHOWN:,} more lines have mistakes", section.data)
    if not wrong and not pairs:
        complaints.add(KEY, "the file holds no pair", section.data)
    return tuple(pairs)


RawPair = tuple[str, str] | str  # source and summary, or what is wrong


def _pair(row: RawPair) -> Pair | str:
    if isinstance(row, str):
        return row
    pair = Pair(tokens(row[0]), tokens(row[1]), row[1])
    empty = [name for name, part in (("source", pair.source), ("summary", pair.summary)) if not part]
    return f"the {' and the '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty" if empty else pair


def _json(line: str) -> RawPair:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        at = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return f"this is not JSON{at}"
    if not isinstance(value, dict):
        return 'this is not a JSON object like {"source": "…", "summary": "…"}'
    texts = []
    for names in (SOURCE_NAMES, SUMMARY_NAMES):
        name = next((name for name in names if name in value), None)
        if name is None:
            return f"no {names[0]}: one of the fields {', '.join(names)} is needed"
        if not isinstance(value[name], str):
            return f"the field {name} is not a text"
        texts.append(value[name])
    return texts[0], texts[1]


def _tsv(lines: Sequence[tuple[int, str]]) -> Iterator[tuple[int, RawPair]]:
    """Rows of source and summary, or of the columns that a first line names so."""
    places, columns = [0, 1], 2
    names = [cell.strip().lower() for cell in lines[0][1].split("\t")] if lines else []
    found = [
        next((names.index(name) for name in wanted if name in names), None)
        for wanted in (SOURCE_NAMES, SUMMARY_NAMES)
    ]
    if found[0] is not None and found[1] is not None:
        places, columns, lines = [found[0], found[1]], len(names), lines[1:]
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) != columns:
            expected = "source and summary with a tab between" if columns == 2 else f"{columns} as in line 1"
            yield number, f"{len(cells)} column{'s' * (len(cells) > 1)}, expected {expected}"
        else:
            yield number, (cells[places[0]], cells[places[1]])
