"""The recorder loses lines before it loses a step: full disks, broken listeners, and training is never disturbed."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from record_help import end, mark, run_event, window
from tests.records import snapshot_of
from tests.waiting import LIMIT_S

import ndd_engine.record.file as record_file
from ndd_engine.record.events import Event, MarkEvent, WindowEvent, parse
from ndd_engine.record.file import FOLD_EVERY_BYTES, Recorder
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState


@contextmanager
def recording(
    path: Path | None, listener: Callable[[float, Event], None] | None = None
) -> Iterator[Recorder]:
    recorder = Recorder(path, None, listener)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.close()


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes: simulates a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def written(path: Path) -> list[Event]:
    """The events of a log, in which no line is torn."""
    items = [parse(line) for line in path.read_bytes().splitlines()]
    assert None not in items
    return [item[1] for item in items if item]


def steps(path: Path) -> list[int]:
    return [event.step for event in written(path) if isinstance(event, WindowEvent)]


def notes(path: Path) -> list[str]:
    return [event.text for event in written(path) if isinstance(event, MarkEvent)]


def warnings(recorder: Recorder) -> list[str]:
    return [item.mark.text for item in recorder.snapshot().marks if item.mark.kind == "warning"]


def test_events_are_folded_and_written_in_order(tmp_path: Path) -> None:
    """Behind a torn line of an earlier process; the listener hears each event after it was folded."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"v":2,"type":"wind')
    heard: list[int] = []
    with recording(path, lambda _, event: heard.append(recorder.snapshot().step)) as recorder:
        recorder.put(run_event())
        for step in range(1, 200):
            recorder.put(window(step, loss=1 / step))
        recorder.put(end("done", 199))
        assert recorder.flush()
        live = recorder.snapshot()
    assert steps(path) == list(range(1, 200)) and heard == [*range(200), 199]
    assert (live.step, live.status, live.dropped_events) == (199, "done", 0)
    assert snapshot_of(RunDir(tmp_path)) == live


def test_put_is_safe_from_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with recording(path) as recorder, ThreadPoolExecutor(4) as pool:
        pool.map(lambda n: recorder.put(mark("note", n)), range(1200))
    assert len(written(path)) == 1200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_on_a_full_disk_the_run_is_still_watched_and_warned_about_once() -> None:
    with recording(Path("/dev/full")) as recorder:
        recorder.put(run_event())
        for step in range(1, 301):
            recorder.put(window(step))
        recorder.put(end("done", 300))
        assert recorder.flush()
        snapshot = recorder.snapshot()
        assert (snapshot.step, snapshot.status) == (300, "done")
        assert snapshot.dropped_events == recorder.dropped == 302
        (warning,) = warnings(recorder)
        assert os.strerror(errno.ENOSPC) in warning
        assert recorder.errors == warnings(recorder)


def test_when_there_is_space_again_the_log_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with recording(path) as recorder:
        recorder.put(run_event())
        recorder.put(window(1))
        recorder.flush()
        good = path.read_bytes()
        with file_limit(len(good) + 30):
            # The first of these fits in part: what was written of it must go.
            for step in range(2, 6):
                recorder.put(window(step))
            recorder.flush()
            assert path.read_bytes() == good
            assert recorder.dropped == 4
        deadline = time.monotonic() + LIMIT_S
        step = 6
        while path.read_bytes() == good and time.monotonic() < deadline:
            recorder.put(window(step))
            recorder.flush()
            step += 1
            time.sleep(0.05)
        dropped = recorder.dropped
        recorder.put(end("done", step))
    assert written(path)[-1] == end("done", step)
    assert len(notes(path)) == 1 and notes(path)[0].startswith(f"{dropped} ")
    assert steps(path) == [1, step - 1]
    assert dropped == step - 1 - 2


def test_a_listener_that_raises_costs_neither_the_record_nor_the_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def listener(_t: float, _event: Event) -> None:
        raise RuntimeError("on fire")

    with recording(path, listener) as recorder:
        for step in range(1, 51):
            recorder.put(window(step))
        assert recorder.flush()
        assert recorder.snapshot().step == 50
        assert len(warnings(recorder)) == 1
        assert "on fire" in warnings(recorder)[0]
        recorder.put(window(51))
        assert recorder.flush()
        assert recorder.snapshot().step == 51
    assert len(path.read_bytes().splitlines()) == 51


def test_an_event_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with recording(path) as recorder:
        for _ in range(5):
            recorder.put(mark("note", 1, "text", thing=object()))
        recorder.put(window(7))
        assert recorder.flush()
        assert recorder.snapshot().step == 7
        assert len(warnings(recorder)) == 1
    assert written(path) == [window(7)]


