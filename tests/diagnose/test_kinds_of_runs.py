"""Every rule on every kind of run: it finds its planted cause by what such a run records, or the page says why not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from cases import PAIRS
from planted_runs import Planted, cores, healthy, profiled

from ndd_engine.diagnose import CAUSES
from ndd_engine.record.events import MarkEvent

PAGE = Path(__file__).parents[2] / "docs" / "diagnosis.md"
ROW = re.compile(r"^\| `([a-z0-9-]+)` \| (yes|no) \| (yes|no) \| (.*?) ?\|$", re.MULTILINE)
# Cause -> (own model, script, why not).
TABLE = {
    cause: (own == "yes", script == "yes", why)
    for cause, own, script, why in ROW.findall(PAGE.read_text("utf-8"))
}
# Verdicts about the run as a whole; and what follows from the windows of all ranks, which are the same for every run.
NO_FAULTS, OF_RANKS = {"too-short", "healthy"}, {"straggler", "exchange", "skew"}
LOGGED = ("train.py", 17, "Net.training_step", "LightningModule.log", "lightning", 12, 7_000_000, "other")
# Faults that look different in a script.
OF_SCRIPTS = {
    "anomaly": Planted(
        run={"config": {"script": {"anomaly": True}, "batch": {"accumulation": 1, "micro": 8}}}
    ),
    "clip": Planted(phases=healthy(clip=8.0)),
    "data-parallel": Planted(
        run={"config": {"script": {"data_parallel": 4}, "batch": {"accumulation": 1, "micro": 8}}}
    ),
    "retain-graph": Planted(
        run={"config": {"script": {"retains": ["train.py", 9]}, "batch": {"accumulation": 1, "micro": 8}}}
    ),
    "dense-embedding": Planted(
        phases=healthy(optimizer=12.0),
        functions=replace(profiled(), tables=[("Net.table", "Embedding", 100_000, 64, 512, 0.9, "Adam")]),
    ),
    "iterator-restart": Planted(
        phases=healthy(**{"data_wait": 12.0, "data_wait/first_batch": 8.0}),
        window={"passes": 20},
        run={"config": {"script": {"wasted": ["train.py", 9]}, "batch": {"accumulation": 1, "micro": 8}}},
    ),
    "repeated-items": Planted(
        run={
            "config": {
                "script": {"dataset": "Clips", "batches": [[2, 0, 5], [3, 1, 5], [4, 0, 6], [5, 1, 6]]},
                "loader": {"workers": 2},
                "batch": {"accumulation": 1, "micro": 8},
            }
        }
    ),
    # It ends after these steps, 4.8 s.
    "compile-cost": Planted(
        marks=[MarkEvent("compile", 0, "", {"seconds": 2.0, "graphs": 2})], run={"total_steps": 240}
    ),
    "many-workers": Planted(
        phases=healthy(data_wait=20.0), sets=["loader.workers=8"], host=cores(1.9, 1.9), run={"threads": 1}
    ),
    "logging": Planted(phases=healthy(other=8.0), functions=replace(profiled(), calls=[LOGGED])),
    "user-code": Planted(phases=healthy(other=8.0)),
}


def as_script(run: Planted) -> Planted:
    """The same run with only those facts that the observer of a script records."""
    config = run.run_event().config
    seen = {
        "script": {"command": ["python", "train.py"], "loader": ["train.py", 12], "by_item": True},
        "loader": {name: config["loader"][name] for name in ("workers", "pin_memory", "prefetch", "persistent")},
        "optimizer": {"implementation": config["optimizer"]["implementation"]},
        "speed": {"cudnn_benchmark": config["speed"]["cudnn_benchmark"]}, "batch": config["batch"],
    }  # fmt: skip
    told = {**run.run, "config": seen, "precision": "", "workload": "train.py"}
    return replace(run, run=told, loader=None, baseline=None, work=None, settings=())


def test_the_page_says_of_each_cause_which_runs_have_it() -> None:
    assert set(TABLE) == set(CAUSES) - NO_FAULTS
    assert all((own and script) or why for own, script, why in TABLE.values())
    planted = {pair.cause for pair in PAIRS} | {"slow-function", "no-effect"} | OF_RANKS
    assert planted == {cause for cause, (own, _, _) in TABLE.items() if own}


@pytest.mark.parametrize("cause", sorted(set(TABLE) - OF_RANKS - {"slow-function"}))
def test_a_script_has_the_causes_that_the_page_says(cause: str) -> None:
    planted = [pair.guilty for pair in PAIRS if pair.cause == cause]
    alike = [OF_SCRIPTS[cause]] if cause in OF_SCRIPTS else planted
    found = {
        name
        for run in alike
        for name in (run if "script" in run.run.get("config", {}) else as_script(run)).causes()
    }
    assert (cause in found) == TABLE[cause][1], found
