"""What the screen shows that no single event says: phase shares, idle time, headroom, share of the peak."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

from .events import (
    PHASES,
    Json,
    KernelsEvent,
    MemoryEvent,
    RunEvent,
    SampleEvent,
    SettingEvent,
    WindowEvent,
    WorkEvent,
)
from .snapshot import CoreUse, Headroom, Idle, PhaseShare, Snapshot, Throughput

# Phases in which the host computes nothing for the model. Their cause, as the screen says it.
HOST_IDLE = {
    "data_wait": "waiting for data",
    "to_device": "copying",
    "log": "reading losses",
    "checkpoint": "checkpoint",
    "other": "other",
}
# Phases in which no kernel of the step is launched: on the device clock they are gaps. Copies are not idle.
DEVICE_IDLE = {
    "data_wait": "waiting for data",
    "log": "reading losses",
    "checkpoint": "checkpoint",
    "other": "other",
}
# Of the memory that is free, the share that a predicted micro-batch may take: fragmentation needs the rest.
SAFE_SHARE = 0.9


def phase_shares(windows: Sequence[WindowEvent]) -> tuple[PhaseShare, ...]:
    """Each phase over the windows, in the order of PHASES with sub-phases behind their parent."""
    wall = sum(window.wall_ns for window in windows)
    if not wall:
        return ()
    steps = sum(window.steps for window in windows) or 1
    host: dict[str, int] = {}
    device: dict[str, float] = {}
    device_steps = 0
    newest: dict[str, dict[str, int | None]] = {}
    for window in windows:
        device_steps += window.device_steps
        for name, figures in window.phases.items():
            host[name] = host.get(name, 0) + figures["host_ns"]
            if figures.get("device_ns") is not None:
                device[name] = device.get(name, 0.0) + figures["device_ns"] * window.device_steps
            if window.steps:
                newest[name] = figures
    rank = {name: index for index, name in enumerate(PHASES)}
    ordered = sorted(
        host, key=lambda name: (rank.get(name.partition("/")[0], len(rank)), name.count("/"), name)
    )
    return tuple(
        PhaseShare(
            name=name,
            host_ns=host[name] / steps,
            share=host[name] / wall,
            p50_ns=newest.get(name, {}).get("p50_ns"),
            p95_ns=newest.get(name, {}).get("p95_ns"),
            max_ns=newest.get(name, {}).get("max_ns"),
            device_ns=device[name] / device_steps if name in device and device_steps else None,
            share_error=_share_error(name, windows),
        )
        for name in ordered
    )


def _share_error(name: str, windows: Sequence[WindowEvent]) -> float | None:
    """Standard error of a phase's share of wall time, from how much it differs between windows with steps."""
    values = [
        window.phases[name]["host_ns"] / window.wall_ns if name in window.phases else 0.0
        for window in windows
        if window.steps and window.wall_ns
    ]
    return stdev(values) / sqrt(len(values)) if len(values) >= 3 else None


def memory_bytes(run: RunEvent | None, sample: SampleEvent) -> int | None:
    """What a sample says of the memory of a run on the processor; a run on a card has its allocator's events."""
    if run is None or run.device.startswith("cuda"):
        return None
    value = sample.host.get("rss_bytes")
    return int(value) if value is not None else None


def core_use(run: RunEvent | None, samples: Sequence[SampleEvent]) -> CoreUse | None:
    """Means over the samples that know both what is used and what of it is ours; None without any."""
    usable = run.usable_cores if run is not None else None
    known = [
        sample.host
        for sample in samples
        if sample.host.get("cpu_percent") is not None and sample.host.get("process_cpu_percent") is not None
    ]
    if not usable or not known:
        return None
    used = fmean(host["cpu_percent"] for host in known) / 100 * usable
    own = fmean(host["process_cpu_percent"] for host in known) / 100
    throttled = [host["cpu_throttled"] for host in known if host.get("cpu_throttled") is not None]
    newest = next((host["neighbours"] for host in reversed(known) if host.get("neighbours")), ())
    return CoreUse(
        used=used,
        own=own,
        others=max(used - own, 0.0),
        usable=usable,
        samples=len(known),
        neighbours=tuple((item["pid"], item["name"], item["cores"]) for item in newest),
        throttled=fmean(throttled) if throttled else None,
    )


def idle(
    run: RunEvent | None,
    windows: Sequence[WindowEvent],
    shares: Sequence[PhaseShare],
    sample: SampleEvent | None,
    kernels: KernelsEvent | None = None,
) -> Idle:
    """Idle share by the best method there is: the device clock, NVML, or the host clock without a card."""
    if run is None or not shares:
        return Idle(None, "host", (), "nothing measured yet")
    if not run.device.startswith("cuda"):
        causes = tuple((HOST_IDLE[share.name], share.share) for share in shares if share.name in HOST_IDLE)
        return Idle(sum(value for _, value in causes), "host", causes)
    timed = [share for share in shares if share.device_ns is not None and "/" not in share.name]
    total = sum(share.device_ns or 0.0 for share in timed)
    if total > 0:
        # Evaluation and checkpoints lie outside the steps that carry events: the host clock says how long they were.
        aside = {share.name: share.share for share in shares if share.name in ("evaluate", "checkpoint")}
        stepping = max(1 - sum(aside.values()), 0.0)
        causes = tuple(
            (DEVICE_IDLE[share.name], (share.device_ns or 0.0) / total * stepping)
            for share in timed
            if share.name in DEVICE_IDLE and share.name not in aside
        )
        if "checkpoint" in aside:
            causes += ((DEVICE_IDLE["checkpoint"], aside["checkpoint"]),)
        return Idle(sum(value for _, value in causes), "events", causes)
    util = sample.card.get("util_percent") if sample and sample.card else None
    if util is not None:
        return Idle(1 - util / 100, "nvml", ())
    return Idle(None, "events", (), "no device clock and no NVML")


