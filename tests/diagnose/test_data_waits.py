"""A wait for data always comes with something to try, or says why there is nothing."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from pairs import own
from planted_runs import Planted, alone, cores, data, files, healthy

from ndd_engine.diagnose import Finding
from ndd_engine.record.events import LoaderEvent

WAITING = healthy(data_wait=20.0)
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
SCRIPTS: dict[str, dict[str, Any]] = {
    "nothing known": {}, "stream": {"by_item": False},
    "items": {"by_item": True, "items": 1000, "batch_bytes": 32 * 4096},
    "random": {"by_item": True, "items": 1000, "batch_bytes": 32 * 4096, "random": ["a.py", 3]},
    "many": {"by_item": True, "items": 10**8, "batch_bytes": 32 * 4096},
}  # fmt: skip


def told(run: Planted) -> Finding | None:
    return next((one for one in run.found() if one.cause in WAITS), None)


def words(found: Finding) -> str:
    return " ".join([*(item.text for item in found.evidence), *(change.text for change in found.changes)])


@pytest.mark.parametrize(("loader", "host"), product(LOADERS, HOSTS))
def test_of_a_run_of_ones_own(loader: str, host: str) -> None:
    for sets in SETS:
        run = own(phases=WAITING, loader=LOADERS[loader], host=HOSTS[host], sets=sets, baseline=alone())
        found = told(run)
        assert found is None or found.sets, (sets, found)
        if found is not None and loader in ("random", "stream"):
            assert not any("loader.cache=true" in change.sets for change in found.changes)


@pytest.mark.parametrize(("script", "host"), product(SCRIPTS, HOSTS))
@pytest.mark.parametrize(
    "loader", [{"workers": 0}, {"workers": 2}, {"workers": 4}, {"workers": 0, "fetch": "item"}]
)
def test_of_a_script(script: str, host: str, loader: dict[str, Any]) -> None:
    config = {"script": SCRIPTS[script], "batch": {"accumulation": 1, "micro": 32}, "loader": loader}
    found = told(Planted(phases=WAITING, host=HOSTS[host], run={"config": config}))
    assert found is not None and found.sets
    if script == "random":
        assert not any("loader.cache=true" in change.sets for change in found.changes)
        assert found.cause != "data-wait" or "items are random (a.py:3)" in words(found)


def test_where_there_is_no_loader_the_finding_says_so() -> None:
    config = {"script": {}, "batch": {"accumulation": 1, "micro": 32}}
    found = Planted(phases=WAITING, run={"config": config}).named("data-wait")
    assert not found.sets and "no DataLoader, so no setting of one can be tried" in words(found)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (files(epochs_differ=True), "items change, as by random augmentation"),
        (files(stream=True), "which cannot be cached"),
        (files(items=10**8), "of 16.0 GiB of free memory"),
    ],
)
def test_why_items_of_ones_own_are_not_cached(loader: LoaderEvent, why: str) -> None:
    run = own(phases=WAITING, loader=loader, host=cores(2.0, 2.0), baseline=alone())
    assert why in words(run.named("data-wait"))
