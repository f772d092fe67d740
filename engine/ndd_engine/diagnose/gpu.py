"""GPU: copies, launches, synchronisation, other processes, clocks and allocator. For runs on a GPU only."""

from __future__ import annotations

from ndd_engine.record.snapshot import PhaseShare

from .finding import Change, Evidence, Finding
from .view import CONFIG, FLOOR, MODEL, Cost, View, ceiling, finding, percent, span

NVML = "NVML"
DEVICE = "device clock"
CAPTURE = "profiler capture"
# From this host-to-device time ratio on, the GPU may be waiting for launches.
LAUNCHING = 0.9
# A GPU that is always busy shows at least this utilization (percent) and this part of its power limit.
BUSY_UTIL = 90
BUSY_POWER = 0.7
LAUNCH_GAPS = 0.1
# Clocks below this part of their maximum count as lowered.
LOWERED = 0.85
WORDS = ("power cap", "hw slowdown", "thermal", "hw thermal", "power brake")


def transfer(view: View) -> Finding | None:
    """Host-to-device copies that the GPU waits for."""
    cost = _device(view, "to_device")
    if cost is None or not cost.clear:
        return None
    changes = []
    sets: tuple[str, ...] = ()
    if view.get("loader.placement") == "device":
        return None
    if view.get("loader.pin_memory") is False:
        sets += ("loader.pin_memory=true",)
    if view.get("loader.non_blocking") is False:
        sets += ("loader.non_blocking=true",)
    if sets:
        changes.append(Change("use pinned memory and non-blocking copies", sets))
    loader, free = view.snapshot.loader, view.snapshot.headroom.free_bytes
    if loader is not None and loader.in_memory and loader.batch_bytes and loader.micro and free is not None:
        needed = loader.batch_bytes / loader.micro * loader.items
        if needed < 0.4 * free and not view.workers:
            changes.append(Change("keep all data in GPU memory", ("loader.placement=device",)))
    changes.append(Change("transfer smaller data types and convert them on the GPU"))
    batch = loader.batch_bytes if loader is not None else None
    return finding(
        "transfer",
        f"host-to-device copies take {percent(cost.share)} of each step",
        cost,
        [
            Evidence(f"copies take {span(cost.ns)} of each step ({percent(cost.share)})", DEVICE),
            Evidence(f"a micro-batch is {batch / 1e6:.1f} MB", "record") if batch else None,
            Evidence(
                f"loader.pin_memory is {str(view.get('loader.pin_memory')).lower()}, loader.non_blocking "
                f"{str(view.get('loader.non_blocking')).lower()}",
                CONFIG,
            ),
        ],
        changes,
    )


def launch_bound(view: View) -> Finding | None:
    """Kernels so small that launching takes longer than running them."""
    if not view.card or view.get("speed.cuda_graph") or view.get("speed.compile") == "reduce-overhead":
        return None
    gaps, host = _capture(view, "launch gaps"), view.model
    share = gaps if gaps is not None else _idle_in_model(view)
    if share is None or share < LAUNCH_GAPS:
        return None
    if gaps is not None:
        evidence = Evidence(f"launch gaps take {percent(gaps)} of a profiler capture", CAPTURE)
    else:
        evidence = Evidence(
            f"the host takes as long for the model as the GPU, and the GPU is only {percent(1 - share)} busy",
            NVML,
        )
    changes = [
        Change(
            "capture the step in a CUDA graph and replay it", ("speed.cuda_graph=true", *_graph_needs(view))
        )
    ]
    if view.get("speed.compile") == "off":
        changes.append(Change("fuse small kernels with torch.compile", ("speed.compile=default",)))
    accumulation, micro = view.whole("batch.accumulation") or 1, view.whole("batch.micro")
    if accumulation > 1 and micro:
        factor = 2 if accumulation % 2 == 0 else accumulation
        sets = (f"batch.micro={micro * factor}", f"batch.accumulation={accumulation // factor}")
        changes.append(Change("use larger micro-batches with the same effective batch", sets))
    changes.append(Change("move work out of loops in the model", (), view.line(*MODEL)))
    return finding(
        "launch-bound",
        f"launch-bound: the GPU waits for kernel launches {percent(share)} of the time",
        Cost(share * view.step_ns, share, None, share),
        [
            evidence,
            Evidence(f"forward and backward take {span(host.ns)} per step on the host", "host clock"),
        ],
        changes,
        "certain" if gaps is not None else "possible",
        # A CUDA graph also saves host time in the rest of the step.
        bound=ceiling(min(1.2 * share, 0.95)),
    )


def sync(view: View) -> Finding | None:
    """The host synchronises with the GPU inside a step, and the GPU then waits for the host."""
    if not view.card:
        return None
    share = _capture(view, "synchronising")
    every = view.whole("log.every_steps")
    changes = []
    if share is not None:
        evidence = Evidence(
            f"the GPU is idle after host synchronisation for {percent(share)} of a profiler capture", CAPTURE
        )
    else:
        cost = _device(view, "log")
        if cost is None or not cost.clear:
            return None
        share = cost.share
        evidence = Evidence(f"the GPU is idle for {span(cost.ns)} of each step while losses are read", DEVICE)
    if share < FLOOR:
        return None
    if every is not None and every < 5:
        changes.append(Change("read losses less often", ("log.every_steps=10",)))
    line = view.line("forward", "loss", "clip", "log")
    changes.append(
        Change(
            "remove .item(), .cpu(), torch.cuda.synchronize() and torch.cuda.empty_cache() from the step",
            (),
            line,
        )
    )
    return finding(
        "sync",
        f"host-device synchronisation leaves the GPU idle {percent(share)} of the time",
        Cost(share * view.step_ns, share, None, share),
        [evidence],
        changes,
        bound=ceiling(min(1.2 * share, 0.95)),
    )


