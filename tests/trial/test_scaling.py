"""Scaling: which numbers of ranks are compared with which batches, and what the measured trials say."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from measured import Bench, machine, trial

from ndd_console.render.text import lines
from ndd_console.words.scaling import scaling_blocks
from ndd_engine.config import Config, read
from ndd_engine.errors import ConfigError, UsageError
from ndd_engine.hardware.gpus import Gpu, Machine
from ndd_engine.record.events import TrialEvent
from ndd_engine.trial.outcome import Base
from ndd_engine.trial.scaling import (
    Point,
    ScalingRequest,
    ScalingState,
    counts_for,
    counts_of,
    lost,
    plan,
    points,
    run_scaling,
    strategies_of,
)

SETS = ("workload.name=chartext", "workload.size=tiny", "batch.micro=16", "run.epochs=1", "run.device=cpu")


def configured(*sets: str) -> Config:
    return read(sets=(*SETS, *sets)).resolve()


def gpus(count: int) -> Machine:
    gpus = tuple(Gpu(index, index, f"GPU-{index}", "Test GPU", 80 << 30, (9, 0)) for index in range(count))
    return replace(machine(gpu=True), gpus=gpus, chosen=gpus[0])


# What is compared.


def test_by_default_powers_of_two_up_to_the_cores_or_the_gpus() -> None:
    assert counts_for((), machine(cores=2)) == (1, 2)
    assert counts_for((), machine(cores=6.5)) == (1, 2, 4, 6)
    assert counts_for((), gpus(8)) == (1, 2, 4, 8)
    # Ranks may share a core, but not a GPU.
    assert counts_for((1, 4), machine(cores=2)) == (1, 4)
    with pytest.raises(UsageError, match="2 GPUs"):
        counts_for((1, 4), gpus(2))
    with pytest.raises(UsageError, match="one GPU"):
        counts_for((), gpus(1))


@pytest.mark.parametrize("text", ["", "0,1", "1,-2", "a", "1,2,2", "1.5"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        counts_of(text)
    with pytest.raises(UsageError, match="--strategy"):
        strategies_of("zero3")


def test_what_the_configuration_holds_stays_the_same() -> None:
    weak = points(configured("batch.accumulation=2"), (1, 2, 4), (), None)
    assert [(one.micro, one.accumulation, one.effective) for one in weak] == [(16, 2, None)] * 3
    strong = points(configured("batch.effective=64"), (1, 2, 4, 8), (), None)
    assert [(one.micro, one.accumulation) for one in strong] == [(16, 4), (16, 2), (16, 1), (8, 1)]
    assert {one.effective for one in strong} == {64}
    assert points(configured("batch.effective=64"), (1, 2), (), "rank")[1].effective == 128
    # The micro-batch stays as large as possible.
    odd = points(configured("batch.effective=96", "batch.micro=32"), (1, 2), (), None)
    assert [(one.micro, one.accumulation) for one in odd] == [(32, 3), (24, 2)]
    with pytest.raises(UsageError, match=r"--ranks 3.*64"):
        points(configured("batch.effective=64"), (1, 3), (), None)


def test_strategies_are_compared_for_several_ranks_only() -> None:
    found = points(configured(), (1, 2), ("ddp", "fsdp2"), None)
    assert [one.name for one in found] == ["1 rank", "2 ranks, ddp", "2 ranks, fsdp2"]
    with pytest.raises(UsageError, match="compare"):
        points(configured(), (1,), ("ddp", "fsdp2"), None)


def test_a_batch_that_is_impossible_is_reported_before_anything_is_measured() -> None:
    base = Base("x", sets=(*SETS, "batch.micro=1048576", "batch.accumulation=1024"))
    with pytest.raises(ConfigError, match="items; at most"):
        plan(ScalingRequest(base, (1, 1024)), machine(cores=2))


# What is said.


def facts(ranks: int, rate: float, **more: Any) -> dict[str, Any]:
    return {
        "ranks": ranks, "unit": "segment", "items_per_s": rate, "step_s": 16 * ranks / rate, "prepare_s": 1.0,
        "peak_bytes": 1 << 30, "items_per_step": 16 * ranks, "threads": 2 // ranks, "device": "cpu",
        "device_name": "Test CPU", **more,
    }  # fmt: skip


ALONE = {"forward": 6e6, "backward": 8e6, "optimizer": 1e6, "data_wait": 1e6}
TWO = {**ALONE, "backward": 9e6, "exchange": 2e6, "skew": 1e6}


def two(ratio: float = 1.6, **more: Any) -> TrialEvent:
    return trial(
        "faster", ratio, base=facts(1, 1000.0, parts_ns=ALONE), change=facts(2, 1000.0 * ratio, parts_ns=TWO, **more)
    )  # fmt: skip


def scaled(bench: Bench, *counts: int) -> ScalingState:
    kept: list[TrialEvent] = []
    request = ScalingRequest(Base("x.toml", sets=SETS), counts)
    state = run_scaling(request, keep=kept.append, measure=bench, machine=machine(cores=4))
    assert len(kept) == len(bench.requests)
    return state


def test_the_efficiency_is_the_ratio_over_that_of_the_ranks() -> None:
    bench = Bench({"parallel.ranks=2": two(), "parallel.ranks=4": trial("faster", 2.0)})
    state = scaled(bench, 1, 2, 4)
    first, second, third = state.rows
    assert first.efficiency is None and first.facts["items_per_s"] == 1000.0
    assert second.efficiency == pytest.approx((0.8, 0.784, 0.816))
    assert third.efficiency == pytest.approx((0.5, 0.49, 0.51))
    assert [request.sets for request in bench.requests] == [
        ("parallel.ranks=2", "parallel.strategy=ddp"),
        ("parallel.ranks=4", "parallel.strategy=ddp"),
    ]
    body = state.to_dict()
    assert body["scaling"] == "weak" and "16, 32, 64" in body["batch"]
    assert body["rows"][1]["exchange_s"] == pytest.approx(0.002)
    text = "\n".join(lines(scaling_blocks(state, "x.toml")))
    assert "78 to 82" in text and "segments/s" in text


def test_what_is_lost_adds_up_to_what_is_missing() -> None:
    one, pair = Point(1, "", 16, 1), Point(2, "ddp", 16, 1)
    event = two()
    parts = lost(one, event.base, pair, event.change)
    # A step of 20 ms instead of 16: 80 % of linear.
    assert sum(part.share for part in parts) == pytest.approx(0.2)
    assert [part.part for part in parts[:3]] == ["exchange", "computation", "skew"]
    assert "1 instead" in parts[1].why  # of two threads
    # Strong scaling: half of the items each, so all but the update should take half as long.
    halved = {**{name: ns / 2 for name, ns in ALONE.items()}, "optimizer": 1e6}
    strong = lost(one, event.base, Point(2, "ddp", 8, 1), {**event.change, "parts_ns": halved})
    assert strong[0].part == "optimizer" and strong[0].ns == pytest.approx(5e5)
    assert sum(abs(part.ns) for part in strong[1:]) == pytest.approx(0.0)


def test_a_number_of_ranks_that_fails_does_not_end_the_others() -> None:
    failing = trial("out of memory", None, text="no room", base={}, change={})
    state = scaled(Bench({"parallel.ranks=2": failing, "parallel.ranks=4": trial("faster", 2.0)}), 1, 2, 4)
    assert state.rows[1].efficiency is None and state.rows[2].efficiency is not None
    assert "no room" in "\n".join(lines(scaling_blocks(state, "x.toml")))
    # If it is the first one, it ends them, with advice.
    text = "failed: the baseline itself fails: out of memory"
    bench = Bench({"parallel.ranks=2": trial("failed", None, text=text, base={}, change={})})
    state = scaled(bench, 1, 2, 4)
    assert len(bench.requests) == 1
    assert text in state.failed and state.failed.endswith("--ranks 2,4")


def test_a_stop_keeps_what_is_known() -> None:
    stop = threading.Event()
    bench = Bench({"parallel.ranks=2": two()})

    def measure(request: Any, tell: Any, stopping: Any) -> TrialEvent:
        found = bench(request, tell, None)
        stop.set()
        return found

    request = ScalingRequest(Base("x.toml", sets=SETS), (1, 2, 4))
    state = run_scaling(request, stop=stop, measure=measure, machine=machine(cores=4))
    assert state.stopped and state.rows[1].efficiency is not None and state.rows[2].trial is None
    assert any(
        line.startswith("4 ranks") and "n/a" in line for line in lines(scaling_blocks(state, "x.toml"))
    )


def test_a_trial_that_cannot_begin_ends_it_with_what_is_known() -> None:
    bench = Bench({"parallel.ranks=2": two()})

    def measure(request: Any, tell: Any, stop: Any) -> TrialEvent:
        if "parallel.ranks=4" in request.sets:
            raise UsageError("no such device")
        return bench(request, tell, stop)

    request = ScalingRequest(Base("x.toml", sets=SETS), (1, 2, 4))
    state = run_scaling(request, measure=measure, machine=machine(cores=4))
    assert state.failed == "4 ranks: no such device" and state.rows[1].efficiency is not None
    with pytest.raises(UsageError, match="no such device"):
        run_scaling(replace(request, counts=(1, 4)), measure=measure, machine=machine(cores=4))
