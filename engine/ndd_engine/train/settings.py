"""Verifies every setting: what was requested, what was applied, and how that was checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from ndd_engine.config.schema import CheckpointSection, Config, EvaluateSection
from ndd_engine.errors import TrainingError
from ndd_engine.record.events import SettingEvent
from ndd_engine.text import counted, plural
from ndd_engine.train.rehearsal import Rehearsal
from ndd_engine.workloads.base import narrowed_parameters
from ndd_watch import recompute
from ndd_watch.changes import ARGUMENTS, GLOBALS, OF_SCRIPTS

from .data.item_sources import StreamOrder
from .data.loader import Batches, EvalBatches, FirstBatch
from .step.stepper import Stepper

# Steps of a run that ends after a number of passes of unknown length.
UNKNOWN_STEPS = 1 << 62

Periodic = EvaluateSection | CheckpointSection


class Due:
    """Answers from the configuration; times are in optimizer steps.

    steps_per_epoch: 0 if the ends of passes are not known beforehand.
    """

    def __init__(self, config: Config, steps_per_epoch: int) -> None:
        self._sections: tuple[Periodic, ...] = (config.evaluate, config.checkpoint)
        self._steps_per_epoch = steps_per_epoch

    def next(self, step: int, last: int) -> int:
        """The next step after which something is due, or the last one; the loop compares only this number."""
        periods = [every for section in self._sections for every in self._periods(section)]
        return min([last, *((step // every + 1) * every for every in periods)])

    def at(self, section: Periodic, step: int, passes: int = 0) -> bool:
        """Whether the section asks for something after this step, or after so many passes."""
        if passes and section.every_epochs and passes % section.every_epochs == 0:
            return True
        return any(step % every == 0 for every in self._periods(section))

    def in_words(self, section: Periodic, name: str, last: int) -> str:
        """The interval of a section's setting as it applies to this run. last: the run's last step."""
        value = getattr(section, name)
        if not value:
            return "off"
        if name == "every_minutes":
            return "by the age of the newest checkpoint, compared between steps"
        if name == "every_steps":
            steps, text = value, f"every {_many(value, 'step')}"
        elif self._steps_per_epoch:
            steps = value * self._steps_per_epoch
            text = f"every {_many(steps, 'step')}: {counted(value, 'epoch')} of {self._steps_per_epoch:,}"
        else:
            return f"at the end of every {_many(value, 'pass')} over the data"
        return text if steps <= last else f"{text}; the run ends before, at step {last:,}"

    def _periods(self, section: Periodic) -> list[int]:
        """The section's periods in steps, without those that are off."""
        every = (section.every_steps, section.every_epochs * self._steps_per_epoch)
        return [steps for steps in every if steps]


def _many(count: int, word: str) -> str:
    return word if count == 1 else counted(count, word)


NO_GPU = "there is no CUDA GPU"
# Arguments of a loader that the first batch of a pass shows; others are read back from the loader.
_SEEN = frozenset({"workers", "pin_memory", "persistent"})
# Rows and columns. TF32 is allowed, not forced: for small products cuBLAS may have no faster algorithm that uses it.
_ROUNDED = 512


