"""Records and times real steps: two small traces predict a larger one, on the CPU and with fake tensors for a GPU."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.tiers import few

from ndd_engine.child import decoded
from ndd_engine.config import Config, read
from ndd_engine.hardware.kernels import kernels_of
from ndd_engine.predict import step_probes
from ndd_engine.predict.allocator import MIB, Rules
from ndd_engine.predict.estimate import HOST_GRANULE, MANY, ONE, Family, Memory, Trace, fit
from ndd_engine.predict.fakes import traced
from ndd_engine.predict.step_probes import (
    UNCHECKED,
    Prober,
    alike,
    caveat,
    disagreement,
    endless,
    extremes,
    longest_first,
    record,
    sizes,
)
from ndd_engine.train.prepare import seed
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.factory_data import prepare

CPU = torch.device("cpu")


def made(workload: str, *sets: str) -> tuple[Config, Any]:
    config = read(None, ["run.device=cpu", *sets], workload).resolve()
    seed(config.run.seed)
    return config, prepare(config, lambda _: None)


def prober(workload: str, *sets: str) -> Prober:
    return Prober(*made(workload, *sets), CPU, lambda _: None)


@pytest.fixture(scope="module")
def chartext() -> Prober:
    """Its steps are timed by a clock that tests set."""
    return prober("chartext", "workload.size=tiny")


@pytest.mark.long
@pytest.mark.parametrize("amp", few([pytest.param("off", marks=pytest.mark.promise), "bf16"], 1))
def test_two_small_steps_predict_a_larger_one(amp: str) -> None:
    probe = prober("chartext", "workload.size=tiny", f"precision.amp={amp}")
    family = fit(probe.trace(4), probe.trace(8), (4, 8))
    truth = probe.trace(32)
    for mark in (ONE, MANY):
        predicted = family.trace(32).until(mark).peak(HOST_GRANULE)
        assert predicted == pytest.approx(truth.until(mark).peak(HOST_GRANULE), rel=0.01)


def one(*sizes: int) -> Trace:
    return Trace(tuple(enumerate(sizes)))


def test_probing_continues_until_two_neighbouring_traces_match() -> None:
    # At 4 a library selects another kernel with one more allocation, which hardly changes the peak.
    traces = {4: one(400, 50, 7), 8: one(800, 50), 16: one(1600, 50), 32: one(3200, 50)}
    asked: list[int] = []

    def trace(micro: int) -> Trace:
        asked.append(micro)
        return traces[micro]

    found = alike(trace, (4, 8, 16, 32))
    assert asked == [4, 8, 16]
    assert found.aligned and found.at == (8, 16) and not found.nonlinear
    assert found.trace(64).peak() == 6450


def grows(by: dict[int, int]) -> tuple[Family, list[int]]:
    """Traces of one allocation, by micro-batch in MiB: the family and the recorded sizes."""
    asked: list[int] = []

    def trace(micro: int) -> Trace:
        asked.append(micro)
        return one(by[micro] * MIB, 8 * MIB)

    return alike(trace, tuple(by)), asked


def test_a_third_size_confirms_the_line_or_lowers_confidence() -> None:
    family, asked = grows({4: 4, 8: 8, 16: 16, 32: 99})
    assert asked == [4, 8, 16] and family.at == (4, 8) and not family.nonlinear
    # A workspace that appears at 16 and stays: the line through 8 and 16 is wrong as well, and 32 shows it.
    family, asked = grows({4: 4, 8: 8, 16: 80, 32: 96})
    assert asked == [4, 8, 16, 32] and family.nonlinear
    memory = Memory(family, "gpu", 0, "test")
    assert not memory.reliable and "104 MiB" in memory.why_not and "232 MiB" in memory.why_not
    # One that grows only from 8 on: 16 contradicts 4 and 8, 32 confirms 8 and 16.
    family, _ = grows({4: 8, 8: 8, 16: 16, 32: 32})
    assert family.at == (8, 16) and Memory(family, "gpu", 0, "test").reliable


def test_a_line_that_nothing_confirms_has_low_confidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(micro: int) -> Trace:
        if micro > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return one(micro * MIB)

    assert alike(trace, (4, 8, 16)).nonlinear == UNCHECKED
    monkeypatch.setattr("ndd_engine.predict.step_probes.RECORD_S", 0.0)
    assert grows({4: 4, 8: 8, 16: 16})[0].nonlinear == UNCHECKED  # a third recording would take too long
    assert not grows({2: 2, 3: 3})[0].nonlinear  # three items: nothing larger exists


def test_traces_that_never_match_end_with_the_largest() -> None:
    traces = {4: one(400), 8: one(800, 1), 16: one(1600, 1, 2)}
    found = alike(lambda micro: traces[micro], (4, 8, 16))
    assert not found.aligned and found.at == (8, 16)


def test_probing_ends_at_a_size_that_does_not_fit() -> None:
    def trace(micro: int) -> Trace:
        if micro > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return one(*range(micro))

    found = alike(trace, (4, 8, 16))
    assert found.at == (4, 8)
    with pytest.raises(torch.OutOfMemoryError):
        alike(trace, (16, 32))


class Clock:
    """A clock that advances only in the given methods."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._patch = monkeypatch
        monkeypatch.setattr("ndd_engine.predict.step_probes.time.perf_counter", lambda: self.now)

    def takes(self, owner: type, name: str, seconds: Callable[..., float]) -> None:
        """Each call of a method takes `seconds(*args)`."""
        plain = getattr(owner, name)

        def slow(this: Any, *args: Any) -> Any:
            self.now += seconds(*args)
            return plain(this, *args)

        self._patch.setattr(owner, name, slow)


