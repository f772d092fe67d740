"""The card: copies, launches, waits, and who else is on it. All rules abstain without one."""

from __future__ import annotations

from ndd_engine.record.snapshot import PhaseShare

from .finding import Change, Evidence, Finding
from .view import CONFIG, FLOOR, MODEL, Cost, View, ceiling, finding, percent, span

NVML = "NVML"
DEVICE = "device clock"
CAPTURE = "profiler burst"
# The host needs nearly as long to launch as the card to compute: then the card waits for the host.
LAUNCHING = 0.9
# A card that computes all the time draws power, and says that it is used.
BUSY_UTIL = 90
BUSY_POWER = 0.7
LAUNCH_GAPS = 0.1
# Clocks below this part of their maximum count as lowered.
LOWERED = 0.85
WORDS = ("power cap", "hw slowdown", "thermal", "hw thermal", "power brake")


def transfer(view: View) -> Finding | None:
    """Copies to the card that the card waits for."""
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
        changes.append(Change("page-locked batches, copied without waiting", sets))
    loader, free = view.snapshot.loader, view.snapshot.headroom.free_bytes
    if loader is not None and loader.in_memory and loader.batch_bytes and loader.micro and free is not None:
        needed = loader.batch_bytes / loader.micro * loader.items
        if needed < 0.4 * free and not view.workers:
            changes.append(Change("put all of the data on the card", ("loader.placement=device",)))
    changes.append(Change("move smaller types, and convert them on the card"))
    batch = loader.batch_bytes if loader is not None else None
    return finding(
        "transfer",
        f"copying to the card takes {percent(cost.share)} of each step",
        cost,
        [
            Evidence(f"copies take {span(cost.ns)} of each step, {percent(cost.share)}", DEVICE),
            Evidence(f"a micro-batch has {batch / 1e6:.1f} MB", "record") if batch else None,
            Evidence(
                f"loader.pin_memory is {str(view.get('loader.pin_memory')).lower()}, loader.non_blocking "
                f"{str(view.get('loader.non_blocking')).lower()}",
                CONFIG,
            ),
        ],
        changes,
    )


def launch_bound(view: View) -> Finding | None:
    """Kernels so small that launching them takes longer than running them."""
    if not view.card or view.get("speed.cuda_graph") or view.get("speed.compile") == "reduce-overhead":
        return None
    gaps, host = _capture(view, "launch gaps"), view.model
    share = gaps if gaps is not None else _idle_in_model(view)
    if share is None or share < LAUNCH_GAPS:
        return None
    if gaps is not None:
        evidence = Evidence(f"the card waits for launches {percent(gaps)} of a burst", CAPTURE)
    else:
        evidence = Evidence(
            f"host and card take the same time for the model, and the card is {percent(1 - share)} busy", NVML
        )
    changes = [Change("record the step once and replay it", ("speed.cuda_graph=true", *_graph_needs(view)))]
    if view.get("speed.compile") == "off":
        changes.append(Change("fuse small kernels", ("speed.compile=default",)))
    accumulation, micro = view.whole("batch.accumulation") or 1, view.whole("batch.micro")
    if accumulation > 1 and micro:
        factor = 2 if accumulation % 2 == 0 else accumulation
        sets = (f"batch.micro={micro * factor}", f"batch.accumulation={accumulation // factor}")
        changes.append(Change("larger micro-batches, and as many items in a step as now", sets))
    changes.append(Change("hoist work out of loops in the model", (), view.line(*MODEL)))
    return finding(
        "launch-bound",
        f"launching takes longer than computing: the card waits {percent(share)} of the time",
        Cost(share * view.step_ns, share, None, share),
        [
            evidence,
            Evidence(f"forward and backward take {span(host.ns)} of the host in a step", "host clock"),
        ],
        changes,
        "certain" if gaps is not None else "possible",
        # A graph also saves the host's time in the rest of the step.
        bound=ceiling(min(1.2 * share, 0.95)),
    )


