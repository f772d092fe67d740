"""What observing a loader's worker costs: blocks of batches with and without it, in one loop, beside an A/A.

The worker is driven through queues of its own, so that nothing but the observer differs. Times are those of the
processor.
"""

from __future__ import annotations

import multiprocessing.process
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from ndd_watch.sheet import SUFFIX, read
from ndd_watch.workers import Worker

from .common import Options, Table, say

TITLE = "worker_cost: processor time of a worker, observed over bare"
COLUMNS = ("item", "batch", "cost", "+-", "A/A", "+-", "looked at", "profiles")
# Microseconds of an item, and items of a batch.
CASES = ((1000, 8), (100, 32))
BLOCK_US = 20_000
assert multiprocessing.process


class _Items:
    """Items that compute for a while: `turns` of a loop."""

    turns = 1000

    def __getitem__(self, index: int) -> int:
        found = 0
        for number in range(self.turns):
            found += number
        return found


class _Indices:
    def __init__(self, size: int) -> None:
        self.size = size

    def get(self, timeout: float | None = None) -> Any:
        return 0, list(range(self.size))


class _Batches:
    def __init__(self) -> None:
        self._thread, self._buffer = object(), deque[Any]()

    def put(self, item: Any) -> None:
        return


def measure(options: Options) -> Table:
    """Both sizes of items."""
    table = Table(TITLE, COLUMNS)
    blocks = options.repeats(400, 60, 4)
    for item_us, size in options.cases(CASES):
        say(f"worker_cost: items of {item_us} us")
        with tempfile.TemporaryDirectory(prefix="ndd-cost-") as folder:
            costs, same, told = _compared(Path(folder), item_us, size, blocks)
        profiles = sum(int(clock[0]) for clock in told.get("profiles", ()))
        looked = f"{told['looked']} of {told['batches']}"
        table.add(f"{item_us} us", f"{size}", *_percent(costs), *_percent(same), looked, f"{profiles}")
    return table


def _compared(
    folder: Path, item_us: int, size: int, blocks: int
) -> tuple[list[float], list[float], dict[str, Any]]:
    """(ratios observed over bare, ratios bare over bare, what the worker told), in the order A B B A."""
    items = _Items()
    begin = time.thread_time_ns()
    for _ in range(300):
        items[0]
    items.turns = max(int(1000 * item_us * 1000 * 300 / (time.thread_time_ns() - begin)), 1)
    bare, seen = (_Indices(size), _Batches()), (_Indices(size), _Batches())
    given = {
        "dataset_kind": 0, "dataset": items, "index_queue": seen[0], "data_queue": seen[1], "auto_collation": True,
        "collate_fn": list, "base_seed": 5, "worker_id": 0, "num_workers": 1,
    }  # fmt: skip
    Worker(str(folder), given).begin()
    count = max(BLOCK_US // (item_us * size), 3)

    def block(queues: tuple[_Indices, _Batches]) -> int:
        at = time.thread_time_ns()
        for _ in range(count):
            number, chosen = queues[0].get(timeout=5.0)
            queues[1].put((number, [items[index] for index in chosen]))
        return time.thread_time_ns() - at

    costs, same = [], []
    for number in range(blocks + 5):
        one, two, three, four = block(seen), block(bare), block(bare), block(seen)
        plain = [block(bare) for _ in range(4)]
        if number >= 5:  # its first profiles and files
            costs.append((one + four) / (two + three) - 1)
            same.append((plain[0] + plain[3]) / (plain[1] + plain[2]) - 1)
    (path,) = folder.glob(f"*{SUFFIX}")
    found = read(path.read_bytes())
    if found is None or "gave_up" in found[0]:
        raise RuntimeError(f"the worker was not observed: {found}")
    return costs, same, found[0]


def _percent(ratios: list[float]) -> tuple[str, str]:
    """The mean with half of its 95 % interval: means, since looking at a batch is rare and counts whole."""
    error = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return f"{100 * statistics.fmean(ratios):+.2f} %", f"{100 * error:.2f}"
