"""Traces of torch.profiler in words: what was examined, busy and idle time of each GPU, and its longest kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ndd_engine.record.figures import IDLE_CAUSES
from ndd_engine.recordings.traces import DeviceUse, TraceUse
from ndd_engine.text import counted, printable

from .blocks import Block, Facts, Table, clip
from .figures import ns, share_text

_NAME = 70  # characters shown of a kernel's name


def phases(use: TraceUse) -> Table:
    """The phases of the main thread, with what they were inferred from."""
    each = len(use.steps) or 1
    rows = tuple(
        (
            phase, share_text(value / use.wall_ns), ns(value / each),
            printable(use.sources.get(phase, "the rest")),
        )
        for phase, value in sorted(use.phase_ns(use.begin, use.end).items(), key=lambda item: -item[1])
    )  # fmt: skip
    columns = ("phase", "share", "time per step" if use.steps else "time", "inferred from")
    return Table("Phases of the main thread", columns, rows, frozenset({1, 2}))


def examined(use: TraceUse) -> str:
    """ "4 whole steps, 864 ms, rank 0 of 16"."""
    steps = counted(len(use.steps), "whole step") if use.whole_steps else "the whole trace"
    if use.steps and not use.whole_steps:
        steps += f", {counted(len(use.steps), 'step')}"
    of = f" of {use.world_size}" if use.world_size else ""
    rank = "" if use.rank is None else f", rank {use.rank}{of}"
    return f"{steps}, {ns(use.wall_ns)}{rank}"


def device_blocks(device: DeviceUse) -> Iterator[Block]:
    """The figures of one GPU, or of the CPU."""
    spent, wall = device.time, device.time.wall_ns
    gpu = device.index is not None
    exposed = f"exposed {share_text(spent.exposed_ns / wall)}, hidden {share_text(_hidden_ns(device) / wall)}"
    yield Facts.of(
        ("busy", share_text(1 - device.idle)),
        ("idle", share_text(device.idle)),
        ("communication", exposed if spent.collective_ns else ""),
        ("copies", share_text(spent.copy_ns / wall) if gpu else ""),
        ("kernels launched", f"{spent.launches:,}" if gpu else ""),
        title=device_text(device),
    )
    causes = tuple(
        (cause, share_text(spent.idle_ns[cause] / wall), ns(spent.idle_ns[cause]))
        for cause in IDLE_CAUSES
        if cause in spent.idle_ns
    )
    if causes:
        yield Table("Idle by cause", ("cause", "share", "time"), causes, frozenset({1, 2}))
    top = tuple(
        (share_text(int(total) / wall), f"{count:,}x", clip(str(name), _NAME))
        for name, total, count in spent.top
    )
    kind = "kernel" if gpu else "operator"
    yield Table(f"Longest {kind}s", ("share", "calls", kind), top, frozenset({0, 1}))


def device_text(device: DeviceUse) -> str:
    """ "GPU 2, NVIDIA A100"."""
    if device.index is None:
        return device.name
    return f"GPU {device.index}" + (f", {device.name}" if device.name else "")


def _hidden_ns(device: DeviceUse) -> float:
    return device.time.collective_ns - device.time.exposed_ns


def ranks_table(uses: Sequence[TraceUse]) -> Table:
    """One line for each rank and GPU."""
    rows = []
    for use in uses:
        for device in use.devices:
            spent, wall = device.time, device.time.wall_ns
            cause = max(spent.idle_ns, key=spent.idle_ns.__getitem__, default="none")
            rows.append((
                "-" if use.rank is None else str(use.rank), printable(use.path.name),
                "-" if device.index is None else str(device.index), ns(wall), share_text(1 - device.idle),
                share_text(device.idle), share_text(spent.exposed_ns / wall), share_text(_hidden_ns(device) / wall),
                cause,
            ))  # fmt: skip
    columns = ("rank", "file", "gpu", "wall", "busy", "idle", "exposed", "hidden", "main cause of idle time")
    return Table("", columns, tuple(rows), frozenset({0, 2, 3, 4, 5, 6, 7}))


def main_device(uses: Sequence[TraceUse]) -> tuple[TraceUse, DeviceUse, str]:
    """The rank and GPU to show in detail, and why: a straggler, which waits least for the others, or the most idle."""
    every = [(use, device) for use in uses for device in use.devices]
    if len(uses) == 1:
        use, device = max(every, key=lambda item: item[1].time.busy_ns)
        return use, device, ""
    if all(device.time.collective_ns for _, device in every):
        use, device = min(every, key=lambda item: item[1].time.exposed_ns / item[1].time.wall_ns)
        return use, device, "waits least for other ranks"
    use, device = max(every, key=lambda item: item[1].idle)
    return use, device, "has the most idle time"
