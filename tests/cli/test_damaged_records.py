"""Commands that read the records of runs, when one of them is damaged, unreadable or hostile."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ndd_console.cli import cli
from ndd_console.jobs import run_sources
from ndd_console.jobs.run_sources import AttachedSource, HomeFolder
from ndd_engine.record.file import RunReader
from ndd_engine.record.rundir import RunDir
from tests.report.report_help import whole_life, write

DAMAGED = "2 lines of events.jsonl are damaged and were skipped"


def command(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--runs", str(folder), *arguments])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs; two lines of "bad" have a value of the wrong type."""
    for name in ("good", "bad"):
        write(tmp_path, whole_life(cuda=False), name)
    bad = RunDir(tmp_path / "bad")
    lines = bad.events.read_bytes().splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if b'"type":"sample"' in line][-2:]
    for place, change in zip(places, ({"host": {"rss_bytes": "many"}}, {"t": 10**400}), strict=True):
        lines[place] = json.dumps({**json.loads(lines[place]), **change}).encode() + b"\n"
    bad.events.write_bytes(b"".join(lines))
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "runs",
        "attach bad --headless",
        "report bad",
        "report bad --text",
        "report bad --json",
        "compare good bad",
    ],
)
def test_damaged_lines_are_skipped_and_reported_once(runs: Path, line: str) -> None:
    result = command(runs, *line.split())
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stderr.count(DAMAGED) == 1
    assert result.stdout


def test_the_screen_shows_it_for_a_while(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = AttachedSource(RunDir(runs / "bad"))
    try:
        assert source.notice() == DAMAGED
        later = time.monotonic() + run_sources.DAMAGE_SHOWN_S + 1
        monkeypatch.setattr(time, "monotonic", lambda: later)
        assert source.notice() is None
    finally:
        source.close()


def test_one_bad_run_hides_no_other(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(runs / "bad" / "lock")
    for name in ("fifo", "folder"):
        (runs / name).mkdir()
        (runs / name / "config.toml").touch()
    os.mkfifo(runs / "fifo" / "events.jsonl")
    (runs / "folder" / "events.jsonl").mkdir()
    found = {row.name: row.status for row in HomeFolder(runs).runs()}
    assert found == {"good": "done", "bad": "done", "fifo": "unreadable", "folder": "unreadable"}
    original = RunReader.poll

    def poll(reader: RunReader) -> bool:
        if reader.run.name == "bad":
            raise RuntimeError("a defect")
        return original(reader)

    monkeypatch.setattr(RunReader, "poll", poll)
    found = {row.name: row.status for row in HomeFolder(runs).runs()}
    assert (found["good"], found["bad"]) == ("done", "unreadable")
    assert command(runs, "runs").exit_code == 0


def test_a_screen_whose_record_cannot_be_followed_says_why(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poll(_: RunReader) -> bool:
        raise RuntimeError("a defect")

    monkeypatch.setattr(RunReader, "poll", poll)
    source = AttachedSource(RunDir(runs / "good"))
    try:
        assert "a defect" in (source.notice() or "")
    finally:
        source.close()
    result = command(runs, "attach", "good", "--headless")
    assert "a defect" in str(result.exception)
