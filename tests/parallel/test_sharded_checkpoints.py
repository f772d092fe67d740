"""Checkpoints of several ranks: every number of ranks and both strategies load them; damage and failures are named."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks_help import launch
from sharded_worker import Job
from tests.states import Bomb, equal

from ndd_engine.errors import CheckpointError
from ndd_engine.record.rundir import RunDir
from ndd_engine.train.checkpoint import CheckpointStore, Saved, newest_good
from ndd_engine.train.checkpoint_folder import MANIFEST
from ndd_engine.train.export import export

pytestmark = pytest.mark.long


def kept(folder: Path, name: str, rank: int = 0) -> Any:
    return torch.load(folder / f"{name}{f'.{rank}' if rank else ''}.pt", weights_only=True)


def store_of(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", 9)


def of_step(store: CheckpointStore, step: int) -> Saved:
    (saved,) = (saved for saved in store.all() if saved.step == step)
    return saved


def state_of(value: dict[str, Any], *without: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in ("ranks", *without)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left, which began with the file of a single process (step 1)."""
    folder = tmp_path_factory.mktemp("two")
    job = Job("one")
    job.train(2)
    state = job.checkpoint(1)
    torch.save(state, folder / "saved-1.pt")
    store_of(folder).save(1, state, None, True)
    launch(
        2, folder,
        "load:1:ddp", "load:1:fsdp2",
        "train:ddp:2:fused", "load:2:ddp:fused", "convert:2:fsdp2:3", "load:3:ddp",
        "train:fsdp2:4:sgd", "load:4:ddp:sgd", "load:4:fsdp2:sgd",
        "limited:5:1:1000", "limited:6:1:18000", "limited:7:0:18000", "unequal:8",
        "damaged:4:__1_0.distcp",
    )  # fmt: skip
    return folder


@pytest.fixture
def copy(two: Path, tmp_path: Path) -> CheckpointStore:
    """A copy of it, to be damaged."""
    shutil.copytree(two / "checkpoints", tmp_path / "checkpoints")
    return store_of(tmp_path)


@pytest.mark.parametrize(
    "loaded", ["1-2-ddp", "1-2-fsdp2", "2-2-ddp", "2-2-fsdp2", "3-2-ddp", "4-2-ddp", "4-2-fsdp2"]
)
def test_what_one_strategy_saved_the_other_loads_bit_for_bit(two: Path, loaded: str) -> None:
    step = loaded[0]
    saved, found = kept(two, f"saved-{step}"), kept(two, f"loaded-{loaded}")
    assert equal(state_of(found), state_of(saved))
    assert found["ranks"] == (1 if step == "1" else 2)
    assert found["scaler"]["scale"] == 8.0
    assert found["optimizer"]["state"][0].keys() >= (
        {"momentum_buffer"} if step == "4" else {"exp_avg", "step"}
    )


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_single_process_continues_with_the_checkpoint_of_several(two: Path, step: int) -> None:
    store = store_of(two)
    found = store.load(of_step(store, step))
    assert equal(state_of(found), state_of(kept(two, f"saved-{step}")))
    assert found["model"]["head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
    job = Job("one", "sgd" if step == 4 else "foreach", seed=3)
    job.load(found)
    job.train(1)


def test_the_position_in_the_data_is_that_of_rank_0_as_a_whole(two: Path) -> None:
    store = store_of(two)
    for step in (2, 3, 4):
        position = store.load(of_step(store, step))["position"]
        assert equal(position, {"since": 0, "state": [torch.zeros(3), torch.zeros(3)]})


def test_each_rank_continues_with_its_own_random_numbers(two: Path) -> None:
    own = [kept(two, "saved-3", rank)["random"]["torch"] for rank in (0, 1)]
    assert not torch.equal(*own)
    assert equal([kept(two, "loaded-3-2-ddp", rank)["random"]["torch"] for rank in (0, 1)], own)
    # A single process had only one state: the other rank gets one of its own, the same on every resume.
    first, second = (kept(two, "loaded-1-2-ddp", rank)["random"] for rank in (0, 1))
    assert equal(first, kept(two, "saved-1")["random"])
    assert not equal(first, second)
    assert equal(second, kept(two, "loaded-1-2-fsdp2", 1)["random"])


def test_tensors_are_written_once_by_the_ranks_together(two: Path) -> None:
    folder = of_step(store_of(two), 2).path
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert min(sizes) > 0.3 * sum(sizes)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "rank-00000.pt", "rank-00001.pt", "state.pt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("step", "rank", "file"), [(5, 1, "rank-00001.pt"), (6, 1, "__1_0.distcp"), (7, 0, "__0_0.distcp")]
)
def test_all_ranks_learn_that_one_cannot_write_and_nothing_is_lost(
    two: Path, step: int, rank: int, file: str
) -> None:
    found = [kept(two, f"limited-{step}", each) for each in (0, 1)]
    assert found[0] == found[1]
    assert found[0]["error"].startswith("OSError: ")
    assert f"rank {rank} on " in found[0]["error"] and file in found[0]["error"]
    assert found[0]["before"] == found[0]["after"]


