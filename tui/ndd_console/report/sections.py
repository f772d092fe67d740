"""The sections of a report, but for those of times: the verdict, gains, the run, learning, memory, machine, events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ndd_console.view.style import STATUS
from ndd_console.words.blocks import (
    TONES,
    Block,
    Page,
    ReportSection,
    SpanRow,
    Spans,
    Table,
    Text,
    clip,
    moment,
    ns,
    small,
)
from ndd_console.words.finding import finding_blocks
from ndd_console.words.machine import cores_facts
from ndd_console.words.memory import memory_facts
from ndd_console.words.run import ended_text, run_facts
from ndd_console.words.settings import differences, settings_blocks
from ndd_console.words.step import isolated
from ndd_console.words.trial import trials_blocks
from ndd_console.words.workers import loader_facts
from ndd_engine.diagnose import CAUSES
from ndd_engine.record.events import MarkEvent
from ndd_engine.record.figures import is_script, on_gpu, setting
from ndd_engine.record.file import damage_text
from ndd_engine.text import MISSING, duration, number, percent, printable

from . import timings
from .model import Report, RunMoment, pauses

# A record may hold anything: a section that cannot be shown does not cost the page.
_DAMAGE = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError)

_EVALUATIONS = 40  # rows of their table
_OWN = 24  # maximum number of plots of logged values
_METRICS = 6  # maximum number of metrics shown
_GPU_MEMORY = (
    ("reserved_bytes", "reserved by the allocator", "orange"),
    ("allocated_bytes", "allocated", "blue"),
    ("peak_allocated_bytes", "peak allocated", "sky"),
    ("free_bytes", "free on the GPU", "green"),
    ("others_bytes", "used by other processes", "purple"),
)
_HOST_MEMORY = (
    ("host rss_bytes", "this process (RSS)", "blue"),
    ("host workers_rss_bytes", "loader workers (RSS)", "orange"),
)
_UTILIZATION = (
    ("host cpu_percent", "usable cores, all processes", "orange"),
    ("gpu util_percent", "GPU (NVML counter)", "blue"),
)
_SENSORS = (
    ("gpu temperature_c", "GPU temperature", "°C", "vermillion"),
    ("gpu power_w", "GPU power", "W", "orange"),
    ("gpu sm_clock_mhz", "GPU clock", "MHz", "green"),
)
_ROWS = 60
_SPAN_ROWS = 24
_FIGURES = frozenset({0, 1})
_HOVER = 160  # characters of a text under the pointer
# Kind of a mark -> (name of its row, colour).
_MARKS = {
    "evaluation": ("evaluations", "purple"),
    "checkpoint": ("checkpoints", "green"),
    "warning": ("warnings", "vermillion"),
    "error": ("errors", "vermillion"),
    "compile": ("compilations", "indigo"),
    "recompile": ("recompilations", "wine"),
}
_LISTED = (*_MARKS, "pause", "resume", "choice", "note")
Period = tuple[float, float, str]


def page(report: Report) -> Page:
    snapshot, tried = report.snapshot, [trial for _, trial in report.data.trials]
    parts: tuple[tuple[str, str, Callable[[Report], list[Block]]], ...] = (
        ("verdict", "Verdict", verdict),
        ("trials", "Measured gains", lambda _: trials_blocks(tried, report.name)),
        ("run", "Run", identity),
        ("time", "Where the time goes", timings.phases),
        ("ranks", "Ranks", timings.ranks),
        ("idle", "Idle time by cause", timings.idle),
        ("speed", "Throughput and compute", timings.speed),
        ("learning", "Learning", learning),
        ("memory", "Memory", memory),
        ("machine", "Machine", machine),
        ("findings", "Findings over time", findings),
        ("events", "Events", events),
        ("settings", "Settings", lambda _: settings_blocks(snapshot)),
        ("methods", "How it was measured", timings.methods),
    )
    run = snapshot.run
    words = [run.workload, run.device_name, run.precision] if run is not None else []
    shown = (ReportSection(key, title, _guarded(build, report)) for key, title, build in parts)
    return Page(
        name=report.name,
        subtitle=", ".join(str(word) for word in words if word),
        status=(snapshot.status, TONES.get(STATUS.get(snapshot.status, ("", ""))[1], "")),
        summary=ended_text(snapshot, report.data.preparation_s),
        made=f"written {moment(report.made_t)} from {number(report.data.bytes_read)} bytes of record",
        sections=tuple(section for section in shown if section.blocks),
    )


def _guarded(build: Callable[[Report], list[Block]], report: Report) -> tuple[Block, ...]:
    try:
        return tuple(block for block in build(report) if not isinstance(block, Table) or block.rows)
    except _DAMAGE as error:
        text = f"This part of the record cannot be shown: {type(error).__name__}: {error}"
        return (Text(text, "warn"),)


def verdict(report: Report) -> list[Block]:
    """Every finding, the bottleneck first."""
    out = finding_blocks(report.diagnosis, report.name)
    if any(finding.share is not None for finding in report.diagnosis.findings):
        text = "Shares and ceilings of the findings are those of the most recent part of the record."
        out.append(Text(text, "note"))
    return out or [Text("No findings.", "note")]


def identity(report: Report) -> list[Block]:
    """Model, data, machine, versions, and the configuration that differs from the defaults."""
    snapshot, data = report.snapshot, report.data
    run = snapshot.run
    damage: list[Block] = [Text(f"{damage_text(data.skipped)}.", "warn")] if data.skipped else []
    if run is None:
        text = "Model, data and machine were not recorded"
        return [*damage, Text(f"{text}." if damage else f"{text}: the run was not prepared.", "note")]
    times = (
        (data.preparation_s, "of preparation"),
        (snapshot.elapsed_s, "of training with evaluations and checkpoints"),
        (report.paused_s, "paused"),
    )
    resumed = tuple((at.step, at.t) for at in data.resumed)
    facts = run_facts(snapshot, run, times, resumed, report.directory.path)
    out: list[Block] = [*damage, facts]
    if snapshot.dropped_events:
        out.append(Text(f"{number(snapshot.dropped_events)} events could not be written.", "warn"))
    # A script has no configuration with defaults.
    return out if is_script(run) else [*out, differences(run)]


def learning(report: Report) -> list[Block]:
    """Training and evaluation loss, the other metrics, and the table of evaluations."""
    data, every = report.data, setting(report.snapshot.run, "log", "every_steps")
    names = [name.removeprefix("metric ") for name in data.curves if name.startswith("metric ")][:_METRICS]
    trained = report.line("loss", "training", "blue", band=True)
    evaluated = report.line("metric loss", "evaluation", "vermillion", dots=True) if "loss" in names else None
    note = f"Read back every {'few' if every is None else number(every)} steps."
    if trained and trained.bands:
        note += " The band spans the lowest and highest value around each point."
    out = report.plot("Loss", "plain", trained, evaluated, log_above=50, note=note)
    out = out or [Text("No loss was recorded.", "note")]
    for name in names:
        if name != "loss":
            dots = report.line(f"metric {name}", name, "vermillion", dots=True)
            out += report.plot(f"Evaluation: {name}", "plain", dots, height=120)
    if evaluations := data.marked("evaluation"):
        out.append(_evaluations(report, evaluations, names))
    for key, title in (("lr", "Learning rate"), ("grad_norm", "Gradient norm"), ("loss_scale", "Loss scale")):
        points = data.curves[key].points
        if len({(point.low, point.high) for point in points}) == 1:
            out.append(Text(f"{title}: {small(points[0].mean)} throughout."))
        else:
            line = report.line(key, title.lower(), "green", band=True)
            out += report.plot(title, "plain", line, height=120)
    return [*out, *_own(report)]


def _own(report: Report) -> list[Block]:
    """What the user's own training code logged, and its newest samples."""
    out: list[Block] = []
    names = [name.removeprefix("own ") for name in report.data.curves if name.startswith("own ")]
    for name in names[:_OWN]:
        line = report.line(f"own {name}", printable(name), "green", band=True)
        out += report.plot(f"Logged: {printable(name)}", "plain", line, height=120)
    if len(names) > _OWN:
        out.append(Text(f"{_OWN} of {len(names):,} logged values.", "note"))
    if (texts := report.data.texts) is not None:
        rows = [
            (str(index) if line == 0 else "", printable(part))
            for index, text in enumerate(texts.texts, 1)
            for line, part in enumerate(text.split("\n"))
        ]
        out.append(Table(f"Samples at step {number(texts.step)}", ("", "text"), tuple(rows), wide=1))
    return out


