"""The original settings of each guide, and the engine's alternatives, step by step.

`before` is the training that a guide starts with, scaled to a fraction of a second per step on a CPU; settings that a
guide leaves at their defaults are PyTorch's defaults (the optimizer's implementation). Each of `steps` is tried on top
of the previous ones that made training faster; a value of None removes a setting.

Dropout is 0 on both sides so that losses are comparable: compiled code and other number formats draw other masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ndd_engine.hardware.detect import detect

Settings = Mapping[str, str | None]

# Effect of a step on the numbers. With the first two, losses should agree.
SAME = "same numbers"
ROUNDING = "different rounding"
PRECISION = "lower precision"
OTHER_BATCH = "different batch, different training"

HALF = "bf16"


@dataclass(frozen=True)
class Step:
    """One change. gpu: requires a CUDA GPU. apart: not among the steps that --quick tries at once."""

    name: str
    sets: Settings
    numbers: str
    gpu: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Guide:
    """claims: (claim, claimed ratio). loads: whether to measure its data loading alone as well.

    needs_gpu: the guide's settings that require a CUDA GPU.
    """

    workload: str
    scaled: tuple[str, ...]
    before: Settings
    steps: tuple[Step, ...]
    claims: tuple[tuple[str, float], ...]
    needs_gpu: str = ""
    loads: bool = False


_NO_WORKERS: Settings = {
    "loader.workers": "0", "loader.persistent": None, "loader.prefetch": None, "loader.pin_memory": None,
}  # fmt: skip
_CACHE = Step("encoded-item cache", {**_NO_WORKERS, "loader.cache": "true"}, SAME)
_GATHER = Step("whole-batch gather", {**_NO_WORKERS, "loader.fetch": "batch"}, SAME)
_ON_DEVICE = Step("data on the device", {**_NO_WORKERS, "loader.placement": "device"}, SAME)
_ON_GPU = replace(_ON_DEVICE, gpu=True)  # on the CPU it is the same as the previous step
_FUSED = Step("fused optimizer", {"optimizer.implementation": "fused"}, ROUNDING)
_BF16 = Step("bf16", {"precision.amp": HALF}, PRECISION)
_COMPILE = Step("compile", {"speed.compile": "default"}, ROUNDING, apart=True)
_GRAPH = Step("CUDA graph", {"speed.cuda_graph": "true", "speed.compile": None}, SAME, gpu=True)
_BENCHMARK = Step("cudnn_benchmark", {"speed.cudnn_benchmark": "true"}, ROUNDING, gpu=True)
_TF32 = Step("TF32", {"precision.tf32": "true"}, PRECISION, gpu=True)


def _workers(prefetch: int, cores: int, most: int, gpu: bool) -> Step:
    count = str(max(min(cores, most), 1))
    sets: Settings = {"loader.workers": count, "loader.persistent": "true", "loader.prefetch": str(prefetch),
                      "loader.pin_memory": "true" if gpu else None}  # fmt: skip
    return Step(f"{count} workers (the guide's fix)", sets, SAME)


def guides(device: str) -> tuple[Guide, ...]:
    """The guides for this machine. device: as in run.device."""
    cores = int(detect(use_torch=False).host.usable_cpus)
    gpu = device.startswith("cuda")
    plain: Settings = {
        "loader.workers": "0",
        "loader.fetch": "item",
        "precision.amp": "off",
        "precision.tf32": "false",
        # The default of torch.optim.
        "optimizer.implementation": "foreach" if gpu else "loop",
    }
    return (
        Guide(
            "eeg",
            ("workload.dropout=0.0",),
            plain,
            (_workers(3, cores, 8, gpu), _GATHER, _ON_DEVICE, _FUSED, _TF32, _BF16, _GRAPH, _COMPILE),
            (('"79 % faster", 1.79x', 1.79),),
            "pinned memory",
            loads=True,
        ),
        Guide(
            "antispoof",
            ("workload.size=guide", "batch.micro=4", "workload.clips=40", "workload.dropout=0.0"),
            plain,
            (_workers(2, cores, 4, gpu), _CACHE, Step("channels last", {"speed.channels_last": "true"}, ROUNDING),
             _FUSED, _TF32, _BENCHMARK, _BF16, _COMPILE),
            (("5-10x", 5.0),),
            "cudnn_benchmark, fp16 on tensor cores, pinned memory",
        ),
        Guide(
            "chartext",
            ("workload.size=guide", "workload.layers=2", "workload.dropout=0.0"),
            {**plain, "speed.attention": "math", "batch.micro": "8"},
            (_GATHER, _ON_GPU, _FUSED, Step("scaled-dot-product attention chosen by torch",
                                             {"speed.attention": "auto"}, ROUNDING),
             _TF32, _BF16,
             Step("half the batch (256 to 128 in the guide)", {"batch.micro": "4"}, OTHER_BATCH, apart=True),
             _COMPILE),
            (("5.3x", 5.3),),
            "TF32, pinned memory, and the memory pressure that motivates halving the batch",
        ),
        Guide(
            "finetune",
            ("workload.size=small", "workload.dropout=0.0"),
            {**plain, "batch.micro": "1"},
            (_workers(2, cores, 4, gpu), _CACHE, _ON_GPU, _FUSED, _TF32, _BF16, _GRAPH,
             Step("compile, dynamic lengths", {"speed.compile": "default", "speed.compile_dynamic": "true"},
                  ROUNDING, apart=True)),
            (("4-5x, 4 workers", 4.0), ("8-11x, with bf16 and compile", 8.3)),
            "pinned memory; bf16 and compile on the GPU",
            loads=True,
        ),
        Guide(
            "summarise",
            ("workload.size=tiny", "workload.dropout=0.0", "batch.effective=8"),
            {**plain, "workload.decoder": "stepwise", "batch.micro": "1"},
            (Step("one vocabulary projection (decoder hoisted)", {"workload.decoder": "hoisted"}, ROUNDING),
             Step("micro-batch 4, same effective batch", {"batch.micro": "4"}, ROUNDING),
             _CACHE, _FUSED, _TF32, _BF16, replace(_COMPILE, gpu=True)),
            (("2.8-3.2x, conservative plan", 2.8), ("4-4.5x, aggressive plan", 4.0)),
            "launch overhead of small kernels; the plans' shorter texts and smaller models change what is trained",
        ),
    )  # fmt: skip


def merged(*layers: Settings) -> dict[str, str]:
    """All layers merged; later ones win, None removes a setting."""
    found: dict[str, str | None] = {}
    for layer in layers:
        found |= layer
    return {key: value for key, value in found.items() if value is not None}


def as_sets(settings: Mapping[str, str]) -> list[str]:
    """As arguments of `--set`."""
    return [f"{key}={value}" for key, value in settings.items()]
