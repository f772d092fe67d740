"""A step in words: its time and compute, its functions, and captures of single steps with their idle time."""

from __future__ import annotations

from dataclasses import replace

from ndd_engine.diagnose.view import View
from ndd_engine.record.events import BaselineEvent, FunctionsEvent, KernelsEvent, StacksEvent, WorkEvent
from ndd_engine.record.figures import setting
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import MISSING, counted, duration, finite, foreign, number, percent, size

from .blocks import Bars, Block, NamedValues, Table, ns
from .model_work import work_tables

# The status in which a run has no speed and no time left.
PAUSED = "paused"
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


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


def flops(value: float | None) -> str:
    """ "1.24 TFLOP/s"."""
    return f"{prefixed(value)}FLOP/s"


def prefixed(value: float | None) -> str:
    """A count with an SI prefix: "4.21 T"."""
    if value is None:
        return f"{MISSING} "
    scale, letter = next(((scale, letter) for scale, letter in _PREFIXES if value >= scale), (1, ""))
    return f"{number(value / scale)} {letter}"


def _of_peak(share: float | None) -> str:
    """Two significant digits below 10 %, since tiny models stay far below 1 %: "34 %", "0.00053 %"."""
    return percent(share) if share is None or share >= 0.1 else f"{share * 100:.2g} %"


def work_texts(snapshot: Snapshot) -> list[str]:
    """FLOP/s, MFU of which peak, or why it is unknown, and the side of the roofline; [] before FLOPs are counted."""
    if snapshot.work is None or snapshot.work.flops_per_step is None or snapshot.status == PAUSED:
        return []
    throughput = snapshot.throughput
    mfu = f"MFU {MISSING}: {foreign(throughput.reason)}"
    if throughput.peak_flops_per_s is not None:
        peak = f"{flops(throughput.peak_flops_per_s)} ({foreign(throughput.peak_kind)} dense)"
        mfu = f"MFU {_of_peak(throughput.mfu)} of {peak}"
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
    mfu = "" if throughput.mfu is None else f", MFU {_of_peak(throughput.mfu)}"
    return flops(throughput.flops_per_s) + mfu


