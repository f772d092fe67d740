"""Reads files that torch has written elsewhere: traces, and memory snapshots.

A trace is JSON of torch.profiler, plain or gzipped, of 2021 and later, of CUDA, ROCm and XPU. A memory snapshot is a
pickle of `torch.cuda.memory._dump_snapshot()`, plain or gzipped. A pickle can run any code when it is loaded. A
snapshot consists of dicts, lists, strings and numbers only, so everything else is refused. A subprocess with limited
memory loads the file first: a damaged pickle can also ask for more memory than the machine has, or crash the
interpreter.
"""

from __future__ import annotations

import gc
import gzip
import io
import json
import pickle
import re
import subprocess
import sys
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ndd_engine.errors import UsageError
from ndd_engine.measure.memory import Frames
from ndd_engine.measure.timeline import TraceEvent, total, union
from ndd_engine.text import counted, percent, printable, size
from ndd_watch.mapped import NOTED

# Maximum size of the decompressed file. Reading takes about ten times as much memory.
MAX_BYTES = 1 << 30
# The first byte of a pickle, as snapshots are.
_PICKLE = b"\x80"
# A file is read in pieces of this size.
_PIECE = 1 << 22


def contents(path: Path, shown: str, advice: str) -> bytes:
    """The bytes of a file, decompressed. shown: its name in messages; advice: how to make it smaller.

    Raises UsageError.
    """
    try:
        if not path.is_file():
            problem = (
                "is a folder" if path.is_dir() else "does not exist" if not path.exists() else "is no file"
            )
            raise UsageError(f"{shown} {problem}")
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            source: Any = gzip.GzipFile(fileobj=file) if packed else file
            pieces, length = [], 0
            while piece := source.read(_PIECE):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_BYTES:
                    raise UsageError(f"{shown} is longer than {size(MAX_BYTES)}; {advice}")
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{shown} cannot be read: {printable(reason)}") from None
    if not length:
        raise UsageError(f"{shown} is empty")
    return b"".join(pieces)


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's garbage collector, which would walk millions of new objects again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


_WORK = frozenset({"kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset"})
_ON_GPU = _WORK | {"gpu_user_annotation"}
# What the profiler adds to the GPU's line: of these, slices with counters of kernels instead of their times.
_COUNTERS = "cuda_profiler_range"
_NO_WORK = frozenset({"cuda_sync", "gpu_pm_counter", "overhead", "trace", _COUNTERS})
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "xpu_runtime"})
_OPERATORS = frozenset({"cpu_op", "operator"})
_RANGES = frozenset({"user_annotation", "gpu_user_annotation"})
# Ranges that versions before 1.12 recorded as operators.
_RANGE_NAMES = re.compile(r"ProfilerStep#|enumerate\(DataLoader\)|Optimizer\.|## |nccl:|ndd: ")
STEP = "ProfilerStep#"
# First words of ranges that libraries and people write -> phase.
PHASE_WORDS = {
    "backward": "backward",
    "forward": "forward",
    "distributeddataparallel.forward": "forward",
    "fullyshardeddataparallel.forward": "forward",
    "loss": "loss",
    "dataloader": "data_wait",
    "data": "data_wait",
    "evaluate": "evaluate",
    "validation": "evaluate",
}
# Operators of backward in traces before 2021-07, which do not contain the engine's own ranges.
OLD_BACKWARD = re.compile(r"\w+Backward\d*$|torch::autograd::AccumulateGrad")
ENGINE = "autograd::engine::evaluate_function"
# Ranges of the training loop; the first kind tells most.
_OF_LOOP = (STEP, "ndd: ", "enumerate(DataLoader)", "Optimizer.")
# Times above this are Unix times: 2001.
_UNIX_NS = 10**18
_EVER = 1 << 62


