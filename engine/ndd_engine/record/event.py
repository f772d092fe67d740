"""What all events share, and the events about processes and ranks.

An event is a line of JSON. A record may come from a damaged disk or from somebody else, so every value is checked when
it is read. Count, Figure, Flag and Time are int, float and bool for type checkers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Required

from annotated_types import Ge, Le
from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, Strict
from pydantic_core import CoreSchema, PydanticSerializationError, core_schema, to_json

# That of typing lacks what pydantic needs before Python 3.12.
from typing_extensions import TypedDict

VERSION = 2

# Integers of a record are counts, sizes, times and ids: never negative.
LARGEST_INT = 2**63 - 1
# Sums and products of a few such numbers are finite.
LARGEST = 1e100
# Levels of tables and lists whose content is not declared.
DEPTH = 16

Json = dict[str, Any]
Count = Annotated[int, Strict(), Ge(0), Le(LARGEST_INT)]
Flag = Annotated[bool, Strict()]
# Unix time in seconds, up to the year 9892: later ones have no date.
Time = Annotated[float, Strict(), Ge(0.0), Le(2.5e11)]


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of all events."""

    type: ClassVar[str]

    def to_json(self, t: float) -> str:
        """The event as one line of JSON without newline, in ASCII. NaN and infinities become null."""
        return line_of(self.type, t, self)


def line_of(kind: str, t: float, value: object) -> str:
    """A line of the record with the fields of a dataclass or the keys of a dict. t: Unix time in seconds."""
    try:
        body = to_json(value, inf_nan_mode="null", ensure_ascii=True)
    except PydanticSerializationError:  # a file name that is no text
        plainly = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        body = to_json(writable(plainly), ensure_ascii=True)
    return f'{{"v":{VERSION},"type":"{kind}","t":{round(t, 4)},{body[1:].decode()}'


def other_version(first_line: bytes) -> str:
    """Why a record that begins with this line cannot be read; "" if it has the present version, or is damaged."""
    found = re.match(rb'\s*\{\s*"v"\s*:\s*(\d{1,9})\s*,', first_line)
    if found is None or (version := int(found[1])) == VERSION:
        return ""
    reader = "0.5.0" if version == 1 else "the version that wrote it"
    return f"its format is version {version}, not {VERSION}: read it with ndd-console {reader}"


