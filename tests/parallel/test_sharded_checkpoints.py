"""Checkpoints of several ranks: every number of ranks and both strategies load them; what fails on one, all learn."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks_help import launch
from sharded_worker import Job
from tests.states import equal

from ndd_engine.errors import CheckpointError
from ndd_engine.record.rundir import RunDir
from ndd_engine.train.checkpoint import CheckpointStore, Saved, export, newest_good

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
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
    ]


@pytest.mark.parametrize(
    ("step", "rank", "file"), [(5, 1, "__1_0.distcp"), (6, 1, "__1_0.distcp"), (7, 0, "__0_0.distcp")]
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


def test_a_file_of_another_rank_is_verified_too(copy: CheckpointStore) -> None:
    os.truncate(of_step(copy, 4).path / "__1_0.distcp", 9)
    with pytest.raises(CheckpointError, match=r"step-00000004/__1_0\.distcp"):
        copy.load(of_step(copy, 4))
    with pytest.raises(CheckpointError, match="--from-step 3"):
        newest_good(copy)


def test_a_single_process_writes_the_same_step_again_and_deletes_what_is_too_old(
    copy: CheckpointStore,
) -> None:
    copy.keep = 2
    state = copy.load(of_step(copy, 3))
    copy.save(4, state, None, True)
    assert sorted(path.name for path in copy.folder.iterdir()) == ["step-00000003", "step-00000004.again"]
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
    ("rank", "where"), [(0, "plan"), (1, "plan"), (0, "write"), (1, "write"), (0, "finish")]
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
        assert sorted(path.name for path in store.folder.iterdir()) == ["step-00000001"]
