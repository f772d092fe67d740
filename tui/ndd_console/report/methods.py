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
    work, isolated = snapshot.work, snapshot.baseline is not None or snapshot.loader is not None
    idle = snapshot.idle
    method = f" ({work.method})" if work and work.method else ""
    # (whether the report has it, label, text)
    rows: list[tuple[object, str, str]] = [
        (True, "phases", "host clock at phase boundaries; `other` is the rest, so phases add up to the wall time"),
        (cuda, "GPU time", "pairs of CUDA events, read some steps later so that measuring never synchronises"),
        (idle.share is not None, "idle time", METHODS.get(idle.method, idle.method)),
        *((True, f"capture at step {item.step or at.step:,}", METHODS.get(item.method, item.method))
          for at, item in list(data.captures)[-1:]),
        (True, "p50, p95, max", "steps of one window of the record, host clock"),
        (True, "throughput", "items over wall time, excluding evaluation, checkpoints, pauses and profiler captures"),
        (True, "loss", "mean of the losses that were read back; reading every loss would slow down training"),
        (data.marked("evaluation"), "evaluations", "on the evaluation data; durations by host clock"),
        (cuda, "memory", "torch's allocator for allocated, reserved and peak; the driver for free and others"),
        (not cuda, "memory", "RSS of the process and of its loader workers; shared pages count in each"),
        (work, "FLOP and bytes", f"counted once{method}, over the measured step time"),
        (work and work.peak_tflops, "share of peak", "of the published dense peak, which was not measured on this GPU"),
        (data.gc_watched, "garbage collection", "callbacks of the Python interpreter; included in the phases"),
        (data.stacks, "stack samples", "stack of the training thread, sampled a few times per second"),
        (isolated, "isolated times", "measured once before training in this process, the fastest of a few"),
        (data.trials, "measured gains", "ABBA blocks in separate processes; CI of the mean log-ratio of the pairs"),
        (True, "potential gain", "upper bound: the speedup without this cause if no other bottleneck took its place"),
        (snapshot.headroom.fits_micro, "PREDICTED", "only the batch that fits: memory grows in proportion to it"),
    ]  # fmt: skip
    text = "All figures were measured in this run unless marked as predicted. n/a means not measured."
    return [Text(text), Facts.of(*((label, text) for present, label, text in rows if present))]
