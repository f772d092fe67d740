"""Documents to fine-tune on: the manual's longest topics, a file or a folder, shared out as examples. No torch here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndd_engine.config.schema import BatchSection, Config
from ndd_engine.config.workload_sections import FinetuneSection

from .files import KEY, MAX_BYTES, read_text
from .windows import Complaints, DataFacts

WORDS = ("builtin",)
FOLDER_SUFFIXES = (".txt", ".text", ".md")
SUFFIXES = (*FOLDER_SUFFIXES, ".jsonl")
SHORTEST = (
    64  # characters of a document: two words of the encoder at least, so that there is a token to predict
)
PIECE = 16_000  # characters of a document where a text names none
SHOWN_ERRORS = 5  # lines told one by one; the rest is counted
JOINT = "\n\n"  # between documents that make one example
SHARED = 40  # characters from which a paragraph counts as the same text in two topics

_SEPARATOR = re.compile(r"^---[ \t\r]*$", re.MULTILINE)


@dataclass(frozen=True)
class DocumentData:
    """What to train and to evaluate on.

    documents: the training documents once each, as the encoder learns from them. train: the examples made of them.
    evaluation: other documents. sequence: tokens after which an example is cut.
    """

    documents: tuple[str, ...]
    train: tuple[str, ...]
    evaluation: tuple[str, ...]
    sequence: int
    notes: tuple[str, ...]

    def facts(self) -> DataFacts:
        """The facts that need no torch; tokens_per_item is an upper bound, as nothing is encoded here."""
        tokens = self._mean_at_most()
        text = f"{self.line()}; at most {tokens:,.0f} tokens in a mean example (not encoded yet)"
        return DataFacts(len(self.train), len(self.evaluation), tokens, "example", "token", text)

    def line(self) -> str:
        """The data in one line for people."""
        lengths = [len(text) for text in self.train]
        span = " to ".join(f"{length:,}" for length in dict.fromkeys((min(lengths), max(lengths))))
        return f"{len(lengths):,} examples of {span} characters, {len(self.evaluation):,} to evaluate"

    def _mean_at_most(self) -> float:
        # No token is shorter than a byte, and the first one is not predicted.
        most = (min(self.sequence, utf8_bytes(text) - 1) for text in self.train)
        return sum(most) / len(self.train)


@dataclass
class _Found:
    """Documents in their order, and what a user should know about them."""

    documents: list[str]
    notes: list[str] = field(default_factory=list)


def source_name(section: FinetuneSection) -> str:
    """What the documents are called while they are read."""
    return "the manual topics" if section.data == "builtin" else Path(section.data).name


def read(config: Config, section: FinetuneSection, complaints: Complaints) -> DocumentData | None:
    """The documents, with every mistake of them in `complaints`; None when there are no usable ones."""
    before = len(complaints.problems)
    if section.data == "builtin":
        found = manual_topics(section, complaints)
    else:
        found = _own_documents(section, complaints)
    _check_step(section, config.batch, complaints)
    if found is None:
        return None
    wanted = section.examples + section.eval_examples
    if len(found.documents) < wanted:
        _complain_too_few(section, found, complaints)
    if len(complaints.problems) > before:
        return None
    notes = list(found.notes)
    if section.data != "builtin" and len(found.documents) > wanted:
        rest = len(found.documents) - wanted
        notes.append(
            f"Documents that are not used: {rest:,} (see workload.examples, workload.eval_examples)."
        )
    chars = section.document_chars or None
    chosen = [text[:chars] for text in found.documents[:wanted]]
    documents, evaluation = chosen[: section.examples], chosen[section.examples :]
    train = documents
    if section.data == "builtin" and chars is not None:
        train = joined(documents, chars)
        count = sum(example != document for example, document in zip(train, documents, strict=True))
        if count:
            notes.append(
                f"Of {len(train):,} examples {count:,} are shorter than {chars:,} characters and go on with the "
                "documents after them."
            )
    return DocumentData(
        tuple(documents), tuple(train), tuple(evaluation), config.batch.sequence, tuple(notes)
    )


def joined(documents: Sequence[str], chars: int) -> list[str]:
    """An example per document: it and those after it (after the last the first) until there are `chars` characters.

    No document stands twice in an example, so one may stay shorter.
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
    """Bytes of a text, whose lone surrogates (from JSON escapes) count too."""
    return len(text.encode("utf-8", "surrogatepass"))


