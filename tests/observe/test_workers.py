"""What a loader's worker tells of itself: driven here through the queues that torch hands to it."""

from __future__ import annotations

import gc
import multiprocessing.process
import queue
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from ndd_engine.measure.worker_watch import WorkerWatch
from ndd_engine.record.worker_events import WorkersEvent
from ndd_engine.train.data.item_sources import Collated, ItemSource
from ndd_watch import mapped
from ndd_watch.mapped import pss_bytes
from ndd_watch.probes import Probes
from ndd_watch.sheet import SUFFIX, Sheet, read
from ndd_watch.worker_profile import BatchProfiles
from ndd_watch.workers import SLOWEST, Worker, begin, watched

assert multiprocessing.process


class Indices:
    """A queue of lists of indices."""

    def __init__(self, batches: list[Any]) -> None:
        self.waiting = deque(enumerate(batches))

    def get(self, timeout: float | None = None) -> Any:
        return self.waiting.popleft() if self.waiting else None


class Sent:
    """A queue of batches."""

    def __init__(self) -> None:
        self._thread, self._buffer, self._wlock = None, deque[Any](), Lock()
        self.batches: list[Any] = []

    def put(self, item: Any) -> None:
        self._buffer.append(item)
        self.batches.append(self._buffer.popleft())
        self._wlock.acquire()
        self._wlock.release()


class Items:
    """Items by index, of which one takes longer."""

    def __init__(self, slow: int = -1) -> None:
        self.slow = slow

    def __getitem__(self, index: int) -> int:
        if self.slow >= 0:
            time.sleep(0.03 if index == self.slow else 0.001)
        return index * 2


class Whole(Items):
    """Items of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        assert type(indices) is list
        return [index * 2 for index in indices]


def works(
    folder: Path, dataset: Any, batches: list[Any], alone: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """What torch's function of a worker does: the batches that it sends, and what the worker told."""
    indices, sent = Indices(batches), Sent()
    given = {
        "dataset_kind": 0, "dataset": dataset, "index_queue": indices, "data_queue": sent, "auto_collation": not alone,
        "collate_fn": list, "base_seed": 5, "worker_id": 1, "num_workers": 2,
    }  # fmt: skip
    Worker(str(folder), given).begin()
    while (found := indices.get(timeout=5)) is not None:
        number, chosen = found
        if alone:
            data = dataset[chosen]
        elif (together := getattr(dataset, "__getitems__", None)) is not None:
            data = together(chosen)
        else:
            data = [dataset[index] for index in chosen]
        sent.put((number, data))
    (path,) = folder.glob(f"*{SUFFIX}")
    told = read(path.read_bytes())
    assert told is not None
    return sent.batches, told[0]


