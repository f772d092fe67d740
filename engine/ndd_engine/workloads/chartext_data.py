"""Text for the character model: the manual's topics, the standard library's source, or a file. Imports no torch."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass

from ndd_engine.workloads import DataFacts, SeriesLayout, Settings, read_text, split

from .builtin_texts import library_texts, manual_topics, source_name


@dataclass(frozen=True)
class TextData:
    """A text and how it is cut into segments. vocabulary: its distinct characters, sorted by code point."""

    text: str
    vocabulary: str
    layout: SeriesLayout
    notes: list[str]
    facts: DataFacts


def read(settings: Settings) -> TextData:
    """The text. Raises ConfigError with every error."""
    problems, options, sequence = settings.problems, settings.options, settings.sequence
    names = {"builtin": "the manual topics", "stdlib": "the standard library's source"}
    settings.progress(f"reading {source_name(settings.data, **names)}")
    if settings.data == "builtin":
        text = "\n".join(manual_topics(problems, 'use a path to a text file, or "stdlib"'))
    elif settings.data == "stdlib":
        text = "\n".join(library_texts())
        if not text:
            missing = f"there is no Python source in {sysconfig.get_path('stdlib')}"
            problems.stop(missing, suggestion='use a path to a text file, or "builtin"')
    else:
        text = read_text(problems, (".txt", ".text", ".md"), tuple(names))
    text = text[: options["max_characters"]]
    vocabulary = "".join(sorted(set(text)))
    if len(vocabulary) < 2:
        problems.stop(f"the text has only one distinct character, {vocabulary!r}: there is nothing to learn")
    stride = options["stride"] or sequence
    # Evaluation segments never overlap: each character is predicted once, whatever the training stride.
    layout = SeriesLayout(
        *split(len(text), options["eval_fraction"]), sequence, stride, sequence, "character", "text"
    )
    layout.check(settings)
    problems.check()
    notes = []
    if stride < sequence:
        times = f"{sequence / stride:.3g} times per epoch"
        notes.append(f"Training segments overlap: each character is used about {times}.")
    elif stride > sequence:
        share = f"{sequence / stride:.0%} of the characters"
        notes.append(f"Training segments leave gaps: {share} are used per epoch.")
    if len(vocabulary) > 1000:
        many = f"{len(vocabulary):,} distinct characters"
        notes.append(f"The text has {many}, which makes the output layer large.")
    facts = layout.facts(f"{len(text):,} characters ({len(vocabulary):,} distinct)")
    return TextData(text, vocabulary, layout, notes, facts)
