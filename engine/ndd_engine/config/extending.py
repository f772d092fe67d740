"""`extends = "base.toml"`: a configuration file that starts from another one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ndd_engine.errors import ConfigError, Problem
from ndd_engine.files import expanded
from ndd_engine.text import printable

from .messages import in_short, shown
from .parsing import Table, parsed, text_of

EXTENDS = "extends"
ALLOWED = "a string: the path of one TOML file, relative to this file"
# Maximum length of a chain of files.
MOST_FILES = 20


@dataclass(frozen=True)
class Written:
    """A configuration file as written, without `extends`. name: its path, for display."""

    name: str
    text: str
    table: Table


def chain(path: Path, text: str | None = None) -> list[Written]:
    """The file and the files that it extends, the last base first. text: the contents of `path`, if already read.

    Raises ConfigError that names file and line for a missing base and for a cycle.
    """
    found: list[Written] = []
    seen: list[Path] = []
    where = ""
    while True:
        name = str(path)
        try:
            text = text_of(path) if text is None else text
        except ConfigError as error:
            if not found:
                raise
            message = error.problems[0].message
            raise ConfigError([Problem(where, EXTENDS, f"{in_short(printable(name))} {message}")]) from None
        seen.append(_identity(path))
        table = parsed(name, text)
        base = table.pop(EXTENDS, None)
        found.append(Written(name, text, table))
        if base is None:
            return found[::-1]
        where = f"{printable(name)} line {line_of(text)}"
        if not isinstance(base, str) or not base:
            raise ConfigError([Problem(where, EXTENDS, "has the wrong type", shown(base), ALLOWED)])
        path = _beside(path, base)
        if _identity(path) in seen:
            names = " -> ".join(
                in_short(printable(each)) for each in (*(item.name for item in found), str(path))
            )
            raise ConfigError([Problem(where, EXTENDS, f"the files extend each other: {names}", shown(base))])
        if len(found) == MOST_FILES:
            raise ConfigError(
                [Problem(where, EXTENDS, f"more than {MOST_FILES} files extend each other", shown(base))]
            )
        text = None


def line_of(text: str) -> int:
    """The line of the key `extends`; 1 if it is written in an unusual way."""
    for index, line in enumerate(text.splitlines(), start=1):
        if line.strip().strip("\"'").startswith(EXTENDS):
            return index
    return 1


def _beside(path: Path, base: str) -> Path:
    """The path of a base, relative to the file that names it, without needless `..`."""
    joined = path.parent / expanded(base)
    plain = Path(os.path.normpath(joined))
    return plain if _identity(plain) == _identity(joined) else joined


def _identity(path: Path) -> Path:
    return Path(os.path.realpath(path))
