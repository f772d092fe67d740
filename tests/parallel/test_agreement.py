"""Ranks agree after the same step, soon enough also if steps become slow suddenly, and on what any of them wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.waiting import LIMIT_S
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from ndd_engine.train.parallel import rank_loop as agreement_module
from ndd_engine.train.parallel.rank_loop import Agreement, Losses

RANKS = 3


class Ranks:
    """Threads that stand for ranks, which meet in each step and in each agreement. Time is made up.

    delay_s: by how much a rank's clock is behind that of the ranks before it.
    """

    def __init__(self, server: TCPStore, monkeypatch: pytest.MonkeyPatch, delay_s: float = 0.0) -> None:
        self._here = threading.local()
        self._barrier = threading.Barrier(RANKS)
        self._sent: list[torch.Tensor] = [torch.empty(0)] * RANKS
        self._delay_s = delay_s
        monkeypatch.setattr(agreement_module, "time", SimpleNamespace(perf_counter=self._now))
        monkeypatch.setattr(dist, agreement_module.GATHER, self._gather, raising=False)
        self._stores = [
            TCPStore(server.host, server.port, is_master=False, wait_for_workers=False) for _ in range(RANKS)
        ]

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


@pytest.fixture
def server() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_all_ranks_agree_about_once_a_second_after_the_same_steps(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = Ranks(server, monkeypatch).train(400, asks="pause")
    assert all(found == first for found in others)
    assert [step for step, *_ in first] == [1, 3, 7, 15, 31, 63, 127, 227, 327]
    assert all(asked == {"pause": 1} for _, _, asked, _ in first)
    assert all(losses == Losses(3.0, 3.0, 1.0) for *_, losses in first)


@pytest.mark.parametrize("delay_s", [0.0, 0.07])
def test_if_steps_become_slow_suddenly_the_ranks_agree_within_two_seconds(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    # A hundred times as slow would put off the next agreement for more than a minute.
    ranks = Ranks(server, monkeypatch, delay_s)
    first, *others = ranks.train(260, slow_from=230)
    assert all([step for step, *_ in found] == [step for step, *_ in first] for found in others)
    times = [seconds for _, seconds, *_ in first]
    assert max(after - before for before, after in pairwise(times)) <= 2.0
    assert times[-1] > 2.3 + 4


def test_the_ranks_may_meet_after_every_step_beside(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with checkpoint.every_steps = 1.
    first, *others = Ranks(server, monkeypatch).train(400, meets=True)
    assert all([step for step, *_ in found] == [step for step, *_ in first] for found in others)
    assert [step for step, *_ in first] == [1, 3, 7, 15, 31, 63, 127, 227, 327]
