"""Every cause is named where it is planted, not where a run only looks similar, and not without its signals."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import PAIRS, Pair
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_runs import Planted, alone, cores, data, files, gpu, healthy, own, work
from record_help import event_sequences, folded

from ndd_engine.config.schema import Config
from ndd_engine.diagnose import CAUSES, diagnose
from ndd_engine.record.snapshot import Headroom, Idle, Snapshot, TimeLeft, Totals
from ndd_engine.record.state import RunState
from ndd_watch.changes import TABLE

# Findings about the run as a whole, of scripts and of several ranks; they have tests of their own.
ELSEWHERE = {
    "too-short", "healthy", "no-effect", "slow-function", "gpu-unseen", "straggler", "exchange", "skew",
    "iterator-restart", "repeated-items", "data-parallel", "unused-gradients",
}  # fmt: skip
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.id)

# Planted.


@each_pair
def test_the_planted_cause_is_the_verdict(pair: Pair) -> None:
    found = pair.guilty.verdict()
    assert found.cause == pair.cause, [(item.cause, item.ceiling) for item in pair.guilty.found()]
    assert found.title and found.evidence and found.changes
    # It proposes the edit that takes it away.
    assert found.sets == pair.sets or not pair.sets


def test_what_is_proposed_is_in_the_table_of_changes() -> None:
    """With its title, and with what it may change and how that is checked."""
    rules = Path(inspect.getfile(diagnose)).parent
    written = {
        key for path in rules.glob("*.py") for key in re.findall(r"[\"'](\w+\.\w+)=", path.read_text("utf-8"))
    }
    found = (item for pair in PAIRS for run in (pair.guilty, pair.innocent) for item in run.found())
    sets = {each.partition("=")[0] for item in found for change in item.changes for each in change.sets}
    assert {"clip.max_norm", "evaluate.batches", "parallel.param_dtype"} <= written
    assert {"evaluate.every_steps", "log.window_s"} <= sets
    untitled = {key for key in written | sets if key not in TABLE or not TABLE[key].title}
    assert not untitled, sorted(untitled)
    assert not [row.key for row in TABLE.values() if bool(row.alters.what) != bool(row.alters.checked)]
    fields = Config.model_fields
    for section, _, name in (key.partition(".") for key in TABLE if not key.startswith("workload.")):
        assert name in fields[section].annotation.model_fields, (section, name)  # type: ignore[union-attr]


@each_pair
def test_its_innocent_twin_is_not_accused(pair: Pair) -> None:
    assert pair.cause not in pair.innocent.causes()


@each_pair
def test_a_ceiling_is_a_bound_of_a_gain(pair: Pair) -> None:
    for item in pair.guilty.found():
        assert item.ceiling is None or item.ceiling >= 1
        assert item.share is None or 0 <= item.share <= 1
        if item.ceiling is not None:
            assert item.share is not None
            assert item.ceiling == pytest.approx(1 / max(1 - item.share, 0.01))


def test_every_cause_is_planted_once_and_one_wait_has_one_cause() -> None:
    assert {pair.cause for pair in PAIRS} | ELSEWHERE == set(CAUSES)
    waits = {"item-collate", "in-memory-workers", "worker-restart", "short-epochs", "slow-storage", "many-workers",
             "on-the-fly", "few-workers", "data-wait"}  # fmt: skip
    for pair in PAIRS:
        assert len(waits & set(pair.guilty.causes())) <= 1


# Alike.

USUAL = {"loader": data(), "baseline": alone(), "work": work(), "host": cores(1.95, 1.9)}
CHANGING, FULL = files(epochs_differ=True), cores(2.0, 2.0)
NEIGHBOUR = [{"pid": 9, "name": "make", "cores": 0.9}]
# What a run looks like, the run, and its causes.
ALIKE: dict[str, tuple[Planted, list[str]]] = {
    **{f"a healthy {name}": (Planted(name, **USUAL), ["healthy"]) for name in ("antispoof", "eeg", "finetune")},  # type: ignore[arg-type]
    "a healthy run on a GPU": (gpu(), ["healthy"]),
    "a healthy own workload": (own(loader=data(), baseline=alone()), ["healthy"]),
    # A setting is never named because it is set.
    **{
        setting: (Planted("summarise", setting.split(), **USUAL), ["healthy"])  # type: ignore[arg-type]
        for setting in (
            "log.every_steps=1", "optimizer.implementation=loop", "loader.workers=0", "clip.max_norm=0.5",
            "loader.pin_memory=false", "loader.cache=false", "speed.deterministic=true", "checkpoint.every_steps=5",
            "evaluate.every_steps=5", "batch.micro=2 batch.accumulation=16",
        )
    },
    # Without windows enough for an error, a share has to be large.
    "a small share of two windows": (Planted(phases=healthy(data_wait=2.0), windows=2, steps=60), ["healthy"]),
    "a large one": (Planted(phases=healthy(data_wait=9.0), windows=2, steps=60), ["data-wait"]),
    "a single measurement before training": (
        Planted(run={"threads": 8}, host=cores(1.9, 1.9), baseline=alone(threads=8, runs=1, by_threads=[[2.0, 5e6]])),
        ["healthy"],
    ),
    "threads without a measurement of others": (Planted(run={"threads": 8}, baseline=alone(threads=8)), ["healthy"]),
    "one thread without it": (Planted(run={"threads": 1}, baseline=alone(threads=1)), ["healthy"]),
    "one thread where others use the cores": (
        Planted(run={"threads": 1}, baseline=alone(threads=1, by_threads=[[2.0, 10e6]]), host=FULL), ["healthy"],
    ),
    "a wait where no core is free for workers": (
        Planted(phases=healthy(data_wait=32.0), sets=["loader.workers=1"], loader=CHANGING, host=FULL), ["data-wait"],
    ),
    "items that do not fit in memory": (
        Planted(
            phases=healthy(data_wait=32.0), loader=files(batch_bytes=32 << 20, items=20_000), host=cores(1.2, 1.1)
        ),
        ["few-workers"],
    ),
    "items that do": (Planted(phases=healthy(data_wait=32.0), loader=files(), host=cores(1.2, 1.1)), ["on-the-fly"]),
    "workers of data in memory beside another process": (
        Planted(
            sets=["loader.workers=2"], loader=data(), baseline=alone(micro_ns=12e6),
            host=cores(2.0, 1.1, neighbours=NEIGHBOUR),
        ),
        ["neighbour-cores"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_a_run_that_only_looks_like_it(name: str) -> None:
    run, causes = ALIKE[name]
    assert run.causes() == causes


def test_a_cause_within_the_noise_is_not_named() -> None:
    """One long window, in which the workers started, and none after it."""
    events = Planted(phases=healthy(data_wait=0.1)).events()
    odd = [index for index, (_, event) in enumerate(events) if event.type == "window"][-3]
    slow = Planted(phases=healthy(data_wait=300.0)).window_event(0, 1)
    state = RunState()
    for index, (t, event) in enumerate(events):
        state.fold(t, slow if index == odd else event)
    assert next(phase.share for phase in state.snapshot().phases if phase.name == "data_wait") > 0.3
    assert [item.cause for item in diagnose(state.snapshot())] == ["healthy"]


def test_settings_that_are_off_are_proposed_where_nothing_is_wrong() -> None:
    usual = Planted("chartext", **USUAL).verdict()  # type: ignore[arg-type]
    assert "95 %" in usual.title and usual.ceiling is None
    changes = Planted(sets=["speed.compile=off", "speed.flush_denormal=false"]).verdict().changes
    # Zero for denormal numbers is no idea: where there are any, they are a finding.
    assert {change.sets for change in changes} == {("speed.compile=default",)}
    assert not Planted(sets=["speed.compile=default"]).verdict().changes


# Without signals.

# Of the parts of a snapshot that are events, what may be null inside.
HOLES = {
    "loader": ("encoded", "batch_bytes", "item_ns", "item_cpu_ns", "collate_ns", "gather_ns"),
    "baseline": ("other_micro", "other_ns", "threads", "operations"),
    "work": ("flops_per_step", "bytes_per_step", "flops_forward", "peak_tflops"),
    "memory": ("growth_bytes", "free_bytes", "total_bytes", "others_bytes"),
    "run": ("gpu", "token", "threads", "usable_cores"),
    "cores": ("throttled",),
}
EMPTY: dict[str, Any] = {
    "headroom": Headroom(None, None, None, None, None, None, "host"), "idle": Idle(None, "host", ()),
    "left": TimeLeft(), "totals": Totals(), "phases": (), "settings": (), "marks": (), "trials": (),
    "memory_trend": (), "rate_trend": (),
}  # fmt: skip
OPTIONAL = (
    "run", "step_ns", "steps_per_s", "items_per_s", "started_t", "preparing_t", "t", "sample", "memory", "work",
    "micro_steps", "loader", "baseline", "kernels", "stacks", "functions", "cores", "grad_norm", "loss",
)  # fmt: skip
PARTS = [*OPTIONAL, *EMPTY, *(f"{part}.{name}" for part, names in HOLES.items() for name in names)]
# Without the signal that distinguishes two explanations of a symptom, the other one is reported.
SECOND = {
    "dense-embedding": ("optimizer",),
    "slow-storage": ("on-the-fly",),
    "many-workers": ("few-workers", "on-the-fly"),
    "on-the-fly": ("few-workers",),
    "neighbour-cores": ("few-threads",),
    "denormals": ("optimizer",),
}


def holed(snapshot: Snapshot, names: list[str]) -> Snapshot:
    """Without these parts: "loader", or "loader.item_ns" inside of it."""
    for name in names:
        part, _, inner = name.partition(".")
        value = getattr(snapshot, part)
        if not inner:
            snapshot = replace(snapshot, **{part: EMPTY.get(part)})
        elif value is not None:
            snapshot = replace(snapshot, **{part: replace(value, **{inner: None})})
    return snapshot


@each_pair
def test_without_a_signal_nothing_breaks_and_nothing_new_is_said(pair: Pair) -> None:
    whole = pair.guilty.snapshot()
    known = {item.cause for item in diagnose(whole)}
    for part in PARTS:
        found = diagnose(holed(whole, [part]))
        assert found
        # A cause that needs the signal falls silent; for data, the cause without a reason may take its place.
        extra = {item.cause for item in found} - known
        if part == "sample" and "launch-bound" in extra:
            # Without NVML nothing tells whether the GPU waits within the model: that is a question, not a finding.
            (asked,) = [item for item in found if item.cause == "launch-bound"]
            assert asked.confidence == "possible" and asked.ceiling is None
            extra.remove("launch-bound")
        assert extra <= {"healthy", "gpu-idle", "too-short", "data-wait", *SECOND.get(pair.cause, ())}, part


@given(st.sampled_from(PAIRS), st.lists(st.sampled_from(PARTS), max_size=8))
def test_any_signals_may_be_missing_at_once(pair: Pair, parts: list[str]) -> None:
    for item in diagnose(holed(pair.guilty.snapshot(), parts)):
        assert item.cause in CAUSES
        assert item.ceiling is None or item.ceiling >= 1


@settings(max_examples=50)
@given(st.data())
def test_whatever_is_recorded_is_diagnosed(draws: st.DataObject) -> None:
    found = diagnose(folded(*draws.draw(event_sequences())).snapshot())
    assert found and all(item.cause in CAUSES and item.title for item in found)
