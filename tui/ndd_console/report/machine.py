"""Memory, utilization, garbage collection, and the settings with their effect."""

from __future__ import annotations

from ndd_console.words.blocks import Block, Facts, Text
from ndd_console.words.figures import ns, share_text
from ndd_console.words.profile import isolated, loader_facts
from ndd_console.words.settings import settings_table
from ndd_console.words.step import fits_text, on_gpu
from ndd_engine.text import MISSING, number, size

from .model import Report

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


def memory(report: Report) -> list[Block]:
    """Memory over time on the GPU and the host, and what is left."""
    snapshot = report.snapshot
    out: list[Block] = []
    gpu = (("GPU memory", _GPU_MEMORY),) if on_gpu(report.data.run) else ()
    for title, names in (*gpu, ("Host memory", _HOST_MEMORY)):
        lines = [item for name in names if (item := report.line(*name)) and any(item.values)]
        out += report.plot(title, "bytes", *lines, zero=True)
    room, counts = snapshot.headroom, snapshot.memory
    lowest = [point.low for point in report.data.curves["host memory_available_bytes"].points]
    facts = Facts.of(
        ("total", size(room.total_bytes)),
        ("free now" if room.kind == "gpu" else "available now", size(room.free_bytes)),
        ("used by this run", size(room.used_bytes)),
        ("peak", size(room.peak_bytes) if room.peak_bytes is not None else ""),
        ("used by others", size(room.others_bytes)),
        ("lowest available", size(min(lowest)) if lowest and room.kind == "host" else ""),
        ("predicted", fits_text(snapshot)),
        ("allocation retries", number(counts.retries) if counts else ""),
        ("out of memory", number(counts.ooms) if counts else ""),
    )
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
        used = f"{number(cores.used)} of {number(cores.usable)} in use: {number(cores.own)} by this run"
        busy_ones = ", ".join(f"{name} (pid {pid}, {number(count)})" for pid, name, count in cores.neighbours)
        throttled = share_text(cores.throttled) if cores.throttled is not None else ""
        rest = (("busy processes", busy_ones), ("throttled by quota", throttled))
        out.append(Facts.of(("recent cores", f"{used}, {number(cores.others)} by others"), *rest))
    out += _collections(report)
    if snapshot.loader is not None:
        out.append(loader_facts(snapshot.loader))
    if snapshot.baseline is not None:
        out.append(isolated(snapshot.baseline))
    return out or [Text("The machine was not recorded.", "note")]


def _collections(report: Report) -> list[Block]:
    """Garbage collection over time."""
    data = report.data
    whole = data.timeline.whole
    if not data.gc_watched:
        return []
    if whole.gc_ns <= 0:
        return [Text("Python's garbage collector did not run during training.")]
    share = whole.gc_ns / whole.wall_ns
    line = report.sliced("garbage collection", "wine", share, lambda item: item.gc_ns / item.wall_ns)
    note = (
        f"Garbage collection took {share_text(share)} of wall time ({ns(whole.gc_ns)}); "
        f"the longest pause was {ns(whole.gc_max_ns)}."
    )
    return report.plot("Garbage collection", "share", line, zero=True, note=note, height=120)


def settings(report: Report) -> list[Block]:
    """Every setting as requested and as applied; those without effect come first."""
    table = settings_table(report.snapshot.settings)
    if not table.rows:
        return [Text("No setting was applied.", "note")]
    out: list[Block] = []
    if lost := len(table.warn):
        text = f"{lost} requested setting{'s' if lost > 1 else ''} did not take effect."
        out.append(Text(text, "warn"))
    return [*out, table]
