"""Runs a script under the observer and reads its records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from tests.torch_exit import ABORTED

from ndd_engine.record.events import EVENT_TYPES, parse
from ndd_engine.script.records import Records
from ndd_watch import FOLDER, SITE

SUBJECTS = Path(__file__).parent / "subjects"
# Another Python with torch, which runs the subjects: see tests/versions.py.
PYTHON = os.environ.get("NDD_TEST_PYTHON", sys.executable)


@cache
def versions() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the Python that runs the subjects, and of its torch: (major, minor) of both."""
    code = "import sys, torch; print(*sys.version_info[:2], *torch.__version__.split('.')[:2])"
    said = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout
    numbers = tuple(map(int, said.split()))
    return numbers[:2], numbers[2:]


@dataclass
class Ran:
    """What a subject printed, and the records of its processes."""

    status: int
    out: str
    errors: str
    records: dict[str, list[dict[str, Any]]]
    folder: Path

    def word(self, name: str) -> str:
        words = self.out.split()
        return words[words.index(name) + 1]

    def of(self, kind: str, name: str | None = None) -> list[dict[str, Any]]:
        (lines,) = [self.records[name]] if name is not None else self.records.values()
        return [line for line in lines if line["type"] == kind]

    def marks(self, words: str = "", kind: str = "") -> list[dict[str, Any]]:
        """Those whose text contains these words, of this kind."""
        return [mark for mark in self.of("mark") if words in mark["text"] and kind in ("", mark["kind"])]

    def assert_closed(self) -> None:
        """The phases of each window are its wall time."""
        for window in self.of("window"):
            whole = [body["host_ns"] for name, body in window["phases"].items() if "/" not in name]
            assert sum(whole) == window["wall_ns"]

    def total(self, figure: str) -> int:
        """The sum of a figure over all windows."""
        return sum(window.get(figure, 0) for window in self.of("window"))

    def phases(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for window in self.of("window"):
            for name, body in window["phases"].items():
                total[name] = total.get(name, 0) + body["host_ns"]
        return total


def run(
    folder: Path,
    *command: str,
    observed: bool = True,
    before: Callable[[], None] | None = None,
    read: bool = True,
    program: tuple[str, ...] = (PYTHON,),
    stdin: str | None = None,
    **environment: str,
) -> Ran:
    """Run `python *command` in the folder of the subjects. before: called in the process before it starts."""
    records = folder / "records"
    more = {FOLDER: str(records), "PYTHONPATH": str(SITE), "NDD_WATCH_WINDOW_S": "0.2"} if observed else {}
    # The observer must not need our packages. A second thread would only wait.
    inherited = {**os.environ, "OMP_NUM_THREADS": "1"}
    inherited.pop("PYTHONPATH", None)
    for _ in range(4):
        if observed and not records.exists():
            records.mkdir(parents=True)
        done = subprocess.run(
            [*program, *command], cwd=SUBJECTS, env={**inherited, **more, **environment}, capture_output=True,
            text=True, timeout=280, preexec_fn=before, input=stdin,
        )  # fmt: skip
        if ABORTED not in done.stderr:
            break
        shutil.rmtree(records, ignore_errors=True)
    return Ran(done.returncode, done.stdout, done.stderr, recorded(records) if read else {}, folder)


def recorded(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of all processes that have ended, by process."""
    found: dict[str, list[dict[str, Any]]] = {}
    records = Records(folder)
    for process, line in records.new(final=True):
        found.setdefault(process.name, []).append(line)
        # Whatever it writes is an event of the record.
        assert parse(json.dumps(line)) is not None, line
        declared = {one.name for one in fields(EVENT_TYPES[line["type"]])} | {"v", "t", "type"}
        assert line.keys() <= declared, line.keys() - declared
    assert not records.lost
    records.close()
    return found
