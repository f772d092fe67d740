"""`runs delete`: what is deleted, what never is, and the question before."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pexpect
import pytest

from ndd_engine.record.events import EndEvent, StageEvent
from ndd_engine.record.rundir import RunDir, RunLock, all_runs

from .program import environment, run

pytestmark = pytest.mark.long


def make(root: Path, name: str, status: str = "done", days: float = 0) -> RunDir:
    directory = RunDir(root / name)
    directory.checkpoints.mkdir(parents=True)
    (directory.checkpoints / "step-00000001.pt").write_bytes(b"x" * 5000)
    events = [StageEvent("prepare", "importing torch")]
    lines = [each.to_json(1.0) for each in events] + (
        [] if status == "lost" else [EndEvent(status, "", 1, 0).to_json(2.0)]
    )
    directory.events.write_text("\n".join(lines) + "\n")
    at = time.time() - days * 86400
    os.utime(directory.events, (at, at))
    return directory


def test_a_run_that_failed_in_preparation_is_listed_with_its_workload_and_time(tmp_path: Path) -> None:
    failed = make(tmp_path / "runs", "broken-001", "failed")
    failed.config.write_text('[workload]\nname = "mine:factory"\n')
    make(tmp_path / "runs", "older", days=3)
    lines = run("runs", folder=tmp_path).stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("broken-001")]
    assert "mine:factory" in line and "failed" in line and "19" in line


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
    done = run("runs", "delete", "old-*", "new-1", "--yes", folder=root.parent)
    assert done.returncode == 0, done.stderr
    assert "deleted 3 runs" in done.stderr and "old-2" in done.stdout
    assert names(root) == ["new-2"] and [entry.name for entry in root.iterdir()] == ["new-2"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (("--older-than", "30d"), ["new-1", "new-2"]),
        (("--failed",), ["new-1", "old-1"]),
        (("--failed", "--older-than", "4w"), ["new-1", "new-2", "old-1"]),
        (("old-*", "--failed"), ["new-1", "new-2", "old-1"]),
        (("old-*", "--older-than", "900d"), ["new-1", "new-2", "old-1", "old-2"]),
    ],
)
def test_the_options_select(root: Path, options: tuple[str, ...], left: list[str]) -> None:
    assert run("runs", "delete", *options, "--yes", folder=root.parent).returncode == 0
    assert names(root) == left


def test_a_dry_run_and_a_missing_answer_delete_nothing(root: Path) -> None:
    dry = run("runs", "delete", "*", "--dry-run", folder=root.parent)
    assert dry.returncode == 0 and "would delete 4 runs" in dry.stderr
    asked = run("runs", "delete", "*", folder=root.parent)
    assert asked.returncode == 2 and "add --yes" in asked.stderr
    assert len(names(root)) == 4


@pytest.mark.parametrize(("answer", "left"), [("n", 4), ("", 4), ("y", 3)])
def test_it_asks_on_a_terminal(root: Path, answer: str, left: int) -> None:
    import sys

    arguments = ["-m", "ndd_console", "--runs", str(root), "runs", "delete", "old-1"]
    child = pexpect.spawn(sys.executable, arguments, env=environment(), encoding="utf-8", timeout=30)  # type: ignore[arg-type]
    child.expect(r"Delete 1 run \(.*\) in .*\?")
    child.sendline(answer)
    child.expect(pexpect.EOF)
    child.close()
    assert len(names(root)) == left and child.exitstatus == (0 if left == 3 else 1)


@pytest.mark.promise
def test_a_running_run_is_never_deleted(root: Path) -> None:
    lock = RunLock(RunDir(root / "old-2"))
    lock.acquire()
    try:
        named = run("runs", "delete", "old-1", "old-2", "--yes", folder=root.parent)
        assert named.returncode == 2 and "run old-2 is running; stop it first" in named.stderr
        assert len(names(root)) == 4
        globbed = run("runs", "delete", "old-*", "--yes", folder=root.parent)
        assert globbed.returncode == 0 and "old-2 is running: it stays" in globbed.stderr
        assert names(root) == ["new-1", "new-2", "old-2"]
    finally:
        lock.release()


def test_nothing_outside_the_folder_is_deleted(root: Path, tmp_path: Path) -> None:
    outside = make(tmp_path / "elsewhere", "precious")
    (root / "link").symlink_to(outside.path)
    (root / "notes").mkdir()
    (root / "notes" / "thesis.txt").write_text("mine")
    (root / "old-1" / "into").symlink_to(outside.path)
    for name, why in (
        ("../elsewhere/precious", "is a path; only runs in"),
        (str(outside.path), "is a path; only runs in"),
        ("..", "is a path"),
        ("link", "is a symbolic link; delete it yourself"),
        ("notes", "there is no run notes"),
        ("no-*", "no run matches no-*"),
    ):
        done = run("runs", "delete", name, "--yes", folder=tmp_path)
        assert done.returncode == 2 and why in done.stderr, done.stderr
    assert run("runs", "delete", "*", "--yes", folder=tmp_path).returncode == 0
    assert (
        outside.events.exists() and (root / "notes" / "thesis.txt").exists() and (root / "link").is_symlink()
    )
    assert not (root / "old-1").exists()


@pytest.mark.parametrize("age", ["30", "d", "-3d", "3y", "nan"])
def test_an_age_has_a_unit(root: Path, age: str) -> None:
    done = run("runs", "delete", f"--older-than={age}", "--yes", folder=root.parent)
    assert done.returncode == 2 and "allowed: a number with m, h, d or w, as in 30d" in done.stderr


def test_without_a_selection_nothing_happens(root: Path) -> None:
    done = run("runs", "delete", folder=root.parent)
    assert done.returncode == 2 and "name the runs to delete" in done.stderr
    assert len(names(root)) == 4


def test_runs_still_lists(root: Path) -> None:
    assert "old-2" in run("runs", folder=root.parent).stdout
    assert "delete" in run("runs", "--help", folder=root.parent).stdout
