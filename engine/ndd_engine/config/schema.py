"""The run configuration: every knob with its type, its default and what it does.

The descriptions are the documentation: they become comments in the written TOML and lines in the README.
`None` means "decided when the run is prepared", and the resolved configuration says what was decided.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .workload_sections import Section, WorkloadSection


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = Field(
        None, description="name of the run and of its directory; by default the workload and a number"
    )
    preset: Literal["fastest", "balanced", "reproducible"] | None = Field(
        None, description="a set of precision and speed settings from profiles/presets; single keys beat it"
    )
    seed: int = Field(1337, ge=0, lt=2**63, description="seed of weights, data order and dropout")
    epochs: int | None = Field(None, ge=1, description="passes over the training data")
    max_steps: int | None = Field(None, ge=1, description="stop after this many optimizer steps")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda|cuda:\d+)$",
        description='"auto" takes the first CUDA card, else the processor; or "cpu", "cuda", "cuda:1"',
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=512,
        description="intra-op threads on the processor; default: the cores this process may use",
    )

    gc_every_steps: int = Field(
        0,
        ge=0,
        description="collect Python's garbage only every N optimizer steps; 0: when Python itself wants to",
    )


class BatchSection(Section):
    micro: int = Field(32, ge=1, description="items in one forward and backward pass (micro-batch)")
    accumulation: int = Field(1, ge=1, description="micro-batches per optimizer step")
    effective: int | None = Field(
        None, ge=1, description="items per optimizer step to hold: accumulation follows from it and micro"
    )
    sequence: int = Field(256, ge=2, description="sequence length of one item, in the workload's tokens")

    @model_validator(mode="before")
    @classmethod
    def _hold_effective(cls, values: Any) -> Any:
        """With `effective` and without `accumulation`, the latter follows."""
        if not isinstance(values, dict) or "accumulation" in values:
            return values
        micro, effective = values.get("micro", 32), values.get("effective")
        if type(micro) is int and type(effective) is int and micro > 0 and effective % micro == 0:
            return {**values, "accumulation": effective // micro}
        return values

    @model_validator(mode="after")
    def _effective_is_held(self) -> BatchSection:
        if self.effective is not None and self.effective != self.items:
            raise ValueError(
                f"micro {self.micro} x accumulation {self.accumulation} is {self.items}, but effective is "
                f"{self.effective}: take a micro that divides it, and leave accumulation out"
            )
        return self

    @property
    def items(self) -> int:
        """Items per optimizer step: the effective batch."""
        return self.micro * self.accumulation


class LoaderSection(Section):
    workers: int = Field(
        0, ge=0, le=512, description="loader processes for training; 0 loads in the training process"
    )
    pin_memory: bool = Field(False, description="page-locked batches, for faster copies to a CUDA card")
    non_blocking: bool = Field(True, description="copy page-locked batches to the card without waiting")
    persistent: bool | None = Field(
        None, description="keep the workers between epochs; default: where there are any"
    )
    prefetch: int | None = Field(
        None, ge=1, description="batches each worker loads ahead (needs workers; torch's default is 2)"
    )
    eval_workers: int = Field(0, ge=0, le=512, description="loader processes for evaluation")
    eval_pin_memory: bool | None = Field(None, description="the same for evaluation; default: as in training")
    eval_persistent: bool = Field(False, description="keep the workers of the evaluation between evaluations")
    eval_prefetch: int | None = Field(
        None, ge=1, description="batches each worker of the evaluation loads ahead (needs eval_workers)"
    )
    cache: bool = Field(
        False, description="encode each item once and keep it in memory; refused when it does not fit"
    )
    placement: Literal["host", "device"] = Field(
        "host", description="where the data lies; device: all of it, encoded once, batches taken by indexing"
    )
    fetch: Literal["auto", "item", "batch"] = Field(
        "auto",
        description="make a batch item by item, or in one gather; auto: in one where the data can (same batches)",
    )
    timeout_s: float = Field(
        120.0, gt=0, description="seconds without a batch after which the workers count as stuck"
    )

    @model_validator(mode="after")
    def _workers_needed(self) -> LoaderSection:
        for prefix in ("", "eval_"):
            workers, prefetch, persistent = (
                getattr(self, prefix + key) for key in ("workers", "prefetch", "persistent")
            )
            more = f"set loader.{prefix}workers to 1 or more"
            if workers == 0 and prefetch is not None:
                raise ValueError(f"{prefix}prefetch needs workers: {more}, or remove {prefix}prefetch")
            if workers == 0 and persistent:
                raise ValueError(f"{prefix}persistent needs workers: {more}, or {prefix}persistent = false")
        if self.placement == "device" and self.workers:
            raise ValueError(
                'placement "device" needs no workers: set loader.workers to 0, or placement = "host"'
            )
        return self


class PrecisionSection(Section):
    amp: Literal["auto", "off", "fp16", "bf16"] = Field(
        "auto",
        description="mixed precision; fp16 with loss scaling; auto: bf16 or fp16 on a card, off without one",
    )
    tf32: bool = Field(True, description="TF32 matrix products in fp32 code on cards that have them")


class SpeedSection(Section):
    compile: Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        Field("off", description="torch.compile of the model, and its mode")
    )
    compile_dynamic: bool | None = Field(
        None, description="compile for varying shapes at once; default: after the first change of shape"
    )
    cuda_graph: bool = Field(
        False, description="record the whole step once and replay it; needs a CUDA card and static shapes"
    )
    channels_last: bool = Field(False, description="channels-last memory format, for convolutions")
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = Field(
        "auto", description="back end of scaled-dot-product attention; auto: torch chooses"
    )
    cudnn_benchmark: bool = Field(False, description="let cuDNN time its algorithms; for fixed shapes")
    deterministic: bool = Field(
        False, description="only deterministic algorithms; an operation without one is an error"
    )

    @model_validator(mode="after")
    def _not_both(self) -> SpeedSection:
        if self.cudnn_benchmark and self.deterministic:
            raise ValueError(
                "cudnn_benchmark and deterministic exclude each other: the benchmark picks algorithms by timing"
            )
        if self.cuda_graph and self.compile in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"compile {self.compile} records CUDA graphs of its own: use compile default with cuda_graph"
            )
        return self


class OptimizerSection(Section):
    name: Literal["adamw", "adam", "sgd"] = Field("adamw", description="optimizer")
    lr: float = Field(1e-3, gt=0, description="learning rate")
    weight_decay: float = Field(0.01, ge=0, description="weight decay")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.999], min_length=2, max_length=2, description="Adam's moment decays"
    )
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum (sgd)")
    implementation: Literal["auto", "fused", "foreach", "loop"] = Field(
        "auto",
        description="one kernel for all parameters, batched operations, or parameter by parameter; auto: fused where "
        "torch has it",
    )
    set_to_none: bool = Field(
        True, description="drop gradients after a step instead of filling them with zeros"
    )


class ScheduleSection(Section):
    kind: Literal["constant", "cosine"] = Field("constant", description="learning rate over the run")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the cosine")


class ClipSection(Section):
    max_norm: float = Field(0.0, ge=0, description="clip the gradient to this norm; 0 disables")


class EvaluateSection(Section):
    every_steps: int = Field(0, ge=0, description="evaluate every N optimizer steps; 0: never")
    every_epochs: int = Field(1, ge=0, description="evaluate every N epochs; 0: never")
    batches: int | None = Field(None, ge=1, description="evaluate on at most this many batches")
    at_end: bool = Field(True, description="evaluate when the run ends")
    inference_mode: bool = Field(True, description="torch.inference_mode instead of no_grad")


class CheckpointSection(Section):
    every_steps: int = Field(0, ge=0, description="save every N optimizer steps; 0: never")
    every_epochs: int = Field(1, ge=0, description="save every N epochs; 0: never")
    every_minutes: float = Field(10.0, ge=0, description="save at least this often; 0: never")
    at_end: bool = Field(True, description="save when the run ends; a stop always saves")
    keep: int = Field(3, ge=1, description="newest checkpoints to keep, besides the best one")


class LogSection(Section):
    every_steps: int = Field(10, ge=1, description="optimizer steps between reading losses back to the host")
    window_s: float = Field(
        1.0, ge=0, le=60, description="seconds of one window of the record; 0 records every step by itself"
    )
    headless_s: float = Field(5.0, gt=0, description="seconds between lines of a headless run")
    kernels_every: int = Field(
        0, ge=0, description="record a short profiler burst every N optimizer steps; 0: only when asked for"
    )
    kernels_steps: int = Field(3, ge=1, le=20, description="optimizer steps of one burst")
    trace: str | None = Field(
        None,
        description="write each burst to this file, as a Chrome trace; the newest stays. Without kernels_every one "
        "burst is taken soon after the start",
    )
    stacks_hz: float = Field(
        10.0, ge=0, le=100, description="looks a second at where in the code the training thread is; 0: none"
    )
    tensorboard: bool = Field(
        False,
        description="also write scalars for TensorBoard into the run's folder; needs the extra tensorboard",
    )


class ConsoleSection(Section):
    refresh_hz: float = Field(
        4.0,
        ge=0.5,
        le=10,
        description="screen refreshes a second, fewer where they take more than 0.75 % of a core",
    )
    on_hangup: Literal["continue", "stop"] = Field(
        "continue", description="when the terminal is lost: go on without a screen, or checkpoint and stop"
    )


class Config(Section):
    """The whole configuration of a run."""

    run: RunSection = RunSection()
    workload: WorkloadSection
    batch: BatchSection = BatchSection()
    loader: LoaderSection = LoaderSection()
    precision: PrecisionSection = PrecisionSection()
    speed: SpeedSection = SpeedSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    clip: ClipSection = ClipSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    console: ConsoleSection = ConsoleSection()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Config:
        if self.run.epochs is None and self.run.max_steps is None:
            raise ValueError("a run needs run.epochs or run.max_steps, as in --set run.epochs=3")
        if self.loader.cache and getattr(self.workload, "augment", False):
            raise ValueError(
                "loader.cache keeps items, and workload.augment changes them every epoch: turn one of them off"
            )
        if self.schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"schedule.min_lr {self.schedule.min_lr} is above optimizer.lr {self.optimizer.lr}"
            )
        return self
