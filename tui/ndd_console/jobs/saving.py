"""Files that a screen writes when it is asked to: new ones, which never replace another."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from ndd_engine.errors import UsageError
from ndd_engine.text import printable


def new_path(stem: str, folder: Path | None = None) -> Path:
    """`<stem>.toml`, or `<stem>-2.toml` and so on where that exists. folder: default the working directory."""
    for number in itertools.count(1):
        path = (folder or Path()) / f"{stem}{f'-{number}' if number > 1 else ''}.toml"
        if not os.path.lexists(path):  # a link to nowhere is a name that is taken
            return path
    raise AssertionError("the numbers do not end")


def save_new(stem: str, text: str, folder: Path | None = None) -> Path:
    """Write a file of a new name, see `new_path`. Raises UsageError when it cannot be written."""
    while True:
        path = new_path(stem, folder)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"{printable(str(path))} cannot be written: {error.strerror}") from None
        return path
