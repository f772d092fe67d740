"""How each figure of the report was measured, and which are predicted."""

from __future__ import annotations

from ndd_console.view.blocks import on_gpu

from .blocks import Block, Facts, Text
from .model import Report
from .timings import METHODS


def methods(report: Report) -> list[Block]:
    """One line for each kind of figure that this report has."""
    data, snapshot = report.data, report.snapshot
    cuda = on_gpu(data.run or snapshot.run)
    rows = [
        (
            "phases",
            "the host's monotonic clock at the borders of phases; `other` is wall time minus the rest, so they add up "
            "to all of it",
        )
    ]
    if cuda:
        rows.append(
            (
                "on the card",
                "pairs of CUDA events, read steps later; nothing waits for the card in order to measure",
            )
        )
    if snapshot.idle.share is not None:
        rows.append(("idle", METHODS.get(snapshot.idle.method, snapshot.idle.method)))
    for at, capture in list(data.captures)[-1:]:
        rows.append(
            (f"the burst at step {capture.step or at.step:,}", METHODS.get(capture.method, capture.method))
        )
    rows += [
        ("p50, p95, longest", "of the steps in one stretch of the record, by the host's clock"),
        ("throughput", "items over wall time, without evaluation, checkpoints, pauses and profiler bursts"),
        ("loss", "means of the losses that were read back; reading every one would slow the steps down"),
    ]
    if data.evaluations:
        rows.append(("evaluations", "on the evaluation data; their time by the host's clock"))
    if cuda:
        rows.append(
            ("memory", "torch's allocator for allocated, reserved and peak; the driver for free and others")
        )
    else:
        rows.append(
            ("memory", "resident pages of the process and its loader workers; shared pages count in each")
        )
    work = snapshot.work
    if work is not None:
        counted = f"counted once: {work.method}" if work.method else "counted once, before training"
        rows.append(("FLOP and bytes", f"{counted}; over the measured time of a step"))
        if work.peak_tflops is not None:
            rows.append(("share of the peak", "of the published dense peak; not a measurement of this card"))
    if data.gc_watched:
        rows.append(("garbage collection", "the interpreter's own callbacks; it lies inside the phases"))
    if data.stacks is not None:
        rows.append(("where in the code", "looks at the training thread's stack, a few a second"))
    if snapshot.baseline is not None or snapshot.loader is not None:
        rows.append(("by itself", "measured once before training, in this process, the fastest of a few"))
    if data.trials:
        rows.append(
            ("trials", "paired blocks in processes of their own; interval of the mean log-ratio of the pairs")
        )
    rows.append(
        (
            "at most",
            "a ceiling: the speed if that cause were gone and nothing else took its place; not a promise",
        )
    )
    if snapshot.headroom.fits_micro is not None:
        rows.append(
            (
                "PREDICTED",
                "only the batch that fits: the step's growth taken as proportional to the micro-batch",
            )
        )
    text = "Everything here was measured in this run, except where it says predicted. What was not measured is n/a."
    return [Text(text), Facts(tuple(rows))]
