"""Which GPU each rank has, and what is said if that cannot be; the GPUs are made up."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ndd_engine.errors import UsageError
from ndd_engine.train.parallel import world
from ndd_engine.train.parallel.devices import Used, conflict, device_of
from ndd_engine.train.parallel.notes import FolderNotes
from ndd_engine.train.parallel.place import OtherRankError, Place
from ndd_engine.train.request import Ranks

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("gpus")
def test_each_rank_of_a_host_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device_of("auto", Place(rank, 4, rank % 2, 2)) for rank in range(4)] == ["cuda:0", "cuda:1"] * 2
    assert device_of("cpu", Place(1, 2, 1, 2)) == "cpu"
    assert device_of("cuda:1", Place(1, 2, 0, 1)) == "cuda:1"  # the only rank of its host
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # a cluster shows each process its own
    assert device_of("cuda", Place(1, 2, 1, 2)) == "cuda:0"
    assert device_of("cuda:0", Place(1, 2, 1, 2)) == "cuda:0"


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("asked", "place", "words"),
    [
        ("auto", Place(2, 3, 2, 3), "3 ranks on .*, which has 2 GPUs: start at most 2 there"),
        (
            "cuda:1",
            Place(2, 4, 0, 2),
            'run.device = "cuda:1", which all ranks would share: set run.device = "auto"',
        ),
    ],
)
def test_a_rank_without_a_gpu_of_its_own_is_a_usage_error(asked: str, place: Place, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        device_of(asked, place)


def test_two_ranks_with_the_same_gpu_or_none_cannot_train_together() -> None:
    a, b = Used("a", "cuda", "GPU-1"), Used("a", "cuda", "GPU-2")
    assert conflict([a, b, Used("b", "cuda", "GPU-1")]) == ""
    assert conflict([Used("a", "cpu")] * 2) == ""
    assert "ranks 0 and 2 (on a) have the same GPU" in conflict([a, b, a])
    assert "rank 0 (on a) has a GPU, rank 1 (on b) has none" in conflict([a, Used("b", "cpu")])


def test_all_ranks_learn_of_it_and_only_rank_0_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "used", lambda _device: Used("a", "cuda", "GPU-1"))
    found: dict[int, Exception] = {}

    def meet(rank: int) -> None:
        run: Any = SimpleNamespace(stage=lambda _text: None, control=SimpleNamespace(stopping=False))
        store: Any = None
        try:
            world._meet(run, Ranks(Place(rank, 2, rank, 2), store, FolderNotes(tmp_path)), CPU)
        except Exception as error:  # noqa: BLE001
            found[rank] = error

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert isinstance(found[0], UsageError)
    assert "ranks 0 and 1 (on a) have the same GPU: each rank needs one of its own" in str(found[0])
    assert isinstance(found[1], OtherRankError)
    assert (str(found[1]), found[1].exit_status) == (str(found[0]), 2)
