"""The GPU: from its counters and phases, and from a capture.

Launches, synchronisation, other processes, clocks, allocator, number formats and cuDNN, and what a capture
shows beside them. The rules apply to runs on a GPU only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ndd_engine.record.figures import ESTIMATED
from ndd_engine.text import counted, number, percent, size, span, times

from .finding import Change, Evidence, Finding
from .view import CLOCK, CONFIG, DEVICE, FLOOR, MODEL, SLOWED, Cost, FindingDraft, View

NVML = "NVML"
CAPTURE = "profiler capture"
# From this host-to-device time ratio on, the GPU may be waiting for launches.
LAUNCHING = 0.9
# A GPU that is always busy shows at least this utilization (percent) and this part of its power limit.
BUSY_UTIL = 90
BUSY_POWER = 0.7
LAUNCH_GAPS = 0.1
# Smaller parts of a capture are not named.
LEAST = 0.005
PINNED = "copy from pinned memory with non_blocking=True: other copies return when they are done"
TO_PINNED = (
    "copy to the host into pinned memory with non_blocking=True, and synchronise once before the values are read: "
    "other copies return when they are done"
)
# Clocks below this part of their maximum count as lowered.
LOWERED = 0.85
# How a capture marks the calls that copy.
UPLOAD, COPY = "(upload)", "(copy)"
WORDS = ("power cap", "hw slowdown", "thermal", "hw thermal", "power brake")
# Those that are not usual: heat, and a brake of the hardware.
FORCED = ("hw slowdown", "thermal", "hw thermal", "power brake")


def launch_bound(view: View) -> Finding | None:
    """Kernels so small that launching takes longer than running them."""
    compiled = view.get("speed.compile")
    if _replays(view):
        return None
    gaps, capture = in_capture(view, "launch gaps"), view.kernels
    if gaps is not None and capture is not None:
        gaps -= capture.after_waits_ns / capture.wall_ns  # the cost of a synchronisation
    share = gaps if gaps is not None else _idle_in_model(view)
    if share is None or share < LAUNCH_GAPS:
        return None
    title = f"launch-bound: the GPU waits for kernel launches {percent(share)} of the time"
    draft = FindingDraft(
        "launch-bound", title, view.part(share), "certain" if gaps is not None else "possible"
    )
    if gaps is not None:
        text = f"launch gaps take {percent(gaps)} of the time"
        draft.saw(
            text + (", beside those after waits for the GPU" if _after_waits(view) >= LEAST else ""), CAPTURE
        )
    else:
        busy = percent(1 - share)
        draft.saw(f"the host takes as long for the model as the GPU, and the GPU is only {busy} busy", NVML)
    if view.model.ns:
        draft.saw(f"on the host, {view.model_takes} {span(view.model.ns)} per step", CLOCK)
    # max-autotune has CUDA graphs of its own.
    needs = ("speed.compile=default",) if compiled == "max-autotune" else ()
    text = "capture the step in a CUDA graph and replay it" + (", with compile mode default" if needs else "")
    refused = [item.verified for item in view.snapshot.settings if item.name == "speed.cuda_graph"]
    if view.is_script or view.trace is not None:
        draft.change("capture the model in a CUDA graph: torch.cuda.make_graphed_callables")
    elif refused:  # the run has asked what decides that, with the parts that a factory replaces
        draft.saw(f"the step cannot be captured in a CUDA graph: {refused[-1]}", "settings")
    else:
        draft.change(text, "speed.cuda_graph=true", *needs)
    if compiled == "off" or view.is_script or view.trace is not None:
        draft.change("fuse small kernels with torch.compile", "speed.compile=default")
    accumulation, micro = view.whole("batch.accumulation") or 1, view.whole("batch.micro")
    if accumulation > 1 and micro:
        draft.add(larger_batches(micro, accumulation, 2 if accumulation % 2 == 0 else accumulation))
    where = view.line(*MODEL)
    if where is not None or view.trace is None:  # many traces do not show the code of the model
        draft.change("move work out of loops in the model", where=where)
    return draft.done()


def perhaps_launch_bound(view: View) -> Finding | None:
    """The host takes as long for the model as the GPU, and nothing tells for how long the GPU computes meanwhile."""
    if _replays(view) or view.snapshot.kernels is not None or view.idle is not None or not _keeps_pace(view):
        return None
    own = {item.phase: item.share for item in reversed(view.functions) if item.phase in MODEL}
    known = sum(min(share, view.exposed(phase)) for phase, share in own.items())
    open_share = view.model.share - known
    inside = sum(own.values()) + sum(view.waits.get(name, 0.0) for name in MODEL) / max(view.step_ns, 1.0)
    if open_share < LAUNCH_GAPS or not (view.runs_dry or inside >= 2 * FLOOR):
        return None
    # A GPU that is busy between the steps may be busy in them as well: then this is a question, and no cost.
    draft = FindingDraft(
        "launch-bound",
        "perhaps launch-bound: a profiler capture tells whether the GPU waits for the host in the model",
        view.part(open_share) if view.runs_dry else None,
        "possible",
    )
    draft.saw(f"forward and backward take {span(view.model.ns)} per step on the host", CLOCK)
    draft.saw(f"they take {span(_device_ns(view))} on the GPU, idle time in them included", DEVICE)
    if view.runs_dry:
        draft.saw("the GPU has nothing left to do when the model begins", DEVICE)
    draft.unbounded()
    draft.change("take a profiler capture (k)", where=view.line(*MODEL))
    return draft.done()


def sync(view: View) -> Finding | None:
    """The host synchronises with the GPU inside a step, and the GPU then waits for the host."""
    cost, captured = view.device_cost("log"), in_capture(view, "synchronising")
    if captured is None and not cost.clear:
        return None
    share = cost.share if captured is None else captured + _after_waits(view)
    if share < FLOOR:
        return None
    title = f"host-device synchronisation leaves the GPU idle {percent(share)} of the time"
    draft = FindingDraft("sync", title, view.part(share))
    if captured is not None:
        text = f"the GPU is idle in synchronising calls for {percent(captured)} of the time"
        if (after := _after_waits(view)) >= LEAST:
            text += f", and for {percent(after)} in launch gaps right after them"
        draft.saw(text, CAPTURE)
        waits = _waits(view)
        for name, part, calls in waits[:3]:
            draft.saw(f"{_call_text(name)}: {percent(part)}, {counted(calls, 'call')}", CAPTURE)
        if waits and _copies(waits[0][0]):
            draft.change(PINNED if waits[0][0].endswith(UPLOAD) else TO_PINNED)
    else:
        draft.saw(f"the GPU is idle for {span(cost.ns)} of each step while losses are read", DEVICE)
    every = view.whole("log.every_steps")
    if every is not None and every < 5:
        draft.change("read losses less often", "log.every_steps=10")
    if captured is not None and (waits := _waits(view)) and all(_copies(name) for name, *_ in waits):
        return draft.done()
    draft.change(
        "remove .item(), float(tensor), .cpu(), torch.cuda.synchronize() and torch.cuda.empty_cache() from the step",
        where=view.waiting_line or view.line("forward", "loss", "clip", "log"),
    )
    return draft.done()


def collectives(view: View) -> Finding | None:
    """Exposed communication between GPUs."""
    capture = view.kernels
    if view.snapshot.ranks is not None:
        return None  # the clocks of all ranks tell communication from waiting for a straggler
    if capture is None or capture.exposed_ns < FLOOR * capture.wall_ns:
        return None
    share, hidden = capture.exposed_ns / capture.wall_ns, capture.collective_ns - capture.exposed_ns
    title = f"communication between GPUs is exposed {percent(share)} of the time"
    draft = FindingDraft("collectives", title, view.part(share))
    draft.saw(f"collectives run alone for {percent(share)} of the time", CAPTURE)
    draft.saw(f"another {percent(hidden / capture.wall_ns)} overlaps with computation", CAPTURE)
    draft.change("with gradient accumulation, exchange gradients only in the last micro-batch (no_sync)")
    draft.change("use larger micro-batches, so that backward hides more of the exchange")
    _straggler(view, share, draft)
    return draft.done()


def _straggler(view: View, share: float, draft: FindingDraft) -> None:
    """What to do about a rank that is waited for. share: of the time that this rank waits."""
    others: list[tuple[str, float]] | None = view.trace.get("others") if view.trace is not None else None
    if others is None:
        draft.change("find the straggler: the others wait for it inside the collective")
        return
    (least, shortest), (_, longest) = (pick(others, key=lambda one: one[1]) for pick in (min, max))
    if share - shortest >= FLOOR:
        draft.change(f"find the straggler: {least} waits least, {percent(shortest)} of the time")
    elif longest - share >= FLOOR:
        draft.saw(f"other ranks wait longer, up to {percent(longest)} of the time", CAPTURE)
        draft.change("find what makes this rank slower than those that wait longer inside the collective")


def neighbour_gpu(view: View) -> Finding | None:
    """Another process computes on the GPU."""
    gpu, slowed = view.snapshot.gpu or {}, view.slowed
    processes, others, util = gpu.get("processes"), gpu.get("memory_others_bytes"), gpu.get("util_percent")
    if not processes or slowed is None or slowed < 1.2 or util is None or util < BUSY_UTIL:
        return None
    title = f"{processes} other process{'es share' if processes > 1 else ' shares'} the GPU"
    draft = FindingDraft("neighbour-gpu", title, view.part(1 - 1 / slowed), "possible")
    draft.saw(
        f"forward and backward take {number(slowed, 2)} times as long as before training",
        "device and host clock",
    )
    used = f", using {size(others)}" if others else ""
    draft.saw(f"other processes on the GPU: {processes}{used}", NVML)
    draft.change("use another GPU, or wait until the other processes have ended (nvidia-smi lists them)")
    return draft.done()


def throttling(view: View) -> Finding | None:
    """The GPU lowers its clocks: it is too hot, its power supply brakes it, or it is slower than it was in this run.

    At its power limit it computes as fast as that limit allows, which is usual: that alone is no finding.
    """
    gpu, usual = view.snapshot.gpu or {}, view.snapshot.usual_clock_mhz
    reasons = [word for word in gpu.get("throttle") or () if word in WORDS]
    clock, most, util = gpu.get("sm_clock_mhz"), gpu.get("sm_clock_max_mhz"), gpu.get("util_percent")
    if not clock or util is None or util < 50:
        return None
    forced = [word for word in reasons if word in FORCED]
    of = most if forced else usual
    if not of or clock > LOWERED * of:
        return None
    words = ", ".join(forced or reasons) or "no reason given"
    what = f"{clock} of {of} MHz" if forced else f"{clock} MHz instead of {of} MHz earlier in this run"
    draft = FindingDraft("throttling", f"the GPU is throttled ({words}): {what}", view.part(1 - clock / of))
    draft.saw(f"SM clock {clock} MHz, at most {most} MHz; reasons: {words}", NVML)
    if gpu.get("power_limit_w") and gpu.get("power_w"):
        draft.saw(f"{gpu['power_w']:.0f} W of a limit of {gpu['power_limit_w']:.0f} W", NVML)
    if gpu.get("temperature_c") is not None:
        draft.saw(f"{gpu['temperature_c']} °C", NVML)
    draft.change("not fixable in software: improve cooling or raise the power limit (needs an administrator)")
    return draft.done()


def thrash(view: View) -> Finding | None:
    """The CUDA allocator runs out of memory, frees its cache and retries."""
    memory, totals = view.snapshot.memory, view.snapshot.totals
    if memory is None or memory.retries < 2 or not totals.steps:
        return None
    if memory.retries < totals.steps / 100:
        return None  # a few retries while the cache grew
    step, usual = view.model.ns, view.usual_model_ns
    share = max(1 - usual / step, FLOOR) * view.model.share if step and usual else FLOOR
    title = f"GPU memory is full: the allocator freed its cache and retried {memory.retries:,} times"
    draft = FindingDraft("thrash", title, view.part(share), "certain")
    draft.saw(f"{memory.retries:,} retries in {totals.steps:,} steps", "allocator")
    draft.saw(f"peak reserved memory is {size(memory.peak_reserved_bytes)}", "allocator")
    draft.add(smaller_batches(view))
    draft.change("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before starting the run")
    return draft.done()


RULES = (
    launch_bound,
    perhaps_launch_bound,
    sync,
    collectives,
    neighbour_gpu,
    throttling,
    thrash,
)


def larger_batches(micro: int, accumulation: int, factor: int) -> Change:
    """Merge `factor` micro-batches into one."""
    sets = (f"batch.micro={micro * factor}", f"batch.accumulation={accumulation // factor}")
    return Change("use larger micro-batches with the same effective batch", sets)


def smaller_batches(view: View) -> Change | None:
    """At most half of the micro-batch; None if that is not possible."""
    micro, accumulation = view.whole("batch.micro"), view.whole("batch.accumulation")
    if micro is None or accumulation is None or micro < 2:
        return None
    items = micro * accumulation
    smaller = next(size for size in range(micro // 2, 0, -1) if items % size == 0)
    sets = (f"batch.micro={smaller}", f"batch.accumulation={items // smaller}")
    return Change("use smaller micro-batches with the same effective batch", sets)


def _replays(view: View) -> bool:
    """Whether CUDA graphs launch the kernels."""
    return bool(view.get("speed.cuda_graph")) or view.get("speed.compile") == "reduce-overhead"


def _device_ns(view: View) -> float:
    """Nanoseconds of the model by the device clock, idle time included; 0 without one."""
    return sum(view.phases[name].device_ns or 0.0 for name in MODEL if name in view.phases)


def _keeps_pace(view: View) -> bool:
    """Whether the host takes about as long for the model as the GPU, which may then wait for it."""
    device = _device_ns(view)
    return device > 0 and view.model.ns >= LAUNCHING * device


def in_capture(view: View, cause: str) -> float | None:
    """Fraction of a profiler capture in which the GPU was idle for a cause; None without a capture."""
    capture = view.kernels
    return None if capture is None else capture.idle_ns.get(cause, 0) / capture.wall_ns


def _after_waits(view: View) -> float:
    """Fraction of a profiler capture in launch gaps that are there because the host has waited for the GPU."""
    capture = view.kernels
    return 0.0 if capture is None else capture.after_waits_ns / capture.wall_ns


def _waits(view: View) -> list[tuple[str, float, int]]:
    """(name, fraction of a profiler capture that the GPU is idle in them, number) of calls that wait for the GPU."""
    capture = view.kernels
    found = (
        [] if capture is None else [(name, ns / capture.wall_ns, calls) for name, ns, calls in capture.waits]
    )
    return [wait for wait in found if wait[1] >= LEAST]


def _copies(name: str) -> bool:
    return name.endswith((UPLOAD, COPY))


def _call_text(name: str) -> str:
    """ "cudaMemcpyAsync, a copy to the GPU that returns when it is done"."""
    call, _, _ = name.partition(" (")
    if name.endswith(UPLOAD):
        return f"{call}, a copy to the GPU that returns when it is done"
    return f"{call}, a copy that returns when it is done" if name.endswith(COPY) else call


def _idle_in_model(view: View) -> float | None:
    """Upper bound of the GPU's idle time inside the model when there is no profiler capture.

    None unless host and device clocks, utilization and power all indicate that the GPU waits for the host.
    """
    gpu = view.snapshot.gpu or {}
    if not _keeps_pace(view):
        return None
    util, power, limit = gpu.get("util_percent"), gpu.get("power_w"), gpu.get("power_limit_w")
    if util is None or power is None or not limit or util >= BUSY_UTIL or power >= BUSY_POWER * limit:
        return None
    return min(1 - float(util) / 100, view.model.share)


# Assumed maximum speedup of convolutions by cudnn_benchmark.
CHOICE = 2.0


def tf32(view: View) -> Finding | None:
    """fp32 matrix products on a GPU that supports TF32."""
    if not view.is_script and view.get("precision.tf32") is not False:
        return None
    return _format(view, "tf32", ("fp32",), "tf32", "enable TF32 matrix products", "precision.tf32=true")


def amp(view: View) -> Finding | None:
    """fp32 or TF32 on a GPU with a faster format."""
    if not view.is_script and view.get("precision.amp") != "off":
        return None
    kind = "bf16" if "bf16" in _peaks(view) else "fp16"
    what = f"use mixed precision ({kind})"
    return _format(view, "amp", ("fp32", "tf32"), kind, what, f"precision.amp={kind}")


def cudnn_benchmark(view: View) -> Finding | None:
    """Convolutions of fixed shapes without cuDNN benchmarking."""
    if view.get("speed.cudnn_benchmark") is not False or view.get("speed.deterministic"):
        return None
    if "recompile" in view.alternatives:
        return None  # shapes vary: each new one would be benchmarked
    spent = _convolutions(view)
    if spent * (1 - 1 / CHOICE) < FLOOR:
        return None
    title = f"convolutions take {percent(spent)} of the time, and their cuDNN algorithms are not benchmarked"
    draft = FindingDraft("cudnn-benchmark", title, view.part(spent), "possible")
    draft.saw(f"convolutions take {percent(spent)} of the time", CAPTURE)
    draft.change("benchmark cuDNN algorithms: the shapes are fixed", "speed.cudnn_benchmark=true")
    return draft.done()


def cudnn_shapes(view: View) -> Finding | None:
    """Convolutions that cuDNN benchmarks again for every new shape."""
    slowed = view.slowed
    if view.get("speed.cudnn_benchmark") is not True or slowed is None:
        return None
    if slowed < SLOWED or not _convolutions(view):
        return None
    title = (
        f"varying shapes: forward and backward take {number(slowed, 2)} times as long as with a fixed shape"
    )
    draft = FindingDraft("cudnn-shapes", title, view.part(view.model.share * (1 - 1 / slowed)), "possible")
    draft.saw(
        f"forward and backward take {number(slowed, 2)} times as long as one micro-batch repeated before training",
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


def _format(
    view: View, cause: str, formats: Sequence[str], kind: str, what: str, edit: str
) -> Finding | None:
    """Finding for a faster number format than `formats`, bounded by the published peaks.

    The kernels of a capture show how much of the time matrix products take in each format. Without such a capture, and
    where operations are counted, it is the model's share, if arithmetic bounds it.
    """
    peaks, model, capture = _peaks(view), view.model, view.kernels
    then, mfu = peaks.get(kind, 0.0), view.snapshot.throughput.mfu
    slower = {name: peaks[name] for name in formats if 0 < peaks.get(name, 0.0) < then}
    if capture is not None and capture.products_ns:
        shares = {name: capture.products_ns.get(name, 0) / capture.wall_ns for name in slower}
        shares = {name: share for name, share in shares.items() if share}
    elif view.precision in slower and mfu is not None and mfu >= 0.05 and model.clear:
        # Memory-bound operators gain as well: they move half as many bytes.
        capture, shares = None, {view.precision: model.share}
    else:
        return None
    gained = min(sum(share * (1 - slower[name] / then) for name, share in shares.items()), model.share)
    if gained < FLOOR:
        return None
    names, spent = " and ".join(shares), percent(sum(shares.values()))
    if capture is not None:
        draft = FindingDraft(
            cause, f"matrix products in {names} take {spent} of the time", view.part(gained), "possible"
        )
        draft.saw(f"kernels of matrix products in {names} take {spent} of the time", CAPTURE)
    else:
        cost = Cost(gained * view.step_ns, gained, model.error, gained)
        draft = FindingDraft(cause, f"the model takes {spent} of each step, in {names}", cost)
    gains = (f"{times(then / slower[name])} that in {name} ({slower[name]:g})" for name in shares)
    draft.saw(f"peak {then:g} TFLOP/s in {kind}: {', '.join(gains)}", "published peaks")
    if mfu is not None and view.precision in shares:
        draft.saw(f"the run reaches {percent(mfu)} of the current peak (MFU)", "counted operations")
    draft.change(what, edit)
    return draft.done()


# From this part of the time on, a GPU that computes is what limits a step.
COMPUTES = 0.9


def of_this_gpu(view: View) -> tuple[str, Evidence] | None:
    """(text, evidence): how kernels that limit the steps compare with their estimate for this GPU; None if unknown."""
    capture = view.kernels
    if capture is None or capture.busy_ns < COMPUTES * capture.wall_ns:
        return None
    found = capture.estimated_ns
    measured = found.get("measured", 0)
    if not measured or measured < ESTIMATED * found["kernels"]:
        return None
    usual, low, high = (found[name] for name in ("usual", "low", "high"))
    seen = f"kernels take {span(measured)}; {span(usual)} ({span(low)} to {span(high)}) are estimated from their shapes"
    if measured <= usual:
        text = "compute-bound: the kernels are as fast as estimated for this GPU"
    elif measured <= high:
        text = f"compute-bound: within {percent(1 - usual / measured)} of what this GPU can do, as estimated"
    else:
        text = (
            f"compute-bound, but the kernels take {times(measured / usual)} as long as estimated for this GPU"
        )
    return text, Evidence(seen, TRACE if view.trace is not None else CAPTURE)


TRACE = "trace"
# Kind of a gap between queued kernels -> what it is, and what to do.
BETWEEN = {
    "another stream": (
        "in which a stream waits for another one",
        "let fewer kernels wait for another stream: record events later, or wait for them later",
    ),
    "CUDA graph": (
        "inside of CUDA graphs, where kernels wait for each other or for work that was not recorded",
        "profile the same steps without the CUDA graph: it shows what the kernels wait for",
    ),
    "before a CUDA graph": (
        "before a CUDA graph that was launched in time: it waits for an event, or is still being uploaded",
        "upload CUDA graphs before their first replay, and look for events that they wait for",
    ),
    "one stream": (
        "within one stream, which waits for an event, a host function or another process on the GPU",
        "look for cudaStreamWaitEvent before these kernels, and for other processes on the GPU",
    ),
    "short": (
        "below 10 µs, which starting a kernel takes",
        "run fewer and larger kernels: fuse them with torch.compile, or use larger batches",
    ),
}


def queue_gaps(view: View) -> Finding | None:
    """Idle time between kernels that had been launched in time: the host is not the cause."""
    capture = view.kernels
    if (
        capture is None
        or (share := capture.idle_ns.get("between queued kernels", 0) / capture.wall_ns) < LAUNCH_GAPS
    ):
        return None
    title = f"the GPU is idle {percent(share)} of the time between kernels that were launched in time"
    draft = FindingDraft("queue-gaps", title, view.part(share))
    for kind, ns, gaps in capture.queued:
        if kind in BETWEEN and ns >= LEAST * capture.wall_ns:
            text = f"{percent(ns / capture.wall_ns)} in {counted(gaps, 'gap')} {BETWEEN[kind][0]}"
            draft.saw(text, CAPTURE)
    if capture.queued and (kind := capture.queued[0][0]) in BETWEEN:
        draft.change(BETWEEN[kind][1])
    return draft.done()


def gpu_idle(view: View, alone: bool) -> Finding | None:
    """Idle time that no other rule explains. alone: there is no other finding."""
    capture = view.kernels
    if capture is None or not view.gpu:
        return None
    causes = capture.idle_ns if alone else {"other": capture.idle_ns.get("other", 0)}
    share = sum(causes.values()) / capture.wall_ns
    if share < LAUNCH_GAPS:
        return None
    main = max(causes, key=causes.__getitem__)
    title = f"the GPU is idle {percent(share)} of the time"
    longest = _range(view, causes[main])
    if view.trace is not None and not view.trace.get("operators") and longest is None:
        draft = FindingDraft("gpu-idle", f"{title}, and the trace does not show why", view.part(share))
        draft.saw("the trace has no operators of the host", TRACE)
        draft.change("record the host as well: ProfilerActivity.CPU beside ProfilerActivity.CUDA")
    elif main == "other":
        where, seen = (
            "host code outside of operators",
            "the main thread has no record_function range in these gaps",
        )
        if longest is not None:
            where, seen = f'the range "{longest[0]}"', f"this range takes {span(longest[1])} of the trace"
        draft = FindingDraft("gpu-idle", f"{title} in {where}", view.part(share))
        draft.saw(seen, TRACE if view.trace is not None else CAPTURE)
        draft.change(
            "record Python functions (with_stack=True), or mark parts with torch.profiler.record_function"
            if view.trace is not None
            else "move this code out of the step",
            where=view.line("log", "other"),
        )
    else:
        draft = FindingDraft("gpu-idle", f"{title}, for several causes", view.part(share))
        for cause, ns in sorted(causes.items(), key=lambda item: -item[1]):
            draft.saw(f"{cause}: {percent(ns / capture.wall_ns)}", CAPTURE)
        draft.change(f"begin with the largest part: {main}")
    return draft.done()


def host_idle(view: View) -> Finding | None:
    """A trace without a GPU, in which the processor often computes nothing for the model."""
    capture = view.snapshot.kernels
    if view.trace is None or view.trace.get("unseen") or capture is None or capture.method != "operators":
        return None
    idle = {cause: capture.idle_ns.get(cause, 0) / capture.wall_ns for cause in ("launch gaps", "other")}
    share = sum(idle.values())
    if share < LAUNCH_GAPS:
        return None
    draft = FindingDraft(
        "user-code", f"host code between operators takes {percent(share)} of the time", view.part(share)
    )
    draft.saw(
        f"no operator runs for {percent(idle['launch gaps'])} of the trace within the phases of the model",
        TRACE,
    )
    draft.saw(f"no operator runs for {percent(idle['other'])} of the trace outside of all phases", TRACE)
    draft.change(
        "record Python functions (with_stack=True), or mark parts with torch.profiler.record_function"
    )
    return draft.done()


def _range(view: View, idle_ns: int) -> tuple[str, int] | None:
    """The named range of the host in which most of this idle time may be; None without one that is long enough."""
    name, ns = (view.trace or {}).get("range") or ("", 0)
    return (name, ns) if name and ns >= 0.5 * idle_ns else None


def gpu_unseen(view: View) -> Finding | None:
    """The trace names an accelerator whose time it does not have."""
    unseen = view.trace.get("unseen") if view.trace is not None else None
    if not unseen:
        return None
    draft = FindingDraft("gpu-unseen", "the trace does not show what the accelerator did", None, "certain")
    draft.saw(str(unseen), TRACE)
    return draft.done()
