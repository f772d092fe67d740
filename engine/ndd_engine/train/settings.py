"""Verifies every setting: what was requested, what was applied, and how that was checked.

A setting counts as requested if it differs from its default. A requested setting without effect becomes a warning.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from ndd_engine.config.schema import Config
from ndd_engine.record.events import SettingEvent
from ndd_engine.train.data.loader import Batches, EvalBatches
from ndd_engine.train.probes.rehearsal import Rehearsal
from ndd_engine.train.step.stepper import Stepper

NO_GPU = "there is no CUDA GPU"


class VerifiedSettings:
    """Creates the setting events, each only once."""

    def __init__(self, config: Config, stepper: Stepper, batches: Batches, evaluation: EvalBatches) -> None:
        self.config, self.stepper, self.batches, self.evaluation = config, stepper, batches, evaluation
        self._told: dict[str, SettingEvent] = {}
        self._first_workers: tuple[int, ...] = ()
        self._first_eval_workers: tuple[int, ...] = ()

    def of_model(self, rehearsal: Rehearsal) -> list[SettingEvent]:
        """Precision, speed and optimizer settings, after the trial micro-batch."""
        return self._new(
            [
                *self._precision(rehearsal), *self._compile(rehearsal), *self._cudnn(), *self._format(rehearsal),
                *self._attention(rehearsal), *self._optimizer(), *self._graph(), *self._batch(),
            ]
        )  # fmt: skip

    def of_loader(self, epochs_begun: int) -> list[SettingEvent]:
        """Loader settings, after the first batch of an epoch; epochs_begun: by this process."""
        return self._new([*self._workers(epochs_begun), *self._items(), *self._collections()])

    def of_evaluation(self, inference_mode: bool) -> list[SettingEvent]:
        """Evaluation settings, after an evaluation, and settings that are visible only between steps."""
        wanted = self.config.evaluate.inference_mode
        how = "read back from torch during the evaluation"
        mode = self._event("evaluate.inference_mode", _text(inference_mode), inference_mode == wanted, how)
        return self._new([*mode, *self._eval_workers(), *self._gradients()])

    def _new(self, events: list[SettingEvent]) -> list[SettingEvent]:
        fresh = [event for event in events if self._told.get(event.name) != event]
        self._told |= {event.name: event for event in fresh}
        return fresh

    def _event(self, key: str, applied: str, in_effect: bool, verified: str) -> Iterator[SettingEvent]:
        """One event; in_effect is null for a setting left at its default."""
        section, name = key.split(".")
        table = getattr(self.config, section)
        value = getattr(table, name)
        default = type(table).model_fields[name].default
        yield SettingEvent(key, _text(value), applied, in_effect if value != default else None, verified)

    def _precision(self, rehearsal: Rehearsal) -> Iterator[SettingEvent]:
        applied = self.stepper.precision.name
        seen = sorted(rehearsal.counter.dtypes) if rehearsal.counter is not None else []
        wanted = {"bf16": "bfloat16", "fp16": "float16"}.get(applied, "float32")
        how = (
            f"matrix products in the trial step returned {', '.join(seen)}"
            if seen
            else "the trial step ran no matrix product"
        )
        yield from self._event("precision.amp", applied, wanted in seen, how)
        if self.stepper.device.type != "cuda":
            yield from self._event("precision.tf32", "off", self.config.precision.tf32 is False, NO_GPU)
        else:
            rounds = rounds_to_tf32(self.stepper.device)
            how = (
                f"a matrix product of known values {'was' if rounds else 'was not'} rounded to TF32's 10 bits"
            )
            applied = "on" if rounds else "off"
            yield from self._event("precision.tf32", applied, rounds == self.config.precision.tf32, how)

    def _compile(self, rehearsal: Rehearsal) -> Iterator[SettingEvent]:
        mode = self.config.speed.compile
        if mode == "off":
            return
        if rehearsal.compile_error is not None:
            yield from self._event("speed.compile", "off", False, rehearsal.compile_error)
            return
        breaks = f"{rehearsal.breaks} graph break{'' if rehearsal.breaks == 1 else 's'}"
        how = f"{rehearsal.graphs} graphs, {breaks}, {rehearsal.compile_s or 0:.1f} s to compile"
        yield from self._event("speed.compile", mode, rehearsal.graphs > 0, how)

    def _cudnn(self) -> Iterator[SettingEvent]:
        speed, cudnn = self.config.speed, torch.backends.cudnn
        gpu = self.stepper.device.type == "cuda"
        how = "read back from torch.backends.cudnn" if gpu else NO_GPU
        benchmark = bool(cudnn.benchmark) and gpu
        yield from self._event(
            "speed.cudnn_benchmark", _text(benchmark), benchmark == speed.cudnn_benchmark, how
        )
        deterministic = torch.are_deterministic_algorithms_enabled()
        how = "read back from torch; operations without a deterministic implementation raise"
        yield from self._event(
            "speed.deterministic", _text(deterministic), deterministic == speed.deterministic, how
        )

    def _format(self, rehearsal: Rehearsal) -> Iterator[SettingEvent]:
        if not self.config.speed.channels_last:
            return
        last = rehearsal.channels_last
        how = (
            "this model has no 2-D convolution"
            if last is None
            else f"the convolution outputs {'had' if last else 'did not all have'} that format in the trial step"
        )
        yield from self._event("speed.channels_last", _text(bool(last)), last is True, how)

    def _attention(self, rehearsal: Rehearsal) -> Iterator[SettingEvent]:
        chosen = self.config.speed.attention
        found = list(rehearsal.counter.attention) if rehearsal.counter is not None else []
        applied = ", ".join(found) or "none"
        if not found and chosen == "auto":
            return
        how = f"the trial step ran {applied}" if found else "this model calls no scaled-dot-product attention"
        matches = bool(found) and all(name.partition(" ")[0] == chosen for name in found)
        yield from self._event("speed.attention", applied, matches, how)

    def _optimizer(self) -> Iterator[SettingEvent]:
        group: dict[str, Any] = self.stepper.optimizer.param_groups[0]
        applied = "fused" if group["fused"] else "foreach" if group["foreach"] else "loop"
        wanted = self.config.optimizer.implementation
        how = "read back from the optimizer"
        yield from self._event("optimizer.implementation", applied, applied == wanted, how)

    def _graph(self) -> Iterator[SettingEvent]:
        if self.stepper.no_graph is not None:
            yield from self._event("speed.cuda_graph", "false", False, self.stepper.no_graph)

    def _batch(self) -> Iterator[SettingEvent]:
        batch = self.config.batch
        if batch.effective is not None:
            applied = f"{batch.micro} x {batch.accumulation} = {batch.items}"
            yield from self._event("batch.effective", applied, True, "micro-batch times accumulation")

    def _workers(self, epochs_begun: int) -> Iterator[SettingEvent]:
        loader, seen = self.config.loader, self.batches.seen
        if seen is None:
            return
        alive = len(seen.workers)
        made = "batches are created in the training process"
        how = f"{alive} worker processes were running at the first batch" if alive else made
        yield from self._event("loader.workers", str(alive), alive == loader.workers, how)
        if loader.prefetch is not None and self.batches.loader is not None:
            ahead = self.batches.loader.prefetch_factor
            yield from self._event(
                "loader.prefetch", str(ahead), ahead == loader.prefetch, "read back from the loader"
            )
        if loader.pin_memory:
            gpu = self.stepper.device.type == "cuda"
            how = "the first batch was inspected" if gpu else NO_GPU
            if seen.device != "cpu":
                how = "the data is on the device: nothing is copied"
            yield from self._event("loader.pin_memory", _text(seen.pinned), seen.pinned, how)
        if not loader.non_blocking:
            how = "copies block the host" if self.stepper.device.type == "cuda" else NO_GPU
            yield from self._event("loader.non_blocking", "false", self.stepper.device.type == "cuda", how)
        if epochs_begun == 1:
            self._first_workers = seen.workers
        elif loader.workers:
            kept = set(seen.workers) == set(self._first_workers)
            how = f"the second epoch used {'the same' if kept else 'new'} processes"
            wanted = True if loader.persistent is None else loader.persistent
            yield from self._event("loader.persistent", _text(kept), kept == wanted, how)

    def _eval_workers(self) -> Iterator[SettingEvent]:
        loader, seen = self.config.loader, self.evaluation.seen
        if seen is None:
            return
        alive = len(seen.workers)
        how = f"{alive} worker processes were running at the first batch"
        yield from self._event("loader.eval_workers", str(alive), alive == loader.eval_workers, how)
        if loader.eval_prefetch is not None and self.evaluation.loader is not None:
            ahead = self.evaluation.loader.prefetch_factor
            right = ahead == loader.eval_prefetch
            yield from self._event("loader.eval_prefetch", str(ahead), right, "read back from the loader")
        if loader.eval_pin_memory is not None:
            how = "the first batch was inspected" if self.stepper.device.type == "cuda" else NO_GPU
            right = seen.pinned == loader.eval_pin_memory
            yield from self._event("loader.eval_pin_memory", _text(seen.pinned), right, how)
        if loader.eval_persistent and self._first_eval_workers:
            kept = set(seen.workers) == set(self._first_eval_workers)
            how = f"the second evaluation used {'the same' if kept else 'new'} processes"
            yield from self._event("loader.eval_persistent", _text(kept), kept, how)
        self._first_eval_workers = self._first_eval_workers or seen.workers

    def _gradients(self) -> Iterator[SettingEvent]:
        """Whether gradients are None or zero between steps; a captured graph keeps them in its own memory."""
        if self.stepper.graph is not None:
            return
        dropped = all(parameter.grad is None for parameter in self.stepper.parameters)
        wanted = self.config.optimizer.set_to_none
        how = f"between steps the gradients were {'None' if dropped else 'kept and filled with zeros'}"
        yield from self._event("optimizer.set_to_none", _text(dropped), dropped == wanted, how)

    def _collections(self) -> Iterator[SettingEvent]:
        every = self.config.run.gc_every_steps
        if every:
            ours = not gc.isenabled()
            how = f"automatic garbage collection is {'off' if ours else 'still on'}, read back from gc"
            yield from self._event("run.gc_every_steps", str(every) if ours else "0", ours, how)

    def _items(self) -> Iterator[SettingEvent]:
        loader, source, seen = self.config.loader, self.batches.source, self.batches.seen
        kept = source.rest_of(f"{self.stepper.workload.item}s")
        if loader.cache:
            yield from self._event(
                "loader.cache", _text(source.encoded is not None), source.encoded is not None, kept
            )
        if loader.placement == "device":
            there = seen is not None and torch.device(seen.device).type == self.stepper.device.type
            how = f"the first batch came from {seen.device if seen else 'nowhere'}; {kept}"
            yield from self._event("loader.placement", "device" if there else "host", there, how)
        applied = "batch" if source.gather is not None else "item"
        how = (
            "one gather creates a batch"
            if source.gather is not None
            else "this data creates batches item by item"
        )
        yield from self._event("loader.fetch", applied, applied == loader.fetch, how)


def rounds_to_tf32(device: torch.device) -> bool:
    """Whether fp32 matrix products on the GPU use TF32: 1 + 2^-12 survives in fp32 but not in TF32."""
    fine = torch.full((64, 64), 1 + 2**-12, device=device)
    return bool((fine @ torch.eye(64, device=device))[0, 0] == 1)


def _text(value: object) -> str:
    """A value as it is written in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "not set" if value is None else str(value)
