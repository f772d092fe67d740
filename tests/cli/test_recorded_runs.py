"""Commands that read recorded runs: `report`, `log`, `runs delete`, and all of them when a record is damaged."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ndd_console.jobs import run_sources
from ndd_console.jobs.run_sources import AttachedSource, HomeFolder
from ndd_engine.record.events import EndEvent, StageEvent
from ndd_engine.record.file import RunReader
from ndd_engine.record.rundir import RunDir, RunLock, all_runs
from tests.report.report_help import whole_life, write
from tests.terminal.screen import Terminal
from tests.tiers import few
from tests.waiting import LIMIT_S

from .program import call, refused


@contextlib.contextmanager
def locked(directory: RunDir) -> Iterator[None]:
    """The run lives meanwhile."""
    lock = RunLock(directory)
    lock.acquire()
    yield
    lock.release()


def make(root: Path, name: str, status: str = "done", days: float = 0) -> RunDir:
    directory = RunDir(root / name)
    directory.checkpoints.mkdir(parents=True)
    (directory.checkpoints / "weights.bin").write_bytes(b"x" * 5000)
    events = [StageEvent("prepare", "importing torch"), EndEvent(status, "", 1, 0)]
    lines = [each.to_json(1.0) for each in (events[:1] if status == "lost" else events)]
    directory.events.write_text("\n".join(lines) + "\n")
    at = time.time() - days * 86400
    os.utime(directory.events, (at, at))
    return directory


# report


@pytest.fixture
def reported(tmp_path: Path) -> Path:
    write(tmp_path / "runs", whole_life(cuda=False))
    return tmp_path


def test_the_page_is_written_into_the_runs_folder_and_its_path_is_printed(reported: Path) -> None:
    done = call("report", "one", folder=reported)
    path = Path(done.stdout.strip())
    assert path == reported / "runs" / "one" / "report.html"
    page = path.read_text(encoding="utf-8")
    assert page.count("<svg") >= 6 and "backward" in page
    # Written atomically: no temporary file is left.
    assert [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".")] == []


def test_a_run_is_found_by_its_path_from_anywhere(reported: Path) -> None:
    elsewhere = reported / "elsewhere"
    elsewhere.mkdir()
    out = elsewhere / "page.html"
    done = call("report", str(reported / "runs" / "one"), "-o", str(out), folder=elsewhere)
    assert done.stdout.strip() == str(out) and out.stat().st_size > 10_000
    # The page has the permissions of any file that this user writes.
    mask = os.umask(0)
    os.umask(mask)
    assert out.stat().st_mode & 0o777 == 0o666 & ~mask


def test_text_goes_to_standard_output_in_100_columns(reported: Path) -> None:
    done = call("report", "--text", folder=reported)
    assert "backward" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    plain = call("--ascii", "report", "--text", folder=reported)
    assert plain.stdout.isascii() and "backward" in plain.stdout


def test_json_is_one_document(reported: Path) -> None:
    body = json.loads(call("report", "one", "--json", folder=reported).stdout)
    assert (body["status"], body["step"]) == ("done", 4320)
    assert body["findings"] and body["findings"][0]["title"]
    # Phases add up to the measured time.
    tops = sum(seconds for name, seconds in body["phases_s"].items() if "/" not in name)
    assert tops == pytest.approx(body["measured_s"], rel=1e-6)
    assert [item["step"] for item in body["evaluations"]] == [864, 1728, 2592, 3456, 4320]
    # Training is told apart from preparation and pauses, and is the time that `runs` shows.
    assert body["preparation_s"] > 0 and body["paused_s"] == 30
    assert 0 < body["training_s"] < body["whole_s"]
    listed = json.loads(call("runs", "--json", folder=reported).stdout)["runs"]
    assert [row["training_s"] for row in listed] == [body["training_s"]]


# log


def test_the_output_of_a_run_is_printed_with_control_characters_escaped(tmp_path: Path) -> None:
    directory = make(tmp_path / "runs", "one")
    directory.console_log.write_bytes(b"first \x1b[31mred\x1b[0m\nbell \x07\n 10 %\r 20 %")
    done = call("log", "one", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "first red\nbell \\x07\n 20 %\n")


def test_a_live_run_is_followed_to_its_last_line(tmp_path: Path) -> None:
    directory = make(tmp_path / "runs", "live", "lost")
    directory.console_log.write_text("1\n")

    def writes() -> None:
        with locked(directory), directory.console_log.open("a") as log:
            held.set()
            time.sleep(0.3)
            log.write("2\n3\n")

    held, thread = threading.Event(), threading.Thread(target=writes)
    thread.start()
    assert held.wait(LIMIT_S)
    done = call("log", "--follow", folder=tmp_path)
    thread.join()
    assert done.stdout == "1\n2\n3\n"


def test_a_run_without_output_and_one_that_does_not_exist(tmp_path: Path) -> None:
    make(tmp_path / "runs", "silent")
    done = call("log", "silent", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "other" in refused("log", "other", folder=tmp_path)


# runs delete


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for name, status, days in (
        ("old-1", "done", 40), ("old-2", "failed", 35), ("new-1", "done", 1), ("new-2", "lost", 2),
    ):  # fmt: skip
        make(folder, name, status, days)
    return folder


def names(root: Path) -> list[str]:
    return [each.name for each in all_runs(root)]


def test_names_and_globs_are_deleted_with_everything_in_them(root: Path) -> None:
    done = call("runs", "delete", "old-*", "new-1", "--yes", folder=root.parent)
    assert done.returncode == 0 and "old-2" in done.stdout
    assert names(root) == ["new-2"] and [entry.name for entry in root.iterdir()] == ["new-2"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (("--older-than", "30d"), ["new-1", "new-2"]),
        (("--failed",), ["new-1", "old-1"]),
        (("--failed", "--older-than", "4w"), ["new-1", "new-2", "old-1"]),
        (("old-*", "--failed"), ["new-1", "new-2", "old-1"]),
        (("old-*", "--older-than", "900d"), ["new-1", "new-2", "old-1", "old-2"]),
        (("*", "--dry-run"), ["new-1", "new-2", "old-1", "old-2"]),
    ],
)
def test_the_options_select(root: Path, options: tuple[str, ...], left: list[str]) -> None:
    assert call("runs", "delete", *options, "--yes", folder=root.parent).returncode == 0
    assert names(root) == left


def test_without_a_terminal_a_missing_answer_deletes_nothing(root: Path) -> None:
    done = call("runs", "delete", "*", folder=root.parent)
    assert done.returncode == 2 and "--yes" in done.stderr and len(names(root)) == 4


@pytest.mark.long
@pytest.mark.parametrize(("answer", "left"), few([("", 4), ("n", 4), ("y", 3)], 1))
def test_it_asks_on_a_terminal(root: Path, answer: str, left: int) -> None:
    with Terminal("runs", "delete", "old-1", runs=root) as terminal:
        terminal.until("Delete 1 run")
        terminal.press(answer + "\r")
        assert terminal.wait() == (0 if left == 3 else 1)
    assert len(names(root)) == left


def test_a_running_run_is_never_deleted(root: Path) -> None:
    with locked(RunDir(root / "old-2")):
        assert "old-2" in refused("runs", "delete", "old-1", "old-2", "--yes", folder=root.parent)
        globbed = call("runs", "delete", "old-*", "--yes", folder=root.parent)
        assert globbed.returncode == 0 and "old-2" in globbed.stderr
        assert names(root) == ["new-1", "new-2", "old-2"]


def test_nothing_outside_the_folder_is_deleted(root: Path, tmp_path: Path) -> None:
    outside = make(tmp_path / "elsewhere", "precious")
    (root / "link").symlink_to(outside.path)
    (root / "notes").mkdir()
    (root / "notes" / "thesis.txt").write_text("mine")
    (root / "old-1" / "into").symlink_to(outside.path)
    for name in ("../elsewhere/precious", str(outside.path), "..", "link", "notes"):
        assert name in refused("runs", "delete", name, "--yes", folder=tmp_path)
    assert call("runs", "delete", "*", "--yes", folder=tmp_path).returncode == 0
    assert outside.events.exists() and (root / "notes" / "thesis.txt").exists()
    assert (root / "link").is_symlink() and not (root / "old-1").exists()


# Damaged records

DAMAGED = "2 lines of events.jsonl are damaged and were skipped"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of two runs; two lines of "bad" have a value of the wrong type."""
    for name in ("good", "bad"):
        write(tmp_path / "runs", whole_life(cuda=False), name)
    bad = RunDir(tmp_path / "runs" / "bad")
    lines = bad.events.read_bytes().splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if b'"type":"sample"' in line][-2:]
    for place, change in zip(places, ({"host": {"rss_bytes": "many"}}, {"t": 10**400}), strict=True):
        lines[place] = json.dumps({**json.loads(lines[place]), **change}).encode() + b"\n"
    bad.events.write_bytes(b"".join(lines))
    return tmp_path / "runs"


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
    done = call(*line.split(), folder=runs.parent)
    assert done.stderr.count(DAMAGED) == 1 and done.stdout


def test_the_screen_shows_it_for_a_while(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(AttachedSource(RunDir(runs / "bad"))) as source:
        assert source.notice() == DAMAGED
        later = time.monotonic() + run_sources.DAMAGE_SHOWN_S + 1
        monkeypatch.setattr(time, "monotonic", lambda: later)
        assert source.notice() is None


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
    assert call("runs", folder=runs.parent).returncode == 0


def test_a_screen_whose_record_cannot_be_followed_says_why(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poll(_: RunReader) -> bool:
        raise RuntimeError("a defect")

    monkeypatch.setattr(RunReader, "poll", poll)
    with contextlib.closing(AttachedSource(RunDir(runs / "good"))) as source:
        assert "a defect" in (source.notice() or "")
    done = call("attach", "good", "--headless", folder=runs.parent)
    assert done.returncode == 1 and "a defect" in done.stderr