def neighbour_gpu(view: View) -> Finding | None:
    """Another process computes on the GPU."""
    card = view.snapshot.card
    if not view.card or card is None:
        return None
    processes, others, util = card.get("processes"), card.get("memory_others_bytes"), card.get("util_percent")
    slowed = view.slowed
    if not processes or slowed is None or slowed < 1.2 or util is None or util < BUSY_UTIL:
        return None
    share = 1 - 1 / slowed
    return finding(
        "neighbour-card",
        f"{processes} other process{'es share' if processes > 1 else ' shares'} the GPU",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(
                f"forward and backward take {slowed:.2g} times as long as before training",
                "device and host clock",
            ),
            Evidence(
                f"other processes on the GPU: {processes}"
                + (f", using {others / (1 << 30):.1f} GB" if others else ""),
                NVML,
            ),
        ],
        [Change("use another GPU, or stop the other processes (nvidia-smi lists them)")],
        "possible",
        bound=view.undisturbed(),
    )


def throttling(view: View) -> Finding | None:
    """The GPU lowers its clocks."""
    card = view.snapshot.card
    if not view.card or card is None:
        return None
    words = [word for word in card.get("throttle") or () if word in WORDS]
    clock, most = card.get("sm_clock_mhz"), card.get("sm_clock_max_mhz")
    util = card.get("util_percent")
    if not words or not clock or not most or clock > LOWERED * most or util is None or util < 50:
        return None
    lost = 1 - clock / most
    share = lost * view.model.share
    temperature = card.get("temperature_c")
    return finding(
        "throttling",
        f"the GPU is throttled ({', '.join(words)}): {clock} of {most} MHz",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(f"SM clock {clock} of {most} MHz; reasons: {', '.join(words)}", NVML),
            Evidence(f"{temperature} °C", NVML) if temperature is not None else None,
        ],
        [
            Change(
                "not fixable in software: improve cooling or raise the power limit (needs an administrator)"
            )
        ],
        bound=ceiling(lost),
    )


def thrash(view: View) -> Finding | None:
    """The CUDA allocator runs out of memory, frees its cache and retries."""
    memory = view.snapshot.memory
    totals = view.snapshot.totals
    if not view.card or memory is None or memory.retries < 2 or not totals.steps:
        return None
    if memory.retries < totals.steps / 100:
        return None  # a few retries while the cache grew
    step = sum(view.phases[name].host_ns for name in MODEL if name in view.phases)
    usual = sum(view.phases[name].p50_ns or 0 for name in MODEL if name in view.phases)
    share = max(1 - usual / step, FLOOR) * view.model.share if step and usual else FLOOR
    changes = []
    if half := halved(view):
        changes.append(Change("use smaller micro-batches with the same effective batch", half))
    changes.append(Change("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before starting the run"))
    return finding(
        "thrash",
        f"GPU memory is full: the allocator freed its cache and retried {memory.retries} times",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(f"{memory.retries} retries in {totals.steps} steps", "allocator"),
            Evidence(f"peak reserved memory is {memory.peak_reserved_bytes / (1 << 30):.1f} GB", "allocator"),
        ],
        changes,
        "certain",
        bound=view.undisturbed(),
    )


RULES = (transfer, launch_bound, sync, neighbour_gpu, throttling, thrash)


def halved(view: View) -> tuple[str, ...]:
    """Edits that halve the micro-batch and keep the effective batch; () if that is not possible."""
    micro, accumulation = view.whole("batch.micro"), view.whole("batch.accumulation")
    if micro is None or accumulation is None or micro < 2 or micro % 2:
        return ()
    return f"batch.micro={micro // 2}", f"batch.accumulation={accumulation * 2}"


def _device(view: View, name: str) -> Cost | None:
    """Cost of a phase by the device clock; None without one."""
    if not view.card:
        return None
    timed = [phase for phase in view.phases.values() if phase.device_ns is not None and "/" not in phase.name]
    total = sum(phase.device_ns or 0.0 for phase in timed)
    found: PhaseShare | None = view.phases.get(name)
    if not total or found is None or found.device_ns is None:
        return None
    share = found.device_ns / total
    return Cost(found.device_ns, share, found.share_error, share)


def _capture(view: View, cause: str) -> float | None:
    """Fraction of a profiler capture in which the GPU was idle for a cause; None without a capture."""
    capture = view.snapshot.kernels
    if capture is None or capture.method != "kernels" or not capture.wall_ns:
        return None
    return capture.idle_ns.get(cause, 0) / capture.wall_ns


def _idle_in_model(view: View) -> float | None:
    """Upper bound of the GPU's idle time inside the model when there is no profiler capture.

    None unless host and device clocks, utilization and power all indicate that the GPU waits for the host.
    """
    card = view.snapshot.card
    timed = [view.phases[name] for name in MODEL if name in view.phases]
    device = sum(phase.device_ns or 0.0 for phase in timed)
    if card is None or not device or view.model.ns < LAUNCHING * device:
        return None
    util, power, limit = card.get("util_percent"), card.get("power_w"), card.get("power_limit_w")
    if util is None or power is None or not limit or util >= BUSY_UTIL or power >= BUSY_POWER * limit:
        return None
    return min(1 - float(util) / 100, view.model.share)


def _graph_needs(view: View) -> tuple[str, ...]:
    """Further edits that a CUDA graph requires."""
    return (
        ("speed.compile=default",) if view.get("speed.compile") in ("reduce-overhead", "max-autotune") else ()
    )
