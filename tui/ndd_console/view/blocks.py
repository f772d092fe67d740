"""The upper blocks of the live screen: header, progress, phases, idle time, ranks, memory and the machine."""

from __future__ import annotations

from typing import Any

from ndd_console.words.blocks import whole_percent
from ndd_console.words.memory import fits_text
from ndd_console.words.ranks import rank_rows, ranks_words
from ndd_console.words.run import (
    epoch_of,
    epoch_text,
    model_text,
    precision_text,
    steps_rate,
    steps_text,
    time_left,
    versions_text,
)
from ndd_console.words.step import micro_steps
from ndd_engine.record.event import ASIDES, EXCHANGE, SKEW, Ranks
from ndd_engine.record.events import RunEvent
from ndd_engine.record.figures import LOWER_BOUND, PRESS_K, is_script, on_gpu, place_in_step, setting
from ndd_engine.record.snapshot import PhaseShare, Snapshot
from ndd_engine.text import MISSING, counted, duration, finite, foreign, number, plural, size

from .bars import bar, levels, progress_bar, stacked_bar
from .rows import cells, column, ends, fields, fit, paragraph, rule, shorten, width_of
from .style import Row, Span, status_span

# With more ranks the screen shows a heat map.
_MOST_BARS = 8
_LEAST_BAR = 4
_OWN = 8  # width of the own time
# The characters of the levels of a heat map, each 2 % of the time of a step without waiting.
SHADES = "·░░▒▒▓▓███"
_MARKED = 2  # from this level on in the colour of a warning
_LEGEND = "░ 2 %  ▒ 6 %  ▓ 10 %  █ 14 % longer"

_WAIT = frozenset({"data_wait", SKEW})
_OVERHEAD = frozenset({"to_device", EXCHANGE, "log", "other", *ASIDES})
_NAME_WIDTH, _LONGEST_NAME = 11, 16  # cells of the names of phases; the longest part of one may need more
_FIGURE = 8  # width of a column of milliseconds
_SHARE = 7
_GROWN = 2.0  # from which ratio to its mean over the run a phase has grown
_LABEL = 9
_HOT_C = 85


def panel(ranks: Ranks, width: int, count: int) -> list[Row]:
    """At most `count` rows: a bar for each of a few ranks, a heat map of more."""
    if count < 2:
        return []
    newest = ranks.newest
    if newest.world <= _MOST_BARS and len(newest.rows_us) < count:
        return _bars(ranks, width)[:count]
    return heat_map(ranks, width, count)


def _bars(ranks: Ranks, width: int) -> list[Row]:
    """Work and then waiting of each rank, with its own time in milliseconds."""
    newest, late = ranks.newest, ranks.late or {}
    by_rank = sorted(rank_rows(newest).items())
    digits = max((len(str(rank)) for rank, _ in by_rank), default=1)
    whole = max((row.get("own", 0.0) + row.get("wait", 0.0) for _, row in by_rank), default=0.0) or 1.0
    extra = 7 if late else 0
    room = width - digits - 1 - _OWN - extra
    out: list[Row] = [rule("ranks: work, then waiting" if width >= 31 else "ranks: work, waiting", width)]
    for rank, row in by_rank:
        own = max(row.get("own", 0.0), 0.0)
        behind = late.get("rank") == rank
        style = "warn" if behind else "compute"
        work = bar(own / whole, max(room, 0)).rstrip()
        line: Row = ((work, style), ("░" * (room - len(work)), "dim")) if room >= _LEAST_BAR else ()
        more = f"+{late['late_ns'] * 1e-6:.1f}" if behind else ""
        time = f"{own / 1e3:.1f}" if own < 1e7 else f"{own / 1e3:,.0f}"
        figures = (time.rjust(_OWN), "text"), (more.rjust(extra), "warn")
        out.append(((f"{rank:>{digits}} ", "text"), *line, *figures))
    return out


