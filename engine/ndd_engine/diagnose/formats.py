"""What the card computes with: number formats, and cuDNN's choice of algorithms. All rules abstain without a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .finding import Change, Evidence, Finding
from .gpu import CAPTURE
from .view import CONFIG, FLOOR, SLOWED, Cost, View, ceiling, finding, percent, times

# Of the FLOPs, the part that convolutions must have is not known: what cuDNN's choice may gain is bounded by this.
CHOICE = 2.0


def tf32(view: View) -> Finding | None:
    """fp32 matrix products on a card that has TF32."""
    run = view.snapshot.run
    if not view.card or run is None or run.precision != "fp32" or view.get("precision.tf32") is not False:
        return None
    return _format(view, "tf32", "tf32", "TF32 matrix products", ("precision.tf32=true",))


def amp(view: View) -> Finding | None:
    """fp32 or TF32 where the card has a faster format."""
    run = view.snapshot.run
    if (
        not view.card
        or run is None
        or run.precision not in ("fp32", "tf32")
        or view.get("precision.amp") != "off"
    ):
        return None
    kind = "bf16" if "bf16" in _peaks(view) else "fp16"
    return _format(view, "amp", kind, f"mixed precision in {kind}", (f"precision.amp={kind}",))


def cudnn_benchmark(view: View) -> Finding | None:
    """Convolutions of fixed shapes with cuDNN's guess of the best algorithm."""
    if not view.card or view.snapshot.run is None or view.get("speed.cudnn_benchmark") is not False:
        return None
    if view.get("speed.deterministic"):
        return None
    if view.get("workload.pad") == "longest":
        return None  # shapes vary: each new one would be measured
    spent = _convolutions(view)
    share = spent * (1 - 1 / CHOICE)
    if share < FLOOR:
        return None
    return finding(
        "cudnn-benchmark",
        f"convolutions take {percent(spent)} of the time with algorithms that nobody timed",
        Cost(share * view.step_ns, share, None, share),
        [Evidence(f"convolutions run {percent(spent)} of a burst", CAPTURE)],
        [Change("let cuDNN time its algorithms: the shapes are fixed", ("speed.cudnn_benchmark=true",))],
        "possible",
        bound=ceiling(min(spent, 0.9)),
    )


def cudnn_shapes(view: View) -> Finding | None:
    """Convolutions whose algorithms are timed again for each new shape."""
    slowed = view.slowed
    if not view.card or view.get("speed.cudnn_benchmark") is not True or slowed is None:
        return None
    if slowed < SLOWED or not _convolutions(view):
        return None
    share = 1 - 1 / slowed
    return finding(
        "cudnn-shapes",
        f"forward and backward take {slowed:.2g} times as long as with one shape",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(
                f"forward and backward take {slowed:.2g} times as long as one micro-batch, repeated before training",
                "device and host clock",
            ),
            Evidence("convolutions run in a burst", CAPTURE),
            Evidence("speed.cudnn_benchmark is true", CONFIG),
        ],
        [
            Change(
                "do not time algorithms: it is done again for each shape", ("speed.cudnn_benchmark=false",)
            ),
            Change("give all batches one shape, or a few lengths to choose from"),
        ],
        "possible",
        bound=view.undisturbed(),
    )


RULES = (tf32, amp, cudnn_benchmark, cudnn_shapes)


def _convolutions(view: View) -> float:
    """The part of a burst in which convolutions ran; 0 without a burst that saw kernels."""
    capture = view.snapshot.kernels
    if capture is None or not capture.wall_ns or capture.method != "kernels":
        return 0.0
    words = ("conv", "cudnn", "wgrad", "dgrad")
    spent = sum(int(item[1]) for item in capture.top if any(word in str(item[0]).lower() for word in words))
    return spent / capture.wall_ns


def _peaks(view: View) -> Mapping[str, float]:
    """Published dense peaks of the card by format; {} where they are not known."""
    run = view.snapshot.run
    profile: Any = (run.card or {}).get("profile") if run is not None else None
    found = profile.get("dense_tflops") if isinstance(profile, dict) else None
    return found if isinstance(found, dict) else {}


def _format(view: View, cause: str, kind: str, what: str, sets: tuple[str, ...]) -> Finding | None:
    """A faster number format: bounded by the published peaks, on what the model takes."""
    run, work = view.snapshot.run, view.snapshot.work
    peaks = _peaks(view)
    now, then = peaks.get(run.precision if run is not None else ""), peaks.get(kind)
    mfu = view.snapshot.throughput.mfu
    if not now or not then or then <= now or work is None or mfu is None or not view.model.clear:
        return None
    # At its peak the arithmetic alone would take this share; the rest of the model's time is not arithmetic's, but
    # half as many bytes move as well.
    share = view.model.share * (1 - now / then)
    if mfu < 0.05:
        return None  # the arithmetic is not what takes the time
    return finding(
        cause,
        f"the model takes {percent(view.model.share)} of each step in {run.precision if run is not None else 'fp32'}",
        Cost(share * view.step_ns, share, view.model.error, share),
        [
            Evidence(
                f"{now:g} TFLOP/s at most now, {then:g} in {kind} ({times(then / now)})", "published peaks"
            ),
            Evidence(f"{percent(mfu)} of the present peak is reached", "counted operations"),
        ],
        [Change(what, sets)],
    )
