"""How ranks meet, and how they agree while they train: attempts of the launcher, what fails on one, the GPU of each.

The ranks are threads of this process; time and GPUs are made up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.waiting import LIMIT_S
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from ndd_engine.config import read
from ndd_engine.errors import UsageError
from ndd_engine.record.rundir import RunDir
from ndd_engine.train import rank_run
from ndd_engine.train.checkpoint import CheckpointStore
from ndd_engine.train.parallel import rank_loop, world
from ndd_engine.train.parallel.rank_loop import Agreement, Losses
from ndd_engine.train.parallel.rank_place import FolderNotes, OtherRankError, OtherRanks, RankPlace
from ndd_engine.train.parallel.world import Used, _attempt, conflict, device_of, from_others
from ndd_engine.train.rank_run import _launched
from ndd_engine.train.request import RunRequest


@pytest.fixture
def client() -> Iterator[Callable[[], Store]]:
    """Connects to one store, which outlives the ranks, as that of a launcher does."""
    limit = timedelta(seconds=20)
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)
    yield lambda: TCPStore("localhost", server.port, is_master=False, timeout=limit)


def on_ranks(client: Callable[[], Any], work: Callable[[Any, RankPlace], Any], *restarts: int) -> list[Any]:
    """What each rank's work returns or raises; restarts: what each launcher has counted."""
    size = len(restarts)
    found: list[Any] = [None] * size

    def rank(number: int) -> None:
        try:
            found[number] = work(client(), RankPlace(number, size, 0, 1, restarts[number]))
        except Exception as error:  # noqa: BLE001  the test looks at it
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_meet_again_although_their_launchers_counted_different_restarts(
    client: Callable[[], Store],
) -> None:
    assert on_ranks(client, _attempt, 0, 0, 0) == [1, 1, 1]
    # A rank that died while it asked, or even before it said under which name.
    store = client()
    store.set(f"asking/{store.add('asking', 1)}", "dead")
    store.add("asking", 1)
    assert on_ranks(client, _attempt, 0, 1, 0) == [2, 2, 2]
    assert on_ranks(client, _attempt, 1, 2, 0) == [3, 3, 3]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "runs" / "it")
    found.path.mkdir(parents=True)
    found.events.touch()
    return found


def test_a_restart_keeps_the_checkpoint_that_was_asked_for_until_there_is_a_new_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(run.checkpoints, 9)
    run.checkpoints.mkdir()
    began = time.time()
    for step in (100, 200):
        with monkeypatch.context() as earlier:
            earlier.setattr(time, "time", lambda step=step: began - 300 + step)
            store.save(step, {"step": step}, None, True)
    request = RunRequest(read(workload="chartext"), run.path.parent, resume=run, from_step=100)
    again = RankPlace(0, 2, 0, 2, restart=1, begun_t=began)
    assert _launched(request, replace(again, restart=0)) == request
    assert _launched(request, again).from_step == 100
    store.save(120, {"step": 120}, None, True)
    assert _launched(request, again).from_step is None


def test_a_restarted_resume_without_a_checkpoint_does_not_begin_anew(run: RunDir) -> None:
    request = RunRequest(read(workload="chartext"), run.path.parent, resume=run)
    assert _launched(request, RankPlace(0, 2, 0, 2, restart=1)) == request


def test_what_one_rank_cannot_do_ends_all_with_its_reason(client: Callable[[], Store]) -> None:
    def work(store: Store, place: RankPlace) -> int | None:
        def make() -> int:
            if place.rank == 2:
                raise UsageError("no such file")
            return place.rank

        return from_others(store, place, "made", make)

    first, second, third = on_ranks(client, work, 0, 0, 0)
    assert second == 1
    assert isinstance(third, UsageError) and isinstance(first, UsageError)
    assert str(first).startswith("rank 2 (") and str(first).endswith(str(third))


def test_a_rank_that_does_not_see_the_folder_of_the_run_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_run, "SEEN_S", 0.0)
    training: Any = None
    with pytest.raises(UsageError, match="file system"):
        rank_run._open_other(training, RunDir(tmp_path / "run"), RankPlace(1, 2, 0, 1))
    assert not (tmp_path / "run").exists()


