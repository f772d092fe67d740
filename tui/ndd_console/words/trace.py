"""Recordings of other programs in words: traces of torch.profiler, also as a page, and memory snapshots."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ndd_engine.diagnose.gpu_rules import LEAST
from ndd_engine.record.events import PHASES
from ndd_engine.record.figures import IDLE_CAUSES
from ndd_engine.recordings.snapshots import ERROR, DeviceMemory, Limit, Moment, SnapshotUse
from ndd_engine.recordings.traces import DeviceUse, TraceUse, findings
from ndd_engine.text import MISSING, counted, percent, printable, size

from .blocks import Block, NamedValues, Page, ReportSection, Table, Text, clip, moment, ns
from .finding import POTENTIAL_GAIN, verdict

_NAME = 70  # characters shown of a kernel's name

_LINES = 12  # owners shown
# A moment with more in use than at the most reserved memory is shown as well, from this difference on.
TRIFLE = 0.02
# Rows of the table of steps, and ranks that are named.
STEPS, MOST_RANKS = 200, 8
TRACE_METHODS = (
    ("busy", "the exact union of kernels, copies and fills; nothing else on the GPU's line is work"),
    ("idle by cause", "what the host was doing, or that the next kernel had been launched before the gap"),
    ("phases", "ranges first, then the work of the autograd engine and uploads, then the other operators"),
    ("communication", "exposed: no other kernel runs beside the collective; hidden: the rest"),
    ("copies alone", "copies and fills that run while no kernel does"),
    ("at most", POTENTIAL_GAIN),
)


def phase_table(use: TraceUse) -> Table:
    """The phases of the main thread, with what they were inferred from."""
    each = len(use.steps) or 1
    rows = tuple(
        (
            phase, percent(value / use.wall_ns), ns(value / each),
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
    spent, wall = device.time, device.time.wall_ns
    gpu = device.index is not None
    exposed = f"exposed {percent(spent.exposed_ns / wall)}, hidden {percent(_hidden_ns(device) / wall)}"
    copies = ", ".join(
        f"{kind} {percent(alone / wall)}"
        for kind, alone in spent.exposed_copies_ns.items()
        if alone / wall >= LEAST
    )
    yield NamedValues.of(
        ("busy", percent(1 - device.idle)),
        ("idle", percent(device.idle)),
        ("communication", exposed if spent.collective_ns else ""),
        ("copies", f"{percent(spent.copy_ns / wall)} from and to other memory" if gpu else ""),
        ("copies alone", copies),
        ("kernels launched", f"{spent.launches:,}" if gpu else ""),
        title=device_text(device),
    )
    causes = tuple(
        (cause, percent(spent.idle_ns[cause] / wall), ns(spent.idle_ns[cause]))
        for cause in IDLE_CAUSES
        if cause in spent.idle_ns
    )
    if causes:
        yield Table("Idle by cause", ("cause", "share", "time"), causes, frozenset({1, 2}))
    names = ((clip(str(name), _NAME), int(total), count) for name, total, count in spent.top)
    top = tuple((percent(total / wall), f"{count:,}x", name) for name, total, count in names)
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
                "-" if device.index is None else str(device.index), ns(wall), percent(1 - device.idle),
                percent(device.idle), percent(spent.exposed_ns / wall), percent(_hidden_ns(device) / wall),
                cause,
            ))  # fmt: skip
    columns = ("rank", "file", "gpu", "wall", "busy", "idle", "exposed", "hidden", "main cause of idle time")
    return Table("", columns, tuple(rows), frozenset({0, 2, 3, 4, 5, 6, 7}))


def missing_ranks(uses: Sequence[TraceUse]) -> Iterator[Text]:
    """That ranks of the job have no trace here; nothing if all are there, or traces do not tell."""
    ranks, sizes = {use.rank for use in uses}, {use.world_size for use in uses}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None or None in ranks:
        return
    missing = [str(rank) for rank in range(size) if rank not in ranks]
    if missing:
        named = ", ".join(missing[:MOST_RANKS]) + (", …" if len(missing) > MOST_RANKS else "")
        what = counted(len(missing), "rank")
        yield Text(f"There is no trace of {what} of {size}: {named}. The others may wait for it.", "warn")


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


def memory_blocks(use: SnapshotUse) -> Iterator[Block]:
    yield Text(f"{use.path.name}: allocator settings: {use.settings}")
    for device in use.devices:
        yield from _device(device)


def _device(device: DeviceMemory) -> Iterator[Block]:
    streams = f" on {device.streams} streams" if device.streams > 1 else ""
    private = f"{size(device.private_bytes)} (CUDA graphs, torch.compile, MemPool)"
    history = f"{counted(device.allocations, 'allocation')} in {counted(device.entries, 'entry')}{streams}"
    recorded = device.allocations and not device.broken
    peak, used = device.peak, device.most_in_use
    apart = bool(recorded) and used.requested_bytes > (1 + TRIFLE) * peak.requested_bytes
    yield NamedValues.of(
        ("history", history),
        *(("note", note) for note in device.notes),
        ("private pools", private if device.private_bytes else ""),
        *_moment("most reserved" if apart else "peak" if recorded else "final state", peak, apart),
        *(_moment("most in use", used, apart) if apart else ()),
        *(_releases(device) if recorded else ()),
        title=f"GPU {device.index}",
    )
    yield from _owners(used if apart else peak, "Filled by, when most was in use" if apart else "Filled by")
    for failure in device.failures:
        asked = f"{size(failure.asked_bytes)} requested, {size(failure.free_bytes)} free on the GPU"
        pieces = "enough reserved memory was unused, but not in one piece (fragmentation)"
        yield NamedValues.of(
            ("request", asked),
            ("", pieces if failure.fragmented else ""),
            *_moment("in use", failure.moment),
            title=f"Out of memory at entry {failure.moment.entry:,}",
        )
        yield from _owners(failure.moment, "Filled by")
    yield from _what_ifs(device)


def _moment(title: str, moment: Moment, when: bool = False) -> Iterator[tuple[str, str]]:
    reserved, requested, active = moment.reserved_bytes, moment.requested_bytes, moment.active_bytes
    after = f", after {counted(moment.entry, 'entry')}" if when else ""
    yield title, f"{size(reserved)} reserved, {size(requested)} requested by the program{after}"
    if not reserved:
        return

    def part(count: int) -> str:
        return f"{size(count)} ({percent(count / reserved)})"

    if active is None:
        yield "not requested", f"{part(reserved - requested)}: rounding, unused, fragmented"
    else:
        idle, lost = part(reserved - active), part(active - requested)
        yield "fragmentation", f"{idle} reserved but unused, {lost} lost to rounding"


def _owners(moment: Moment, title: str) -> Iterator[Block]:
    total = max(moment.requested_bytes, 1)
    rows = tuple(
        (size(each.requested_bytes), percent(each.requested_bytes / total), f"{each.count:,}x", each.place)
        for each in moment.owners[:_LINES]
    )
    rest = [owner.requested_bytes for owner in moment.owners[_LINES:]]
    note = f"And {len(rest):,} more lines with {size(sum(rest))}." if rest else ""
    if rows:
        yield Table(title, ("requested", "share", "blocks", "line"), rows, frozenset({0, 1, 2}), note)


def _releases(device: DeviceMemory) -> Iterator[tuple[str, str]]:
    """Retries and other releases of cached memory."""
    retried = sum(release.released_bytes for release in device.releases if release.kind == "retry")
    released = f"{device.retries:,}, which released {size(retried)} and waited for the GPU"
    yield "retries", released if retried else "none"
    other = [release.released_bytes for release in device.releases if release.kind != "retry"]
    if other:
        times = counted(len(other), "time")
        yield "released otherwise", f"{times}, {size(sum(other))}, as by torch.cuda.empty_cache()"


def _what_ifs(device: DeviceMemory) -> Iterator[Block]:
    if device.refused:
        yield Text(f"other settings: not replayed: {device.refused}")
    if device.refused or device.peak_error is None:
        return
    recorded = device.peak.reserved_bytes
    # What differs from the recording even with its own settings is an error of the replay, and no effect of others.
    same = round(recorded * (1 + device.peak_error))
    wrong = f"{device.wrong_decisions:,} of {device.allocations:,} decisions differ"
    replayed = wrong if device.wrong_decisions else "every segment as recorded"
    doubt = "" if abs(device.peak_error) <= ERROR else "; low confidence"
    rows = []
    for trial in device.what_ifs:
        reserved, change = MISSING, MISSING
        if trial.reserved_bytes is not None:
            share = trial.reserved_bytes / same - 1 if same else 0.0
            reserved, change = size(trial.reserved_bytes), f"{share:+.1%}" if round(share, 3) else "same"
        verdict = trial.verdict + (f": {trial.retries:,}" if trial.verdict == "with retries" else "")
        collected = counted(trial.collections, "collection") if trial.collections else ""
        rows.append((trial.setting, reserved, change, ", ".join(filter(None, (verdict, collected)))))
    own = f"With the settings of the recording, the replay reserves {size(same)}, {replayed}"
    note = f"{own}: error {device.peak_error:+.1%}{doubt}. Changes are relative to that. {_limit_text(device.limit)}"
    if device.limit.known == "given" and recorded > device.limit.high:
        note += f" The recording exceeds this limit: it reserved {size(recorded)}."
    if device.failures and any(trial.reserved_bytes is not None for trial in device.what_ifs):
        note += " Where a request that failed fits, what the program does with it is unknown: it is freed at once."
    columns = ("setting", "reserved", "change", "outcome")
    yield Table("Replayed with other settings", columns, tuple(rows), frozenset({1, 2}), note)


def _limit_text(limit: Limit) -> str:
    """Under which limit the settings were replayed."""
    low, high = size(limit.low), size(limit.high)
    match limit.known:
        case "given":
            return f"Replayed with a limit of {low}."
        case "out of memory":
            what = "what was reserved when a request failed, and what was left"
            return f"Replayed with a limit of {low}: {what}."
        case "retries":
            return f"Replayed with limits of {low} and {high}: retries prove that the limit is between."
    return f"Replayed without a limit, but garbage collection for one of {low}, the most that was reserved."


def trace_page(uses: Sequence[TraceUse], made_t: float) -> Page:
    """The page. uses: in the order of their ranks; of several, one is shown in detail."""
    use, device, why = main_device(uses)
    found = tuple(
        verdict(finding, main=index == 0) for index, finding in enumerate(findings(use, device, uses))
    )
    name = printable(use.path.name)
    shown: list[tuple[str, str, tuple[Block, ...]]] = [
        ("verdict", "Verdict", found),
        ("trace", "Trace", (_identity(use),)),
    ]
    if len(uses) > 1:
        told = *missing_ranks(uses), Text(f"Shown below: {name} {why}.")
        shown.insert(1, ("ranks", "Ranks", (ranks_table(uses), *told)))
    devices = use.devices if len(uses) == 1 else (device,)
    shown += [(f"device-{one.index}", device_text(one), tuple(device_blocks(one))) for one in devices]
    if use.operators:
        shown.append(("phases", "Phases", (phase_table(use),)))
        shown.append(("steps", "Steps", tuple(_steps(use))))
    shown.append(("methods", "How it was measured", (NamedValues.of(*TRACE_METHODS),)))
    title = name if len(uses) == 1 else counted(len(uses), "trace")
    return Page(
        name=title,
        subtitle=device_text(device),
        status=("trace", ""),
        summary=Text(f"{examined(use)[:1].upper()}{examined(use)[1:]}."),
        made=f"written {moment(made_t)}",
        sections=tuple(ReportSection(key, heading, blocks) for key, heading, blocks in shown if blocks),
    )


def _identity(use: TraceUse) -> NamedValues:
    begin = time.gmtime(use.begin_t)
    started = None if use.begin_t is None else f"{time.strftime('%Y-%m-%d %H:%M:%S', begin)} UTC"
    return NamedValues.of(
        ("examined", examined(use)),
        ("started", started),
        ("devices", ", ".join(device_text(device) for device in use.devices)),
        ("damaged events", f"{use.skipped:,}, which were skipped" if use.skipped else ""),
        ("record", printable(str(use.path))),
    )


def trace_blocks(uses: Sequence[TraceUse]) -> list[Block]:
    """The page for a terminal, without its single steps and its methods."""
    shown = (section for section in trace_page(uses, 0.0).sections if section.key not in ("steps", "methods"))
    return [block for section in shown for block in section.blocks]


def _steps(use: TraceUse) -> Iterator[Block]:
    spent = [use.phase_ns(begin, end) for begin, end in use.steps]
    names = [name for name in PHASES if any(name in found for found in spent)]
    rows = tuple(
        (str(number), ns(end - begin), *(ns(found.get(name, 0)) for name in names))
        for number, ((begin, end), found) in enumerate(zip(use.steps, spent, strict=True), start=1)
    )
    if rows:
        columns = ("step", "time", *names)
        yield Table("", columns, rows, frozenset(range(len(columns)))).newest(STEPS)