def sync(view: View) -> Finding | None:
    """The host waits for the card inside a step, and the card then for the host."""
    if not view.card:
        return None
    share = _capture(view, "synchronising")
    every = view.whole("log.every_steps")
    changes = []
    if share is not None:
        evidence = Evidence(
            f"the card ran dry after waits of the host in {percent(share)} of a burst", CAPTURE
        )
    else:
        cost = _device(view, "log")
        if cost is None or not cost.clear:
            return None
        share = cost.share
        evidence = Evidence(f"the card waits {span(cost.ns)} of each step while losses are read", DEVICE)
    if share < FLOOR:
        return None
    if every is not None and every < 5:
        changes.append(Change("read losses less often", ("log.every_steps=10",)))
    line = view.line("forward", "loss", "clip", "log")
    changes.append(
        Change(
            "take .item(), .cpu(), synchronize() and empty_cache() of torch.cuda out of the step", (), line
        )
    )
    return finding(
        "sync",
        f"waiting for the card takes {percent(share)} of the time",
        Cost(share * view.step_ns, share, None, share),
        [evidence],
        changes,
        bound=ceiling(min(1.2 * share, 0.95)),
    )


def neighbour_gpu(view: View) -> Finding | None:
    """Another process computes on the card."""
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
        f"{processes} other process{'es' if processes > 1 else ''} on the card",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(
                f"forward and backward take {slowed:.2g} times as long as before training",
                "device and host clock",
            ),
            Evidence(
                f"{processes} other processes on the card"
                + (f" hold {others / (1 << 30):.1f} GB" if others else ""),
                NVML,
            ),
        ],
        [Change("ask who else uses this card, or take another one (nvidia-smi lists the processes)")],
        "possible",
        bound=view.undisturbed(),
    )


def throttling(view: View) -> Finding | None:
    """The card lowers its clocks."""
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
        f"the card is throttled ({', '.join(words)}): {clock} of {most} MHz",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(f"clock {clock} of {most} MHz, because of: {', '.join(words)}", NVML),
            Evidence(f"{temperature} °C", NVML) if temperature is not None else None,
        ],
        [
            Change(
                "nothing to tune in software: better cooling, or a higher power limit from whoever runs the machine"
            )
        ],
        bound=ceiling(lost),
    )


def thrash(view: View) -> Finding | None:
    """The allocator runs full, frees its cache and tries again."""
    memory = view.snapshot.memory
    totals = view.snapshot.totals
    if not view.card or memory is None or memory.retries < 2 or not totals.steps:
        return None
    if memory.retries < totals.steps / 100:
        return None  # a few, while it grew to its size
    step = sum(view.phases[name].host_ns for name in MODEL if name in view.phases)
    usual = sum(view.phases[name].p50_ns or 0 for name in MODEL if name in view.phases)
    share = max(1 - usual / step, FLOOR) * view.model.share if step and usual else FLOOR
    changes = []
    if half := halved(view):
        changes.append(Change("smaller micro-batches, and as many items in a step as now", half))
    changes.append(Change("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start"))
    return finding(
        "thrash",
        f"the allocator freed its cache and tried again {memory.retries} times",
        Cost(share * view.step_ns, share, None, share),
        [
            Evidence(f"{memory.retries} retries in {totals.steps} steps", "allocator"),
            Evidence(f"at most {memory.peak_reserved_bytes / (1 << 30):.1f} GB were reserved", "allocator"),
        ],
        changes,
        "certain",
        bound=view.undisturbed(),
    )


RULES = (transfer, launch_bound, sync, neighbour_gpu, throttling, thrash)


def halved(view: View) -> tuple[str, ...]:
    """The edits for micro-batches of half the size and the same effective batch; () where that is not possible."""
    micro, accumulation = view.whole("batch.micro"), view.whole("batch.accumulation")
    if micro is None or accumulation is None or micro < 2 or micro % 2:
        return ()
    return f"batch.micro={micro // 2}", f"batch.accumulation={accumulation * 2}"


def _device(view: View, name: str) -> Cost | None:
    """What a phase takes by the device clock; None without one."""
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
    """Share of a burst on the card that was idle for a cause; None without a burst."""
    capture = view.snapshot.kernels
    if capture is None or capture.method != "kernels" or not capture.wall_ns:
        return None
    return capture.idle_ns.get(cause, 0) / capture.wall_ns


def _idle_in_model(view: View) -> float | None:
    """Without a burst: an upper bound of the card's idle time inside the model, where the host is as slow as it.

    None where host and device clock, utilization or power do not all say so.
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
    """What a recorded step does not go with."""
    return (
        ("speed.compile=default",) if view.get("speed.compile") in ("reduce-overhead", "max-autotune") else ()
    )
