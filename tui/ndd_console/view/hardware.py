"""The machine block: counters of the GPU and the host; missing ones are "n/a"."""

from __future__ import annotations

from typing import Any

from ndd_console.words.run import epoch_text, model_text, steps_text, versions_text
from ndd_console.words.step import is_script, on_gpu, setting
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import MISSING, counted, finite, foreign, plural, size

from .bars import levels
from .rows import cells, fields
from .style import Row, Span

_LABEL = 9
_HOT_C = 85


def _figure(body: dict[str, Any], name: str) -> float | None:
    """A numeric field; None if it is missing."""
    return finite(body.get(name))


def _whole(value: float | None, unit: str) -> str:
    return MISSING if value is None else f"{value:,.0f}{unit}"


def machine_rows(snapshot: Snapshot, width: int) -> list[Row]:
    """The GPU if the run trains on one, and the host."""
    rows: list[Row] = []
    gpu = snapshot.gpu
    if gpu is not None:
        rows += _block("GPU", _gpu(gpu), width)
    elif on_gpu(snapshot.run):
        rows.append(_labelled("GPU", (("n/a: NVML counters are not available", "dim"),)))
    host = snapshot.host
    if host is None:
        return [*rows, _labelled("host", ((MISSING, "dim"),))]
    return [
        *rows,
        *_block("host", _host(host, snapshot), width),
        *_block("memory", _memory(host, snapshot), width),
    ]


def _block(label: str, items: list[Span], width: int) -> list[Row]:
    """The items in four, two or one columns."""
    columns = 4 if width >= 74 else 2 if width >= 44 else 1
    chunks = [items[index : index + columns] for index in range(0, len(items), columns)]
    return [
        _labelled(label if index == 0 else "", fields(chunk, width - _LABEL, columns))
        for index, chunk in enumerate(chunks)
    ]


def core_row(snapshot: Snapshot, width: int) -> Row | None:
    """The load of each core, one character per core; None if it is unknown."""
    host = snapshot.host or {}
    cores = host.get("cpu_per_core")
    if not isinstance(cores, (list, tuple)) or not cores:
        return None
    hidden = len(cores) - (width - _LABEL)
    note = f" +{hidden + 10} more" if hidden > 0 else ""
    shares = [(finite(core) or 0.0) / 100 for core in cores]
    return _labelled("cores", ((levels(shares, width - _LABEL - len(note)), "trend"), (note, "dim")))


def _labelled(label: str, row: Row) -> Row:
    return ((label.ljust(_LABEL), "dim"), *row)


def _gpu(gpu: dict[str, Any]) -> list[Span]:
    temperature = _figure(gpu, "temperature_c")
    heat = "warn" if temperature is not None and temperature >= _HOT_C else "text"
    watts, limit = _figure(gpu, "power_w"), _figure(gpu, "power_limit_w")
    power = f"{watts:.0f}/{limit:.0f} W" if watts is not None and limit is not None else _whole(watts, " W")
    return [
        (f"busy {_whole(_figure(gpu, 'util_percent'), ' %')}", "text"),
        (f"{_whole(temperature, ' °C')}, {power}", heat),
        (_whole(_figure(gpu, "sm_clock_mhz"), " MHz"), "text"),
        throttle(gpu),
    ]


def throttle(gpu: dict[str, Any]) -> Span:
    """Why the GPU reduces its clocks."""
    reasons = gpu.get("throttle")
    if reasons is None:
        return ("throttling n/a", "dim")
    if not reasons:
        return ("not throttled", "text")
    return ("throttled: " + ", ".join(foreign(reason) for reason in reasons), "warn")


def _host(host: dict[str, Any], snapshot: Snapshot) -> list[Span]:
    """CPU time in cores: of all processes, of which the run's own; its other processes, and the disk."""
    run = snapshot.run
    workers = _figure(host, "workers")
    if workers is None and run is not None:
        workers = finite(setting(run, "loader", "workers"))
    own, ranks = _figure(host, "process_cpu_percent"), _figure(host, "ranks_cpu_percent")
    used = ("run", own) if own is None or ranks is None else ("ranks", own + ranks)
    total, usable = _figure(host, "cpu_percent"), run.usable_cores if run is not None else None
    children = _children(snapshot)
    return [
        (
            f"cpu {_cores(total, usable)} of {usable:g} cores" if usable else f"cpu {_whole(total, ' %')}",
            "text",
        ),
        (f"{used[0]} {_cores(used[1])} cores", "text"),
        (f"{MISSING} {plural(children)}" if workers is None else counted(workers, children), "text"),
        (f"disk {size(_figure(host, 'disk_free_bytes'))} free", "text"),
    ]


def _cores(percent: float | None, of: float | None = 1.0) -> str:
    """CPU use in cores. percent: of so many."""
    return MISSING if percent is None or of is None else f"{percent * of / 100:.1f}"


def _children(snapshot: Snapshot) -> str:
    """What a run's further processes are called: those of a script may be anything."""
    return "subprocess" if is_script(snapshot.run) else "worker"


def _memory(host: dict[str, Any], snapshot: Snapshot) -> list[Span]:
    swapped = _figure(host, "swap_bytes")
    others = _figure(host, "workers_rss_bytes")
    return [
        (f"RSS {size(_figure(host, 'rss_bytes'))}", "text"),
        *([(f"{plural(_children(snapshot))} {size(others)}", "text")] if others != 0 else []),
        (f"{size(_figure(host, 'memory_available_bytes'))} available", "text"),
        *([(f"{size(swapped)} in swap", "warn")] if swapped else []),
    ]


def facts(snapshot: Snapshot, width: int) -> list[Row]:
    """Model, steps, data and versions of the run."""
    run = snapshot.run
    if run is None:
        return []
    steps, epoch = steps_text(snapshot, run), epoch_text(snapshot, run)
    if cells(steps + epoch) + _LABEL + 2 <= width:
        steps += f"; {epoch}"
    texts = {"model": model_text(run), "steps": steps, "data": run.data}
    rows = [_labelled(label, ((foreign(text), "text"),)) for label, text in texts.items()]
    return [*rows, _labelled("versions", ((foreign(versions_text(run)), "dim"),))]
