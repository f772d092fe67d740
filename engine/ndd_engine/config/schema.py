"""The run configuration: every key with its type, default, allowed range and description.

Which configurations cannot be captured in a CUDA graph: for the step itself, its candidates and the diagnosis.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

import ndd_profiles
from ndd_watch.fitting import budget_bytes

from .workload_sections import (
    DEFAULT_WORKLOAD,
    MANY,
    SECTIONS,
    WORKLOADS,
    PathText,
    Section,
    WorkloadSection,
    kind,
)


class ParallelSection(Section):
    ranks: int = Field(
        1,
        ge=1,
        le=65_536,
        description="number of processes (ranks) that train one model; 1: a single process",
    )
    strategy: Literal["ddp", "fsdp2"] = Field(
        "ddp",
        description="ddp: every rank holds the whole model; fsdp2: parameters, gradients and optimizer state are "
        "sharded over the ranks",
    )
    bucket_mb: float = Field(25.0, gt=0, le=10_000, description="ddp: size of a gradient bucket in MiB")
    compress: Literal["off", "fp16", "bf16"] = Field(
        "off", description="ddp: exchange gradients in half precision"
    )
    find_unused: bool = Field(
        False, description="ddp: search every step for parameters that the loss does not use (slower)"
    )
    reshard: bool = Field(
        True,
        description="fsdp2: free the gathered parameters after forward and gather them again in backward",
    )
    param_dtype: Literal["fp32", "fp16", "bf16"] = Field(
        "fp32", description="fsdp2: dtype in which parameters are gathered and layers compute"
    )
    reduce_dtype: Literal["fp32", "fp16", "bf16"] = Field(
        "fp32", description="fsdp2: dtype in which gradients are reduced"
    )
    restarts: int = Field(
        0,
        ge=0,
        le=1000,
        description="restart all ranks from the last checkpoint at most N times after one fails",
    )
    hang_s: float = Field(
        60.0,
        ge=1,
        le=86_400,
        description="a rank that finishes no step for so long is reported as hanging (seconds)",
    )


STEPS = 10**12
DAY_S = 86_400.0


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = Field(
        None,
        description="run name and directory: up to 64 letters, digits, '.', '_', '-'; default: workload and number",
    )
    preset: Literal["fastest", "balanced", "reproducible"] | None = Field(
        None, description="named set of precision and speed settings; explicit keys override it"
    )
    seed: int = Field(1337, ge=0, lt=2**63, description="random seed for weights, data order and dropout")
    epochs: int | None = Field(None, ge=1, le=MANY, description="number of passes over the training data")
    max_steps: int | None = Field(None, ge=1, le=STEPS, description="stop after this many optimizer steps")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda|cuda:\d{1,3})$",
        description='device: "auto" (first CUDA GPU, else CPU), "cpu", "cuda" or "cuda:N"',
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=512,
        description="intra-op CPU threads; default: the number of usable cores",
    )
    gc_every_steps: int = Field(
        0,
        ge=0,
        le=STEPS,
        description="run Python's garbage collector only every N optimizer steps; 0: Python's default",
    )


class BatchSection(Section):
    micro: int = Field(32, ge=1, le=MANY, description="micro-batch size: items per forward and backward pass")
    accumulation: int = Field(1, ge=1, le=MANY, description="number of micro-batches per optimizer step")
    effective: int | None = Field(
        None,
        ge=1,
        le=MANY,
        description="effective batch size: items per optimizer step of all ranks; sets accumulation = effective / "
        "(micro x ranks)",
    )
    sequence: int = Field(
        256, ge=2, le=MANY, description="sequence length of an item, in tokens of the workload"
    )

    @property
    def items(self) -> int:
        """Items per optimizer step of one rank; see Config.items_per_step for all ranks."""
        return self.micro * self.accumulation


class LoaderSection(Section):
    shuffle: bool | None = Field(
        None,
        description="shuffle the training data in every epoch (true) or keep its order (false); default: true, or what "
        "the DataLoader of a workload of your own does",
    )
    workers: int = Field(
        0, ge=0, le=512, description="number of loader workers for training; 0: load in the training process"
    )
    pin_memory: bool = Field(False, description="load batches into pinned memory, for faster copies to a GPU")
    non_blocking: bool = Field(True, description="copy batches from pinned memory to the GPU asynchronously")
    persistent: bool | None = Field(
        None, description="keep workers running between epochs; default: true with workers"
    )
    prefetch: int | None = Field(
        None, ge=1, le=10_000, description="batches prefetched by each worker (needs workers); default: 2"
    )
    in_order: bool = Field(
        True,
        description="use batches in the order of the data; false: as soon as a worker has made them, so that a resumed "
        "run may repeat some of the last batches and leave out others",
    )
    eval_workers: int = Field(0, ge=0, le=512, description="number of loader workers for evaluation")
    eval_pin_memory: bool | None = Field(
        None, description="pin_memory for evaluation; default: as in training"
    )
    eval_persistent: bool = Field(False, description="keep workers running between evaluations")
    eval_prefetch: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="batches prefetched by each evaluation worker (needs eval_workers); default: 2",
    )
    cache: bool = Field(
        False, description="encode each item once and cache it in memory; an error if it does not fit"
    )
    placement: Literal["host", "device"] = Field(
        "host", description="location of the data; device: all data encoded once and kept in device memory"
    )
    fetch: Literal["auto", "item", "batch"] = Field(
        "auto",
        description="make batches item by item (item) or in one gather operation (batch); auto: batch if supported",
    )
    timeout_s: float = Field(
        120.0,
        gt=0,
        le=DAY_S,
        description="maximum seconds to wait for a batch from the workers; then the run fails",
    )

    @model_validator(mode="after")
    def _workers_needed(self) -> LoaderSection:
        for prefix in ("", "eval_"):
            workers, prefetch, persistent = (
                getattr(self, prefix + key) for key in ("workers", "prefetch", "persistent")
            )
            more = f"set loader.{prefix}workers to 1 or more"
            if workers == 0 and prefetch is not None:
                raise ValueError(f"{prefix}prefetch needs workers: {more} or remove {prefix}prefetch")
            if workers == 0 and persistent:
                raise ValueError(f"{prefix}persistent needs workers: {more} or {prefix}persistent to false")
        if self.placement == "device" and self.workers:
            raise ValueError(
                'placement "device" does not support workers: set loader.workers to 0 or placement to "host"'
            )
        return self


class PrecisionSection(Section):
    amp: Literal["auto", "off", "fp16", "bf16"] = Field(
        "auto",
        description="automatic mixed precision (fp16 uses loss scaling); auto: bf16 or fp16 on a GPU, off on the CPU",
    )
    tf32: bool = Field(True, description="use TF32 for fp32 matrix products on GPUs that support it")
    parameters: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="format in which parameters are kept; bf16: they, their gradients and the optimizer's moments take "
        'half of the memory, and small updates are rounded away; batch norms stay in fp32; needs amp = "bf16"',
    )

    @model_validator(mode="after")
    def _check_parameters(self) -> PrecisionSection:
        if self.parameters == "bf16" and self.amp != "bf16":
            raise ValueError(
                'parameters = "bf16" needs amp = "bf16", which gives all inputs of an operation one format'
            )
        return self


class MemorySection(Section):
    budget: Annotated[str, Field(pattern=r"^(auto|[0-9]{1,9}(\.[0-9]{1,6})? ?(MB|GB|MiB|GiB))$")] | None = (
        Field(
            None,
            description='most memory that a rank may use on its device, such as "8GB"; auto: what is free. Before '
            "training, recompute is chosen so that the run stays within it; default: no limit",
        )
    )
    recompute: list[Annotated[str, Field(pattern=r"^[^=\s]{1,300}=(all|cheap|offload)$")]] = Field(
        default=[],
        description='blocks that keep less for backward, as "module path=level": all computes everything again; cheap '
        "all but matrix products and attention; offload keeps activations in host memory",
    )

    @property
    def levels(self) -> dict[str, str]:
        """The level of each block of `recompute`, by the path of its module."""
        return dict(text.split("=") for text in self.recompute)

    @property
    def budget_bytes(self) -> int | None:
        """Bytes of a budget that is a number; None for "auto" and without one."""
        return None if self.budget is None else budget_bytes(self.budget)


class SpeedSection(Section):
    compile: Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        Field("off", description="torch.compile mode for the model; off: eager mode")
    )
    compile_dynamic: bool | None = Field(
        None,
        description="compile for dynamic shapes (true) or static shapes (false); default: dynamic after a shape change",
    )
    cuda_graph: bool = Field(
        False,
        description="capture the whole step in a CUDA graph and replay it; needs a GPU and static shapes",
    )
    channels_last: bool = Field(False, description="use the channels_last memory format (for convolutions)")
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = Field(
        "auto", description="backend of scaled dot-product attention; auto: chosen by PyTorch"
    )
    cudnn_benchmark: bool = Field(
        False, description="torch.backends.cudnn.benchmark: choose the fastest algorithms (for fixed shapes)"
    )
    flush_denormal: bool = Field(
        False,
        description="torch.set_flush_denormal: numbers too small for full precision become zero, on the CPU",
    )
    deterministic: bool = Field(
        False, description="use only deterministic algorithms; operations without one raise an error"
    )

    @model_validator(mode="after")
    def _not_both(self) -> SpeedSection:
        if self.cudnn_benchmark and self.deterministic:
            raise ValueError(
                "cudnn_benchmark and deterministic are mutually exclusive: benchmarking chooses algorithms by timing"
            )
        if self.cuda_graph and self.compile in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"compile {self.compile} uses its own CUDA graphs: use compile default with cuda_graph"
            )
        return self


class OptimizerSection(Section):
    name: Literal["adamw", "adam", "sgd"] = Field("adamw", description="optimizer algorithm")
    lr: float = Field(1e-3, gt=0, description="learning rate")
    weight_decay: float = Field(0.01, ge=0, description="weight decay coefficient")
    decay: Literal["weights", "all"] = Field(
        "weights",
        description="parameters that weight decay applies to; weights: not to biases and the parameters of "
        "normalization layers",
    )
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.999], min_length=2, max_length=2, description="beta coefficients (adam, adamw)"
    )
    eps: float = Field(1e-8, gt=0, description="epsilon (adam, adamw)")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum (sgd)")
    implementation: Literal["auto", "fused", "foreach", "loop"] = Field(
        "auto",
        description="fused (one kernel), foreach (batched operations) or loop (one parameter at a time); auto: fused "
        "if available",
    )
    set_to_none: bool = Field(
        True, description="set gradients to None after a step instead of filling them with zeros"
    )

    @model_validator(mode="after")
    def _all_used(self) -> OptimizerSection:
        for key in ("betas", "eps") if self.name == "sgd" else ("momentum",):
            default = type(self).model_fields[key].default
            if getattr(self, key) != default:
                others = '"adam" or "adamw"' if self.name == "sgd" else '"sgd"'
                raise ValueError(f'{key} is not used by "{self.name}": remove it, or set name to {others}')
        return self


class ScheduleSection(Section):
    kind: Literal["constant", "cosine"] = Field("constant", description="learning-rate schedule")
    warmup_steps: int = Field(0, ge=0, le=STEPS, description="number of optimizer steps of linear warm-up")
    min_lr: float = Field(0.0, ge=0, description="final learning rate of the cosine schedule")


class ClipSection(Section):
    max_norm: float = Field(0.0, ge=0, description="clip the gradient norm to this value; 0: no clipping")


class EvaluateSection(Section):
    every_steps: int = Field(0, ge=0, le=STEPS, description="evaluate every N optimizer steps; 0: never")
    every_epochs: int = Field(1, ge=0, le=MANY, description="evaluate every N epochs; 0: never")
    batches: int | None = Field(
        None, ge=1, le=STEPS, description="maximum number of evaluation batches; default: all"
    )
    at_end: bool = Field(True, description="evaluate when the run ends")
    metric: Annotated[str, Field(min_length=1, max_length=80)] | None = Field(
        None,
        description="metric that decides the best checkpoint, early stopping and ReduceLROnPlateau; default: the first",
    )
    mode: Literal["min", "max"] | None = Field(
        None, description="whether a lower or a higher metric is better; default: chosen by the workload"
    )
    patience: int = Field(
        0, ge=0, le=MANY, description="stop after this many evaluations without improvement; 0: never"
    )
    min_delta: float = Field(0.0, ge=0, description="smallest change of the metric that is an improvement")
    inference_mode: bool = Field(True, description="use torch.inference_mode instead of torch.no_grad")

    @model_validator(mode="after")
    def _all_used(self) -> EvaluateSection:
        if self.min_delta and not self.patience:
            raise ValueError(
                "min_delta is not used without patience: remove it, or set patience to 1 or more"
            )
        return self


class CheckpointSection(Section):
    every_steps: int = Field(
        0, ge=0, le=STEPS, description="save a checkpoint every N optimizer steps; 0: never"
    )
    every_epochs: int = Field(1, ge=0, le=MANY, description="save a checkpoint every N epochs; 0: never")
    every_minutes: float = Field(
        10.0, ge=0, le=1e6, description="save a checkpoint if the last one is N minutes old; 0: never"
    )
    at_end: bool = Field(
        True, description="save a checkpoint when the run ends (stopping a run always saves one)"
    )
    keep: int = Field(
        3, ge=1, le=MANY, description="number of newest checkpoints to keep, in addition to the best one"
    )


class LogSection(Section):
    every_steps: int = Field(
        10, ge=1, le=MANY, description="read losses back to the host every N optimizer steps"
    )
    window_s: float = Field(
        1.0,
        ge=0,
        le=60,
        description="seconds per measuring interval of the record (its `window` events); 0: one per step",
    )
    headless_s: float = Field(
        5.0, ge=0.1, le=DAY_S, description="seconds between progress lines of a headless run"
    )
    kernels_every: int = Field(
        0, ge=0, le=STEPS, description="take a profiler capture every N optimizer steps; 0: only on request"
    )
    kernels_steps: int = Field(3, ge=1, le=20, description="optimizer steps per profiler capture")
    trace: PathText | None = Field(
        None,
        description="write each profiler capture to this file as a Chrome trace (the newest overwrites; other ranks "
        "than 0 insert their number); if kernels_every is 0, one capture is taken soon after the start",
    )
    profile_every_s: float = Field(
        30.0,
        ge=0,
        le=DAY_S,
        description="seconds from one step under Python's profiler, which names slow functions and is part of no "
        "statistics, to the next; 0: none",
    )
    memory_history: Literal["start", "always", "off"] = Field(
        "start",
        description="record which lines allocate GPU memory, for the snapshot that a run writes if it runs out of "
        "memory: of the first steps, of every step (a few microseconds per allocation), or not at all",
    )
    tensorboard: bool = Field(
        False,
        description="also write TensorBoard scalars to the run's directory; needs the extra 'tensorboard'",
    )
    wandb: Literal["off", "offline", "online"] = Field(
        "off",
        description="also log to Weights & Biases: into the run's directory without any network, or to its server; "
        "needs the extra 'wandb'",
    )
    mlflow: Annotated[PathText, Field(min_length=1)] | None = Field(
        None,
        description="also log to MLflow: the path of an SQLite file (mlflow.db) or the URI of a server "
        "(http://localhost:5000); needs the extra 'mlflow'",
    )
    project: Annotated[str, Field(min_length=1, max_length=100)] | None = Field(
        None, description="project of Weights & Biases, experiment of MLflow; default: the workload"
    )

    @field_validator("profile_every_s")
    @classmethod
    def _not_too_often(cls, value: float) -> float:
        if 0 < value < 1:
            raise ValueError(f"is out of range; allowed: 0, or 1 to {DAY_S:g}")
        return value


class ConsoleSection(Section):
    refresh_hz: float = Field(
        4.0,
        ge=0.5,
        le=10,
        description="maximum screen refreshes per second; lowered if they use more than 0.75 % of a core",
    )
    on_hangup: Literal["continue", "stop"] = Field(
        "continue",
        description="when the terminal is lost: continue without a screen, or save a checkpoint and stop",
    )


class Config(Section):
    """The configuration of a run."""

    run: RunSection = RunSection()
    workload: WorkloadSection
    batch: BatchSection = BatchSection()
    loader: LoaderSection = LoaderSection()
    precision: PrecisionSection = PrecisionSection()
    speed: SpeedSection = SpeedSection()
    memory: MemorySection = MemorySection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    clip: ClipSection = ClipSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    parallel: ParallelSection = ParallelSection()
    console: ConsoleSection = ConsoleSection()

    def value(self, key: str) -> Any:
        """The value of a dotted key."""
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    def changed(self, **sections: Mapping[str, Any]) -> Config:
        """A copy with other values of keys, such as changed(batch={"micro": 4}). They are not checked."""
        update = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=update)

    @property
    def items_per_step(self) -> int:
        """The effective batch size: items per optimizer step of all ranks."""
        return self.batch.items * self.parallel.ranks

    @model_validator(mode="before")
    @classmethod
    def _hold_effective(cls, values: Any) -> Any:
        """Derive `batch.accumulation` from `batch.effective` if only the latter is set."""
        batch, parallel = (
            (values.get("batch"), values.get("parallel", {})) if isinstance(values, dict) else (None, {})
        )
        if not isinstance(batch, dict) or "accumulation" in batch or not isinstance(parallel, dict):
            return values
        micro, effective, ranks = batch.get("micro", 32), batch.get("effective"), parallel.get("ranks", 1)
        numbers = type(micro) is type(effective) is type(ranks) is int
        if numbers and micro > 0 and ranks > 0 and effective % (micro * ranks) == 0:
            return {**values, "batch": {**batch, "accumulation": effective // (micro * ranks)}}
        return values

    def _check_effective(self) -> None:
        batch, ranks, items = self.batch, self.parallel.ranks, self.items_per_step
        product = f"micro {batch.micro} x accumulation {batch.accumulation}"
        product += f" x ranks {ranks}" if ranks > 1 else ""
        if batch.effective is not None and batch.effective != items:
            times = "micro x ranks divides" if ranks > 1 else "micro divides"
            raise ValueError(
                f"{product} is {items}, but batch.effective is {batch.effective}: choose batch.micro so that {times} "
                "effective, and do not set batch.accumulation"
            )
        if items > MANY:
            raise ValueError(f"{product} is {items:,} items; at most {MANY:,} are possible")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Config:
        self._check_effective()
        if self.run.epochs is None and self.run.max_steps is None:
            raise ValueError("set run.epochs or run.max_steps, for example --set run.epochs=3")
        if self.loader.cache and getattr(self.workload, "augment", False):
            raise ValueError(
                "loader.cache caches items, but workload.augment changes them every epoch: disable one of them"
            )
        if self.speed.cuda_graph and (self.memory.budget or self.memory.recompute):
            raise ValueError(
                "speed.cuda_graph captures a step whose blocks keep everything: remove memory.budget and "
                "memory.recompute, or set cuda_graph to false"
            )
        if self.schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"schedule.min_lr {self.schedule.min_lr} is greater than optimizer.lr {self.optimizer.lr}"
            )
        return self


@dataclass(frozen=True)
class ConfigKey:
    """One key.

    name: dotted, such as "batch.micro". type: "integer", "number", "text", "true or false", "choice", "list" or
    "table". allowed: the values, in words. choices: all of them as they are written on a command line, () if there is
    no list of them. default: of the workload, None if it is not set; required: there is none. unset: whether "none"
    removes the value. effect: what it does.
    """

    name: str
    type: str
    allowed: str
    choices: tuple[str, ...]
    default: Any
    required: bool
    unset: bool
    effect: str

    @property
    def default_text(self) -> str:
        """The default as TOML writes it."""
        return (
            "required" if self.required else "not set" if self.default is None else json.dumps(self.default)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "key": self.name, "type": self.type, "allowed": self.allowed, "choices": list(self.choices),
            "default": self.default, "required": self.required, "effect": self.effect,
        }  # fmt: skip


def keys(workload: str = DEFAULT_WORKLOAD) -> list[ConfigKey]:
    """All keys, in the order of the reference. workload: whose [workload] section and defaults, a name or a factory."""
    profile = ndd_profiles.read("workloads", workload) if workload in WORKLOADS else {}
    defaults = profile.get("defaults", {})
    found = []
    for section, field in Config.model_fields.items():
        model: object = field.annotation
        if section == "workload":
            model = SECTIONS[kind({"name": workload}) or workload]
        assert isinstance(model, type) and issubclass(model, Section)
        for key in section_keys(section, model):
            name = key.name.partition(".")[2]
            if name == "name" and section == "workload":
                key = replace(
                    key, type="text", allowed=", ".join((*WORKLOADS, "or package.module:factory")),
                    choices=tuple(WORKLOADS), default=workload, required=False,
                )  # fmt: skip
            elif name == "size" and section == "workload" and (sizes := profile.get("sizes")):
                choices = (*sizes, *(("auto",) if profile.get("auto") else ()))
                key = replace(key, type="choice", allowed=", ".join(choices), choices=choices)
            if name in defaults.get(section, {}):
                key = replace(key, default=defaults[section][name], required=False)
            found.append(key)
    return found


def section_keys(section: str, model: type[Section]) -> Iterator[ConfigKey]:
    """The keys of one section, with the defaults of the schema."""
    schema = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        own = schema[name]
        if isinstance(default, tuple):
            default = list(default)
        yield ConfigKey(
            name=f"{section}.{name}",
            type=type_of(own),
            allowed=allowed(own),
            choices=choices_of(own),
            default=default,
            required=field.is_required(),
            unset=any(part.get("type") == "null" for part in own.get("anyOf", ())),
            effect=field.description or {"name": "the workload"}.get(name, ""),
        )


def type_of(schema: Mapping[str, Any]) -> str:
    """The type of a JSON schema of one key, in words."""
    parts = [part for part in schema.get("anyOf", (schema,)) if part.get("type") != "null"]
    words = {"boolean": "true or false", "array": "list", "object": "table", "string": "text"}
    names = [
        "choice"
        if "enum" in part or "const" in part
        else words.get(part.get("type", ""), part.get("type", "any"))
        for part in parts
    ]
    return " or ".join(dict.fromkeys(names))


def choices_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The values of a key as they are written on a command line; () if there is no list of them."""
    found: list[str] = []
    for part in schema.get("anyOf", (schema,)):
        if part.get("type") == "null":
            continue
        values = [part["const"]] if "const" in part else part.get("enum")
        if part.get("type") == "boolean":
            values = [True, False]
        if values is None:
            return ()
        found += [value if isinstance(value, str) else json.dumps(value) for value in values]
    return tuple(found)


