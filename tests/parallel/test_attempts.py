"""How ranks meet: attempts of the launcher are told apart, and what fails on one rank ends all of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ndd_engine.config import read
from ndd_engine.errors import UsageError
from ndd_engine.record.rundir import RunDir
from ndd_engine.train import rank_run
from ndd_engine.train.checkpoint import CheckpointStore
from ndd_engine.train.parallel.place import Place
from ndd_engine.train.parallel.world import _attempt, from_others
from ndd_engine.train.rank_run import _launched
from ndd_engine.train.request import RunRequest

SIZE = 3


@pytest.fixture
def client() -> Iterator[Callable[[], Store]]:
    """Connects to one store, which outlives the ranks, as that of a launcher does."""
    limit = timedelta(seconds=20)
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)
    yield lambda: dist.TCPStore("localhost", server.port, is_master=False, timeout=limit)


def on_ranks(client: Callable[[], Store], work: Callable[[Store, Place], Any], *restarts: int) -> list[Any]:
    """What each rank's work returns or raises; restarts: what each launcher has counted."""
    found: list[Any] = [None] * SIZE

    def rank(number: int) -> None:
        try:
            found[number] = work(client(), Place(number, SIZE, 0, 1, restarts[number]))
        except Exception as error:  # noqa: BLE001  the test looks at it
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in reversed(range(SIZE))]
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


def test_a_restart_keeps_the_checkpoint_that_was_asked_for_until_there_is_a_new_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "it")
    run.path.mkdir(parents=True)
    run.events.touch()
    store = CheckpointStore(run.checkpoints, 9)
    run.checkpoints.mkdir()
    began = time.time()
    for step in (100, 200):
        saved = store.save(step, {"format": 1, "step": step}, None, True)
        body = json.loads(saved.description.read_text())
        saved.description.write_text(json.dumps(body | {"t": began - 300 + step}))
    request = RunRequest(read(workload="chartext"), tmp_path / "runs", resume=run, from_step=100)
    again = Place(0, 2, 0, 2, restart=1, begun_t=began)
    assert _launched(request, replace(again, restart=0)) == request
    assert _launched(request, again).from_step == 100
    store.save(120, {"format": 1, "step": 120}, None, True)
    assert _launched(request, again).from_step is None


def test_a_restarted_resume_without_a_checkpoint_does_not_begin_anew(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "it")
    run.path.mkdir(parents=True)
    run.events.touch()
    request = RunRequest(read(workload="chartext"), tmp_path / "runs", resume=run)
    assert _launched(request, Place(0, 2, 0, 2, restart=1)) == request


def test_what_one_rank_cannot_do_ends_all_with_its_reason(client: Callable[[], Store]) -> None:
    def work(store: Store, place: Place) -> int | None:
        def make() -> int:
            if place.rank == 2:
                raise UsageError("no such file")
            return place.rank

        return from_others(store, place, "made", make)

    first, second, third = on_ranks(client, work, 0, 0, 0)
    assert second == 1
    assert isinstance(third, UsageError)
    assert isinstance(first, UsageError)
    assert str(first).startswith("rank 2 (")
    assert str(first).endswith("): no such file")


def test_a_rank_that_does_not_see_the_folder_of_the_run_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_run, "SEEN_S", 0.0)
    request: Any = None
    with pytest.raises(UsageError, match="must share the file system"):
        rank_run._other(request, RunDir(tmp_path / "run"), Place(1, 2, 0, 1))
    assert not (tmp_path / "run").exists()