@pytest.mark.parametrize(
    ("scenario", "error", "named"),
    [
        ("unequal-8", "UsageError: ", "model.extra"),  # which only one of them has
        ("damaged-4", "CheckpointError: ", "step-00000004/__1_0.distcp"),  # which one of them finds damaged
    ],
)
def test_all_ranks_learn_what_one_of_them_finds(two: Path, scenario: str, error: str, named: str) -> None:
    (text,) = {kept(two, scenario, rank) for rank in (0, 1)}
    assert text.startswith(error) and named in text


# How it is damaged, and the file that is named.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda path: flip(path / "__0_0.distcp"), "__0_0.distcp"),
    "cut off": (lambda path: os.truncate(path / "__1_0.distcp", 9), "__1_0.distcp"),
    "missing": (lambda path: (path / "rank-00001.pt").unlink(), "rank-00001.pt"),
    "extra": (lambda path: (path / "__2_0.distcp").touch(), "__2_0.distcp"),
    "state": (lambda path: flip(path / "state.pt"), "state.pt"),
    "index": (lambda path: flip(path / ".metadata"), ".metadata"),
    "manifest": (lambda path: flip(path / MANIFEST), MANIFEST),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), MANIFEST),
    "a folder inside": (lambda path: swap(path / "state.pt", Path.mkdir), "state.pt"),
    "all": (lambda path: shutil.rmtree(path), "step-00000004"),
    "a file": (lambda path: (shutil.rmtree(path), path.touch()), "step-00000004"),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_names_the_file_and_offers_the_previous_one(copy: CheckpointStore, how: str) -> None:
    damage, named = DAMAGE[how]
    damage(of_step(copy, 4).path)
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        copy.load(of_step(copy, 4))
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="--from-step 3"):
        newest_good(copy)
    assert newest_good(copy, 3)[1]["step"] == 3


def test_without_its_description_a_folder_does_not_count(copy: CheckpointStore) -> None:
    of_step(copy, 4).description.unlink()
    assert newest_good(copy)[0].step == 3


