"""Reading events.jsonl: damaged lines, torn ends, logs that grow or are very long, processes that vanish."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from record_help import end, folded, held, mark, run_event, status, window
from tests.records import snapshot_of
from tests.waiting import LIMIT_S

from ndd_engine.errors import UsageError
from ndd_engine.record import file as record_file
from ndd_engine.record.events import Event
from ndd_engine.record.file import EventLog, RunReader, load_state, open_log, truncate_torn_line
from ndd_engine.record.rundir import RunDir, RunLock, find_run
from ndd_engine.record.state import RunState


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "r-001")
    directory.path.mkdir()
    return directory


@pytest.fixture
def owned(run: RunDir) -> Iterator[RunLock]:
    """The lock of the run, held by this process."""
    lock = RunLock(run)
    lock.acquire()
    yield lock
    lock.release()


def append(run: RunDir, *items: Event | RunState) -> None:
    with run.events.open("a") as file:
        for item in items:
            file.write((item.to_line(1.0) if isinstance(item, RunState) else item.to_json(1.0)) + "\n")


def test_a_log_is_followed_as_it_grows(run: RunDir, owned: RunLock) -> None:
    reader = RunReader(run)
    assert not reader.poll() and reader.snapshot().status == "preparing"  # no log yet
    append(run, run_event(), window(1, loss=4.0))
    assert reader.poll()
    assert (reader.snapshot().step, reader.snapshot().status) == (1, "training")
    before = reader.snapshot()
    assert not reader.poll()
    assert reader.snapshot() is before
    append(run, window(2, loss=3.0), window(3, loss=2.0))
    assert reader.poll()
    assert (reader.snapshot().step, reader.snapshot().loss) == (3, 2.0)
    append(run, end("done", 3))
    owned.release()
    assert reader.poll()
    assert reader.snapshot().status == "done"
    # A run that ended stays as it ended, whether its process is there or not.
    assert not reader.poll()


def test_a_line_in_the_middle_of_being_written_is_read_when_it_is_whole(run: RunDir, owned: RunLock) -> None:
    append(run, run_event(), window(1))
    line = (window(2).to_json(1.0) + "\n").encode()
    reader = RunReader(run)
    reader.poll()
    for byte in range(len(line)):
        with run.events.open("ab") as file:
            file.write(line[byte : byte + 1])
        if byte % 40 == 0 or byte >= len(line) - 2:
            assert reader.poll() == (byte == len(line) - 1)
    assert reader.snapshot().step == 2


def test_a_damaged_fold_event_is_passed_over_for_an_earlier_one(run: RunDir) -> None:
    first, second = [run_event(), window(1)], [window(2), window(3)]
    append(run, *first, folded(*first), *second)
    good = snapshot_of(run)
    line = folded(*first, *second).to_line(1.0)
    for old, new in (('"step":3', '"step":"3"'), ('"stride":1', '"stride":[]'), ('"tokens"', '"took"')):
        assert old in line
        with run.events.open("a") as file:
            file.write(line.replace(old, new) + "\n")
        assert snapshot_of(run) == good


def test_a_log_that_cannot_be_read_is_reported(run: RunDir) -> None:
    os.mkfifo(run.events)
    reader = RunReader(run)
    reader.poll()
    assert reader.trouble
    run.events.unlink()
    append(run, run_event(), window(1))
    reader.poll()
    assert (reader.trouble, reader.snapshot().step) == ("", 1)


@pytest.mark.long
def test_a_process_that_was_killed_leaves_a_lost_run(run: RunDir) -> None:
    with held(run.lock) as owner:
        append(run, run_event(), window(1), status("paused"))
        reader = RunReader(run)
        reader.poll()
        assert reader.snapshot().status == "paused"
        assert (run.live_owner() or {})["pid"] == owner.pid
        owner.kill()
        owner.wait(LIMIT_S)
        assert run.live_owner() is None
        assert reader.poll()
        snapshot = reader.snapshot()
        assert (snapshot.status, snapshot.final, snapshot.step) == ("lost", True, 1)
    # The kernel freed the lock: the run can be taken again, and then it is alive again.
    lock = RunLock(run)
    lock.acquire()
    append(run, run_event(resumed_step=1), window(2))
    assert reader.poll()
    assert (reader.snapshot().status, reader.snapshot().step) == ("training", 2)
    lock.release()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"torn", b""),
        (b"one\n", b"one\n"),
        (b"one\ntwo", b"one\n"),
        (b"one\n" + b"x" * 700_000, b"one\n"),
        (b"y" * 700_000 + b"\n" + b"x", b"y" * 700_000 + b"\n"),
    ],
)
def test_a_torn_last_line_is_cut(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(before)
    truncate_torn_line(path)
    assert path.read_bytes() == after


def long_log(run: RunDir, megabytes: int) -> int:
    """Windows, and a fold event every 512 KiB as the recorder writes them; returns the last step."""
    state = RunState()
    state.fold(1.0, run_event(total_steps=10**9))
    step = 0
    with run.events.open("wb") as file:
        file.write((run_event(total_steps=10**9).to_json(1.0) + "\n").encode())
        for _ in range(megabytes * 2):
            # The lines of a block are the same but for its first: only that one has to be folded.
            step += 1
            event = window(step, 1, loss=float(step))
            state.fold(1.0, event)
            file.write((event.to_json(1.0) + "\n").encode())
            line = (mark("note", step, "padding " * 100).to_json(1.0) + "\n").encode()
            file.write(line * (512 * 1024 // len(line)))
            for _ in range(60):
                state.fold(1.0, mark("note", step, "padding " * 100))
            file.write((state.to_line(1.0) + "\n").encode())
        step += 1
        file.write((window(step, loss=1.0).to_json(1.0) + "\n").encode())
    return step


def read_bytes() -> int:
    """Bytes that this process has read so far, by Linux."""
    if not Path("/proc/self/io").exists():
        pytest.skip("this system does not count the bytes that a process reads")
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_a_log_of_50_megabytes_opens_by_its_end(run: RunDir) -> None:
    step = long_log(run, 50)
    size = run.events.stat().st_size
    assert size > 50_000_000
    before = read_bytes()
    reader = RunReader(run)
    reader.poll()
    assert read_bytes() - before < 3_000_000
    snapshot = reader.snapshot()
    assert (snapshot.step, snapshot.loss, snapshot.items) == (step, 1.0, step * 16)
    assert snapshot.run is not None
    assert snapshot.loss_trend[-1] == (step, 1.0)
    assert load_state(run).snapshot().step == step
    os.truncate(run.events, 0)  # 50 MiB need not stay until the folder is cleaned


@pytest.mark.parametrize("state", [{}, {"step": 5}, {"status": 3, "recent": "x"}, []])
def test_a_fold_event_of_another_version_makes_it_read_everything(run: RunDir, state: object) -> None:
    append(run, run_event(), window(1, loss=2.0), window(2, loss=1.0))
    with run.events.open("a") as file:
        file.write(
            json.dumps({"v": 2, "type": "fold", "t": 1.0, "state": state}, separators=(",", ":")) + "\n"
        )
    append(run, window(3, loss=0.5))
    snapshot = snapshot_of(run)
    assert (snapshot.step, snapshot.loss, snapshot.elapsed_s) == (3, 0.5, pytest.approx(0.3))
    assert snapshot.loss_trend == ((1, 2.0), (2, 1.0), (3, 0.5))


def test_words_that_look_like_a_fold_event_are_words(run: RunDir) -> None:
    append(run, run_event(), mark("note", 1, '"type":"fold"', type="fold"), window(1))
    snapshot = snapshot_of(run)
    assert snapshot.step == 1
    assert snapshot.marks[0].mark.text == '"type":"fold"'


def test_a_run_that_begins_anew_in_its_folder_is_read_from_the_new_beginning(run: RunDir) -> None:
    append(run, run_event(), *(window(step) for step in range(1, 20)))
    reader = RunReader(run)
    reader.poll()
    (run.path / "attempt-1").mkdir()
    run.events.rename(run.path / "attempt-1" / "events.jsonl")
    assert not reader._fold_new()
    append(run, run_event(), window(3))
    reader.poll()
    assert reader.snapshot().step == 3
    assert reader.damaged == 0


def test_what_other_ranks_say_of_a_hang_is_shown_once_and_a_damaged_file_of_it_is_ignored(
    run: RunDir, owned: RunLock
) -> None:
    append(run, run_event(), window(1))
    heard: list[Event] = []
    reader = RunReader(run, lambda _t, event: heard.append(event))
    reader.poll()
    for text in ("", "[]", "{", '{"t": "x", "step": 1, "text": ""}', '{"step": 1}', "\0" * 99):
        run.hang.write_text(text)
        assert not reader.poll()
    run.hang.write_text('{"t": 5.0, "step": 1, "text": "rank 0 hangs"}\n')
    assert reader.poll()
    assert not reader.poll()
    (shown,) = [timed.mark for timed in reader.snapshot().marks if timed.mark.kind == "warning"]
    assert (shown.text, heard[-1]) == ("rank 0 hangs", shown)


# Lines.


def line_of(event: Event) -> bytes:
    return event.to_json(1.0).encode() + b"\n"


def test_damaged_lines_are_counted_once_and_unknown_types_are_not_damage(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        line_of(window(1))
        + b'{"v":2,"type":"future","t":1.0}\n'
        + b"not JSON\n"
        + line_of(window(2)).replace(b'"items":16', b'"items":"16"')
        + b"[" * 100_000
        + b"\n"
        + line_of(window(3)).replace(b'"t":1.0', b'"t":1' + b"0" * 400)
        + line_of(window(4))[:-5]
    )
    log = EventLog(path)
    assert [event for _, event in log.new()] == [window(1)]
    assert log.damaged == 4
    with path.open("ab") as file:
        file.write(line_of(window(4))[-5:] + line_of(window(5)))
    assert [event for _, event in log.new()] == [window(4), window(5)]
    assert log.damaged == 4


def test_a_line_that_is_too_long_is_skipped_without_being_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "MAX_LINE", 5000)
    path = tmp_path / "events.jsonl"
    long = line_of(mark("note", 1, "x" * 20_000))
    path.write_bytes(line_of(window(1)) + long[:12_000])
    log = EventLog(path)
    assert [event for _, event in log.new()] == [window(1)]
    with path.open("ab") as file:
        file.write(long[12_000:])
    assert (list(log.new()), log.damaged) == ([], 1)
    with path.open("ab") as file:
        file.write(line_of(window(2)) + long + line_of(window(3)))
    assert [event for _, event in log.new()] == [window(2), window(3)]
    assert log.damaged == 2
    assert log.offset == path.stat().st_size


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "device"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "events.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError):
        open_log(path)
    with pytest.raises(OSError):
        list(EventLog(path).new())


@pytest.mark.parametrize(("version", "reader"), [(1, "0.5.0"), (3, "wrote it"), (99999, "wrote it")])
def test_a_record_of_another_version_is_refused_in_one_line(
    tmp_path: Path, version: int, reader: str
) -> None:
    run = RunDir(tmp_path / "old")
    run.path.mkdir()
    run.events.write_bytes(line_of(window(1)).replace(b'{"v":2,', b'{"v":%d,' % version) * 3)
    with pytest.raises(UsageError) as caught:
        find_run(tmp_path, "old")
    assert reader in str(caught.value) and str(run.events) in str(caught.value)
    assert "\n" not in str(caught.value)
    # Where runs are listed, it stands in the way of no other, and says why it is not read.
    follower = RunReader(run)
    follower.poll()
    assert reader in follower.trouble
    assert (follower.snapshot().run, follower.damaged) == (None, 0)
