"""Memory, the use of the machine, garbage collection, and the settings with what became of them."""

from __future__ import annotations

from ndd_console.view.blocks import fits_text, on_gpu
from ndd_engine.record.events import BaselineEvent, LoaderEvent
from ndd_engine.text import MISSING, duration, number, size

from .axis import share_text
from .blocks import Block, Facts, Line, Lines, Table, Text
from .drawing import COLUMNS, line, pieces_of
from .model import Report

_EFFECT = {True: "in effect", False: "NOT in effect", None: "default"}
_GPU_MEMORY = (
    ("reserved_bytes", "reserved by the allocator", "orange"),
    ("allocated_bytes", "allocated", "blue"),
    ("peak_allocated_bytes", "peak allocated", "sky"),
    ("free_bytes", "free on the card", "green"),
    ("others_bytes", "held by others", "purple"),
)
_HOST_MEMORY = (
    ("host rss_bytes", "resident in this process", "blue"),
    ("host workers_rss_bytes", "loader workers", "orange"),
)


def memory(report: Report) -> list[Block]:
    """Memory over time, on the card where there is one, and what is left."""
    data, snapshot = report.data, report.snapshot
    cuda = on_gpu(data.run)
    out: list[Block] = []
    for title, names in (
        *((("Memory of the card", _GPU_MEMORY),) if cuda else ()),
        ("Memory of the host", _HOST_MEMORY),
    ):
        found = [line(data.curve(name), text, tint, data.x) for name, text, tint in names if data.curve(name)]
        found = [item for item in found if any(value for _, value in item.points)]
        if found:
            out.append(Lines(title, "bytes", "", tuple(found), report.time, zero=True))
    room = snapshot.headroom
    rows = [
        ("total", size(room.total_bytes)),
        ("free now" if room.kind == "card" else "available now", size(room.free_bytes)),
        ("used by this run", size(room.used_bytes)),
    ]
    if room.peak_bytes is not None:
        rows.append(("peak", size(room.peak_bytes)))
    rows.append(("held by others", size(room.others_bytes)))
    lowest = data.curve("host memory_available_bytes")
    if lowest and room.kind == "host":
        rows.append(("lowest available", size(min(point.low for point in lowest.points))))
    if fits := fits_text(snapshot, 100):
        rows.append(("predicted", fits))
    if snapshot.memory is not None:
        rows.append(
            ("allocation retries", f"{number(snapshot.memory.retries)}, out of memory {snapshot.memory.ooms}")
        )
    if not out and all(text == MISSING for _, text in rows):
        return [Text("Memory was not recorded.", "note")]
    return [*out, Facts(tuple(rows))]


def machine(report: Report) -> list[Block]:
    """How busy processor and card were, what others did there, and what was measured before training."""
    data, snapshot = report.data, report.snapshot
    out: list[Block] = []
    busy = [
        line(data.curve(name), text, tint, data.x, 0.01)
        for name, text, tint in (
            ("host cpu_percent", "usable cores, all processes", "orange"),
            ("card util_percent", "card (its own counter)", "blue"),
        )
        if data.curve(name)
    ]
    if busy:
        out.append(Lines("Use of the machine", "share", "", tuple(busy), report.time, zero=True, height=140))
    for name, title, unit, tint in (
        ("card temperature_c", "Temperature of the card", "°C", "vermillion"),
        ("card power_w", "Power of the card", "W", "orange"),
        ("card sm_clock_mhz", "Clock of the card", "MHz", "green"),
    ):
        if curve := data.curve(name):
            item = line(curve, title.lower(), tint, data.x, band=True)
            out.append(Lines(title, "plain", unit, (item,), report.time, height=120))
    if cores := snapshot.cores:
        text = f"{number(cores.used)} of {number(cores.usable)} in use, {number(cores.own)} by this run"
        rows = [("cores lately", f"{text}, {number(cores.others)} by others")]
        rows += [
            ("busy neighbour", f"{name} (process {pid}): {number(used)} cores")
            for pid, name, used in cores.neighbours
        ]
        if cores.throttled is not None:
            rows.append(("held up by the quota", share_text(cores.throttled)))
        out.append(Facts(tuple(rows)))
    out += _collections(report)
    if snapshot.loader is not None:
        out.append(_loader(snapshot.loader))
    if snapshot.baseline is not None:
        out.append(_baseline(snapshot.baseline))
    return out or [Text("Nothing was recorded of the machine.", "note")]


def _collections(report: Report) -> list[Block]:
    """Garbage collection over time, where there was any."""
    data = report.data
    whole = data.timeline.whole
    if not data.gc_watched:
        return []
    if whole.gc_ns <= 0:
        return [Text("Python's garbage collector did not run during training.")]
    width, stretches = data.timeline.columns(COLUMNS)
    share = pieces_of({index: item.gc_ns / item.wall_ns for index, item in stretches.items()}, width)
    longest = max(item.gc_max_ns for item in stretches.values())
    note = (
        f"Garbage collections took {share_text(whole.gc_ns / whole.wall_ns)} of wall time "
        f"({duration(whole.gc_ns * 1e-9)}); the longest pause was {duration(longest * 1e-9)}."
    )
    found = Line("collecting", "wine", share, mean=whole.gc_ns / whole.wall_ns)
    return [Lines("Garbage collection", "share", "", (found,), report.time, zero=True, note=note, height=120)]


def _ns(value: float | None) -> str:
    return MISSING if value is None else duration(value * 1e-9)


def _loader(loader: LoaderEvent) -> Facts:
    rows = [
        (
            "items",
            f"{number(loader.items)}, {'taken in one gather' if loader.in_memory else 'made one by one'}",
        ),
        (
            "one item",
            f"{_ns(loader.item_ns)}, of it on the processor {_ns(loader.item_cpu_ns)} (mean of {loader.probed})",
        ),
        ("joining a micro-batch", f"{_ns(loader.collate_ns)}; in one gather {_ns(loader.gather_ns)}"),
        ("a micro-batch", f"{number(loader.micro)} items, {size(loader.batch_bytes)}"),
    ]
    return Facts(tuple((f"data: {name}", text) for name, text in rows))


def _baseline(found: BaselineEvent) -> Facts:
    rows = [
        (
            "one micro-batch by itself",
            f"{_ns(found.micro_ns)} for {number(found.micro)} items, fastest of {found.runs}",
        )
    ]
    if found.other_micro is not None:
        rows.append(("the same, other size", f"{_ns(found.other_ns)} for {number(found.other_micro)} items"))
    if found.operations is not None:
        rows.append(("operators in it", number(found.operations)))
    pairs = [pair for pair in found.by_threads if len(pair) >= 2]
    if pairs:
        rows.append(("by threads", ", ".join(f"{number(count)}: {_ns(value)}" for count, value, *_ in pairs)))
    return Facts(tuple(rows))


def settings(report: Report) -> list[Block]:
    """What was asked for, what was applied, and whether it took effect; what did not comes first."""
    order = {False: 0, True: 1, None: 2}
    found = sorted(report.snapshot.settings, key=lambda item: order[item.in_effect])
    if not found:
        return [Text("No setting was applied.", "note")]
    rows = tuple(
        (item.name, item.requested, item.applied, _EFFECT[item.in_effect], item.verified or "")
        for item in found
    )
    lost = sum(item.in_effect is False for item in found)
    out: list[Block] = []
    if lost:
        text = f"{lost} setting{'s' if lost > 1 else ''} did not take effect, though requested."
        out.append(Text(text, "warn"))
    columns = ("setting", "requested", "applied", "effect", "how that is known")
    return [*out, Table("Settings", columns, rows)]