def manual_topics(section: FinetuneSection, complaints: Complaints) -> _Found | None:
    """The topics of Python's manual (PSF licence), the longest first; None after complaining.

    After those to train on only such as share no paragraph with them: many a topic is a part of a longer one, and
    evaluating on what was trained on would measure memory.
    """
    try:
        from pydoc_data.topics import topics  # some distributions leave it out
    except ImportError:
        advice = "give a path to a text file or a folder of them"
        complaints.add(KEY, "this Python was installed without pydoc_data", "builtin", suggestion=advice)
        return None
    ordered = [topics[name] for name in sorted(topics) if len(topics[name]) >= SHORTEST]
    ordered.sort(key=len, reverse=True)
    train, others = ordered[: section.examples], ordered[section.examples :]
    if not others:
        message = f"the manual has {len(ordered)} topics, and some must be left to evaluate on"
        complaints.add("workload.examples", message, section.examples, f"at most {len(ordered) - 1}")
        return None
    known = {paragraph for text in train for paragraph in _paragraphs(text)}
    apart = [text for text in others if known.isdisjoint(_paragraphs(text))]
    if len(apart) < section.eval_examples:
        message = f"{len(apart)} manual topics are no part of the {len(train)} that are trained on"
        allowed = f"at most {len(apart)}" if apart else None
        advice = "or a smaller workload.examples"
        complaints.add("workload.eval_examples", message, section.eval_examples, allowed, advice)
        return None
    evaluation = apart[: section.eval_examples]
    notes = []
    if skipped := others.index(evaluation[-1]) + 1 - len(evaluation):
        notes.append(f"Not evaluated on: {skipped} topics that repeat paragraphs of the training examples.")
    return _Found([*train, *evaluation], notes)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        plain = " ".join(paragraph.split())
        if len(plain) >= SHARED:
            yield plain


def _own_documents(section: FinetuneSection, complaints: Complaints) -> _Found | None:
    """A user's documents, the longest first, each once; None after complaining."""
    notes: list[str] = []
    texts: list[str] | None
    if _is_folder(section.data):
        texts = _folder(section.data, complaints)
    else:
        text = read_text(section.data, complaints, SUFFIXES, WORDS)
        if text is None:
            texts = None
        elif section.data.lower().endswith(".jsonl"):
            texts = _json_lines(text, section.data, complaints)
        else:
            texts = _parts(text, section, notes)
    if texts is None:
        return None
    usable = [text for text in texts if len(text) >= SHORTEST and not text.isspace()]
    once = list(dict.fromkeys(usable))
    if len(usable) < len(texts):
        notes.append(f"Documents left out: {len(texts) - len(usable):,} of fewer than {SHORTEST} characters.")
    if len(once) < len(usable):
        notes.append(f"Documents left out: {len(usable) - len(once):,} that are the same as another one.")
    return _Found(sorted(once, key=len, reverse=True), notes)


def _is_folder(data: str) -> bool:
    try:
        return Path(data).expanduser().is_dir()
    except (OSError, RuntimeError, ValueError):  # a name that cannot be looked up: reading it says why
        return False


def _folder(data: str, complaints: Complaints) -> list[str] | None:
    """The text files below a folder, in the order of their paths; None after complaining about each that is none."""
    top = Path(data).expanduser()
    paths: list[Path] = []
    before = len(complaints.problems)

    def unreadable(error: OSError) -> None:
        complaints.add(KEY, f"the folder cannot be read: {error.strerror}", str(error.filename))

    for folder, subfolders, names in os.walk(top, onerror=unreadable):
        subfolders.sort()
        paths += [Path(folder) / name for name in sorted(names) if _is_text_name(name)]
    if not paths and len(complaints.problems) == before:
        complaints.add(KEY, "there are no text files in this folder", data, ", ".join(FOLDER_SUFFIXES))
    texts: list[str] = []
    total = 0
    for path in paths:
        text = read_text(str(path), complaints, FOLDER_SUFFIXES)
        if text is not None:
            texts.append(text.strip("\r\n"))
            total += len(text)
        if total > MAX_BYTES:
            message = "the texts are held in memory, and together they are too long"
            complaints.add(KEY, message, data, f"at most {MAX_BYTES:,} characters")
            break
    problems = complaints.problems[before:]
    if len(problems) > SHOWN_ERRORS:
        del complaints.problems[before + SHOWN_ERRORS :]
        complaints.add(KEY, f"{len(problems) - SHOWN_ERRORS:,} more mistakes like these", data)
    return None if problems else texts


