"""The table of changes: every setting that can be tried, one row each.

Trials, tuning, the edit of a script, the check of what is in effect and the diagnosis read it. A setting of its own
needs a row here and a key in the schema of the configuration. Rows are in the order in which tuning tries them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .fitting import MemoryBudget, Recompute
from .switches import (
    Attention,
    Autocast,
    Cache,
    ChannelsLast,
    Collections,
    Compile,
    CudnnBenchmark,
    FlushDenormal,
    Gather,
    Global,
    Implementation,
    InOrder,
    Loader,
    NonBlocking,
    Persistent,
    PinMemory,
    Prefetch,
    Switch,
    Tf32,
    Threads,
    Workers,
)

# How one process of an own run switches a setting between two runs of a trial. Others need processes of their own.
LOADER = "loader"  # batches come from another loader; both of them are open
MODEL = "model"  # the model computes in another way
AROUND = "around"  # it concerns what happens around the model, or nothing in a trial

MOST_WORKERS = 16
# Batches that a worker of torch loads ahead where nothing else is set.
PREFETCH = 2
MOST_MICRO = 16  # times the micro-batch of the baseline
SET = "already set"
_BACKENDS = ("flash", "efficient", "cudnn", "math")
_NO_ATTENTION = "this model does not use scaled_dot_product_attention"
_AGAIN = (
    "for each block that the trial names: block.forward = functools.partial(torch.utils.checkpoint.checkpoint, "
    "block.forward, use_reentrant=False)"
)
_NO_CONVOLUTIONS = "this model has no convolutions"


@dataclass(frozen=True)
class Candidate:
    """A change that tuning measures. name: short, for --only. title: for display. group: candidates of one sweep.

    missing: why it is listed but not measured, "" if it is measured. always: also after others of its group did not
    help.
    """

    name: str
    title: str
    sets: tuple[str, ...]
    group: str = ""
    missing: str = ""
    always: bool = False


@dataclass(frozen=True)
class Conditions:
    """What the candidates depend on.

    gpu: whether there is a CUDA GPU, with its capability if that is known. cores: whole cores of this process. bf16:
    whether the CPU has native bf16, None if unknown. settings: by key, as they are; a missing key is unknown, or no
    setting of this training. model: what is known of it ("attention", "convolutions", "in memory", "unrolled").
    no_graph: why a step cannot be a CUDA graph. script: whether somebody else's script trains. attention: the backend
    that torch chose in it, "" if unknown.
    """

    gpu: bool
    cores: int
    capability: tuple[int, int] | None = None
    bf16: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: frozenset[str] = frozenset()
    no_graph: str = ""
    script: bool = False
    attention: str = ""

    @property
    def no_gpu(self) -> str:
        """Why nothing for a GPU is measured; "" with one."""
        return "" if self.gpu else "no CUDA GPU"

    @property
    def old(self) -> bool:
        """Whether the GPU has neither TF32 nor bf16."""
        return self.capability is not None and self.capability < (8, 0)

    @property
    def strategy(self) -> str:
        """How several ranks share the model; "" for one rank."""
        return str(self.settings["parallel.strategy"]) if self.settings["parallel.ranks"] > 1 else ""


@dataclass(frozen=True)
class Once:
    """Tuning tries one value. names: what --only accepts. missing: see Candidate; None if it is not even listed."""

    names: str
    value: str = "true"
    missing: Callable[[Conditions], str | None] = lambda here: ""


@dataclass(frozen=True)
class Sweep:
    """Tuning tries several values, or other settings with it. names: what --only accepts."""

    names: str
    each: Callable[[Conditions], Iterator[Candidate]]


@dataclass(frozen=True)
class Idea:
    """What the diagnosis proposes where nothing slows a run down. when: from whether it has a GPU, and its value."""

    value: str
    text: str
    when: Callable[[bool, Any], bool]


@dataclass(frozen=True)
class Argument:
    """An edit: arguments of the calls that make a DataLoader or an optimizer, from the value."""

    call: str
    given: Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Statement:
    """An edit: a statement after the import of torch. {torch}: its name there. {value}: by `words`, or as it is."""

    text: str
    words: Mapping[Any, str] | None = None

    def value(self, value: Any) -> Any:
        """What stands for a value."""
        return value if self.words is None else self.words[value]


@dataclass(frozen=True)
class Items:
    """An edit: a list of all items in place of the dataset. advice: where that cannot be done."""

    advice: str


@dataclass(frozen=True)
class OfModel:
    """An edit: a statement about the model whose parameters an optimizer gets, after the optimizer is made.

    given: the statement from the value, "" where there is none. {torch}, {model}: their names. advice: by hand.
    """

    given: Callable[[Any], str]
    advice: str


@dataclass(frozen=True)
class OfLoop:
    """An edit of the loop with the backward pass.

    part: "context" (around the forward pass and the loss), "copies" (an argument of those to the device), or
    "collections" (every so many steps). given: what is written, from the value, "" where there is no edit. {torch},
    {device}: its name, and "cuda" or "cpu". advice: by hand, with {value} and {dtype} as well.
    """

    part: str
    given: Callable[[Any], str]
    advice: str


@dataclass(frozen=True)
class Alters:
    """What a setting may change in the training, and how a trial checks that; both "" for nothing.

    losses: whether a faster change counts only if its first losses were compared. other: whether they cannot be, since
    something else is trained.
    """

    what: str
    checked: str
    losses: bool = False
    other: bool = False


NOTHING = Alters("", "")
ARITHMETIC = Alters(
    "the arithmetic", "the first losses of both sides; without them it is not kept", losses=True
)
CACHED = Alters("random augmentation", "items are read twice, and have to be the same")
DRAWN = Alters("random augmentation", "the first losses of both sides, where there are any")
ORDER = Alters("the order of the batches", DRAWN.checked)
DRAWN_ELSEWHERE = Alters("blocks that draw random numbers of libraries other than torch", DRAWN.checked)
TRAINED = Alters(
    "what is trained", "not checked: the losses are those of another training", losses=True, other=True
)
EVALUATED = Alters("what evaluations tell", "not checked: only losses of the training are compared")


@dataclass(frozen=True)
class Row:
    """A setting.

    title: of what is tried. made: how it is switched, or made at the start of a script, and how that is read back; None
    if only our own runs know it. switched: how one process of an own run switches it, "" if it needs another process.
    edit: of a script, or what to do by hand. alters: what it may change in the training.
    """

    key: str
    title: str = ""
    made: type[Switch] | None = None
    switched: str = ""
    edit: Argument | Statement | Items | OfModel | OfLoop | str = ""
    alters: Alters = NOTHING
    tries: Once | Sweep | None = None
    idea: Idea | None = None


def _cached(here: Conditions) -> str | None:
    if here.script and "loader.workers" not in here.settings:
        return None
    return "the items are already in memory, unencoded" if "in memory" in here.model else ""


def _device(here: Conditions) -> Iterator[Candidate]:
    alone = ("loader.workers=0",) if here.settings["loader.workers"] else ()
    yield Candidate("device", "data on the GPU", (*alone, "loader.placement=device"), missing=here.no_gpu)


def _workers(here: Conditions) -> Iterator[Candidate]:
    now = here.settings.get("loader.workers")
    if now is None:
        return
    powers = [2**power for power in range(min(here.cores, MOST_WORKERS).bit_length())]
    # More of them first: tuning gives up the group when two did not help, but not a loader without workers.
    for count in (
        *sorted(powers, key=lambda count: (count <= now, abs(count - now))),
        *((0,) if now else ()),
    ):
        title = f"{count or 'no'} loader {'worker' if count == 1 else 'workers'}"
        yield Candidate(f"workers-{count}", title, (f"loader.workers={count}",), "workers", always=not count)


def _prefetch(here: Conditions) -> Iterator[Candidate]:
    # Without workers it is measured on top of those that are kept, if any are.
    if here.settings.get("loader.workers") is not None:
        more = 2 * (here.settings.get("loader.prefetch") or PREFETCH)
        yield Candidate(f"prefetch-{more}", f"{more} batches loaded ahead", (f"loader.prefetch={more}",))


def _non_blocking(here: Conditions) -> Iterator[Candidate]:
    # A copy from memory that is not pinned waits anyway.
    pinned = here.settings.get("loader.pin_memory")
    if pinned is not None and not here.settings.get("loader.non_blocking"):
        more = () if pinned else ("loader.pin_memory=true",)
        title = "asynchronous copies" if pinned else "pinned memory, asynchronous copies"
        yield Candidate("non-blocking", title, (*more, "loader.non_blocking=true"), missing=here.no_gpu)


def _threads(here: Conditions) -> Iterator[Candidate]:
    missing = "the GPU computes" if here.gpu else ""
    for count in dict.fromkeys((here.cores, here.cores // 2, 1)):
        if 0 < count != (here.settings.get("run.threads") or here.cores):
            title = f"{count} {'thread' if count == 1 else 'threads'}"
            yield Candidate(f"threads-{count}", title, (f"run.threads={count}",), "threads", missing)


def _micro(here: Conditions) -> Iterator[Candidate]:
    micro, accumulation = here.settings["batch.micro"], here.settings["batch.accumulation"]
    if accumulation == 1:
        missing = "the micro-batch is already the effective batch"
        yield Candidate("micro", "larger micro-batches, same effective batch", (), missing=missing)
    times = 2
    while times <= MOST_MICRO and accumulation % times == 0:
        title = f"micro-batch {micro * times}, same effective batch of {micro * accumulation}"
        sets = f"batch.micro={micro * times}", f"batch.accumulation={accumulation // times}"
        yield Candidate(f"micro-{micro * times}", title, sets, "micro")
        times *= 2


def _fused(here: Conditions) -> str | None:
    known = {None: None, "auto": "auto uses it where torch supports it", "fused": SET}
    return known.get(here.settings.get("optimizer.implementation"), "")


def _compress(here: Conditions) -> Iterator[Candidate]:
    if here.strategy == "ddp":
        half = "bf16" if here.gpu else "fp16"  # gloo does not compress to bf16
        yield Candidate("compress", f"gradients exchanged in {half}", (f"parallel.compress={half}",))


def _amp(here: Conditions) -> Iterator[Candidate]:
    amp = here.settings.get("precision.amp", "off")
    # auto resolves to off on the CPU
    lowered = "" if amp == "off" or (amp == "auto" and not here.gpu) else "mixed precision is already on"
    missing = lowered or ("the GPU has no bf16" if here.old else "")
    if not here.gpu and here.bf16 is False:
        missing = "the CPU has no bf16 (neither AMX nor AVX-512)"
    yield Candidate("bf16", "mixed precision, bf16", ("precision.amp=bf16",), "amp", missing)
    if not here.script:  # which would need to scale its losses
        missing = here.no_gpu or lowered
        yield Candidate("fp16", "mixed precision, fp16", ("precision.amp=fp16",), "amp", missing)


def _cudnn(here: Conditions) -> str:
    return here.no_gpu or ("" if here.script or "convolutions" in here.model else _NO_CONVOLUTIONS)


def _backends(here: Conditions) -> Iterator[Candidate]:
    if "attention" not in here.model:
        yield Candidate("attention", "attention backend", (), "attention", _NO_ATTENTION)
        return
    now = here.settings.get("speed.attention", "auto")
    if now != "auto":
        title = "attention backend chosen by torch"
        yield Candidate("attention-auto", title, ("speed.attention=auto",), "attention")
    for name in _BACKENDS[:-1] if here.gpu else _BACKENDS[-1:]:
        if name not in (now, here.attention):
            yield Candidate(
                f"attention-{name}", f"attention backend {name}", (f"speed.attention={name}",), "attention"
            )


def _compile(here: Conditions) -> Iterator[Candidate]:
    missing = (
        "" if here.gpu or "unrolled" not in here.model else "compiling its unrolled decoder takes minutes"
    )
    yield Candidate("compile", "torch.compile", ("speed.compile=default",), "compile", missing)
    if not here.script:
        title, sets = "torch.compile, reduce-overhead", ("speed.compile=reduce-overhead",)
        yield Candidate("reduce-overhead", title, sets, "compile", here.no_gpu)


def _of_loader(kind: type[Loader]) -> Argument:
    return Argument("DataLoader", lambda value: {kind.name: value})


def _workers_of(count: int) -> dict[str, Any]:
    """Without workers, a loader refuses what they need."""
    alone = {} if count else {Prefetch.name: None, Persistent.name: False}
    return {Workers.name: count, **alone}


def _compiled(value: Any) -> str:
    if value in ("off", False):
        return ""
    return "{model}.compile()" if value in ("default", True) else f'{{model}}.compile(mode="{value}")'


def _attention(value: str) -> str:
    names = {
        "flash": "FLASH_ATTENTION",
        "efficient": "EFFICIENT_ATTENTION",
        "cudnn": "CUDNN_ATTENTION",
        "math": "MATH",
    }
    kernel = "{torch}.nn.attention.sdpa_kernel({torch}.nn.attention.SDPBackend.%s)"
    return kernel % names[value] if value in names else ""


def _flags(value: str) -> dict[str, bool]:
    return {"foreach": False} if value == "loop" else {value: True}


_ROWS = (
    # Data.
    Row(
        "loader.fetch", "whole-batch gather", Gather, LOADER,
        "index whole batches: DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), batch_size, "
        "drop_last=False))",
        tries=Once("gather", "auto", lambda here: "" if here.settings.get("loader.fetch") == "item" else SET),
    ),
    Row(
        "loader.cache", "encoded-item cache", Cache, alters=CACHED,
        edit=Items("read all items once before training: DataLoader([data[i] for i in range(len(data))], ...)"),
        tries=Once("cache", missing=_cached),
    ),
    Row("loader.placement", "data on the GPU", alters=CACHED, tries=Sweep("device", _device)),
    # Processes.
    Row(
        "loader.workers", "loader workers", Workers, LOADER, Argument("DataLoader", _workers_of), DRAWN,
        Sweep("workers, workers-N", _workers),
    ),
    Row(
        "loader.persistent", "persistent workers", Persistent, LOADER, _of_loader(Persistent),
        tries=Once("persistent", missing=lambda here: "" if here.settings.get("loader.persistent") is False else None),
    ),
    Row(
        "loader.prefetch", "batches loaded ahead", Prefetch, LOADER, _of_loader(Prefetch),
        tries=Sweep("prefetch, prefetch-N", _prefetch),
    ),
    Row("loader.in_order", "batches as soon as they are ready", InOrder, LOADER, _of_loader(InOrder), ORDER),
    Row(
        "loader.pin_memory", "pinned memory", PinMemory, LOADER, _of_loader(PinMemory),
        tries=Once("pin-memory", missing=lambda here: here.no_gpu),
    ),
    Row(
        "loader.non_blocking", "asynchronous copies", NonBlocking, AROUND,
        OfLoop(
            "copies", lambda value: "non_blocking=True" if value else "",
            "copy batches from pinned memory with .to(device, non_blocking=True)",
        ),
        tries=Sweep("non-blocking", _non_blocking),
    ),
    Row(
        "run.threads", "CPU threads", Threads, MODEL, Statement("{torch}.set_num_threads({value})"), ARITHMETIC,
        Sweep("threads, threads-N", _threads),
        Idea(
            "1", "try one thread: small operators may be faster without the others",
            lambda gpu, now: not gpu and isinstance(now, int) and now > 1,
        ),
    ),
    # Step.
    Row(
        "workload.decoder", "one vocabulary projection for all decoder steps", alters=ARITHMETIC,
        tries=Once(
            "hoisted", "hoisted",
            lambda here: {None: None, "stepwise": ""}.get(here.settings.get("workload.decoder"), SET),
        ),
    ),
    Row("batch.micro", "micro-batch", alters=ARITHMETIC, tries=Sweep("micro, micro-N", _micro)),
    Row(
        "optimizer.implementation", "fused optimizer", Implementation, "", Argument("optimizer", _flags), ARITHMETIC,
        Once("fused", "fused", _fused),
    ),
    Row("optimizer.set_to_none", "zero_grad(set_to_none=True)", tries=Once("set-to-none")),
    Row(
        "run.gc_every_steps", "garbage collection every so many steps", Collections, AROUND,
        OfLoop(
            "collections", lambda value: str(value or ""),
            "call gc.disable() before the loop, and gc.collect() every {value} steps",
        ),
    ),
    # Exchange.
    Row(
        "parallel.bucket_mb", "gradient buckets of 100 MiB",
        tries=Once("buckets", "100", lambda here: "" if here.strategy == "ddp" else None),
    ),
    Row("parallel.compress", "exchanged gradients", alters=ARITHMETIC, tries=Sweep("compress", _compress)),
    Row(
        "parallel.reshard", "parameters kept after forward",
        tries=Once("gathered", "false", lambda here: "" if here.strategy == "fsdp2" else None),
    ),
    # Precision.
    Row(
        "precision.tf32", "TF32 matmuls", Tf32, MODEL,
        Statement('{torch}.set_float32_matmul_precision("{value}")', {True: "high", False: "highest"}), ARITHMETIC,
        Once("tf32", missing=lambda here: here.no_gpu or ("the GPU has no TF32" if here.old else "")),
    ),
    Row(
        "precision.amp", "mixed precision", Autocast, MODEL,
        OfLoop(
            "context",  # fp16 needs a gradient scaler as well
            lambda value: '{torch}.autocast("{device}", dtype={torch}.bfloat16)' if value == "bf16" else "",
            'run the forward pass and the loss under torch.autocast("{device}", dtype={dtype})',
        ), ARITHMETIC,
        Sweep("amp, bf16, fp16", _amp),
        Idea("bf16", "try bf16: it may be faster on this GPU", lambda gpu, now: gpu and now == "off"),
    ),
    # Kernels.
    Row(
        "speed.attention", "attention backend", Attention, MODEL,
        OfLoop(
            "context", _attention, "run attention under torch.nn.attention.sdpa_kernel with the {value} backend",
        ), ARITHMETIC,
        Sweep(", ".join(("attention", *(f"attention-{name}" for name in ("auto", *_BACKENDS)))), _backends),
    ),
    Row(
        "speed.channels_last", "channels-last memory format", ChannelsLast, "",
        OfModel(
            lambda value: "{model}.to(memory_format={torch}.channels_last)" if value else "",
            "convert the model and the images with .to(memory_format=torch.channels_last)",
        ), ARITHMETIC,
        Once("channels-last", missing=lambda here: "" if "convolutions" in here.model else _NO_CONVOLUTIONS),
    ),
    Row(
        "speed.cudnn_benchmark", "cuDNN benchmark", CudnnBenchmark, "",
        Statement("{torch}.backends.cudnn.benchmark = {value}"), ARITHMETIC, Once("cudnn-benchmark", missing=_cudnn),
    ),
    Row(
        "speed.flush_denormal", "denormal numbers as zero", FlushDenormal, "",
        Statement("{torch}.set_flush_denormal({value})"), ARITHMETIC,
        Once("flush-denormal", missing=lambda here: "the GPU computes" if here.gpu else ""),
    ),
    # Compiler.
    Row(
        "speed.compile", "torch.compile", Compile, "",
        OfModel(_compiled, "compile the model once before training: model.compile()"), ARITHMETIC,
        Sweep("compile, reduce-overhead", _compile),
        Idea("default", "try torch.compile: the compiled model may be faster", lambda _, now: now == "off"),
    ),
    Row(
        "speed.cuda_graph", "whole step as one CUDA graph",
        tries=Once("cuda-graph", missing=lambda here: here.no_gpu or here.no_graph),
    ),
    Row("speed.compile_dynamic", "compiled for dynamic shapes", alters=ARITHMETIC),
    Row("speed.deterministic", "deterministic algorithms", alters=ARITHMETIC),
    # What only findings propose, or somebody tries.
    Row("batch.accumulation", "micro-batches of a step", alters=ARITHMETIC),
    Row("precision.parameters", "parameters kept in bf16", alters=ARITHMETIC),
    Row("parallel.param_dtype", "precision of gathered parameters", alters=ARITHMETIC),
    Row("parallel.reduce_dtype", "precision of reduced gradients", alters=ARITHMETIC),
    *(
        Row(key, title, made, "", _AGAIN, DRAWN_ELSEWHERE) for key, title, made in (
            ("memory.budget", "activations computed again, within a limit of memory", MemoryBudget),
            ("memory.recompute", "blocks that compute again in backward", Recompute),
        )
    ),
    Row("workload.pad", "padding of batches", alters=ARITHMETIC),
    Row("workload.summaries", "summaries of an evaluation", alters=EVALUATED),
    Row("clip.max_norm", "limit of the gradient's norm", alters=TRAINED),
    Row("evaluate.batches", "batches of an evaluation", alters=EVALUATED),
    *(Row(f"evaluate.every_{unit}", f"{unit} between evaluations", alters=EVALUATED) for unit in ("steps", "epochs")),
    *(Row(f"checkpoint.every_{unit}", f"{unit} between checkpoints") for unit in ("steps", "epochs", "minutes")),
    # What only our own runs have, and no step of a trial depends on.
    Row("log.every_steps", "steps between losses that are read", switched=AROUND),
    Row("log.window_s", "seconds of a window", switched=AROUND),
    *(
        Row(key, switched=AROUND) for key in (
            "loader.timeout_s", "log.profile_every_s", "log.headless_s", "console.refresh_hz", "console.on_hangup",
        )
    ),
)  # fmt: skip
TABLE = {row.key: row for row in _ROWS}
# What can be tried with a script, and those of it that it needs from its start.
OF_SCRIPTS = {row.key: row.made for row in _ROWS if row.made is not None}
AT_START = frozenset(key for key, kind in OF_SCRIPTS.items() if kind.at_start)
# Arguments of a DataLoader, and switches of torch for the whole process. Own runs make and verify these by their rows.
ARGUMENTS = {key: kind for key, kind in OF_SCRIPTS.items() if issubclass(kind, Loader)}
GLOBALS = {key: kind for key, kind in OF_SCRIPTS.items() if issubclass(kind, Global)}


def switched_by(*ways: str) -> frozenset[str]:
    """The keys that one process of an own run switches in any of these ways."""
    return frozenset(row.key for row in _ROWS if row.switched in ways)


def candidates(here: Conditions) -> tuple[Candidate, ...]:
    """What tuning tries, in the order of the table; for a script only what can be measured."""
    found: list[Candidate] = []
    for row in _ROWS:
        if here.script and row.made is None:
            continue
        if isinstance(row.tries, Sweep):
            found += row.tries.each(here)
        elif row.tries is not None and (missing := row.tries.missing(here)) is not None:
            sets = (f"{row.key}={row.tries.value}",)
            found.append(Candidate(row.tries.names, row.title, sets, missing=missing))
    return tuple(one for one in found if not (here.script and one.missing))


def make(key: str, value: Any, observer: Any) -> Switch:
    """The change of a script. Raises KeyError for a key that needs an edit of it."""
    return OF_SCRIPTS[key](value, observer)


def needs_losses(keys: Iterable[str]) -> bool:
    """Whether such a change counts only if the losses were compared. A setting without a row may change anything."""
    return any(key not in TABLE or TABLE[key].alters.losses for key in keys)
