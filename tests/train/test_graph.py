"""The whole step as a graph: the same losses, static places, another rate, other shapes. The recorder is a fake.

It records by running the work once with everything restored after it, and replays by running it again;
tests/gpu has the tests on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from train_help import Trainer

from ndd_engine.batches import same_constants
from ndd_engine.config import Config, read
from ndd_engine.config.schema import why_no_graph
from ndd_engine.record.events import SettingEvent
from ndd_engine.train import prepare as prepare_module
from ndd_engine.train.data.loader import Batches
from ndd_engine.train.step.graph import WARM_UP_STEPS, CudaRecorder, Replay, StepGraph, Work
from ndd_engine.train.step.optimizers import make_optimizer, make_precision
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.factory_data import prepare
from ndd_watch.clock import PhaseClock

CPU = torch.device("cpu")
SETS = (
    "workload.samples=400", "workload.channels=2", "workload.hidden=[8]", "workload.dropout=0.0",
    "batch.sequence=8", "batch.micro=16", "batch.accumulation=2", "clip.max_norm=1.0", "schedule.kind=cosine",
)  # fmt: skip


class StandIn(CudaRecorder):
    """Runs the work where a GPU would replay it."""

    def __init__(self, stepper: Stepper, error: str | None = None) -> None:
        super().__init__()
        self.stepper, self.error = stepper, error
        self.warmed = self.replays = 0
        self.is_strict = self.beside = False

    @contextmanager
    def strict(self) -> Iterator[None]:
        assert self.beside, "a rehearsal on another stream keeps the memory of a step there"
        self.is_strict = True
        try:
            yield
        finally:
            self.is_strict = False

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        self.warmed += 1
        self.beside = True
        try:
            yield
        finally:
            self.beside = False

    def record(self, work: Work) -> tuple[Tensor, Replay]:
        if self.error is not None:
            try:
                raise RuntimeError(self.error)
            finally:  # as torch.cuda.graph.__exit__ does, whose capture_end raises its own error
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        loss = torch.zeros(())

        def replay() -> None:
            self.replays += 1
            # A replay writes gradients where the recording put them, whatever lay there.
            self.stepper.optimizer.zero_grad(set_to_none=True)
            loss.copy_(work())

        return loss, replay


class Static(StandIn):
    """Keeps the gradient norm in one place, as a captured graph does."""

    def record(self, work: Work) -> tuple[Tensor, Replay]:
        loss, replay = super().record(work)
        norm = self.stepper.extras["grad_norm"] = torch.zeros(())

        def replay_norm() -> None:
            shown, self.stepper.extras = self.stepper.extras, {}
            replay()
            norm.copy_(self.stepper.extras["grad_norm"])
            self.stepper.extras = shown

        return loss, replay_norm


def made(*sets: str, error: str | None = None, graphed: bool = True) -> tuple[Stepper, Batches, Config]:
    config = read(None, [*SETS, *sets], "eeg").resolve()
    torch.manual_seed(3)
    workload = prepare(config)
    stepper = Stepper(workload, config, CPU, total_steps=20)
    if graphed:
        stepper.optimizer.by_name = {"": make_optimizer(config.optimizer, stepper.model, CPU)}
        for group in stepper.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        stepper.graph = StepGraph(stepper, StandIn(stepper, error))
    return stepper, Batches(workload.train_data, config), config


def both(error: str | None = None) -> tuple[Any, Batches, Stepper, Batches]:
    """A stepper with a graph, and one without; each with its batches."""
    stepper, batches, _ = made(error=error)
    plain, plain_batches, _ = made(graphed=False)
    return stepper, batches, plain, plain_batches


def smaller(source: Any, *places: int) -> Iterator[Any]:
    """The batches, of which those at some places have another shape."""
    for index, batch in enumerate(source):
        yield tuple(tensor[:10] for tensor in batch) if index in places else batch


def losses(stepper: Stepper, batches: Any, steps: int) -> list[float]:
    clock, out = PhaseClock(), []
    for step in range(steps):
        loss = stepper.step(batches, clock, step)
        assert loss is not None
        clock.end_step()
        out.append(loss)
    return [float(loss) for loss in out]  # read at the end: a replay must not change an earlier loss


def test_replayed_steps_are_the_steps() -> None:
    stepper, batches, plain, plain_batches = both()
    found = losses(stepper, batches.epoch(0), 9)
    assert found == pytest.approx(losses(plain, plain_batches.epoch(0), 9), rel=1e-5)
    recorder = stepper.graph._recorder
    # The rehearsal is a further step of the warm-up.
    assert (recorder.warmed, recorder.replays) == (WARM_UP_STEPS + 1, 9 - WARM_UP_STEPS)
    assert stepper.lr == plain.lr  # the rate went down along the cosine, inside the recorded optimizer
    assert float(stepper.optimizer.param_groups[0]["lr"]) == pytest.approx(plain.lr)
    (report,) = stepper.reports
    assert isinstance(report, SettingEvent)
    assert (report.name, report.in_effect) == ("speed.cuda_graph", True)


def test_batches_of_another_shape_run_by_themselves_and_too_many_end_it() -> None:
    stepper, batches, plain, plain_batches = both()
    places = (10, 11, 12, 13, 16, 17)
    found = losses(stepper, smaller(batches.epoch(0), *places), 10)
    assert found == pytest.approx(losses(plain, smaller(plain_batches.epoch(0), *places), 10), rel=1e-5)
    assert stepper.graph.failed is not None
    assert isinstance(stepper.reports[-1], SettingEvent) and stepper.reports[-1].in_effect is False


def test_after_an_eager_step_the_gradient_norm_is_that_of_the_replays_again() -> None:
    stepper, batches, plain, plain_batches = both()
    stepper.graph._recorder = Static(stepper)
    iterators = smaller(batches.epoch(0), 10, 11), smaller(plain_batches.epoch(0), 10, 11)
    norms = []
    for step in range(9):
        for one, iterator in zip((stepper, plain), iterators, strict=True):
            assert one.step(iterator, PhaseClock(), step) is not None
        norms.append(float(plain.extras["grad_norm"]))
        assert float(stepper.extras["grad_norm"]) == pytest.approx(norms[-1], rel=1e-4), step
    assert len(set(norms)) == 9


def test_replays_weigh_each_steps_own_micro_batches_and_one_without_weight_runs_eagerly() -> None:
    stepper, batches, plain, plain_batches = both()
    empty_batch = list(batches.epoch(0))[11]  # of the sixth step

    def weigh(batch: Any) -> Any:
        return 0.0 if torch.equal(batch[1], empty_batch[1]) else batch[1].abs().sum()

    for one in (stepper, plain):
        one.workload.weight = weigh
    found = losses(stepper, batches.epoch(0), 9)
    assert found == pytest.approx(losses(plain, plain_batches.epoch(0), 9), rel=1e-5)
    equal, equal_batches, _ = made()
    assert found != pytest.approx(losses(equal, equal_batches.epoch(0), 9), rel=1e-3)
    assert stepper.graph.failed is None
    assert stepper.graph._recorder.replays == 9 - WARM_UP_STEPS - 1


class Waits(torch.nn.Module):
    """Waits for the GPU: under `set_sync_debug_mode("error")` torch raises this at `.item()` (CUDAFunctions.h)."""

    def __init__(self, inner: torch.nn.Module, recorder: Any) -> None:
        super().__init__()
        self.inner, self.recorder = inner, recorder
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *given: Any) -> Any:
        self.calls += 1
        if self.recorder.is_strict:
            raise RuntimeError("called a synchronizing CUDA operation")
        return self.inner(*given)


def test_a_step_that_waits_for_the_gpu_is_found_before_it_is_captured() -> None:
    stepper, batches, plain, plain_batches = both(error="the capture must not begin")
    stepper.compute = waits = Waits(stepper.compute, stepper.graph._recorder)
    stepper.model.add_module("waits", waits)
    found = losses(stepper, batches.epoch(0), 8)
    assert found == pytest.approx(losses(plain, plain_batches.epoch(0), 8), rel=1e-5)
    (report,) = stepper.reports
    assert isinstance(report, SettingEvent) and report.in_effect is False
    assert float(waits.calls) == 16  # the rehearsal leaves no trace in buffers


def test_a_batch_whose_numbers_differ_from_the_captured_ones_is_not_replayed() -> None:
    one, zero = torch.ones(2), torch.zeros(2)
    batch = [one, 3, {"flag": True}]
    assert same_constants(batch, [zero, 3, {"flag": True}])
    assert same_constants({"x": one, "y": one}, {"x": zero, "y": one})
    # Names of keys and places of tensors were captured as well.
    for captured, other in [
        (batch, [one, 4, {"flag": True}]), (batch, [one, 3, {"flag": False}]), (batch, [one, 3.0, {"flag": True}]),
        ({"x": one, "a": one}, {"x": one, "b": one}), ({"x": one, "y": one}, {"y": one, "x": one}),
        ((one, 3), (3, one)), ((one, (one,)), ((one,), one)),
    ]:  # fmt: skip
        assert not same_constants(captured, other)


def test_memory_that_runs_out_while_capturing_is_no_reason_to_run_eagerly() -> None:
    stepper, batches, _ = made(error="CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        losses(stepper, batches.epoch(0), 8)


def test_a_run_whose_capture_fails_goes_on_from_the_step_before_it(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Graphed(Stepper):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            if self.config.speed.cuda_graph:
                self.graph = StepGraph(self, StandIn(self, "operation not permitted"))

    monkeypatch.setattr(prepare_module, "Stepper", Graphed)
    sets = (*trainer.ndd, "run.max_steps=6", "speed.cuda_graph=true", "checkpoint.every_epochs=0")
    failed = trainer.train(*sets)
    assert failed.end.status == "failed" and failed.end.step == WARM_UP_STEPS
    assert "not permitted" in failed.end.reason
    assert failed.end.checkpoint == f"step-{WARM_UP_STEPS:08d}"
    assert failed.end.reason.endswith("speed.cuda_graph=false")
    resumed = trainer.train("speed.cuda_graph=false", resume=failed)
    assert (resumed.end.status, resumed.end.step) == ("done", 6)


def test_what_cannot_be_recorded_is_known_before() -> None:
    def reason(device: str, *sets: str) -> str | None:
        config = read(None, [*SETS, *sets], "eeg").resolve()
        scales = make_precision(config, CPU).scaler is not None
        return why_no_graph(device == "cuda", config.parallel.ranks, scales, config.optimizer.name)

    assert reason("cpu") is not None
    assert reason("cuda") is None
    assert "fp16" in (reason("cuda", "precision.amp=fp16") or "")
    assert "SGD" in (reason("cuda", "optimizer.name=sgd") or "")