def forge(store: CheckpointStore, step: int, name: str, content: bytes) -> Saved:
    """Replace a file, with matching checksums."""
    saved = of_step(store, step)
    before = (saved.path / name).read_bytes()
    (saved.path / name).write_bytes(content)
    listed = json.loads((saved.path / MANIFEST).read_bytes())
    listed["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(listed).encode()
    grown = len(text) - (saved.path / MANIFEST).stat().st_size + len(content) - len(before)
    (saved.path / MANIFEST).write_bytes(text)
    body = json.loads(saved.description.read_bytes())
    body |= {"bytes": body["bytes"] + grown, "sha256": hashlib.sha256(text).hexdigest()}
    saved.description.write_text(json.dumps(body))
    return of_step(store, step)


@pytest.mark.parametrize("name", [".metadata", "state.pt", "rank-00000.pt"])
def test_a_foreign_checkpoint_runs_no_code_even_with_matching_checksums(
    copy: CheckpointStore, tmp_path: Path, name: str
) -> None:
    saved = forge(copy, 4, name, pickle.dumps(Bomb(f"touch {tmp_path / 'ran'}")))
    with pytest.raises(CheckpointError, match=re.escape(f"step-00000004/{name}")):
        copy.load(saved)
    assert not (tmp_path / "ran").exists()


def elsewhere(index: Any) -> Any:
    for stored in index.storage_data.values():
        stored.relative_path = "../../elsewhere"
    return index


def partial(index: Any) -> Any:
    index.state_dict_metadata["model.embed.weight"].chunks.pop()
    return index


@pytest.mark.parametrize(
    "change",
    [elsewhere, partial, lambda _: [1], lambda _: torch.Size((1,)), lambda _: b"", lambda _: b"\x80\x04"],
)
def test_an_index_that_is_not_one_of_this_checkpoint_is_refused(
    copy: CheckpointStore, tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    shutil.copy(of_step(copy, 4).path / "__0_0.distcp", tmp_path / "elsewhere")
    index = change(pickle.loads((of_step(copy, 4).path / ".metadata").read_bytes()))
    content = index if isinstance(index, bytes) else pickle.dumps(index)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        copy.load(forge(copy, 4, ".metadata", content))


def test_files_and_folders_are_kept_and_deleted_alike(copy: CheckpointStore) -> None:
    copy.keep = 2
    (copy.folder / ".step-00000009.0123456789ab.tmp").mkdir()
    (copy.folder / ".step-00000009.0123456789ab.tmp" / "__0_0.distcp").write_bytes(b"torn")
    state = copy.load(of_step(copy, 3))
    copy.save(4, state, None, True)  # the same step, by a single process
    assert sorted(path.name for path in copy.folder.iterdir()) == [
        "step-00000003", "step-00000003.json", "step-00000004.json", "step-00000004.pt",
    ]  # fmt: skip
    copy.save(5, state, 0.5, True)
    assert [saved.step for saved in copy.all()] == [4, 5]
    assert not (copy.folder / "step-00000003").exists()


def test_exported_weights_are_a_plain_file(two: Path, tmp_path: Path) -> None:
    done = export(RunDir(two), tmp_path / "weights.pt", "3")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert equal(dict(weights), dict(kept(two, "saved-3")["model"]))
    Job("one", seed=5).model.load_state_dict(weights)
    assert (done.saved.step, done.tensors) == (3, 8)
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()  # still tied
    assert not torch.distributed.is_initialized()


def test_dcp_reads_the_tensors_without_us(two: Path) -> None:
    model = Job("one", seed=5).model
    tensors = {f"model.{name}": value for name, value in model.state_dict().items() if name != "head.weight"}
    dcp.load(tensors, checkpoint_id=of_step(store_of(two), 3).path)
    assert equal(dict(model.state_dict()), dict(kept(two, "saved-3")["model"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "where"), [(0, "_plan"), (1, "_plan"), (0, "_write"), (1, "_write"), (0, "_finish")]
)
def test_a_rank_killed_while_it_saves_leaves_the_last_checkpoint(
    tmp_path: Path, rank: int, where: str
) -> None:
    done = launch(2, tmp_path, "train:fsdp2:1", f"killed:2:{rank}:{where}", check=False)
    assert done.returncode != 0
    store = store_of(tmp_path)
    assert newest_good(store)[0].step == 1
    if rank == 0:
        assert list(store.folder.glob("*.tmp"))  # nobody else could delete it
        launch(2, tmp_path, "load:1:fsdp2")
        assert sorted(path.name for path in store.folder.iterdir()) == ["step-00000001", "step-00000001.json"]