@pytest.fixture(autouse=True)
def _each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is looked at, whatever that takes."""
    monkeypatch.setattr("ndd_watch.workers.SHARE", 1.0)


def lists(count: int, size: int = 4) -> list[list[int]]:
    return [list(range(size * number, size * (number + 1))) for number in range(count)]


def test_the_slowest_item_is_told_by_its_index_and_batches_are_the_same(tmp_path: Path) -> None:
    batches, told = works(tmp_path, Items(slow=21), lists(12))
    assert batches == [(number, [2 * index for index in chosen]) for number, chosen in enumerate(lists(12))]
    # On a busy machine, another item may take longer.
    slow = {index: ns for ns, index in told["slow"]}
    assert slow["21"] >= 30_000_000
    assert len(told["slow"]) <= SLOWEST
    assert told["batches"] == 12
    assert told["fetch_ns"] < told["wall_ns"]


@pytest.mark.parametrize(
    ("dataset", "apart"), [(Items(), True), (Whole(), False), (Subset(Items(), range(100)), True),
                           (Subset(Whole(), range(100)), False)],
)  # fmt: skip
def test_only_what_reads_item_by_item_gets_another_iterable(
    tmp_path: Path, dataset: Any, apart: bool
) -> None:
    batches, told = works(tmp_path, dataset, lists(6))
    assert [batch for _, batch in batches] == [[2 * index for index in chosen] for chosen in lists(6)]
    assert told["by_item"] is apart


def test_a_slow_batch_that_is_read_at_once_is_told_by_whole_indices(tmp_path: Path) -> None:
    chosen = list(range(12_345_670, 12_345_690))
    _, told = works(tmp_path, Whole(), [chosen])
    assert [name for _, name in told["slow"]] == ["12345670, 12345671, 12345672, 12345673, ..."]


@pytest.mark.parametrize(("data", "apart"), [(Items(slow=21), True), (Whole(slow=21), False)])
def test_items_of_own_training_are_known_by_their_index(tmp_path: Path, data: Any, apart: bool) -> None:
    source = ItemSource(data, list, None, None, torch.device("cpu"), None)
    batches, told = works(tmp_path, Collated(source), lists(12))
    assert [batch for _, batch in batches] == [[2 * index for index in chosen] for chosen in lists(12)]
    assert told["by_item"] is apart
    assert ("21" in [index for _, index in told["slow"]]) is apart


def test_indices_that_are_no_list_are_handed_on(tmp_path: Path) -> None:
    batches, told = works(tmp_path, Items(), [7, 8, 9], alone=True)
    assert [batch for _, batch in batches] == [14, 16, 18]
    assert not told["by_item"]


def test_short_batches_are_looked_at_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ndd_watch.workers.SHARE", 0.002)
    batches, told = works(tmp_path, Items(), lists(400))
    assert [number for number, _ in batches] == list(range(400))
    assert told["looked"] < 100 and told["every"] > 4


@pytest.mark.parametrize(
    ("indices", "shown"),
    [([4, 5], "4, 5"), (list(range(40)), "0, 1, 2, 3, 4, 5, 6, 7, ..."), (["a", 5], "a, 5"), ([], ""),
     ([1 << 70], str(1 << 70)), ([object()], "object"), (7, "7"), (None, "")],
)  # fmt: skip
def test_what_a_worker_makes_can_be_read_at_any_moment(tmp_path: Path, indices: Any, shown: str) -> None:
    sheet = Sheet(str(tmp_path), "one")
    sheet.tell("{}")
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    sheet.doing(3, 99, [0] * 8)
    sheet.doing(4, 100, indices)
    assert read(path.read_bytes()) == ({}, 4, 100, shown)
    sheet.rests()
    assert read(path.read_bytes()) == ({}, 4, 0, shown)


def test_a_batch_that_is_not_looked_at_is_told_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ndd_watch.workers.SHARE", 1e-9)
    seen: list[Any] = []

    class Reads(Items):
        def __getitem__(self, index: int) -> int:
            (path,) = tmp_path.glob(f"*{SUFFIX}")
            _, batch, begun, shown = read(path.read_bytes()) or ({}, -1, 0, "")
            seen.append((index, batch, bool(begun), shown))
            return index

    works(tmp_path, Reads(), lists(6, 1))
    assert seen == [(index, index, True, str(index)) for index in range(6)]


def test_nothing_is_observed_in_the_process_that_trains(tmp_path: Path) -> None:
    begin(str(tmp_path), {})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_costs_the_observation_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.process, "parent_process", lambda: object())
    begin(str(tmp_path / "gone"), {"worker_id": 0})


def later_loop(
    dataset_kind: int, dataset_holder: list[Any], index_queue: Any, data_queue: Any, auto_collation: bool,
    collate_fn: Any, base_seed: int, worker_id: int, num_workers: int,
) -> None:  # fmt: skip
    """What torch's function of a worker is from 2.14 on: the dataset is no argument."""
    dataset = dataset_holder.pop()
    while (found := index_queue.get(timeout=5)) is not None:
        data_queue.put((found[0], [dataset[index] for index in found[1]]))


def another_loop(dataset_holder: list[int]) -> int:
    dataset = dataset_holder.pop()
    return dataset + 1


@pytest.mark.parametrize("held", [1, 0])
def test_a_dataset_in_a_list_is_observed_and_an_empty_list_is_torchs_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(multiprocessing.process, "parent_process", lambda: SimpleNamespace(pid=1))
    probes = Probes()
    assert watched(probes, later_loop, lambda: str(tmp_path))
    sent = Sent()
    try:
        with nullcontext() if held else pytest.raises(IndexError, match="pop from empty list"):
            later_loop(0, [Items()] * held, Indices(lists(6)), sent, True, list, 5, 1, 2)
    finally:
        probes.remove()
    assert [batch for _, batch in sent.batches] == [[2 * index for index in one] for one in lists(6)] * held
    assert len([*tmp_path.glob(f"*{SUFFIX}")]) == held


