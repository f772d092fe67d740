"""The run directory: who may write it, how it is named, and how a run is found again."""

from __future__ import annotations

import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from record_help import held

from ndd_engine.errors import EXIT_USAGE, RunLockedError, UsageError
from ndd_engine.record.rundir import (
    RunDir,
    RunLock,
    all_runs,
    bare,
    discard,
    find_run,
    new_run_dir,
    set_aside,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = new_run_dir(tmp_path, None, "chartext")
    directory.config.write_text("")
    return directory


@pytest.mark.long
def test_a_second_process_is_refused_and_told_who_writes(run: RunDir) -> None:
    with held(run.lock) as owner:
        with pytest.raises(RunLockedError) as caught:
            RunLock(run).acquire(patience_s=0.1)
        for named in (f"process {owner.pid}", socket.gethostname(), "attach chartext-001"):
            assert named in str(caught.value)
        assert caught.value.exit_status == EXIT_USAGE
        assert run.live_owner() == {"pid": owner.pid, "host": socket.gethostname()}
    # kill -9: it cannot clean up, and need not.
    assert run.live_owner() is None
    lock = RunLock(run)
    lock.acquire(patience_s=0)
    assert run.live_owner() == {"pid": os.getpid(), "host": socket.gethostname()}
    lock.release()
    lock.release()
    assert run.live_owner() is None


def test_viewers_never_keep_the_writer_out(run: RunDir) -> None:
    lock, done = RunLock(run), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        viewers = [pool.submit(lambda: [run.live_owner() for _ in iter(done.is_set, True)]) for _ in range(2)]
        try:
            for _ in range(20):
                lock.acquire(patience_s=20)
                lock.release()
        finally:
            done.set()
    assert all(viewer.result() is not None for viewer in viewers)


def test_runs_are_numbered_behind_the_highest(tmp_path: Path) -> None:
    assert new_run_dir(tmp_path, None, "eeg").name == "eeg-001"
    assert new_run_dir(tmp_path, None, "eeg").name == "eeg-002"
    (tmp_path / "eeg-017").mkdir()
    (tmp_path / "ndd-x").mkdir()
    (tmp_path / "chartext-400").mkdir()
    assert new_run_dir(tmp_path, None, "eeg").name == "eeg-018"
    # A number is not given twice, even when the run before was removed.
    (tmp_path / "eeg-001").rmdir()
    assert new_run_dir(tmp_path, None, "eeg").name == "eeg-019"
    (tmp_path / "eeg-999").mkdir()
    assert new_run_dir(tmp_path, None, "eeg").name == "eeg-1000"
    # A run of one's own model is named after its module.
    assert new_run_dir(tmp_path, None, "a.my_net:make").name == "my_net-001"
    assert new_run_dir(tmp_path, None, "_über:f").name == "ber-001"


def test_many_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(20) as pool:
        found = pool.map(lambda _: new_run_dir(tmp_path, None, "eeg").name, range(20))
    assert sorted(found) == [f"eeg-{number:03d}" for number in range(1, 21)]


def test_a_name_that_is_taken_says_how_to_go_on(tmp_path: Path) -> None:
    assert new_run_dir(tmp_path, "mine", "eeg").path == tmp_path / "mine"
    with pytest.raises(UsageError, match="--resume mine"):
        new_run_dir(tmp_path, "mine", "eeg")


def test_a_run_is_found_by_name_by_path_and_the_newest_without(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
        find_run(tmp_path, None)
    runs = [new_run_dir(tmp_path, name, "eeg") for name in ("b", "a", "c")]
    for age, each in enumerate(runs):
        each.events.write_text("")
        os.utime(each.path, (1000 + age, 1000 + age))
    (tmp_path / "not-a-run").mkdir()
    assert [each.name for each in all_runs(tmp_path)] == ["a", "b", "c"]
    assert find_run(tmp_path, None).name == find_run(tmp_path, "last").name == "c"
    assert find_run(tmp_path, "a").path == tmp_path / "a"
    assert find_run(tmp_path / "elsewhere", str(tmp_path / "b")).name == "b"
    # One that is alive comes before a newer one that is not.
    lock = RunLock(runs[0])
    lock.acquire()
    os.utime(runs[0].path, (1000, 1000))
    assert find_run(tmp_path, None).name == "b"
    lock.release()


def test_a_run_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    for age in range(10):
        each = new_run_dir(tmp_path, None, "eeg")
        each.events.write_text("")
        os.utime(each.path, (1000 + age, 1000 + age))
    (tmp_path / "a\x1b[31m").mkdir()
    (tmp_path / "a\x1b[31m" / "config.toml").touch()
    newest = ", ".join(["a\\x1b[31m", *(f"eeg-{number:03}" for number in range(10, 3, -1))])
    with pytest.raises(UsageError) as caught:
        find_run(tmp_path, "eeg-1\x1b[31m")
    assert "eeg-1\\x1b[31m" in str(caught.value) and str(caught.value).endswith(f": {newest}")
    with pytest.raises(UsageError, match=r"none.*--runs"):
        find_run(tmp_path / "none", "x")


def test_a_folder_that_may_not_be_searched_hides_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    original = os.stat

    def refused(path: object, *more: object, **named: object) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "closed")):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *more, **named)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "stat", refused)
    assert [run.name for run in all_runs(tmp_path)] == ["open"]
    assert find_run(tmp_path, None).name == "open"
    with pytest.raises(UsageError, match=r": open$"):
        find_run(tmp_path, "closed")


