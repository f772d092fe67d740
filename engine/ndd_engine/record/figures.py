"""Values derived from several events: phase shares, idle time, memory headroom, throughput, the time left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, sqrt
from statistics import fmean
from typing import Any

from ndd_engine.text import counted, percent, printable, size

from .event import ASIDES, EXCHANGE, SHARED, SKEW, Count, DeathEvent, Json, Ranks
from .events import (
    PHASES,
    KernelsEvent,
    MemoryEvent,
    RanksEvent,
    RunEvent,
    SampleEvent,
    SettingEvent,
    WindowEvent,
    WorkEvent,
)
from .snapshot import CoreUse, Headroom, Idle, NotFinite, PhaseShare, Snapshot, Throughput, TimeLeft

# Causes of idle time, in display order.
IDLE_CAUSES = (
    WAITING_FOR_DATA := "waiting for data",
    COPYING := "copying",
    LAUNCH_GAPS := "launch gaps",
    QUEUED := "between queued kernels",
    SYNCHRONISING := "synchronising",
    COLLECTIVES := "collectives",
    EVALUATION_OR_CHECKPOINT := "evaluation or checkpoint",
    OTHER_CAUSE := "other",
)
# Kinds of copies and fills on a GPU. "Pinned" where a trace says so of the host's memory.
COPY_KINDS = (
    TO_GPU := "host to GPU",
    PINNED_TO_GPU := "pinned host to GPU",
    TO_HOST := "GPU to host",
    TO_PINNED_HOST := "GPU to pinned host",
    BETWEEN_GPUS := "GPU to GPU",
    OTHER_COPY := "other copy",
    WITHIN_GPU := "within the GPU",
    FILL := "fill",
)
# An evaluation computes, so by the clocks only checkpoints count as idle.
CHECKPOINT = "checkpoint"
# Phases in which the host computes nothing for the model (runs on the CPU).
HOST_IDLE = {
    "data_wait": WAITING_FOR_DATA,
    "to_device": COPYING,
    EXCHANGE: COLLECTIVES,
    SKEW: COLLECTIVES,
    "checkpoint": CHECKPOINT,
    "log": OTHER_CAUSE,
    "other": OTHER_CAUSE,
}
# Phases without kernel launches: gaps on the device clock. Copies do not count as idle; in `log` the host
# synchronises to read losses back.
DEVICE_IDLE = {
    "data_wait": WAITING_FOR_DATA,
    "log": SYNCHRONISING,
    "other": OTHER_CAUSE,
}
# Phases that launch kernels. If the device takes as long as the host in them, it may be waiting for launches.
LAUNCHING = frozenset({"forward", "loss", "backward", "clip", "optimizer", "zero_grad"})
# Minimum ratio of device to host time in these phases for that.
KEEPS_PACE = 0.95
# How long a profiler capture is representative, in run time.
CAPTURE_VALID_NS = 300e9
NOTHING_YET = "nothing measured yet"
PRESS_K = ": press k"
GRAPH_REASON = "not measurable with a CUDA graph" + PRESS_K
LOWER_BOUND = "a lower bound: launch gaps are not included" + PRESS_K
# Maximum share of the free memory for a predicted micro-batch; the rest is for fragmentation.
SAFE_SHARE = 0.9


def phase_shares(windows: Sequence[WindowEvent]) -> tuple[PhaseShare, ...]:
    """All phases over the windows, in the order of PHASES, with sub-phases after their parent."""
    wall = sum(window.wall_ns for window in windows)
    if not wall:
        return ()
    steps = sum(window.steps for window in windows) or 1
    host: dict[str, int] = {}
    device: dict[str, float] = {}
    device_steps = 0
    for window in windows:
        device_steps += window.device_steps
        for name, figures in window.phases.items():
            host[name] = host.get(name, 0) + figures["host_ns"]
            if figures.get("device_ns") is not None:
                weight = 1 if name in ASIDES else window.device_steps
                device[name] = device.get(name, 0.0) + figures["device_ns"] * weight
    return tuple(
        PhaseShare(
            name=name,
            host_ns=host[name] / steps,
            share=host[name] / wall,
            p50_ns=middle(_of_steps(name, "p50_ns", windows)),
            p95_ns=middle(_of_steps(name, "p95_ns", windows)),
            max_ns=max((value for value, _ in _of_steps(name, "max_ns", windows)), default=None),
            device_ns=device[name] / count
            if name in device and (count := steps if name in ASIDES else device_steps)
            else None,
            share_error=share_error(_parts(name, windows)),
        )
        for name in sorted(host, key=place_in_step)
    )


def place_in_step(phase: str) -> tuple[int, int, str]:
    """Orders the names of phases as in a step, sub-phases after their phase."""
    base = phase.partition("/")[0]
    return PHASES.index(base) if base in PHASES else len(PHASES), phase.count("/"), phase


def middle(values: Iterable[tuple[int, int]]) -> int | None:
    """The weighted median of (value, weight); None without weight."""
    known = sorted((value, weight) for value, weight in values if weight)
    half = sum(weight for _, weight in known) / 2
    for value, weight in known:
        half -= weight
        if half <= 0:
            return value
    return None


def _of_steps(name: str, figure: str, windows: Sequence[WindowEvent]) -> list[tuple[int, int]]:
    """(a figure of a phase, number of steps) of each window that has both."""
    found = [(window.phases.get(name, {}).get(figure), window.steps) for window in windows if window.steps]
    return [(value, steps) for value, steps in found if value is not None]


def _parts(name: str, windows: Sequence[WindowEvent]) -> list[tuple[float, float]]:
    """(time of a phase, wall time) of each window with steps."""
    return [
        (float(window.phases[name]["host_ns"]) if name in window.phases else 0.0, float(window.wall_ns))
        for window in windows
        if window.steps and window.wall_ns
    ]


def share_error(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Standard error of a phase's share of wall time, from its variation between windows: (phase, wall time) of each.

    At least the influence of any single window: one slow window is not evidence of a constant cost.
    """
    if len(pairs) < 3:
        return None
    count, wall = len(pairs), sum(whole for _, whole in pairs)
    share = sum(part for part, _ in pairs) / wall
    beyond = [part - share * whole for part, whole in pairs]
    spread = sqrt(count / (count - 1) * sum(value * value for value in beyond)) / wall
    # Largest change of the share when a single window is left out.
    alone = max(abs(value) / max(wall - whole, 1.0) for value, (_, whole) in zip(beyond, pairs, strict=True))
    return max(spread, alone)


