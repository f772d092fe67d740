"""The settings before each guide, and what the engine offers instead, one step after the other.

`before` is the training that a guide begins with, scaled so that a processor makes a step in a fraction of a second;
what a guide leaves to PyTorch is as PyTorch has it (the optimizer's implementation). A step of `steps` is tried on top
of those before it that made training faster, and a value of None takes a setting away again.

Dropout is 0 on both sides, so that their losses can be compared: a compiler and other number formats draw other masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ndd_engine.hardware.detect import detect

Settings = Mapping[str, str | None]

# What a step does to the numbers. The first two say that losses should agree.
SAME = "same numbers"
ROUNDING = "other order of rounding"
PRECISION = "lower precision"
OTHER_BATCH = "another batch: another training"

HALF = "bf16"


@dataclass(frozen=True)
class Step:
    """One change. card: needs a CUDA card. apart: not part of what --quick tries at once."""

    name: str
    sets: Settings
    numbers: str
    card: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Guide:
    """claims: (what the guide says, ratio that it comes to). loads: its data work alone is measured too.

    needs_card: what the guide sets that has no meaning without a CUDA card.
    """

    workload: str
    scaled: tuple[str, ...]
    before: Settings
    steps: tuple[Step, ...]
    claims: tuple[tuple[str, float], ...]
    needs_card: str = ""
    loads: bool = False


_NO_WORKERS: Settings = {
    "loader.workers": "0", "loader.persistent": None, "loader.prefetch": None, "loader.pin_memory": None,
}  # fmt: skip
_CACHE = Step("each item encoded once", {**_NO_WORKERS, "loader.cache": "true"}, SAME)
_GATHER = Step("batches in one gather", {**_NO_WORKERS, "loader.fetch": "batch"}, SAME)
_ON_DEVICE = Step("data on the device", {**_NO_WORKERS, "loader.placement": "device"}, SAME)
_ON_CARD = replace(_ON_DEVICE, card=True)  # without a card it is the step before it
_FUSED = Step("fused optimizer", {"optimizer.implementation": "fused"}, ROUNDING)
_BF16 = Step("bf16", {"precision.amp": HALF}, PRECISION)
_COMPILE = Step("compile", {"speed.compile": "default"}, ROUNDING, apart=True)
_GRAPH = Step("CUDA graph", {"speed.cuda_graph": "true", "speed.compile": None}, SAME, card=True)
_BENCHMARK = Step("cudnn_benchmark", {"speed.cudnn_benchmark": "true"}, ROUNDING, card=True)
_TF32 = Step("TF32", {"precision.tf32": "true"}, PRECISION, card=True)


def _workers(prefetch: int, cores: int, most: int, card: bool) -> Step:
    count = str(max(min(cores, most), 1))
    sets: Settings = {"loader.workers": count, "loader.persistent": "true", "loader.prefetch": str(prefetch),
                      "loader.pin_memory": "true" if card else None}  # fmt: skip
    return Step(f"{count} workers (the guide's fix)", sets, SAME)


def guides(device: str) -> tuple[Guide, ...]:
    """For this machine. device: as run.device."""
    cores = int(detect(use_torch=False).host.usable_cpus)
    card = device.startswith("cuda")
    plain: Settings = {
        "loader.workers": "0",
        "loader.fetch": "item",
        "precision.amp": "off",
        "precision.tf32": "false",
        # What torch.optim takes when nobody says anything.
        "optimizer.implementation": "foreach" if card else "loop",
    }
    return (
        Guide(
            "antispoof",
            ("workload.size=guide", "batch.micro=4", "workload.clips=40", "workload.dropout=0.0"),
            plain,
            (_workers(2, cores, 4, card), _CACHE, Step("channels last", {"speed.channels_last": "true"}, ROUNDING),
             _FUSED, _TF32, _BENCHMARK, _BF16, _COMPILE),
            (("5-10x", 5.0),),
            "cudnn_benchmark, fp16 on tensor cores, pinned memory",
        ),
        Guide(
            "chartext",
            ("workload.size=guide", "workload.layers=2", "workload.dropout=0.0"),
            {**plain, "speed.attention": "math", "batch.micro": "8"},
            (_GATHER, _ON_CARD, _FUSED, Step("scaled-dot-product attention as torch chooses",
                                             {"speed.attention": "auto"}, ROUNDING),
             _TF32, _BF16,
             Step("half the batch (256 to 128 in the guide)", {"batch.micro": "4"}, OTHER_BATCH, apart=True),
             _COMPILE),
            (("5.3x", 5.3),),
            "TF32, pinned memory, and the memory pressure that halving the batch was for",
        ),
        Guide(
            "finetune",
            ("workload.size=small", "workload.dropout=0.0"),
            {**plain, "batch.micro": "1"},
            (_workers(2, cores, 4, card), _CACHE, _ON_CARD, _FUSED, _TF32, _BF16, _GRAPH,
             Step("compile, for any length", {"speed.compile": "default", "speed.compile_dynamic": "true"},
                  ROUNDING, apart=True)),
            (("4-5x, 4 workers", 4.0), ("8-11x, with bf16 and compile", 8.3)),
            "pinned memory; bf16 and compile as the card has them",
            loads=True,
        ),
        Guide(
            "ndd",
            ("workload.dropout=0.0",),
            plain,
            (_workers(3, cores, 8, card), _GATHER, _ON_DEVICE, _FUSED, _TF32, _BF16, _GRAPH, _COMPILE),
            (('"79 % faster", 1.79x', 1.79),),
            "pinned memory",
            loads=True,
        ),
        Guide(
            "summarise",
            ("workload.size=tiny", "workload.dropout=0.0", "batch.effective=8"),
            {**plain, "workload.decoder": "stepwise", "batch.micro": "1"},
            (Step("vocabulary projected once (decoder hoisted)", {"workload.decoder": "hoisted"}, ROUNDING),
             Step("micro-batch 4, the same items a step", {"batch.micro": "4"}, ROUNDING),
             _CACHE, _FUSED, _TF32, _BF16, replace(_COMPILE, card=True)),
            (("2.8-3.2x, conservative plan", 2.8), ("4-4.5x, aggressive plan", 4.0)),
            "launch overhead of small kernels; the plans' shorter texts and smaller model are other trainings",
        ),
    )  # fmt: skip


def merged(*layers: Settings) -> dict[str, str]:
    """All of them as one; a later one wins, None takes away."""
    found: dict[str, str | None] = {}
    for layer in layers:
        found |= layer
    return {key: value for key, value in found.items() if value is not None}


def as_sets(settings: Mapping[str, str]) -> list[str]:
    """As `--set` takes them."""
    return [f"{key}={value}" for key, value in settings.items()]
