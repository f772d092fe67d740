"""Pairs of a text and its summary: the standard library and its docstrings, or a file. Imports no torch."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ndd_engine.workloads import (
    DataFacts,
    ErrorList,
    Settings,
    json_strings,
    numbered_lines,
    read_text,
    split,
)

from .builtin_texts import library_texts, source_name

# The special tokens, before the words of the vocabulary.
UNKNOWN, START, END, PADDING = range(4)
FIRST_WORD = 4

SOURCE_NAMES = ("source", "article", "text", "document")
SUMMARY_NAMES = ("summary", "target", "abstract")
SUFFIXES = (".jsonl", ".ndjson", ".tsv")

# In tokens. A shorter function has little content beyond its name, and so has a shorter summary.
_MIN_SOURCE = 30
_MIN_SUMMARY = 4

_TOKEN = re.compile(r"\w+(?:['’](?:s|t|re|ve|ll|d|m)\b)?|[^\w\s]")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Pair(NamedTuple):
    """A text and its summary, as lower-cased tokens. reference: the original summary."""

    source: tuple[str, ...]
    summary: tuple[str, ...]
    reference: str


class Encoded(NamedTuple):
    """A pair as numbers.

    In `extended` and `target_out`, `len(vocabulary) + i` is the i-th distinct source word that is not in the
    vocabulary, so that it can be copied. unknowns: these words in order.
    """

    source: list[int]
    extended: list[int]
    target_in: list[int]
    target_out: list[int]
    unknowns: list[str]


class Vocabulary:
    """The most frequent words, numbered from FIRST_WORD on; `size` rows, even if there are fewer words."""

    def __init__(self, words: Sequence[str], size: int) -> None:
        self.words, self.size = tuple(words), size
        self._numbers = {word: number for number, word in enumerate(words, FIRST_WORD)}

    def encode(self, pair: Pair, target: int) -> Encoded:
        """target: the maximum length of a summary in tokens. A summary that is cut has no END."""
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
        """The words of extended numbers, for a pair with these unknowns. Special tokens are skipped."""
        return [
            unknowns[number - self.size] if number >= self.size else self.words[number - FIRST_WORD]
            for number in numbers
            # A row without a word is never a target, but has some probability.
            if number >= self.size or FIRST_WORD <= number < FIRST_WORD + len(self.words)
        ]


@dataclass(frozen=True)
class PairData:
    """Training and evaluation pairs, sources cut to `batch.sequence` tokens."""

    train: list[Pair]
    evaluation: list[Pair]
    vocabulary: Vocabulary
    notes: list[str]
    facts: DataFacts


def read(settings: Settings) -> PairData:
    """The pairs. Raises ConfigError with every error."""
    problems, options, sequence = settings.problems, settings.options, settings.sequence
    settings.progress(
        f"reading {source_name(settings.data, builtin='the docstrings of the standard library')}"
    )
    builtin, target, size = settings.data == "builtin", options["target"], options["vocabulary"]
    pairs = library_pairs(options["pairs"], settings.progress) if builtin else _read_file(settings)
    if not pairs:
        message = "this Python is installed without its source or its docstrings"
        problems.stop(message, suggestion="use a path to a .jsonl or .tsv file")
    if len(pairs) == 1:
        message = f"there is only one pair of text and summary: {pairs[0].reference[:60]}"
        problems.stop(message, "at least 2, one for training and one for evaluation")
    count, _ = split(len(pairs), options["eval_fraction"])
    train, evaluation = list(pairs[:count]), list(pairs[count:])
    origin = f"{len(pairs):,} pairs"
    notes = []
    if builtin:
        origin += " from the standard library, joined"
        train, evaluation = _joined(train, sequence), _joined(evaluation, sequence)
        notes.append(
            f"Consecutive functions are joined until a source has {sequence:,} tokens, where it is cut; their "
            "summaries are joined too."
        )
    if not train:
        problems.stop("no pair is left for training", suggestion="add more, or lower workload.eval_fraction")
    settings.check_items(len(train), "pairs")
    problems.check()
    every = (*train, *evaluation)
    if not builtin and (cut := sum(len(pair.source) > sequence for pair in every)):
        notes.append(f"{cut:,} of {len(every):,} sources are cut to batch.sequence, {sequence:,} tokens.")
    if cut := sum(len(pair.summary) > target for pair in every):
        notes.append(f"{cut:,} of {len(every):,} summaries are cut to workload.target, {target:,} tokens.")
    train, evaluation = (
        [pair._replace(source=pair.source[:sequence]) for pair in part] for part in (train, evaluation)
    )
    words = Counter(itertools.chain.from_iterable(pair.source + pair.summary for pair in train))
    kept = sorted(words, key=lambda word: (-words[word], word))[: size - FIRST_WORD]
    if len(kept) < size - FIRST_WORD:
        notes.append(
            f"The training pairs have only {len(kept):,} different words: {size - len(kept):,} rows of the vocabulary "
            f"of {size:,} are not used."
        )
    each = sum(len(pair.source) + min(len(pair.summary) + 1, target) for pair in train) / len(train)
    text = (
        f"{origin}: {len(train):,} pairs per epoch, {len(evaluation):,} for evaluation, {each:,.0f} tokens each, "
        f"vocabulary {size:,}"
    )
    facts = DataFacts(len(train), len(evaluation), each, "pair", "token", text)
    return PairData(train, evaluation, Vocabulary(kept, size), notes, facts)


def tokens(text: str) -> tuple[str, ...]:
    """Lower-cased words, identifiers, numbers, and every other character by itself; "don't" is one word."""
    # Interned: a repeated word takes memory only once.
    return tuple(map(sys.intern, _TOKEN.findall(text.lower())))


def library_pairs(limit: int | None, progress: Callable[[str], None] = lambda _: None) -> list[Pair]:
    """Functions and classes of the standard library (PSF licence), each with the first paragraph of its docstring.

    About 5,500, or up to `limit`, in the order of file names and lines. The source is without the docstring.
    """
    pairs: list[Pair] = []
    for number, text in enumerate(library_texts()):
        if number % 50 == 0:
            progress(f"reading the standard library: {number:,} files, {len(pairs):,} docstrings")
        pairs += documented(text)
        if limit is not None and len(pairs) >= limit:
            break
    return pairs[:limit]


# Cached: measuring to choose a model size reads the data again for each size.
@functools.cache
def documented(text: str) -> tuple[Pair, ...]:
    """A pair for every function and class of a Python source that is long enough; () if the source is invalid."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # templates, and syntax of other Python versions
        return ()
    lines = text.splitlines()
    pairs = []
    for node in sorted(_definitions(tree), key=lambda node: node.lineno):
        if not (docstring := ast.get_docstring(node)):
            continue
        inner = node.body[0]
        code = lines[node.lineno - 1 : inner.lineno - 1] + lines[inner.end_lineno : node.end_lineno]
        reference = re.split(r"\n\s*\n", docstring.strip())[0]
        pair = Pair(tokens("\n".join(code)), tokens(reference), reference)
        if len(pair.source) >= _MIN_SOURCE and len(pair.summary) >= _MIN_SUMMARY:
            pairs.append(pair)
    return tuple(pairs)


