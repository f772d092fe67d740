"""Number formats and cuDNN algorithms. The rules apply to runs on a GPU only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ndd_engine.text import percent, times

from .finding import Finding
from .gpu import CAPTURE
from .view import CONFIG, FLOOR, SLOWED, Cost, Draft, View

# Assumed maximum speedup of convolutions by cudnn_benchmark.
CHOICE = 2.0


def tf32(view: View) -> Finding | None:
    """fp32 matrix products on a GPU that supports TF32."""
    if view.precision != "fp32" or view.get("precision.tf32") is not False:
        return None
    return _format(view, "tf32", "tf32", "enable TF32 matrix products", "precision.tf32=true")


def amp(view: View) -> Finding | None:
    """fp32 or TF32 on a GPU with a faster format."""
    if view.precision not in ("fp32", "tf32") or view.get("precision.amp") != "off":
        return None
    kind = "bf16" if "bf16" in _peaks(view) else "fp16"
    return _format(view, "amp", kind, f"use mixed precision ({kind})", f"precision.amp={kind}")


def cudnn_benchmark(view: View) -> Finding | None:
    """Convolutions of fixed shapes without cuDNN benchmarking."""
    if view.get("speed.cudnn_benchmark") is not False or view.get("speed.deterministic"):
        return None
    if view.get("workload.pad") == "longest":
        return None  # shapes vary: each new one would be benchmarked
    spent = _convolutions(view)
    if spent * (1 - 1 / CHOICE) < FLOOR:
        return None
    title = f"convolutions take {percent(spent)} of the time, and their cuDNN algorithms are not benchmarked"
    draft = Draft("cudnn-benchmark", title, view.part(spent), "possible")
    draft.saw(f"convolutions take {percent(spent)} of a profiler capture", CAPTURE)
    draft.change("benchmark cuDNN algorithms: the shapes are fixed", "speed.cudnn_benchmark=true")
    return draft.done()


def cudnn_shapes(view: View) -> Finding | None:
    """Convolutions that cuDNN benchmarks again for every new shape."""
    slowed = view.slowed
    if view.get("speed.cudnn_benchmark") is not True or slowed is None:
        return None
    if slowed < SLOWED or not _convolutions(view):
        return None
    title = f"varying shapes: forward and backward take {slowed:.2g} times as long as with a fixed shape"
    draft = Draft("cudnn-shapes", title, view.part(view.model.share * (1 - 1 / slowed)), "possible")
    draft.saw(
        f"forward and backward take {slowed:.2g} times as long as one micro-batch repeated before training",
        "device and host clock",
    )
    draft.saw("a profiler capture contains convolutions", CAPTURE)
    draft.saw("speed.cudnn_benchmark is true", CONFIG)
    draft.change(
        "disable cuDNN benchmarking: it runs again for every new shape", "speed.cudnn_benchmark=false"
    )
    draft.change("pad all batches to one shape or to a few fixed lengths")
    return draft.done()


FORMAT_RULES = (tf32, amp, cudnn_benchmark, cudnn_shapes)


def _convolutions(view: View) -> float:
    """Fraction of a profiler capture spent in convolutions; 0 without a capture of kernels."""
    if (capture := view.kernels) is None:
        return 0.0
    return capture.convolution_ns / capture.wall_ns


def _peaks(view: View) -> Mapping[str, float]:
    """Published dense peaks of the GPU in TFLOP/s by format; {} if unknown."""
    run = view.snapshot.run
    profile: Any = (run.gpu or {}).get("profile") if run is not None else None
    found = profile.get("dense_tflops") if isinstance(profile, dict) else None
    return found if isinstance(found, dict) else {}


def _format(view: View, cause: str, kind: str, what: str, edit: str) -> Finding | None:
    """Finding for a faster number format: the model's share, bounded by the published peaks."""
    peaks, model, mfu = _peaks(view), view.model, view.snapshot.throughput.mfu
    now, then = peaks.get(view.precision), peaks.get(kind)
    if not now or not then or then <= now or view.snapshot.work is None or mfu is None or not model.clear:
        return None
    if mfu < 0.05:
        return None  # not bound by arithmetic
    # Memory-bound operators gain as well: they move half as many bytes.
    share = model.share * (1 - now / then)
    title = f"the model takes {percent(model.share)} of each step, in {view.precision}"
    draft = Draft(cause, title, Cost(share * view.step_ns, share, model.error, share))
    gain = f"{then:g} TFLOP/s in {kind} ({times(then / now)})"
    draft.saw(f"peak {now:g} TFLOP/s now, {gain}", "published peaks")
    draft.saw(f"the run reaches {percent(mfu)} of the current peak (MFU)", "counted operations")
    draft.change(what, edit)
    return draft.done()
