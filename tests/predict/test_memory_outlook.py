"""Memory of a batch: traces at two sizes predict a third, what fits a GPU, and what one of several ranks needs."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.child import decoded
from ndd_engine.config import Config, read
from ndd_engine.hardware.named_gpus import gpu_named
from ndd_engine.predict import rank_memory
from ndd_engine.predict.allocator import MIB, Rules
from ndd_engine.predict.estimate import (
    DATA,
    DATA_END,
    MANY,
    ONE,
    TRIFLE,
    Family,
    Fit,
    Memory,
    StepTime,
    TimedBatch,
    Trace,
    fit,
)
from ndd_engine.predict.fakes import traced
from ndd_engine.predict.outlook import Outlook, predict_for
from ndd_engine.predict.rank_memory import BucketsOnly, pretended, shares, stepper_of_rank
from ndd_engine.predict.step_probes import Prober, endless, in_order, record
from ndd_engine.train.prepare import seed
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare


def step(micro: int, extra: bool = False) -> Trace:
    """A weight, two activations (the first outlives the second), and a temporary with another slope."""
    sizes = {
        "weight": 4096,
        "first": 1000 * micro,
        "second": 3000 * micro,
        "sum": 8,
        "third": 50_000 + 100 * micro,
    }
    events, labels = [], []
    for name in ("weight", "first", "second", *(["extra"] if extra else []), "sum"):
        events.append((len(labels), sizes.get(name, 700 * micro)))
        labels.append(name)
    events += [(labels.index("second"), -1), (len(labels), sizes["third"])]
    labels.append("third")
    events += [(labels.index("first"), -1)]
    return Trace(tuple(events), tuple(labels), {"one": len(events)})


@pytest.mark.parametrize("micro", [1, 3, 16, 96, 1000])
def test_a_predicted_trace_equals_the_recorded_one(micro: int) -> None:
    family = fit(step(2), step(4), (2, 4))
    assert family.aligned
    assert family.trace(micro).events == step(micro).ordered().events
    assert family.trace(micro).peak() == step(micro).peak()


def test_the_peak_moves_with_the_batch_size() -> None:
    family = fit(step(2), step(4), (2, 4))
    # Small batches peak at the temporary, large ones at the two activations.
    assert family.trace(1).peak() == 4096 + 1000 + 8 + 50_100
    assert family.trace(100).peak() == 4096 + 100_000 + 300_000 + 8


def test_the_order_of_consecutive_frees_does_not_matter() -> None:
    one = Trace(((0, 8), (1, 8), (1, -1), (0, -1), (2, 16)))
    other = Trace(((0, 8), (1, 8), (0, -1), (1, -1), (2, 16)))
    assert one.ordered() == other.ordered()


def test_marks_keep_their_place() -> None:
    trace = Trace(((0, 8), (1, 8), (1, -1), (0, -1), (2, 16)), marks={"one": 3})
    assert trace.ordered().until("one").events == ((0, 8), (1, 8), (1, -1))


def test_different_sequences_are_detected_and_overestimated() -> None:
    family = fit(step(2), step(4, extra=True), (2, 4))
    assert not family.aligned
    assert family.loose == 1
    predicted, truth = family.trace(40).peak(), step(40, extra=True).peak()
    assert predicted == truth  # unmatched allocations are assumed proportional, as they are in this case
    assert fit(step(2, extra=True), step(4), (2, 4)).aligned is False


def test_a_line_needs_two_batches() -> None:
    with pytest.raises(ValueError, match="2 and 2"):
        fit(step(2), step(2), (2, 2))


def test_memory_of_host_and_gpu_and_its_json() -> None:
    import json

    family = fit(step(2), step(4), (2, 4))
    host = Memory(family, "host", 5 * MIB, "test")
    gpu = Memory(family, "gpu", 5 * MIB, "test", Rules())
    assert host.peak(100) == 5 * MIB + family.trace(100).peak(64)
    assert gpu.peak(100) == 5 * MIB + 2 * MIB
    assert gpu.peak(1000) > gpu.peak(100)
    for memory in (host, gpu):
        again = decoded(Memory, json.loads(json.dumps(asdict(memory))))
        assert again == memory
        assert again.peak(100) == memory.peak(100)


def looped(items: int) -> Trace:
    """A batch built item by item, then an operator that loops over its items, and one that does not."""
    events: list[tuple[int, int]] = []
    labels: list[str] = []

    def request(label: str, size: int) -> int:
        events.append((len(labels), size))
        labels.append(label)
        return len(labels) - 1

    def end(*keys: int) -> None:
        events.extend((key, -1) for key in keys)

    weight = request("weight", 6400)
    marks = {f"{DATA}1": len(events)}
    kept = []
    for _ in range(items):
        raw = request("read", 12_800)
        kept.append(request("encode", 640))
        end(raw)
    batch = request("stack", 640 * items)
    end(*kept)
    marks[f"{DATA_END}1"] = len(events)
    out = request("attention", 1280 * items)
    for _ in range(items):
        one, two = request("attention", 64), request("attention", 3200)
        end(two, one)
    loss = request("loss", 64)
    marks["one"] = len(events)
    end(batch, out, loss, weight)
    return Trace(tuple(events), tuple(labels), marks)


@pytest.mark.parametrize("items", [8, 24, 96])
def test_loops_over_items_match_when_collapsed(items: int) -> None:
    family = fit(looped(4), looped(8), (4, 8))
    assert family.aligned
    real = looped(items).ordered()
    assert family.trace(items).peak(64) == real.peak(64) == real.collapsed().peak(64)
    assert family.trace(items).until("one").left() == real.until("one").left()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), min_size=1, max_size=60))
def test_collapsing_preserves_peak_and_remaining_memory(steps: list[tuple[int, int, bool]]) -> None:
    events: list[tuple[int, int]] = []
    labels: list[str] = []
    alive: list[int] = []
    for operator, granules, ends in steps:
        if ends and alive:
            events.append((alive.pop(operator % len(alive)), -1))
        else:
            alive.append(len(labels))
            events.append((len(labels), 64 * granules))
            labels.append(f"op{operator}")
    trace = Trace(tuple(events), tuple(labels))
    found = trace.collapsed()
    assert found.peak(64) >= trace.peak(64) - TRIFLE
    assert found.left() == trace.left()


def retrying() -> Memory:
    """Per item 10 MiB that are freed before 11 MiB are allocated: they reserve 21 MiB, or 11 with a retry."""
    trace = Trace(((0, 0), (0, -1), (1, 0), (1, -1)))
    return Memory(
        Family((4, 8), trace, ((0.0, 10.0 * MIB), (0.0, 11.0 * MIB)), aligned=True), "gpu", 5 * MIB, "test"
    )


@pytest.mark.parametrize(
    ("available", "found"),
    [
        (1000, Fit((5 + 210) * MIB, True, 0, 215 * MIB)),
        (215, Fit((5 + 210) * MIB, True, 0, 215 * MIB)),
        (214, Fit((5 + 110) * MIB, True, 1, 215 * MIB)),
        (115, Fit((5 + 110) * MIB, True, 1, 215 * MIB)),
        (114, Fit((5 + 210) * MIB, False, 0, 215 * MIB)),
        (4, Fit((5 + 210) * MIB, False, 0, 215 * MIB)),
        (None, Fit((5 + 210) * MIB, None, 0, 215 * MIB)),
    ],
)  # fmt: skip
def test_memory_fits_with_retries_or_does_not_fit(available: int | None, found: Fit) -> None:
    limit = None if available is None else available * MIB
    assert retrying().fit(10, 1, limit) == found
    # Memory for other purposes lowers the limit.
    if limit is not None:
        more = retrying().fit(10, 1, limit + 7 * MIB, added_bytes=7 * MIB)
        assert (more.fits, more.retries, more.peak_bytes) == (
            found.fits,
            found.retries,
            found.peak_bytes + 7 * MIB,
        )


def test_on_the_host_there_are_no_retries() -> None:
    family = retrying().family
    assert Memory(family, "host", 0, "test").fit(10, 1, 109 * MIB).fits is False
    assert Memory(family, "host", 0, "test").fit(10, 1, 110 * MIB) == Fit(110 * MIB, True, 0, 110 * MIB)


def test_the_larger_of_both_address_orders_is_predicted() -> None:
    events = ((0, 0), (1, 0), (0, -1), (1, -1), (2, 0), (3, 0), (4, 0))
    # Two free segments of 20 MiB; what is split off the first one decides what fits into the other.
    sizes = (20, 20, 12, 8, 20)
    family = Family((1, 2), Trace(events), tuple((0.0, float(size * MIB)) for size in sizes), aligned=True)
    memory = Memory(family, "gpu", 0, "test")
    orders = [family.trace(1).on_gpu(Rules(), descending=order).peak_reserved for order in (False, True)]
    assert memory.peak(1) == max(orders)


def test_each_stream_has_a_pool_of_its_own() -> None:
    def recorded(micro: int) -> Trace:
        """30 MiB on one stream are free again, but not for the other stream. The last allocation of the first fits."""
        nodes = [(0, "a", 1, 10 * micro * MIB, 7), (1, "a", 1, -1, 7), (2, "b", 2, 10 * micro * MIB, 9),
                 (3, "c", 3, 10 * micro * MIB, 7), (4, "one", 0, 0, 0)]  # fmt: skip
        return in_order(nodes)

    assert recorded(3).streams == (7, 9, 7)
    assert recorded(3).on_gpu(Rules()).reserved == 60 * MIB
    family = fit(recorded(3), recorded(6), (3, 6))
    assert family.trace(5).on_gpu(Rules()).reserved == 100 * MIB
    assert recorded(3).until("one").ordered().collapsed().on_gpu(Rules()).reserved == 60 * MIB
    # On one stream the second takes the memory of the first.
    assert replace(recorded(3), streams=()).on_gpu(Rules()).reserved == 60 * MIB
    assert Trace(((0, 30 * MIB), (0, -1), (1, 30 * MIB))).on_gpu(Rules()).reserved == 30 * MIB
    assert Trace(((0, 30 * MIB), (0, -1), (1, 30 * MIB)), streams=(0, 5)).on_gpu(Rules()).reserved == 60 * MIB


# The answers of `check`.


def outlook(available_mib: int | None, kept_mib: int = 0) -> Outlook:
    config = read(
        None, ["workload.size=tiny", "batch.micro=10", "batch.accumulation=2"], "chartext"
    ).resolve()
    return Outlook(
        config, retrying(),
        StepTime((TimedBatch(10, 1e-3, 1e-3, 0.0),), 0.0, on_gpu=True), 1000, 4000, 8000, kept_mib * MIB,
        None if available_mib is None else available_mib * MIB, 10, 100,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("available", "kept", "fits", "retries", "total", "nearest"),
    [
        (215, 0, True, 0, 215, None),
        (214, 0, True, 1, 115, (5, 4)),  # the same effective batch without retries
        (114, 0, False, 0, 215, (5, 4)),
        (214, 100, False, 0, 315, (5, 4)),
        (None, 0, None, 0, 215, None),
    ],
)
def test_what_fits_the_memory_of_a_gpu(
    available: int | None, kept: int, fits: bool | None, retries: int, total: int, nearest: Any
) -> None:
    found = outlook(available, kept)
    assert (found.fits, found.retries, found.nearest) == (fits, retries, nearest)
    assert found.total_bytes == found.parts["total"] == total * MIB


# One of several ranks.


CPU = torch.device("cpu")


def made(*sets: str) -> tuple[Config, Workload]:
    all_sets = ["run.device=cpu", "workload.size=mini", "batch.sequence=16", "precision.amp=off", *sets]
    config = read(None, all_sets, "chartext").resolve()
    seed(config.run.seed)
    return config, prepare(config, lambda _: None)


@cache
def predicted(*sets: str, device: str = "cpu") -> Trace:
    """device: "cuda" leaves out the copies of gloo."""
    config, workload = made(*sets)
    with pretended(config.parallel.ranks, torch.device(device)):
        return Prober(config, workload, CPU, lambda _: None).trace(4)


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_of_ddp_needs_buckets_and_one_of_fsdp2_a_share() -> None:
    alone, ddp = predicted(), predicted("parallel.ranks=2")
    two, four = (predicted(f"parallel.ranks={count}", "parallel.strategy=fsdp2") for count in (2, 4))
    _, workload = made()
    weights = sum(item.nbytes for item in workload.model.parameters())
    assert ddp.peak() - alone.peak() == pytest.approx(weights, rel=0.05)
    # The trace of a sharded model contains its parameters: a share of them, of the gradients and of two moments.
    assert two.peak() - four.peak() == pytest.approx(4 * weights * (1 / 2 - 1 / 4), rel=0.3)
    assert four.peak() < alone.peak() + weights
    assert not dist.is_initialized()


@pytest.mark.long
@pytest.mark.parametrize("compress", [pytest.param("off", marks=pytest.mark.slow), "fp16"])
def test_the_stand_in_for_fake_tensors_allocates_what_ddp_does(compress: str) -> None:
    config, workload = made("parallel.ranks=2", f"parallel.compress={compress}", "parallel.bucket_mb=0.2")
    with pretended(2, CPU):
        real = Prober(config, workload, CPU, lambda _: None)
        batches = [real.trace(4)]
        single = config.batch.model_copy(update={"accumulation": 1})
        plain = config.model_copy(update={"batch": single})

        def stand_in() -> Stepper:
            return stepper_of_rank(workload, plain, CPU, BucketsOnly(config.parallel, CPU))

        batches.append(record(stand_in, endless(workload, config, 4), CPU))
    for mark in (ONE, MANY):
        first, second = (trace.until(mark).peak() for trace in batches)
        assert second == pytest.approx(first, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_a_gpu_that_is_not_here_is_traced_with_fake_tensors(strategy: str) -> None:
    config, workload = made("parallel.ranks=4", f"parallel.strategy={strategy}")
    with pretended(4, torch.device("cuda")):
        fake = traced(config, workload, next(endless(workload, config, 4)))
    real = predicted("parallel.ranks=4", f"parallel.strategy={strategy}", device="cuda")
    weights = sum(item.nbytes for item in workload.model.parameters()) if strategy == "ddp" else 0
    # On a GPU the parameters are part of the trace, on the CPU the order of the data.
    order = 8 * len(workload.train_data)  # type: ignore[arg-type]
    assert fake.trace.peak() - weights == pytest.approx(real.peak() - order, rel=0.02)
    assert fake.micro and fake.update


def test_what_a_rank_holds_throughout_a_step() -> None:
    _, workload = made()
    whole = sum(item.nbytes for item in workload.model.parameters())

    def held(*sets: str) -> rank_memory.Shares:
        config = made(*sets)[0]
        return shares(config, workload.model, 2 * whole)

    ddp = held("parallel.ranks=4")
    assert (ddp.parameters, ddp.gradients, ddp.buckets, ddp.optimizer) == (whole, 0, whole, 2 * whole)
    assert held("parallel.ranks=4", "batch.accumulation=2").gradients == whole  # beside the buckets
    sharded = held("parallel.ranks=4", "parallel.strategy=fsdp2")
    assert whole / 4 <= sharded.parameters < whole / 3.5
    assert sharded.gradients == sharded.parameters and sharded.optimizer == pytest.approx(whole / 2, rel=0.1)
    assert sharded.gathered == whole  # both of its two layers are there at a time
    half = held("parallel.ranks=4", "parallel.strategy=fsdp2", "parallel.param_dtype=bf16")
    assert half.gathered == whole // 2


def test_a_rank_holds_its_shares_with_gathered_layers_and_buckets() -> None:
    config = read(
        None, ["workload.size=tiny", "batch.micro=10", "batch.accumulation=2", "parallel.ranks=4"], "chartext"
    ).resolve()
    held = rank_memory.Shares(4 * MIB, 3 * MIB, 8 * MIB, gathered=2 * MIB, buckets=MIB)
    found = replace(outlook(114), config=config, shares=held)
    assert found.parts["gathered layers"] == 2 * MIB and found.parts["buckets"] == MIB
    assert sum(found.parts.values()) == 2 * found.parts["total"]


@pytest.mark.long
def test_a_configuration_is_predicted_for_a_gpu_that_is_not_here() -> None:
    draft = read(None, ["workload.size=tiny", "batch.micro=256", "run.epochs=1"], "chartext")
    here: list[Outlook] = []
    for name in ("RTX 4070 Laptop", "H100 SXM"):
        found = predict_for(draft, gpu_named(name), lambda _: None)
        assert found.items and found.outlook.fits and not found.outlook.step_measured
        here.append(found.outlook)
    small, large = here
    assert small.config.precision.amp == "bf16"
    for one in here:
        assert one.step_range_s is not None and one.step_range_s[0] < one.step_s < one.step_range_s[1]
    # The same memory, and no slower on the faster GPU.
    assert small.total_bytes == large.total_bytes
    assert large.estimate is not None and small.estimate is not None
    assert large.estimate.busy[0][1] < small.estimate.busy[0][1]
