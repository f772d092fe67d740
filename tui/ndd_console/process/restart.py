"""Replaces this process by a new one that trains: after the wizard, and where a run of this process cannot train on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def restart(root: Path, words: Sequence[str]) -> NoReturn:
    """Execute `ndd-console train` with these words in place of this process. root: folder of the runs.

    Nothing of this process stays: its memory on the GPU, its lock of the run and its files are closed.
    """
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execv(sys.executable, [sys.executable, "-m", "ndd_console", "--runs", str(root), "train", *words])


def told(words: Sequence[str]) -> str:
    """What is said of a restart."""
    return f"this process cannot train on; restarting: ndd-console train {' '.join(words)}"