def test_nothing_that_goes_wrong_reaches_the_side_that_trains(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "events.jsonl")
    recorder.put(window(1))  # before the start
    recorder.start()
    recorder.flush()
    assert recorder.snapshot().step == 1
    recorder.close()
    recorder.close()
    recorder.put(window(2))  # after the end
    assert recorder.flush()
    # Without a file, a run is only watched.
    with recording(None) as recorder:
        recorder.put(window(3))
        recorder.flush()
        assert recorder.snapshot().step == 3 and recorder.dropped == 0


def test_a_folder_that_is_missing_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recorder(tmp_path / "no" / "events.jsonl").start()


def test_the_state_is_written_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with recording(path) as recorder:
        recorder.put(run_event())
        for step in range(1, 4):
            for _ in range(FOLD_EVERY_BYTES // 100_000 + 1):
                recorder.put(mark("note", step, "x" * 100_000))
            recorder.put(window(step))
        recorder.flush()
        live = recorder.snapshot()
    lines = path.read_bytes().splitlines()
    assert sum(line.startswith(b'{"v":2,"type":"fold"') for line in lines) >= 3
    # Each fold event holds exactly what came before it.
    state = RunState()
    for line in lines:
        item = parse(line)
        if item is None:
            assert RunState.from_line(line).snapshot() == state.snapshot()
        else:
            state.fold(*item)
    assert state.snapshot() == live


def test_a_folder_that_is_moved_away_is_reported_and_nothing_is_lost_if_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "LOOK_EVERY_S", 0.0)
    folder, elsewhere = tmp_path / "one", tmp_path / "two"
    folder.mkdir()
    with recording(folder / "events.jsonl") as recorder:
        recorder.put(window(1))
        recorder.flush()
        assert recorder.deleted() is None and recorder.trouble is None
        folder.rename(elsewhere)
        recorder.put(window(2))
        recorder.put(window(3))
        recorder.flush()
        gone = recorder.deleted()
        assert gone is not None and recorder.trouble == gone and str(folder) in gone
        assert len(warnings(recorder)) == 1 and gone in warnings(recorder)[0]
        # Another that took its name is not the same one.
        folder.mkdir()
        (folder / "events.jsonl").touch()
        assert recorder.deleted() is not None
        shutil.rmtree(folder)
        elsewhere.rename(folder)
        recorder.put(window(4))
        recorder.flush()
        assert recorder.deleted() is None and recorder.trouble is None
    assert steps(folder / "events.jsonl") == [1, 2, 3, 4]


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing hangs, as on a network file system whose server is gone, until the event is set."""
    back = threading.Event()
    write = record_file.write_whole

    def hang(handle: int, data: bytes) -> None:
        assert back.wait(LIMIT_S)
        write(handle, data)

    monkeypatch.setattr(record_file, "write_whole", hang)
    monkeypatch.setattr(record_file, "STUCK_S", 0.1)
    yield back
    back.set()


def test_a_file_system_that_hangs_delays_neither_the_state_nor_the_listener(
    tmp_path: Path, hung: threading.Event
) -> None:
    path, heard = tmp_path / "events.jsonl", []
    with recording(path, lambda _, event: heard.append(event)) as recorder:
        recorder.put(run_event())
        for step in range(1, 51):
            recorder.put(window(step))
        assert recorder.settle()
        assert recorder.snapshot().step == 50 and len(heard) == 51
        assert not recorder.flush(0.1)
        # The thread that writes may not have come to its turn yet.
        while not recorder.trouble:
            time.sleep(0.01)
        assert recorder.deleted() is None
        recorder.put(window(51))
        assert recorder.settle() and recorder.snapshot().step == 51
        assert path.read_bytes() == b""
        hung.set()
        while recorder.trouble:
            time.sleep(0.01)
        assert recorder.flush(60) and recorder.trouble is None and recorder.dropped == 0
    assert written(path) == heard


def test_what_waits_for_a_file_system_is_limited_and_the_rest_is_counted(
    tmp_path: Path, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "MOST_WAITING_BYTES", 5000)
    path = tmp_path / "events.jsonl"
    with recording(path) as recorder:
        for step in range(1, 101):
            recorder.put(window(step))
        assert recorder.settle()
        dropped = recorder.dropped
        # The thread that writes has taken what waited once, at most.
        assert 70 < dropped < 100 and recorder.snapshot().dropped_events == dropped
        hung.set()
        while recorder.trouble:
            time.sleep(0.01)
        assert recorder.flush(60)
        recorder.put(window(101))
    assert len(written(path)) == 100 - dropped + 2
    assert len(notes(path)) == 1 and notes(path)[0].startswith(f"{dropped} ")


def test_closing_gives_up_on_a_file_system_that_hangs(tmp_path: Path, hung: threading.Event) -> None:
    recorder = Recorder(tmp_path / "events.jsonl")
    recorder.start()
    recorder.put(window(1))
    recorder.close(0.1)
    assert recorder.snapshot().step == 1
