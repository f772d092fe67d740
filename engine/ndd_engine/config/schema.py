"""The run configuration: every knob with its type, its default and what it does.

The descriptions are the documentation: they become comments in the written TOML and lines in the README.
`None` means "decided when the run is prepared", and the resolved configuration says what was decided.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

WORKLOADS = ("chartext", "ndd")


class Section(BaseModel):
    """A table of the configuration; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False
    )


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = Field(
        None, description="name of the run and of its directory; by default the workload and a number"
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


class ChartextSection(Section):
    """Character-level transformer (guide: char-text)."""

    name: Literal["chartext"]
    data: str = Field(
        "builtin",
        description='"builtin" (the Python manual\'s topics), "stdlib" (its source), or a path to a text file',
    )
    size: str | None = Field(
        None,
        description='model size: a name from the workload\'s profile, "auto" to measure which fits this machine',
    )
    objective: Literal["autoregressive", "diffusion"] = Field(
        "autoregressive",
        description="predict the next character, or absorbing-state diffusion (score entropy)",
    )
    layers: int = Field(6, ge=1, le=96, description="transformer blocks")
    heads: int = Field(6, ge=1, le=96, description="attention heads; must divide the width")
    width: int = Field(384, ge=8, le=16384, description="model width")
    dropout: float = Field(0.2, ge=0, lt=1, description="dropout probability")
    tie_weights: bool = Field(
        False, description="share the token embedding with the output layer (autoregressive only)"
    )
    stride: int | None = Field(
        None,
        ge=1,
        description="characters between window starts; default: the sequence length (windows do not overlap)",
    )
    eval_fraction: float = Field(
        0.05, gt=0, lt=0.5, description="share of the text kept for evaluation (its end)"
    )

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ChartextSection:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        if self.tie_weights and self.objective == "diffusion":
            raise ValueError("tie_weights needs objective autoregressive")
        return self


class NddSection(Section):
    """Multichannel EEG forecasters (guide: eeg-forecasters)."""

    name: Literal["ndd"]
    data: str = Field(
        "builtin",
        description='"builtin" (seeded synthetic EEG with a planted seizure), or a path to a .arff or .csv file',
    )
    size: str | None = Field(None, description="model size: a name from the workload's profile")
    model: Literal["mlp", "lstm", "gru"] = Field("mlp", description="forecaster")
    hidden: list[Annotated[int, Field(ge=1)]] = Field(
        default=[128, 64], min_length=1, description="hidden sizes (mlp), or one size (lstm, gru)"
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout probability of the mlp")
    channels: int = Field(8, ge=1, le=1024, description="channels of the builtin data")
    samples: int = Field(50_000, ge=64, description="samples of the builtin data")
    sample_rate: float = Field(256.0, gt=0, description="samples a second (Hz) of the builtin data")
    eval_fraction: float = Field(
        0.1, gt=0, lt=0.5, description="share of the recording kept for evaluation (its end)"
    )

    @model_validator(mode="after")
    def _one_hidden_size_for_recurrent(self) -> NddSection:
        if self.model != "mlp" and len(self.hidden) != 1:
            raise ValueError(f"model {self.model} takes exactly one hidden size, found {self.hidden}")
        return self


WorkloadSection = Annotated[ChartextSection | NddSection, Field(discriminator="name")]


class BatchSection(Section):
    micro: int = Field(32, ge=1, description="items in one forward and backward pass (micro-batch)")
    accumulation: int = Field(1, ge=1, description="micro-batches per optimizer step")
    sequence: int = Field(256, ge=2, description="sequence length: characters or samples in one item")

    @property
    def effective(self) -> int:
        """Items per optimizer step."""
        return self.micro * self.accumulation


class LoaderSection(Section):
    workers: int = Field(
        0, ge=0, le=512, description="loader processes for training; 0 loads in the training process"
    )
    eval_workers: int = Field(0, ge=0, le=512, description="loader processes for evaluation")
    pin_memory: bool = Field(False, description="page-locked batches, for faster copies to a CUDA card")
    persistent: bool | None = Field(
        None, description="keep the workers between epochs; default: where there are any"
    )
    prefetch: int | None = Field(
        None, ge=1, description="batches each worker loads ahead (needs workers; torch's default is 2)"
    )
    timeout_s: float = Field(
        120.0, gt=0, description="seconds without a batch after which the workers count as stuck"
    )

    @model_validator(mode="after")
    def _workers_needed(self) -> LoaderSection:
        if self.workers == 0 and self.prefetch is not None:
            raise ValueError("prefetch needs workers: set loader.workers to 1 or more, or remove prefetch")
        if self.workers == 0 and self.persistent:
            raise ValueError(
                "persistent needs workers: set loader.workers to 1 or more, or persistent = false"
            )
        return self


class PrecisionSection(Section):
    amp: Literal["auto", "off", "fp16", "bf16"] = Field(
        "auto",
        description="mixed precision; fp16 with loss scaling; auto: bf16 or fp16 on a card, off without one",
    )
    tf32: bool = Field(True, description="TF32 matrix products in fp32 code on cards that have them")


class SpeedSection(Section):
    fused_optimizer: bool | None = Field(
        None, description="optimizer step in one kernel; default: where torch has it for the device"
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


class ConsoleSection(Section):
    refresh_hz: float = Field(4.0, ge=0.5, le=10, description="screen refreshes a second")
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
    def _has_an_end_or_epochs(self) -> Config:
        if self.run.epochs is None and self.run.max_steps is None:
            raise ValueError("a run needs run.epochs or run.max_steps")
        if self.schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"schedule.min_lr {self.schedule.min_lr} is above optimizer.lr {self.optimizer.lr}"
            )
        return self
