"""Two ranks train as one process does: losses, gradients, weights, items, and evaluations."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_help import launch
from train_worker import CASES, Buffers, trained

pytestmark = pytest.mark.long
WORKER = Path(__file__).with_name("train_worker.py")
Found = dict[str, Any]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """What both ranks found, by case."""
    folder = tmp_path_factory.mktemp("two")
    names = [*CASES, "differing", "bypassed", "buffers"]
    launch(2, folder, *names, worker=WORKER)
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for rank in range(2)]
        for name in names
    }


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
def test_ddp_is_bit_identical_to_accumulation_in_one_process(two: dict[str, list[Found]], name: str) -> None:
    for rank in two[name]:
        assert difference(rank, alone(name, 2)) == 0.0


@pytest.mark.parametrize("name", ["ddp", "ddp-unused", "fsdp2", "fsdp2-clip", "fsdp2-kept"])
@pytest.mark.budget(20)
def test_half_the_micro_batch_on_two_ranks_is_one_batch_to_rounding(
    two: dict[str, list[Found]], name: str
) -> None:
    whole = alone(name, 1, micro=8)
    assert max(float(value.abs().max()) for value in whole["gradients"][0].values()) > 1e-2
    for rank in two[name]:
        assert difference(rank, whole) < 1e-12
        assert difference(rank, alone(name, 2)) < 1e-12


@pytest.mark.parametrize("name", ["lines", "lines-fsdp2"])
def test_micro_batches_count_by_their_words_on_all_ranks(two: dict[str, list[Found]], name: str) -> None:
    """Rank 1 has no word in every other step, where its loss is NaN."""
    assert all(loss == loss for loss in two[name][0]["losses"])
    for rank in two[name]:
        assert difference(rank, alone(name, 1, micro=8)) < 1e-12
        assert rank["waits"]  # for the sum of the weights, as a time of its own


def test_sharded_ranks_compute_in_bf16_as_one_process_does(two: dict[str, list[Found]]) -> None:
    one = alone("fsdp2-amp", 2)
    assert difference(one, alone("ddp-fp32", 2)) > 1e-4
    for rank in two["fsdp2-amp"]:
        assert difference(rank, one) < 1e-6


@pytest.mark.parametrize("name", ["fsdp2-gathered", "fsdp2-reduced"])
def test_parameters_and_gradients_are_exchanged_in_bf16_where_that_is_configured(
    two: dict[str, list[Found]], name: str
) -> None:
    for rank in two[name]:
        # Eight bits of mantissa for what is exchanged; the weights themselves stay in fp32.
        assert 1e-6 < difference(rank, alone(name, 2)) < 0.05
        assert all(value.dtype == torch.float32 for value in rank["weights"].values())


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "lines", "short", "short-fsdp2", "two-of-three"])
def test_an_evaluation_counts_every_batch_once(two: dict[str, list[Found]], name: str) -> None:
    """11 items in batches of 4; with "short" rank 1 has none."""
    one = alone(name, 2)
    for rank in two[name]:
        assert rank["batches"] == one["batches"]
        assert rank["metrics"] == pytest.approx(one["metrics"], rel=1e-12)
    assert two[name][0]["metrics"] == two[name][1]["metrics"]


def test_ranks_with_other_data_or_another_model_are_told_apart(two: dict[str, list[Found]]) -> None:
    for rank in two["differing"]:
        assert rank["same"] == ""
        for what in ("items", "data", "model"):
            assert rank[what].startswith("UsageError: ") and "rank" in rank[what]


def test_all_ranks_take_over_buffers_of_any_layout_and_type(two: dict[str, list[Found]]) -> None:
    expected = dict(Buffers(0).named_buffers())
    for rank in two["buffers"]:
        assert rank.keys() == expected.keys()
        assert all(torch.equal(rank[name], value) for name, value in expected.items())


def test_a_sharded_model_that_is_not_called_as_a_whole_is_refused(two: dict[str, list[Found]]) -> None:
    for rank in two["bypassed"]:
        assert "parallel.strategy" in rank["parts"]
