"""The diagnosis of a snapshot: the findings, closer looks at single steps, and the page with both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.diagnose.view import View
from ndd_engine.record.events import (
    BaselineEvent,
    FunctionsEvent,
    KernelsEvent,
    LoaderEvent,
    StacksEvent,
)
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import MISSING, counted, finite, number, percent, printable, size

from .blocks import (
    Bars,
    Block,
    NamedValues,
    Table,
    Text,
    ns,
)
from .finding import verdict
from .model_work import work_tables
from .run import setting

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
LOADER = "Data loader"
_TOP = 12
_OWN_TIME = "In a usual step; without torch and without other functions of your code."

MOST_EVENTS = 20
Rules = Callable[[Snapshot], tuple[Finding, ...]]


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
    """The functions of a profiled step by their own time, longest first."""
    rows = tuple(
        (
            percent(item.share), ns(item.ns), number(item.calls), item.phase or MISSING,
            f"{item.file}:{item.line} in {item.name}", item.caller,
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
    return Table(title, columns if rows else (), rows, frozenset({0, 1, 2}), note, wide=4, paths=True)


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
    return Table(title, ("share", "phase", "function"), rows, frozenset({0}), wide=2, paths=True)


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


def loader_facts(loader: LoaderEvent) -> NamedValues:
    """The data loader: what an item costs, and whether items can be cached or gathered."""
    cached = "none" if loader.encoded is None else number(loader.encoded)
    gather = ns(loader.gather_ns) + (" per micro-batch" if loader.gather_ns is not None else "")
    if not loader.in_memory:
        gather += ": the dataset cannot gather a whole batch at once"
    differ = "items come from a stream" if loader.stream else "items differ between epochs"
    each = f"{ns(loader.item_ns)}, of which {ns(loader.item_cpu_ns)} CPU time (mean of {loader.probed})"
    return NamedValues.of(
        ("items", f"{number(loader.items or None)}, {cached} cached"),
        ("", f"{differ} and cannot be cached" if loader.epochs_differ else ""),
        ("micro-batch", f"{counted(loader.micro, 'item')}, {size(loader.batch_bytes)}"),
        ("time per item", each if loader.item_ns is not None else MISSING),
        ("collate", f"{ns(loader.collate_ns)} per micro-batch"),
        ("gather", gather),
        title=LOADER,
    )


@dataclass(frozen=True, slots=True)
class DiagnosisResult:
    """Findings, most important first. trouble: the error message if the rules failed."""

    findings: tuple[Finding, ...] = ()
    trouble: str = ""


class Diagnosis:
    """Evaluates the rules and caches the result for the latest snapshot."""

    def __init__(self, rules: Rules = diagnose) -> None:
        self._rules = rules
        self._latest: tuple[Snapshot, DiagnosisResult] | None = None

    def of(self, snapshot: Snapshot) -> DiagnosisResult:
        """The findings of this snapshot. An equal result is the same object as before, so nothing is redrawn."""
        if self._latest is None or self._latest[0] is not snapshot:
            try:
                result = DiagnosisResult(self._rules(snapshot))
            except Exception as error:  # noqa: BLE001  a defect in a rule must not break the screen
                text = " ".join(str(error).split())
                text = printable(f"the diagnosis failed: {type(error).__name__}: {text}")
                result = DiagnosisResult((), text)
            if self._latest is not None and self._latest[1] == result:
                result = self._latest[1]
            self._latest = (snapshot, result)
        return self._latest[1]


def diagnosis_blocks(snapshot: Snapshot, result: DiagnosisResult, name: str, can_try: bool) -> list[Block]:
    """The findings, then the measurements. name: of the run, for the commands."""
    blocks: list[Block] = [Text(result.trouble, "note")] if result.trouble else []
    blocks += [verdict(finding, name, index == 0) for index, finding in enumerate(result.findings)]
    if can_try and any(finding.sets and not finding.leave for finding in result.findings):
        blocks.append(Text("Press t to select one of the settings and measure it.", "note"))
    blocks.append(code(snapshot))
    captured = capture(snapshot.kernels) if snapshot.kernels is not None else []
    blocks += captured or [absent("Profiler capture", "no capture yet; press k")]
    baseline, loader = snapshot.baseline, snapshot.loader
    blocks.append(isolated(baseline) if baseline is not None else absent(ISOLATED, "not measured"))
    blocks.append(loader_facts(loader) if loader is not None else absent(LOADER, "not measured"))
    # On the live screen, they are cut at its edge.
    told = (each.mark for each in snapshot.marks if each.mark.text)
    newest = [(f"step {number(mark.step)}", printable(mark.text)) for mark in told]
    if newest:
        blocks.append(NamedValues(tuple(reversed(newest[-MOST_EVENTS:])), "Newest events"))
    if len(newest) > MOST_EVENTS:
        blocks.append(Text("Earlier events are in the log (l on the live screen) and in the report.", "note"))
    return blocks
