"""Two ranks train as one process does, and their checkpoints are loaded by any number of ranks, bit for bit.

What fails on one rank, all learn.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks_worker import CASES, Buffers, Job, trained
from tests.runs import made_once
from tests.states import equal

from ndd_engine.errors import CheckpointError
from ndd_engine.record.rundir import RunDir
from ndd_engine.train.checkpoint import CheckpointStore, Saved, export, newest_good

pytestmark = pytest.mark.long
WORKER = Path(__file__).with_name("ranks_worker.py")
Found = dict[str, Any]


def launch(ranks: int, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the worker with so many ranks. check: fail the test if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(WORKER), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0 or not check, done.stdout[-4000:]
    return done


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left. Their checkpoints begin with the file of a single process (step 1)."""

    def make(folder: Path) -> None:
        job = Job("one")
        job.train(2)
        state = job.checkpoint(1)
        torch.save(state, folder / "saved-1.pt")
        store_of(folder).save(1, state, None, True)
        launch(
            2, folder, *CASES, "differing", "bypassed", "buffers",
            "load:1:ddp", "load:1:fsdp2",
            "train:ddp:2:fused", "load:2:ddp:fused", "convert:2:fsdp2:3", "load:3:ddp",
            "train:fsdp2:4:sgd", "load:4:ddp:sgd", "load:4:fsdp2:sgd",
            "limited:5:1:1000", "limited:6:1:18000", "limited:7:0:18000", "unequal:8",
            "damaged:4:__1_0.distcp",
        )  # fmt: skip

    return made_once(tmp_path_factory, "two-ranks", make)


def kept(folder: Path, name: str, rank: int = 0) -> Any:
    return torch.load(folder / f"{name}{f'.{rank}' if rank else ''}.pt", weights_only=True)


def both(folder: Path, name: str) -> list[Any]:
    return [kept(folder, name, rank) for rank in (0, 1)]


# Training.


