"""What all events share: the base class, which is a line of JSON, and the types of their fields.

A record may come from a damaged disk or from somebody else, so every value is checked when it is read. Count, Figure,
Flag and Time are int, float and bool for type checkers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Required

from annotated_types import Ge, Le
from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, Strict
from pydantic_core import CoreSchema, PydanticSerializationError, core_schema, to_json, to_jsonable_python

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
        body = to_json(writable(to_jsonable_python(value)), ensure_ascii=True)
    return f'{{"v":{VERSION},"type":"{kind}","t":{round(t, 4)},{body[1:].decode()}'


def other_version(first_line: bytes) -> str:
    """Why a record that begins with this line cannot be read; "" if it has the present version, or is damaged."""
    found = re.match(rb'\{"v":(\d{1,4}),', first_line)
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
# The rank that holds up the others: late_ns a step longer than the median rank, of it phase_ns in phase; ceiling: speed
# with that rank as fast as the next slowest, over now, at most; where: file, line and function, if known. count: number
# of stragglers, this one included, to which the ceiling then refers; same_host: they are all ranks of a host.
Late = Annotated[Json, _As(_Late)]
# Rows of events; see StacksEvent, FunctionsEvent, HoldersEvent, KernelsEvent, BaselineEvent and RanksEvent.
Frame = tuple[str, str, Count, str, Count, Count]
Function = tuple[str, Count, str, Count, Count, Count, str, str]
Wait = tuple[str, Count, str, str, Count, Count]
Call = tuple[str, Count, str, str, str, Count, Count, str]
Table = tuple[str, str, Count, Count, Count, Figure, str]
Kernel = tuple[str, Figure, Count]
ModuleTime = tuple[str, str, Figure, Figure, Count]
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
