"""The speed of a step in the units of the run, and the settings behind it: items, tokens, epochs, FLOP/s and MFU."""

from __future__ import annotations

from typing import Any

from ndd_engine.record.events import RunEvent, WorkEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import MISSING, duration, foreign, number, plural, rate, size

from .blocks import Facts
from .figures import percent

# The status in which a run has no speed and no time left.
PAUSED = "paused"
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def on_gpu(run: RunEvent | None) -> bool:
    """Whether the run trains on a CUDA GPU."""
    return run is not None and run.device.startswith("cuda")


def is_script(run: RunEvent | None) -> bool:
    """Whether the run is that of an observed script."""
    return run is not None and "script" in run.config


def setting(run: RunEvent | None, section: str, key: str) -> Any:
    """A value of the resolved configuration; None if it is missing."""
    table = run.config.get(section) if run is not None and isinstance(run.config, dict) else None
    return table.get(key) if isinstance(table, dict) else None


def fits_text(snapshot: Snapshot, width: int = 100) -> str:
    """ "about batch 288 fits (predicted)", or a shorter form."""
    fits = snapshot.headroom.fits_micro
    if fits is None:
        return ""
    text = f"about batch {number(fits)} fits (predicted)"
    return text if len(text) <= width else f"predicted: batch {number(fits)} fits"


def item_name(snapshot: Snapshot) -> str:
    """The plural of the workload's item."""
    return plural(foreign(snapshot.run.item)) if snapshot.run else "items"


def steps_rate(snapshot: Snapshot) -> str:
    """ "18.3 steps/s"; a step is an optimizer step."""
    return PAUSED if snapshot.status == PAUSED else rate(snapshot.steps_per_s, "steps")


def items_rate(snapshot: Snapshot) -> str:
    """ "4,687 windows/s"."""
    return PAUSED if snapshot.status == PAUSED else rate(snapshot.items_per_s, item_name(snapshot))


def tokens_rate(snapshot: Snapshot) -> str:
    """ "1,199,872 characters/s"; "" if items have no tokens."""
    run = snapshot.run
    if run is None or not run.token or not run.tokens_per_item or snapshot.status == PAUSED:
        return ""
    return rate(snapshot.tokens_per_s, plural(foreign(run.token)))


def rates(snapshot: Snapshot) -> list[str]:
    """All rates that apply to this run, and the time of an epoch."""
    texts = [steps_rate(snapshot), items_rate(snapshot), tokens_rate(snapshot)]
    if snapshot.run is not None and snapshot.run.steps_per_epoch:
        texts.append(f"epoch {duration(snapshot.epoch_s)}")
    return [text for text in texts if text]


def epoch_of(snapshot: Snapshot) -> str:
    """ "epoch 3/25"; without the total if it is unknown, "" for what has no epochs."""
    run = snapshot.run
    if run is None or is_script(run):
        return ""
    if not run.epochs:
        return "" if run.steps_per_epoch else f"epoch {snapshot.epoch + 1}"
    return f"epoch {min(snapshot.epoch + 1, run.epochs)}/{run.epochs}"


def step_time(snapshot: Snapshot) -> str:
    """ "step 54.6 ms (16 micro-steps of 3.41 ms)"; without accumulation only the step."""
    if snapshot.step_ns is None:
        return f"step {MISSING}"
    text = f"step {duration(snapshot.step_ns * 1e-9)}"
    micro = micro_steps(snapshot)
    return f"{text} ({micro})" if micro else text


def micro_steps(snapshot: Snapshot) -> str:
    """ "16 micro-steps of 3.41 ms", "" if a step has only one."""
    count = snapshot.micro_steps
    if count is None or count <= 1 or snapshot.step_ns is None:
        return ""
    return f"{number(count)} micro-steps of {duration(snapshot.step_ns / count * 1e-9)}"


def time_left(snapshot: Snapshot) -> str:
    """ "1 h 12 m left"; "+" if evaluations or checkpoints are not included yet; "" while the run is paused."""
    if snapshot.status == PAUSED:
        return ""
    if snapshot.left.seconds is None:
        return f"time left {MISSING}"
    return f"{duration(snapshot.left.seconds)}{'+' if snapshot.left.without else ''} left"