def _is_text_name(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in FOLDER_SUFFIXES


def _parts(text: str, section: FinetuneSection, notes: list[str]) -> list[str]:
    """A text cut at its lines of "---"; without any, into pieces of equal length from its beginning."""
    if _SEPARATOR.search(text):
        parts = (part.strip("\r\n") for part in _SEPARATOR.split(text))
        return [part for part in parts if part]
    wanted = section.examples + section.eval_examples
    length = max(min(section.document_chars or PIECE, len(text) // wanted), 1)
    notes.append(
        f'The text has no line of "---": it is cut into {wanted:,} pieces of {length:,} characters, which are '
        f"{min(wanted * length / len(text), 1):.0%} of it."
    )
    return [text[start : start + length] for start in range(0, wanted * length, length)]


def _json_lines(text: str, data: str, complaints: Complaints) -> list[str] | None:
    """The examples of a .jsonl file; None after complaining, with line numbers."""
    texts: list[str] = []
    errors = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        content, message = _example(line)
        if message is None:
            texts.append(content)
            continue
        errors += 1
        if errors <= SHOWN_ERRORS:
            allowed = '{"text": "…"} or {"prompt": "…", "completion": "…"}'
            complaints.add(KEY, f"line {number:,}: {message}", data, allowed)
    if errors > SHOWN_ERRORS:
        complaints.add(KEY, f"{errors - SHOWN_ERRORS:,} more lines like these", data)
    if not texts and not errors:
        complaints.add(KEY, "there are no examples in this file", data)
        return None
    return None if errors else texts


def _example(line: str) -> tuple[str, str | None]:
    """(the text of a line of JSON, what is wrong with it or None)."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg} at column {error.colno:,}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        return "", f"this is not JSON: {reason}"
    if not isinstance(value, dict):
        return "", f"this is {_kind(value)}, not an object"
    keys = ("text",) if "text" in value else ("prompt", "completion")
    missing = [key for key in keys if key not in value]
    if missing:
        return "", f'there is no "{missing[0]}"' if len(missing) == 1 else 'there is no "text"'
    wrong = [key for key in keys if not isinstance(value[key], str)]
    if wrong:
        return "", f'"{wrong[0]}" is {_kind(value[wrong[0]])}, not a text'
    return "".join(value[key] for key in keys), None


def _kind(value: Any) -> str:
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")


def _check_step(section: FinetuneSection, batch: BatchSection, complaints: Complaints) -> None:
    """Complains when the examples do not make one optimizer step."""
    if batch.items <= section.examples:
        return
    key, found = ("batch.accumulation", batch.accumulation)
    if batch.micro > section.examples:
        key, found = ("batch.micro", batch.micro)
    message = (
        f"one optimizer step takes {batch.items:,} examples (micro {batch.micro} x accumulation "
        f"{batch.accumulation}), and workload.examples is {section.examples:,}"
    )
    complaints.add(key, message, found, f"micro x accumulation of at most {section.examples:,}")


def _complain_too_few(section: FinetuneSection, found: _Found, complaints: Complaints) -> None:
    count = len(found.documents)
    message = (
        f"{section.examples:,} examples to train on and {section.eval_examples:,} to evaluate on are wanted, and "
        f"the data holds {count:,} usable documents"
    )
    if found.notes:
        message = f"{message} ({' '.join(found.notes)})"
    evaluation = max(1, min(section.eval_examples, count // 5))
    if count < 3:
        complaints.add("workload.examples", message, section.examples, suggestion="give more documents")
        return
    advice = f"set workload.examples to {count - evaluation:,} and workload.eval_examples to {evaluation:,}"
    complaints.add("workload.examples", message, section.examples, f"at most {count - 1:,}", advice)
