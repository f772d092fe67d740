"""Live runs are paused for a trial and always resumed; results are recorded in live and in ended runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.records import snapshot_of
from tests.runs import copy
from tests.waiting import until
from trial_help import live_run

from ndd_engine.errors import RunLockedError, UsageError
from ndd_engine.record.events import MarkEvent, StageEvent, TrialEvent, parse
from ndd_engine.record.rundir import RunDir, RunLock
from ndd_engine.run.channel import MAX_LINE, ControlServer, send
from ndd_engine.run.run import Run
from ndd_engine.trial.outcome import Base
from ndd_engine.trial.trial import alone, held, record_trial, to_pause

EVENT = TrialEvent(
    ["loader.workers=2"], "run live", "faster", "faster 1.42x", ratio=1.42, low=1.38, high=1.47, abba_blocks=6
)
HOLDER = """
import sys, time
from pathlib import Path
from ndd_engine.record.rundir import RunDir
from ndd_engine.trial.trial import alone, held
what, folder = sys.argv[1], Path(sys.argv[2])
say = lambda text: print(text, flush=True)
with held([RunDir(folder)]) if what == "held" else alone("cpu", say, folder=folder):
    say(what)
    time.sleep(600)
"""
GONE = 4_194_999  # more than there are processes


def holder(what: str, folder: Path) -> subprocess.Popen[str]:
    """A process that holds a run ("held"), or measures ("alone"), until it is ended."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, what, str(folder)], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that trains, before and after each test."""
    with live_run(tmp_path_factory.mktemp("live")) as run:
        yield run


def becomes(run: Run, status: str) -> None:
    until(lambda: run.recorder.snapshot().status == status)


@pytest.mark.long
def test_a_held_run_is_paused_and_resumed(live: Run) -> None:
    with held([live.directory]):
        at = live.recorder.snapshot()
        assert at.status == "paused"
        time.sleep(0.7)
        assert live.recorder.snapshot().step == at.step
    until(lambda: live.recorder.snapshot().step > at.step)
    with pytest.raises(ZeroDivisionError), held([live.directory]):
        1 / 0  # noqa: B018
    becomes(live, "training")
    marks = [timed.mark for timed in live.recorder.snapshot().marks if timed.mark.kind == "pause"]
    assert marks[0].data["holders"] and str(os.getpid()) in marks[0].text


@pytest.mark.long
def test_what_a_person_paused_stays_paused_and_what_a_person_resumes_goes_on_and_is_told(live: Run) -> None:
    send(live.directory.control_socket, "pause")
    with held([live.directory]):
        pass
    time.sleep(0.7)
    assert live.recorder.snapshot().status == "paused"
    send(live.directory.control_socket, "resume")
    becomes(live, "training")
    told: list[str] = []
    with held([live.directory], told.append):
        told.clear()
        send(live.directory.control_socket, "resume")
        becomes(live, "training")
        until(lambda: snapshot_of(live.directory).status == "training")
    (text,) = told
    assert "resumed" in text


@pytest.mark.long
def test_a_run_that_cannot_be_paused_is_not_measured_alongside(live: Run, tmp_path: Path) -> None:
    socket = live.directory.control_socket
    moved = socket.rename(tmp_path / "socket")
    try:
        with pytest.raises(UsageError, match="disturb"), held([live.directory]):
            pytest.fail("it was measured all the same")
    finally:
        moved.rename(socket)


@pytest.mark.long
def test_a_run_goes_on_by_itself_when_its_holder_is_killed(live: Run) -> None:
    process = holder("held", live.directory.path)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        at = live.recorder.snapshot()
        assert at.status == "paused"
        process.kill()  # and nobody waits for it yet: it stays as a zombie
        until(lambda: live.recorder.snapshot().step > at.step)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("pid", ["1", 1.5, True, [1], GONE, -1])
def test_a_holder_has_to_be_the_number_of_a_process(live: Run, pid: object) -> None:
    with pytest.raises(UsageError, match="process"):
        send(live.directory.control_socket, "pause", holder=pid)
    assert live.recorder.snapshot().status == "training"


def test_a_run_that_does_not_pause_is_told_and_let_go(tmp_path: Path, finished_run: RunDir) -> None:
    run = copy(finished_run, tmp_path)
    asked: list[tuple[str, int | None]] = []
    server = ControlServer(run.control_socket, lambda action, holder: asked.append((action, holder)))
    lock = RunLock(run)
    lock.acquire()
    server.start()
    with run.events.open("a") as file:
        file.write(StageEvent("resume", "a step that takes long").to_json(time.time()) + "\n")
    told: list[str] = []
    try:
        with (
            pytest.raises(UsageError, match="run ended"),
            held([run], told.append, patience_s=0.3),
        ):
            raise AssertionError("it is not held")
    finally:
        server.close()
        lock.release()
    assert asked == [("pause", os.getpid()), ("resume", os.getpid())]
    assert len(told) == 1  # what it waits for


