"""Text for the character model: the manual's topics, the standard library's source, or a file. Imports no torch."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import ChartextSection

from .files import manual_topics, read_text, source_name
from .problems import Problems, Progress
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
        return self.layout.facts(self.line())

    def line(self) -> str:
        return f"{len(self.text):,} characters ({len(self.vocabulary)} distinct), {self.layout.text}"


def read_characters(
    config: Config, section: ChartextSection, problems: Problems, progress: Progress
) -> TextData:
    """The text. Raises ConfigError with every error."""
    names = {"builtin": "the manual topics", "stdlib": "the standard library's source"}
    progress(f"reading {source_name(section.data, **names)}")
    if section.data == "builtin":
        text = "\n".join(manual_topics(problems, 'use a path to a text file, or "stdlib"'))
    elif section.data == "stdlib":
        text = library_source(problems)
    else:
        text = read_text(problems, (".txt", ".text", ".md"), WORDS)
    text = text[: section.max_characters]
    vocabulary = "".join(sorted(set(text)))
    if len(vocabulary) < 2:
        problems.stop(f"the text has only one distinct character, {vocabulary!r}: there is nothing to learn")
    sequence, stride = config.batch.sequence, section.stride or config.batch.sequence
    # Evaluation windows never overlap: each character is predicted once, whatever the training stride.
    parts = split(len(text), section.eval_fraction)
    layout = Layout(parts, sequence, stride, sequence, "character", "text")
    layout.check(config, problems)
    problems.check()
    return TextData(text, vocabulary, layout, tuple(_notes(layout, len(vocabulary))))


def library_source(problems: Problems) -> str:
    """The standard library's own Python source (PSF licence), about 12 MB, sorted by file name. Raises ConfigError."""
    texts = list(library_texts())
    if not texts:
        advice = 'use a path to a text file, or "builtin"'
        problems.stop(f"there is no Python source in {sysconfig.get_path('stdlib')}", suggestion=advice)
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
