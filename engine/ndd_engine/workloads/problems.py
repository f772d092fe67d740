"""Collects the errors of a configuration's data, to report all of them at once. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError, Problem
from ndd_engine.text import printable

Progress = Callable[[str], None]  # called with short texts to show

KEY = "workload.data"
SHOWN_ERRORS = 5  # lines or files reported one by one; the rest are counted


@dataclass
class Problems:
    """The errors found so far. where: the file or option that the configuration came from.

    data: what is read, the value of the option `key`.
    """

    where: str
    data: str = ""
    key: str = KEY
    found: list[Problem] = field(default_factory=list)

    def add(
        self,
        key: str,
        message: str,
        found: object = None,
        allowed: str | None = None,
        suggestion: str | None = None,
    ) -> None:
        """Adds an error; arguments as in Problem. Control characters in text from files are escaped."""
        shown = (
            f'"{_cut(found, 120)}"'
            if isinstance(found, str)
            else None
            if found is None
            else _cut(str(found), 120)
        )
        advice = None if suggestion is None else _cut(suggestion)
        self.found.append(Problem(self.where, _cut(key, 120), _cut(message), shown, allowed, advice))

    def add_data(self, message: str, allowed: str | None = None, suggestion: str | None = None) -> None:
        """Adds an error in the data."""
        self.add(self.key, message, self.data, allowed, suggestion)

    def stop(self, message: str, allowed: str | None = None, suggestion: str | None = None) -> NoReturn:
        """Adds an error in the data and raises ConfigError with all errors."""
        self.add_data(message, allowed, suggestion)
        raise ConfigError(self.found)

    def check(self) -> None:
        """Raises ConfigError with all errors if there is any."""
        if self.found:
            raise ConfigError(self.found)

    def of(self, data: str) -> Problems:
        """The same list of errors, for another file."""
        return replace(self, data=data)


def _cut(text: str, longest: int = 600) -> str:
    """Printable, and not longer than a message may be: names and values may come from a user's code."""
    shown = printable(text[:longest])
    return shown if len(text) <= longest else f"{shown}…"


@dataclass
class ErrorList:
    """Errors in the lines or files of the data: the first few are added to `problems`, the rest are counted."""

    problems: Problems
    allowed: str | None = None
    kind: str = "lines"
    count: int = 0

    def add(self, place: int | str, message: str, suggestion: str | None = None) -> None:
        """place: a line number, or the name of a file."""
        self.count += 1
        if self.count <= SHOWN_ERRORS:
            place = f"line {place:,}" if isinstance(place, int) else place
            self.problems.add_data(f"{place}: {message}", self.allowed, suggestion)

    def finish(self) -> None:
        """Adds the number of errors not shown. Raises ConfigError if the list has any."""
        if self.count > SHOWN_ERRORS:
            self.problems.add_data(f"{self.count - SHOWN_ERRORS:,} more {self.kind} with errors")
        if self.count:
            self.problems.check()


def check_step(
    config: Config, items: int, unit: str, problems: Problems, suggestion: str | None = None
) -> None:
    """Adds a problem if `items` training items are fewer than a step of all ranks takes. unit: "windows"."""
    batch, ranks, needed = config.batch, config.parallel.ranks, config.items_per_step
    if items >= needed:
        return
    product, limited = f"micro {batch.micro} x accumulation {batch.accumulation}", "micro x accumulation"
    if ranks > 1:
        product, limited = f"{product} x {ranks} ranks", f"{limited} x ranks"
    key, found = "parallel.ranks", ranks
    if batch.micro > items:
        key, found = "batch.micro", batch.micro
    elif batch.items > items:
        key, found = "batch.accumulation", batch.accumulation
    message = (
        f"one optimizer step takes {needed:,} {unit} ({product}), but the training data has only {items:,}"
    )
    problems.add(key, message, found, f"{limited} of at most {items:,}", suggestion)