@pytest.mark.long
def test_which_runs_have_to_stand_still(live: Run, tmp_path: Path, finished_run: RunDir) -> None:
    ended, root = copy(finished_run, tmp_path), live.directory.path.parent
    other = Base.of_run(ended, ("run.device=cpu",))
    assert to_pause(Base.of_run(live.directory), root, others=False) == (live.directory,)
    with pytest.raises(UsageError, match="--pause"):
        to_pause(other, root, others=False)
    assert to_pause(other, root, others=True) == (live.directory,)
    with held([live.directory]):  # stands still anyway
        assert to_pause(other, root, others=False) == ()
    assert to_pause(Base.of_run(ended), tmp_path, others=False) == ()


def test_a_trial_is_recorded_in_a_run_that_has_ended(tmp_path: Path, finished_run: RunDir) -> None:
    run = copy(finished_run, tmp_path)
    before = snapshot_of(run)
    with run.events.open("ab") as file:
        file.write(b'{"v":2,"type":"torn')
    record_trial(run, EVENT)
    record_trial(run, EVENT)
    after = snapshot_of(run)
    assert after.trials == (EVENT, EVENT)
    assert (after.status, after.step) == (before.status, before.step) == ("done", 5)
    assert all(parse(line) for line in run.events.read_bytes().splitlines())
    assert run.live_owner() is None


@pytest.mark.long
def test_a_trial_is_recorded_by_the_run_that_lives(live: Run) -> None:
    record_trial(live.directory, EVENT)
    until(lambda: live.recorder.snapshot().trials == (EVENT,))
    socket = live.directory.control_socket
    for event in (None, {}, {"type": "mark"}, MarkEvent("note", 1, "x").to_json(0), 3):
        with pytest.raises(UsageError, match="only trial"):
            send(socket, "record", event=event)
    with pytest.raises(UsageError, match=f"{MAX_LINE:,}"):
        send(socket, "record", event={"text": "x" * MAX_LINE})
    until(lambda: snapshot_of(live.directory).trials == (EVENT,))


def test_a_trial_that_cannot_be_recorded_says_why(tmp_path: Path, finished_run: RunDir) -> None:
    run = copy(finished_run, tmp_path)
    lock = RunLock(run)
    lock.acquire()
    try:
        with pytest.raises(UsageError):
            record_trial(run, EVENT)  # somebody writes it and does not listen
    finally:
        lock.release()
    with pytest.raises((UsageError, RunLockedError), match="recorded"):
        record_trial(RunDir(tmp_path / "gone"), EVENT)


@pytest.mark.long
def test_one_trial_at_a_time_and_a_killed_one_lets_the_next_begin(tmp_path: Path) -> None:
    first = holder("alone", tmp_path)
    assert first.stdout is not None and first.stdout.readline() == "alone\n"
    second = holder("alone", tmp_path)
    try:
        assert second.stdout is not None
        assert str(first.pid) in second.stdout.readline()
        first.kill()
        for line in second.stdout:
            if line == "alone\n":
                break
        assert second.poll() is None
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_waiting_for_another_trial_ends_with_a_stop(tmp_path: Path) -> None:
    stop, waited = threading.Event(), []

    def tell(text: str) -> None:
        waited.append(text)
        stop.set()

    trial = "the trial of loader.workers=4 against run a\x1b[2J"
    with alone("cpu", lambda _: None, folder=tmp_path, what=trial), alone("cpu", tell, stop, tmp_path):
        (text,) = waited
    assert "the trial of loader.workers=4 against run a\\x1b[2J" in text
    assert f"process {os.getpid()}, for " in text


def test_without_a_place_for_the_lock_a_trial_still_measures(tmp_path: Path) -> None:
    with alone("cpu", lambda _: None, folder=tmp_path / "none"):
        pass
    for lock in ("fifo", "link"):
        place = tmp_path / lock
        place.mkdir()
        path = place / f"ndd-console-{os.getuid()}-cpu.lock"
        if lock == "fifo":
            os.mkfifo(path)
        else:
            (tmp_path / "target").write_text("kept")
            path.symlink_to(tmp_path / "target")
        with alone("cpu", lambda _: None, folder=place):
            pass
    assert (tmp_path / "target").read_text() == "kept"
