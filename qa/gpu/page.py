"""The Markdown file, and the same as JSON: the machine, what failed or was skipped, every figure with its target."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from .figures import FACT, FAIL, INFO, PASS, SKIPPED, UNCLEAR, Figure
from .parts import ABOUT, Part

WAITING, RUNNING, DONE, LEFT_OUT = "waiting", "running", "done", "not run"
# Verdicts of figures that count, in the order of the summary; the others are of claims.
_COUNTED = (PASS, FAIL, UNCLEAR, SKIPPED)
# Lines of a log in the Markdown file.
_LOG_LINES = 12


@dataclass
class Entry:
    """A part and how far it is.

    state: waiting, running, done, failed or not run; why: of the last two. log: the last lines of its output.
    """

    part: Part
    state: str = WAITING
    why: str = ""
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Figure]:
        """The figures that miss their target."""
        return [figure for figure in self.figures if figure.verdict == FAIL]


@dataclass
class Page:
    """The whole result.

    state: in words, such as "complete". effort: full, quick or smoke. setup: how torch was set up. command: how it was
    called.
    """

    entries: list[Entry]
    effort: str
    limit_s: float
    state: str = "running"
    seconds: float = 0.0
    setup: str = ""
    command: str = "make gpu"

    def write(self, path: Path) -> None:
        """Write both files, each whole or not at all. path: of the Markdown file. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(json_of(path), json.dumps(self.body(), indent=1, ensure_ascii=False))
        _replace(path, "\n".join(self.lines()))

    def body(self) -> dict[str, Any]:
        """The document of JSON."""
        return {
            "command": self.command,
            "state": self.state,
            "effort": self.effort,
            "budget_s": self.limit_s,
            "seconds": round(self.seconds, 1),
            "setup": self.setup,
            "counts": self.counts,
            "machine": {fact.name: fact.value for fact in self.facts},
            "parts": [
                {
                    "section": entry.part.section,
                    "name": entry.part.name,
                    "decides": entry.part.decides,
                    "state": entry.state,
                    "why": entry.why,
                    "seconds": round(entry.seconds, 1),
                    "figures": [asdict(figure) for figure in entry.figures if figure.verdict != FACT],
                    "log": entry.log,
                }
                for entry in self.entries
            ],
        }

    @property
    def facts(self) -> list[Figure]:
        """Of the machine."""
        return [figure for entry in self.entries for figure in entry.figures if figure.verdict == FACT]

    @property
    def counts(self) -> dict[str, int]:
        """Number of figures by verdict."""
        found = Counter(figure.verdict for entry in self.entries for figure in entry.figures)
        return {verdict: found[verdict] for verdict in _COUNTED if found[verdict]}

    @property
    def failed(self) -> list[Entry]:
        """Parts that did not run to their end."""
        return [entry for entry in self.entries if entry.state == "failed"]

    def summary(self) -> str:
        """One line."""
        ran = sum(entry.state == DONE for entry in self.entries)
        counted = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items()) or "no figures"
        return f"{self.state}: {ran} of {len(self.entries)} parts in {self.seconds / 60:.1f} min; {counted}"

    def lines(self) -> Iterator[str]:
        """The file, line by line."""
        name = next((fact.value for fact in self.facts if fact.name == "GPU"), "")
        yield f"# ndd-console on {'the CPU' if self.effort == 'smoke' else name or 'a GPU'}"
        yield ""
        yield f"`{self.command}`, {self.summary()}."
        if self.effort == "smoke":
            yield ""
            yield "**Smallest sizes on the CPU: this shows that the command works, and measures nothing.**"
        yield ""
        yield from _table(("", ""), [(fact.name, fact.value) for fact in self.facts])
        if self.setup:
            yield f"Set-up: {_cell(self.setup)}."
            yield ""
        yield from self._problems()
        for section, group in groupby(self.entries, key=lambda entry: entry.part.section):
            yield from _section(section, list(group))

    def _problems(self) -> Iterator[str]:
        rows = [
            (f"{entry.part.section}: {entry.part.name}", entry.state, entry.why)
            for entry in self.entries
            if entry.why
        ]
        rows += [
            (
                f"{entry.part.section}: {figure.name}",
                FAIL,
                f"{figure.value} (target {figure.target}) {figure.why}",
            )
            for entry in self.entries
            for figure in entry.failures
        ]
        if not rows:
            return
        yield "## Failed or not run"
        yield ""
        yield from _table(("what", "", "why"), rows)
        for entry in self.failed:
            if entry.log:
                yield f"The last lines of {entry.part.section}, {entry.part.name}:"
                yield ""
                yield from (f"    {line}" for line in entry.log[-_LOG_LINES:])
                yield ""


def json_of(path: Path) -> Path:
    """The file of JSON beside the Markdown file."""
    return path.with_name(f"{path.name.removesuffix('.md')}.json")


def _replace(path: Path, text: str) -> None:
    number, name = tempfile.mkstemp(prefix=".gpu-", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _section(title: str, entries: Sequence[Entry]) -> Iterator[str]:
    rows = []
    several = len(entries) > 1
    for entry in entries:
        shown = [figure for figure in entry.figures if figure.verdict != FACT]
        rows += [
            (
                f"{entry.part.name}: {figure.name}" if several else figure.name,
                figure.value, figure.target, "" if figure.verdict == INFO else figure.verdict, figure.why,
            )
            for figure in shown
        ]  # fmt: skip
        if not shown and entry.state in (WAITING, LEFT_OUT, "failed"):
            rows.append((entry.part.name, "", "", entry.state, entry.why))
    if not rows:
        return
    yield f"## {title}"
    yield ""
    if title in ABOUT:
        yield ABOUT[title]
        yield ""
    decides = [f"- {entry.part.name}: {entry.part.decides}" for entry in entries if entry.part.decides]
    yield from [*decides, ""] if decides else []
    yield from _table(("figure", "found", "target", "result", "note"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    used = [place for place in range(len(columns)) if place < 2 or any(row[place] for row in rows)]
    yield "| " + " | ".join(columns[place] for place in used) + " |"
    yield "| " + " | ".join("---" for _ in used) + " |"
    for row in rows:
        yield "| " + " | ".join(_cell(row[place]) for place in used) + " |"
    yield ""


def _cell(text: str) -> str:
    """As the text of a table cell: one line, and nothing that Markdown or HTML reads as markup."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    for char in "\\`*_[]|":
        words = words.replace(char, "\\" + char)
    return words.replace("&", "&amp;").replace("<", "&lt;")
