"""Checkpoints on disk: complete or absent, verified when read, the last good one never lost; and what they may hold."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from tests.states import Bomb, equal
from torch import nn

from ndd_engine.errors import CheckpointError
from ndd_engine.run.control import Control, StopNow
from ndd_engine.train import checkpoint
from ndd_engine.train.checkpoint import MANIFEST, CheckpointStore, Saved, newest_good
from ndd_engine.train.checkpoint_state import finite_buffers, not_finite, random_state, unloadable

CPU = torch.device("cpu")
Point = namedtuple("Point", "x y")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", 3)


def state(step: int, size: int = 100) -> dict[str, Any]:
    return {"step": step, "model": {"w": torch.full((size,), float(step))}, "random": random_state(CPU)}


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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_newest_are_kept_and_the_best_one_besides(store: CheckpointStore, bad: float) -> None:
    """A metric that is no number is never the best."""
    lower = bad != math.inf
    best = 0.1 if lower else 0.9
    for step, metric in ((10, bad), (20, 0.5), (30, best), (40, 0.6), (50, None), (60, 0.3), (70, 0.4)):
        store.save(step, state(step), metric, lower)
    assert steps(store) == [30, 50, 60, 70]
    assert len(names(store)) == 4


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


OTHER = (lambda _: [1], lambda _: torch.Size((1,)), lambda _: b"", lambda _: b"\x80\x04")


@pytest.mark.parametrize("change", [elsewhere, partial, swapped, *OTHER])
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
    "no files": sealed(files=[]), "empty": b"", "long": b" " * 1_000_000 + b"{}",
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


# What a checkpoint may contain


class Masked(nn.Module):
    """A causal mask with -inf, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("best", torch.tensor(math.nan), persistent=False)


def test_only_what_was_finite_at_the_start_has_to_stay_finite() -> None:
    model = Masked()
    # Infinity is found in other layouts, too.
    model.register_buffer("sparse", torch.tensor([1.0, math.inf]).to_sparse())
    model.register_buffer("complex", torch.tensor(complex(0, math.nan)))
    buffers = finite_buffers(model)
    assert buffers == {"mean"}
    assert not_finite(model, buffers) is None
    model.get_buffer("mean")[1] = math.inf
    assert not_finite(model, buffers) == "mean"
    with torch.no_grad():
        model.linear.weight[0, 0] = math.nan
    assert not_finite(model, buffers) == "linear.weight"


def loads(value: Any) -> bool:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001
        return False
    return True


@pytest.mark.parametrize(
    "value",
    [
        1, -(2**62), 1.5, math.nan, True, None, "text", b"bytes", bytearray(b"x"), 1j, (1, 2), [1, [2]], {1, 2},
        {"a": {"b": torch.ones(2)}}, OrderedDict(a=1), Counter("ab"), torch.Size([1]), torch.float32,
        nn.Parameter(torch.ones(1)), 10**5000, frozenset({1}), range(3), defaultdict(list), Point(1, 2), int, object(),
        {Point(1, 2): 1}, [[slice(1)]], ...,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_it_is_known_what_torch_loads(value: Any) -> None:
    assert (unloadable({"model": {"_extra_state": value}}) is None) == loads({"_extra_state": value})


def test_what_cannot_be_loaded_is_named() -> None:
    found = unloadable({"step": 1, "model": OrderedDict({"encoder._extra_state": {"at": Point(1, 2)}})})
    assert found is not None and "encoder._extra_state.at" in found and "Point" in found
    deep: Any = None
    for _ in range(500):
        deep = [deep]
    assert unloadable({"model": deep}) is not None
    around: list[Any] = []
    around.append(around)
    assert unloadable({"model": around}) is not None