def _evaluations(report: Report, evaluations: list[tuple[RunMoment, MarkEvent]], names: list[str]) -> Table:
    best = report.snapshot.best
    # Evenly spaced over the run, with the last and the best one.
    kept = {round(index * (len(evaluations) - 1) / (_EVALUATIONS - 1)) for index in range(_EVALUATIONS)}
    rows = []
    for index, (at, mark) in enumerate(evaluations):
        is_best = best is not None and at.step == best.step
        if len(evaluations) <= _EVALUATIONS or index in kept or is_best:
            metrics = mark.data.get("metrics") or {}
            values = (metrics.get(name) for name in names)
            figures = (small(value, 4) if isinstance(value, (int, float)) else MISSING for value in values)
            took = duration(mark.data.get("seconds"))
            rows.append((number(at.step), duration(at.x), *figures, took, "best" if is_best else ""))
    columns = ("step", "after", *names, "took", "")
    all_shown = len(rows) == len(evaluations)
    note = "" if all_shown else f"{len(rows):,} of {number(len(evaluations))} evaluations."
    return Table("Evaluations", columns, tuple(rows), frozenset(range(len(columns) - 1)), note)


def memory(report: Report) -> list[Block]:
    """Memory over time on the GPU and the host, and what is left."""
    snapshot = report.snapshot
    out: list[Block] = []
    gpu = (("GPU memory", _GPU_MEMORY),) if on_gpu(report.data.run) else ()
    for title, names in (*gpu, ("Host memory", _HOST_MEMORY)):
        lines = [item for name in names if (item := report.line(*name)) and any(item.values)]
        out += report.plot(title, "bytes", *lines, zero=True)
    lowest = [point.low for point in report.data.curves["host memory_available_bytes"].points]
    facts = memory_facts(snapshot, min(lowest, default=None))
    if not out and all(text == MISSING for _, text in facts.rows):
        return [Text("Memory was not recorded.", "note")]
    return [*out, facts]