@dataclass
class TraceFile:
    """The events of one process.

    events: all that matter for the time of the GPU, with times in nanoseconds. main: thread that trains. steps: (begin,
    end) of each range ProfilerStep#N. rank, world_size: of a distributed job, else None. devices: index of each GPU
    with work, in order. names: index -> name of the GPU, where the trace has it. epoch_ns: Unix time of the trace's
    time 0, None if the trace does not tell. counters: slices with counters of kernels instead of their times. others:
    (category, index) of another accelerator -> (begin, end) of its events, which are not analysed. skipped: events that
    are damaged. noted: what the observer of a script adds, {} in other traces.
    """

    name: str
    events: list[TraceEvent] = field(default_factory=list)
    main: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)
    rank: int | None = None
    world_size: int | None = None
    devices: tuple[int, ...] = ()
    names: dict[int, str] = field(default_factory=dict)
    epoch_ns: int | None = None
    counters: int = 0
    others: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)
    skipped: int = 0
    noted: dict[str, Any] = field(default_factory=dict)

    @property
    def span(self) -> tuple[int, int]:
        """(begin, end) of the GPU's work, or of all events without any."""
        timed = [item for item in self.events if item.on_gpu and not item.annotation] or self.events
        return min(item.begin for item in timed), max(item.end for item in timed)

    @property
    def unseen(self) -> str:
        """What the trace does not show of the accelerators that it names; "" if it shows all, or there are none."""
        if self.devices:
            return ""
        if self.counters:
            return (
                f"it has counters of {counted(self.counters, 'kernel')} instead of their times (cuda_profiler_range), "
                "so the busy and idle time of the GPU is unknown"
            )
        if self.others:
            (kind, index), spans = max(self.others.items(), key=lambda item: len(item[1]))
            begin, end = min(low for low, _ in spans), max(high for _, high in spans)
            busy = percent(total(union(spans, begin, end)) / max(end - begin, 1))
            device = f"device {index}" + (f", {self.names[index]}" if self.names.get(index) else "")
            return (
                f"it has {counted(len(spans), 'event')} of another accelerator ({kind}, {device}), which are not "
                f"analysed: from the first to the last it was busy {busy} of the time"
            )
        if self.names:
            return (
                f"it names {counted(len(self.names), 'GPU')}, but has no activity of a GPU: profile with "
                "ProfilerActivity.CUDA to record it"
            )
        return ""


def read_trace(path: Path) -> TraceFile:
    """The trace in a file. Raises UsageError that names the file and what is wrong with it."""
    with no_collection():
        return _read(path, printable(str(path)))


def _read(path: Path, shown: str) -> TraceFile:
    data = contents(path, shown, "profile fewer steps")
    if data[:1] == _PICKLE:
        kind = (
            "a memory snapshot: use ndd-console memory"
            if b"device_traces" in data
            else "a pickle, and no trace"
        )
        raise UsageError(f"{shown} is {kind}")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        first = printable(str(error).splitlines()[0])[:200]
        raise UsageError(f"{shown} is damaged or is no JSON: {first}") from None
    entries = body.get("traceEvents") if isinstance(body, dict) else body
    if not isinstance(entries, list):
        raise UsageError(f"{shown} is not a trace of torch.profiler: it has no list of traceEvents")
    found = TraceFile(path.name)
    if isinstance(body, dict):
        _identify(found, body)
    _take_all(found, entries)
    if not found.events and not found.others:
        raise UsageError(
            f"{shown} contains no operators and no GPU kernels; is it a trace of torch.profiler?"
        )
    found.events = _with_threads(found.events)
    if found.epoch_ns is None and found.events and found.span[0] > _UNIX_NS:
        found.epoch_ns = 0
    found.devices = tuple(
        sorted({item.device for item in found.events if item.on_gpu and not item.annotation})
    )
    found.main = _main_thread(found.events)
    found.steps = sorted(
        (item.begin, item.end)
        for item in found.events
        if item.name.startswith(STEP) and not item.on_gpu and item.end > item.begin
    )
    return found


def _identify(found: TraceFile, body: dict[str, Any]) -> None:
    noted = body.get(NOTED)
    found.noted = noted if isinstance(noted, dict) else {}
    found.epoch_ns = _whole(body.get("baseTimeNanoseconds"))
    job = body.get("distributedInfo")
    if isinstance(job, dict):
        found.rank, found.world_size = _whole(job.get("rank")), _whole(job.get("world_size"))
    gpus = body.get("deviceProperties")
    for gpu in gpus if isinstance(gpus, list) else ():
        if isinstance(gpu, dict) and (index := _whole(gpu.get("id"))) is not None:
            found.names[index] = printable(str(gpu.get("name", "")))[:80]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _take_all(found: TraceFile, entries: Iterable[Any]) -> None:
    threads: dict[tuple[str, str], int] = {}
    for entry in entries:
        try:
            if entry["ph"] != "X":
                continue
            category = entry.get("cat", "").lower()
            on_gpu = category in _ON_GPU
            if category in _NO_WORK:
                found.counters += category == _COUNTERS
                continue
            name, arguments = entry["name"], entry.get("args", {})
            known = on_gpu or category in _RUNTIME or category in _OPERATORS or category in _RANGES
            other = None if known or not isinstance(arguments, dict) else _whole(arguments.get("device"))
            if not known and other is None:
                continue
            begin = round(entry["ts"] * 1000)
            end = begin + round(entry["dur"] * 1000)
            if not -_EVER < begin <= end < _EVER or not isinstance(name, str):
                raise ValueError("a negative duration, a time that cannot be, or no name")
            if other is not None:
                found.others.setdefault((printable(category)[:80], other), []).append((begin, end))
                continue
            thread = threads.setdefault((str(entry.get("pid")), str(entry.get("tid"))), len(threads) + 1)
            device = correlation = forward = 0
            sequence = -1
            if on_gpu:
                device = int(arguments.get("device", 0))
            elif category in _OPERATORS and isinstance(arguments, dict):
                number = _whole(arguments.get("Sequence number"))
                sequence = -1 if number is None else number
                forward = _whole(arguments.get("Fwd thread id")) or 0
            if on_gpu or category in _RUNTIME:
                correlation = int(arguments.get("correlation", 0))
            ranged = category in _RANGES or (not on_gpu and _RANGE_NAMES.match(name) is not None)
            given = arguments if category in _OPERATORS else None
            about = device, correlation, sequence, forward, given
            found.events.append(TraceEvent(name, begin, end, thread, on_gpu, ranged, *about))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            found.skipped += 1


