"""Memory snapshots made by the simulated allocator, in the format of torch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ndd_engine.predict.allocator import MIB, Allocator, Rules, SimulatedOutOfMemoryError

__all__ = ["MIB", "History", "frame", "written"]


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


class History:
    """Allocations on one GPU, recorded as torch does. cap: bytes that the driver has."""

    def __init__(self, rules: Rules | None = None, cap: int | None = None, device: int = 0) -> None:
        self.entries: list[dict[str, Any]] = []
        self._allocator = Allocator(rules or Rules(), cap)
        self._cap, self._device = cap, device
        self._frames: dict[int, list[dict[str, Any]]] = {}
        self._segments: dict[int, int] = {}  # base -> stream

    def cap(self, count: int) -> None:
        """Another process takes memory, or frees it: the driver has so many bytes for this one."""
        self._cap = self._allocator.cap = count

    def alloc(self, size: int, frames: list[dict[str, Any]] | None = None, stream: int = 0) -> int:
        """Allocate; returns the address, or 0 after an out-of-memory entry."""
        allocator, key = self._allocator, len(self.entries)
        before, known = allocator.reserved, self._bases()
        try:
            allocator.allocate(key, size, stream)
        except SimulatedOutOfMemoryError:
            self._release(known)
            free = (self._cap or 0) - allocator.reserved
            self.entries.append(
                {"action": "oom", "device_free": free, "size": size, "stream": stream, "frames": []}
            )
            return 0
        gone = self._release(known)
        block = allocator._live[key][0]
        if allocator.reserved > before - gone:
            action = "segment_map" if allocator.rules.expandable else "segment_alloc"
            self._add(action, block.base, allocator.reserved - before + gone, stream)
        self._add("alloc", block.address, size, stream, frames or [])
        self._segments[block.base] = stream
        self._frames[block.address] = frames or []
        return block.address

    def free(self, address: int) -> None:
        for key, (block, size) in list(self._allocator._live.items()):
            if block.address == address:
                self._add("free_requested", address, size, block.pool[0])
                self._add("free_completed", address, size, block.pool[0])
                self._allocator.free(key)

    def empty_cache(self) -> None:
        known = self._bases()
        self._allocator.released()
        self._release(known, [frame("/x/site-packages/torch/cuda/memory.py", 1, "empty_cache")])

    def body(self) -> dict[str, Any]:
        """What torch would pickle."""
        segments = []
        blocks = self._blocks()
        for base in sorted({block.base for block in blocks}):
            own = sorted((block for block in blocks if block.base == base), key=lambda block: block.address)
            sizes = {block.address: size for block, size in self._allocator._live.values()}
            segments.append({
                "device": self._device, "address": base, "total_size": sum(block.size for block in own),
                "stream": own[0].pool[0], "segment_type": "small" if own[0].pool[1] else "large",
                "segment_pool_id": (0, 0), "is_expandable": self._allocator.rules.expandable,
                "blocks": [
                    {"address": block.address, "size": block.size,
                     "requested_size": sizes.get(block.address, block.size),
                     "state": "inactive" if block.free else "active_allocated",
                     "frames": self._frames.get(block.address, [])}
                    for block in own
                ],
            })  # fmt: skip
        return {"segments": segments, "device_traces": [list(self.entries)]}

    def _add(self, action: str, address: int, size: int, stream: int, frames: Any = ()) -> None:
        self.entries.append({
            "action": action, "addr": address, "size": size, "stream": stream, "frames": list(frames),
            "time_us": len(self.entries),
        })  # fmt: skip

    def _blocks(self) -> list[Any]:
        free = [entry[2] for pool in self._allocator._free.values() for entry in pool]
        return [*free, *(block for block, _ in self._allocator._live.values())]

    def _bases(self) -> dict[int, int]:
        """Size of each segment, by address."""
        found: dict[int, int] = {}
        for block in self._blocks():
            found[block.base] = found.get(block.base, 0) + block.size
        return found

    def _release(self, known: dict[int, int], frames: Any = ()) -> int:
        """Record the segments that are gone. Returns their bytes."""
        gone = {base: size for base, size in known.items() if base not in self._bases()}
        for base, size in gone.items():
            self._add("segment_free", base, size, self._segments.get(base, 0), frames)
        return sum(gone.values())


def written(folder: Path, history: History | dict[str, Any]) -> Path:
    """The snapshot in a file."""
    path = folder / "snapshot.pickle"
    body = history.body() if isinstance(history, History) else history
    path.write_bytes(pickle.dumps(body))
    return path
