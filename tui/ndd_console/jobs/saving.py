"""Writes new files for a screen, never replacing existing ones."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from ndd_engine.files import create_text


def new_path(stem: str, folder: Path | None = None, suffix: str = ".toml") -> Path:
    """The first unused name of `<stem>.toml`, `<stem>-2.toml`, … folder: defaults to the working directory."""
    names = (f"{stem}{f'-{number}' if number > 1 else ''}{suffix}" for number in itertools.count(1))
    paths = ((folder or Path()) / name for name in names)
    return next(path for path in paths if not os.path.lexists(path))  # a broken link also occupies its name


def save_new(stem: str, text: str, folder: Path | None = None, suffix: str = ".toml") -> Path:
    """Write a new file, see `new_path`. Returns its path. Raises UsageError if it cannot be written."""
    while True:
        path = new_path(stem, folder, suffix)
        try:
            create_text(path, text)
        except FileExistsError:
            continue
        return path