def heat_map(ranks: Ranks, width: int, count: int) -> list[Row]:
    """By how much the ranks work longer than the median, a cell for each rank, host or group of ranks."""
    newest = ranks.newest
    levels = [SHADES[int(char)] if char in "0123456789" else "?" for char in newest.cells]
    size = max(newest.cell_ranks, 1)
    room = max(count - 2, 1)
    digits = len(str(max(newest.first_rank + newest.world - 1, 0)))
    wide = max(width - digits - 1, 1)
    by_host = 1 < newest.hosts <= newest.world and newest.world % newest.hosts == 0
    here = newest.world // newest.hosts if by_host else 0
    if size == 1 and by_host and newest.hosts <= room and here <= wide:
        across = here
    else:
        while len(levels) > wide * room:  # the darkest of neighbours
            levels = [max(levels[index : index + 2], key=SHADES.find) for index in range(0, len(levels), 2)]
            size *= 2
        least = -(-len(levels) // room) if levels else 1
        fitting = (many for many in (8, 16, 32, 64, 128) if least <= many <= wide)
        across = next(fitting, max(min(least, wide), 1))
    double = 2 * across <= wide
    whole = counted(newest.world, "rank")
    whats = ["a cell each"] if size == 1 else []
    whats += [f"a cell a host of {size}", "a cell a host"] if size == here > 1 else []
    titles = [f"{whole}, {what}" for what in (*whats, f"{size} a cell")]
    out: list[Row] = [rule(next((title for title in titles if cells(title) + 4 <= width), whole), width)]
    for begin in range(0, len(levels), across):
        row: list[tuple[str, str]] = [(f"{newest.first_rank + begin * size:>{digits}} ", "dim")]
        for char in levels[begin : begin + across]:
            style = "warn" if SHADES.find(char) >= _MARKED or char in "▒▓█" else "dim"
            text = char * (2 if double else 1)
            if row[-1][1] == style and len(row) > 1:
                row[-1] = (row[-1][0] + text, style)
            else:
                row.append((text, style))
        out.append(tuple(row))
    least_us, middle, _, most, rank = newest.columns_us.get("own", (0.0, 0.0, 0.0, 0.0, 0))
    spread = f"work {least_us / 1e3:.1f} to {most / 1e3:.1f} ms (r{rank})"
    out.append(((shorten(spread, width), "text"),))
    legend = _LEGEND if cells(_LEGEND) <= width else f"median {middle / 1e3:.1f} ms"
    return [*out, ((shorten(legend, width), "dim"),)][:count]


def longest_text(ranks: Ranks, name: str, mean_ns: float, width: int, decimals: int) -> str:
    """The longest of a phase over the ranks and whose it is, "63.2 r5"; blank if it is about the mean, or varies."""
    most, rank = ranks.longest.get(name, (0.0, None))
    if rank is None or finite(most) is None:
        return " " * width
    if most < 1.05 * mean_ns or most - mean_ns < 0.005 * ranks.step_ns:
        return " " * width
    return f"{most * 1e-6:.{decimals}f} r{rank}".rjust(width)


def header(snapshot: Snapshot, name: str, status: str, width: int) -> Row:
    """Name, ranks, device and precision of the run, and its status at the right."""
    run = snapshot.run
    state: Row = (status_span(status),)
    row: Row = ((shorten(foreign(name), max(width - width_of(state) - 1, 4)), "bold"),)
    about = (
        () if run is None else (ranks_words(snapshot), device_name(snapshot, run, width), precision_text(run))
    )
    for text in about:
        if text and width_of(row) + cells(text) + 3 <= width - width_of(state) - 2:
            row = (*row, ("   " + text, "text"))
    return ends(row, state, width)


def device_name(snapshot: Snapshot, run: RunEvent, width: int) -> str:
    """ "RTX 4080 SUPER 16 GB", or "CPU, 8 threads"."""
    name = foreign(run.device_name)
    if not on_gpu(run):
        threads = f", {counted(run.threads, 'thread')}" if run.threads else ""
        return f"{shorten(name, 40)}{threads}" if width >= 110 and name else f"CPU{threads}"
    for prefix in ("NVIDIA ", "GeForce "):
        name = name.removeprefix(prefix)
    total = snapshot.headroom.total_bytes or (run.gpu or {}).get("memory_total_bytes")
    if isinstance(total, (int, float)) and not name.endswith("GB"):
        name = f"{name} {total / 1024**3:.0f} GB"
    return name


def progress(snapshot: Snapshot, width: int, waited_s: float | None) -> Row:
    """Progress and remaining time of the run; during setup, the current stage."""
    run = snapshot.run
    if snapshot.status == "preparing" or run is None:
        stage = f"{foreign(snapshot.stage) or 'starting'}…"
        waited_s = waited_s or 0.0
        since = "" if waited_s < 1 else f"{waited_s:.0f} s" if waited_s < 60 else duration(waited_s)
        return ends(((shorten(stage, max(width - 12, 8)), "accent"),), ((since, "dim"),), width)
    share = snapshot.progress
    total = f"{run.total_steps:,}" if run.total_steps else MISSING
    left = time_left(snapshot)
    took = f"took {duration(snapshot.elapsed_s)}" if snapshot.final else f"{left:>13}" if left else ""
    whole = f" of {total}" if width >= 90 and run.total_steps else ""
    pieces = [  # (rank, text): the highest rank is dropped first
        (0, f"{whole_percent(share) if run.total_steps else MISSING:>5}"),
        (1, f"step {snapshot.step:>{len(total)},}{whole}"),
        (3, f"{steps_rate(snapshot):>12}"),
        *([(2, took)] if took else []),
    ]
    epoch = epoch_of(snapshot)
    while len(pieces) > 1 and sum(len(text) + 3 for _, text in pieces) + len(epoch) + 12 > width:
        if epoch and len(pieces) <= 2:
            epoch = ""
            continue
        pieces.remove(max(pieces))
    tail = " " + "   ".join(text for _, text in pieces)
    lead = f"{epoch} " if epoch else ""
    room = width - len(tail) - len(lead)
    line = progress_bar(share, room) if room >= 4 else ()
    return fit(((lead, "text"), *line, (tail, "text")), width)


class StepTable:
    """The phases of a step as a table of `width` cells; its columns depend on the width.

    All figures in the first column are means; they add up to the heading. Evaluations and checkpoints come on top of a
    step and are marked with "+", as their mean per step.
    """

    def __init__(self, snapshot: Snapshot, width: int) -> None:
        self.snapshot = snapshot
        self.width = width
        step_ms = (snapshot.step_ns or 0.0) * 1e-6
        self.decimals = 0 if step_ms >= 10_000 else 1 if step_ms >= 10 else 2 if step_ms >= 1 else 3
        self.phases = _seen(snapshot)
        parts = (foreign(phase.name.partition("/")[2]) for phase in self.phases)
        self.names = max(_NAME_WIDTH, min(max(map(cells, parts), default=0) + 3, width // 3, _LONGEST_NAME))
        room = width - self.names - _FIGURE - _SHARE
        # Of several ranks: the longest and whose it is; percentiles and GPU times are those of one.
        self.longest = 9 + len(str(snapshot.ranks.newest.world - 1)) if snapshot.ranks is not None else 0
        if self.longest + _LEAST_BAR > room:
            self.longest = 0
        spare = room - 14 if snapshot.ranks is None else 0  # what a bar of 14 cells leaves
        self.more: list[str] = []  # further columns, named as the fields of a phase
        if spare >= 2 * _FIGURE and any(phase.device_ns is not None for phase in snapshot.phases):
            self.more.append("device")
            spare -= _FIGURE
        percentiles = 3 if spare >= 3 * _FIGURE else 1 if spare >= _FIGURE + 8 else 0
        self.more += {3: ["p50", "p95", "max"], 1: ["p95"], 0: []}[percentiles]
        self.bar = max(room - _FIGURE * len(self.more) - self.longest, 0)

    def heading(self) -> Row:
        """ "── step 54.6 ms (16 micro-steps of 3.41 ms) ───", with column names if there is room."""
        step = self.snapshot.step_ns
        title = f"step {self.milliseconds(step).strip()} ms" if step is not None else "step n/a"
        labels = ""
        if self.width >= 44:
            labels = ("mean ms" if "p95" in self.more else "ms").rjust(_FIGURE) + "share".rjust(_SHARE)
            labels += "".join(name.rjust(_FIGURE) for name in self.more)
            labels += "longest".rjust(self.longest) if self.longest else ""
        # The longest form that fits.
        whole = micro_steps(self.snapshot)
        count, _, each = whole.partition(" micro-steps of ")
        for words in (whole, f"{count} micro of {each}", f"{count} micro {each.removesuffix(' ms')}"):
            if each and cells(title) + cells(words) + 7 + cells(labels) <= self.width:
                title = f"{title} ({words})"
                break
        return rule(title, self.width, "bold", labels)

    def milliseconds(self, value_ns: float | None) -> str:
        """Nanoseconds as milliseconds, with the same number of decimals in the whole table."""
        if value_ns is None:
            return MISSING.rjust(_FIGURE)
        value = value_ns * 1e-6
        return (f"{value:.{self.decimals}f}" if value < 10_000 else f"{value:,.0f}").rjust(_FIGURE)

    def rows(self, count: int) -> list[Row]:
        """At most `count` rows: the largest phases in step order, one row for the rest, `other`, asides."""
        top = [phase for phase in self.phases if "/" not in phase.name]
        if not top:
            return [(("no steps measured yet", "dim"),)] if count > 0 else []
        aside = [phase for phase in top if phase.name in ASIDES]
        took = [phase for phase in top if phase.name not in (*ASIDES, "other")]
        other = [phase for phase in top if phase.name == "other"]
        if count < 3 + len(aside):
            aside = []
        room = count - len(other) - len(aside)
        if count < 3:  # no room for a total of the rest
            room, other, took = count, [], self._largest(took, count)
        shown = took if len(took) <= room else self._largest(took, max(room - 1, 0))
        rest = [phase for phase in took if phase not in shown]
        total: list[PhaseShare] = []
        if rest:
            host_ns, share = sum(phase.host_ns for phase in rest), sum(phase.share for phase in rest)
            total.append(PhaseShare(f"{len(rest)} smaller", host_ns, share, None, None, None, None))
        parts = {} if rest else self._parts(shown, room - len(shown))
        exact = self._adding_up([*shown, *total, *other]) if other else {}
        scale = max(phase.share for phase in top) or 1.0
        lines = [line for phase in shown for line in (phase, *parts.get(phase.name, ()))]
        return [self._row(phase, exact, scale) for phase in (*lines, *total, *other, *aside)][:count]

    def _largest(self, phases: list[PhaseShare], count: int) -> list[PhaseShare]:
        """The phases that take longest, in the order of the step.

        By their means over the whole run, so that their rows stay; by the recent ones for those that have grown.
        """
        totals = self.snapshot.totals

        def weight(phase: PhaseShare) -> float:
            mean = totals.phases.get(phase.name, 0) / totals.steps if totals.steps else 0.0
            return phase.host_ns if phase.host_ns > _GROWN * mean else mean

        largest = sorted(phases, key=weight, reverse=True)[:count]
        return [phase for phase in phases if phase in largest]

    def _parts(self, shown: list[PhaseShare], spare: int) -> dict[str, list[PhaseShare]]:
        """name of a phase -> its parts, as far as there are spare rows."""
        parts: dict[str, list[PhaseShare]] = {}
        for phase in shown:
            inside = [part for part in self.phases if part.name.startswith(phase.name + "/")]
            parts[phase.name] = inside[: max(spare, 0)]
            spare -= len(parts[phase.name])
        return parts

    def _adding_up(self, parts: list[PhaseShare]) -> dict[str, str]:
        """name -> milliseconds, rounded such that they add up to the heading; {} if they do not add up unrounded."""
        step_ns, unit = self.snapshot.step_ns or 0.0, 10.0 ** (6 - self.decimals)
        if not abs(sum(phase.host_ns for phase in parts) - step_ns) <= unit / 2:  # NaN: of a damaged record
            return {}
        floors = {phase.name: int(phase.host_ns // unit) for phase in parts}
        missing = round(step_ns / unit) - sum(floors.values())
        by_rest = sorted(parts, key=lambda phase: floors[phase.name] - phase.host_ns / unit)
        for phase in by_rest[: max(missing, 0)]:
            floors[phase.name] += 1
        return {name: self.milliseconds(count * unit) for name, count in floors.items()}

    def _row(self, phase: PhaseShare, exact: dict[str, str], scale: float) -> Row:
        base, _, part = phase.name.partition("/")
        total = base.endswith(" smaller")
        style = "wait" if base in _WAIT else "overhead" if base in _OVERHEAD or total else "compute"
        label = "  " + foreign(part) if part else phase.name
        figures = exact.get(phase.name) or self.milliseconds(phase.host_ns)
        step_ns = self.snapshot.step_ns
        share = whole_percent(phase.host_ns / step_ns if step_ns else phase.share)
        if step_ns and phase.name in ASIDES:
            figures, share = f"+{figures.strip()}".rjust(_FIGURE), f"+{share}"
        last = "" if total else "".join(self.milliseconds(getattr(phase, f"{name}_ns")) for name in self.more)
        if self.longest and self.snapshot.ranks is not None and not total:
            last = longest_text(self.snapshot.ranks, phase.name, phase.host_ns, self.longest, self.decimals)
        return (
            (column(label, self.names), "dim" if part else "text"),
            (bar(phase.share / scale, self.bar), style),
            (figures + share.rjust(_SHARE), "text"),
            (last, "dim"),
        )


def _seen(snapshot: Snapshot) -> list[PhaseShare]:
    """The phases that took time at any moment of the run, in the order of the step: a row does not come and go."""
    seen = {} if snapshot.ranks is not None or not snapshot.phases else snapshot.totals.phases
    found = {phase.name: phase for phase in snapshot.phases}
    for name in seen.keys() - found.keys():
        found[name] = PhaseShare(name, 0.0, 0.0, None, None, None, None)
    took = [one for one in found.values() if one.host_ns > 0 or seen.get(one.name) or one.name == "other"]
    return sorted(took, key=lambda phase: place_in_step(phase.name))


def idle_heading(snapshot: Snapshot, width: int) -> str:
    """ "GPU idle 63 % (kernels)"; ">" marks a lower bound."""
    idle = snapshot.idle
    what = "GPU idle" if on_gpu(snapshot.run) else "compute idle" if width >= 34 else "idle"
    shown = "host clock" if idle.method == "host" else foreign(idle.method)
    method = f" ({shown})" if idle.share is not None else ""
    share = whole_percent(idle.share)
    # "<1 %" cannot be a lower bound, too.
    bound = ">" if idle.share is not None and idle.reason == LOWER_BOUND and not share.startswith("<") else ""
    return f"{what} {bound}{share}{method}"


def idle_rows(snapshot: Snapshot, width: int, count: int) -> list[Row]:
    """Idle causes, one per row, and the step of a profiler capture; without causes, why they are unknown."""
    idle = snapshot.idle
    causes = [item for item in idle.causes if item[1] >= 0.0005]
    if len(causes) > count:
        kept = sorted(causes, key=lambda item: -item[1])[:count]
        causes = [item for item in causes if item in kept]
    out: list[Row] = []
    for cause, share in causes:
        style = "wait" if cause == "waiting for data" and share >= 0.1 else "text"
        out.append(ends(((foreign(cause), style),), ((whole_percent(share), style),), width))
    about = foreign(idle.reason)
    if snapshot.final:
        about = about.removesuffix(PRESS_K)
    if idle.step is not None:
        about = f"measured at step {number(idle.step)}"
    elif idle.share is not None and idle.method == "nvml":
        about = about or "causes n/a: NVML does not report them"
    return out + paragraph(about, width, "dim", max(count - len(out), 0))


def memory_rows(snapshot: Snapshot, width: int, count: int) -> list[Row]:
    """A bar of used, others and free memory, the figures, and the micro-batch that is predicted to fit."""
    room = snapshot.headroom
    free = f"{size(room.free_bytes)} {'free' if room.kind == 'gpu' else 'available'}"
    if width < 24 + (room.kind != "gpu") * 6:
        free = f"{size(room.free_bytes)} free"
    line: Row = ()
    length = width - len(free) - 2
    if room.total_bytes and room.used_bytes is not None and length >= 4:
        used, others = room.used_bytes / room.total_bytes, (room.others_bytes or 0) / room.total_bytes
        left = max(1 - used - others, 0.0)
        line = stacked_bar(((used, "█", "used"), (others, "▒", "others"), (left, "░", "dim")), length)
    out = [ends(line, ((free, "text"),), width)]
    if snapshot.memory is not None and snapshot.memory.retries:
        out.append(((f"{number(snapshot.memory.retries)} allocation retries", "warn"),))
    if fits := fits_text(snapshot, width):
        out.append(((fits, "accent"),))
    if room.kind != "gpu" and room.used_bytes is None:  # it has ended, and no sample shows what it used
        return out[: max(count, 0)]
    facts = [f"{'used' if room.kind == 'gpu' else 'this run'} {size(room.used_bytes)}"]
    if room.kind == "gpu":
        facts.append(f"peak {size(room.peak_bytes)}")
    if room.others_bytes is not None:
        facts.append(f"others {size(room.others_bytes)}")
    # Facts that do not fit into a row go to the next one.
    text = facts[0]
    for fact in facts[1:]:
        if len(text) + 3 + len(fact) > width:
            out.append(((text, "text"),))
            text = fact
        else:
            text = f"{text}   {fact}"
    return [*out, ((text, "text"),)][: max(count, 0)]


def _figure(body: dict[str, Any], name: str) -> float | None:
    """A numeric field; None if it is missing."""
    return finite(body.get(name))


def _whole(value: float | None, unit: str) -> str:
    return MISSING if value is None else f"{value:,.0f}{unit}"


def machine_rows(snapshot: Snapshot, width: int) -> list[Row]:
    rows: list[Row] = []
    gpu = snapshot.gpu
    if gpu is not None:
        rows += _block("GPU", _gpu(gpu), width)
    elif on_gpu(snapshot.run):
        rows.append(_labelled("GPU", (("n/a: NVML counters are not available", "dim"),)))
    host = snapshot.host
    if host is None:
        return [*rows, _labelled("host", ((MISSING, "dim"),))]
    rows += _block("host", _host(host, snapshot), width)
    return rows + _block("memory", _memory(host, snapshot), width)


def _block(label: str, items: list[Span], width: int) -> list[Row]:
    """The items in four, two or one columns."""
    columns = 4 if width >= 74 else 2 if width >= 44 else 1
    chunks = [items[index : index + columns] for index in range(0, len(items), columns)]
    lines = [fields(chunk, width - _LABEL, columns) for chunk in chunks]
    return [_labelled("" if index else label, line) for index, line in enumerate(lines)]


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
    cpu = f"{_cores(total, usable)} of {usable:g} cores" if usable else _whole(total, " %")
    return [
        (f"cpu {cpu}", "text"),
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
    run = snapshot.run
    if run is None:
        return []
    steps, epoch = steps_text(snapshot, run), epoch_text(snapshot, run)
    if cells(steps + epoch) + _LABEL + 2 <= width:
        steps += f"; {epoch}"
    texts = {"model": model_text(run), "steps": steps, "data": run.data}
    rows = [_labelled(label, ((foreign(text), "text"),)) for label, text in texts.items()]
    return [*rows, _labelled("versions", ((foreign(versions_text(run)), "dim"),))]