# The GPU of each rank.


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("gpus")
def test_each_rank_of_a_host_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device_of("auto", RankPlace(rank, 4, rank % 2, 2)) for rank in range(4)] == [
        "cuda:0",
        "cuda:1",
    ] * 2
    assert device_of("cpu", RankPlace(1, 2, 1, 2)) == "cpu"
    assert device_of("cuda:1", RankPlace(1, 2, 0, 1)) == "cuda:1"  # the only rank of its host
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # a cluster shows each process its own
    assert device_of("cuda", RankPlace(1, 2, 1, 2)) == "cuda:0"
    assert device_of("cuda:0", RankPlace(1, 2, 1, 2)) == "cuda:0"


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("asked", "place", "named"),
    [("auto", RankPlace(2, 3, 2, 3), "2 GPUs"), ("cuda:1", RankPlace(2, 4, 0, 2), "run.device")],
)
def test_a_rank_without_a_gpu_of_its_own_is_a_usage_error(asked: str, place: RankPlace, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        device_of(asked, place)


def test_two_ranks_with_the_same_gpu_or_none_cannot_train_together() -> None:
    a, b = Used("a", "cuda", "GPU-1"), Used("a", "cuda", "GPU-2")
    assert conflict([a, b, Used("b", "cuda", "GPU-1")]) == ""
    assert conflict([Used("a", "cpu")] * 2) == ""
    assert "ranks 0 and 2" in conflict([a, b, a])
    text = conflict([a, Used("b", "cpu")])
    assert "rank 0 (on a)" in text and "rank 1 (on b)" in text


def test_all_ranks_learn_of_it_and_only_rank_0_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "used", lambda _device: Used("a", "cuda", "GPU-1"))

    def meet(_store: Any, place: RankPlace) -> None:
        run: Any = SimpleNamespace(stage=lambda _text: None, control=SimpleNamespace(stopping=False))
        store: Any = None
        world._meet(run, OtherRanks(place, store, FolderNotes(tmp_path)), torch.device("cpu"))

    first, second = on_ranks(lambda: None, meet, 0, 0)
    assert isinstance(first, UsageError) and "ranks 0 and 1" in str(first)
    assert isinstance(second, OtherRankError)
    assert (str(second), second.exit_status) == (str(first), 2)


# Agreements between steps.

RANKS = 3


class Ranks:
    """Threads that stand for ranks, which meet in each step and in each agreement. Time is made up.

    delay_s: by how much a rank's clock is behind that of the ranks before it.
    """

    def __init__(
        self, client: Callable[[], Store], monkeypatch: pytest.MonkeyPatch, delay_s: float = 0.0
    ) -> None:
        self._here = threading.local()
        self._barrier = threading.Barrier(RANKS)
        self._sent: list[torch.Tensor] = [torch.empty(0)] * RANKS
        self._delay_s = delay_s
        monkeypatch.setattr(rank_loop, "time", SimpleNamespace(perf_counter=self._now))
        monkeypatch.setattr(dist, rank_loop.GATHER, self._gather, raising=False)
        self._stores = [client() for _ in range(RANKS)]

    def _now(self) -> float:
        return float(self._here.s)

    def _gather(self, every: torch.Tensor, mine: torch.Tensor, group: object) -> None:
        self._sent[self._here.rank] = mine
        self._barrier.wait(LIMIT_S)
        every.copy_(torch.cat(self._sent))
        self._barrier.wait(LIMIT_S)

    def train(
        self, steps: int, slow_from: int = 10**6, asks: str = "", meets: bool = False
    ) -> list[list[Any]]:
        """(step, seconds, what was asked for, losses) of each agreement that was due, by rank.

        slow_from: from this step on, each takes 0.2 s instead of 0.01. asks: what the ranks after the first want.
        meets: all ranks meet after every step.
        """
        with ThreadPoolExecutor(RANKS) as pool:
            each = [
                pool.submit(self._rank, rank, steps, slow_from, {asks} - {""} if rank else set(), meets)
                for rank in range(RANKS)
            ]
            return [future.result(60) for future in each]

    def _rank(self, rank: int, steps: int, slow_from: int, asks: set[str], meets: bool) -> list[Any]:
        self._here.s, self._here.rank = -rank * self._delay_s, rank
        world: Any = SimpleNamespace(
            rank=rank, size=RANKS, store=self._stores[rank], control=None, device=torch.device("cpu"),
            place=SimpleNamespace(first=rank == 0),
        )  # fmt: skip
        agreement, found = Agreement(world, 1.0), []
        agreement.begin(0)
        for step in range(1, steps + 1):
            self._barrier.wait(LIMIT_S)  # the exchange of gradients
            time.sleep(0.001 * ((rank + step) % 3))
            self._here.s += 0.2 if step > slow_from else 0.01
            if agreement.due(step):
                asked, losses = agreement.now(step, asks, Losses(rank, 1.0, float(rank)))
                found.append((step, self._here.s + rank * self._delay_s, dict(asked), losses))
            if meets:
                agreement.now(step, asks, Losses())
        return found


@pytest.mark.parametrize("meets", [False, True])
def test_all_ranks_agree_about_once_a_second_after_the_same_steps(
    client: Callable[[], Store], monkeypatch: pytest.MonkeyPatch, meets: bool
) -> None:
    """Also if they meet after every step beside, as with checkpoint.every_steps = 1."""
    first, *others = Ranks(client, monkeypatch).train(400, asks="pause", meets=meets)
    assert all(found == first for found in others)
    assert [step for step, *_ in first] == [1, 3, 7, 15, 31, 63, 127, 227, 327]
    assert all(asked == {"pause": 1} for _, _, asked, _ in first)
    assert all(losses == Losses(3.0, 3.0, 1.0) for *_, losses in first)


@pytest.mark.parametrize("delay_s", [0.0, 0.07])
def test_if_steps_become_slow_suddenly_the_ranks_agree_within_two_seconds(
    client: Callable[[], Store], monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    # A hundred times as slow would put off the next agreement for more than a minute.
    ranks = Ranks(client, monkeypatch, delay_s)
    first, *others = ranks.train(260, slow_from=230)
    assert all([step for step, *_ in found] == [step for step, *_ in first] for found in others)
    times = [seconds for _, seconds, *_ in first]
    assert max(after - before for before, after in pairwise(times)) <= 2.0
    assert times[-1] > 2.3 + 4
