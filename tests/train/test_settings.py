"""Settings report requested, applied and verified; no effect is a warning; none of them changes what is computed."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.tiers import few
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from train_help import ENDLESS, EVERY_STEP, OWN, Trainer, Written, spoiled

from ndd_engine.record.events import WorkEvent
from ndd_engine.run.control import StopNow
from ndd_engine.train.settings import rounds_to_tf32
from ndd_engine.train.step.stepper import Stepper
from ndd_watch.changes import OF_SCRIPTS

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here"
)


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


# A value that is not the default, for what the table of changes makes; in other tests: compiling, recomputing.
OTHER_VALUES = {
    "loader.fetch": "item", "loader.cache": "true", "loader.workers": "1", "loader.prefetch": "3",
    "loader.persistent": "true", "loader.in_order": "false", "loader.pin_memory": "true",
    "loader.non_blocking": "false", "run.threads": "1", "optimizer.implementation": "loop", "run.gc_every_steps": "3",
    "precision.tf32": "false", "precision.amp": "bf16", "speed.attention": "math", "speed.channels_last": "true",
    "speed.cudnn_benchmark": "true", "speed.flush_denormal": "true",
}  # fmt: skip
IN_OTHER_TESTS = {"speed.compile", "memory.budget", "memory.recompute"}


def test_every_setting_that_the_table_makes_is_verified_in_an_own_run(trainer: Trainer) -> None:
    """A row needs no further entry for that: arguments of a loader and switches of torch are read back by it."""
    assert OTHER_VALUES.keys() | IN_OTHER_TESTS == OF_SCRIPTS.keys()
    sets = [f"{key}={value}" for key, value in OTHER_VALUES.items()]
    found = trainer.train(*trainer.ndd, *sets, "run.max_steps=50", "run.epochs=2").settings
    assert found.keys() >= OTHER_VALUES.keys()
    assert all(found[key].in_effect is not None for key in OTHER_VALUES)
    gpu_only = {"loader.pin_memory", "speed.cudnn_benchmark"}
    of_models = {
        "speed.attention",
        "speed.channels_last",
    }  # this model has neither attention nor convolutions
    assert {key for key in OTHER_VALUES if found[key].in_effect is False} == gpu_only | of_models


def test_the_evaluation_has_settings_of_its_own_and_placement_is_seen_in_the_batch(trainer: Trainer) -> None:
    workers = ("loader.eval_workers=1", "loader.eval_prefetch=3", "loader.eval_persistent=true")
    sets = (*workers, "evaluate.inference_mode=false", "optimizer.set_to_none=false")
    found = trainer.train(*trainer.ndd, *sets, "run.max_steps=6", "evaluate.every_steps=2").settings
    assert {found[each.partition("=")[0]].in_effect for each in sets} == {True}
    # What was not asked for is not judged.
    asked = {name for name, event in found.items() if event.in_effect is not None}
    assert asked >= {"run.threads"} and not asked & {"loader.fetch", "loader.placement", "precision.amp"}
    assert found["loader.fetch"].applied == "batch"
    found = trainer.train(*trainer.ndd, "run.max_steps=2", "loader.placement=device").settings
    assert found["loader.placement"].in_effect is True and "3 KiB" in found["loader.placement"].verified


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


def test_no_setting_that_only_moves_data_changes_the_losses(trainer: Trainer) -> None:
    """That every way to load data gives the same batches is in test_batches."""
    common = (*trainer.ndd, *EVERY_STEP, "run.max_steps=12", "evaluate.every_steps=5")
    moved = ("loader.placement=device", "optimizer.set_to_none=false", "evaluate.inference_mode=false")
    plain, other = trainer.train(*common, "loader.fetch=item"), trainer.train(*common, *moved)
    assert plain.losses == other.losses and len(plain.losses) == 12
    evaluations = [[each.metrics for each in run.snapshot.evaluations] for run in (plain, other)]
    assert evaluations[0] == evaluations[1] != []


def test_the_work_of_a_step_is_recorded_with_its_accumulation(trainer: Trainer) -> None:
    def work(*sets: str) -> int:
        events = trainer.train(*trainer.ndd, "run.max_steps=2", *sets).events
        (event,) = [event for event in events if isinstance(event, WorkEvent)]
        return event.flops_per_step or 0

    assert work("batch.accumulation=2") == 2 * work() > 0


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
    assert "C++" in found.verified and "more" not in found.verified
    assert result.losses == plain.losses


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


# run.gc_every_steps


@pytest.fixture
def _collector() -> Iterator[None]:
    """The collector of Python is as before."""
    callbacks = list(gc.callbacks)
    yield
    assert gc.callbacks == callbacks and gc.isenabled()
    gc.unfreeze()


CYCLES = "for _ in range(2_000): node = []; node.append(node)"


@pytest.mark.usefixtures("_collector")
def test_a_run_that_collects_at_chosen_steps_says_so_and_leaves_the_rest_to_python_again(
    trainer: Trainer, written: Written
) -> None:
    sets = (*written(spoiled(loss=CYCLES)), *OWN, *ENDLESS, *EVERY_STEP)
    result = trainer.train(*sets, "run.max_steps=60", "run.gc_every_steps=20")
    collected = [window.step for window in result.windows if window.gc_count]
    assert collected == [20, 40, 60]
    assert all("other" in window.phases for window in result.windows if window.gc_count)
    totals = result.snapshot.totals
    assert totals.gc_count >= 3 and totals.gc_ns is not None
    assert 0 < totals.gc_max_ns <= totals.gc_ns < totals.wall_ns
    event = result.settings["run.gc_every_steps"]
    assert (event.requested, event.applied, event.in_effect) == ("20", "20", True)


@pytest.mark.usefixtures("_collector")
@pytest.mark.long
@pytest.mark.parametrize("ending", few(["done", "failed", "killed"], 1))
def test_what_a_run_froze_is_collected_again_after_its_end(
    trainer: Trainer, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.unfreeze()
    frozen = []
    plain = Stepper.step

    def step(self: Stepper, *arguments: Any) -> Any:
        frozen.append(gc.get_freeze_count())
        if len(frozen) == 5 and ending != "done":
            raise StopNow if ending == "killed" else RuntimeError("broken")
        return plain(self, *arguments)

    monkeypatch.setattr(Stepper, "step", step)
    result = trainer.train(*trainer.ndd, "run.max_steps=10", "run.gc_every_steps=20")
    assert result.end.status == {"killed": "stopped"}.get(ending, ending)
    assert frozen[4] > 10_000
    assert gc.get_freeze_count() == 0
