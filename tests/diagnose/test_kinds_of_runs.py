"""Which causes each kind of run can have: the table of the documentation, from facts that runs of that kind record."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import PAIRS
from kinds_of_runs import ELSEWHERE, EVERYTHING, KNOWN, OFTEN, OWN_ONLY, SETTINGS, check, facts, only
from planted_runs import Planted, cores, healthy, profiled, script, worked
from qa.ranks import simulated
from tests.records import events_of
from tests.tiers import few

from ndd_engine.diagnose import CAUSES, diagnose
from ndd_engine.measure.stragglers import RankComparison, compared_steps
from ndd_engine.record.events import Event, MarkEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "diagnosis.md"
ROW = re.compile(
    r"^\| `([a-z0-9-]+)` \| (yes|no) \| (yes|no) \| (yes|no) \| (yes|no) \| (.*?) ?\|$", re.MULTILINE
)
COLUMNS = ("own", "script", "framework", "ranks")
# Cause -> the kinds of runs that can have it, and why others cannot.
TABLE = {
    cause: ({kind for kind, said in zip(COLUMNS, columns, strict=True) if said == "yes"}, why)
    for cause, *columns, why in ROW.findall(PAGE.read_text("utf-8"))
}
# Verdicts about the run as a whole; and what follows from the windows of all ranks, which are the same for every run.
NO_FAULTS, OF_RANKS = {"too-short", "healthy"}, {"straggler", "exchange", "skew"}
LOGGED = ("train.py", 17, "Net.training_step", "LightningModule.log", "lightning", 12, 7_000_000, "other")
TABLES = [("Net.table", "Embedding", 100_000, 64, 512, 0.9, "Adam")]
BATCHES = [[2, 0, 5], [3, 1, 5], [4, 0, 6], [5, 1, 6]]
# Faults that look different in a script.
OF_SCRIPTS = {
    "anomaly": script({"anomaly": True}),
    "clip": Planted(phases=healthy(clip=8.0)),
    "data-parallel": script({"data_parallel": 4}),
    "retain-graph": script({"retains": ["train.py", 9]}),
    "dense-embedding": Planted(phases=healthy(optimizer=12.0), functions=replace(profiled(), tables=TABLES)),
    "unused-gradients": script(kernels=worked(unused=[("features", "Body", 30_000_000)])),
    "iterator-restart": script(
        {"wasted": ["train.py", 9]}, window={"passes": 20},
        phases=healthy(**{"data_wait": 12.0, "data_wait/first_batch": 8.0}),
    ),
    "repeated-items": script({"dataset": "Clips", "batches": BATCHES}, {"workers": 2}),
    # It ends after these steps, 4.8 s.
    "compile-cost": Planted(
        marks=[MarkEvent("compile", 0, "", {"seconds": 2.0, "graphs": 2})], run={"total_steps": 240}
    ),
    "many-workers": Planted(
        phases=healthy(data_wait=20.0), sets=["loader.workers=8"], host=cores(1.9, 1.9), run={"threads": 1}
    ),
    "logging": Planted(phases=healthy(other=8.0), functions=replace(profiled(), calls=[LOGGED])),
    "user-code": Planted(phases=healthy(other=8.0)),
    "slow-function": Planted(
        phases=healthy(other=8.0), functions=profiled(("other", "train.py", 12, "tokenize", 7.4)),
    ),
}  # fmt: skip
_STEADY = (0.005, 0.01)
# What only the clocks of all ranks tell, and ranks of which none is late.
BY_RANKS = {
    "straggler": simulated.Planted(4, late=(1,), late_ms=20.0, noise=_STEADY),
    "exchange": simulated.Planted(4, exchange_ms=25.0, noise=_STEADY),
    "skew": simulated.Planted(4, late=(0, 1, 2, 3), late_ms=40.0, turns=True, exchange_ms=2.0, noise=_STEADY),
}
EVEN = simulated.Planted(4, exchange_ms=2.0, noise=_STEADY)


# Facts that a run of another kind records elsewhere: nobody's framework makes an iterator for each step, and ranks use
# one GPU each.
NOT_OF = {"framework": {"config.script.wasted"}, "ranks": {"config.script.data_parallel"}}
PLANTED = [*(run for pair in PAIRS for run in (pair.guilty, pair.innocent)), *OF_SCRIPTS.values()]


def alike(comparison: RankComparison, window: WindowEvent) -> Iterable[Event]:
    """What is recorded where both ranks have trained like this."""
    phases = {name: body["host_ns"] or 0 for name, body in window.phases.items() if "/" not in name}
    row = [*(ns / window.steps for ns in phases.values()), 1e5]
    rows = dict.fromkeys(range(window.step - window.steps, window.step), row)
    told = compared_steps(window.step, window.step - window.steps, [*phases, "backward/exchange"], rows)
    for rank in (0, 1):
        comparison.take(rank, told)
    return comparison.new()


def configured(run: Planted) -> dict[str, Any]:
    """The configuration of a script that shows the same."""
    config = dict(run.run_event().config)
    config["script"] = {
        "command": ["python", "train.py"], "loader": ["train.py", 12], "by_item": True, **config.get("script", {}),
    }  # fmt: skip
    return config


def causes_of_ranks(ranks: simulated.Planted, kind: str) -> set[str]:
    """What is found in a run of this kind whose ranks show this."""
    config = Planted().run_event().config if kind == "own" else configured(Planted())
    config = {**config, "parallel": {"ranks": ranks.world, "strategy": ranks.strategy}}
    state = RunState()
    first = Planted(run={"config": config}).run_event()
    events: list[Event] = [first]
    for event in ranks.events(28):
        events += [simulated.beside(event), event]
    for t, whole in enumerate(events):
        known = None if kind == "own" else KNOWN[kind] | KNOWN["ranks"]
        if (told := whole if known is None else only(whole, known)) is not None:
            state.fold(float(t), told)
    return {item.cause for item in diagnose(state.snapshot())} & OF_RANKS


def causes(run: Planted, kind: str) -> set[str]:
    """What is found where a run of this kind shows the same, by the facts that such a run records."""
    config = configured(run)
    comparison = None
    if kind == "ranks":
        config["parallel"] = {"ranks": 2, "strategy": "ddp"}
        comparison = RankComparison()
        for rank in (0, 1):
            comparison.join(rank, "host")
    known = (KNOWN[kind] | set(ELSEWHERE)) - NOT_OF.get(kind, set())
    told = replace(run, run={**run.run, "config": config, "precision": "", "workload": "train.py"})
    state = RunState()
    for t, whole in told.events():
        if (event := only(whole, known)) is not None:
            state.fold(t, event)
        if comparison is not None and isinstance(event, WindowEvent) and event.steps:
            for of_ranks in alike(comparison, event):
                state.fold(t, of_ranks)
    return {item.cause for item in diagnose(state.snapshot())}


def test_every_fact_of_a_rule_is_recorded_by_some_kind_of_run_or_by_own_runs_only() -> None:
    planted = facts(event for run in PLANTED for _, event in run.events())
    scripts = set().union(*KNOWN.values()) | set(ELSEWHERE)
    # Of the configuration, an own run tells all keys.
    unknown = {name for name in planted - scripts - OWN_ONLY if not name.startswith("config.")}
    assert not unknown, sorted(unknown)
    assert not {name for name in planted - scripts if name.startswith("config.script.")}
    assert not scripts & OWN_ONLY


def test_what_a_recorded_run_has_not_is_recorded_by_a_test() -> None:
    for path, name in ELSEWHERE.values():
        assert f"def {name}(" in (ROOT / "tests" / path).read_text("utf-8"), name


def test_the_page_says_of_each_cause_which_runs_have_it() -> None:
    assert set(TABLE) == set(CAUSES) - NO_FAULTS
    assert all(kinds == set(COLUMNS) or why for kinds, why in TABLE.values())
    planted = {pair.cause for pair in PAIRS} | {"slow-function", "no-effect"} | set(BY_RANKS)
    assert planted == {cause for cause, (kinds, _) in TABLE.items() if "own" in kinds}


@pytest.mark.parametrize("cause", sorted(set(TABLE) - OF_RANKS))
def test_a_kind_of_run_has_the_causes_that_the_page_says(cause: str) -> None:
    planted = [OF_SCRIPTS[cause]] if cause in OF_SCRIPTS else [p.guilty for p in PAIRS if p.cause == cause]
    found = {kind for kind in KNOWN if any(cause in causes(run, kind) for run in planted)}
    assert found == TABLE[cause][0] - {"own"}


@pytest.mark.parametrize("cause", sorted(OF_RANKS))
def test_the_ranks_of_a_kind_of_run_have_the_causes_that_the_page_says(cause: str) -> None:
    assert {kind for kind in COLUMNS if cause in causes_of_ranks(BY_RANKS[cause], kind)} == TABLE[cause][0]
    assert not any(causes_of_ranks(EVEN, kind) for kind in COLUMNS)


# A run of Lightning is in tests/extras/test_observed_frameworks.py.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.long
@pytest.mark.budget(40)
@pytest.mark.parametrize("kind", few(["script", "own", "ranks"], 2))
def test_a_recorded_run_has_the_facts_of_its_kind(tmp_path: Path, kind: str) -> None:
    options = ("--headless", "--run", "it")
    words = {
        "script": ("run", *options, "--", sys.executable, EVERYTHING, "loop"),
        "ranks": ("run", *options, "--", sys.executable, *TORCHRUN, EVERYTHING, "ranks"),
        "own": ("train", *options, *(word for setting in SETTINGS for word in ("--set", setting))),
    }[kind]
    done = subprocess.run(
        [sys.executable, "-m", "ndd_console", *map(str, words)], cwd=tmp_path, capture_output=True, text=True,
        timeout=170, check=False,
        env={**os.environ, **OFTEN, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EVERYTHING.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events: list[Event] = events_of(RunDir(tmp_path / "runs" / "it"))
    check(kind, events)
