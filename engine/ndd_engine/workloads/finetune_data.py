"""Documents to fine-tune on: the manual's longest topics, a file or a folder, made into examples. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ndd_engine.workloads import (
    DataFacts,
    ErrorList,
    Settings,
    is_folder,
    json_strings,
    numbered_lines,
    read_text,
    read_texts,
)

from .builtin_texts import manual_topics, source_name

SUFFIXES = (".txt", ".text", ".md")
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
    other documents.
    """

    documents: list[str]
    train: list[str]
    evaluation: list[str]
    notes: list[str]
    text: str
    facts: DataFacts


def read(settings: Settings) -> DocumentData:
    """The documents. Raises ConfigError with every error."""
    options, problems, notes = settings.options, settings.problems, list[str]()
    settings.progress(f"reading {source_name(settings.data, builtin='the manual topics')}")
    builtin, count = settings.data == "builtin", options["examples"]
    settings.check_items(count, "examples", "or a higher workload.examples")
    found = (_topics if builtin else _own_documents)(settings, notes)
    wanted = count + options["eval_examples"]
    if len(found) < wanted:
        _add_too_few(settings, len(found), notes)
    problems.check()
    if not builtin and len(found) > wanted:
        rest = f"{len(found) - wanted:,} (see workload.examples and workload.eval_examples)"
        notes.append(f"Unused documents: {rest}.")
    chars = options["document_chars"] or None
    chosen = [text[:chars] for text in found[:wanted]]
    train = documents = chosen[:count]
    if builtin and chars is not None:
        train = [_joined(documents[first:] + documents[:first], chars) for first in range(count)]
        if longer := sum(example != document for example, document in zip(train, documents, strict=True)):
            notes.append(
                f"{longer:,} of {count:,} documents are shorter than {chars:,} characters: their examples continue "
                "with the next documents."
            )
    span = " to ".join(f"{length:,}" for length in sorted({min(map(len, train)), max(map(len, train))}))
    text = f"{count:,} examples of {span} characters, {wanted - count:,} for evaluation"
    # No token is shorter than a byte, and the first one is not predicted.
    most = sum(min(settings.sequence, len(utf8(text)) - 1) for text in train) / count
    bound = f"{text}; at most {most:,.0f} tokens per example on average (not encoded yet)"
    facts = DataFacts(count, wanted - count, most, "example", "token", bound)
    return DocumentData(documents, train, chosen[count:], notes, text, facts)


def _joined(documents: Sequence[str], chars: int) -> str:
    """The first document, continued with the next ones up to `chars` characters; each stands in it once."""
    text = documents[0]
    for document in documents[1:]:
        if len(text) < chars:
            text += JOINT + document
    return text[:chars]


def utf8(text: str) -> bytes:
    """UTF-8, including lone surrogates (from JSON escapes)."""
    return text.encode("utf-8", "surrogatepass")


def _topics(settings: Settings, notes: list[str]) -> list[str]:
    """The manual's topics, longest first.

    Evaluation topics share no paragraph with the training topics: many topics are part of a longer one, and evaluating
    on training text would measure memorisation.
    """
    problems = settings.problems
    count, evaluated = settings.options["examples"], settings.options["eval_examples"]
    topics = manual_topics(problems, "use a path to a text file or to a folder of text files")
    ordered = sorted((text for text in topics if len(text) >= SHORTEST), key=len, reverse=True)
    train, others = ordered[:count], ordered[count:]
    if not others:
        message = f"the manual has {len(ordered):,} topics, and at least one is needed for evaluation"
        problems.add("workload.examples", message, count, f"at most {len(ordered) - 1}")
        problems.check()
    known = {paragraph for text in train for paragraph in _paragraphs(text)}
    apart = [text for text in others if known.isdisjoint(_paragraphs(text))]
    if len(apart) < evaluated:
        message = f"only {len(apart):,} manual topics share no text with the {len(train):,} training topics"
        allowed = f"at most {len(apart)}" if apart else None
        problems.add("workload.eval_examples", message, evaluated, allowed, "or a smaller workload.examples")
        problems.check()
    evaluation = apart[:evaluated]
    if skipped := others.index(evaluation[-1]) + 1 - len(evaluation):
        notes.append(
            f"Not used for evaluation: {skipped:,} topics that share paragraphs with the training examples."
        )
    return [*train, *evaluation]


def _paragraphs(text: str) -> Iterator[str]:
    plain = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return (paragraph for paragraph in plain if len(paragraph) >= SHARED)


def _own_documents(settings: Settings, notes: list[str]) -> list[str]:
    """The documents of a file or folder, longest first, without duplicates."""
    problems = settings.problems
    if is_folder(settings.data):
        texts = read_texts(problems, SUFFIXES)
    else:
        text = read_text(problems, (*SUFFIXES, ".jsonl"), ("builtin",))
        if settings.data.lower().endswith(".jsonl"):
            errors = ErrorList(problems, '{"text": "…"} or {"prompt": "…", "completion": "…"}')
            texts = errors.parse(numbered_lines(text), lambda line: "".join(json_strings(line, _keys)))
            if not texts:
                problems.stop("there are no examples in this file")
        else:
            texts = _parts(text, settings, notes)
    usable = [text for text in texts if len(text) >= SHORTEST and not text.isspace()]
    once = list(dict.fromkeys(usable))
    if len(usable) < len(texts):
        notes.append(f"Ignored documents: {len(texts) - len(usable):,} of fewer than {SHORTEST} characters.")
    if len(once) < len(usable):
        notes.append(f"Ignored documents: {len(usable) - len(once):,} duplicates.")
    return sorted(once, key=len, reverse=True)


def _parts(text: str, settings: Settings, notes: list[str]) -> list[str]:
    """A text split at lines of "---"; without any, cut into pieces of equal length from its start."""
    if _SEPARATOR.search(text):
        return list(filter(None, (part.strip("\r\n") for part in _SEPARATOR.split(text))))
    wanted = settings.options["examples"] + settings.options["eval_examples"]
    length = max(min(settings.options["document_chars"] or PIECE, len(text) // wanted), 1)
    notes.append(
        f'The text has no lines of "---": it is cut into {wanted:,} pieces of {length:,} characters, '
        f"{min(wanted * length / len(text), 1):.0%} of the text."
    )
    return [text[start : start + length] for start in range(0, wanted * length, length)]


def _keys(value: Mapping[str, Any]) -> Sequence[str]:
    """The keys of an example in JSON. Raises ValueError if they are missing."""
    if "text" in value:
        return ("text",)
    if missing := [key for key in ("prompt", "completion") if key not in value]:
        raise ValueError(f'there is no "{missing[0] if len(missing) == 1 else "text"}"')
    return ("prompt", "completion")


def _add_too_few(settings: Settings, count: int, notes: Sequence[str]) -> None:
    examples, evaluated = settings.options["examples"], settings.options["eval_examples"]
    message = (
        f"{examples:,} training and {evaluated:,} evaluation examples are needed, but the data has only {count:,} "
        "usable documents"
    )
    if notes:
        message = f"{message} ({' '.join(notes)})"
    allowed, advice = None, "add more documents"
    if count >= 3:
        fewer = max(1, min(evaluated, count // 5))
        allowed = f"at most {count - 1:,}"
        advice = f"set workload.examples to {count - fewer:,} and workload.eval_examples to {fewer:,}"
    settings.problems.add("workload.examples", message, examples, allowed, advice)
