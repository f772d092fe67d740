"""Text for the character model: the manual's topics, the library's source, or a file. No torch here."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import ChartextSection

from .files import KEY, read_text
from .windows import Complaints, DataFacts, Layout, split

WORDS = ("builtin", "stdlib")
# Tests are half of the library and mostly tables; installed packages are not the library.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class TextData:
    """A text and how it is cut. vocabulary: its distinct characters in code point order."""

    text: str
    vocabulary: str
    layout: Layout
    notes: tuple[str, ...]

    def facts(self) -> DataFacts:
        """The facts that need no torch."""
        return self.layout.facts(self.line())

    def line(self) -> str:
        """The data in one line for people."""
        layout = self.layout
        return (
            f"{len(self.text):,} characters ({len(self.vocabulary)} distinct), "
            f"{layout.train_items:,} windows of {layout.sequence:,} a pass, {layout.eval_items:,} to evaluate"
        )


def source_name(section: ChartextSection) -> str:
    """What the text is called while it is read."""
    return {"builtin": "the manual topics", "stdlib": "the standard library's source"}.get(
        section.data, Path(section.data).name
    )


def read(config: Config, section: ChartextSection, complaints: Complaints) -> TextData | None:
    """The text, with every mistake of it in `complaints`; None when there is no usable text."""
    if section.data == "builtin":
        text = manual_topics(complaints)
    elif section.data == "stdlib":
        text = library_source(complaints)
    else:
        text = read_text(section.data, complaints, (".txt", ".text", ".md"), WORDS)
    if text is None:
        return None
    text = text[: section.max_characters]
    vocabulary = "".join(sorted(set(text)))
    if len(vocabulary) < 2:
        message = f"the text has one distinct character, {vocabulary!r}: there is nothing to learn"
        complaints.add(KEY, message, section.data)
        return None
    sequence = config.batch.sequence
    # Evaluation never overlaps: each character of it is predicted once, whatever the training stride.
    layout = Layout(
        split(len(text), section.eval_fraction),
        sequence,
        section.stride or sequence,
        sequence,
        "character",
        "text",
    )
    before = len(complaints.problems)
    layout.check(config.batch, complaints)
    if len(complaints.problems) > before:
        return None
    return TextData(text, vocabulary, layout, tuple(_notes(layout, len(vocabulary))))


def manual_topics(complaints: Complaints) -> str | None:
    """The topics of Python's manual (PSF licence), about 465,000 characters, in the order of their names."""
    try:
        from pydoc_data.topics import topics  # some distributions leave it out
    except ImportError:
        advice = 'give a path to a text file, or "stdlib"'
        complaints.add(KEY, "this Python was installed without pydoc_data", "builtin", suggestion=advice)
        return None
    return "\n".join(topics[name] for name in sorted(topics))


def library_source(complaints: Complaints) -> str | None:
    """The standard library's own Python source (PSF licence), about 12 MB, in the order of the file names."""
    texts = list(library_texts())
    if not texts:
        advice = 'give a path to a text file, or "builtin"'
        top = sysconfig.get_path("stdlib")
        complaints.add(KEY, f"there is no Python source in {top}", "stdlib", suggestion=advice)
        return None
    return "\n".join(texts)


def library_texts() -> Iterator[str]:
    """The source files of the standard library one by one; those that cannot be read are left out."""
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - _LEFT_OUT)
        for name in sorted(names):
            if name.endswith(".py"):
                try:
                    text = (Path(folder) / name).read_text("utf-8", errors="ignore")
                except OSError:
                    continue
                yield text


def _notes(layout: Layout, vocabulary: int) -> list[str]:
    notes = []
    if layout.stride < layout.sequence:
        times = layout.sequence / layout.stride
        notes.append(f"Training windows overlap: each character is seen about {times:.3g} times a pass.")
    elif layout.stride > layout.sequence:
        share = layout.sequence / layout.stride
        notes.append(f"Training windows leave gaps: {share:.0%} of the characters are seen in a pass.")
    if vocabulary > 1000:
        notes.append(f"The text has {vocabulary:,} distinct characters; the output layer grows with them.")
    return notes
