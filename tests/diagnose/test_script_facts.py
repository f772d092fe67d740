"""Rules that read what is told of a script besides its phases: each fires for its fault, not for its twin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from planted_runs import HEALTHY, Planted, cores

from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.record.events import FunctionsEvent, MarkEvent, StacksEvent, WindowEvent

MS = 1_000_000
MEMORY, GIB = 1 << 20, 1 << 30
# A window without a step.
EMPTY: dict[str, Any] = {
    "epoch": 0, "epoch_step": 0, "steps": 0, "micro_steps": 0, "items": 0, "tokens": 0, "wall_ns": 1,
    "step_p50_ns": None, "step_p95_ns": None, "step_max_ns": None, "phases": {"other": {"host_ns": 1}},
}  # fmt: skip


def findings(
    loader: Mapping[str, Any] | None = None,
    by_item: bool = True,
    script: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    median_ns: int | None = None,
    **more: Any,
) -> dict[str, Finding]:
    """The findings of a script by their cause. loader: settings of its DataLoader. script: more facts of it.

    run: more fields of the run's event. median_ns: of the waits for data.
    """
    facts = {
        "command": ["python", "train.py"],
        "loader": ["train.py", 12],
        "by_item": by_item,
        **(script or {}),
    }
    config: dict[str, Any] = {"script": facts, "batch": {"accumulation": 1, "micro": 8}}
    if loader is not None:
        config["loader"] = loader
    planted = Planted(run={"config": config, **(run or {})}, **more)
    snapshot = planted.snapshot()
    if median_ns is not None:
        phases = [
            replace(phase, p50_ns=median_ns) if phase.name == "data_wait" else phase
            for phase in snapshot.phases
        ]
        snapshot = replace(snapshot, phases=tuple(phases))
    return {item.cause: item for item in diagnose(snapshot)}


def recompiled(seconds: float, limit: bool = False) -> MarkEvent:
    data = {
        "graphs": 7, "seconds": seconds, "limit": limit, "reason": "bins == 7 (train.py:13 in forward)",
        "file": "/home/me/train.py", "line": 11, "function": "forward",
    }  # fmt: skip
    return MarkEvent("recompile", 40, "", data)


def test_recompilation_names_what_changes_and_where() -> None:
    found = findings(marks=[recompiled(1.5)])["recompile"]
    assert "bins" in found.title and found.share is not None and 0.1 < found.share < 0.4
    assert found.changes[0].where == "train.py:11 in forward" and not found.sets
    assert any("train.py:13" in item.text for item in found.evidence)
    assert "recompile" not in findings(marks=[recompiled(0.01)])


def test_a_function_that_is_compiled_no_more_is_told_however_short_the_compilations_were() -> None:
    found = findings(marks=[recompiled(0.01, limit=True)])["recompile"]
    assert "step 40" in found.title and found.ceiling is None
    slow = {"phases": {**HEALTHY, "data_wait": 8.0}}
    assert next(iter(findings(marks=[recompiled(0.01, limit=True)], **slow))) == "recompile"
    assert next(iter(findings(marks=[recompiled(1.5)], **slow))) == "data-wait"


def test_a_setting_is_not_offered_for_collections_that_the_script_asks_for() -> None:
    wait = ["/home/me/train.py", 20, "main", "collect", 1, 8 * MS]
    asked = FunctionsEvent(9, 28 * MS, [], [wait], {"other": 8 * MS})
    collecting = {"gc_ns": 160 * MS, "gc_count": 20, "gc_max_ns": 9 * MS}
    run = {"phases": {**HEALTHY, "other": 8.2}, "window": collecting}
    found = findings(functions=asked, **run)["gc"]
    assert not found.sets and found.changes[0].where == "train.py:20 in main"
    assert findings(**run)["gc"].sets[0].startswith("run.gc_every_steps=")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wait_for_items_offers_a_cache_to_try(workers: int) -> None:
    waiting = {"phases": {**HEALTHY, "data_wait": 10.0}}
    loader = {"workers": workers, "persistent": False}
    found = findings(loader, **waiting)["data-wait"]
    assert found.sets[0] == "loader.cache=true" and ("loader.workers=0" in found.sets) == bool(workers)
    # Nothing that can be cached: a stream, or batches that are read as they are.
    assert "loader.cache=true" not in findings(loader, by_item=False, **waiting)["data-wait"].sets


def test_items_that_take_longer_than_a_trial_may_are_not_cached() -> None:
    long = {"phases": {**HEALTHY, "data_wait": 1000.0}}
    assert "loader.cache=true" not in findings({"workers": 0}, **long)["data-wait"].sets
    # The second pass over the data has begun, so that reading all of it took less.
    again = {**long, "window": {"passes": 1}, "run": {"items_per_step": 1}}
    assert "loader.cache=true" in findings({"workers": 0}, **again)["data-wait"].sets


@pytest.mark.parametrize(("first_ms", "persistent"), [(8.0, False), (0.2, False), (8.0, True)])
def test_workers_that_start_for_each_epoch(first_ms: float, persistent: bool) -> None:
    phases = {**HEALTHY, "data_wait": 10.0, "data_wait/first_batch": first_ms}
    found = findings({"workers": 2, "persistent": persistent}, phases=phases)
    assert ("worker-restart" in found) == (first_ms > 1 and not persistent)
    if "worker-restart" in found:
        assert found["worker-restart"].sets == ("loader.persistent=true",)


@pytest.mark.parametrize(("kept", "found"), [(15, True), (40, False)])
def test_memory_that_is_kept_for_an_epoch_and_then_released(kept: int, found: bool) -> None:
    """With the innocent twin: it grows while a cache is filled, once, and stays. Resident memory stays in both."""
    heap = [
        400 * MEMORY + 40 * MEMORY * (window % kept if kept < 40 else min(window, 8)) for window in range(40)
    ]
    windows = {
        number: [WindowEvent(**{**EMPTY, "step": 20 * number + 20, "heap_bytes": used})]
        for number, used in enumerate(heap)
    }
    leak = findings(windows=40, after=windows, used=[GIB] * 40, host=cores(1.9, 1.9)).get("leak")
    assert (leak is not None) == found
    if leak is not None:
        assert "2.0 MiB per step" in leak.title
        assert "full" not in " ".join(item.text for item in leak.evidence)


def test_kept_graphs_explain_memory_that_rises_once_and_stays() -> None:
    # From the second point on; the first one is taken while torch still starts.
    rise = [200 * MEMORY, *(400 * MEMORY + min(index, 4) * 200 * MEMORY for index in range(11))]
    host, window = cores(1.9, 1.9), {"kept_steps": 400}
    found = findings(used=rise, host=host, window=window)["leak"]
    assert "2.0 MiB per step" in found.title and "400" in found.title
    # What is kept is small, or nothing is kept: data that was read into memory once.
    assert "leak" not in findings(used=[400 * MEMORY] * 12, host=host, window=window)
    assert "leak" not in findings(used=rise, host=host)


def loaded(workers: int, wait_ms: float = 10.0, **script: Any) -> Finding:
    """The finding of a script that waits for the batches of its loader."""
    loader = {"workers": workers, "persistent": False}
    return findings(loader, phases={**HEALTHY, "data_wait": wait_ms}, script=script)["data-wait"]


def changes(found: Finding) -> set[str]:
    return {item for change in found.changes for item in change.sets}


def test_a_tensor_dataset_is_indexed_in_whole_batches() -> None:
    loader = {"workers": 0, "fetch": "item"}
    found = findings(loader, phases={**HEALTHY, "data_wait": 10.0})["data-wait"]
    assert found.sets == ("loader.fetch=auto",)
    assert "loader.fetch=auto" not in changes(loaded(0))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"random": ["train.py", 8]}, "train.py:8"),
        ({"items": 100_000_000, "batch_bytes": 8 << 20}, "memory"),
        ({"items": 2_000_000, "batch_bytes": 8}, "reading all"),
    ],
)
def test_a_cache_is_refused_with_the_reason(facts: dict[str, Any], words: str) -> None:
    found = findings(
        {"workers": 0, "persistent": False}, phases={**HEALTHY, "data_wait": 10.0}, script=facts,
        host={**cores(1.2, 1.0), "memory_available_bytes": 8 * GIB}, run={"items_per_step": 8},
    )["data-wait"]  # fmt: skip
    assert "loader.cache=true" not in changes(found)
    assert any(words in item.text for item in found.evidence), found.evidence
    fits = loaded(0, items=1000, batch_bytes=8 << 10)
    assert "loader.cache=true" in changes(fits)


def test_batches_that_come_late_now_and_then_are_loaded_ahead_or_in_any_order() -> None:
    uneven: dict[str, Any] = {"phases": {**HEALTHY, "data_wait": 10.0}, "median_ns": MS // 10}
    found = findings({"workers": 2, "persistent": True}, **uneven)["data-wait"]
    assert {"loader.prefetch=8", "loader.in_order=false"} <= changes(found)
    assert "loader.in_order=false" not in changes(
        findings({"workers": 1, "persistent": True}, **uneven)["data-wait"]
    )


def test_a_stream_gets_one_worker_and_quick_batches_get_none() -> None:
    phases = {**HEALTHY, "data_wait": 10.0}
    stream = findings({"workers": 0}, by_item=False, phases=phases, run={"usable_cores": 8.0})["data-wait"]
    assert stream.sets == ("loader.workers=1",)
    quick = {name: ms / 20 for name, ms in phases.items()}
    assert (
        findings({"workers": 2}, by_item=False, phases=quick, windows=120)["data-wait"].sets[0]
        == "loader.workers=0"
    )


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
    told = findings({"workers": workers}, by_item=False, script=facts).get("repeated-items")
    assert (told is not None) == found
    if told is not None:
        assert "2 times" in told.title and "Clips" in told.title and told.confidence == "certain"
        assert told.changes[0].where == "train.py:7 in Clips.__iter__"


def test_ranks_that_read_the_same_data() -> None:
    found = findings(script={"same_ranks": [0, 1]})
    assert next(iter(found)) == "repeated-items"
    assert "DistributedSampler" in found["repeated-items"].changes[0].text


@pytest.mark.parametrize("sampler", ["RandomSampler", "SequentialSampler"])
def test_an_iterator_for_each_batch(sampler: str) -> None:
    phases = {**HEALTHY, "data_wait": 10.0, "data_wait/first_batch": 8.0}
    facts = {"wasted": ["train.py", 30], "sampler": sampler}
    found = findings({"workers": 2, "persistent": False}, phases=phases, script=facts, window={"passes": 20})
    assert found["iterator-restart"].changes[0].where == "train.py:30" and "worker-restart" not in found
    assert ("repeated-items" in found) == (sampler == "SequentialSampler")
    # A script that takes one batch this way, to look at it.
    few = findings({"workers": 2, "persistent": False}, phases=phases, script=facts, window={"passes": 1})
    assert not {"iterator-restart", "repeated-items"} & set(few)


@pytest.mark.parametrize(("passes", "found"), [(5, True), (0, False)])
def test_epochs_so_short_that_their_starts_cost_time(passes: int, found: bool) -> None:
    phases = {**HEALTHY, "data_wait": 10.0, "data_wait/first_batch": 8.0}
    told = findings({"workers": 2, "persistent": True}, phases=phases, window={"passes": passes})
    assert ("short-epochs" in told) == found
    if found:
        assert "4 steps" in told["short-epochs"].title


READS = {"reads": ["/home/me/train.py", 15, "Table.__getitem__"]}


def waits_at(line: int, function: str, **frames: int) -> Finding:
    """A wait for data whose samples are in a function. frames: its samples in other phases."""
    rows = [["data_wait", "/home/me/train.py", line, function, 30, 1]]
    rows += [[phase, "/home/me/train.py", line + 2, function, count, 1] for phase, count in frames.items()]
    stacks = StacksEvent(100, sum(row[4] for row in rows), rows)
    phases = {**HEALTHY, "data_wait": 10.0}
    return findings({"workers": 0}, phases=phases, script=READS, stacks=stacks)["data-wait"]


def test_the_line_that_waits_for_a_batch_is_not_where_less_work_is_to_be_done() -> None:
    assert "__getitem__" in (change := waits_at(30, "main", backward=5).changes[-1]).text
    assert change.where == "train.py:15 in Table.__getitem__"
    assert waits_at(40, "decode").changes[-1].where == "train.py:40 in decode"


def test_a_library_that_makes_the_items_is_named_with_the_line_that_calls_it() -> None:
    row = ["/home/me/train.py", 15, "Table.__getitem__", 64, 10 * MS, 10 * MS, "", "data_wait"]
    call = [
        "/home/me/train.py", 20, "Table.__getitem__", "_LocationIndexer.__getitem__", "pandas", 128, 6 * MS,
        "data_wait",
    ]  # fmt: skip
    more = [*call[:3], "Series.__getitem__", "pandas", 64, 2 * MS, "data_wait"]
    phases = {**HEALTHY, "data_wait": 10.0}

    def found(*calls: list[Any]) -> Finding:
        step = FunctionsEvent(100, 30 * MS, [row], phases={"data_wait": 10 * MS}, calls=list(calls))
        return findings({"workers": 0}, phases=phases, script=READS, functions=step)["data-wait"]

    pandas = found(call, more)
    assert "most of it in iloc or loc of pandas (train.py:20 in Table.__getitem__)" in pandas.title
    assert any(
        "pandas takes" in item.text and "called from train.py:20" in item.text for item in pandas.evidence
    )
    assert pandas.changes[-1].where == "train.py:20 in Table.__getitem__"
    # A function that takes its time by itself is named itself.
    assert "pandas" not in found([*call[:6], MS, "data_wait"]).title