def _definitions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """All functions and classes. Only statements are looked at: `ast.walk` takes as long as parsing."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, part, ()):
            if isinstance(node, _DEFINITIONS):
                yield node
            yield from _definitions(node)


def _joined(pairs: Sequence[Pair], sequence: int) -> list[Pair]:
    """Consecutive pairs joined until the source has `sequence` tokens."""
    joined: list[Pair] = []
    for pair in pairs:
        if joined and len(joined[-1].source) < sequence:
            source, summary, reference = joined.pop()
            pair = Pair(source + pair.source, summary + pair.summary, f"{reference}\n{pair.reference}")
        joined.append(pair)
    return joined


def _read_file(settings: Settings) -> list[Pair]:
    problems, limit = settings.problems, settings.options["pairs"]
    text = read_text(problems, SUFFIXES, ("builtin",))
    suffix = Path(settings.data).suffix.lower()
    if suffix not in SUFFIXES:
        allowed = 'a name that ends in .jsonl (one {"source": …, "summary": …} a line) or .tsv'
        problems.stop("the suffix of the file name is not supported", allowed)
    lines = numbered_lines(text)
    if suffix == ".tsv":
        columns = _columns(lines[0][1].split("\t") if lines else [])
        rest = lines if columns is None else lines[1:]
        pairs = ErrorList(problems).parse(rest, lambda line: _cells(line, columns), limit)
    else:
        errors = ErrorList(problems, '{"source": "…", "summary": "…"}')
        pairs = errors.parse(lines, lambda line: _pair(*json_strings(line, _keys)), limit)
    if not pairs:
        problems.stop("there are no pairs in this file")
    return pairs


def _pair(source: str, summary: str) -> Pair:
    """Raises ValueError if one is empty."""
    pair = Pair(tokens(source), tokens(summary), summary)
    empty = [name for name, part in (("source", pair.source), ("summary", pair.summary)) if not part]
    if empty:
        raise ValueError(f"the {' and the '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty")
    return pair


def _keys(value: Mapping[str, Any]) -> list[str]:
    """The keys of the source and the summary. Raises ValueError if one is missing."""
    found = []
    for names in (SOURCE_NAMES, SUMMARY_NAMES):
        name = next((name for name in names if name in value), None)
        if name is None:
            raise ValueError(f"there is no {names[0]}: one of the fields {', '.join(names)} is needed")
        found.append(name)
    return found


def _columns(header: Sequence[str]) -> tuple[int, int, int] | None:
    """(place of the source, place of the summary, number of columns), or None if the line has no such names."""
    names = {cell.strip().lower(): place for place, cell in reversed(list(enumerate(header)))}
    try:
        source, summary = _keys(names)
    except ValueError:
        return None
    return names[source], names[summary], len(header)


def _cells(line: str, columns: tuple[int, int, int] | None) -> Pair:
    """The pair in a row of source and summary, or of these columns. Raises ValueError for another number of cells."""
    source, summary, count = columns or (0, 1, 2)
    cells = line.split("\t")
    if len(cells) != count:
        expected = "source and summary separated by a tab" if count == 2 else f"{count} as in line 1"
        raise ValueError(f"{len(cells)} column{'s' * (len(cells) > 1)}, expected {expected}")
    return _pair(cells[source], cells[summary])
