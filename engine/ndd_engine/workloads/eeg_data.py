"""EEG recordings for the forecasters: ARFF, CSV and TSV files as numbers with labels. Imports no torch."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ndd_engine.workloads import DataFacts, ErrorList, Problems, SeriesLayout, Settings, read_text, split

SUFFIXES = (".arff", ".csv", ".tsv")
LABEL_NAMES = frozenset({"label", "class", "y", "eyedetection"})
MISSING_CELLS = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})

_ATTRIBUTE = re.compile(r"""@attribute\s+('(?:[^'\\]|\\.)*'|"[^"]*"|[^\s{]+)\s*(.+)""", re.IGNORECASE)


@dataclass(frozen=True)
class EegData:
    """A recording and how it is cut into segments. recording: None for the built-in data, which is synthetic."""

    recording: Recording | None
    channels: int
    layout: SeriesLayout
    facts: DataFacts


def read(settings: Settings) -> EegData:
    """The recording. Raises ConfigError with every error."""
    problems, options, builtin = settings.problems, settings.options, settings.data == "builtin"
    settings.progress("synthesising the recording" if builtin else f"reading {settings.data}")
    if options["model"] == "mlp" and settings.micro == 1:
        message = "the mlp uses batch normalisation, which needs a micro-batch of at least two items"
        problems.add("batch.micro", message, 1, "2 or more", 'or set workload.model to "lstm" or "gru"')
    recording = None if builtin else read_recording(problems)
    samples, channels = options["samples"], options["channels"]
    if recording is not None:
        channels = len(recording.channels)
        samples = len(recording.values) // channels
    parts = split(samples, options["eval_fraction"])
    layout = SeriesLayout(*parts, settings.sequence, 1, 1, "sample", "recording")
    layout.check(settings)
    problems.check()
    return EegData(recording, channels, layout, layout.facts(f"{samples:,} samples x {channels} channels"))


@dataclass
class Recording:
    """Numeric columns of a file, row by row, and the labels: 0 or 1 per sample, None without a label column.

    places: indices of the numeric columns. label: index of the label column.
    """

    channels: Sequence[str]
    places: Sequence[int]
    label: int | None
    notes: list[str]
    values: array[float] = field(default_factory=lambda: array("d"))
    labels: array[int] | None = None

    def fill(self, rows: Iterable[tuple[int, list[str]]], names: Sequence[str], problems: Problems) -> None:
        """Reads rows, numbered by their lines. Raises ConfigError with the lines of all errors."""
        errors, missing, written = ErrorList(problems), [], []
        for line, row in rows:
            if len(row) != len(names) or row[0].startswith("{"):
                sparse = "sparse rows ({index value, …}) are not supported"
                cells = f"{len(row):,} cells, expected {len(names):,}"
                errors.add(line, sparse if row[0].startswith("{") else cells)
                continue
            channels = [row[place] for place in self.places]
            try:
                numbers = list(map(float, channels))
            except ValueError:
                numbers = [math.nan]
            if not all(map(math.isfinite, numbers)):
                for name, cell in zip(self.channels, channels, strict=True):
                    if not _numeric(cell):
                        errors.add(line, f"{cell.strip()[:40]!r} in column {name!r} is not a number")
                    elif cell.strip().lower() in MISSING_CELLS or not math.isfinite(float(cell)):
                        missing.append(f"line {line:,}, column {name!r}")
                continue
            self.values.extend(numbers)
            written.append("" if self.label is None else row[self.label].strip())
        if missing:
            count = "1 cell is" if len(missing) == 1 else f"{len(missing):,} cells are"
            message = f"{count} missing or not finite, the first one in {missing[0]}"
            advice = "fill the gaps or remove those rows"
            problems.add_data(message, "a finite number in every cell", advice)
        errors.finish()
        if missing:
            problems.check()
        if not self.values:
            problems.stop("the file has no samples")
        kinds = sorted(set(written))
        if len(kinds) == 2:
            self.labels = array("b", (value == kinds[1] for value in written))
        elif self.label is not None:
            name = names[self.label]
            self.notes.append(
                f"The label {name!r} is not used: it has {len(kinds):,} values, and two are needed."
            )


