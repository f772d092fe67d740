"""Documents to fine-tune on: the manual's longest topics, a file or a folder, made into examples. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import FinetuneSection
from ndd_engine.errors import ConfigError

from .files import (
    MAX_BYTES,
    UNREADABLE_PATH,
    json_strings,
    manual_topics,
    numbered_lines,
    parse_lines,
    read_text,
    source_name,
)
from .problems import SHOWN_ERRORS, ErrorList, Problems, Progress, check_step
from .windows import DataFacts

WORDS = ("builtin",)
FOLDER_SUFFIXES = (".txt", ".text", ".md")
SUFFIXES = (*FOLDER_SUFFIXES, ".jsonl")
# Characters of a document: at least two words of the encoder, so that there is a token to predict.
SHORTEST = 64
PIECE = 16_000  # characters of a document cut from a text without separators
JOINT = "\n\n"  # between the documents of an example
SHARED = 40  # characters; two topics that share a paragraph this long have text in common

_SEPARATOR = re.compile(r"^---[ \t\r]*$", re.MULTILINE)


@dataclass(frozen=True)
class DocumentData:
    """What to train and to evaluate on.

    documents: each training document once, for learning the encoder. train: the examples made of them. evaluation:
    other documents. sequence: the length in tokens at which an example is cut.
    """

    documents: tuple[str, ...]
    train: tuple[str, ...]
    evaluation: tuple[str, ...]
    sequence: int
    notes: tuple[str, ...]

    def facts(self) -> DataFacts:
        """The facts that need no torch; tokens_per_item is an upper bound, since nothing is encoded here."""
        # No token is shorter than a byte, and the first one is not predicted.
        tokens = sum(min(self.sequence, utf8_bytes(text) - 1) for text in self.train) / len(self.train)
        text = f"{self.line()}; at most {tokens:,.0f} tokens per example on average (not encoded yet)"
        return DataFacts(len(self.train), len(self.evaluation), tokens, "example", "token", text)

    def line(self) -> str:
        lengths = [len(text) for text in self.train]
        span = " to ".join(f"{length:,}" for length in dict.fromkeys((min(lengths), max(lengths))))
        return f"{len(lengths):,} examples of {span} characters, {len(self.evaluation):,} for evaluation"


def read_documents(
    config: Config, section: FinetuneSection, problems: Problems, progress: Progress
) -> DocumentData:
    """The documents. Raises ConfigError with every error."""
    progress(f"reading {source_name(section.data, builtin='the manual topics')}")
    builtin = section.data == "builtin"
    notes: list[str] = []
    check_step(config, section.examples, "examples", problems, "or a higher workload.examples")
    found = (_topics if builtin else _own_documents)(section, problems, notes)
    wanted = section.examples + section.eval_examples
    if len(found) < wanted:
        _add_too_few(section, len(found), notes, problems)
    problems.check()
    if not builtin and len(found) > wanted:
        rest = len(found) - wanted
        notes.append(f"Unused documents: {rest:,} (see workload.examples and workload.eval_examples).")
    chars = section.document_chars or None
    chosen = [text[:chars] for text in found[:wanted]]
    documents, evaluation = chosen[: section.examples], chosen[section.examples :]
    train = documents
    if builtin and chars is not None:
        train = joined(documents, chars)
        count = sum(example != document for example, document in zip(train, documents, strict=True))
        if count:
            notes.append(
                f"{count:,} of {len(train):,} documents are shorter than {chars:,} characters: their examples "
                "continue with the next documents."
            )
    return DocumentData(
        tuple(documents), tuple(train), tuple(evaluation), config.batch.sequence, tuple(notes)
    )


def joined(documents: Sequence[str], chars: int) -> list[str]:
    """An example per document: the document and the next ones (cyclically), up to `chars` characters.

    An example contains no document twice, so it may be shorter.
    """
    examples = []
    for first in range(len(documents)):
        text = documents[first]
        for offset in range(1, len(documents)):
            if len(text) >= chars:
                break
            text += JOINT + documents[(first + offset) % len(documents)]
        examples.append(text[:chars])
    return examples


def utf8_bytes(text: str) -> int:
    """Length of a text in bytes, including lone surrogates (from JSON escapes)."""
    return len(text.encode("utf-8", "surrogatepass"))


def _topics(section: FinetuneSection, problems: Problems, notes: list[str]) -> list[str]:
    """The manual's topics, longest first.

    Evaluation topics share no paragraph with the training topics: many topics are part of a longer one, and evaluating
    on training text would measure memorisation.
    """
    topics = manual_topics(problems, "use a path to a text file or to a folder of text files")
    ordered = sorted((text for text in topics if len(text) >= SHORTEST), key=len, reverse=True)
    train, others = ordered[: section.examples], ordered[section.examples :]
    if not others:
        message = f"the manual has {len(ordered)} topics, and at least one is needed for evaluation"
        problems.add("workload.examples", message, section.examples, f"at most {len(ordered) - 1}")
        problems.check()
    known = {paragraph for text in train for paragraph in _paragraphs(text)}
    apart = [text for text in others if known.isdisjoint(_paragraphs(text))]
    if len(apart) < section.eval_examples:
        message = f"only {len(apart)} manual topics share no text with the {len(train)} training topics"
        allowed = f"at most {len(apart)}" if apart else None
        advice = "or a smaller workload.examples"
        problems.add("workload.eval_examples", message, section.eval_examples, allowed, advice)
        problems.check()
    evaluation = apart[: section.eval_examples]
    if skipped := others.index(evaluation[-1]) + 1 - len(evaluation):
        notes.append(
            f"Not used for evaluation: {skipped} topics that share paragraphs with the training examples."
        )
    return [*train, *evaluation]


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        plain = " ".join(paragraph.split())
        if len(plain) >= SHARED:
            yield plain


def _own_documents(section: FinetuneSection, problems: Problems, notes: list[str]) -> list[str]:
    """The documents of a file or folder, longest first, without duplicates."""
    if _is_folder(section.data):
        texts = _folder(problems)
    else:
        text = read_text(problems, SUFFIXES, WORDS)
        jsonl = section.data.lower().endswith(".jsonl")
        texts = _json_lines(text, problems) if jsonl else _parts(text, section, notes)
    usable = [text for text in texts if len(text) >= SHORTEST and not text.isspace()]
    once = list(dict.fromkeys(usable))
    if len(usable) < len(texts):
        notes.append(f"Ignored documents: {len(texts) - len(usable):,} of fewer than {SHORTEST} characters.")
    if len(once) < len(usable):
        notes.append(f"Ignored documents: {len(usable) - len(once):,} duplicates.")
    return sorted(once, key=len, reverse=True)


def _is_folder(data: str) -> bool:
    try:
        return Path(data).expanduser().is_dir()
    except UNREADABLE_PATH:  # reading the path reports why
        return False


def _folder(problems: Problems) -> list[str]:
    """The text files below a folder, sorted by path. Raises ConfigError with every unusable file."""
    paths: list[Path] = []
    before = len(problems.found)

    def is_text(name: str) -> bool:
        return not name.startswith(".") and Path(name).suffix.lower() in FOLDER_SUFFIXES

    def unreadable(error: OSError) -> None:
        problems.of(str(error.filename)).add_data(f"the folder cannot be read: {error.strerror}")

    for folder, subfolders, names in os.walk(Path(problems.data).expanduser(), onerror=unreadable):
        subfolders.sort()
        paths += [Path(folder) / name for name in sorted(names) if is_text(name)]
    if not paths and len(problems.found) == before:
        problems.add_data("there are no text files in this folder or below it", ", ".join(FOLDER_SUFFIXES))
    texts: list[str] = []
    total = 0
    for path in paths:
        with suppress(ConfigError):  # the error is in `problems`
            text = read_text(problems.of(str(path)), FOLDER_SUFFIXES)
            texts.append(text.strip("\r\n"))
            total += len(text)
        if total > MAX_BYTES:
            message = "the texts are too long in total to be kept in memory"
            problems.add_data(message, f"at most {MAX_BYTES:,} characters")
            break
    errors = len(problems.found) - before
    if errors > SHOWN_ERRORS:
        del problems.found[before + SHOWN_ERRORS :]
        problems.add_data(f"{errors - SHOWN_ERRORS:,} more files with errors")
    if errors:
        problems.check()
    return texts


def _parts(text: str, section: FinetuneSection, notes: list[str]) -> list[str]:
    """A text split at lines of "---"; without any, cut into pieces of equal length from its start."""
    if _SEPARATOR.search(text):
        parts = (part.strip("\r\n") for part in _SEPARATOR.split(text))
        return [part for part in parts if part]
    wanted = section.examples + section.eval_examples
    length = max(min(section.document_chars or PIECE, len(text) // wanted), 1)
    notes.append(
        f'The text has no lines of "---": it is cut into {wanted:,} pieces of {length:,} characters, '
        f"{min(wanted * length / len(text), 1):.0%} of the text."
    )
    return [text[start : start + length] for start in range(0, wanted * length, length)]


def _json_lines(text: str, problems: Problems) -> list[str]:
    """The examples of a .jsonl file. Raises ConfigError with the lines of all errors."""
    errors = ErrorList(problems, '{"text": "…"} or {"prompt": "…", "completion": "…"}')
    texts = parse_lines(numbered_lines(text), _example, errors)
    if not texts:
        problems.stop("there are no examples in this file")
    return texts


def _example(line: str) -> str:
    """The text of a line of JSON. Raises ValueError with what is wrong with it."""

    def keys(value: Mapping[str, Any]) -> Sequence[str]:
        if "text" in value:
            return ("text",)
        missing = [key for key in ("prompt", "completion") if key not in value]
        if missing:
            raise ValueError(f'there is no "{missing[0] if len(missing) == 1 else "text"}"')
        return ("prompt", "completion")

    return "".join(json_strings(line, keys))


def _add_too_few(section: FinetuneSection, count: int, notes: Sequence[str], problems: Problems) -> None:
    message = (
        f"{section.examples:,} training and {section.eval_examples:,} evaluation examples are needed, but the data has "
        f"only {count:,} usable documents"
    )
    if notes:
        message = f"{message} ({' '.join(notes)})"
    evaluation = max(1, min(section.eval_examples, count // 5))
    if count < 3:
        problems.add("workload.examples", message, section.examples, suggestion="add more documents")
        return
    advice = f"set workload.examples to {count - evaluation:,} and workload.eval_examples to {evaluation:,}"
    problems.add("workload.examples", message, section.examples, f"at most {count - 1:,}", advice)
