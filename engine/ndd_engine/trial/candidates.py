"""The candidates of tuning: every setting that may speed up training without changing what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import OWN, kind
from ndd_engine.graphs import why_no_graph
from ndd_engine.hardware.gpu import Machine

# Workloads whose batches are gathered from tensors in memory, without encoding.
IN_MEMORY = frozenset({"chartext", "eeg"})
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
    """One change. name: short, for --only. title: for display. group: candidates of one sweep.

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


NO_GPU = "no CUDA GPU"
SET = "already set"


def candidates(config: Config, place: Place) -> tuple[Candidate, ...]:
    """In the order in which they are tried: data, processes, step, exchange, precision, kernels, compiler."""
    found: list[Candidate] = []

    def add(name: str, title: str, *sets: str, group: str = "", missing: str = "") -> None:
        found.append(Candidate(name, title, sets, group, missing))

    loader, batch, ranks = config.loader, config.batch, config.parallel.ranks
    # Of a rank: those of a machine share its cores.
    cores = max(place.cores // ranks, 1)
    no_gpu = "" if place.gpu else NO_GPU
    which = kind(config.workload)

    # Data.
    add("gather", "whole-batch gather", "loader.fetch=auto", missing="" if loader.fetch == "item" else SET)
    why = "the items are already in memory, unencoded" if config.workload.name in IN_MEMORY else ""
    add("cache", "encoded-item cache", "loader.cache=true", missing=why)
    alone = ("loader.workers=0",) if loader.workers else ()
    add("device", "data on the GPU", *alone, "loader.placement=device", missing=no_gpu)

    # Processes.
    for count in (2**power for power in range(min(cores, MOST_WORKERS).bit_length())):
        title = f"{count} loader {'worker' if count == 1 else 'workers'}"
        add(f"workers-{count}", title, f"loader.workers={count}", group="workers")
    if loader.persistent is False:
        add("persistent", "persistent workers", "loader.persistent=true")
    add("pin-memory", "pinned memory", "loader.pin_memory=true", missing=no_gpu)
    why = "the GPU computes" if place.gpu else ""
    for count in dict.fromkeys((cores, cores // 2, 1)):
        if 0 < count != (config.run.threads or cores):
            title = f"{count} {'thread' if count == 1 else 'threads'}"
            add(f"threads-{count}", title, f"run.threads={count}", group="threads", missing=why)

    # Step.
    if decoder := getattr(config.workload, "decoder", ""):
        title = "one vocabulary projection for all decoder steps"
        add("hoisted", title, "workload.decoder=hoisted", missing="" if decoder == "stepwise" else SET)
    if batch.accumulation == 1:
        why = "the micro-batch is already the effective batch"
        add("micro", "larger micro-batches, same effective batch", missing=why)
    times = 2
    while times <= MOST_MICRO and batch.accumulation % times == 0:
        micro, left = batch.micro * times, batch.accumulation // times
        title = f"micro-batch {micro}, same effective batch of {batch.items}"
        add(f"micro-{micro}", title, f"batch.micro={micro}", f"batch.accumulation={left}", group="micro")
        times *= 2
    why = {"auto": "auto uses it where torch supports it", "fused": SET}.get(
        config.optimizer.implementation, ""
    )
    add("fused", "fused optimizer", "optimizer.implementation=fused", missing=why)
    add("set-to-none", "zero_grad(set_to_none=True)", "optimizer.set_to_none=true")

    # Exchange.
    if ranks > 1 and config.parallel.strategy == "ddp":
        add("buckets", "gradient buckets of 100 MB", "parallel.bucket_mb=100")
        half = "bf16" if place.gpu else "fp16"  # gloo does not compress to bf16
        add("compress", f"gradients exchanged in {half}", f"parallel.compress={half}")
    elif ranks > 1:
        add("gathered", "parameters kept after forward", "parallel.reshard=false")

    # Precision.
    old = place.capability is not None and place.capability < (8, 0)
    why = no_gpu or ("the GPU has no TF32" if old else "")
    add("tf32", "TF32 matmuls", "precision.tf32=true", missing=why)
    amp = config.precision.amp
    off = amp == "off" or (amp == "auto" and not place.gpu)  # auto resolves to off on the CPU
    lowered = "" if off else "mixed precision is already on"
    why = lowered or ("the GPU has no bf16" if old else "")
    if not place.gpu and place.bf16 is False:
        why = "the CPU has no bf16 (neither AMX nor AVX-512)"
    add("bf16", "mixed precision, bf16", "precision.amp=bf16", group="amp", missing=why)
    add("fp16", "mixed precision, fp16", "precision.amp=fp16", group="amp", missing=no_gpu or lowered)

    # Kernels.
    why = "" if which in ATTENTION else "this model does not use scaled_dot_product_attention"
    add("attention", "attention backend chosen by torch", "speed.attention=auto", missing=why)
    why = "" if which in CONVOLUTIONS else "this model has no convolutions"
    add("channels-last", "channels-last memory format", "speed.channels_last=true", missing=why)
    add("cudnn-benchmark", "cuDNN benchmark", "speed.cudnn_benchmark=true", missing=no_gpu or why)

    # Compiler.
    slow = which in UNROLLED and not place.gpu
    why = "compiling its unrolled decoder takes minutes" if slow else ""
    add("compile", "torch.compile", "speed.compile=default", group="compile", missing=why)
    title, sets = "torch.compile, reduce-overhead", "speed.compile=reduce-overhead"
    add("reduce-overhead", title, sets, group="compile", missing=no_gpu)
    scales = amp == "fp16" or (amp == "auto" and old)  # as `make_precision` chooses
    why = no_gpu or why_no_graph(place.gpu, ranks, scales, config.optimizer.name) or ""
    add("cuda-graph", "whole step as one CUDA graph", "speed.cuda_graph=true", missing=why)
    return tuple(found)


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