def shares_across(
    shares: Sequence[PhaseShare],
    windows: Sequence[WindowEvent],
    ranks: Ranks,
    events: Sequence[RanksEvent],
) -> tuple[PhaseShare, ...]:
    """The phases of a run with several ranks: means over the ranks, which add up to the step.

    shares: those of rank 0, whose phases include its waiting for others. Percentiles are not known over all ranks.
    events: of the ranks. Exchange and skew follow the phases that compute.
    """
    wall_ns = sum(window.wall_ns for window in windows) / (sum(window.steps for window in windows) or 1)
    mine = {share.name: share for share in shares}
    means = {**ranks.phases, EXCHANGE: ranks.exchange_ns, SKEW: ranks.skew_ns}
    at = PHASES.index("log")
    found = []
    for name in (*PHASES[:at], *SHARED, *PHASES[at:]):
        if name in ASIDES:
            found += [mine[name]] if name in mine else []
        elif name in means:
            found.append(
                PhaseShare(
                    name=name,
                    host_ns=means[name],
                    share=means[name] / (wall_ns or ranks.step_ns or 1.0),
                    p50_ns=None,
                    p95_ns=None,
                    max_ns=None,
                    device_ns=mine[name].device_ns if name in mine else None,
                    share_error=share_error(_parts_across(name, events)),
                )
            )
    return tuple(found)


def _parts_across(name: str, events: Sequence[RanksEvent]) -> list[tuple[float, float]]:
    """The same as means over the ranks, which include exchange and skew."""
    found = []
    for event in events:
        mean_us = event.columns_us[name][2] if name in event.columns_us else 0.0
        spent = {EXCHANGE: event.exchange_ns, SKEW: event.skew_ns}.get(name, mean_us * 1e3 * event.steps)
        if event.steps and event.wall_ns:
            found.append((float(spent), float(event.wall_ns)))
    return found


def memory_bytes(run: RunEvent | None, sample: SampleEvent) -> int | None:
    """Resident memory of a run on the CPU; None for a run on a GPU, which has memory events."""
    if run is None or on_gpu(run):
        return None
    value = sample.host.get("rss_bytes")
    return int(value) if value is not None else None