def test_a_lock_that_is_no_file_or_names_nobody_is_harmless(run: RunDir) -> None:
    os.mkfifo(run.lock)
    assert run.live_owner() is None
    run.lock.unlink()
    lock = RunLock(run)
    lock.acquire()
    with pytest.raises(RunLockedError, match=f"process {os.getpid()}"):
        RunLock(run).acquire(patience_s=0)  # also in one process
    for text in ("no json", "", "[" * 4000, "3", '{"pid": "\\u001b", "host": 7}', '{"pid": 1e999}'):
        run.lock.write_text(text)
        assert run.live_owner() == {"pid": "?", "host": "?"}
        with pytest.raises(RunLockedError, match=r"process \?"):
            RunLock(run).acquire(patience_s=0)
    run.lock.write_text('{"pid": 7, "host": "\\u001b[31m"}')
    assert run.live_owner() == {"pid": 7, "host": "\\x1b[31m"}
    lock.release()


def test_a_lock_that_is_a_link_is_refused_and_its_target_kept(run: RunDir, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    run.lock.symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        RunLock(run).acquire()
    assert target.read_text() == "kept"
    assert run.live_owner() is None


def test_a_new_folder_is_discarded_with_what_opening_a_run_creates_only(tmp_path: Path) -> None:
    one, two = new_run_dir(tmp_path, "one", "eeg"), new_run_dir(tmp_path, "two", "eeg")
    for each in (one, two):
        for path in (each.lock, each.events, each.console_log):
            path.touch()
    two.events.write_text("an event\n")
    discard(one)
    discard(two)
    assert not one.path.exists()
    assert two.events.exists() and two.lock.exists()


@pytest.mark.long
def test_the_launcher_of_ranks_owns_a_run_between_two_starts_of_them(run: RunDir) -> None:
    with held(run.launcher) as launcher:
        assert run.live_owner() == {"pid": launcher.pid, "host": socket.gethostname()}
        lock = RunLock(run)
        lock.acquire(patience_s=0)  # its rank 0 may write
        lock.release()
        run.events.write_text("{}\n")
        run.console_log.write_text("of the launcher")
        set_aside(run)
        assert run.console_log.exists()
        assert (run.path / "attempt-1" / "events.jsonl").exists()
    assert run.live_owner() is None


def test_a_folder_with_the_log_of_a_launcher_only_is_bare(tmp_path: Path) -> None:
    made = new_run_dir(tmp_path, None, "chartext")
    made.console_log.write_text("starting")
    made.launcher.touch()
    assert bare(made)
    made.events.touch()
    assert not bare(made)
