"""The test step leaves no trace; settings report requested, applied and verified; no effect is a warning."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from train_help import EVERY_STEP, OWN, Trainer, Written, spoiled

from ndd_engine.config import read
from ndd_engine.measure.phase_clock import PhaseClock
from ndd_engine.record.events import WorkEvent
from ndd_engine.train.checkpoint_state import random_state
from ndd_engine.train.data.loader import Batches
from ndd_engine.train.rehearsal import rehearse
from ndd_engine.train.settings import rounds_to_tf32
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.factory_data import prepare

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here"
)


def made(*sets: str, workload: str) -> tuple[Stepper, Batches]:
    config = read(None, ["batch.micro=8", *sets], workload).resolve()
    torch.manual_seed(5)
    prepared = prepare(config)
    return Stepper(prepared, config, CPU, 10), Batches(prepared.train_data, config)


@pytest.mark.parametrize(
    ("workload", "sets"),
    [
        ("eeg", ("workload.samples=300", "workload.dropout=0.5", "batch.sequence=8")),
        ("chartext", ("workload.size=tiny", "workload.dropout=0.5", "workload.objective=diffusion")),
    ],
)
def test_the_trial_step_leaves_no_trace(workload: str, sets: tuple[str, ...]) -> None:
    stepper, batches = made(*sets, "precision.amp=fp16", workload=workload)
    other, other_batches = made(*sets, "precision.amp=fp16", workload=workload)
    before = random_state(CPU)
    buffers = {name: buffer.clone() for name, buffer in stepper.model.named_buffers()}
    found = rehearse(stepper, batches.sample())
    assert found.counter is not None
    assert found.counter.flops > 0
    after = random_state(CPU)
    assert torch.equal(before["torch"], after["torch"])
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in stepper.model.named_buffers())
    assert all(parameter.grad is None for parameter in stepper.parameters)
    clock = PhaseClock()
    torch.manual_seed(6)
    mine = [float(stepper.step(iterator, clock, 0)) for iterator in [batches.epoch(0)] for _ in range(3)]  # type: ignore[arg-type]
    torch.manual_seed(6)
    theirs = [
        float(other.step(iterator, clock, 0)) for iterator in [other_batches.epoch(0)] for _ in range(3)
    ]  # type: ignore[arg-type]
    assert mine == theirs


def test_what_was_asked_for_and_is_there_is_in_effect(trainer: Trainer) -> None:
    result = trainer.train(
        *trainer.chartext, "run.max_steps=12", "precision.amp=bf16", "speed.attention=math",
        "optimizer.implementation=foreach", "loader.workers=1", "loader.prefetch=3", "loader.cache=true",
        "batch.effective=16", "workload.max_characters=2000", "speed.flush_denormal=true",
    )  # fmt: skip
    found = result.settings
    asked = ("precision.amp", "speed.attention", "speed.flush_denormal", "run.threads", "optimizer.implementation",
             "loader.workers", "loader.prefetch", "loader.cache", "batch.effective")  # fmt: skip
    assert {name: found[name].in_effect for name in asked} == dict.fromkeys(asked, True)
    assert "bfloat16" in found["precision.amp"].verified
    assert found["speed.attention"].applied == "math"
    assert found["optimizer.implementation"].applied == "foreach"
    assert found["batch.effective"].applied == "8 x 2 = 16"
    # The second epoch shows that the workers were kept.
    assert (found["loader.persistent"].applied, found["loader.persistent"].in_effect) == ("true", None)


def test_what_cannot_be_had_is_a_warning_and_trains_all_the_same(trainer: Trainer) -> None:
    result = trainer.train(
        *trainer.ndd, "run.max_steps=3", "loader.pin_memory=true", "speed.cuda_graph=true",
        "speed.cudnn_benchmark=true", "speed.channels_last=true", "speed.attention=flash",
    )  # fmt: skip
    assert result.end.status == "done"
    found = result.settings
    for name in ("loader.pin_memory", "speed.cuda_graph", "speed.cudnn_benchmark"):
        assert found[name].in_effect is False and "CUDA" in found[name].verified
    assert "convolution" in found["speed.channels_last"].verified
    warned = [event.name for event in result.snapshot.settings if event.in_effect is False]
    assert set(warned) >= {"loader.pin_memory", "speed.cuda_graph", "speed.channels_last", "speed.attention"}


def test_the_evaluation_has_settings_of_its_own(trainer: Trainer) -> None:
    result = trainer.train(
        *trainer.ndd, "run.max_steps=6", "evaluate.every_steps=2", "loader.eval_workers=1", "loader.eval_prefetch=3",
        "loader.eval_persistent=true", "evaluate.inference_mode=false", "optimizer.set_to_none=false",
    )  # fmt: skip
    found = result.settings
    asked = ("loader.eval_workers", "loader.eval_prefetch", "loader.eval_persistent", "evaluate.inference_mode",
             "optimizer.set_to_none")  # fmt: skip
    assert {name: found[name].in_effect for name in asked} == dict.fromkeys(asked, True)


def test_the_intervals_of_evaluations_and_checkpoints_are_shown_as_they_apply(trainer: Trainer) -> None:
    result = trainer.train(
        *trainer.ndd, "run.epochs=2", "evaluate.every_steps=10", "evaluate.every_epochs=0", "checkpoint.every_epochs=2",
        "checkpoint.every_steps=5000", "checkpoint.every_minutes=3",
    )  # fmt: skip
    shown = {name: event.applied for name, event in result.settings.items() if "every_" in name}
    assert shown == {
        "evaluate.every_steps": "10", "evaluate.every_epochs": "0", "checkpoint.every_steps": "5000",
        "checkpoint.every_epochs": "2", "checkpoint.every_minutes": "3.0",
    }  # fmt: skip
    assert all(result.settings[name].in_effect for name in shown)
    # In steps of this run, which ends before the 5000th.
    assert "44" in result.settings["checkpoint.every_steps"].verified
    assert "44" in result.settings["checkpoint.every_epochs"].verified


def test_a_setting_left_alone_is_not_judged(trainer: Trainer) -> None:
    found = trainer.train(*trainer.ndd, "run.max_steps=2").settings
    assert {name for name, event in found.items() if event.in_effect is not None} == {
        "run.threads"
    }  # which is set
    assert found["loader.fetch"].applied == "batch"


def test_placement_on_the_device_is_seen_in_the_batch(trainer: Trainer) -> None:
    found = trainer.train(*trainer.ndd, "run.max_steps=2", "loader.placement=device").settings
    assert found["loader.placement"].in_effect is True and "3 KiB" in found["loader.placement"].verified


@pytest.mark.long
def test_no_setting_that_only_moves_data_changes_the_losses(trainer: Trainer) -> None:
    def losses(*sets: str) -> Any:
        return trainer.train(*trainer.ndd, *EVERY_STEP, "run.max_steps=40", *sets).losses

    plain = losses("loader.fetch=item")
    assert plain == losses() == losses("loader.placement=device") == losses("loader.cache=true")
    assert plain == losses("loader.workers=1", "loader.fetch=batch")
    assert plain == losses("optimizer.set_to_none=false", "evaluate.inference_mode=false")


def test_the_work_of_a_step_is_recorded_with_its_accumulation(trainer: Trainer) -> None:
    def work(*sets: str) -> WorkEvent:
        (event,) = [
            e
            for e in trainer.train(*trainer.ndd, "run.max_steps=2", *sets).events
            if isinstance(e, WorkEvent)
        ]
        return event

    one, two = work(), work("batch.accumulation=2")
    assert one.flops_per_step
    assert two.flops_per_step == 2 * one.flops_per_step


@pytest.mark.long
@needs_compiler
def test_compiled_training_says_so_and_gives_the_same_losses(trainer: Trainer, written: Written) -> None:
    common = (*written(spoiled()), *OWN, *EVERY_STEP, "run.max_steps=4")
    plain = trainer.train(*common)
    compiled = trainer.train(*common, "speed.compile=default")
    found = compiled.settings["speed.compile"]
    assert (found.applied, found.in_effect) == ("default", True)
    (mark,) = compiled.marks("compile")
    assert mark.data["seconds"] > 0
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-4)
    assert compiled.marks("recompile") == []


def test_a_compiler_that_fails_costs_the_compilation_only(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> nn.Module:
        raise RuntimeError("no working C++ compiler was found\nand much more")

    monkeypatch.setattr(torch, "compile", broken)
    plain = trainer.train(*trainer.ndd, *EVERY_STEP, "run.max_steps=5")
    result = trainer.train(*trainer.ndd, *EVERY_STEP, "run.max_steps=5", "speed.compile=max-autotune")
    found = result.settings["speed.compile"]
    assert (found.requested, found.applied, found.in_effect) == ("max-autotune", "off", False)
    assert "no working C++" in found.verified and "more" not in found.verified
    assert result.losses == plain.losses


def test_parts_of_forward_are_timed_where_a_step_is_long_enough(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What share of a step the timing may take decides, not how long one takes on the machine of the test.
    monkeypatch.setattr("ndd_engine.train.step.stepper.ALLOWED_SHARE", 1.0)
    long = trainer.train(*trainer.chartext, "run.max_steps=3")
    names = {name for window in long.windows for name in window.phases}
    assert {"forward/attention", "forward/feed_forward", "forward/head"} <= names
    monkeypatch.setattr("ndd_engine.train.step.stepper.ALLOWED_SHARE", 1e-9)
    short = trainer.train(*trainer.chartext, "run.max_steps=3")
    assert not any("forward/attention" in window.phases for window in short.windows)
    assert any("attention" in mark.text for mark in short.marks("note"))


class LargeInTf32(TorchDispatchMode):
    """Products as on a GPU whose cuBLAS uses TF32, which keeps 10 bits of a fraction, for large ones only."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mm.default and min(*args[0].shape, *args[1].shape) >= 512:
            kept = [torch.round(part * 2**10) / 2**10 for part in args]
            return func(*kept, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_tf32_is_read_from_a_product_that_is_large_enough_for_it() -> None:
    """`torch.set_float32_matmul_precision` documents it: "high" uses TF32 only where an algorithm is available."""
    assert not rounds_to_tf32(CPU)
    with LargeInTf32():
        assert rounds_to_tf32(CPU)