@pytest.mark.parametrize(
    ("items", "found"),
    [
        (100, (4, 8, 16, 32)),
        (9, (4, 8, 9)),
        (7, (4, 6, 7)),
        (4, (2, 3, 4)),
        (3, (2, 3)),
        (2, (2,)),
        (1, (1,)),
    ],
)
def test_small_datasets_limit_the_probed_sizes(items: int, found: tuple[int, ...]) -> None:
    assert sizes(SimpleNamespace(train_data=range(items))) == found  # type: ignore[arg-type]


def test_a_single_size_is_used_for_all_sizes() -> None:
    found = alike(lambda _: one(400, 50), (2,))
    assert found.aligned and found.trace(1).peak() == found.trace(2).peak() == 450


@pytest.mark.parametrize(("replayed", "words"), [(1000, ""), (1019, ""), (1100, "1 KiB"), (800, "800 B")])
def test_a_disagreeing_allocator_is_reported(replayed: int, words: str) -> None:
    found = disagreement(replayed, 1000)
    assert (words in found) if words else found == ""


@pytest.mark.slow
@pytest.mark.long
def test_the_peak_is_predicted_for_the_longest_items() -> None:
    probe = prober(
        "summarise", "workload.size=tiny", "workload.pairs=400", "workload.target=16", "batch.sequence=24"
    )
    longest, looked = extremes(probe.workload)
    data = probe.workload.train_data
    assert looked == len(data)
    for part in (0, 1):
        assert max(data[place][part].numel() for place in longest) == max(
            data[place][part].numel() for place in range(len(data))
        )
    source, target = next(longest_first(probe.workload, probe.config, 8, longest))[:2]
    assert source.shape[0] == target.shape[0] == 8
    family = probe.family()
    assert family.aligned
    ordinary = record(probe.stepper, endless(probe.workload, probe.config, 32), CPU)
    assert family.trace(32).peak(HOST_GRANULE) >= 0.99 * ordinary.peak(HOST_GRANULE)


@pytest.mark.long
def test_a_step_leaves_the_optimizer_state_allocated() -> None:
    probe = prober("eeg", "workload.hidden=[64]")
    moments = 2 * sum(parameter.nbytes for parameter in probe.workload.model.parameters())
    left = probe.trace(4).until(ONE).left()
    order = 8 * len(probe.workload.train_data)  # the epoch's permutation
    assert moments <= left <= 1.1 * moments + order + 8192


def test_compiled_code_has_a_caveat() -> None:
    assert "compiled" in caveat(read(None, ["speed.compile=default"], "chartext").resolve("tiny"))
    assert caveat(read(None, ["workload.size=tiny"], "chartext").resolve()) == ""


@pytest.mark.slow
@pytest.mark.long
def test_steps_are_timed_at_several_batch_sizes(monkeypatch: pytest.MonkeyPatch, chartext: Prober) -> None:
    clock = Clock(monkeypatch)
    clock.takes(Stepper, "forward_backward", lambda batch, _: 0.002 + 0.001 * batch[0].shape[0])
    clock.takes(Stepper, "update", lambda _: 0.003)
    found = chartext.time([2, 8, 32], 5.0, lambda _: True)
    assert found is not None and [point.micro for point in found.points] == [2, 8, 32]
    assert [point.compute_s for point in found.points] == pytest.approx([0.004, 0.01, 0.034])
    assert found.update_s == pytest.approx(0.003)
    assert found.measured(8) and not found.measured(9)
    assert found.micro_s(16) == pytest.approx(0.018)