def machine(report: Report) -> list[Block]:
    """Utilization of CPU and GPU, other processes, and what was measured before training."""
    snapshot = report.snapshot
    out: list[Block] = []
    busy = [report.line(*names, 0.01) for names in _UTILIZATION]
    out += report.plot("Utilization", "share", *busy, zero=True, height=140)
    for name, title, unit, tint in _SENSORS:
        out += report.plot(title, "plain", report.line(name, title, tint, band=True), unit=unit, height=120)
    if cores := snapshot.cores:
        out.append(cores_facts(cores))
    out += _collections(report)
    if snapshot.loader is not None:
        out.append(loader_facts(snapshot.loader))
    if snapshot.baseline is not None:
        out.append(isolated(snapshot.baseline))
    return out or [Text("The machine was not recorded.", "note")]


def _collections(report: Report) -> list[Block]:
    data = report.data
    whole = data.timeline.whole
    if not data.gc_watched:
        return []
    if whole.gc_ns <= 0:
        return [Text("Python's garbage collector did not run during training.")]
    share = whole.gc_ns / whole.wall_ns
    line = report.sliced("garbage collection", "wine", share, lambda item: item.gc_ns / item.wall_ns)
    note = (
        f"Garbage collection took {percent(share)} of wall time ({ns(whole.gc_ns)}); "
        f"the longest pause was {ns(whole.gc_max_ns)}."
    )
    return report.plot("Garbage collection", "share", line, zero=True, note=note, height=120)


