"""Memory snapshots: recordings from real GPUs, histories made here, damaged and hostile files."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from snapshots import MIB, History, frame, written

from ndd_console.__main__ import status_of
from ndd_console.words.trace import memory_blocks
from ndd_engine.errors import UsageError
from ndd_engine.measure.memory import BACKWARD, NO_STACK, place
from ndd_engine.predict.allocator import Rules
from ndd_engine.recordings import recorded_files, traces
from ndd_engine.recordings.recorded_files import read_snapshot
from ndd_engine.recordings.snapshots import SETTINGS, DeviceMemory, examine, replay, start_of

pytestmark = pytest.mark.long


def only(path: Path, **more: Any) -> DeviceMemory:
    """What is found of the only GPU of a snapshot."""
    (device,) = examine(path, **more).devices
    return device


# Recording -> (segments from the driver, allocations, peak of reserved bytes).
REFERENCE = {
    "transformer-step-context100.pickle.gz": (65, 3853, 786_432_000),
    "transformer-step-context150.pickle.gz": (80, 3907, 1_063_256_064),
    "transformer-step-context200.pickle.gz": (83, 3907, 1_390_411_776),
    "transformer-step-context200-mixed.pickle.gz": (88, 4404, 1_205_862_400),
    "transformer-with-frames.pickle": (9, 36, 3_781_165_056),
}


@pytest.mark.parametrize("name", [name for name in REFERENCE if "frames" not in name])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_real_history_that_begins_warm_is_rebuilt(gpu_data: Path, name: str, share: float) -> None:
    file = read_snapshot(gpu_data / "snapshots" / name)
    (device,) = file.devices
    late = replace(device, entries=device.entries[int(share * len(device.entries)) :])
    start = start_of(late)
    assert start.warm and not start.mismatches
    found = replay(start, late.entries, Rules.of_snapshot(file.settings), as_it_was=True)
    assert (found.wrong, found.peak) == (0, REFERENCE[name][2])


@pytest.mark.parametrize("name", REFERENCE)
def test_a_real_recording_is_explained_with_an_error_of_zero(gpu_data: Path, name: str) -> None:
    (device,) = examine(gpu_data / "snapshots" / name).devices
    assert device.peak.reserved_bytes == REFERENCE[name][2]
    assert (device.peak_error, device.wrong_decisions, device.refused) == (0.0, 0, "")
    assert {one.setting for one in device.what_ifs} == set(SETTINGS) - {"expandable_segments:False"}
    assert sum(owner.requested_bytes for owner in device.peak.owners) == device.peak.requested_bytes
    assert device.peak.requested_bytes <= (device.peak.active_bytes or 0) <= device.peak.reserved_bytes


def test_the_owners_of_a_real_recording_are_lines_of_its_program(gpu_data: Path) -> None:
    (device,) = examine(gpu_data / "snapshots" / "transformer-with-frames.pickle").devices
    places = [owner.place.partition(":")[0] for owner in device.peak.owners]
    assert places[0] == BACKWARD and set(places[1:]) == {"cs336_systems/trace_peak_memory.py"}


def test_fragmentation_and_owners_at_the_peak(tmp_path: Path) -> None:
    history = History()
    weights = history.alloc(30 * MIB, [frame("/home/me/model.py", 12, "build")])
    gone = history.alloc(40 * MIB, [frame("/home/me/model.py", 30, "forward")])
    history.free(gone)
    history.alloc(50 * MIB - 100, [frame("/x/site-packages/torch/nn/functional.py", 5, "linear"),
                                   frame("/home/me/model.py", 31, "forward")])  # fmt: skip
    device = only(written(tmp_path, history))
    assert weights and device.peak.reserved_bytes == 120 * MIB
    assert device.peak.active_bytes == 80 * MIB
    assert device.peak.requested_bytes == 80 * MIB - 100
    assert {owner.place.split()[0]: owner.requested_bytes for owner in device.peak.owners} == {
        "me/model.py:31": 50 * MIB - 100, "me/model.py:12": 30 * MIB
    }  # fmt: skip
    assert not device.releases


def test_what_expandable_segments_would_have_saved(tmp_path: Path) -> None:
    history = History()
    keys = [history.alloc(30 * MIB) for _ in range(4)]
    for key in keys:
        history.free(key)
    history.alloc(110 * MIB)
    device = only(written(tmp_path, history))
    assert device.peak.reserved_bytes == 230 * MIB and device.peak_error == 0
    (saved,) = (one for one in device.what_ifs if one.setting == "expandable_segments:True")
    assert saved.reserved_bytes == 120 * MIB


def test_retries_are_told_from_emptied_caches(tmp_path: Path) -> None:
    history = History(cap=100 * MIB)
    history.free(history.alloc(60 * MIB))
    history.empty_cache()
    history.free(history.alloc(70 * MIB))
    history.alloc(90 * MIB)  # needs the memory of the 70 MiB
    device = only(written(tmp_path, history))
    assert [(one.kind, one.released_bytes) for one in device.releases] == [
        ("empty_cache", 60 * MIB), ("retry", 70 * MIB)
    ]  # fmt: skip
    assert device.retries == 1
    assert device.peak_error == 0 and device.wrong_decisions == 0


def test_an_out_of_memory_error_names_what_was_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History(cap=120 * MIB)
    for line in range(3):
        history.alloc(24 * MIB, [frame("train.py", line, "step")])
        history.alloc(8 * MIB, [frame("train.py", 50, "small")])
    history.alloc(60 * MIB)
    device = only(path := written(tmp_path, history))
    (failure,) = device.failures
    assert failure.asked_bytes == 60 * MIB and failure.free_bytes == 120 * MIB - device.end.reserved_bytes
    assert failure.moment.owners[0].place in {f"train.py:{line} step" for line in range(3)}
    assert failure.moment.requested_bytes == 96 * MIB
    assert status_of(["memory", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["failures"][0]["fragmented"] is False


def test_each_command_names_the_other_for_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="ndd-console memory"):
        traces.examine(written(tmp_path, body_of_one()))
    trace = tmp_path / "trace.json"
    trace.write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x", "ts": 0, "dur": 1}]}')
    assert status_of(["memory", str(trace)]) == 2
    assert "ndd-console trace" in capsys.readouterr().err


def test_private_pools_are_named_and_not_replayed(tmp_path: Path) -> None:
    history = History()
    history.alloc(30 * MIB)
    body = history.body()
    body["segments"][0]["segment_pool_id"] = (0, 1)
    device = only(written(tmp_path, body))
    assert device.private_bytes == 30 * MIB and "private pools" in device.refused
    assert not device.what_ifs and device.peak.reserved_bytes == 30 * MIB


def test_each_gpu_is_explained(tmp_path: Path) -> None:
    first, second = History(), History(device=1)
    first.alloc(30 * MIB)
    second.alloc(50 * MIB)
    body = first.body()
    body["segments"] += second.body()["segments"]
    body["device_traces"] = [*body["device_traces"], second.entries, []]
    devices = examine(written(tmp_path, body)).devices
    assert [(device.index, device.peak.reserved_bytes) for device in devices] == [
        (0, 30 * MIB),
        (1, 50 * MIB),
    ]


def test_without_a_history_the_final_state_is_explained(tmp_path: Path) -> None:
    history = History()
    history.alloc(30 * MIB, [frame("train.py", 3, "main")])
    body = history.body()
    body["device_traces"] = [[]]
    path = written(tmp_path, body)
    device = only(path)
    assert device.peak.owners[0].place == "train.py:3 main"
    assert "no history" in device.notes[0] and device.refused and not device.broken
    assert status_of(["memory", str(path)]) == 0


def test_a_history_with_a_gap_is_a_notice_and_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    history.free(history.alloc(30 * MIB))
    history.alloc(10 * MIB)
    body = history.body()
    # The recording was stopped before the last free.
    body["device_traces"][0] = [
        entry for entry in body["device_traces"][0] if not entry["action"].startswith("free")
    ]
    path = written(tmp_path, body)
    device = only(path)
    assert device.broken and device.peak.requested_bytes == 10 * MIB
    assert status_of(["memory", str(path)]) == 2
    assert "gaps" in capsys.readouterr().out


def test_the_garbage_collection_needs_a_limit(tmp_path: Path) -> None:
    history = History()
    for size in (30, 40, 50, 60, 70, 80):
        history.free(history.alloc(size * MIB))
    path = written(tmp_path, history)
    setting = "garbage_collection_threshold:0.5"
    (found,) = examine(path, [setting]).devices[0].what_ifs
    assert found.collections and (found.reserved_bytes or 0) < 330 * MIB
    (found,) = examine(path, [setting], limit_bytes=10_000 * MIB).devices[0].what_ifs
    assert (found.collections, found.reserved_bytes) == (0, 330 * MIB)
    (found,) = examine(path, [setting], limit_bytes=60 * MIB).devices[0].what_ifs
    assert (found.reserved_bytes, found.verdict) == (None, "out of memory")


def full(left: bool) -> History:
    """A GPU of 110 MiB where three times memory of another stream had to go. left: a request fails at the end."""
    history = History(cap=110 * MIB)
    history.alloc(4 * MIB, [frame("serve.py", 1, "load")])
    for stream, size in ((3, 40), (0, 60), (3, 80)):
        history.free(history.alloc(size * MIB, stream=stream))
    history.alloc(80 * MIB, [frame("serve.py", 9, "answer")])
    if left:
        history.alloc(30 * MIB)
    return history


def test_a_gpu_that_was_full_keeps_its_limit_in_every_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, full(left=False))
    device = only(path)
    assert device.retries == 3
    # 4 of a segment of 20, and 80: it had at least 100. The first retry proves that 20 + 40 + 60 was too much.
    assert (device.limit.known, device.limit.low, device.limit.high) == ("retries", 100 * MIB, 120 * MIB - 1)
    for trial in device.what_ifs:
        assert (trial.reserved_bytes, trial.verdict) == (100 * MIB, "with retries"), trial
    device = only(path, limit_bytes=110 * MIB)
    assert {trial.retries for trial in device.what_ifs if "garbage" not in trial.setting} == {3}
    assert all((trial.reserved_bytes or 0) <= 100 * MIB for trial in device.what_ifs)
    assert status_of(["memory", str(path)]) == 0
    assert "with retries: 3" in capsys.readouterr().out
    assert "exceeds" not in capsys.readouterr().out
    device = only(path, limit_bytes=95 * MIB)
    assert {trial.verdict for trial in device.what_ifs} == {"out of memory"}
    assert status_of(["memory", str(path), "--limit", "95"]) == 0
    out = capsys.readouterr().out
    assert "exceeds this limit: it reserved 100" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("max_split_size_mb")]
    assert rows and all(row[1:] == ["n/a", "n/a", "out", "of", "memory"] for row in rows)


def test_a_failed_request_tells_the_limit_exactly(tmp_path: Path) -> None:
    device = only(written(tmp_path, full(left=True)))
    assert (device.limit.known, device.limit.low, device.limit.high) == (
        "out of memory",
        110 * MIB,
        110 * MIB,
    )
    body = full(left=True).body()
    # More is left than was asked for: the process had a limit of its own, below what the request needed.
    body["device_traces"][0][-1]["device_free"] = 40_000 * MIB
    device = only(written(tmp_path, body))
    assert (device.limit.known, device.limit.high) == ("retries", 120 * MIB - 1)


def outcomes(device: DeviceMemory) -> dict[str, str]:
    """The outcome by setting, without the value of the setting."""
    return {trial.setting.partition(":")[0]: trial.verdict for trial in device.what_ifs}


def test_a_request_that_failed_fails_with_every_setting_that_has_no_room_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History(cap=2048 * MIB)
    for line in range(15):
        history.alloc(100 * MIB, [frame("train.py", line, "build")])
    history.alloc(3000 * MIB)
    path = written(tmp_path, history)
    device = only(path)
    assert set(outcomes(device).values()) == {"out of memory"} and len(outcomes(device)) == 3
    assert status_of(["memory", str(path)]) == 0
    table = capsys.readouterr().out.split("Replayed with other settings")[1]
    assert "fits" not in table and table.count("out of memory") == len(device.what_ifs)
    # With enough memory it would have been in use at the peak.
    device = only(path, limit_bytes=5000 * MIB)
    assert {(trial.verdict, trial.reserved_bytes) for trial in device.what_ifs} == {("fits", 4500 * MIB)}


def test_a_request_that_failed_in_pieces_fits_where_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History(cap=300 * MIB)
    gone = []
    for _ in range(5):  # each in one segment of 60: the halves that are freed are no whole segments
        first = history.alloc(60 * MIB)
        history.free(first)
        gone.append(history.alloc(30 * MIB))
        history.alloc(30 * MIB)
    for address in gone:
        history.free(address)
    for _ in range(3):  # the program tries it again
        history.alloc(100 * MIB)
    path = written(tmp_path, history)
    device = only(path)
    assert all(failure.fragmented for failure in device.failures) and len(device.failures) == 3
    assert outcomes(device)["expandable_segments"] in ("fits", "with retries")
    assert outcomes(device)["garbage_collection_threshold"] == "out of memory"
    assert status_of(["memory", str(path)]) == 0
    assert "it is freed at once" in capsys.readouterr().out


def test_a_request_that_failed_beside_another_process_has_no_more_than_was_left(tmp_path: Path) -> None:
    history = History(cap=1000 * MIB)
    history.free(history.alloc(900 * MIB))
    history.empty_cache()
    history.cap(300 * MIB)  # the other process takes the rest
    history.alloc(100 * MIB)
    history.alloc(400 * MIB)
    path = written(tmp_path, history)
    device = only(path)
    assert device.failures[0].free_bytes == 200 * MIB and device.limit.low == 900 * MIB
    assert set(outcomes(device).values()) == {"out of memory"}
    assert set(outcomes(only(path, limit_bytes=900 * MIB)).values()) == {"fits"}


def test_a_gpu_that_was_never_full_has_no_limit(tmp_path: Path) -> None:
    history = History()
    for _ in range(4):
        history.free(history.alloc(30 * MIB, stream=1))
        history.alloc(30 * MIB)
    device = only(written(tmp_path, history))
    assert device.limit.known == "" and device.limit.caps == (None,)
    assert {trial.verdict for trial in device.what_ifs} == {"fits"}


def test_most_reserved_and_most_in_use_are_two_moments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    history.free(history.alloc(400 * MIB))
    history.alloc(40 * MIB, [frame("a.py", 1, "kept")])
    history.free(history.alloc(300 * MIB))
    history.empty_cache()
    history.alloc(200 * MIB, [frame("b.py", 2, "used")])
    history.alloc(170 * MIB, [frame("c.py", 3, "used")])
    history.alloc(100 * MIB, [frame("d.py", 4, "used")])
    path = written(tmp_path, history)
    device = only(path)
    assert device.peak.reserved_bytes == device.most_in_use.reserved_bytes  # the cache was reused
    assert status_of(["memory", str(path)]) == 0
    assert capsys.readouterr().out.count("Filled by") == 1


def test_a_history_without_an_allocation_is_only_a_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    gone = history.alloc(30 * MIB)
    history.alloc(50 * MIB, [frame("serve.py", 3, "cache")])
    history.free(gone)
    body = history.body() | {"device_traces": [history.body()["device_traces"][0][-1:]]}
    path = written(tmp_path, body)
    device = only(path)
    assert not device.what_ifs and device.refused
    assert (device.peak.reserved_bytes, device.peak.requested_bytes) == (80 * MIB, 50 * MIB)
    assert status_of(["memory", str(path)]) == 0
    out = capsys.readouterr().out
    assert "final state" in out and "peak" not in out and "%" not in out.split("not replayed")[1]


def test_the_settings_of_the_recording_are_used(tmp_path: Path) -> None:
    history = History(Rules(expandable=True))
    for _ in range(3):
        history.alloc(30 * MIB)
    body = history.body()
    body["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    use = examine(written(tmp_path, body))
    assert use.settings == "expandable_segments:True"
    (device,) = use.devices
    assert (device.peak.reserved_bytes, device.wrong_decisions, device.peak_error) == (100 * MIB, 0, 0)
    assert device.what_ifs[0].setting == "expandable_segments:False"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("max_split_size_mb:abc", "max_split_size_mb is a whole number, at least 20"),
        ("max_split_size_mb:-1", "max_split_size_mb is a whole number, at least 20"),
        ("max_split_size_mb:19", "max_split_size_mb is a whole number, at least 20"),
        ("max_split_size_mb", "max_split_size_mb is a whole number, at least 20"),
        ("garbage_collection_threshold:7", "garbage_collection_threshold is between 0 and 1"),
        ("expandable_segments:yes", "expandable_segments is True or False"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions is a power of two"),
        ("expandable_segments:True,foo:1", "foo is not a setting of torch's allocator; expected NAME:VALUE"),
        ("", "the name is missing; expected NAME:VALUE with one of expandable_segments, max_split_size_mb"),
        ("pinned_reserve_segment_size_mb:3", "is a setting of torch, but it is not modelled"),
        ("roundup_power2_divisions:[256:1,512:2]", "for different sizes are not modelled"),
        ("expandable_segments:False", "the recording was made with this setting"),
    ],
)
def test_a_setting_that_cannot_be_tried_is_an_error_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, words: str
) -> None:
    path = written(tmp_path, body_of_one())
    assert status_of(["memory", str(path), "--setting", setting]) == 2
    out, err = capsys.readouterr()
    assert not out and f"--setting '{setting}': " in err and words in " ".join(err.split())


@pytest.mark.parametrize(
    "setting",
    [
        "max_split_size_mb:20", "garbage_collection_threshold:.5", "roundup_power2_divisions:4",
        "large_segment_size_mb:11", "max_non_split_rounding_mb:30",
        "expandable_segments:True, max_split_size_mb:64",
    ],
)  # fmt: skip
def test_a_setting_of_torch_is_tried(tmp_path: Path, setting: str) -> None:
    (trial,) = only(written(tmp_path, body_of_one()), settings=[setting]).what_ifs
    assert trial.setting == setting


@pytest.mark.parametrize(
    ("frames", "found"),
    [
        ([], NO_STACK),
        (None, NO_STACK),
        ([{}, 3, {"filename": 7}], "no Python frame"),
        ([frame("??", 0, "torch::autograd::Engine::thread_main"), frame("<frozen runpy>", 1, "f")], BACKWARD),
        ([frame("/usr/lib/python3.12/threading.py", 9, "run"), frame("C:\\me\\train.py", 4, "main")],
         "me/train.py:4 main"),
        ([frame("/opt/pytorch/torch/nn/modules/linear.py", 1, "forward"),
          frame("/tmp/ipykernel_12/345.py", 2, "<module>")], "ipykernel_12/345.py:2 <module>"),
        ([frame("/x/site-packages/torch/optim/adamw.py", 8, "step"),
          frame("/x/site-packages/ndd_engine/train/step/stepper.py", 9, "update")], "step/stepper.py:9 update"),
        ([frame("/src/engine/ndd_engine/train/loop.py", 1, "f"),
          frame("/src/engine/ndd_engine/workloads/ndd_model.py", 2, "forward")],
         "workloads/ndd_model.py:2 forward"),
        ([frame("/x/site-packages/torch/optim/adamw.py", 8, "step")], "optim/adamw.py:8 step"),
        ([frame("evil\x1b[2J.py", 1, "\x1b]0;gone\x07")], "evil\\x1b[2J.py:1 \\x1b]0;gone\\x07"),
    ],
)  # fmt: skip
def test_the_owner_is_the_innermost_line_of_the_users_code(frames: object, found: str) -> None:
    assert place(frames) == found


def test_other_settings_of_a_warm_history_come_with_their_error(gpu_data: Path, tmp_path: Path) -> None:
    packed = (gpu_data / "snapshots" / "transformer-step-context200.pickle.gz").read_bytes()
    body = pickle.loads(gzip.decompress(packed))
    body["device_traces"][0] = body["device_traces"][0][3000:]
    device = only(written(tmp_path, body))
    assert device.start_bytes == 1_308_622_848 and device.wrong_decisions == 0
    assert device.peak.reserved_bytes == 1_390_411_776 and device.peak.active_bytes is not None
    # The arrangement before the history is unknown for other settings, so the same replay is off by some per cent.
    assert device.peak_error is not None and 0 < abs(device.peak_error) < 0.05
    assert "1.2 GiB" in device.notes[0]
    # What is off without any change is no effect of another setting.
    table = next(
        one
        for one in memory_blocks(examine(written(tmp_path, body)))
        if "setting" in getattr(one, "columns", ())
    )
    assert [row[2] for row in table.rows if row[0].startswith("max_split_size_mb:512")] == ["same"]
    assert "relative" in table.note


# Damaged and hostile files.


def body_of_one() -> dict[str, Any]:
    history = History()
    history.alloc(30 * MIB, [frame("train.py", 1, "main")])
    return history.body()


class Runs:
    """Unpickling it runs a command."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


