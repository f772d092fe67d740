"""Reads a memory snapshot that `torch.cuda.memory._dump_snapshot()` wrote: a pickle, plain or gzipped.

A pickle can run any code when it is loaded. A snapshot consists of dicts, lists, strings and numbers only, so
everything else is refused. A subprocess with limited memory loads the file first: a damaged pickle can also ask for
more memory than the machine has, or crash the interpreter.
"""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndd_engine.errors import UsageError
from ndd_engine.measure.memory_owners import Frames
from ndd_engine.text import printable

from .trace_file import contents, no_collection

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
class Entry:
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
    entries: list[Entry] = field(default_factory=list)
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
            device = _whole(raw["device"])
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
            entry = Entry(
                action, _whole(address), _whole(raw.get("size", 0)), _whole(raw.get("stream", 0)),
                raw.get("frames", ()),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError):
            device.skipped += 1
        else:
            device.entries.append(entry)


def _segment(raw: Any) -> Segment:
    address = _whole(raw["address"])
    blocks, place = [], address
    for item in raw["blocks"]:
        size = _whole(item["size"])
        place = _whole(item.get("address", place))  # versions before 2.1 have none
        old = item.get("history")
        frames = item.get("frames", old[0].get("frames", ()) if isinstance(old, list) and old else ())
        requested = _whole(item.get("requested_size", size))
        blocks.append(LiveBlock(place, size, requested, item["state"] != "inactive", frames))
        place += size
    pool = raw.get("segment_pool_id") or (0, 0)
    size = _whole(raw["total_size"])
    if sum(block.size for block in blocks) != size:
        raise ValueError("the blocks do not fill the segment")
    return Segment(
        address, size, _whole(raw.get("stream", 0)), raw.get("segment_type") == "small",
        raw.get("is_expandable") is True, tuple(pool) != (0, 0), tuple(blocks),
    )  # fmt: skip


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
        raise ValueError("not a size or an address")
    return value