def _with_threads(events: list[TraceEvent]) -> list[TraceEvent]:
    """With the threads of forward numbered as all others: torch numbers them apart.

    It is the thread that has most of the sequence numbers that the nodes of backward name.
    """
    having: dict[int, set[int]] = {}
    votes: dict[int, Counter[int]] = {}
    for item in events:
        if item.sequence >= 0 and not item.forward_thread:
            having.setdefault(item.sequence, set()).add(item.thread)
    for item in events:
        if item.sequence >= 0 and item.forward_thread:
            votes.setdefault(item.forward_thread, Counter()).update(having.get(item.sequence, ()))
    known = {thread: found.most_common(1)[0][0] for thread, found in votes.items() if found}
    return [
        replace(item, forward_thread=known.get(item.forward_thread, 0)) if item.forward_thread else item
        for item in events
    ]


def word_of(name: str) -> str:
    """The first word of a range, in small letters."""
    return name.strip("# ").partition(" ")[0].lower().rstrip(":")


def _main_thread(events: Iterable[TraceEvent]) -> int:
    """The thread that runs the training loop: the one with its ranges, else the one with most operators.

    What runs inside the autograd engine does not count: its threads often have more operators, and optimizers can run
    there.
    """
    events = [item for item in events if not item.on_gpu]
    engine: dict[int, list[tuple[int, int]]] = {}
    for item in events:
        if item.name.startswith(ENGINE) or OLD_BACKWARD.match(item.name):
            engine.setdefault(item.thread, []).append((item.begin, item.end))
    nodes = {thread: union(found, -_EVER, _EVER) for thread, found in engine.items()}
    weights: dict[int, list[int]] = {}
    for item in events:
        inside = nodes.get(item.thread, [])
        place = bisect_right(inside, item.begin, key=lambda node: node[0]) - 1
        found = weights.setdefault(item.thread, [0] * (len(_OF_LOOP) + 2))
        if place >= 0 and item.begin < inside[place][1]:
            continue
        kind = next((index for index, name in enumerate(_OF_LOOP) if item.name.startswith(name)), None)
        if item.annotation and kind is not None:
            found[kind] += 1
        elif item.annotation and word_of(item.name) in PHASE_WORDS:
            found[-2] += 1
        elif not item.annotation:
            found[-1] += 1
    return max(weights, key=weights.__getitem__, default=0)


# Memory that the subprocess may use: this much, and a multiple of the size of the pickle (a real one takes about ten).
_TRIAL_BYTES, _TRIAL_TIMES = 1 << 30, 40
_TRIAL_S = 600
_TRIAL = f"""
import io, pickle, resource, sys
data = sys.stdin.buffer.read()
for kind, limit in ((resource.RLIMIT_AS, {_TRIAL_BYTES} + {_TRIAL_TIMES} * len(data)), (resource.RLIMIT_CORE, 0)):
    try:
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    except (OSError, ValueError):
        pass
class Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError("refused")
try:
    Plain(io.BytesIO(data)).load()
except Exception:
    pass  # the parent reports it
"""
# What a damaged pickle raises.
_DAMAGED = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError,
    MemoryError, RecursionError, ImportError,
)  # fmt: skip
_LARGEST = 1 << 60


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block of a segment at the end of the recording. requested: bytes that the program asked for."""

    address: int
    size: int
    requested: int
    live: bool
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory from the driver at the end of the recording. private: of the pool of a CUDA graph or of a MemPool."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool = False
    private: bool = False
    blocks: tuple[LiveBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One entry of the history. address: of "oom" entries, the free bytes of the GPU instead."""

    action: str
    address: int
    size: int
    stream: int
    frames: Frames = ()