class VerifiedSettings:
    """Creates the setting events, each only once."""

    def __init__(self, stepper: Stepper, batches: Batches, evaluation: EvalBatches) -> None:
        self.config, self.stepper = stepper.config, stepper
        self.batches, self.evaluation = batches, evaluation
        # Of several ranks: (key in [parallel], what is applied, how that was verified).
        self.of_ranks: Callable[[], Iterable[tuple[str, object, str]]] | None = None
        self._gpu = stepper.device.type == "cuda"
        self.recorded: dict[str, SettingEvent] = {}
        self._new: list[SettingEvent] = []
        # By the prefix of the keys: the workers of the first pass over the data.
        self._first_workers: dict[str, tuple[int, ...]] = {}

    def of_model(self, rehearsal: Rehearsal) -> list[SettingEvent]:
        """Precision, speed and optimizer settings, after the test step.

        Raises TrainingError for fp16 that a step of the user's own does not scale.
        """
        applied = self.stepper.precision.name
        seen = sorted(rehearsal.counter.dtypes) if rehearsal.counter is not None else []
        wanted = {"bf16": "bfloat16", "fp16": "float16"}.get(applied, "float32")
        how = "the test step ran no matrix product"
        if seen:
            how = f"matrix products in the test step returned {', '.join(seen)}"
        effect = wanted in seen
        if self._unused("backward") and self.stepper.precision.scaler is not None:
            raise TrainingError(
                'precision.amp = "fp16": the step calls backward() of the loss, which nothing scales; '
                'call train.backward(loss), or set precision.amp = "bf16" or "off"'
            )
        self._check("precision.amp", applied, how, effect)
        if self.config.precision.parameters != "fp32":
            formats = {parameter.dtype for parameter in narrowed_parameters(self.stepper.model)}
            kept = formats == {torch.bfloat16}
            self._check("precision.parameters", "bf16" if kept else "fp32", "read back from the parameters")
        self._clipping()
        rounds, how = False, NO_GPU
        if self._gpu:
            rounds = rounds_to_tf32(self.stepper.device)
            was = "was" if rounds else "was not"
            how = f"a matrix product of known values {was} rounded to TF32's 10 bits"
        self._check("precision.tf32", "on" if rounds else "off", how, rounds == self.config.precision.tf32)

        speed = self.config.speed
        if rehearsal.compile_error is not None:
            self._check("speed.compile", "off", rehearsal.compile_error)
        elif speed.compile != "off":
            graphs, breaks = counted(rehearsal.graphs, "graph"), counted(rehearsal.breaks, "graph break")
            how = f"{graphs}, {breaks}, {rehearsal.compile_s or 0:.1f} s to compile"
            self._check("speed.compile", speed.compile, how, rehearsal.graphs > 0)
        for key, kind in GLOBALS.items():
            if self._gpu or not kind.on_gpu:
                self._read_back(key)
            else:
                self._check(key, False, NO_GPU)
        how = "read back from torch; operations without a deterministic implementation raise"
        self._check("speed.deterministic", torch.are_deterministic_algorithms_enabled(), how)
        if speed.channels_last:
            last = rehearsal.channels_last
            how = f"the convolution outputs {'had' if last else 'did not all have'} that format in the test step"
            if last is None:
                how = "this model has no 2-D convolution"
            self._check("speed.channels_last", bool(last), how)

        if levels := self.config.memory.levels:
            used = sum(block.used for block in recompute.blocks_of(self.stepper.model))
            how = f"{used} of {counted(len(levels), 'block')} were called in the test step"
            self._check("memory.recompute", counted(used, "block"), how, used == len(levels))
        if budget := self.config.memory.budget:
            how = (
                f"{counted(len(levels), 'block')} keep less for backward"
                if levels
                else "no block has to keep less"
            )
            self._check("memory.budget", budget, how)

        chosen = self.config.speed.attention
        found = rehearsal.counter.attention if rehearsal.counter is not None else []
        applied = ", ".join(found) or "none"
        if found or chosen != "auto":
            missing = "this model calls no scaled-dot-product attention"
            how = f"the test step ran {applied}" if found else missing
            matches = bool(found) and all(name.partition(" ")[0] == chosen for name in found)
            self._check("speed.attention", applied, how, matches)

        if not self.stepper.optimizer.from_factory:
            group = self.stepper.optimizer.param_groups[0]
            applied = "fused" if group["fused"] else "foreach" if group["foreach"] else "loop"
            self._check("optimizer.implementation", applied, "read back from the optimizer")
        if self.stepper.no_graph is not None:
            self._check("speed.cuda_graph", False, self.stepper.no_graph)
        batch = self.config.batch
        if batch.effective is not None:
            ranks, items = self.config.parallel.ranks, self.config.items_per_step
            shares = f" x {ranks}" if ranks > 1 else ""
            how = f"micro-batch times accumulation{' times ranks' if ranks > 1 else ''}"
            self._check(
                "batch.effective", f"{batch.micro} x {batch.accumulation}{shares} = {items}", how, True
            )
        self._parallel()

        due = Due(self.config, self.batches.steps_per_epoch or 0)
        for section in ("evaluate", "checkpoint"):
            table = getattr(self.config, section)
            for name in ("every_steps", "every_epochs", "every_minutes"):
                if hasattr(table, name):
                    how = due.in_words(table, name, self.stepper.total_steps)
                    self._check(f"{section}.{name}", getattr(table, name), how)
        return self._take()

    def _unused(self, name: str) -> bool:
        """Whether the user's own step has not called this function of `train` so far."""
        return self.stepper.workload_parts.step is not None and name not in self.stepper.training.used

    def _clipping(self) -> None:
        if max_norm := self.config.clip.max_norm:
            unused = self._unused("update")
            how = (
                "train.update() clips, which the step has not called"
                if unused
                else "the update clips gradients"
            )
            self._check("clip.max_norm", 0.0 if unused else max_norm, how)

    def of_loader(self, epochs_begun: int) -> list[SettingEvent]:
        """Loader settings, after the first batch of an epoch; persistent workers show in the second one.

        epochs_begun: by this process. Raises TrainingError for clipping that a step of the user's own never did.
        """
        if epochs_begun > 2:
            return []
        self._clipping()  # a step may update only now and then
        if epochs_begun == 2 and self.config.clip.max_norm and self._unused("update"):
            raise TrainingError(
                f"clip.max_norm = {self.config.clip.max_norm:g} is not used: the step has not called train.update() in "
                "the whole first epoch; call it, or set clip.max_norm = 0"
            )
        if self.batches.seen is not None:
            self._loader("", self.batches.loader, self.batches.seen)
        self._items()
        if self.config.run.gc_every_steps:
            self._read_back("run.gc_every_steps")
        return self._take()

    def of_evaluation(self, inference_mode: bool) -> list[SettingEvent]:
        """Evaluation settings, after an evaluation, and settings that are visible only between steps."""
        self._check("evaluate.inference_mode", inference_mode, "read back from torch during the evaluation")
        if self.evaluation.seen is not None:
            self._loader("eval_", self.evaluation.loader, self.evaluation.seen)
        if self.stepper.graph is None:  # a captured graph keeps the gradients in its own memory
            dropped = all(parameter.grad is None for parameter in self.stepper.parameters)
            how = f"between steps the gradients were {'None' if dropped else 'kept and filled with zeros'}"
            self._check("optimizer.set_to_none", dropped, how)
        return self._take()

    def _take(self) -> list[SettingEvent]:
        new, self._new = self._new, []
        return new

    def _read_back(self, key: str) -> None:
        """A setting that the table of changes reads back."""
        applied, in_effect, how = OF_SCRIPTS[key](self.config.value(key), None).found()
        self._check(key, applied, how, in_effect)

    def _usual(self, key: str) -> bool:
        """Whether a setting is the default."""
        section, name = key.split(".")
        table = getattr(self.config, section)
        return bool(self.config.value(key) == type(table).model_fields[name].default)

    def _check(self, key: str, applied: object, verified: str, in_effect: bool | None = None) -> None:
        """Add an event if it is new. in_effect: None if `applied` has to equal the setting."""
        value = self.config.value(key)
        effect = applied == value if in_effect is None else in_effect
        if self._usual(key):
            effect = None
        event = SettingEvent(key, _text(value), _text(applied), effect, verified)
        if self.recorded.get(key) != event:
            self.recorded[key] = event
            self._new.append(event)

    def _parallel(self) -> None:
        """How several ranks share the model."""
        if self.of_ranks is not None:
            for name, applied, how in self.of_ranks():
                self._check(f"parallel.{name}", applied, how)
            return
        section = self.config.parallel
        for name in type(section).model_fields:
            if not self._usual(f"parallel.{name}"):
                self._check(f"parallel.{name}", "off", "a single process trains the model", False)

    def _loader(self, prefix: str, loader: DataLoader[Any] | None, seen: FirstBatch) -> None:
        """A loader, by the first batch of a pass over its data. prefix: of its keys, "eval_" for evaluations."""
        alive = len(seen.workers)
        how = f"{alive} worker processes were running at the first batch"
        self._check(
            f"loader.{prefix}workers", alive, how if alive else "batches are created in the training process"
        )
        for name, kind in ((key.partition(".")[2], kind) for key, kind in ARGUMENTS.items()):
            key = f"loader.{prefix}{name}"
            if loader is None or name in _SEEN or not hasattr(self.config.loader, prefix + name):
                continue
            if not self._usual(key):
                turns = name == "in_order" and loader.in_order and loader.num_workers
                how = "the workers of a stream take turns" if turns else "read back from the loader"
                self._check(key, getattr(loader, kind.name), how)
        if not self._usual(f"loader.{prefix}pin_memory"):
            how = "the first batch was inspected" if self._gpu else NO_GPU
            if seen.device != "cpu":
                how = "the data is on the device: nothing is copied"
            self._check(f"loader.{prefix}pin_memory", seen.pinned, how)
        first = self._first_workers.setdefault(prefix, seen.workers)
        if first is not seen.workers and first:
            kept = set(seen.workers) == set(first)
            turn = "evaluation" if prefix else "epoch"
            wanted = self.config.value(f"loader.{prefix}persistent")
            how = f"the second {turn} used {'the same' if kept else 'new'} processes"
            self._check(f"loader.{prefix}persistent", kept, how, kept == (wanted is not False))
        if prefix:
            return
        if not self._usual("loader.non_blocking"):
            self._check("loader.non_blocking", False, "copies block the host" if self._gpu else NO_GPU)

    def _items(self) -> None:
        source, seen = self.batches.source, self.batches.seen
        shuffle = self.config.loader.shuffle
        if shuffle is not None:
            self._check("loader.shuffle", self.batches.shuffled, f"items come {self.batches.order}")
        if isinstance(source, StreamOrder):
            return
        kept = source.rest_of(plural(self.stepper.workload.item))
        if self.config.loader.cache:
            self._check("loader.cache", source.encoded is not None, kept)
        if self.config.loader.placement == "device":
            there = seen is not None and torch.device(seen.device).type == self.stepper.device.type
            how = f"the first batch came from {seen.device if seen else 'nowhere'}; {kept}"
            self._check("loader.placement", "device" if there else "host", how)
        whole = source.gather is not None
        how = "one gather creates a batch" if whole else "this data creates batches item by item"
        self._check("loader.fetch", "batch" if whole else "item", how)


def rounds_to_tf32(device: torch.device) -> bool:
    """Whether fp32 matrix products on the GPU use TF32: 1 + 2^-12 survives in fp32 but not in TF32."""
    fine = torch.full((_ROUNDED, _ROUNDED), 1 + 2**-12, device=device)
    return bool((fine @ torch.eye(_ROUNDED, device=device))[0, 0] == 1)


def _text(value: object) -> str:
    """A value as it is written in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)
