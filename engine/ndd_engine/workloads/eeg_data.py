"""EEG recordings for the forecasters: ARFF, CSV and TSV files as numbers with labels. Imports no torch."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import EegSection
from ndd_engine.text import printable

from .files import read_text
from .problems import SHOWN_ERRORS, ErrorList, Problems, Progress
from .windows import DataFacts, Layout, split

SUFFIXES = (".arff", ".csv", ".tsv")
LABEL_NAMES = frozenset({"label", "class", "y", "eyedetection"})
MISSING_CELLS = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})

_ATTRIBUTE = re.compile(r"""@attribute\s+('(?:[^'\\]|\\.)*'|"[^"]*"|[^\s{]+)\s*(.+)""", re.IGNORECASE)


@dataclass(frozen=True)
class EegRecording:
    """values: samples x channels, row by row. labels: 0 or 1 per sample, or None without a label column."""

    channels: tuple[str, ...]
    values: array[float]
    labels: array[int] | None
    notes: tuple[str, ...]

    @property
    def samples(self) -> int:
        return len(self.values) // len(self.channels)


@dataclass(frozen=True)
class EegData:
    """A recording and how it is cut into windows. recording: None for the built-in data, which is synthetic."""

    recording: EegRecording | None
    channels: int
    layout: Layout

    def facts(self) -> DataFacts:
        return self.layout.facts(self.line())

    def line(self) -> str:
        return f"{self.layout.parts.total:,} samples x {self.channels} channels, {self.layout.text}"


def read_eeg(config: Config, section: EegSection, problems: Problems, progress: Progress) -> EegData:
    """The recording. Raises ConfigError with every error."""
    builtin = section.data == "builtin"
    progress("synthesising the recording" if builtin else f"reading {section.data}")
    if section.model == "mlp" and config.batch.micro == 1:
        message = "the mlp uses batch normalisation, which needs a micro-batch of at least two items"
        problems.add("batch.micro", message, 1, "2 or more", 'or set workload.model to "lstm" or "gru"')
    recording = None if builtin else read_recording(problems)
    samples = section.samples if recording is None else recording.samples
    layout = Layout(split(samples, section.eval_fraction), config.batch.sequence, 1, 1, "sample", "recording")
    layout.check(config, problems)
    problems.check()
    return EegData(recording, section.channels if recording is None else len(recording.channels), layout)


def read_recording(problems: Problems) -> EegRecording:
    """The recording in a .arff, .csv or .tsv file. Raises ConfigError with the lines of all errors."""
    suffix = Path(problems.data).suffix.lower()
    text = read_text(problems, SUFFIXES, ("builtin",))
    if suffix not in SUFFIXES:
        unknown = f"files with the suffix {suffix!r} are not supported"
        problems.stop(unknown if suffix else "the name has no suffix", ", ".join(SUFFIXES))
    errors = _LineErrors(problems)
    try:
        table = _arff(text, errors) if suffix == ".arff" else _delimited(text, errors)
    except csv.Error as error:
        problems.stop(f"the rows cannot be read: {error}")
    errors.finish()
    return table.recording(problems)


@dataclass
class _LineErrors(ErrorList):
    """Counts missing cells separately from other errors in lines."""

    missing: int = 0
    first_missing: str = ""

    def add_missing(self, line: int, column: str) -> None:
        self.missing += 1
        self.first_missing = self.first_missing or f"line {line:,}, column {column!r}"

    def finish(self) -> None:
        if self.missing:
            cells = "1 cell is" if self.missing == 1 else f"{self.missing:,} cells are"
            message = f"{cells} missing or not finite, the first one in {self.first_missing}"
            advice = "fill the gaps or remove those rows"
            self.problems.add_data(message, "a finite number in every cell", advice)
        super().finish()
        if self.missing:
            self.problems.check()


@dataclass
class _Table:
    """Columns and their contents so far. numeric: indices of the channels. label: index of the label column."""

    names: Sequence[str]
    numeric: Sequence[int]
    label: int | None
    notes: list[str]
    values: array[float] = field(default_factory=lambda: array("d"))
    labels: list[str] = field(default_factory=list)

    def add(self, row: Sequence[str], line: int, errors: _LineErrors) -> None:
        if len(row) != len(self.names):
            errors.add(line, f"{len(row)} cells, expected {len(self.names)}")
            return
        try:
            cells = [float(row[position]) for position in self.numeric]
            good = all(map(math.isfinite, cells))
        except ValueError:
            good = False
        if not good:
            self._add_errors(row, line, errors)
            return
        self.values.extend(cells)
        if self.label is not None:
            self.labels.append(row[self.label].strip())

    def _add_errors(self, row: Sequence[str], line: int, errors: _LineErrors) -> None:
        for position in self.numeric:
            cell = row[position].strip()
            try:
                if math.isfinite(float(cell)):
                    continue
            except ValueError:
                if cell.lower() not in MISSING_CELLS:
                    errors.add(line, f"{cell[:40]!r} in column {self.names[position]!r} is not a number")
                    continue
            errors.add_missing(line, self.names[position])

    def recording(self, problems: Problems) -> EegRecording:
        if not self.values:
            problems.stop("the file has no samples")
        notes, labels = list(self.notes), None
        if self.label is not None:
            kinds = sorted(set(self.labels))
            if len(kinds) == 2:
                labels = array("b", (value == kinds[1] for value in self.labels))
            else:
                name = printable(self.names[self.label])
                notes.append(
                    f"The label {name!r} is not used: it has {len(kinds)} values, and two are needed."
                )
        channels = tuple(self.names[position] for position in self.numeric)
        return EegRecording(channels, self.values, labels, tuple(notes))