def headroom(run: RunEvent | None, sample: SampleEvent | None, memory: MemoryEvent | None) -> Headroom:
    """What can still be allocated on the card, or on the host when the run is on the processor."""
    if run is not None and run.device.startswith("cuda"):
        card = (sample.card if sample else None) or {}
        free = (
            memory.free_bytes if memory and memory.free_bytes is not None else card.get("memory_free_bytes")
        )
        total = (
            memory.total_bytes
            if memory and memory.total_bytes is not None
            else card.get("memory_total_bytes")
        )
        others = (
            memory.others_bytes
            if memory and memory.others_bytes is not None
            else card.get("memory_others_bytes")
        )
        used = memory.reserved_bytes if memory else None
        peak = memory.peak_reserved_bytes if memory else None
        return Headroom(free, total, used, others, peak, _fits(run, free, memory), "card")
    host = sample.host if sample else {}
    limit = host.get("memory_limit_bytes")
    available = host.get("memory_available_bytes")
    used = host.get("rss_bytes")
    if used is not None:
        used += host.get("workers_rss_bytes") or 0
    others = None
    if limit is not None and available is not None and used is not None:
        others = max(limit - available - used, 0)
    return Headroom(available, limit, used, others, None, None, "host")


def _fits(run: RunEvent, free: int | None, memory: MemoryEvent | None) -> int | None:
    """Predicted: the largest micro-batch whose growth within a step, taken as proportional, still fits."""
    if free is None or memory is None or not memory.growth_bytes:
        return None
    micro = int(run.config["batch"]["micro"])
    cached = max(memory.reserved_bytes - memory.allocated_bytes, 0)
    # Gradients come and go within a step too, but do not grow with the micro-batch (parameters are fp32).
    gradients = 4 * run.parameters
    activations = memory.growth_bytes - gradients
    if activations <= 0:
        return None
    return max(int((free + cached - gradients) * SAFE_SHARE / (activations / micro)), 0)


def setting_text(setting: SettingEvent) -> str:
    """One setting in one line: "loader.pin_memory: requested true, not in effect: no CUDA card"."""
    asked = f"{setting.name}: requested {setting.requested}"
    if setting.applied != setting.requested:
        asked += f", applied {setting.applied}"
    states = {True: ", in effect", False: ", not in effect", None: ", default"}
    return asked + states[setting.in_effect] + (f": {setting.verified}" if setting.verified else "")


def throughput(work: WorkEvent | None, step_ns: float | None) -> Throughput:
    """Counted work over the measured time of an optimizer step, and where that is on the card's roofline."""
    if work is None or work.flops_per_step is None:
        return Throughput()
    flops = work.flops_per_step
    achieved = flops / (step_ns * 1e-9) if step_ns and step_ns > 0 else None
    peak = work.peak_tflops * 1e12 if work.peak_tflops else None
    bandwidth = work.bandwidth_gb_s * 1e9 if work.bandwidth_gb_s else None
    return Throughput(
        flops_per_s=achieved,
        peak_flops_per_s=peak,
        peak_kind=work.peak_kind if peak else None,
        mfu=achieved / peak if achieved is not None and peak else None,
        intensity=flops / work.bytes_per_step if work.bytes_per_step else None,
        ridge=peak / bandwidth if peak and bandwidth else None,
        reason="" if peak else work.reason or "no published peak",
    )


def figures(snapshot: Snapshot) -> Json:
    """The measured and derived figures of a run for programs; units are in the names, null is "not known"."""
    found = snapshot.throughput
    return {
        "step_s": snapshot.step_ns * 1e-9 if snapshot.step_ns is not None else None,
        "micro_steps_per_step": snapshot.micro_steps,
        "steps_per_s": snapshot.steps_per_s,
        "items_per_s": snapshot.items_per_s,
        "tokens_per_s": snapshot.tokens_per_s,
        "epoch_s": snapshot.epoch_s,
        "evaluation_s": snapshot.left.evaluation_s,
        "checkpoint_s": snapshot.left.checkpoint_s,
        "flops_per_s": found.flops_per_s,
        "mfu": found.mfu,
        "peak_flops_per_s": found.peak_flops_per_s,
        "peak_kind": found.peak_kind,
        "intensity_flops_per_byte": found.intensity,
        "ridge_flops_per_byte": found.ridge,
        "roofline_side": found.side,
        "reason": found.reason or None,
    }
