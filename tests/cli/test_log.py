"""`log`: what a run has written, and what it writes while it is followed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ndd_engine.record.rundir import RunLock

from .program import call, refused
from .test_runs_delete import make


def test_the_output_of_a_run_is_printed_with_control_characters_escaped(tmp_path: Path) -> None:
    directory = make(tmp_path / "runs", "one")
    directory.console_log.write_bytes(b"first \x1b[31mred\x1b[0m\nbell \x07\n 10 %\r 20 %")
    done = call("log", "one", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "first red\nbell \\x07\n 20 %\n")


def test_a_live_run_is_followed_to_its_last_line(tmp_path: Path) -> None:
    directory = make(tmp_path / "runs", "live", "lost")
    directory.console_log.write_text("begins\n")
    lock = RunLock(directory)
    lock.acquire()

    def writes() -> None:
        with directory.console_log.open("a") as log:
            time.sleep(0.3)
            log.write("goes on\nends\n")
        lock.release()

    thread = threading.Thread(target=writes)
    thread.start()
    done = call("log", "--follow", folder=tmp_path)
    thread.join()
    assert done.stdout == "begins\ngoes on\nends\n"


def test_a_run_without_output_and_one_that_does_not_exist(tmp_path: Path) -> None:
    make(tmp_path / "runs", "silent")
    done = call("log", "silent", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "no run" in refused("log", "other", folder=tmp_path)