def work_facts(snapshot: Snapshot, work: WorkEvent) -> NamedValues:
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
    return NamedValues.of(
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


METHODS = {
    "events": "CUDA events: gaps between timed spans on the GPU, a lower bound",
    "nvml": "NVML's GPU utilization counter, which does not tell the cause",
    "host": "the host clock: time in which the CPU computes nothing for the model",
    "kernels": "the profiler: the exact union of kernels and copies",
    "operators": "the profiler: the exact union of operators on the host",
}
# Wong's and Tol's colours, distinguishable with any colour vision; the style sheet defines them.
COLOURS = {
    "data_wait": "orange", "to_device": "vermillion", "forward": "sky", "loss": "indigo", "backward": "blue",
    "clip": "teal", "optimizer": "green", "zero_grad": "wine", "log": "rose", "evaluate": "purple",
    "checkpoint": "yellow", "other": "grey", "waiting for data": "orange", "copying": "vermillion",
    "launch gaps": "sky", "synchronising": "indigo", "reading losses": "rose", "evaluation": "purple",
    "between queued kernels": "blue", "collectives": "teal",
}  # fmt: skip
ENGINE = "_engine_run_backward"  # torch's function that runs all of backward
ISOLATED = "Forward and backward pass of one micro-batch"
_TOP = 12
_OWN_TIME = "In a usual step; without torch and without other functions of your code."


def colour(name: str, index: int) -> str:
    """The colour of a phase or cause, or one by its index."""
    return COLOURS.get(name) or list(COLOURS.values())[index % len(COLOURS)]


def absent(title: str, why: str) -> Table:
    """What was not measured, and why."""
    return Table(title, (), (), note=f"{MISSING}: {why}")


def code(snapshot: Snapshot) -> Table:
    """Functions of a profiled step; before there is one, stack samples."""
    if snapshot.functions is not None:
        return functions(snapshot, snapshot.functions)
    if snapshot.stacks is not None and snapshot.stacks.looks:
        return stacks(snapshot.stacks)
    off = setting(snapshot.run, "log", "profile_every_s") == 0
    why = "off: log.profile_every_s is 0" if off else "no step was profiled yet"
    return absent("Functions of your code", why)


def functions(snapshot: Snapshot, profiled: FunctionsEvent) -> Table:
    """The functions of a profiled step by their own time, longest first; of a script, relative to its folder."""
    folder = f"{setting(snapshot.run, 'script', 'folder')}/"
    rows = tuple(
        (
            percent(item.share), ns(item.ns), number(item.calls), item.phase or MISSING,
            f"{item.file.removeprefix(folder)}:{item.line} in {item.name}", item.caller,
        )
        for item in View(replace(snapshot, functions=profiled)).functions[:_TOP]
    )  # fmt: skip
    title = f"Functions of your code, from step {number(profiled.step)} under Python's profiler"
    note = _OWN_TIME if rows else "No function of your code was called."
    workers = setting(snapshot.run, "loader", "workers")
    if isinstance(workers, int) and workers:
        which = "the loader worker" if workers == 1 else f"the {number(workers)} loader workers"
        note += f" Functions in {which} are listed by themselves."
    columns = ("share", "time", "calls", "phase", "function", "called by")
    return Table(title, columns if rows else (), rows, frozenset({0, 1, 2}), note, wide=4)


def stacks(samples: StacksEvent) -> Table:
    """Lines of code in which the training thread was sampled, most frequent first.

    Backward is one call of torch's engine: its modules are in a profiler capture.
    """
    rows = tuple(
        (
            percent((finite(frame[4]) or 0.0) / samples.looks), str(frame[0]),
            "all of backward; by module in a profiler capture"
            if frame[3] == ENGINE else f"{frame[1]}:{frame[2]} in {frame[3]}",
        )
        for frame in samples.frames[:_TOP]
        if len(frame) >= 5 and samples.looks
    )  # fmt: skip
    title = f"Stack samples ({number(samples.looks)}, the latest at step {number(samples.step)})"
    return Table(title, ("share", "phase", "function"), rows, frozenset({0}), wide=2)


def capture(kernels: KernelsEvent, step: int = 0) -> list[Block]:
    """A profiler capture: idle time by cause, and the longest kernels, modules and lines. step: if it names none."""
    if not kernels.wall_ns:
        return []
    wall, steps = kernels.wall_ns, max(kernels.steps, 1)
    causes = {cause: value / wall for cause, value in kernels.idle_ns.items() if value > 0}
    at = f"profiler capture at step {number(kernels.step or step)}"
    note = (
        f"Exact, over {counted(kernels.steps, 'step')} of {ns(wall / steps)}. Measured with "
        f"{METHODS.get(kernels.method, kernels.method)}. Steps are slower under the profiler. Busy "
        f"{percent(kernels.busy_ns / wall)}, of which copying {percent(kernels.copy_ns / wall)}; "
        f"{number(kernels.launches / steps)} launches per step."
    )
    note += f" Trace: {kernels.trace}." if kernels.trace else ""
    rows = []
    for name, *figures in (kernel[:3] for kernel in kernels.top[:_TOP] if len(kernel) >= 3):
        total_ns, calls = (finite(figure) or 0.0 for figure in figures)
        rows.append((percent(total_ns / wall), ns(total_ns / steps), number(calls / steps), str(name)))
    longest = Table(
        f"Longest kernels and operators in the {at}",
        ("share", "time per step", "calls per step", "kernel or operator"),
        tuple(rows),
        frozenset({0, 1, 2}),
    )
    bars = idle_bars(f"Idle {percent(sum(causes.values()))} in the {at}", causes, note)
    return [bars, *([longest] if longest.rows else []), *work_tables(kernels, at)]


def idle_bars(title: str, causes: dict[str, float], note: str) -> Bars:
    """Shares of idle time by cause, largest first."""
    rows = tuple(
        (cause, share, percent(share), colour(cause, index))
        for index, (cause, share) in enumerate(sorted(causes.items(), key=lambda item: -item[1]))
    )
    return Bars(title, rows, note)


def isolated(baseline: BaselineEvent) -> NamedValues:
    """One micro-batch alone, as measured before training."""
    other = None
    if baseline.other_micro is not None:
        other = f"{ns(baseline.other_ns)} for {counted(baseline.other_micro, 'item')}"
    pairs = [pair for pair in baseline.by_threads if len(pair) >= 2]
    threads = ", ".join(f"{number(count)}: {ns(value)}" for count, value, *_ in pairs)
    time = f"{ns(baseline.micro_ns)} for {counted(baseline.micro, 'item')}, fastest of {baseline.runs}"
    return NamedValues.of(
        ("time", time),
        ("another size", other),
        ("operators", number(baseline.operations) if baseline.operations is not None else ""),
        ("threads", f"{number(baseline.threads)} in this run; {threads}" if threads else ""),
        title=ISOLATED,
    )