def allowed(schema: Mapping[str, Any], mark: str = "") -> str:
    """The values that a JSON schema of one key allows, in words. mark: put around each literal value."""
    if "anyOf" in schema:
        return " or ".join(allowed(item, mark) for item in schema["anyOf"] if item.get("type") != "null")
    if "const" in schema:
        return f"{mark}{json.dumps(schema['const'])}{mark}"
    if "enum" in schema:
        return ", ".join(f"{mark}{json.dumps(value)}{mark}" for value in schema["enum"])
    match schema.get("type"):
        case "boolean":
            return f"{mark}true{mark}, {mark}false{mark}"
        case "integer":
            return "integer" + _range(schema)
        case "number":
            return "number" + _range(schema)
        case "array":
            low, high = schema.get("minItems"), schema.get("maxItems")
            count = f" of {low}" if low is not None and low == high else ""
            return f"list{count}, each " + allowed(schema["items"], mark)
        case "object":
            return "table"
        case "string":
            return f"text matching {mark}{schema['pattern']}{mark}" if "pattern" in schema else "text"
    return "any"


def _range(schema: Mapping[str, Any]) -> str:
    words = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
        "multipleOf": "multiple of",
    }
    limits = [f"{sign} {schema[key]:,}" for key, sign in words.items() if key in schema]
    return f" {' and '.join(limits)}" if limits else ""


def why_no_graph(gpu: bool, ranks: int, scales: bool, optimizer: str) -> str | None:
    """Why a step cannot be captured, or None.

    gpu: whether it trains on a CUDA GPU. scales: whether a scaler multiplies the loss. optimizer: its name.
    """
    if not gpu:
        return "there is no CUDA GPU"
    if ranks > 1:
        return "several ranks exchange gradients during backward"
    if scales:
        return 'fp16 loss scaling checks the gradients on the host: use precision.amp "bf16"'
    if optimizer == "sgd":
        return "torch's SGD reads the learning rate on the host"
    return None
