"""Reading events.jsonl: only regular files, and damaged lines are skipped and counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from record_help import mark, window

from ndd_engine.errors import UsageError
from ndd_engine.record import file as record_file
from ndd_engine.record.events import Event
from ndd_engine.record.file import EventLog, RunReader, damage_text, open_log
from ndd_engine.record.rundir import RunDir, find_run


def line(event: Event) -> bytes:
    return event.to_json(1.0).encode() + b"\n"


def test_damaged_lines_are_counted_once_and_unknown_types_are_not_damage(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        line(window(1))
        + b'{"v":2,"type":"future","t":1.0}\n'
        + b"not JSON\n"
        + line(window(2)).replace(b'"items":16', b'"items":"16"')
        + b"[" * 100_000
        + b"\n"
        + line(window(3)).replace(b'"t":1.0', b'"t":1' + b"0" * 400)
        + line(window(4))[:-5]
    )
    found = EventLog(path)
    assert [event for _, event in found.new()] == [window(1)]
    assert found.damaged == 4
    with path.open("ab") as file:
        file.write(line(window(4))[-5:] + line(window(5)))
    assert [event for _, event in found.new()] == [window(4), window(5)]
    assert found.damaged == 4


def test_a_line_that_is_too_long_is_skipped_without_being_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "MAX_LINE", 5000)
    path = tmp_path / "events.jsonl"
    long = line(mark("note", 1, "x" * 20_000))
    path.write_bytes(line(window(1)) + long[:12_000])
    found = EventLog(path)
    assert [event for _, event in found.new()] == [window(1)]
    with path.open("ab") as file:
        file.write(long[12_000:])
    assert (list(found.new()), found.damaged) == ([], 1)
    with path.open("ab") as file:
        file.write(line(window(2)) + long + line(window(3)))
    assert [event for _, event in found.new()] == [window(2), window(3)]
    assert found.damaged == 2
    assert found.offset == path.stat().st_size


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


@pytest.mark.parametrize(("version", "reader"), [(1, "0.5.0"), (3, "wrote it")])
def test_a_record_of_another_version_is_refused_in_one_line(
    tmp_path: Path, version: int, reader: str
) -> None:
    run = RunDir(tmp_path / "old")
    run.path.mkdir()
    run.events.write_bytes(line(window(1)).replace(b'{"v":2,', b'{"v":%d,' % version) * 3)
    with pytest.raises(UsageError) as caught:
        find_run(tmp_path, "old")
    assert reader in str(caught.value) and str(run.events) in str(caught.value)
    assert "\n" not in str(caught.value)
    # Where runs are listed, it stands in the way of no other, and says why it is not read.
    follower = RunReader(run)
    follower.poll()
    assert reader in follower.trouble
    assert (follower.snapshot().run, follower.damaged) == (None, 0)


def test_damage_in_words() -> None:
    assert damage_text(0) == ""
    assert damage_text(1).startswith("1 line ") and damage_text(3000).startswith("3,000 lines ")