@functools.cache
def alone(name: str, accumulation: int, micro: int = 4) -> Found:
    """What a single process finds, with one thread as each rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return trained(CASES[name], CASES[name].config(1, accumulation, micro))
    finally:
        torch.set_num_threads(threads)


def difference(one: Found, other: Found) -> float:
    """The largest difference of losses, gradients and weights."""
    found = [abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)]
    for mine, others in zip(
        [*one["gradients"], one["weights"]], [*other["gradients"], other["weights"]], strict=True
    ):
        assert mine.keys() == others.keys()
        found += [float((mine[name] - others[name]).abs().max()) for name in mine]
    return max(found)


@pytest.mark.parametrize("name", ["lines", *(name for name in CASES if name.startswith("ddp"))])
def test_ddp_is_bit_identical_to_accumulation_in_one_process(folder: Path, name: str) -> None:
    one = alone(name.removesuffix("-workers"), 2)  # for which workers make no difference
    for rank in both(folder, name):
        assert difference(rank, one) == 0.0


@pytest.mark.parametrize("name", ["ddp", "ddp-unused", "fsdp2", "fsdp2-clip", "fsdp2-kept"])
@pytest.mark.budget(30)  # it begins, and so starts the ranks
def test_half_the_micro_batch_on_two_ranks_is_one_batch_to_rounding(folder: Path, name: str) -> None:
    whole = alone(name, 1, micro=8)
    assert max(float(value.abs().max()) for value in whole["gradients"][0].values()) > 1e-2
    for rank in both(folder, name):
        assert difference(rank, whole) < 1e-12
        assert difference(rank, alone(name, 2)) < 1e-12


@pytest.mark.parametrize("name", ["lines", "lines-fsdp2"])
def test_micro_batches_count_by_their_words_on_all_ranks(folder: Path, name: str) -> None:
    """Rank 1 has no word in every other step, where its loss is NaN."""
    assert all(loss == loss for loss in kept(folder, name)["losses"])
    for rank in both(folder, name):
        assert difference(rank, alone(name, 1, micro=8)) < 1e-12
        assert rank["waits"]  # for the sum of the weights, as a time of its own


def test_sharded_ranks_compute_in_bf16_as_one_process_does(folder: Path) -> None:
    one = alone("fsdp2-amp", 2)
    assert difference(one, alone("ddp-fp32", 2)) > 1e-4
    for rank in both(folder, "fsdp2-amp"):
        assert difference(rank, one) < 1e-6


@pytest.mark.parametrize("name", ["fsdp2-gathered", "fsdp2-reduced"])
def test_parameters_and_gradients_are_exchanged_in_bf16_where_that_is_configured(
    folder: Path, name: str
) -> None:
    for rank in both(folder, name):
        # Eight bits of mantissa for what is exchanged; the weights themselves stay in fp32.
        assert 1e-6 < difference(rank, alone(name, 2)) < 0.05
        assert all(value.dtype == torch.float32 for value in rank["weights"].values())


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "lines", "short", "short-fsdp2", "two-of-three"])
def test_an_evaluation_counts_every_batch_once(folder: Path, name: str) -> None:
    """11 items in batches of 4; with "short" rank 1 has none."""
    one = alone(name, 2)
    ranks = both(folder, name)
    for rank in ranks:
        assert rank["batches"] == one["batches"]
        assert rank["metrics"] == pytest.approx(one["metrics"], rel=1e-12)
    assert ranks[0]["metrics"] == ranks[1]["metrics"]


def test_ranks_with_other_data_or_another_model_are_told_apart(folder: Path) -> None:
    for rank in both(folder, "differing"):
        assert rank["same"] == ""
        for what in ("items", "data", "model"):
            assert rank[what].startswith("UsageError: ") and "rank" in rank[what]


def test_all_ranks_take_over_buffers_of_any_layout_and_type(folder: Path) -> None:
    expected = dict(Buffers(0).named_buffers())
    for rank in both(folder, "buffers"):
        assert rank.keys() == expected.keys()
        assert all(torch.equal(rank[name], value) for name, value in expected.items())


def test_a_sharded_model_that_is_not_called_as_a_whole_is_refused(folder: Path) -> None:
    assert all("parallel.strategy" in text for text in both(folder, "bypassed"))


# Checkpoints.


def store_of(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", 9)


def of_step(store: CheckpointStore, step: int) -> Saved:
    (saved,) = (saved for saved in store.all() if saved.step == step)
    return saved


def state_of(value: dict[str, Any], *without: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in ("ranks", *without)}


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> CheckpointStore:
    """A copy of it, to be damaged."""
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    return store_of(tmp_path)


@pytest.mark.parametrize(
    "loaded", ["1-2-ddp", "1-2-fsdp2", "2-2-ddp", "2-2-fsdp2", "3-2-ddp", "4-2-ddp", "4-2-fsdp2"]
)
def test_what_one_strategy_saved_the_other_loads_bit_for_bit(folder: Path, loaded: str) -> None:
    step = loaded[0]
    saved, found = kept(folder, f"saved-{step}"), kept(folder, f"loaded-{loaded}")
    assert equal(state_of(found), state_of(saved))
    assert found["ranks"] == (1 if step == "1" else 2)
    assert found["scaler"]["scale"] == 8.0
    assert found["optimizer"]["state"][0].keys() >= (
        {"momentum_buffer"} if step == "4" else {"exp_avg", "step"}
    )


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_single_process_continues_with_the_checkpoint_of_several(folder: Path, step: int) -> None:
    store = store_of(folder)
    found = store.load(of_step(store, step))
    assert equal(state_of(found), state_of(kept(folder, f"saved-{step}")))
    assert found["model"]["head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
    job = Job("one", "sgd" if step == 4 else "foreach", seed=3)
    job.load(found)
    job.train(1)


def test_the_position_in_the_data_is_that_of_rank_0_as_a_whole(folder: Path) -> None:
    store = store_of(folder)
    for step in (2, 3, 4):
        position = store.load(of_step(store, step))["position"]
        assert equal(position, {"since": 0, "state": [torch.zeros(3), torch.zeros(3)]})


def test_each_rank_continues_with_its_own_random_numbers(folder: Path) -> None:
    own = [kept(folder, "saved-3", rank)["random"]["torch"] for rank in (0, 1)]
    assert not torch.equal(*own)
    assert equal([kept(folder, "loaded-3-2-ddp", rank)["random"]["torch"] for rank in (0, 1)], own)
    # A single process had only one state: the other rank gets one of its own, the same on every resume.
    first, second = (kept(folder, "loaded-1-2-ddp", rank)["random"] for rank in (0, 1))
    assert equal(first, kept(folder, "saved-1")["random"])
    assert not equal(first, second)
    assert equal(second, kept(folder, "loaded-1-2-fsdp2", 1)["random"])


def test_tensors_are_written_once_by_the_ranks_together(folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in of_step(store_of(folder), 2).path.iterdir()}
    assert files.keys() == {".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"}
    sizes = files["__0_0.distcp"], files["__1_0.distcp"]
    assert min(sizes) > 0.3 * sum(sizes)


@pytest.mark.parametrize(
    ("step", "rank", "file"), [(5, 1, "__1_0.distcp"), (6, 1, "__1_0.distcp"), (7, 0, "__0_0.distcp")]
)
def test_all_ranks_learn_that_one_cannot_write_and_nothing_is_lost(
    folder: Path, step: int, rank: int, file: str
) -> None:
    found, other = both(folder, f"limited-{step}")
    assert found == other and found["error"].startswith("OSError: ")
    assert f"rank {rank} on " in found["error"] and file in found["error"]
    assert found["before"] == found["after"]


@pytest.mark.parametrize(
    ("scenario", "error", "named"),
    [
        ("unequal-8", "UsageError: ", "model.extra"),  # which only one of them has
        ("damaged-4", "CheckpointError: ", "step-00000004/__1_0.distcp"),  # which one of them finds damaged
    ],
)
def test_all_ranks_learn_what_one_of_them_finds(folder: Path, scenario: str, error: str, named: str) -> None:
    (text,) = set(both(folder, scenario))
    assert text.startswith(error) and named in text


def test_a_file_of_another_rank_is_verified_too(copy: CheckpointStore) -> None:
    os.truncate(of_step(copy, 4).path / "__1_0.distcp", 9)
    with pytest.raises(CheckpointError, match=r"step-00000004/__1_0\.distcp"):
        copy.load(of_step(copy, 4))
    with pytest.raises(CheckpointError, match="--from-step 3"):
        newest_good(copy)


def test_exported_weights_are_a_plain_file(folder: Path, tmp_path: Path) -> None:
    done = export(RunDir(folder), tmp_path / "weights.pt", "3")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert equal(dict(weights), dict(kept(folder, "saved-3")["model"]))
    Job("one", seed=5).model.load_state_dict(weights)
    assert (done.saved.step, done.tensors) == (3, 8)
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()  # still tied
    assert not torch.distributed.is_initialized()


def test_dcp_reads_the_tensors_without_us(folder: Path) -> None:
    model = Job("one", seed=5).model
    tensors = {f"model.{name}": value for name, value in model.state_dict().items() if name != "head.weight"}
    dcp.load(tensors, checkpoint_id=of_step(store_of(folder), 3).path)
    assert equal(dict(model.state_dict()), dict(kept(folder, "saved-3")["model"]))


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
