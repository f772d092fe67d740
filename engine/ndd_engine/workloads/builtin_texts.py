"""Texts that every Python has: the topics of its manual, and the source of its library. Imports no torch."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ndd_engine.workloads import Problems

# Tests are half of the library and mostly tables; installed packages are not part of it.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def source_name(data: str, **names: str) -> str:
    """What `workload.data` is called while it is read: one of `names` ("builtin"), else the file's name."""
    return names.get(data, Path(data).name)


def manual_topics(problems: Problems, suggestion: str) -> list[str]:
    """The topics of Python's manual (PSF licence), about 465,000 characters, sorted by name. Raises ConfigError."""
    try:
        from pydoc_data.topics import topics  # some distributions leave it out
    except ImportError:
        problems.stop("this Python is installed without pydoc_data", suggestion=suggestion)
    return [topics[name] for name in sorted(topics)]


def library_texts() -> Iterator[str]:
    """The standard library's own Python source (PSF licence), about 12 MB, file by file in the order of their names;
    unreadable files are skipped."""
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - _LEFT_OUT)
        for name in sorted(names):
            if name.endswith(".py"):
                try:
                    text = (Path(folder) / name).read_text("utf-8", errors="ignore")
                except OSError:
                    continue
                yield text