@pytest.mark.long
@pytest.mark.parametrize(
    ("longest_s", "fits"), few([(5.0, 7), (1e-9, 99)], 1), ids=["does not fit", "is slow"]
)
def test_timing_ends_at_a_size_that_does_not_fit_or_is_slow(
    chartext: Prober, longest_s: float, fits: int
) -> None:
    found = chartext.time([2, 8, 32], longest_s, lambda micro: micro <= fits)
    assert found is not None and [point.micro for point in found.points] == [2]
    assert chartext.time([2, 8, 32], 5.0, lambda _: False) is None


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the peak resident size can be reset on Linux only")
@pytest.mark.budget(25)
def test_the_prediction_includes_heap_fragmentation() -> None:
    probe = prober("antispoof", "workload.size=tiny", "workload.clips=80")
    memory = probe.memory(outside_bytes=100 * MIB)
    plain = {micro: memory.peak(micro) for micro in (8, 32, 64)}
    probe.time([8, 32], 5.0, lambda _: True)
    found = probe.with_heap(memory)
    assert [micro for micro, _ in found.heap] == [8, 32]
    # Fragmentation: glibc's heap is always larger than the requested memory.
    assert all(found.peak(micro) == plain[micro] + found.heap_bytes(micro) for micro in plain)
    assert found.peak(32) > plain[32] and found.peak(64) > plain[64]
    assert decoded(Memory, json.loads(json.dumps(asdict(found)))) == found


# As on a GPU, with fake tensors.


@pytest.mark.long
@pytest.mark.parametrize("workload", few(["chartext", "eeg", "antispoof", "finetune"], 2))
def test_steps_are_traced_with_fake_tensors(workload: str) -> None:
    size = {"eeg": "workload.hidden=[64]"}.get(workload, "workload.size=tiny")
    config, found = made(workload, size, "precision.amp=bf16")
    first, second = (traced(config, found, next(endless(found, config, micro))) for micro in (2, 4))
    family = fit(first.trace, second.trace, (2, 4))
    assert family.aligned
    flops, more = (
        sum(one.flops for op in each.micro for one in kernels_of(op, True)) for each in (first, second)
    )
    assert more == pytest.approx(2 * flops, rel=0.05) and flops
    weights = sum(parameter.nbytes for parameter in found.model.parameters())
    # Parameters, gradients, two moments, and activations.
    assert family.trace(8).peak() > 4 * weights
    assert family.trace(64).on_gpu(Rules()).peak_reserved >= family.trace(64).peak()


def test_attention_on_a_gpu_does_not_store_scores() -> None:
    """The math kernel would store (B, H, T, T), most of the memory for long sequences."""
    config, found = made("chartext", "workload.size=tiny", "batch.sequence=512", "precision.amp=bf16")
    trace = traced(config, found, next(endless(found, config, 4))).trace
    heads = config.workload.heads  # type: ignore[union-attr]
    scores = 4 * heads * 512 * 512 * 2  # bytes per layer
    assert max(trace.sizes()) < scores
    assert any("flash" in label for label in trace.labels)


@pytest.mark.long
def test_the_optimizer_implementation_is_that_of_the_run() -> None:
    def labels(*sets: str) -> Counter[str]:
        config, found = made("eeg", "workload.hidden=[512, 512]", *sets)
        return Counter(traced(config, found, next(endless(found, config, 2))).trace.labels)

    # The default on a GPU is fused, which only allocates its state; the others allocate temporaries.
    default = labels()
    assert default == labels("optimizer.implementation=fused")
    assert labels("optimizer.implementation=foreach").total() > default.total()


def test_the_cuda_context_counts_in_every_prediction_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # It exists from the first use of the GPU on, so that the free memory before a second prediction lacks it already.
    free = [80_000]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free[0], 100_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 0)
    monkeypatch.setattr(step_probes, "_contexts", {})
    gpu = torch.device("cuda", 0)
    before, free[0] = free[0], 79_500
    assert step_probes.context_bytes(gpu, before) == 500
    assert step_probes.context_bytes(gpu, free[0]) == 500
    assert step_probes.context_bytes(torch.device("cuda", 1), free[0]) == 0


def test_two_numbers_of_threads_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def timed(*_: Any) -> tuple[float, int]:
        used.append(torch.get_num_threads())
        return 2e6 * used[-1], 1

    monkeypatch.setattr(step_probes, "time_micro", timed)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = prober("chartext", "workload.size=tiny", "batch.micro=2").by_threads(1)
        assert found == ([0.004] * 3, [0.002] * 3) and used == [2, 2, 1, 1, 2, 1, 2, 1]
        assert torch.get_num_threads() == 2
        monkeypatch.setattr(step_probes, "SLOW_NS", 1)
        assert prober("chartext", "workload.size=tiny", "batch.micro=2").by_threads(1) == ([], [])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(
        step_probes, "time_micro", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    )
    assert prober("chartext", "workload.size=tiny", "batch.micro=2").by_threads(1) == ([], [])