def with_segment(**changes: Any) -> dict[str, Any]:
    found = body_of_one()
    found["segments"][0].update(changes)
    return found


def damaged() -> dict[str, bytes]:
    """Content of a file, by what is wrong with it."""
    whole = pickle.dumps(body_of_one())
    cases: dict[str, Any] = {
        "a list": [1, 2],
        "a number": 5,
        "no segments": {"device_traces": []},
        "segments of a list": {"segments": {"device": 0}},
        "no memory at all": {"segments": [], "device_traces": [[]]},
        "a segment that is a number": {"segments": [7], "device_traces": [[]]},
        "a history that is a number": {**body_of_one(), "device_traces": [3]},
        "traces that are a number": {**body_of_one(), "device_traces": 3},
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
        # A dict with a key of a million nested tuples, whose hash overflows the C stack.
        "a key that crashes": b"\x80\x04}" + b")" + b"\x85" * 1_000_000 + b"K\x01s.",
        "an endless string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
        **{name: pickle.dumps(content) for name, content in cases.items()},
    }


@pytest.mark.parametrize("name", damaged())
def test_a_damaged_file_is_one_error(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(damaged()[name])
    assert status_of(["memory", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1
    assert "snapshot.pickle" in err and "Traceback" not in err


@pytest.mark.promise
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_in_a_file_is_executed(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "executed"
    hostile = {**body_of_one(), "allocator_settings": Runs(f"touch {mark}")}
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


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_protocol_and_gzip_are_read(tmp_path: Path, protocol: int) -> None:
    plain, packed = tmp_path / "a.pickle", tmp_path / "b.pickle.gz"
    plain.write_bytes(pickle.dumps(body_of_one(), protocol))
    packed.write_bytes(gzip.compress(pickle.dumps(body_of_one(), protocol)))
    assert read_snapshot(plain).devices == read_snapshot(packed).devices


def test_damaged_entries_are_skipped_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = body_of_one()
    found["device_traces"][0] += [
        5, {}, {"action": "alloc", "addr": -1, "size": 2}, {"action": ["alloc"], "addr": 1},
        {"action": "oom", "size": 5}, {"action": "alloc", "addr": True, "size": 4},
        {"action": "something new", "addr": 1, "size": 2},
    ]  # fmt: skip
    path = written(tmp_path, found)
    device = only(path)
    assert device.peak.reserved_bytes == 30 * MIB
    assert "6 entries" in device.refused
    assert status_of(["memory", str(path)]) == 0
    assert "6 damaged" in capsys.readouterr().out


def test_strange_stacks_are_no_problem(tmp_path: Path) -> None:
    laughs: list[Any] = ["x"]
    for _ in range(60):
        laughs = [laughs, laughs]
    for frames in (laughs, {"a": 1}, 7, None, [[[]]], [{"filename": laughs, "line": laughs, "name": None}]):
        found = body_of_one()
        found["segments"][0]["blocks"][0]["frames"] = frames
        found["device_traces"][0][-1]["frames"] = frames
        found["allocator_settings"] = dict.fromkeys(
            ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size", "expandable_segments"), frames
        ) | {"roundup_power2_divisions": {1: frames}}
        examine(written(tmp_path, found))


def test_old_snapshots_are_read(tmp_path: Path) -> None:
    """torch 2.0: no address and no requested size of a block, its stack in a history, no pool, no settings."""
    found = body_of_one()
    segment = found["segments"][0]
    del segment["segment_pool_id"], segment["is_expandable"]
    for block in segment["blocks"]:
        block["history"] = [{"addr": block.pop("address"), "frames": block.pop("frames"), "real_size": 3}]
        del block["requested_size"]
    del found["device_traces"]
    device = only(written(tmp_path, found))
    assert device.peak.owners[0].place == "train.py:1 main"
    assert device.peak.requested_bytes == 30 * MIB