def core_use(usable: float | None, samples: Sequence[SampleEvent]) -> CoreUse | None:
    """Mean CPU use over the samples that contain total and own use; None if there are none. usable: cores."""
    known = [
        sample.host
        for sample in samples
        if sample.host.get("cpu_percent") is not None and sample.host.get("process_cpu_percent") is not None
    ]
    if not usable or not known:
        return None
    used = fmean(host["cpu_percent"] for host in known) / 100 * usable
    own = fmean(host["process_cpu_percent"] + (host.get("ranks_cpu_percent") or 0.0) for host in known) / 100
    throttled = [host["cpu_throttled"] for host in known if host.get("cpu_throttled") is not None]
    newest = next((host["neighbours"] for host in reversed(known) if host.get("neighbours")), ())
    return CoreUse(
        used=used,
        by_run=own,
        others=max(used - own, 0.0),
        usable=usable,
        samples=len(known),
        neighbours=tuple((item["pid"], item["name"], item["cores"]) for item in newest),
        throttled=fmean(throttled) if throttled else None,
        stoppable=tuple(item["pid"] for item in newest if item.get("stoppable")),
    )


def others_text(use: CoreUse, verb: str = "use") -> str:
    """ "other processes use 1.2 of 2 cores, mainly python"; with less than half of that: "…, python among them"."""
    text = f"other processes {verb} {use.others:.1f} of {use.usable:g} cores"
    if not use.neighbours:
        return text
    _, name, cores = use.neighbours[0]
    return (
        f"{text}, mainly {printable(name)}"
        if cores >= use.others / 2
        else f"{text}, {printable(name)} among them"
    )


def idle(
    run: RunEvent | None,
    windows: Sequence[WindowEvent],
    shares: Sequence[PhaseShare],
    sample: SampleEvent | None,
    kernels: KernelsEvent | None = None,
) -> Idle:
    """Idle share by the best available method: a recent profiler capture, the device clock, NVML or the host clock.

    The device clock cannot measure idle time within the replay of a CUDA graph.
    """
    if run is None:
        return Idle(None, "host", (), NOTHING_YET)
    aside = {share.name: share.share for share in shares if share.name in ("evaluate", "checkpoint")}
    if kernels is not None and _still_valid(kernels, windows):
        return _of_capture(kernels, aside)
    if not shares:
        return Idle(None, "host", (), NOTHING_YET)
    if not on_gpu(run):
        found = [(HOST_IDLE[each.name], each.share) for each in shares if each.name in HOST_IDLE]
        return _summed("host", found)
    graphed = any(share.name == "forward/graph" for share in shares)
    if not graphed and any(share.device_ns for share in shares if share.name not in ASIDES):
        return _by_events(shares, aside)
    util = sample.gpu.get("util_percent") if sample and sample.gpu else None
    if util is not None:
        return Idle(1 - util / 100, "nvml", ())
    return Idle(None, "events", (), GRAPH_REASON if graphed else "no device clock and no NVML")


def bad_loss_text(known: NotFinite) -> str:
    """ "NaN since step 500"; "since about step 500" where not each loss was seen. Of losses that are not finite."""
    assert known.loss is not None
    value, first, before, *_ = known.loss
    if known.since is not None and (before or 0) <= known.since <= first:
        return f"{value} since step {known.since:,}"
    exact = first <= (1 if before is None else before + 1)
    return f"{value} since {'' if exact else 'about '}step {first:,}"


def death_text(event: DeathEvent) -> str:
    """ "loader worker 2 (pid 4711) was killed by SIGKILL at step 12; it had 3.1 GiB of memory".

    The step is that of the training: the process itself may have trained as well.
    """
    how = f"ended with {event.how}" if event.how.startswith("status") else f"was killed by {event.how}"
    who = f"{printable(event.name)} (pid {event.pid})"
    when = f"at step {event.step:,}" if event.step else "before the first step"
    text = f"{who} {printable(how) if event.how else 'died'} {when}"
    return "; ".join((text, *death_figures(event)))


