"""GPUs that are not in this machine: by the name of a profile, or by their figures."""

from __future__ import annotations

import math
import re

from ndd_engine.errors import UsageError

from .gpus import GpuProfile, load

# Share of a GPU's nominal memory that programs can use: a T4 reports 14.6 of 16 GB.
USABLE = 0.91
GIB = 1 << 30
# A GPU without a profile: GB, 10^9 bytes a second, multiprocessors, MB of L2 cache, dense peaks in TFLOP/s.
GIVEN = '"memory=24, bandwidth=936, sms=82, l2=6, fp32=35.6, tf32=35.6, fp16=71.2, bf16=71.2"'
_NEEDED, _PEAKS = ("memory", "bandwidth", "sms", "l2", "fp32"), ("fp32", "tf32", "fp16", "bf16")


def usable_bytes(gpu: GpuProfile) -> int:
    """Bytes that programs can use on a GPU, by its profile."""
    return int(gpu.memory_gb * USABLE * GIB)


# Words that make another GPU of a name.
_MODELS = frozenset({"laptop", "ti", "super", "max"})


def gpu_named(name: str) -> GpuProfile:
    """The profile of a GPU by its name, its file name, a unique part of either, or its NVML name; or as in GIVEN.

    Raises UsageError with the known names, or with what is missing.
    """
    if "=" in name:
        return _given(name)
    if not name.strip():
        names = ", ".join(gpu.name for gpu in load())
        raise UsageError(f"--gpu: the name is empty; allowed: {names}, or figures such as {GIVEN}")
    wanted = _plain(name)
    known = [(gpu, (_plain(gpu.name), _plain(gpu.slug))) for gpu in load()]
    exact = [gpu for gpu, names in known if wanted in names or gpu.is_named(name, re.IGNORECASE)]
    found = exact or [gpu for gpu, names in known if wanted and any(wanted in own for own in names)]
    if len(found) == 1 and (exact or not _other_model(name, found[0])):
        return found[0]
    what = "the name is ambiguous" if len(found) > 1 else "there is no profile of this GPU"
    raise UsageError(f"--gpu {name!r}: {what}; allowed: {', '.join(gpu.name for gpu in found or load())}")


def _other_model(name: str, gpu: GpuProfile) -> bool:
    """Whether the profile is of another model than the name: of a laptop's, or of a faster one."""
    return bool(
        _MODELS & {*gpu.name.lower().replace("-", " ").split()} - {*name.lower().replace("-", " ").split()}
    )


def _plain(name: str) -> str:
    return "".join(
        letter for letter in name.lower().replace("nvidia", "").replace("geforce", "") if letter.isalnum()
    )


def _given(text: str) -> GpuProfile:
    """A GPU from figures as in GIVEN. Raises UsageError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        try:
            found[key] = float(value)
        except ValueError:
            raise UsageError(
                f"--gpu: {key}={value}: not a number; allowed: figures such as {GIVEN}"
            ) from None
        if key not in (*_NEEDED, *_PEAKS):
            raise UsageError(
                f"--gpu: {key}: unknown figure; allowed: {', '.join(dict.fromkeys((*_NEEDED, *_PEAKS)))}"
            )
        if not 0 < found[key] < math.inf:
            raise UsageError(f"--gpu: {key}={value}: allowed: more than 0")
    missing = [key for key in _NEEDED if key not in found]
    if missing:
        raise UsageError(f"--gpu: {', '.join(missing)} missing; needed: figures such as {GIVEN}")
    return GpuProfile(
        slug=text,
        name=f"a GPU of {found['memory']:g} GB",
        memory_gb=found["memory"],
        bandwidth_gb_s=found["bandwidth"],
        dense_tflops={kind: found[kind] for kind in _PEAKS if kind in found},
        compute_capability=(8, 0) if "bf16" in found else (7, 0),
        source="the given figures",
        match=(),
        sms=round(max(found["sms"], 1)),
        l2_mb=found["l2"],
    )