def read_recording(problems: Problems) -> Recording:
    """The recording in a .arff, .csv or .tsv file. Raises ConfigError with the lines of all errors."""
    suffix = Path(problems.data).suffix.lower()
    text = read_text(problems, SUFFIXES, ("builtin",))
    if suffix not in SUFFIXES:
        unknown = f"files with the suffix {suffix!r} are not supported"
        problems.stop(unknown if suffix else "the name has no suffix", ", ".join(SUFFIXES))
    # Not splitlines, which also splits at form feeds: the line numbers would be wrong.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    try:
        return (_arff if suffix == ".arff" else _delimited)(lines, problems)
    except csv.Error as error:
        problems.stop(f"the rows cannot be read: {error}")


def _arff(lines: list[str], problems: Problems) -> Recording:
    """Attribute-relation file format (Weka): numeric attributes are channels, one attribute may be the label."""
    errors, start = ErrorList(problems), None
    names: list[str] = []
    numbers: list[bool] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("%"):
            continue
        word = line.split(None, 1)[0].lower()
        if word == "@data":
            start = number
            break
        if word == "@attribute":
            if (match := _ATTRIBUTE.match(line)) is None:
                errors.add(number, "an @attribute needs a name and a type")
            else:
                names.append(match[1].strip("'\""))
                numbers.append(match[2].split()[0].lower() in ("numeric", "real", "integer"))
        elif word != "@relation":
            errors.add(number, f"expected @relation, @attribute or @data, found {line[:40]!r}")
            if errors.full:
                break
    errors.finish()
    if start is None:
        problems.stop("there is no @data line", "an ARFF file")
    recording = _columns(names, numbers, problems)
    rows = _rows(lines[start:], start, quotechar="'")
    recording.fill((row for row in rows if not row[1][0].startswith("%")), names, problems)
    return recording


def _delimited(lines: list[str], problems: Problems) -> Recording:
    """Comma, semicolon or tab separated values; the header is optional, but a label needs one."""
    first = next((line for line in lines if line.strip()), "")
    rows = _rows(lines, delimiter=max(",;\t", key=first.count))
    if (top := next(rows, None)) is None:
        problems.stop("the file has no samples")
    names = [f"column {place}" for place in range(1, len(top[1]) + 1)]
    sample: tuple[int, list[str]] | None = top
    if not all(map(_numeric, top[1])):
        names, sample = [cell.strip() for cell in top[1]], next(rows, None)
    if sample is None:
        problems.stop("the file has a header but no samples")
    # The first sample decides which columns are numeric; an unnamed column is an index written by a tool.
    cells = sample[1] if len(sample[1]) == len(names) else [""] * len(names)
    numbers = [bool(name) and _numeric(cell) for name, cell in zip(names, cells, strict=True)]
    recording = _columns(names, numbers, problems)
    recording.fill(chain([sample], rows), names, problems)
    return recording


def _rows(lines: list[str], above: int = 0, **dialect: Any) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, with their line numbers. above: lines before these."""
    reader = csv.reader(lines, skipinitialspace=True, **dialect)
    return ((above + reader.line_num, row) for row in reader if row and (len(row) > 1 or row[0].strip()))


def _columns(names: Sequence[str], numbers: Sequence[bool], problems: Problems) -> Recording:
    """The channels and the label among the columns. Raises ConfigError if there is no channel."""
    label = max((place for place, name in enumerate(names) if name.lower() in LABEL_NAMES), default=None)
    numeric = [place for place, number in enumerate(numbers) if number and place != label]
    if not numeric:
        found = ", ".join(names[:8]) or "none"
        allowed = "at least one numeric column in addition to the label"
        problems.stop(f"there are no numeric columns (columns: {found})", allowed)
    ignored = [name or "(unnamed)" for place, name in enumerate(names) if place not in (*numeric, label)]
    listed = ", ".join(ignored[:8])
    notes = [f"Columns without numbers or without a name are ignored: {listed}."] if ignored else []
    return Recording([names[place] for place in numeric], numeric, label, notes)


def _numeric(cell: str) -> bool:
    """Whether a cell has a number, or says that one is missing."""
    try:
        return cell.strip().lower() in MISSING_CELLS or float(cell) is not None
    except ValueError:
        return False
