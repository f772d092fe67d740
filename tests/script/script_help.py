"""Runs the console with scripts, and reads what it has recorded."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.records import events_of

from ndd_console.__main__ import status_of
from ndd_engine.record.rundir import RunDir

CONSOLE = (sys.executable, "-m", "ndd_console")
SUBJECTS = Path(__file__).parents[1] / "observe" / "subjects"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "NDD_WATCH_WINDOW_S": "0.2", "NO_COLOR": "1", **more}


def run(
    folder: Path, *words: str, stdin: str | None = None, status: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """The finished console with these words. more: environment variables."""
    done = subprocess.run(
        [*CONSOLE, *words], cwd=folder, capture_output=True, text=True, timeout=150, input=stdin,
        env=environment(**more), check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done


def start(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    """The console while it runs, in a session of its own."""
    return subprocess.Popen(
        [*CONSOLE, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(**more), start_new_session=True,
    )  # fmt: skip


def events(folder: Path, name: str) -> list[Any]:
    """What is recorded of a run."""
    return events_of(RunDir(folder / "runs" / name))


def report(folder: Path, name: str) -> dict[str, Any]:
    """The report of a run."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(out):
        assert status_of(["--runs", str(folder / "runs"), "report", name, "--json"]) == 0
    out.flush()
    found: dict[str, Any] = json.loads(out.buffer.getvalue())  # type: ignore[attr-defined]
    return found
