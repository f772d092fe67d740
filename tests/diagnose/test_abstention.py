"""Without the signals they need, rules return no finding and never raise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import PAIRS
from hypothesis import given
from hypothesis import strategies as st
from pairs import Pair
from planted_runs import Planted, alone, cores, data, files, healthy, profiled, seen
from record_help import event_sequences, folded

from ndd_engine.diagnose import CAUSES, Finding, diagnose
from ndd_engine.record.snapshot import Headroom, Idle, Snapshot, TimeLeft, Totals

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


PARTS = [*OPTIONAL, *EMPTY, *(f"{part}.{name}" for part, names in HOLES.items() for name in names)]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.id)
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


# Without the signal that distinguishes two explanations of a symptom, the other one is reported.
SECOND = {
    "dense-embedding": ("optimizer",),
    "slow-storage": ("on-the-fly",),
    "many-workers": ("few-workers", "on-the-fly"),
    "on-the-fly": ("few-workers",),
    "neighbour-cores": ("few-threads",),
    "user-code": (),
    "denormals": ("optimizer",),
}


@given(st.sampled_from(PAIRS), st.lists(st.sampled_from(PARTS), max_size=8))
def test_any_signals_may_be_missing_at_once(pair: Pair, parts: list[str]) -> None:
    for item in diagnose(holed(pair.guilty.snapshot(), parts)):
        assert item.cause in CAUSES
        assert item.ceiling is None or item.ceiling >= 1


@pytest.mark.long
@given(st.data())
def test_whatever_is_recorded_is_diagnosed(draws: st.DataObject) -> None:
    state = folded(*draws.draw(event_sequences()))
    found = diagnose(state.snapshot())
    assert found
    assert all(item.cause in CAUSES and item.title for item in found)


def test_without_windows_enough_for_an_error_a_share_has_to_be_large() -> None:
    assert Planted(phases=healthy(data_wait=2.0), windows=2, steps=60).causes() == ["healthy"]
    assert Planted(phases=healthy(data_wait=9.0), windows=2, steps=60).causes() == ["data-wait"]


def test_a_wait_without_a_known_reason_is_only_a_wait() -> None:
    found = Planted(phases=healthy(data_wait=20.0)).verdict()
    assert found.cause == "data-wait"
    # A profiled step shows where; so do many stack samples in one line of the dataset, in old records.
    step = profiled(("data_wait", "/home/me/mine.py", 12, "Clips.__getitem__", 18.0))
    looks = seen(("data_wait", "/home/me/mine.py", 12, "Clips.__getitem__", 40, 1))
    for known in ({"functions": step}, {"stacks": looks}):
        found = Planted(phases=healthy(data_wait=20.0), **known).verdict()  # type: ignore[arg-type]
        assert_names_the_dataset(found)
    # In a worker, nothing shows it.
    found = Planted(phases=healthy(data_wait=20.0), sets=["loader.workers=2"]).verdict()
    assert any("not profiled" in item.text for item in found.evidence)


def assert_names_the_dataset(found: Finding) -> None:
    assert (found.changes[-1].where or "").split() == ["mine.py:12", "in", "Clips.__getitem__"]
    assert any("mine.py:12" in item.text for item in found.evidence)


def test_a_single_measurement_before_training_is_no_baseline() -> None:
    threads = {"run": {"threads": 8}, "host": cores(1.9, 1.9)}
    one = Planted(baseline=alone(threads=8, runs=1, by_threads=[[2.0, 5e6]]), **threads)
    assert one.causes() == ["healthy"]


def test_threads_are_not_named_without_a_measurement_of_others() -> None:
    assert Planted(run={"threads": 8}, baseline=alone(threads=8)).causes() == ["healthy"]
    assert Planted(run={"threads": 1}, baseline=alone(threads=1)).causes() == ["healthy"]


def test_more_threads_are_not_proposed_where_others_use_the_cores() -> None:
    busy = Planted(
        run={"threads": 1}, baseline=alone(threads=1, by_threads=[[2.0, 10e6]]), host=cores(2.0, 2.0)
    )
    assert busy.causes() == ["healthy"]


def test_more_workers_are_not_proposed_where_no_core_is_free() -> None:
    changing, one = files(epochs_differ=True), ["loader.workers=1"]
    full = Planted(phases=healthy(data_wait=32.0), sets=one, loader=changing, host=cores(2.0, 2.0))
    assert full.causes() == ["data-wait"]


def test_items_that_do_not_fit_in_memory_are_not_to_be_kept() -> None:
    large = files(batch_bytes=32 << 20, items=20_000)  # 20 GiB
    host = cores(1.2, 1.1)
    assert Planted(phases=healthy(data_wait=32.0), loader=large, host=host).verdict().cause == "few-workers"
    small = Planted(phases=healthy(data_wait=32.0), loader=files(), host=host).verdict()
    assert small.cause == "on-the-fly"


def test_workers_of_data_in_memory_are_not_blamed_for_another_process() -> None:
    host = cores(2.0, 1.1, neighbours=[{"pid": 9, "name": "make", "cores": 0.9}])
    run = Planted(sets=["loader.workers=2"], loader=data(), baseline=alone(micro_ns=12e6), host=host)
    assert run.causes() == ["neighbour-cores"]


def test_settings_that_are_off_are_proposed_where_nothing_is_wrong() -> None:
    off = ["speed.compile=off", "speed.flush_denormal=false"]
    changes = Planted(sets=off).verdict().changes
    assert {change.sets for change in changes} == {("speed.compile=default",), ("speed.flush_denormal=true",)}
    assert not Planted(sets=["speed.compile=default", "speed.flush_denormal=true"]).verdict().changes
