"""Real steps recorded and timed: two small traces tell a larger one, on this processor and as a card would run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ndd_engine.config import Config, read
from ndd_engine.predict.allocator import MIB, Rules
from ndd_engine.predict.fakes import traced
from ndd_engine.predict.memory import HOST_GRANULE, MANY, ONE
from ndd_engine.predict.probing import Prober, caveat
from ndd_engine.predict.trace import fit
from ndd_engine.train.prepare import seed
from ndd_engine.workloads.registry import prepare

CPU = torch.device("cpu")


def made(workload: str, *sets: str) -> tuple[Config, Any]:
    config = read(None, ["run.device=cpu", *sets], workload).resolve()
    seed(config.run.seed)
    return config, prepare(config, lambda _: None)


def prober(workload: str, *sets: str) -> Prober:
    return Prober(*made(workload, *sets), CPU, lambda _: None)


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_two_small_steps_tell_a_larger_one(amp: str) -> None:
    probe = prober("chartext", "workload.size=tiny", f"precision.amp={amp}")
    family = fit(probe.trace(4), probe.trace(8), (4, 8))
    truth = probe.trace(32)
    for mark in (ONE, MANY):
        predicted = family.trace(32).until(mark).peak(HOST_GRANULE)
        assert predicted == pytest.approx(truth.until(mark).peak(HOST_GRANULE), rel=0.01)


def test_what_a_step_leaves_behind_is_the_state_of_the_optimizer() -> None:
    probe = prober("ndd", "workload.hidden=[64]")
    moments = 2 * sum(parameter.nbytes for parameter in probe.workload.model.parameters())
    left = probe.trace(4).until(ONE).left()
    order = 8 * len(probe.workload.train_data)  # of an epoch's items
    assert moments <= left <= 1.1 * moments + order + 8192


def test_accumulating_takes_the_gradients_more() -> None:
    memory = prober("ndd", "workload.hidden=[512, 256]").memory(outside_bytes=100 * MIB)
    assert memory.promised
    assert memory.peak(64, 4) >= memory.peak(64, 1) > 100 * MIB
    assert memory.peak(64, 2) == memory.peak(64, 8)
    assert memory.peak(256) > memory.peak(64)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["speed.compile=default"], "compiled"),
        (["workload.size=tiny"], ""),
    ],
)
def test_what_cannot_be_promised_is_told(sets: list[str], words: str) -> None:
    found = caveat(read(None, sets, "chartext").resolve("tiny"))
    assert (words in found) if words else found == ""


def test_steps_are_timed_at_spread_batches() -> None:
    probe = prober("chartext", "workload.size=tiny")
    found = probe.time([2, 8, 32], 5.0, lambda _: True)
    assert [point.micro for point in found.points] == [2, 8, 32]
    assert all(point.compute_s > 0 and point.data_s > 0 for point in found.points)
    assert found.update_s > 0
    assert found.measured(8) and not found.measured(9)
    assert found.points[-1].compute_s > found.points[0].compute_s


def test_what_memory_does_not_hold_is_not_tried() -> None:
    found = prober("chartext", "workload.size=tiny").time([2, 8, 32], 5.0, lambda micro: micro < 8)
    assert [point.micro for point in found.points] == [2]


def test_a_slow_micro_batch_ends_the_timing() -> None:
    found = prober("chartext", "workload.size=tiny").time([2, 8, 32], 1e-9, lambda _: True)
    assert [point.micro for point in found.points] == [2]


# As on a card, from tensors without contents.


@pytest.mark.parametrize("workload", ["chartext", "ndd", "antispoof", "finetune"])
def test_fake_steps_are_traced_without_a_card(workload: str) -> None:
    size = {"ndd": "workload.hidden=[64]"}.get(workload, "workload.size=tiny")
    config, found = made(workload, size, "precision.amp=bf16")
    (first, flops), (second, more) = (traced(config, found, micro) for micro in (2, 4))
    family = fit(first, second, (2, 4))
    assert family.aligned
    assert more == pytest.approx(2 * flops, rel=0.05)
    weights = sum(parameter.nbytes for parameter in found.model.parameters())
    # Parameters, gradients and two moments, and something to compute with.
    assert family.trace(8).peak() > 4 * weights
    assert family.trace(64).on_card(Rules()).peak_reserved >= family.trace(64).peak()


def test_attention_on_a_card_keeps_no_scores() -> None:
    """The mathematical kernel would keep (B, H, T, T): with a long sequence most of the memory."""
    config, found = made("chartext", "workload.size=tiny", "batch.sequence=512", "precision.amp=bf16")
    trace, _ = traced(config, found, 4)
    scores = 4 * 2 * 512 * 512 * 2  # bytes of one layer's
    largest = max(size for size in trace.sizes())
    assert largest < scores * 4
    assert any("flash" in label for label in trace.labels)


def test_the_optimizer_of_fakes_is_the_one_of_the_run() -> None:
    config, found = made("ndd", "workload.hidden=[512, 512]")
    trace, _ = traced(config, found, 2)
    assert not any("foreach" in label for label in trace.labels)  # with its copies of all gradients


def test_an_lstm_is_one_call_with_its_reserve() -> None:
    config, found = made("ndd", "workload.size=lstm", "batch.sequence=96")
    labels = traced(config, found, 2)[0].labels
    longer, wider = made("ndd", "workload.size=lstm", "batch.sequence=192")
    assert abs(len(labels) - len(traced(longer, wider, 2)[0].labels)) < 20
