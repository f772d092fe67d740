"""Text for the character model: the manual's topics, the standard library's source, or a file. No torch here."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import ChartextSection

from .files import manual_topics, read_text, source_name
from .problems import KEY, Problems, Progress
from .windows import DataFacts, Layout, split

WORDS = ("builtin", "stdlib")
# Tests are half of the library and mostly tables; installed packages are not part of it.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class TextData:
    """A text and how it is cut into windows. vocabulary: its distinct characters, sorted by code point."""

    text: str
    vocabulary: str
    layout: Layout
    notes: tuple[str, ...]

    def facts(self) -> DataFacts:
        """The facts that need no torch."""
        return self.layout.facts(self.line())

    def line(self) -> str:
        """A one-line summary."""
        return f"{len(self.text):,} characters ({len(self.vocabulary)} distinct), {self.layout.text}"


def read_characters(
    config: Config, section: ChartextSection, problems: Problems, progress: Progress
) -> TextData | None:
    """The text, or None after adding every error to `problems`."""
    names = {"builtin": "the manual topics", "stdlib": "the standard library's source"}
    progress(f"reading {source_name(section.data, **names)}")
    if section.data == "builtin":
        topics = manual_topics(problems, 'use a path to a text file, or "stdlib"')
        text = None if topics is None else "\n".join(topics)
    elif section.data == "stdlib":
        text = library_source(problems)
    else:
        text = read_text(section.data, problems, (".txt", ".text", ".md"), WORDS)
    if text is None:
        return None
    text = text[: section.max_characters]
    vocabulary = "".join(sorted(set(text)))
    if len(vocabulary) < 2:
        message = f"the text has only one distinct character, {vocabulary!r}: there is nothing to learn"
        problems.add(KEY, message, section.data)
        return None
    sequence, stride = config.batch.sequence, section.stride or config.batch.sequence
    # Evaluation windows never overlap: each character is predicted once, whatever the training stride.
    parts = split(len(text), section.eval_fraction)
    layout = Layout(parts, sequence, stride, sequence, "character", "text")
    before = len(problems.found)
    layout.check(config.batch, problems)
    if len(problems.found) > before:
        return None
    return TextData(text, vocabulary, layout, tuple(_notes(layout, len(vocabulary))))


def library_source(problems: Problems) -> str | None:
    """The standard library's own Python source (PSF licence), about 12 MB, sorted by file name; None if missing."""
    texts = list(library_texts())
    if not texts:
        advice = 'use a path to a text file, or "builtin"'
        top = sysconfig.get_path("stdlib")
        problems.add(KEY, f"there is no Python source in {top}", "stdlib", suggestion=advice)
        return None
    return "\n".join(texts)


def library_texts() -> Iterator[str]:
    """The source files of the standard library one by one; unreadable files are skipped."""
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - _LEFT_OUT)
        for name in sorted(names):
            if name.endswith(".py"):
                try:
                    text = (Path(folder) / name).read_text("utf-8", errors="ignore")
                except OSError:
                    continue
                yield text


def _notes(layout: Layout, vocabulary: int) -> Iterator[str]:
    if layout.stride < layout.sequence:
        times = layout.sequence / layout.stride
        yield f"Training windows overlap: each character is used about {times:.3g} times per epoch."
    elif layout.stride > layout.sequence:
        share = layout.sequence / layout.stride
        yield f"Training windows leave gaps: {share:.0%} of the characters are used per epoch."
    if vocabulary > 1000:
        yield f"The text has {vocabulary:,} distinct characters, which makes the output layer large."
