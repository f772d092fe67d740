"""The Markdown file, and the same as JSON: the machine, what failed or was skipped, every figure with its target."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from ndd_engine.files import replacing

from .figures import FACT, FAIL, INFO, PASS, SKIPPED, UNCLEAR, Figure
from .parts import ABOUT, Part

WAITING, RUNNING, DONE, LEFT_OUT, FAILED = "waiting", "running", "done", "not run", "failed"
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
    def shown(self) -> list[Figure]:
        """The figures that are not facts of the machine."""
        return [figure for figure in self.figures if figure.verdict != FACT]

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
    state: str = RUNNING
    seconds: float = 0.0
    setup: str = ""
    command: str = "make gpu"

    def write(self, path: Path) -> None:
        """Write both files, each whole or not at all. path: of the Markdown file. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = {
            json_of(path): json.dumps(self.body(), indent=1, ensure_ascii=False),
            path: "\n".join(self.lines()),
        }
        for place, text in texts.items():
            with replacing(place) as file:
                file.write(f"{text}\n".encode())

    def body(self) -> dict[str, Any]:
        """The document of JSON."""
        kept = ("state", "why", "log")
        return {
            **{name: getattr(self, name) for name in ("command", "state", "effort", "setup", "counts")},
            "budget_s": self.limit_s,
            "seconds": round(self.seconds, 1),
            "machine": {fact.name: fact.value for fact in self.facts},
            "parts": [
                {
                    **{name: getattr(entry.part, name) for name in ("section", "name", "decides")},
                    **{name: getattr(entry, name) for name in kept},
                    "seconds": round(entry.seconds, 1),
                    "figures": [asdict(figure) for figure in entry.shown],
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
        return [entry for entry in self.entries if entry.state == FAILED]

    def summary(self) -> str:
        """One line."""
        ran = sum(entry.state == DONE for entry in self.entries)
        counted = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items()) or "no figures"
        return f"{self.state}: {ran} of {len(self.entries)} parts in {self.seconds / 60:.1f} min; {counted}"

    def lines(self) -> Iterator[str]:
        """The file, line by line."""
        name = next((fact.value for fact in self.facts if fact.name == "GPU"), "")
        yield from (f"# ndd-console on {'the CPU' if self.effort == 'smoke' else name or 'a GPU'}", "")
        yield from (f"`{self.command}`, {self.summary()}.", "")
        if self.effort == "smoke":
            yield "**Smallest sizes on the CPU: this shows that the command works, and measures nothing.**"
            yield ""
        yield from _table(("", ""), [(fact.name, fact.value) for fact in self.facts])
        if self.setup:
            yield from (f"Set-up: {_cell(self.setup)}.", "")
        yield from self._problems()
        for section, group in groupby(self.entries, key=lambda entry: entry.part.section):
            yield from _section(section, list(group))

    def _problems(self) -> Iterator[str]:
        rows = []
        for entry in self.entries:
            part = entry.part
            rows += [(f"{part.section}: {part.name}", entry.state, entry.why)] if entry.why else []
        for entry in self.entries:
            for figure in entry.failures:
                why = f"{figure.value} (target {figure.target}) {figure.why}"
                rows.append((f"{entry.part.section}: {figure.name}", FAIL, why))
        if rows:
            yield from ("## Failed or not run", "", *_table(("what", "", "why"), rows))
        for entry in self.failed:
            if entry.log:
                yield from (f"The last lines of {entry.part.section}, {entry.part.name}:", "")
                yield from (*(f"    {line}" for line in entry.log[-_LOG_LINES:]), "")


def json_of(path: Path) -> Path:
    """The file of JSON beside the Markdown file."""
    return path.with_name(f"{path.name.removesuffix('.md')}.json")


def _section(title: str, entries: Sequence[Entry]) -> Iterator[str]:
    rows = []
    for entry in entries:
        prefix = f"{entry.part.name}: " if len(entries) > 1 else ""
        for figure in entry.shown:
            verdict = "" if figure.verdict == INFO else figure.verdict
            rows.append((f"{prefix}{figure.name}", figure.value, figure.target, verdict, figure.why))
        if not entry.shown and entry.state in (WAITING, LEFT_OUT, FAILED):
            rows.append((entry.part.name, "", "", entry.state, entry.why))
    if not rows:
        return
    yield from (f"## {title}", "")
    if title in ABOUT:
        yield from (ABOUT[title], "")
    if decides := [f"- {entry.part.name}: {entry.part.decides}" for entry in entries if entry.part.decides]:
        yield from (*decides, "")
    yield from _table(("figure", "found", "target", "result", "note"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table without empty columns, "" after it; nothing without rows."""
    used = [place for place in range(len(columns)) if place < 2 or any(row[place] for row in rows)]
    for cells in (columns, ["---"] * len(columns), *rows) if rows else ():
        yield "| " + " | ".join(_cell(cells[place]) for place in used) + " |"
    if rows:
        yield ""


def _cell(text: str) -> str:
    """As the text of a table cell: one line, and nothing that Markdown or HTML reads as markup."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    for char in "\\`*_[]|":
        words = words.replace(char, "\\" + char)
    return words.replace("&", "&amp;").replace("<", "&lt;")
