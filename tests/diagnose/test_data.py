"""A wait for data: which cause it has, what is offered to try, or why there is nothing; and the items themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from planted_runs import GIB, MS, Planted, alone, cores, data, files, healthy, own, profiled, script, seen

from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.record.events import FunctionsEvent, LoaderEvent, StacksEvent

WAITS = (
    "data-wait", "few-workers", "many-workers", "slow-storage", "on-the-fly", "item-collate", "in-memory-workers",
)  # fmt: skip
LOADERS: dict[str, LoaderEvent | None] = {
    "unknown": None, "in memory": data(), "slow gather": data(gather_ns=4e7), "no gather": data(gather_ns=None),
    "files": files(), "random": files(epochs_differ=True), "stream": files(stream=True), "many": files(items=10**8),
    "storage": files(item_cpu_ns=1e5), "quick": files(item_ns=2e4, item_cpu_ns=2e4), "cached": files(encoded=1000),
    "computed": data(item_ns=3e6, item_cpu_ns=3e6, gather_ns=None),
}  # fmt: skip
HOSTS: dict[str, Any] = {
    "unknown": None, "free": cores(1.0, 1.0), "full": cores(2.0, 2.0),
    "shared": cores(2.0, 1.0, neighbours=[{"pid": 7, "name": "stress", "cores": 0.9}]),
}  # fmt: skip
SETS = (
    (), ("loader.workers=2",), ("loader.workers=4",), ("loader.fetch=item",), ("loader.cache=true",),
    ("loader.workers=2", "loader.fetch=item", "loader.prefetch=16", "loader.in_order=false"),
)  # fmt: skip
KNOWN = {"by_item": True, "items": 1000, "batch_bytes": 32 * 4096}
SCRIPTS: dict[str, dict[str, Any]] = {
    "nothing known": {}, "stream": {"by_item": False}, "items": KNOWN, "random": {**KNOWN, "random": ["a.py", 3]},
    "many": {**KNOWN, "items": 10**8},
}  # fmt: skip
WAITING = healthy(data_wait=10.0)
RESTARTS = {**WAITING, "data_wait/first_batch": 8.0}


def told(run: Planted) -> Finding | None:
    return next((one for one in run.found() if one.cause in WAITS), None)


def offered(found: Finding) -> set[str]:
    """All settings that the finding proposes."""
    return {item for change in found.changes for item in change.sets}


def words(found: Finding) -> str:
    return " ".join([*(item.text for item in found.evidence), *(change.text for change in found.changes)])


def waiting(
    loader: dict[str, Any],
    facts: dict[str, Any] | None = None,
    median_ns: int | None = None,
    by_item: bool = True,
    **more: Any,
) -> dict[str, Finding]:
    """The findings, by their cause, of a script that waits for its loader. median_ns: of the waits."""
    known = {"loader": ["train.py", 12], "by_item": by_item, **(facts or {})}
    snapshot = script(known, loader, **{"phases": WAITING, **more}).snapshot()
    if median_ns is not None:
        phases = [
            replace(phase, p50_ns=median_ns) if phase.name == "data_wait" else phase
            for phase in snapshot.phases
        ]
        snapshot = replace(snapshot, phases=tuple(phases))
    return {item.cause: item for item in diagnose(snapshot)}


# What is offered.


@pytest.mark.parametrize(("loader", "host"), product(LOADERS, HOSTS))
def test_of_a_run_of_ones_own(loader: str, host: str) -> None:
    for sets in SETS:
        phases = healthy(data_wait=20.0)
        found = told(
            own(phases=phases, loader=LOADERS[loader], host=HOSTS[host], sets=sets, baseline=alone())
        )
        assert found is None or found.sets, (sets, found)
        assert (
            found is None or loader not in ("random", "stream") or "loader.cache=true" not in offered(found)
        )


@pytest.mark.parametrize(("facts", "host"), product(SCRIPTS, HOSTS))
def test_of_a_script(facts: str, host: str) -> None:
    for loader in ({"workers": 0}, {"workers": 2}, {"workers": 4}, {"workers": 0, "fetch": "item"}):
        found = told(script(SCRIPTS[facts], loader, phases=healthy(data_wait=20.0), host=HOSTS[host]))
        assert found is not None and found.sets
        if facts == "random":
            assert "loader.cache=true" not in offered(found)
            assert found.cause != "data-wait" or "(a.py:3)" in words(found)


def test_where_there_is_no_loader_the_finding_says_so() -> None:
    found = script(phases=WAITING).named("data-wait")
    assert not found.sets and "no DataLoader" in words(found)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (files(epochs_differ=True), "items change, as by random augmentation"),
        (files(stream=True), "which cannot be cached"),
        (files(items=10**8), "of 16.0 GiB of free memory"),
    ],
)
def test_why_items_of_ones_own_are_not_cached(loader: LoaderEvent, why: str) -> None:
    run = own(phases=healthy(data_wait=20.0), loader=loader, host=cores(2.0, 2.0), baseline=alone())
    assert why in words(run.named("data-wait"))


@pytest.mark.parametrize("cpu_ns", [2e4, 3e5])
def test_items_that_wait_for_a_core_are_not_in_slow_storage(cpu_ns: float) -> None:
    phases = healthy(data_wait=20.0)
    slow = files(item_cpu_ns=cpu_ns, item_delay_ns=0.0)
    assert Planted(phases=phases, loader=slow).verdict().cause == "slow-storage"
    # The same times where other processes used the cores while the items were measured.
    crowded = files(item_cpu_ns=cpu_ns, item_delay_ns=0.99e6 - cpu_ns)
    assert "slow-storage" not in Planted(phases=phases, loader=crowded).causes()
    # Without a measured delay, a busy machine has no slow storage.
    items = files(item_cpu_ns=3e5)
    for used in (1.2, 2.0):
        run = Planted(phases=phases, loader=items, host=cores(used, 1.0))
        assert ("slow-storage" in run.causes()) == (used < 2)


@pytest.mark.parametrize(("used", "cause"), [(1.9, "many-workers"), (0.4, "data-wait")])
def test_workers_beyond_the_cores_are_too_many_unless_they_wait(used: float, cause: str) -> None:
    run = script(None, {"workers": 8}, {"threads": 1}, phases=WAITING, host=cores(used, used))
    assert run.verdict().cause == cause


@pytest.mark.parametrize("neighbours", [None, [{"pid": 7, "name": "stress", "cores": 0.9}]])
def test_the_number_of_workers_is_not_blamed_for_a_busy_machine(neighbours: Any) -> None:
    host = cores(2.0, 1.1, neighbours=neighbours)
    run = script(None, {"workers": 8}, {"threads": 1}, phases=WAITING, host=host)
    assert run.verdict().cause == "data-wait"
    few = files(epochs_differ=True, item_ns=1e5, item_cpu_ns=1e5)
    own_run = Planted(phases=WAITING, sets=["loader.workers=8"], loader=few)
    assert "many-workers" in own_run.causes()
    assert "many-workers" not in replace(own_run, host=host).causes()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wait_for_items_offers_a_cache_to_try(workers: int) -> None:
    loader = {"workers": workers, "persistent": False}
    found = waiting(loader)["data-wait"]
    assert found.sets[0] == "loader.cache=true" and ("loader.workers=0" in found.sets) == bool(workers)
    # Nothing that can be cached: a stream, or batches that are read as they are.
    assert "loader.cache=true" not in waiting(loader, by_item=False)["data-wait"].sets


def test_items_that_take_longer_than_a_trial_may_are_not_cached() -> None:
    long = {"phases": healthy(data_wait=1000.0)}
    assert "loader.cache=true" not in waiting({"workers": 0}, **long)["data-wait"].sets
    # The second pass over the data has begun, so that reading all of it took less.
    again = waiting({"workers": 0}, window={"passes": 1}, run={"items_per_step": 1}, **long)
    assert "loader.cache=true" in again["data-wait"].sets


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"random": ["train.py", 8]}, "train.py:8"),
        ({"items": 100_000_000, "batch_bytes": 8 << 20}, "memory"),
        ({"items": 2_000_000, "batch_bytes": 8}, "reading all"),
        ({"items": 1000, "batch_bytes": 8 << 10}, ""),
    ],
)
def test_a_cache_is_refused_with_the_reason(facts: dict[str, Any], why: str) -> None:
    host = {**cores(1.2, 1.0), "memory_available_bytes": 8 * GIB}
    loader = {"workers": 0, "persistent": False}
    found = waiting(loader, facts, host=host, run={"items_per_step": 8})["data-wait"]
    assert ("loader.cache=true" in offered(found)) == (not why) and why in words(found)


def test_a_tensor_dataset_is_indexed_in_whole_batches() -> None:
    assert waiting({"workers": 0, "fetch": "item"})["data-wait"].sets == ("loader.fetch=auto",)
    assert "loader.fetch=auto" not in offered(waiting({"workers": 0, "persistent": False})["data-wait"])


def test_batches_that_come_late_now_and_then_are_loaded_ahead_or_in_any_order() -> None:
    for workers in (1, 2):
        found = waiting({"workers": workers, "persistent": True}, median_ns=MS // 10)["data-wait"]
        assert "loader.prefetch=8" in offered(found) or workers == 1
        assert ("loader.in_order=false" in offered(found)) == (workers == 2)


def test_a_stream_gets_one_worker_and_quick_batches_get_none() -> None:
    stream = waiting({"workers": 0}, by_item=False, run={"usable_cores": 8.0})["data-wait"]
    assert stream.sets == ("loader.workers=1",)
    quick = {name: ms / 20 for name, ms in WAITING.items()}
    found = waiting({"workers": 2}, by_item=False, phases=quick, windows=120)["data-wait"]
    assert found.sets[0] == "loader.workers=0"


# Workers and epochs.


@pytest.mark.parametrize(
    ("persistent", "passes", "cause"),
    [(False, 0, "worker-restart"), (True, 5, "short-epochs"), (True, 0, "data-wait")],
)
def test_epochs_that_begin_late_are_those_of_new_workers_or_short(
    persistent: bool, passes: int, cause: str
) -> None:
    loader = {"workers": 2, "persistent": persistent}
    found = waiting(loader, phases=RESTARTS, window={"passes": passes})
    assert {"worker-restart", "short-epochs", "data-wait"} & set(found) == {cause}
    assert cause != "worker-restart" or found[cause].sets == ("loader.persistent=true",)
    assert cause != "short-epochs" or "4 steps" in found[cause].title


@pytest.mark.parametrize("sampler", ["RandomSampler", "SequentialSampler"])
def test_an_iterator_for_each_batch(sampler: str) -> None:
    facts, loader = {"wasted": ["train.py", 30], "sampler": sampler}, {"workers": 2, "persistent": False}
    found = waiting(loader, facts, phases=RESTARTS, window={"passes": 20})
    assert found["iterator-restart"].changes[0].where == "train.py:30" and "worker-restart" not in found
    assert ("repeated-items" in found) == (sampler == "SequentialSampler")
    # A script that takes one batch this way, to look at it.
    few = waiting(loader, facts, phases=RESTARTS, window={"passes": 1})
    assert not {"iterator-restart", "repeated-items"} & set(few)


BATCHES = [[1, 1, 3], [2, 0, 5], [3, 1, 5], [4, 0, 6], [5, 1, 6], [6, 0, 7], [7, 1, 7]]


@pytest.mark.parametrize(
    ("batches", "workers", "found"),
    [
        (BATCHES, 2, True),
        ([[number, worker, number] for number, worker, _ in BATCHES], 2, False),  # divided
        ([[number, worker, 1] for number, worker, _ in BATCHES], 2, False),  # constant data
        ([[number, -1, checksum] for number, _, checksum in BATCHES], 2, False),  # in any order
        (BATCHES[:3], 2, False),  # one comparison may be chance
        (BATCHES, 3, False),
    ],
)
def test_workers_that_give_the_same_batches(batches: list[list[int]], workers: int, found: bool) -> None:
    facts = {"batches": batches, "dataset": "Clips", "reads": ["/home/me/train.py", 7, "Clips.__iter__"]}
    told = script(facts, {"workers": workers}).found()
    assert (told[0].cause == "repeated-items") == found
    if found:
        assert "2 times" in told[0].title and "Clips" in told[0].title and told[0].confidence == "certain"
        assert told[0].changes[0].where == "train.py:7 in Clips.__iter__"


def test_ranks_that_read_the_same_data() -> None:
    found = script({"same_ranks": [0, 1], "by_item": True}).verdict()
    assert found.cause == "repeated-items" and "DistributedSampler" in found.changes[0].text


# The code that makes the items.

READS = {"reads": ["/home/me/train.py", 15, "Table.__getitem__"]}


def test_the_line_of_the_dataset_is_named() -> None:
    """By a profiled step, or by many stack samples in one line, in old records."""
    step = profiled(("data_wait", "/home/me/mine.py", 12, "Clips.__getitem__", 18.0))
    looks = seen(("data_wait", "/home/me/mine.py", 12, "Clips.__getitem__", 40, 1))
    for known in ({"functions": step}, {"stacks": looks}):
        found = Planted(phases=healthy(data_wait=20.0), **known).verdict()  # type: ignore[arg-type]
        assert found.changes[-1].where == "mine.py:12 in Clips.__getitem__"
        assert any("mine.py:12" in item.text for item in found.evidence)
    # In a worker, only what it tells shows it.
    found = Planted(phases=healthy(data_wait=20.0), sets=["loader.workers=2"]).verdict()
    assert any("not known" in item.text for item in found.evidence)


def test_waiting_for_data_names_the_function_once() -> None:
    step = profiled(("", "/home/me/train.py", 12, "tokenize", 9.0))
    (found,) = script(None, {"workers": 0}, phases=WAITING, functions=step).found()
    assert found.cause == "data-wait"
    assert any((change.where or "").startswith("train.py:12 ") for change in found.changes)


@pytest.mark.parametrize(
    ("line", "function", "frames", "where"),
    [
        # The line that waits for a batch is not where less work is to be done.
        (30, "main", {"backward": 5}, "train.py:15 in Table.__getitem__"),
        (40, "decode", {}, "train.py:40 in decode"),
    ],
)
def test_the_line_that_waits_is_not_that_which_makes_a_batch(
    line: int, function: str, frames: dict[str, int], where: str
) -> None:
    rows = [["data_wait", "/home/me/train.py", line, function, 30, 1]]
    rows += [[phase, "/home/me/train.py", line + 2, function, count, 1] for phase, count in frames.items()]
    stacks = StacksEvent(100, sum(row[4] for row in rows), rows)  # type: ignore[misc]
    assert waiting({"workers": 0}, READS, stacks=stacks)["data-wait"].changes[-1].where == where


def test_a_library_that_makes_the_items_is_named_with_the_line_that_calls_it() -> None:
    row = ["/home/me/train.py", 15, "Table.__getitem__", 64, 10 * MS, 10 * MS, "", "data_wait"]
    place = ["/home/me/train.py", 20, "Table.__getitem__"]

    def found(ms: int, *more: list[Any]) -> Finding:
        call = [*place, "_LocationIndexer.__getitem__", "pandas", 128, ms * MS, "data_wait"]
        step = FunctionsEvent(100, 30 * MS, [row], phases={"data_wait": 10 * MS}, calls=[call, *more])
        return waiting({"workers": 0}, READS, functions=step)["data-wait"]

    pandas = found(6, [*place, "Series.__getitem__", "pandas", 64, 2 * MS, "data_wait"])
    assert "iloc" in pandas.title and "train.py:20 in Table.__getitem__" in pandas.title
    assert pandas.changes[-1].where == "train.py:20 in Table.__getitem__"
    # A function that takes its time by itself is named itself.
    assert "pandas" not in found(1).title
