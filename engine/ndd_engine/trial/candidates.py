"""The candidates of tuning: every setting that may speed up training without changing what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import OWN, kind
from ndd_engine.hardware.gpu import Machine

# Workloads whose batches are gathered from tensors in memory, without encoding.
IN_MEMORY = frozenset({"chartext", "ndd"})
CONVOLUTIONS = frozenset({"antispoof", OWN})
ATTENTION = frozenset({"chartext", "finetune", OWN})
# Compiling unrolls the decoder loop, which takes minutes on the CPU.
UNROLLED = frozenset({"summarise"})
MOST_WORKERS = 16
MOST_MICRO = 16  # times the baseline micro-batch
# Flags of CPUs with native bf16; others convert, which is slower than fp32.
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """One change. name: short, for --only. title: shown to people. group: candidates of one sweep.

    missing: why it is listed but not measured, "" if it is measured.
    """

    name: str
    title: str
    sets: tuple[str, ...]
    group: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """What the candidates depend on besides the configuration. gpu: whether there is a CUDA GPU.

    cores: whole cores usable by this process. capability: of the GPU, None if unknown. bf16: whether the CPU has
    native bf16, None if unknown.
    """

    gpu: bool
    cores: int
    capability: tuple[int, int] | None = None
    bf16: bool | None = None

    @classmethod
    def of(cls, machine: Machine, cpuinfo: Path = Path("/proc/cpuinfo")) -> Place:
        """As detected."""
        found = machine.chosen
        return cls(
            machine.device != "cpu",
            max(int(machine.host.usable_cpus), 1),
            found.compute_capability if found is not None else None,
            _has_bf16(cpuinfo),
        )


def candidates(config: Config, place: Place) -> tuple[Candidate, ...]:
    """In the order in which they are tried: data, processes, step, precision, kernels, compiler."""
    return tuple(
        candidate
        for part in (_data, _processes, _step, _precision, _kernels, _compilers)
        for candidate in part(config, place)
    )


Part = Callable[[Config, Place], Iterator[Candidate]]
NO_GPU = "no CUDA GPU"
SET = "already set"


def _needs_gpu(place: Place) -> str:
    return "" if place.gpu else NO_GPU


def _data(config: Config, place: Place) -> Iterator[Candidate]:
    loader = config.loader
    set_already = "" if loader.fetch == "item" else SET
    yield Candidate("gather", "whole-batch gather", ("loader.fetch=auto",), missing=set_already)
    in_memory = config.workload.name in IN_MEMORY
    why = "the items are already in memory, unencoded" if in_memory else ""
    yield Candidate("cache", "encoded-item cache", ("loader.cache=true",), missing=why)
    sets: tuple[str, ...] = ("loader.placement=device",)
    if loader.workers:
        sets = ("loader.workers=0", *sets)
    yield Candidate("device", "data on the GPU", sets, missing=_needs_gpu(place))


def _processes(config: Config, place: Place) -> Iterator[Candidate]:
    for count in (2**power for power in range(min(place.cores, MOST_WORKERS).bit_length())):
        word = "worker" if count == 1 else "workers"
        yield Candidate(f"workers-{count}", f"{count} loader {word}", (f"loader.workers={count}",), "workers")
    if config.loader.persistent is False:
        yield Candidate("persistent", "persistent workers", ("loader.persistent=true",))
    yield Candidate("pin-memory", "pinned memory", ("loader.pin_memory=true",), missing=_needs_gpu(place))
    current = config.run.threads or place.cores
    why = "the GPU computes" if place.gpu else ""
    for count in dict.fromkeys((place.cores, place.cores // 2, 1)):
        if 0 < count != current:
            word = "thread" if count == 1 else "threads"
            yield Candidate(f"threads-{count}", f"{count} {word}", (f"run.threads={count}",), "threads", why)


def _step(config: Config, place: Place) -> Iterator[Candidate]:
    if decoder := getattr(config.workload, "decoder", ""):
        title = "one vocabulary projection for all decoder steps"
        why = "" if decoder == "stepwise" else SET
        yield Candidate("hoisted", title, ("workload.decoder=hoisted",), missing=why)
    batch = config.batch
    if batch.accumulation == 1:
        why = "the micro-batch is already the effective batch"
        yield Candidate("micro", "larger micro-batches, same effective batch", (), missing=why)
    times = 2
    while times <= MOST_MICRO and batch.accumulation % times == 0:
        micro, left = batch.micro * times, batch.accumulation // times
        title = f"micro-batch {micro}, same effective batch of {batch.items}"
        yield Candidate(
            f"micro-{micro}", title, (f"batch.micro={micro}", f"batch.accumulation={left}"), "micro"
        )
        times *= 2
    implementation = config.optimizer.implementation
    why = {"auto": "auto uses it where torch supports it", "fused": SET}.get(implementation, "")
    yield Candidate("fused", "fused optimizer", ("optimizer.implementation=fused",), missing=why)
    yield Candidate("set-to-none", "zero_grad(set_to_none=True)", ("optimizer.set_to_none=true",))


def _precision(config: Config, place: Place) -> Iterator[Candidate]:
    old = place.capability is not None and place.capability < (8, 0)
    why = _needs_gpu(place) or ("the GPU has no TF32" if old else "")
    yield Candidate("tf32", "TF32 matmuls", ("precision.tf32=true",), missing=why)
    lowered = "" if config.precision.amp == "off" else "mixed precision is already on"
    if not place.gpu and config.precision.amp == "auto":
        lowered = ""  # auto resolves to off on the CPU
    why = lowered or ("the GPU has no bf16" if old else "")
    if not place.gpu and place.bf16 is False:
        why = "the CPU has no bf16 (neither AMX nor AVX-512)"
    yield Candidate("bf16", "mixed precision, bf16", ("precision.amp=bf16",), "amp", why)
    yield Candidate(
        "fp16", "mixed precision, fp16", ("precision.amp=fp16",), "amp", _needs_gpu(place) or lowered
    )


def _kernels(config: Config, place: Place) -> Iterator[Candidate]:
    which = kind(config.workload)
    why = "" if which in ATTENTION else "this model does not use scaled_dot_product_attention"
    yield Candidate("attention", "attention backend chosen by torch", ("speed.attention=auto",), missing=why)
    why = "" if which in CONVOLUTIONS else "this model has no convolutions"
    yield Candidate(
        "channels-last", "channels-last memory format", ("speed.channels_last=true",), missing=why
    )
    yield Candidate(
        "cudnn-benchmark", "cuDNN benchmark", ("speed.cudnn_benchmark=true",),
        missing=_needs_gpu(place) or why,
    )  # fmt: skip


def _compilers(config: Config, place: Place) -> Iterator[Candidate]:
    slow = "compiling its unrolled decoder takes minutes" if kind(config.workload) in UNROLLED else ""
    yield Candidate(
        "compile", "torch.compile", ("speed.compile=default",), "compile", "" if place.gpu else slow
    )
    yield Candidate(
        "reduce-overhead", "torch.compile, reduce-overhead", ("speed.compile=reduce-overhead",), "compile",
        _needs_gpu(place),
    )  # fmt: skip
    yield Candidate(
        "cuda-graph", "whole step as one CUDA graph", ("speed.cuda_graph=true",), missing=_needs_gpu(place)
    )


def _has_bf16(cpuinfo: Path) -> bool | None:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    return None if flags is None else bool(BF16_FLAGS & set(flags))


def matching(all_candidates: Sequence[Candidate], only: Sequence[str]) -> set[str]:
    """Names of the candidates selected by name or group. Raises KeyError with the first unknown one."""
    found: set[str] = set()
    for wanted in only:
        names = {
            candidate.name for candidate in all_candidates if wanted in (candidate.name, candidate.group)
        }
        if not names:
            raise KeyError(wanted)
        found |= names
    return found