def writable(value: Any) -> Any:
    """The value as a reader of the record gets it: NaN and infinities are None, and all text is valid."""
    if isinstance(value, float):
        return value if value == value and value not in (float("inf"), float("-inf")) else None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {writable(key): writable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [writable(item) for item in value]
    return value


def plain(value: Any, depth: int = DEPTH) -> bool:
    """Whether it is a JSON value with numbers up to LARGEST and at most `depth` levels."""
    if isinstance(value, (int, float)):
        return -LARGEST <= value <= LARGEST
    if isinstance(value, dict):
        value = list(value.values())
    return not isinstance(value, list) or (depth > 0 and all(plain(item, depth - 1) for item in value))


def _checked(value: Any) -> Any:
    if not plain(value):
        raise ValueError("a number is too large, or it is nested too deep")
    return value


class _As:
    """Checked as `kind`, a TypedDict, a tuple or Literals, while type checkers see what it annotates.

    Keys may be missing unless required. Those that `kind` does not declare may hold any plain JSON value.
    """

    def __init__(self, kind: Any) -> None:
        self._kind, self._declared = kind, getattr(kind, "__annotations__", {}).keys()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(self._kind)
        if not self._declared:
            return schema
        return core_schema.no_info_after_validator_function(self._rest, schema)

    def _rest(self, table: Json) -> Json:
        if not table.keys() <= self._declared:
            _checked({key: table[key] for key in table.keys() - self._declared})
        return table


_Whole = Annotated[int, Strict(), Ge(int(-LARGEST)), Le(int(LARGEST))]
_Fraction = Annotated[float, Strict(), Ge(-LARGEST), Le(LARGEST)]
# As written: 60 stays 60, so that a live run and its replay are shown alike.
Figure = Annotated[float, _As(_Whole | _Fraction)]

# Tables and rows of events.

AnyTable = Annotated[Json, AfterValidator(_checked)]
Running = Literal["preparing", "training", "evaluating", "checkpointing", "paused", "stopping"]
Ended = Literal["done", "stopped", "failed", "interrupted", "terminated"]
Status = Annotated[str, _As(Running | Ended)]
Final = Annotated[str, _As(Ended)]


class _Table(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]


class _Batch(_Table, total=False):
    micro: Count | None
    accumulation: Count | None


class _Due(_Table, total=False):
    every_steps: Count
    every_epochs: Count
    every_minutes: Figure
    at_end: Flag


class _Configuration(_Table, total=False):
    run: AnyTable
    workload: AnyTable
    batch: _Batch
    evaluate: _Due
    checkpoint: _Due


class _PhaseTimes(_Table, total=False):
    host_ns: Required[Count]
    p50_ns: Figure | None
    p95_ns: Figure | None
    max_ns: Figure | None
    device_ns: Figure | None


class _Process(_Table, total=False):
    pid: Required[Count]
    name: Required[str]
    cores: Required[Figure]
    stoppable: Flag | None


class _HostCounters(_Table, total=False):
    cpu_percent: Figure | None
    cpu_per_core: list[Figure] | None
    process_cpu_percent: Figure | None
    ranks_cpu_percent: Figure | None
    rss_bytes: Figure | None
    rss_peak_bytes: Figure | None  # since the process began
    swap_bytes: Figure | None  # of the process that trains; null where the system does not say
    workers: Count | None
    workers_rss_bytes: Figure | None
    workers_private_bytes: Figure | None
    workers_shared_bytes: Figure | None
    memory_available_bytes: Figure | None
    memory_limit_bytes: Figure | None
    disk_free_bytes: Figure | None
    disk_read_bytes_s: Figure | None
    disk_write_bytes_s: Figure | None
    neighbours: list[_Process] | None
    cpu_throttled: Figure | None


class _GpuCounters(_Table, total=False):
    util_percent: Figure | None
    mem_util_percent: Figure | None
    memory_used_bytes: Figure | None
    memory_free_bytes: Figure | None
    memory_total_bytes: Figure | None
    memory_others_bytes: Figure | None
    temperature_c: Figure | None
    power_w: Figure | None
    power_limit_w: Figure | None
    sm_clock_mhz: Figure | None
    sm_clock_max_mhz: Figure | None
    mem_clock_mhz: Figure | None
    throttle: list[str] | None
    pcie_rx_bytes_s: Figure | None
    pcie_tx_bytes_s: Figure | None
    processes: Count | None


class _Gpu(_Table, total=False):
    memory_total_bytes: Count | None
    driver: str | None
    profile: AnyTable | None


class _MarkData(_Table, total=False):
    metrics: dict[str, Figure | None] | None
    seconds: Figure | None
    better: str
    batches: Count | None
    file: str
    bytes: Count
    mode: str
    status: Status
    setting: str
    graphs: Count
    reason: str
    limit: Flag
    line: Count
    function: str
    holders: list[Count]


class _Side(_Table, total=False):
    device: str
    device_name: str
    threads: Count | None
    items_per_step: Count
    steps_per_epoch: Count
    prepare_s: Figure | None
    compile_s: Figure | None
    warmup_s: Figure | None
    warmup_steps: Count
    step_s: Figure | None
    items_per_s: Figure | None
    peak_bytes: Figure | None
    reserved_bytes: Figure | None
    losses: list[Figure | None]
    not_in_effect: list[str]
    ranks: Count
    rank_peaks: list[Figure]
    parts_ns: dict[str, Figure]


class _Late(_Table, total=False):
    rank: Required[Count]
    host: str
    late_ns: Required[Figure]
    phase: Required[str]
    phase_ns: Required[Figure]
    ceiling: Required[Figure]
    since_step: Count
    where: str | None
    count: Count
    same_host: Flag


# Every sample has all counters.
HOST_KEYS, GPU_KEYS = tuple(_HostCounters.__annotations__), tuple(_GpuCounters.__annotations__)
Configuration = Annotated[Json, _As(_Configuration)]
PhaseTimes = Annotated[Json, _As(_PhaseTimes)]
HostCounters = Annotated[Json, _As(_HostCounters)]
GpuCounters = Annotated[Json, _As(_GpuCounters)]
Gpu = Annotated[Json, _As(_Gpu)]
MarkData = Annotated[Json, _As(_MarkData)]
Side = Annotated[Json, _As(_Side)]
# The rank that holds up the others. late_ns: how much longer its step is than that of the median rank; phase_ns: of
# that, in phase. ceiling: speed with that rank as fast as the next slowest, over now, at most. where: file, line and
# function, if known. count: number of stragglers, this one included, to which the ceiling then refers. same_host: they
# are all ranks of a host.
Late = Annotated[Json, _As(_Late)]
# Rows of events; see StacksEvent, FunctionsEvent, HoldersEvent, KernelsEvent, BaselineEvent and RanksEvent.
Frame = tuple[str, str, Count, str, Count, Count]
Function = tuple[str, Count, str, Count, Count, Count, str, str]
Wait = tuple[str, Count, str, str, Count, Count]
Call = tuple[str, Count, str, str, str, Count, Count, str]
Table = tuple[str, str, Count, Count, Count, Figure, str]
Kernel = tuple[str, Figure, Count]
ModuleTime = tuple[str, str, Figure, Figure, Count, Count, Count]
Operation = tuple[str, str, str, str, str, Count, str, str, str, Figure, Figure, Count, Figure]
Loop = tuple[str, Count, str, Count, Count, Figure, Figure, Count, Figure, Count, Count, str, str]
Repeat = tuple[str, str, str, Count, str, Count, Figure, Figure]
Unused = tuple[str, str, Figure]
LineTime = tuple[str, Count, str, Figure, Figure, Count]
ThreadTime = tuple[Figure, Figure]
ShapeCount = tuple[str, Count, Count]
Summary = tuple[Figure, Figure, Figure, Figure, Count]
# What the losses are, "NaN" or "infinite", and the first step with such a loss. Of the finite ones before: the step of
# the last one, its value, and the lowest value.
BadLoss = tuple[str, Count, Count | None, Figure | None, Figure | None]
# File, line and function.
Place = tuple[str, Count, str]
# Losses and the user's own values are null if they are not finite; readers skip these.
LastLoss = Annotated[tuple[int, float], _As(tuple[Count, Figure | None])]
OwnValues = Annotated[dict[str, float], _As(dict[str, Figure | None])]


@dataclass(frozen=True, slots=True)
class MeasuredChange:
    """What a trial has measured of a change. ratio: the speedup, with its interval low..high; null without one."""

    verdict: str
    ratio: Figure | None = None
    low: Figure | None = None
    high: Figure | None = None


# Kinds of stalls that are over, and those that are no hang as far as is known: the process computes, or waits for a
# person, on purpose or for ranks that may compute.
OVER = "over"
NO_HANGS = ("computing", "input", "sleep", "stopped", "ranks")


@dataclass(frozen=True, slots=True)
class StallEvent(Event):
    """No process of the run has made progress for a while, or does so again.

    step: optimizer steps done. seconds: without progress. kind: "threads" (forked after threads were started), "lock",
    "queue", "dead" (of a process that another one waits for), "collective", "storage" or "waits" (anything else); none
    of a hang: "stopped", "input", "sleep", "ranks" and "computing"; or "over". text: which process waits for what.
    advice: what to change, or "". where: the line of the user's code that waits, or "". processes: what each process
    does, one line each.
    """

    type: ClassVar[str] = "stall"
    step: Count
    seconds: Figure
    kind: str
    text: str
    advice: str = ""
    where: str = ""
    processes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeathEvent(Event):
    """A process that the training process has started, such as a loader worker, has died.

    step: optimizer steps done. pid: of the process. name: "loader worker 1". how: "SIGKILL", "status 3" or "" if it is
    not known. resident_bytes: its memory when it was seen last. shm_free_bytes: free in /dev/shm afterwards. oom_kills:
    by how much the kernel's out-of-memory counter of the control group rose meanwhile, null without a counter. doing:
    what a loader worker was making, "batch 12 (items 3, 4)", or "".
    """

    type: ClassVar[str] = "death"
    step: Count
    pid: Count
    name: str
    how: str
    resident_bytes: Count | None = None
    shm_free_bytes: Count | None = None
    oom_kills: Count | None = None
    doing: str = ""


@dataclass(frozen=True, slots=True)
class DescriptorsEvent(Event):
    """Open descriptors of the process that trains; recorded as their number changes.

    step: optimizer steps done. open: number of descriptors. limit: the most that it may have, null if it is not known.
    kinds: of the newest ones, "shared memory", "socket", "pipe" or "file" -> number. path: what the newest files have
    in common, with N for digits that differ, or "". where: the line of the script that keeps them, as far as its source
    tells, or "".
    """

    type: ClassVar[str] = "descriptors"
    step: Count
    open: Count
    limit: Count | None = None
    kinds: dict[str, Count] = field(default_factory=dict)
    path: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """A container, or a tensor, that has grown between two looks at what a process keeps.

    type: "list", "tensor". length, grown: elements, and those since the earlier look. bytes: of the latter, estimated
    from the newest ones, without their autograd graphs; graphs: whether they have some. holds: the newest element,
    "tensor 4 x 512". kind, name, owner: who refers to it, as far as that is known. A "global" is a variable of the
    module `file`. A "local", "closure", "default" or "cache" belongs to the function `owner`, which begins at
    file:line. An "attribute" belongs to an object of the class `owner`, and a "class" to the class itself. limit: the
    most elements that it can have, null without one. at: file and line where it grows, if the source shows that.
    """

    type: str
    length: Count
    grown: Count
    bytes: Count
    holds: str
    graphs: Flag
    kind: str = ""
    name: str = ""
    owner: str = ""
    file: str = ""
    line: Count = 0
    limit: Count | None = None
    at: tuple[str, Count] | None = None


@dataclass(frozen=True, slots=True)
class HoldersEvent(Event):
    """A look at what the process that trains keeps, when its memory grows.

    step: optimizer steps done. steps: since the look before it, which it is compared with; 0 for the first. ns: what
    it took. holders: what has grown, the most bytes first. tensors: [shape, number, bytes] of the live ones. inside:
    "evaluate" for a look within an evaluation, of which `steps` then counts batches. grown_bytes: by what memory in use
    has grown since the look before it; null if that is not measured. gradients: whether autograd was on within the
    evaluation.
    """

    type: ClassVar[str] = "holders"
    step: Count
    steps: Count
    ns: Count
    holders: list[Holder]
    tensors: list[ShapeCount] = field(default_factory=list)
    inside: str = ""
    grown_bytes: Count | None = None
    gradients: Flag = False


# Phases outside of steps: how often they run is a setting, so they do not count towards the speed.
ASIDES = ("evaluate", "checkpoint")


@dataclass(frozen=True, slots=True)
class RankEvent(Event):
    """What one rank did in the steps of a window; from these the ranks are compared. In the record of a rank.

    step: optimizer steps done at the end. begin: steps before the window. numbers: the steps that were timed, counted
    from begin. own_ns: wall time of each of these without waiting for other ranks, evaluations and checkpoints.
    wait_ns: time in which they waited for other ranks. phases_ns: {phase: own time of these steps}.
    cpu_ns: processor time of these steps, or null.
    hidden_ns: exchange during the computation of one step, or null. rss_bytes: resident memory of the process, or null.
    allocated_bytes: GPU memory allocated by torch, or null.
    """

    type: ClassVar[str] = "rank"
    step: Count
    begin: Count
    numbers: list[Count]
    own_ns: list[Count]
    wait_ns: list[Count]
    phases_ns: dict[str, Count]
    cpu_ns: Count | None = None
    hidden_ns: Count | None = None
    rss_bytes: Count | None = None
    allocated_bytes: Count | None = None

    @property
    def wall_ns(self) -> int:
        """Wall time of the timed steps."""
        return sum(self.own_ns) + sum(self.wait_ns)


@dataclass(frozen=True, slots=True)
class RanksEvent(Event):
    """What all ranks did in the same steps, compared by rank 0 or by the console that observes a script.

    step: optimizer steps done at the end. steps: number of steps that the figures are of, which every rank timed.
    world, hosts: numbers of ranks and of hosts. strategy: "ddp", "fsdp2", or "" if it is unknown.
    wall_ns: mean wall time of the ranks. exchange_ns: sum over the steps of the least wait of any rank, which is what
    exchanging data takes; skew_ns: mean wait beyond that, which is waiting for slower ranks. hidden_ns: mean time of
    exchange during computation, or null. critical_ns: sum over the steps of the longest own time of any rank.

    columns_us: {name: [least, median, mean, most, rank of the most]} over the ranks, in microseconds per step.
    Names are the phases without their waiting for other ranks, "wait" (that waiting),
    "own" (wall time without "wait", evaluations and checkpoints) and "cpu" (processor time). memory_bytes: the same for
    "rss" and "allocated". rows_us: {rank: figures} of up to eight ranks with the longest own time, in microseconds per
    step; row_names: what the figures are: "own", "wait", "cpu" if it is known, and the larger phases. row_hosts:
    {rank: host} of these ranks, {} on one host.

    cells: one digit for every group of consecutive ranks: by how much the longest own time among them exceeds the
    median of all, in units of 2 % of it, at most 9; "" if rows_us has all ranks. cell_ranks: number of ranks of a
    group. late: the straggler, or null.

    launched: number of ranks that were launched if only `world` of them are observed, or null. first_rank: number of
    the first one that is observed.
    """

    type: ClassVar[str] = "ranks"
    step: Count
    steps: Count
    world: Count
    hosts: Count
    strategy: str
    wall_ns: Count
    exchange_ns: Count
    skew_ns: Figure
    critical_ns: Count
    columns_us: dict[str, Summary]
    rows_us: dict[str, list[Figure]]
    row_names: list[str]
    hidden_ns: Count | None = None
    memory_bytes: dict[str, Summary] = field(default_factory=dict)
    row_hosts: dict[str, str] = field(default_factory=dict)
    cells: str = ""
    cell_ranks: Count = 0
    late: Late | None = None
    launched: Count | None = None
    first_rank: Count = 0


# What ranks spend on each other; both are part of a step like a phase.
SHARED = (EXCHANGE := "exchange", SKEW := "skew")
# A rank counts as the longest in something if it is in this part of the windows.
MOSTLY = 0.7


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks over the recent windows.

    newest: the event of the newest window with steps. windows: number of windows. phases: mean over the ranks by phase;
    those outside ASIDES and exchange_ns and skew_ns add up to step_ns. longest: phase, "own" or "wait" -> (nanoseconds,
    rank), the rank None if it is another one each time. hidden_ns: exchange during computation, None if unknown.
    cpu_ns: mean processor time, None if unknown. alternating_ns: the part of the step by which the slowest rank of each
    step is slower than a rank that is the slowest most of the time, or than the mean if there is no such rank.
    """

    newest: RanksEvent
    windows: int
    step_ns: float
    phases: Mapping[str, float]
    exchange_ns: float
    skew_ns: float
    hidden_ns: float | None
    cpu_ns: float | None
    alternating_ns: float
    longest: Mapping[str, tuple[float, int | None]] = field(default_factory=dict)

    @property
    def late(self) -> Mapping[str, Any] | None:
        """The rank that holds up the others, see record.event.Late."""
        return self.newest.late

    @property
    def own_ns(self) -> float:
        """Mean time of a step without waiting."""
        return self.step_ns - self.exchange_ns - self.skew_ns


def across(events: Sequence[RanksEvent]) -> Ranks | None:
    """The figures of these windows; None without one with steps, or of a single rank."""
    stepped = [event for event in events if event.steps and event.world > 1]
    if not stepped:
        return None
    steps = sum(event.steps for event in stepped)
    phases: dict[str, float] = {}
    longest: dict[str, float] = {}
    who: dict[str, Counter[int]] = {}
    for event in stepped:
        for name, (_, _, mean, most, rank) in event.columns_us.items():
            phases[name] = phases.get(name, 0.0) + mean * 1e3 * event.steps / steps
            longest[name] = longest.get(name, 0.0) + most * 1e3 * event.steps / steps
            who.setdefault(name, Counter())[int(rank)] += 1
    own = phases.pop("own", 0.0)
    leader = _mostly(who.get("own", Counter()), len(stepped))
    slowest = own if leader is None else longest.get("own", own)
    phases.pop("wait", None)
    cpu = phases.pop("cpu", None)
    hidden = [event.hidden_ns for event in stepped if event.hidden_ns is not None]
    exchange = sum(event.exchange_ns for event in stepped) / steps
    skew = sum(event.skew_ns for event in stepped) / steps
    return Ranks(
        newest=stepped[-1],
        windows=len(stepped),
        step_ns=sum(ns for name, ns in phases.items() if name not in ASIDES) + exchange + skew,
        phases=phases,
        exchange_ns=exchange,
        skew_ns=skew,
        hidden_ns=sum(hidden) / steps if len(hidden) == len(stepped) else None,
        cpu_ns=cpu if all("cpu" in event.columns_us for event in stepped) else None,
        alternating_ns=max(sum(event.critical_ns for event in stepped) / steps - slowest, 0.0),
        longest={name: (ns, _mostly(who[name], len(stepped))) for name, ns in longest.items()},
    )


def ranks_figures(ranks: Ranks) -> dict[str, Any]:
    """The figures of all ranks as JSON; units are in the names, null is unknown. Times are per step."""
    newest = ranks.newest
    return {
        "world": newest.world,
        "launched": newest.launched,
        "first_rank": newest.first_rank,
        "hosts": newest.hosts,
        "strategy": newest.strategy or None,
        "step_s": ranks.step_ns * 1e-9,
        "work_s": ranks.own_ns * 1e-9,
        "exchange_s": ranks.exchange_ns * 1e-9,
        "hidden_exchange_s": None if ranks.hidden_ns is None else ranks.hidden_ns * 1e-9,
        "skew_s": ranks.skew_ns * 1e-9,
        "alternating_s": ranks.alternating_ns * 1e-9,
        "cpu_s": None if ranks.cpu_ns is None else ranks.cpu_ns * 1e-9,
        "phases_s": {name: value * 1e-9 for name, value in ranks.phases.items()},
        "longest": {
            name: {"seconds": value * 1e-9, "rank": rank} for name, (value, rank) in ranks.longest.items()
        },
        "late": ranks.late,
        "newest": {
            "step": newest.step,
            "columns_us": newest.columns_us,
            "memory_bytes": newest.memory_bytes,
            "row_names": newest.row_names,
            "rows_us": newest.rows_us,
            "row_hosts": newest.row_hosts,
            "cells": newest.cells,
            "cell_ranks": newest.cell_ranks,
        },
    }


def brief(event: RanksEvent) -> RanksEvent:
    """Without what only the newest window is shown of, so that a state stays small."""
    return replace(event, rows_us={}, row_names=[], row_hosts={}, cells="", cell_ranks=0, memory_bytes={})


def _mostly(ranks: Counter[int], windows: int) -> int | None:
    rank, count = next(iter(ranks.most_common(1)), (None, 0))
    return rank if count >= MOSTLY * windows else None