@dataclass
class DeviceHistory:
    """Final segments and history of one GPU. skipped: damaged entries, which are missing."""

    index: int
    segments: list[Segment] = field(default_factory=list)
    entries: list[HistoryEntry] = field(default_factory=list)
    skipped: int = 0

    @property
    def reserved(self) -> int:
        """Bytes reserved at the end."""
        return sum(segment.size for segment in self.segments)


@dataclass
class SnapshotFile:
    """A snapshot. settings: of the allocator, {} before torch 2.2. devices: those with memory or a history."""

    path: Path
    devices: list[DeviceHistory]
    settings: Mapping[str, object]


class _Plain(pickle.Unpickler):
    """Loads no class and calls no function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, but a snapshot contains only data")


def read_snapshot(path: Path) -> SnapshotFile:
    """The snapshot in a file. Raises UsageError that names the file and what is wrong with it."""
    shown = printable(str(path))
    data = contents(path, shown, "record fewer entries (max_entries)")
    if data[:64].lstrip()[:1] in (b"{", b"["):
        kind = (
            "a trace of torch.profiler: use ndd-console trace"
            if b'"traceEvents"' in data
            else "JSON, and no snapshot"
        )
        raise UsageError(f"{shown} is {kind}")
    _try(data, shown)
    with no_collection():
        try:
            body = _Plain(io.BytesIO(data)).load()
        except _DAMAGED as error:
            first = printable((str(error).splitlines() or [type(error).__name__])[0])[:200]
            raise UsageError(f"{shown} is damaged or is no memory snapshot: {first}") from None
        del data
        return _found(path, shown, body)


def _try(data: bytes, shown: str) -> None:
    """Load the pickle in a subprocess. Raises UsageError if that kills it or takes minutes."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _TRIAL],
            input=data,
            capture_output=True,
            timeout=_TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{shown} is no memory snapshot: reading it takes too long") from None
    except OSError:
        return  # no subprocess is possible; the pickle cannot run code in any case
    if done.returncode:
        raise UsageError(f"{shown} is damaged: reading it needs too much memory or crashes")


def _found(path: Path, shown: str, body: object) -> SnapshotFile:
    if (
        not isinstance(body, dict)
        or not isinstance(body.get("segments"), list)
        or not isinstance(body.get("device_traces", []), list)
    ):
        raise UsageError(
            f"{shown} is no memory snapshot: it lacks the lists that torch.cuda.memory._dump_snapshot() writes"
        )
    devices: dict[int, DeviceHistory] = {}
    for raw in body["segments"]:
        try:
            segment = _segment(raw)
            device = _whole_number(raw["device"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UsageError(f"{shown} is damaged: it has an incomplete segment") from None
        devices.setdefault(device, DeviceHistory(device)).segments.append(segment)
    for index, entries in enumerate(body.get("device_traces", [])):
        if not isinstance(entries, list):
            raise UsageError(f"{shown} is damaged: the history of GPU {index} is no list")
        if entries:
            _take(devices.setdefault(index, DeviceHistory(index)), entries)
    if not devices:
        raise UsageError(f"{shown} contains no GPU memory and no history")
    settings = body.get("allocator_settings")
    return SnapshotFile(
        path, [devices[index] for index in sorted(devices)], settings if isinstance(settings, dict) else {}
    )


def _take(device: DeviceHistory, entries: list[Any]) -> None:
    for raw in entries:
        try:
            action = raw["action"]
            if not isinstance(action, str):
                raise TypeError("an action has a name")
            address = raw["device_free"] if action == "oom" else raw.get("addr", 0)
            entry = HistoryEntry(
                action, _whole_number(address), _whole_number(raw.get("size", 0)), _whole_number(raw.get("stream", 0)),
                raw.get("frames", ()),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError):
            device.skipped += 1
        else:
            device.entries.append(entry)


def _segment(raw: Any) -> Segment:
    address = _whole_number(raw["address"])
    blocks, place = [], address
    for item in raw["blocks"]:
        size = _whole_number(item["size"])
        place = _whole_number(item.get("address", place))  # versions before 2.1 have none
        old = item.get("history")
        frames = item.get("frames", old[0].get("frames", ()) if isinstance(old, list) and old else ())
        requested = _whole_number(item.get("requested_size", size))
        blocks.append(LiveBlock(place, size, requested, item["state"] != "inactive", frames))
        place += size
    pool = raw.get("segment_pool_id") or (0, 0)
    size = _whole_number(raw["total_size"])
    if sum(block.size for block in blocks) != size:
        raise ValueError("the blocks do not fill the segment")
    return Segment(
        address, size, _whole_number(raw.get("stream", 0)), raw.get("segment_type") == "small",
        raw.get("is_expandable") is True, tuple(pool) != (0, 0), tuple(blocks),
    )  # fmt: skip


def _whole_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
        raise ValueError("not a size or an address")
    return value