def time_left_in_words(snapshot: Snapshot) -> str:
    """ "1 h 12 m left", and what is not included: "…, excluding evaluations (not measured yet)"."""
    text = time_left(snapshot)
    if not text:
        return ""
    missing = " and ".join(snapshot.left.without)
    return f"{text}, excluding {missing} (not measured yet)" if missing else text


def flops(value: float | None) -> str:
    """ "1.24 TFLOP/s"."""
    return f"{prefixed(value)}FLOP/s"


def prefixed(value: float | None) -> str:
    """A count with an SI prefix: "4.21 T"."""
    if value is None:
        return f"{MISSING} "
    scale, letter = next(((scale, letter) for scale, letter in _PREFIXES if value >= scale), (1, ""))
    return f"{number(value / scale)} {letter}"


def _percent(share: float | None) -> str:
    """A share of the peak; two significant digits below 10 %, since tiny models stay far below 1 %."""
    return MISSING if share is None else f"{share * 100:.0f} %" if share >= 0.1 else f"{share * 100:.2g} %"


def work_texts(snapshot: Snapshot) -> list[str]:
    """FLOP/s, MFU of which peak, or why it is unknown, and the side of the roofline; [] before FLOPs are counted."""
    if snapshot.work is None or snapshot.work.flops_per_step is None or snapshot.status == PAUSED:
        return []
    throughput = snapshot.throughput
    mfu = f"MFU {MISSING}: {foreign(throughput.reason)}"
    if throughput.peak_flops_per_s is not None:
        peak = f"{flops(throughput.peak_flops_per_s)} ({foreign(throughput.peak_kind)} dense)"
        mfu = f"MFU {_percent(throughput.mfu)} of {peak}"
    intensity = f"intensity {MISSING}"
    if throughput.intensity is not None:
        side = f": {throughput.side}-bound side" if throughput.side else ""
        intensity = f"intensity {number(throughput.intensity)} FLOP/B{side}"
    return [flops(throughput.flops_per_s), mfu, intensity]


def work_short(snapshot: Snapshot) -> str:
    """ "1.24 TFLOP/s, MFU 34 %"; without a peak only FLOP/s, "" before FLOPs are counted."""
    throughput = snapshot.throughput
    if throughput.flops_per_s is None or snapshot.status == PAUSED:
        return ""
    return flops(throughput.flops_per_s) + (
        f", MFU {_percent(throughput.mfu)}" if throughput.mfu is not None else ""
    )


def work_facts(snapshot: Snapshot, work: WorkEvent) -> Facts:
    """The counts behind FLOP/s and MFU, and how they were made."""
    counted = work.flops_per_step
    forward = ""
    if counted and work.flops_forward is not None:
        forward = f", {percent(work.flops_forward / counted)} in the forward pass"
    total = sum(work.dtypes.values())
    types = ", ".join(
        f"{name} {percent(value / total)}" if total else name
        for name, value in sorted(work.dtypes.items(), key=lambda item: -item[1])
    )
    peak = f"{MISSING}: {work.reason}" if work.reason else MISSING
    if work.peak_tflops is not None:
        memory = f", memory {number(work.bandwidth_gb_s)} GB/s" if work.bandwidth_gb_s else ""
        source = f"; {work.peak_source}" if work.peak_source else ""
        peak = f"{number(work.peak_tflops)} TFLOP/s ({work.peak_kind} dense){memory}{source}"
    return Facts.of(
        ("operations", f"{prefixed(counted)}FLOP{forward}"),
        ("bytes", f"{size(work.bytes_per_step)} read and written without fusion (upper bound)"),
        ("now", ", ".join(work_texts(snapshot)) or MISSING),
        ("matmul types", types or MISSING),
        ("attention", ", ".join(work.attention) or "none detected"),
        ("not counted", ", ".join(work.uncounted)),
        ("peak", peak),
        ("method", work.method),
        title="Work per step",
    )
