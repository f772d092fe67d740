"""Checkpoints on disk: complete or absent, verified when read; the last good one is never lost."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
from tests.states import Bomb, equal

from ndd_engine.errors import CheckpointError
from ndd_engine.processes import undisturbed
from ndd_engine.run import Control, StopNow
from ndd_engine.train import checkpoint
from ndd_engine.train.checkpoint import MANIFEST, CheckpointStore, Saved, free_space, newest_good
from ndd_engine.train.checkpoint_state import random_state

CPU = torch.device("cpu")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", 3)


def state(step: int, size: int = 100) -> dict[str, Any]:
    return {
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
    tied = torch.ones(3, dtype=torch.bfloat16)
    body = {
        **state(7),
        "nested": {"list": [1, 2.5, "x", None], "half": tied, "again": tied, "none": torch.zeros(0, 2)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "turned": torch.rand(3, 4).t()}}},
        "sparse": torch.eye(3).to_sparse(),
    }
    saved = store.save(7, body, 0.25, True)
    assert store.all() == [saved]
    files = {path.name: path.stat().st_size for path in saved.path.iterdir() if path.name != MANIFEST}
    assert (saved.step, saved.metric, saved.bytes) == (7, 0.25, sum(files.values()))
    found, loaded = newest_good(store)
    assert found == saved
    assert loaded.pop("ranks") == 1 and equal(loaded, body)
    assert loaded["nested"]["half"].data_ptr() == loaded["nested"]["again"].data_ptr()
    assert loaded["optimizer"]["state"][0]["turned"].stride() == (1, 4)
    assert names(store) == ["step-00000007"]
    assert store.load(saved, only=("model",)).keys() == {"model", "ranks"}


def test_plain_torch_reads_it_without_us(store: CheckpointStore, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    saved = store.save(7, {**state(7), "stateful": {"ema": [torch.ones(2), torch.tensor(5)]}}, None, True)
    dcp_to_torch_save(saved.path, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert equal(plain["model"], state(7)["model"])
    assert equal(plain["stateful"], {"ema": [torch.ones(2), torch.tensor(5)]})
    assert plain["state"]["tree"]["step"] == 7


def test_however_often_a_step_is_saved_it_is_one_checkpoint(store: CheckpointStore) -> None:
    save(store, 1, 5, 5, 5, 6, 5)
    assert steps(store) == [1, 6, 5]
    assert len(names(store)) == 3
    assert newest_good(store)[0].step == 5


def test_a_clock_that_steps_back_does_not_change_the_order(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([5_000.0, 1_000.0, 3_000.0, 1_000.0])
    monkeypatch.setattr(checkpoint.time, "time", lambda: next(times))
    save(store, 10, 20, 30, 40)
    assert steps(store) == [20, 30, 40]
    assert newest_good(store)[0].step == 40


def test_a_stop_at_once_in_the_middle_of_saving_is_a_stop(store: CheckpointStore) -> None:
    control = Control()

    def stop(*_: object) -> None:
        control.request("kill")
        raise StopNow

    save(store, 10)
    bodies = [state(20, size=size) for size in (10, 300_000)]
    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        for delay_ms in (0.5, *range(1, 30)):
            control = Control()
            signals = Timer(delay_ms / 1000, signal.raise_signal, [signal.SIGUSR1])
            # Python drops what a handler raises in a weak reference's callback; the request remains.
            with pytest.raises(StopNow):
                signals.start()
                while True:
                    for body in bodies:
                        store.save(20, body, None, True)
                        control.check_kill()
            signals.join()
            store.clean()
            assert [name for name in names(store) if name.endswith(".tmp")] == []
            found, loaded = newest_good(store)
            assert loaded["step"] == found.step
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_a_handler_that_raises_is_heard_after_the_file_is_written() -> None:
    begun, done = Event(), []

    def work() -> None:
        begun.set()
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(0.1)
        done.append("written")

    def stop(*_: object) -> None:
        assert begun.is_set()
        raise StopNow

    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(StopNow):
            undisturbed(work)
        assert done == ["written"]
    finally:
        signal.signal(signal.SIGUSR1, previous)
    with pytest.raises(ZeroDivisionError):
        undisturbed(lambda: 1 / 0)


DATA, INDEX = "__0_0.distcp", ".metadata"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


# How a folder is damaged, and the file that is named.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda path: flip(path / DATA), DATA),
    "cut off": (lambda path: os.truncate(path / DATA, 9), DATA),
    "missing": (lambda path: (path / DATA).unlink(), DATA),
    "empty": (lambda path: os.truncate(path / DATA, 0), DATA),
    "extra": (lambda path: (path / "__1_0.distcp").touch(), "__1_0.distcp"),
    "index": (lambda path: flip(path / INDEX), INDEX),
    "a folder inside": (lambda path: as_folder(path / DATA), DATA),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_names_the_file_and_offers_the_previous_one(store: CheckpointStore, how: str) -> None:
    damage, file = DAMAGE[how]
    first, second, last = save(store, 10, 20, 30)
    damage(last.path)
    for load in (lambda: store.load(last), lambda: newest_good(store, 30)):
        with pytest.raises(CheckpointError, match=re.escape(f"{last.path.name}/{file}")) as caught:
            load()
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=rf"{last.path.name}.*--from-step 20"):
        newest_good(store)
    assert newest_good(store, 20)[1]["step"] == 20
    # The one that is offered is a good one.
    damage(second.path)
    with pytest.raises(CheckpointError, match="--from-step 10"):
        newest_good(store)
    damage(first.path)
    with pytest.raises(CheckpointError) as caught:
        newest_good(store)
    assert "--from-step" not in str(caught.value)


def test_no_checkpoint_says_so_and_mentions_what_is_damaged(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        newest_good(store)
    (saved,) = save(store, 4)
    (saved.path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=saved.path.name):
        newest_good(store)


def test_the_newest_are_kept_and_the_best_one_besides(store: CheckpointStore) -> None:
    for step, metric in ((10, 0.5), (20, 0.1), (30, 0.9), (40, None), (50, 0.3), (60, 0.4)):
        store.save(step, state(step), metric, True)
    assert steps(store) == [20, 40, 50, 60]
    assert len(names(store)) == 4


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
    (store.folder / ".ndd-0123.tmp").write_bytes(b"torn")
    (store.folder / ".checkpoint.0123.tmp").mkdir()
    (store.folder / ".checkpoint.0123.tmp" / "__0_0.distcp").write_bytes(b"torn")
    (store.folder / "notes.txt").write_text("mine")
    save(store, 2)
    assert names(store) == ["notes.txt", "step-00000002"]


def test_a_crash_between_two_checkpoints_of_a_step_leaves_one(store: CheckpointStore, tmp_path: Path) -> None:
    (first,) = save(store, 5)
    shutil.copytree(first.path, tmp_path / "first")
    (second,) = save(store, 5)
    shutil.copytree(tmp_path / "first", first.path)  # as if it had not been deleted yet
    assert store.all() == [second]
    save(store, 5)
    assert len(names(store)) == 1


def forge(saved: Saved, name: str, content: bytes) -> Saved:
    """Replace a file, with matching checksums."""
    (saved.path / name).write_bytes(content)
    body = json.loads((saved.path / MANIFEST).read_bytes())
    del body["sha256"]
    body["files"][name] = len(content), hashlib.sha256(content).hexdigest()
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (saved.path / MANIFEST).write_text(json.dumps(body))
    (found,) = (each for each in CheckpointStore(saved.path.parent, 9).all() if each.step == saved.step)
    return found


@pytest.mark.parametrize("where", ["index", "values"])
def test_a_file_that_would_run_code_is_refused_even_with_a_matching_checksum(
    store: CheckpointStore, tmp_path: Path, where: str
) -> None:
    save(store, 10)
    ran = tmp_path / "ran"
    if where == "values":
        saved = store.save(20, {**state(20), "bomb": Bomb(f"touch {ran}")}, None, True)
    else:
        saved = forge(*save(store, 20), INDEX, pickle.dumps(Bomb(f"touch {ran}")))
    with pytest.raises(CheckpointError, match="step-00000020"):
        store.load(saved)
    with pytest.raises(CheckpointError, match="--from-step 10"):
        newest_good(store)
    assert not ran.exists()


def elsewhere(index: Any) -> Any:
    for stored in index.storage_data.values():
        stored.relative_path = "../../elsewhere"
    return index


def partial(index: Any) -> Any:
    index.state_dict_metadata["model.w"].chunks.pop()
    return index


def swapped(index: Any) -> Any:
    kinds = index.state_dict_metadata
    kinds["model.w"], kinds["state"] = kinds["state"], kinds["model.w"]
    return index


@pytest.mark.parametrize(
    "change",
    [
        elsewhere,
        partial,
        swapped,
        lambda _: [1],
        lambda _: torch.Size((1,)),
        lambda _: b"",
        lambda _: b"\x80\x04",
    ],
)
def test_an_index_that_is_not_one_of_this_checkpoint_is_refused(
    store: CheckpointStore, tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    (saved,) = save(store, 4)
    shutil.copy(saved.path / DATA, tmp_path / "elsewhere")
    index = change(pickle.loads((saved.path / INDEX).read_bytes()))
    content = index if isinstance(index, bytes) else pickle.dumps(index)
    with pytest.raises(CheckpointError, match="step-00000004"):
        store.load(forge(saved, INDEX, content))


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


GOOD = {"format": 1, "step": 3, "t": 9e9, "metric": None, "files": {}}


def sealed(**changes: Any) -> bytes:
    """A manifest whose own checksum is right."""
    body = {**GOOD, **changes}
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": seal}).encode()


DAMAGED = {
    "not a dict": b"[1]", "not UTF-8": b"\xff\xfe{", "cut off": b'{"step": 3', "nested": b"[" * 200_000,
    "another checksum": sealed().replace(b"9000000000.0", b"8000000000.0"),
    "huge integer": sealed().replace(b"3", b"9" * 5000), "another format": sealed(format=9),
    "another step": sealed(step=4), "metric of a wrong type": sealed(metric="low"), "no time": sealed(t=None),
    "no files": sealed(files=[]), "empty": b"", "long": b" " * 100_000_000 + b"{}",
}  # fmt: skip


@pytest.mark.parametrize(
    "content", [*DAMAGED.values(), "folder", "FIFO", "link"], ids=[*DAMAGED, "folder", "FIFO", "link"]
)
def test_a_damaged_manifest_hides_no_earlier_checkpoint(store: CheckpointStore, content: bytes | str) -> None:
    path = save(store, 1, 2, 3)[-1].path / MANIFEST
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
    assert store.damaged() == ["step-00000003"]
    with pytest.raises(CheckpointError, match=r"1, 2 .*step-00000003"):
        newest_good(store, 3)
    save(store, 4, 5)  # neither ordered nor deleted by what it says
    assert steps(store)[-2:] == [4, 5]


def test_free_space_is_none_where_it_cannot_be_asked(tmp_path: Path) -> None:
    assert (free_space(tmp_path) or 0) > 0
    assert free_space(tmp_path / "none") is None
