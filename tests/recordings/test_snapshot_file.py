"""Damaged and hostile snapshot files: one error each, exit status 2, and nothing is executed."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from snapshots import MIB, History, frame, written

from ndd_console.__main__ import status_of
from ndd_engine.errors import UsageError
from ndd_engine.recordings import recorded_files
from ndd_engine.recordings.recorded_files import read_snapshot
from ndd_engine.recordings.snapshots import examine


def body() -> dict[str, Any]:
    history = History()
    history.alloc(30 * MIB, [frame("train.py", 1, "main")])
    return history.body()


class Runs:
    """Unpickling it runs a command."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


def nested_key() -> bytes:
    """A dict with a key of a million nested tuples, whose hash overflows the C stack."""
    return b"\x80\x04}" + b")" + b"\x85" * 1_000_000 + b"K\x01s."


def with_segment(**changes: Any) -> dict[str, Any]:
    found = body()
    found["segments"][0].update(changes)
    return found


def damaged() -> dict[str, bytes]:
    """Content of a file, by what is wrong with it."""
    whole = pickle.dumps(body())
    cases: dict[str, Any] = {
        "a list": [1, 2],
        "a number": 5,
        "no segments": {"device_traces": []},
        "segments of a list": {"segments": {"device": 0}},
        "no memory at all": {"segments": [], "device_traces": [[]]},
        "a segment that is a number": {"segments": [7], "device_traces": [[]]},
        "a history that is a number": {**body(), "device_traces": [3]},
        "traces that are a number": {**body(), "device_traces": 3},
        "a negative size": with_segment(total_size=-5),
        "a size that is a text": with_segment(total_size="large"),
        "a size beyond every GPU": with_segment(total_size=1 << 70),
        "blocks that do not fill it": with_segment(total_size=31 * MIB),
        "a pool that is a number": with_segment(segment_pool_id=3),
        "a device that is a text": with_segment(device="cuda:0"),
    }
    return {
        "empty": b"",
        "text": b"this is no pickle",
        "JSON": b'{"segments": []}',
        "half of a pickle": whole[: len(whole) // 2],
        "half of a gzip file": gzip.compress(whole)[:60],
        "nothing in a gzip file": gzip.compress(b""),
        "a global": pickle.dumps({"segments": [], "x": os.system}),
        "a global of protocol 0": b"cos\nsystem\n(S'true'\ntR.",
        "an instance of protocol 0": b"(S'true'\nios\nsystem\n.",
        "an extension": b"\x80\x04\x82\x01.",
        "a persistent id": b"\x80\x04K\x01Q.",
        "a build on a dict": b"\x80\x04}}b.",
        "a huge memo index": b"\x80\x04Nr" + struct.pack("<I", 0xFFFFFFF0) + b".",
        "a key that crashes": nested_key(),
        "an endless string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
        **{name: pickle.dumps(content) for name, content in cases.items()},
    }


@pytest.mark.long
@pytest.mark.parametrize("name", damaged())
def test_a_damaged_file_is_one_error(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(damaged()[name])
    assert status_of(["memory", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1
    assert "snapshot.pickle" in err and "Traceback" not in err


@pytest.mark.long
@pytest.mark.promise
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_in_a_file_is_executed(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "executed"
    hostile = {**body(), "allocator_settings": Runs(f"touch {mark}")}
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(hostile, protocol))
    with pytest.raises(UsageError, match="system"):
        read_snapshot(path)
    assert not mark.exists()
    pickle.loads(path.read_bytes())  # it would have been
    assert mark.exists()


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "none", "does not exist")):
        with pytest.raises(UsageError, match=words):
            read_snapshot(path)


def test_the_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_files, "MAX_BYTES", 1000)
    path = tmp_path / "snapshot.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps({"segments": ["x" * 5000]})))
    with pytest.raises(UsageError, match="1,000 B"):
        read_snapshot(path)


@pytest.mark.long
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_protocol_and_gzip_are_read(tmp_path: Path, protocol: int) -> None:
    plain, packed = tmp_path / "a.pickle", tmp_path / "b.pickle.gz"
    plain.write_bytes(pickle.dumps(body(), protocol))
    packed.write_bytes(gzip.compress(pickle.dumps(body(), protocol)))
    assert read_snapshot(plain).devices == read_snapshot(packed).devices


@pytest.mark.long
def test_damaged_entries_are_skipped_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = body()
    found["device_traces"][0] += [
        5, {}, {"action": "alloc", "addr": -1, "size": 2}, {"action": ["alloc"], "addr": 1},
        {"action": "oom", "size": 5}, {"action": "alloc", "addr": True, "size": 4},
        {"action": "something new", "addr": 1, "size": 2},
    ]  # fmt: skip
    path = written(tmp_path, found)
    (device,) = examine(path).devices
    assert device.peak.reserved_bytes == 30 * MIB
    assert "6 entries" in device.refused
    assert status_of(["memory", str(path)]) == 0
    assert "6 damaged" in capsys.readouterr().out


@pytest.mark.long
def test_strange_stacks_are_no_problem(tmp_path: Path) -> None:
    laughs: list[Any] = ["x"]
    for _ in range(60):
        laughs = [laughs, laughs]
    for frames in (laughs, {"a": 1}, 7, None, [[[]]], [{"filename": laughs, "line": laughs, "name": None}]):
        found = body()
        found["segments"][0]["blocks"][0]["frames"] = frames
        found["device_traces"][0][-1]["frames"] = frames
        found["allocator_settings"] = dict.fromkeys(
            ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size", "expandable_segments"), frames
        ) | {"roundup_power2_divisions": {1: frames}}
        examine(written(tmp_path, found))


@pytest.mark.long
def test_old_snapshots_are_read(tmp_path: Path) -> None:
    """torch 2.0: no address and no requested size of a block, its stack in a history, no pool, no settings."""
    found = body()
    segment = found["segments"][0]
    del segment["segment_pool_id"], segment["is_expandable"]
    for block in segment["blocks"]:
        block["history"] = [{"addr": block.pop("address"), "frames": block.pop("frames"), "real_size": 3}]
        del block["requested_size"]
    del found["device_traces"]
    (device,) = examine(written(tmp_path, found)).devices
    assert device.peak.owners[0].place == "train.py:1 main"
    assert device.peak.requested_bytes == 30 * MIB


@pytest.mark.long
def test_a_control_character_does_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    history.alloc(MIB, [frame("\x1b]0;gone\x07.py", 1, "\x1b[2J")])
    assert status_of(["memory", str(written(tmp_path, history))]) == 0
    assert "\x1b" not in capsys.readouterr().out
