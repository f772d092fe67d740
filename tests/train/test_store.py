"""Checkpoints on disk: complete or absent, verified when read; the last good one is never lost."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.states import Bomb, equal

from ndd_engine.errors import CheckpointError
from ndd_engine.run.control import StopNow
from ndd_engine.train import checkpoint
from ndd_engine.train.checkpoint import CheckpointStore, Saved, free_space, newest_good
from ndd_engine.train.random_state import random_state

CPU = torch.device("cpu")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", 3)


def state(step: int, size: int = 100) -> dict[str, Any]:
    return {
        "format": 1,
        "step": step,
        "model": {"w": torch.full((size,), float(step))},
        "random": random_state(CPU),
    }


def save(store: CheckpointStore, *steps: int, size: int = 100) -> list[Saved]:
    return [store.save(step, state(step, size), None, True) for step in steps]


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def steps(store: CheckpointStore) -> list[int]:
    return [saved.step for saved in store.all()]


def test_what_is_saved_is_loaded(store: CheckpointStore) -> None:
    body = {**state(7), "nested": {"list": [1, 2.5, "x", None], "half": torch.ones(3, dtype=torch.bfloat16)}}
    saved = store.save(7, body, 0.25, True)
    assert store.all() == [saved]
    assert (saved.step, saved.metric, saved.bytes) == (7, 0.25, saved.path.stat().st_size)
    assert equal(store.load(saved), body)
    found, loaded = newest_good(store)
    assert found == saved
    assert equal(loaded, body)
    assert names(store) == ["step-00000007.json", "step-00000007.pt"]


def test_however_often_a_step_is_saved_it_is_one_checkpoint(store: CheckpointStore) -> None:
    save(store, 1, 5, 5, 5, 6, 5)
    assert steps(store) == [1, 6, 5]
    assert len(names(store)) == 6
    assert newest_good(store)[0].step == 5


def test_a_clock_that_steps_back_does_not_change_the_order(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([5_000.0, 1_000.0, 3_000.0, 1_000.0])
    monkeypatch.setattr(checkpoint.time, "time", lambda: next(times))
    save(store, 10, 20, 30, 40)
    assert steps(store) == [20, 30, 40]
    assert newest_good(store)[0].step == 40


@pytest.mark.parametrize("delay_s", [0.002, 0.03])
def test_a_stop_at_once_in_the_middle_of_saving_is_a_stop(store: CheckpointStore, delay_s: float) -> None:
    def stop(*_: object) -> None:
        raise StopNow

    save(store, 10)
    body = state(20, size=10_000_000)  # 40 MB: a signal comes while it is written
    previous = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(StopNow):
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            while True:
                store.save(20, body, None, True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert [name for name in names(store) if name.endswith(".tmp")] == []
    found, loaded = newest_good(store)
    assert loaded["step"] == found.step


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "empty"])
def test_damage_names_the_file_and_offers_the_previous_one(store: CheckpointStore, how: str) -> None:
    first, second, last = save(store, 10, 20, 30)
    damage(last.path, how)
    for load in (lambda: store.load(last), lambda: newest_good(store, 30)):
        with pytest.raises(CheckpointError, match=last.path.name):
            load()
    with pytest.raises(CheckpointError, match=rf"{last.path.name}.*--from-step 20"):
        newest_good(store)
    assert newest_good(store, 20)[1]["step"] == 20
    # The one that is offered is a good one.
    damage(second.path, how)
    with pytest.raises(CheckpointError, match="--from-step 10"):
        newest_good(store)
    damage(first.path, how)
    with pytest.raises(CheckpointError) as caught:
        newest_good(store)
    assert "--from-step" not in str(caught.value)


def test_no_checkpoint_says_so_and_mentions_what_is_incomplete(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        newest_good(store)
    (saved,) = save(store, 4)
    saved.description.unlink()
    with pytest.raises(CheckpointError, match=saved.path.name):
        newest_good(store)


def test_the_newest_are_kept_and_the_best_one_besides(store: CheckpointStore) -> None:
    for step, metric in ((10, 0.5), (20, 0.1), (30, 0.9), (40, None), (50, 0.3), (60, 0.4)):
        store.save(step, state(step), metric, True)
    assert steps(store) == [20, 40, 50, 60]
    assert len(names(store)) == 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_is_never_the_best(store: CheckpointStore, bad: float) -> None:
    for step, metric in ((10, bad), (20, 0.9), (30, 0.5), (40, 0.6), (50, 0.7), (60, 0.8)):
        store.save(step, state(step), metric, bad != math.inf)
    assert (30 if bad != math.inf else 20) in steps(store)
    assert 10 not in steps(store)


def test_what_was_just_saved_is_kept_even_when_later_steps_lie_there(store: CheckpointStore) -> None:
    save(store, 30, 40, 50)
    # The run returned to an earlier step and continues from there.
    save(store, 20)
    assert 20 in steps(store)
    assert newest_good(store)[0].step == 20
    save(store, 25)
    assert newest_good(store)[0].step == 25


def test_leftovers_of_a_crash_are_removed_and_foreign_files_are_not(store: CheckpointStore) -> None:
    store.folder.mkdir()
    (store.folder / "step-00000001.pt.tmp").write_bytes(b"torn")
    (store.folder / "notes.txt").write_text("mine")
    save(store, 2)
    assert names(store) == ["notes.txt", "step-00000002.json", "step-00000002.pt"]


@pytest.mark.parametrize("form", ["zip", "bare"])
def test_a_file_that_would_run_code_is_refused_even_with_a_matching_checksum(
    store: CheckpointStore, tmp_path: Path, form: str
) -> None:
    import hashlib
    import pickle

    (good,) = save(store, 10)
    ran = tmp_path / "ran"
    body = {**state(20), "bomb": Bomb(f"touch {ran}")}
    buffer = io.BytesIO()
    if form == "zip":
        torch.save(body, buffer)
    else:
        buffer.write(pickle.dumps(body["bomb"]))
    data = buffer.getvalue()
    path = store.folder / "step-00000020.pt"
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    description = {
        "format": 1, "file": path.name, "step": 20, "bytes": len(data), "sha256": digest, "t": good.t + 1,
    }  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="--from-step 10"):
        newest_good(store)
    assert not ran.exists()


@pytest.mark.parametrize("body", [{"step": 3}, {"format": 2, "step": 3}, [1, 2]])
def test_a_file_of_another_program_is_refused(store: CheckpointStore, body: Any) -> None:
    saved = store.save(3, body, None, True)
    with pytest.raises(CheckpointError, match=saved.path.name):
        store.load(saved)


def test_a_disk_with_room_for_all_but_the_description_is_left_as_it_was(
    small_disk: Callable[[int], Path],
) -> None:
    disk = small_disk(1024)
    store = CheckpointStore(disk / "checkpoints", 3)
    (saved,) = save(store, 10, size=10_000)
    before = names(store)
    with (disk / "filler").open("wb", buffering=0) as filler:
        with pytest.raises(OSError, match="No space left"):
            while True:
                filler.write(b"x" * 4096)
        # Exactly as many pages as the checkpoint takes.
        filler.truncate(filler.tell() - -(-saved.bytes // 4096) * 4096)
    with pytest.raises(OSError, match="No space left"):
        save(store, 20, size=10_000)
    assert names(store) == before


@pytest.mark.parametrize("room", [0, 30_000])
def test_a_file_that_cannot_grow_keeps_the_last_good_one(store: CheckpointStore, room: int) -> None:
    save(store, 10, size=100)
    before = names(store)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError):
            save(store, 20, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(store) == before
    assert newest_good(store)[1]["step"] == 10


DAMAGED = {
    "not a dict": b"[1]", "not UTF-8": b"\xff\xfe{", "cut off": b'{"step": 3', "nested": b"[" * 200_000,
    "NaN": b'{"file":"step-00000003.pt","step":3,"bytes":1,"sha256":"0","t":NaN}',
    "far future": b'{"file":"step-00000003.pt","step":3,"bytes":1,"sha256":"0","t":1e300}',
    "huge integer": b'{"file":"step-00000003.pt","step":' + b"9" * 5000 + b',"bytes":1,"sha256":"0","t":1}',
    "another step": b'{"file":"step-00000003.pt","step":4,"bytes":1,"sha256":"0","t":9e9}',
    "another file": b'{"file":"../../secret.pt","step":3,"bytes":1,"sha256":"0","t":9e9}',
    "metric of a wrong type": b'{"file":"step-00000003.pt","step":3,"bytes":1,"sha256":"0","t":9e9,"metric":"low"}',
    "empty": b"", "long": b" " * 10_000_000 + b"{}",
}  # fmt: skip


@pytest.mark.parametrize(
    "content", [*DAMAGED.values(), "folder", "FIFO", "link"], ids=[*DAMAGED, "folder", "FIFO", "link"]
)
def test_a_damaged_description_hides_no_earlier_checkpoint(
    store: CheckpointStore, content: bytes | str
) -> None:
    save(store, 1, 2, 3)
    path = store.folder / "step-00000003.json"
    path.unlink()
    if content == "folder":
        path.mkdir()
    elif content == "FIFO":
        os.mkfifo(path)
    elif content == "link":
        path.symlink_to("/dev/zero")
    else:
        assert isinstance(content, bytes)
        path.write_bytes(content)
    saved, loaded = newest_good(store)
    assert (saved.step, loaded["step"]) == (2, 2)
    assert store.damaged() == ["step-00000003.json"]
    with pytest.raises(CheckpointError, match=r"1, 2 .*step-00000003\.json"):
        newest_good(store, 3)
    save(store, 4, 5)  # neither ordered nor deleted by what it says
    assert steps(store)[-2:] == [4, 5]


def test_free_space_is_none_where_it_cannot_be_asked(tmp_path: Path) -> None:
    assert (free_space(tmp_path) or 0) > 0
    assert free_space(tmp_path / "none") is None