def findings(report: Report) -> list[Block]:
    """When each finding was present, as the run recorded it."""
    data = report.data
    if not data.findings:
        return [Text("The run recorded no findings.", "note")]
    present: dict[str, tuple[float, str]] = {}
    spans: dict[str, list[Period]] = {}
    rows = []
    for at, event in data.findings:
        cause = str(event.cause)
        present_at = spans.setdefault(cause, [])
        if event.gone:
            begin, text = present.pop(cause, (at.x, event.text))
            present_at.append((begin, at.x, str(text)))
        else:
            present.setdefault(cause, (at.x, event.text))
        state = "cleared" if event.gone else "found"
        rows.append((duration(at.x), number(at.step), state, CAUSES.get(cause, cause), str(event.text)))
    for cause, (begin, text) in present.items():
        spans[cause].append((begin, data.x, str(text)))
    tints = {"healthy": "green", "too-short": "grey"}
    drawn = tuple(
        SpanRow(CAUSES.get(cause, cause), tints.get(cause, "orange"), _merged(present_at, data.x))
        for cause, present_at in list(spans.items())[:_SPAN_ROWS]
    )
    columns = ("after", "step", "", "cause", "finding")
    table = Table("Changes", columns, tuple(rows), _FIGURES).newest(_ROWS)
    return [Spans("When each finding was present", drawn, report.time), table]


def events(report: Report) -> list[Block]:
    """Marks, pauses, profiler captures and trials on the time axis, and the newest marks as a table."""
    data = report.data
    groups: list[tuple[str, str, list[Period]]] = []
    for kind, (name, tint) in _MARKS.items():
        marked = data.marked(kind)
        spans = [(at.x - _seconds(mark.data.get("seconds")), at.x, str(mark.text)) for at, mark in marked]
        groups.append((name, tint, spans))
    # A trial after the end of the run took none of its time.
    took = [_seconds(trial.seconds) if at.x < data.x else 0.0 for at, trial in data.trials]
    tried = [(at.x - s, at.x, str(trial.text)) for (at, trial), s in zip(data.trials, took, strict=True)]
    captures = [(at.x, at.x, f"profiler capture at step {number(event.step)}") for at, event in data.captures]
    groups += [
        ("pauses", "grey", [(a, b, f"paused for {duration(b - a)}") for a, b in pauses(data)]),
        ("profiler captures", "sky", captures),
        ("trials", "blue", tried),
        ("resumed", "teal", [(at.x, at.x, f"resumed from step {number(at.step)}") for at in data.resumed]),
    ]
    rows = tuple(SpanRow(name, tint, _merged(spans, data.x)) for name, tint, spans in groups if spans)
    out: list[Block] = [Spans("Timeline", rows, report.time)] if rows else []
    marks = data.marked(*_LISTED)
    if marks:
        cells = tuple((duration(at.x), number(at.step), str(mark.kind), str(mark.text)) for at, mark in marks)
        out.append(Table("Log", ("after", "step", "kind", "event"), cells, _FIGURES).newest(_ROWS))
    return out or [Text("Nothing but steps was recorded.", "note")]


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 < value < math.inf else 0.0


def _merged(spans: Iterable[Period], whole_s: float) -> tuple[Period, ...]:
    """The spans in order; those too close to tell apart become one."""
    near = 0.003 * whole_s
    out: list[tuple[float, float, str, int]] = []
    for begin, end, text in sorted(spans):
        begin = max(begin, 0.0)
        if out and begin - out[-1][1] < near and (end - begin < near or begin < out[-1][1]):
            first, last, shown, count = out[-1]
            out[-1] = (first, max(last, end), shown, count + 1)
        else:
            out.append((begin, end, clip(text, _HOVER), 1))
    more = (f" (and {count - 1} more)" if count > 1 else "" for *_, count in out)
    return tuple((begin, end, text + rest) for (begin, end, text, _), rest in zip(out, more, strict=True))
