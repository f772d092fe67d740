"""`runs delete`: what is deleted, what never is, and the question before."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ndd_engine.record.events import EndEvent, StageEvent
from ndd_engine.record.rundir import RunDir, RunLock, all_runs
from tests.terminal.screen import Terminal

from .program import call, refused


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
@pytest.mark.parametrize(("answer", "left"), [("n", 4), ("", 4), ("y", 3)])
def test_it_asks_on_a_terminal(root: Path, answer: str, left: int) -> None:
    with Terminal("runs", "delete", "old-1", runs=root) as terminal:
        terminal.until("Delete 1 run")
        terminal.press(answer + "\r")
        assert terminal.wait() == (0 if left == 3 else 1)
    assert len(names(root)) == left


def test_a_running_run_is_never_deleted(root: Path) -> None:
    lock = RunLock(RunDir(root / "old-2"))
    lock.acquire()
    try:
        assert "old-2" in refused("runs", "delete", "old-1", "old-2", "--yes", folder=root.parent)
        globbed = call("runs", "delete", "old-*", "--yes", folder=root.parent)
        assert globbed.returncode == 0 and "old-2" in globbed.stderr
        assert names(root) == ["new-1", "new-2", "old-2"]
    finally:
        lock.release()


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