def death_figures(event: DeathEvent) -> list[str]:
    """What is known of the memory when a process died, in words."""
    parts = []
    if event.doing:
        parts.append(f"it was making {printable(event.doing)}")
    if event.resident_bytes:
        parts.append(f"it had {size(event.resident_bytes)} of memory")
    if event.oom_kills:
        parts.append(f"the kernel's out-of-memory counter of the control group rose by {event.oom_kills}")
    elif event.oom_kills == 0 and event.how == "SIGKILL":
        parts.append("the kernel's out-of-memory counter of the control group did not rise")
    if event.how == "SIGBUS" and event.shm_free_bytes is not None:
        parts.append(f"/dev/shm has {size(event.shm_free_bytes)} free")
    return parts


def capture_text(kernels: KernelsEvent) -> str:
    """A profiler capture in one line: "profiler capture of 3 steps (kernels): GPU idle 63 % (launch gaps 57 %); …"."""
    what = "GPU" if kernels.method == "kernels" else "compute"
    wall = max(kernels.wall_ns, 1)
    idle_share = percent(1 - kernels.busy_ns / wall)
    text = (
        f"profiler capture of {counted(kernels.steps, 'step')} ({kernels.method}): {what} idle {idle_share}"
    )
    causes = [f"{cause} {percent(ns / wall)}" for cause, ns in kernels.idle_ns.items() if ns / wall >= 0.005]
    text += f" ({', '.join(causes)})" if causes else ""
    if kernels.top:
        name, ns, _ = kernels.top[0]
        text += f"; longest: {name[:60]} {percent(ns / wall)}"
    return text + (f"; trace in {kernels.trace}" if kernels.trace else "")


def _still_valid(kernels: KernelsEvent, windows: Sequence[WindowEvent]) -> bool:
    """Whether the capture is recent enough."""
    steps = sum(window.steps for window in windows)
    if not steps or kernels.wall_ns <= 0:
        return kernels.wall_ns > 0
    since = max(windows[-1].step - kernels.step, 0)
    return since * sum(window.wall_ns for window in windows) / steps <= CAPTURE_VALID_NS


def _of_capture(kernels: KernelsEvent, aside: Mapping[str, float]) -> Idle:
    """Idle time by a profiler capture, for the time spent in steps; captures do not cover the rest."""
    stepping = max(1 - sum(aside.values()), 0.0)
    found = [(cause, ns / kernels.wall_ns * stepping) for cause, ns in kernels.idle_ns.items()]
    if kernels.exposed_ns:
        # The GPU runs a kernel, but it only exchanges data with other GPUs or waits for them.
        found.append((COLLECTIVES, kernels.exposed_ns / kernels.wall_ns * stepping))
    if aside.get("checkpoint"):
        found.append((CHECKPOINT, aside["checkpoint"]))
    method = kernels.method if kernels.method in ("kernels", "operators") else "kernels"
    return replace(_summed(method, found), step=kernels.step)


def _by_events(shares: Sequence[PhaseShare], aside: Mapping[str, float]) -> Idle:
    timed = [
        share
        for share in shares
        if share.device_ns is not None and "/" not in share.name and share.name not in ASIDES
    ]
    total = sum(share.device_ns or 0.0 for share in timed)
    if total <= 0:
        return Idle(None, "events", (), NOTHING_YET)
    # What is outside of the steps is a share of the wall time, which is that of the host.
    stepping = max(1 - sum(aside.values()), 0.0)
    found = [
        (DEVICE_IDLE[share.name], (share.device_ns or 0.0) / total * stepping)
        for share in timed
        if share.name in DEVICE_IDLE
    ]
    if "checkpoint" in aside:
        found.append((CHECKPOINT, aside["checkpoint"]))
    launching = [share for share in timed if share.name in LAUNCHING]
    host, device = sum(each.host_ns for each in launching), sum(each.device_ns or 0.0 for each in launching)
    # A device that is always busy lags behind the host, which then waits for it elsewhere.
    paced = host > 0 and KEEPS_PACE <= device / host <= 1 / KEEPS_PACE
    return replace(_summed("events", found), reason=LOWER_BOUND if paced else "")


