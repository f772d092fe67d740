"""How each figure of the report was measured."""

from __future__ import annotations

from ndd_console.view.blocks import on_gpu

from .blocks import Block, Facts, Text
from .model import Report
from .timings import METHODS


def methods(report: Report) -> list[Block]:
    """One row for each kind of figure in this report."""
    data, snapshot = report.data, report.snapshot
    cuda = on_gpu(data.run or snapshot.run)
    work = snapshot.work
    capture = data.captures[-1] if data.captures else None
    # (whether the report has it, label, text)
    rows = (
        (
            True,
            "phases",
            "monotonic host clock, read at phase boundaries; `other` is the remaining wall time, so phases add up to "
            "the wall time",
        ),
        (
            cuda,
            "GPU time",
            "pairs of CUDA events, read some steps later so that measuring never synchronises",
        ),
        (
            snapshot.idle.share is not None,
            "idle time",
            METHODS.get(snapshot.idle.method, snapshot.idle.method),
        ),
        (
            capture is not None,
            f"capture at step {capture[1].step or capture[0].step:,}" if capture else "",
            METHODS.get(capture[1].method, capture[1].method) if capture else "",
        ),
        (True, "p50, p95, max", "steps of one window of the record, host clock"),
        (
            True,
            "throughput",
            "items over wall time, excluding evaluation, checkpoints, pauses and profiler captures",
        ),
        (True, "loss", "mean of the losses that were read back; reading every loss would slow down training"),
        (bool(data.marked("evaluation")), "evaluations", "on the evaluation data; durations by host clock"),
        (
            cuda,
            "memory",
            "torch's allocator for allocated, reserved and peak; the driver for free and others",
        ),
        (not cuda, "memory", "RSS of the process and of its loader workers; shared pages count in each"),
        (
            work is not None,
            "FLOP and bytes",
            f"counted once before training{f' ({work.method})' if work and work.method else ''}, over the measured "
            "step time",
        ),
        (
            bool(work and work.peak_tflops is not None),
            "share of peak",
            "of the published dense peak, which was not measured on this GPU",
        ),
        (
            data.gc_watched,
            "garbage collection",
            "callbacks of the Python interpreter; included in the phases",
        ),
        (
            data.stacks is not None,
            "stack samples",
            "stack of the training thread, sampled a few times per second",
        ),
        (
            snapshot.baseline is not None or snapshot.loader is not None,
            "isolated times",
            "measured once before training in this process, the fastest of a few",
        ),
        (
            bool(data.trials),
            "measured gains",
            "ABBA blocks in separate processes; confidence interval of the mean log-ratio of the pairs",
        ),
        (
            True,
            "potential gain",
            "upper bound: the speedup if this cause disappeared and no other bottleneck took its place",
        ),
        (
            snapshot.headroom.fits_micro is not None,
            "PREDICTED",
            "only the batch that fits, assuming that memory grows in proportion to the micro-batch",
        ),
    )
    text = "All figures were measured in this run unless marked as predicted. n/a means not measured."
    return [Text(text), Facts(tuple((label, text) for present, label, text in rows if present))]
