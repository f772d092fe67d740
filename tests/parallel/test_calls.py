"""Ranks that are called to vote: all of them after the same step, which none has passed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from ndd_engine.train.parallel import calls as calls_module
from ndd_engine.train.parallel.calls import Calls

RANKS, STEPS = 3, 60
ALL = -1


@pytest.fixture
def server() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def ranks(server: TCPStore) -> list[Calls]:
    """One for each rank, each with a connection of its own."""
    stores = [
        TCPStore(server.host, server.port, is_master=False, wait_for_workers=False) for _ in range(RANKS)
    ]
    return [Calls(store, rank, RANKS) for rank, store in enumerate(stores)]


def trained(calls: Calls, rank: int, together: threading.Barrier, callers: dict[int, int]) -> list[int]:
    """The steps after which this rank voted. The ranks meet in each step. callers: a rank by step, or ALL."""
    calls.start(0)
    voted = []
    for done in range(1, STEPS + 1):
        time.sleep(0.001 * (1 + (rank + done) % 3))
        together.wait(20)
        time.sleep(0.001 * ((rank * 2 + done) % 4))
        if callers.get(done) in (rank, ALL):
            calls.call()
        if calls.after_step(done):
            voted.append(done)
    calls.stop()
    return voted


def run(ranks: list[Calls], callers: dict[int, int]) -> list[list[int]]:
    together = threading.Barrier(RANKS)
    with ThreadPoolExecutor(RANKS) as pool:
        each = [pool.submit(trained, calls, rank, together, callers) for rank, calls in enumerate(ranks)]
        return [future.result(60) for future in each]


@pytest.mark.parametrize("callers", [{5: 0, 20: 1, 35: 2, 50: 1}, {7: ALL}])
def test_all_ranks_vote_after_the_same_step_soon_after_a_call(
    ranks: list[Calls], callers: dict[int, int]
) -> None:
    first, *others = run(ranks, callers)
    assert all(voted == first for voted in others)
    # On a busy machine the threads may need several steps, and two calls may become one vote.
    assert 0 < len(first) <= len(callers)
    assert first[0] >= min(callers)


def test_without_a_call_there_is_no_vote_and_a_call_in_the_last_step_keeps_nobody(ranks: list[Calls]) -> None:
    assert run(ranks, {}) == [[]] * RANKS
    assert run(ranks, {STEPS: 1}) == [[]] * RANKS
    # Training may begin again, as after a change of the settings in a trial.
    first, *others = run(ranks, {10: 2})
    assert len(first) == 1
    assert all(voted == first for voted in others)


def test_a_rank_that_does_not_answer_keeps_nobody(
    ranks: list[Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "ANSWER_S", 0.5)
    monkeypatch.setattr(ranks[2], "_work", lambda: None)  # as if its connection were lost
    assert run(ranks, {10: 0, 30: 1}) == [[]] * RANKS