def test_a_function_without_these_arguments_is_left_alone(tmp_path: Path) -> None:
    before = another_loop.__code__
    assert not watched(Probes(), another_loop, lambda: str(tmp_path))
    assert another_loop.__code__ is before and another_loop([7]) == 8


def test_what_get_raises_reaches_torch(tmp_path: Path) -> None:
    class Empty(Indices):
        def get(self, timeout: float | None = None) -> Any:
            raise queue.Empty

    indices, sent = Empty([]), Sent()
    given = {
        "dataset_kind": 1, "dataset": iter(()), "index_queue": indices, "data_queue": sent, "auto_collation": True,
        "collate_fn": list, "base_seed": 5, "worker_id": 0, "num_workers": 1,
    }  # fmt: skip
    Worker(str(tmp_path), given).begin()
    with pytest.raises(queue.Empty):
        indices.get(timeout=1)


def test_the_reader_adds_up_what_workers_told(tmp_path: Path) -> None:
    works(tmp_path, Items(slow=21), lists(12))
    watch = WorkerWatch(tmp_path)
    event = _only(watch.look([5], 3, final=True))
    (worker,) = event.workers
    assert (event.step, worker.number, worker.batches, worker.items) == (3, 1, 12, 48)
    assert "21" in [index for _, index in worker.slow]
    assert worker.item_ns[0] <= worker.item_ns[1] <= worker.item_ns[2]
    assert len(event.batch_quantiles_ns) == 20


def test_workers_of_other_loaders_are_left_out(tmp_path: Path) -> None:
    works(tmp_path, Items(), lists(12))
    assert list(WorkerWatch(tmp_path).look([6], 3, final=True)) == []


def test_a_file_that_is_none_is_left_out(tmp_path: Path) -> None:
    (tmp_path / f"worker-1{SUFFIX}").write_bytes(b"\x01" * (1 << 15))
    (tmp_path / f"worker-2{SUFFIX}").write_bytes(b"")
    assert list(WorkerWatch(tmp_path).look([], 3, final=True)) == []


def _only(events: Iterator[WorkersEvent]) -> WorkersEvent:
    (event,) = events
    return event


def light() -> int:
    return sum(range(100))


def cleans() -> None:
    gc.collect()


def allocates() -> list[list[int]]:
    return [[number] for number in range(3000)]


@pytest.mark.parametrize("asked", [True, False])
def test_a_collection_that_comes_by_itself_is_no_part_of_a_function(asked: bool) -> None:
    kept = [[number] for number in range(200_000)]  # what a collection goes through
    before, threshold = [*gc.callbacks], gc.get_threshold()
    profiles = BatchProfiles(None, None, 1)
    gc.set_threshold(*((0, 0, 0) if asked else (1000, 1, 1)))
    try:
        assert profiles.begin(2, 1e9, 10**9)
        light()
        begin = time.thread_time_ns()
        (cleans if asked else allocates)()
        took = time.thread_time_ns() - begin
        profiles.end(took, took, took)
    finally:
        gc.set_threshold(*threshold)
    assert gc.callbacks == before and len(kept) == 200_000
    spent = {row[2]: sum(row[6].values()) for row in profiles.fields()["functions"]}
    if asked:
        assert spent["cleans"] > 10 * spent["light"]
    else:
        assert spent.get("allocates", 0.0) < 0.5 * took


def test_a_worker_that_ends_while_its_memory_is_read_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux tells ESRCH for a file that was open before."""
    worker = subprocess.Popen(["sleep", "60"])
    assert pss_bytes(worker.pid)

    def opens(path: str, flags: int, opened: Any = mapped.opened) -> int:
        handle = int(opened(path, flags))
        worker.kill()
        worker.wait()
        return handle

    monkeypatch.setattr(mapped, "opened", opens)
    assert pss_bytes(worker.pid) is None