def _summed(method: str, found: Sequence[tuple[str, float]]) -> Idle:
    """Idle time with one entry per cause, in display order."""
    order = (*IDLE_CAUSES[:-1], CHECKPOINT, IDLE_CAUSES[-1])
    sums: dict[str, float] = {}
    for cause, share in found:
        sums[cause] = sums.get(cause, 0.0) + share
    causes = sorted(sums.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    return Idle(sum(sums.values()), method, tuple(causes))


def headroom(run: RunEvent | None, sample: SampleEvent | None, memory: MemoryEvent | None) -> Headroom:
    """Free and used memory of the GPU, or of the host if the run is on the CPU."""
    if run is not None and on_gpu(run):
        gpu = (sample.gpu if sample else None) or {}
        free, total, others = (
            value if (value := getattr(memory, name, None)) is not None else gpu.get(f"memory_{name}")
            for name in ("free_bytes", "total_bytes", "others_bytes")
        )
        used = memory.reserved_bytes if memory else None
        peak = memory.peak_reserved_bytes if memory else None
        return Headroom(free, total, used, others, peak, _fits(run, free, memory), "gpu")
    host = sample.host if sample else {}
    limit = host.get("memory_limit_bytes")
    available = host.get("memory_available_bytes")
    used = host.get("rss_bytes") or None  # 0 after its end
    if used is not None:
        used += host.get("workers_rss_bytes") or 0
    others = None
    if limit is not None and available is not None and used is not None:
        others = max(limit - available - used, 0)
    return Headroom(available, limit, used, others, None, None, "host")


def _fits(run: RunEvent, free: int | None, memory: MemoryEvent | None) -> int | None:
    """Predicted largest micro-batch that fits, assuming that activations are proportional to its size."""
    if free is None or memory is None or not memory.growth_bytes:
        return None
    micro = run.config.get("batch", {}).get("micro")
    if not micro:
        return None
    cached = max(memory.reserved_bytes - memory.allocated_bytes, 0)
    # Gradients are allocated within a step too, but do not grow with the micro-batch (parameters are fp32).
    gradients = 4 * run.parameters
    activations = memory.growth_bytes - gradients
    if activations <= 0:
        return None
    return max(int((free + cached - gradients) * SAFE_SHARE / (activations / micro)), 0)


def setting_text(setting: SettingEvent) -> str:
    """One setting in one line: "loader.pin_memory = true, not in effect: no CUDA GPU"."""
    asked = f"{setting.name} = {setting.requested}"
    if setting.applied != setting.requested:
        asked += f", applied as {setting.applied}"
    states = {True: ", in effect", False: ", not in effect", None: ", default"}
    return asked + states[setting.in_effect] + (f": {setting.verified}" if setting.verified else "")


def throughput(work: WorkEvent | None, step_ns: float | None) -> Throughput:
    """FLOP rate of an optimizer step and its position on the GPU's roofline."""
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


# Estimates of a capture say something of a step if at least this part of its kernels have one.
ESTIMATED = 0.8


def estimated_rate(snapshot: Snapshot) -> tuple[float, float] | None:
    """(least, most) items a second of a GPU that always computes, as its kernels are estimated; None if unknown."""
    found, items_per_s, step_ns = snapshot.kernels, snapshot.items_per_s, snapshot.step_ns
    if found is None or not found.steps or not found.busy_ns or not items_per_s or not step_ns:
        return None
    kernels = found.estimated_ns
    measured = kernels.get("measured", 0)
    if not measured or measured < ESTIMATED * kernels["kernels"]:
        return None
    items = items_per_s * step_ns * found.steps / found.busy_ns
    return items * measured / kernels["high"], items * measured / kernels["low"]


def figures(snapshot: Snapshot) -> Json:
    """The measured and derived figures of a run as JSON; units are in the names, null is unknown."""
    found = snapshot.throughput
    return {
        "step_s": snapshot.step_ns * 1e-9 if snapshot.step_ns is not None else None,
        "micro_steps_per_step": snapshot.micro_steps,
        "steps_per_s": snapshot.steps_per_s,
        "items_per_s": snapshot.items_per_s,
        "estimated_items_per_s": estimated_rate(snapshot),
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


@dataclass(slots=True)
class Aside:
    """Number and total time of evaluations, or of checkpoints.

    One may span several windows; its time counts when its mark reports that it is done. count: done, with their time in
    total_ns. last_step: of the newest one. open_ns: time of one that is not done, or whose last window is missing.
    done: marks whose last window is missing.
    """

    count: Count = 0
    total_ns: Count = 0
    last_step: Count = 0
    open_ns: Count = 0
    done: Count = 0

    def window(self, host_ns: int, done: int = 0) -> None:
        """Add the time in a window. done: how many ended in it, where there are no marks."""
        self.open_ns += host_ns
        self.done += done
        if self.done and self.open_ns:
            self.count += self.done
            self.total_ns += self.open_ns
            self.open_ns = self.done = 0

    def mark(self, step: int) -> None:
        """One is done."""
        self.done += 1
        self.last_step = step

    def resume(self, step: int) -> None:
        """The run resumes from `step`, where none is due again; drop an unfinished one."""
        self.open_ns = self.done = 0
        self.last_step = step

    @property
    def mean_s(self) -> float | None:
        """Mean seconds of one, None if none was measured."""
        return self.total_ns / self.count * 1e-9 if self.count else None


def time_left(
    run: RunEvent, step: int, step_ns: float, evaluations: Aside, checkpoints: Aside, ended: bool = False
) -> TimeLeft:
    """Remaining steps at `step_ns` each, and remaining evaluations and checkpoints at their mean measured time.

    ended: the run has ended; nothing that is due at `step` remains. What remains is unknown if the run's length is.
    """
    if not run.total_steps:
        return TimeLeft(evaluation_s=evaluations.mean_s, checkpoint_s=checkpoints.mean_s)
    steps_s = max(run.total_steps - step, 0) * step_ns * 1e-9
    evaluating, saving = _section(run, "evaluate"), _section(run, "checkpoint")
    evaluate = due(evaluating, run, step, step if ended else evaluations.last_step)
    save = due(saving, run, step, step if ended else checkpoints.last_step)
    seconds = steps_s + evaluate * (evaluations.mean_s or 0.0)
    minutes = saving.get("every_minutes")
    if isinstance(minutes, (int, float)) and minutes > 0:
        save += _by_the_clock(saving, run, step, max(int(minutes * 60e9 / max(step_ns, 1.0)), 1))
    seconds += save * (checkpoints.mean_s or 0.0)
    return TimeLeft(seconds, evaluate, evaluations.mean_s, save, checkpoints.mean_s)


def due(section: Json, run: RunEvent, step: int, last: int) -> int:
    """Number of evaluations or checkpoints from `step` (if `last` was before it) to the end of the run.

    section: the [evaluate] or [checkpoint] section of the configuration.
    """
    total = run.total_steps
    periods = [_count(section, "every_steps"), _count(section, "every_epochs") * run.steps_per_epoch]
    first = step if last == step else step - 1  # one may still be due at `step` itself
    found = sum(_multiples(period, first, total) for period in periods)
    both = lcm(*periods) if all(periods) else 0
    found -= _multiples(both, first, total)
    at_total = any(period and total % period == 0 for period in periods)
    if section.get("at_end") and not at_total and total > first:
        found += 1
    return found


def _by_the_clock(section: Json, run: RunEvent, step: int, every: int) -> int:
    """Additional checkpoints by every_minutes: one after `every` steps without any other checkpoint."""
    periods = [_count(section, "every_steps"), _count(section, "every_epochs") * run.steps_per_epoch]
    remaining = max(run.total_steps - step, 0)
    period = min((period for period in periods if period), default=remaining)
    if not period:
        return 0
    first = min(period - step % period if any(periods) else remaining, remaining)
    whole, tail = divmod(remaining - first, period)
    return (first - 1) // every + whole * ((period - 1) // every) + max(tail - 1, 0) // every if first else 0


def _multiples(period: int, first: int, last: int) -> int:
    """Number of positive multiples of `period` above `first` and up to `last`."""
    return max(last // period - max(first, 0) // period, 0) if period > 0 else 0


def on_gpu(run: RunEvent | None) -> bool:
    return run is not None and run.device.startswith("cuda")


def is_script(run: RunEvent | None) -> bool:
    return run is not None and "script" in run.config


def setting(run: RunEvent | None, section: str, key: str) -> Any:
    """A value of the resolved configuration; None if it is missing."""
    return None if run is None else _section(run, section).get(key)


def _section(run: RunEvent, name: str) -> Json:
    found = run.config.get(name) if isinstance(run.config, dict) else None
    return found if isinstance(found, dict) else {}


def _count(section: Json, key: str) -> int:
    value = section.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def obeyed(run: RunEvent | None) -> tuple[str, ...]:
    """What the framework of an observed script does on request: "checkpoint" and "evaluate"."""
    script = {} if run is None else run.config.get("script") or {}
    return tuple(script.get("obeys") or ())