def _lines(text: str) -> list[str]:
    # Not splitlines, which also splits at form feeds: the line numbers would be wrong.
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _arff(text: str, errors: _LineErrors) -> _Table:
    """Attribute-relation file format (Weka): numeric attributes are channels, one attribute may be the label."""
    lines = _lines(text)
    names: list[str] = []
    kinds: list[str] = []
    start = None
    for index, line in enumerate(map(str.strip, lines)):
        if not line or line.startswith("%"):
            continue
        word = line.split(None, 1)[0].lower()
        if word == "@data":
            start = index + 1
            break
        if word == "@attribute":
            match = _ATTRIBUTE.match(line)
            if match is None:
                errors.add(index + 1, "an @attribute needs a name and a type")
                continue
            names.append(match[1].strip("'\""))
            kinds.append(match[2].strip().lower())
        elif word != "@relation":
            errors.add(index + 1, f"expected @relation, @attribute or @data, found {line[:40]!r}")
            if errors.count > SHOWN_ERRORS:
                break
    if start is None:
        errors.finish()
        errors.problems.stop("there is no @data line", "an ARFF file")
    is_number = [kind.split()[0] in ("numeric", "real", "integer") for kind in kinds]
    table = _columns(names, is_number, errors.problems)
    reader = csv.reader(lines[start:], quotechar="'", skipinitialspace=True)
    for row in reader:
        if not row or row[0].startswith("%") or (len(row) == 1 and not row[0].strip()):
            continue
        if row[0].startswith("{"):
            errors.add(start + reader.line_num, "sparse rows ({index value, …}) are not supported")
            continue
        table.add(row, start + reader.line_num, errors)
    return table


def _delimited(text: str, errors: _LineErrors) -> _Table:
    """Comma, semicolon or tab separated values; the header is optional, but a label needs one."""
    lines = _lines(text)
    first = next((line for line in lines if line.strip()), "")
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    rows = ((reader.line_num, row) for row in reader if row and (len(row) > 1 or row[0].strip()))
    top = next(rows, None)
    if top is None:
        errors.problems.stop("the file has no samples")
    if all(_number_or_missing(cell) for cell in top[1]):
        names = [f"column {position + 1}" for position in range(len(top[1]))]
        sample = top
    else:
        names = [cell.strip() for cell in top[1]]
        sample = next(rows, top)
        if sample is top:
            errors.problems.stop("the file has a header but no samples")
    # The first sample decides which columns are numeric; an unnamed column is an index written by a tool.
    cells = sample[1] if len(sample[1]) == len(names) else [""] * len(names)
    is_number = [bool(name) and _number_or_missing(cell) for name, cell in zip(names, cells, strict=True)]
    table = _columns(names, is_number, errors.problems)
    table.add(sample[1], sample[0], errors)
    for line, row in rows:
        table.add(row, line, errors)
    return table


def _columns(names: Sequence[str], numbers: Sequence[bool], problems: Problems) -> _Table:
    """The channels and the label among the columns. Raises ConfigError if there is no channel."""
    labels = [position for position, name in enumerate(names) if name.lower() in LABEL_NAMES]
    label = labels[-1] if labels else None
    numeric = [position for position, number in enumerate(numbers) if number and position != label]
    if not numeric:
        found = ", ".join(names[:8]) or "none"
        allowed = "at least one numeric column in addition to the label"
        problems.stop(f"there are no numeric columns (columns: {found})", allowed)
    notes = []
    ignored = [names[p] or "(unnamed)" for p, number in enumerate(numbers) if not number and p != label]
    if ignored:
        listed = printable(", ".join(ignored[:8]))
        notes.append(f"Columns without numbers or without a name are ignored: {listed}.")
    return _Table(names, numeric, label, notes)


def _number_or_missing(cell: str) -> bool:
    if cell.strip().lower() in MISSING_CELLS:
        return True
    try:
        float(cell)
    except ValueError:
        return False
    return True
