"""Declared types of the tables and rows inside events, as far as readers rely on them; see shape.check_of.

Keys may be missing unless required, and unknown keys may hold any JSON value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Required, TypedDict

from .event import Json

Running = Literal["preparing", "training", "evaluating", "checkpointing", "paused", "stopping"]
Ended = Literal["done", "stopped", "failed", "interrupted", "terminated"]


class _Batch(TypedDict, total=False):
    micro: int | None
    accumulation: int | None


class _Due(TypedDict, total=False):
    every_steps: int
    every_epochs: int
    every_minutes: float
    at_end: bool


class _Configuration(TypedDict, total=False):
    run: Json
    workload: Json
    batch: _Batch
    evaluate: _Due
    checkpoint: _Due


class _PhaseTimes(TypedDict, total=False):
    host_ns: Required[int]
    p50_ns: float | None
    p95_ns: float | None
    max_ns: float | None
    device_ns: float | None


class _Process(TypedDict, total=False):
    pid: Required[int]
    name: Required[str]
    cores: Required[float]
    stoppable: bool | None


class _HostCounters(TypedDict, total=False):
    cpu_percent: float | None
    cpu_per_core: list[float] | None
    process_cpu_percent: float | None
    ranks_cpu_percent: float | None
    rss_bytes: float | None
    workers: int | None
    workers_rss_bytes: float | None
    memory_available_bytes: float | None
    memory_limit_bytes: float | None
    disk_free_bytes: float | None
    disk_read_bytes_s: float | None
    disk_write_bytes_s: float | None
    neighbours: list[_Process] | None
    cpu_throttled: float | None


class _GpuCounters(TypedDict, total=False):
    util_percent: float | None
    mem_util_percent: float | None
    memory_used_bytes: float | None
    memory_free_bytes: float | None
    memory_total_bytes: float | None
    memory_others_bytes: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    sm_clock_mhz: float | None
    sm_clock_max_mhz: float | None
    mem_clock_mhz: float | None
    throttle: list[str] | None
    pcie_rx_bytes_s: float | None
    pcie_tx_bytes_s: float | None
    processes: int | None


class _Gpu(TypedDict, total=False):
    memory_total_bytes: int | None
    driver: str | None
    profile: Json | None


class _MarkData(TypedDict, total=False):
    metrics: dict[str, float | None] | None
    seconds: float | None
    better: str
    batches: int | None
    file: str
    bytes: int
    mode: str
    status: Running | Ended
    setting: str
    graphs: int
    reason: str
    limit: bool
    line: int
    function: str
    holders: list[int]


class _Evidence(TypedDict):
    text: str
    source: str


class _Change(TypedDict, total=False):
    text: str
    sets: list[str]
    where: str | None


class _Finding(TypedDict, total=False):
    cause: str
    title: str
    evidence: list[_Evidence]
    confidence: str
    share: float | None
    ceiling: float | None
    changes: list[_Change]
    leave: str
    from_steps: int | None


class _Side(TypedDict, total=False):
    device: str
    device_name: str
    threads: int | None
    items_per_step: int
    steps_per_epoch: int
    prepare_s: float | None
    compile_s: float | None
    warmup_s: float | None
    warmup_steps: int
    step_s: float | None
    items_per_s: float | None
    peak_bytes: float | None
    reserved_bytes: float | None
    losses: list[float | None]
    not_in_effect: list[str]
    ranks: int
    rank_peaks: list[float]
    parts_ns: dict[str, float]


class _Late(TypedDict, total=False):
    rank: Required[int]
    host: str
    late_ns: Required[float]
    phase: Required[str]
    phase_ns: Required[float]
    ceiling: Required[float]
    since_step: int
    where: str | None
    count: int
    same_host: bool


@dataclass
class _State:
    """A fold event's state is checked when it is restored; see fold.from_event."""


# Tables of events: any JSON object for type checkers, checked as the type above.
Configuration = Annotated[Json, _Configuration]
PhaseTimes = Annotated[Json, _PhaseTimes]
HostCounters = Annotated[Json, _HostCounters]
GpuCounters = Annotated[Json, _GpuCounters]
Gpu = Annotated[Json, _Gpu]
MarkData = Annotated[Json, _MarkData]
Finding = Annotated[Json, _Finding]
Side = Annotated[Json, _Side]
State = Annotated[Json, _State]
# The rank that holds up the others: late_ns a step longer than the median rank, of it phase_ns in phase; ceiling: speed
# with that rank as fast as the next slowest, over now, at most; where: file, line and function, if known. count: number
# of stragglers, this one included, to which the ceiling then refers; same_host: they are all ranks of a host.
Late = Annotated[Json, _Late]
# Rows of events; see StacksEvent, FunctionsEvent, KernelsEvent and BaselineEvent.
Frame = Annotated[list[Any], tuple[str, str, int, str, int, int]]
Function = Annotated[list[Any], tuple[str, int, str, int, int, int, str, str]]
Wait = Annotated[list[Any], tuple[str, int, str, str, int, int]]
Kernel = Annotated[list[Any], tuple[str, float, int]]
ModuleTime = Annotated[list[Any], tuple[str, str, float, float, int]]
LineTime = Annotated[list[Any], tuple[str, int, str, float, float, int]]
ThreadTime = Annotated[list[float], tuple[float, float]]
