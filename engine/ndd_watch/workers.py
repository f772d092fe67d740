"""Observes a worker of a loader from inside its process: times of items and batches, of sending them, and of waiting.

Nothing of ours is on the stack while code of the script runs: a batch begins where torch has got its indices from
their queue, and ends where torch puts it into the queue of batches. The indices are handed on in an iterable that notes
the time before each of them. Another thread pickles and sends: the times of it are those at which it takes a batch,
takes the lock of the pipe, and gives it back. What a worker knows is in a small file that it has mapped, see
`sheet`; whatever fails ends the observation, never the worker.

Only every n-th batch is looked at where batches are short, so that this costs a stated part of the time, `SHARE`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from operator import itemgetter, sub
from typing import Any, Callable

from .apart import Dropped, dumps, module_of, os, ours, time
from .looks import bases, class_name, namespace
from .probes import Probes, VariableHook, arguments
from .sheet import Sheet, name_of, shown
from .worker_profile import BatchProfiles

now = time.perf_counter_ns
# Of the time of a worker: for looking at batches, and for profiling some of them.
SHARE = 0.002
# Nanoseconds that looking at a batch takes at first, and at most; later it is measured. What is not measured, since it
# empties caches, and the part of the newest batch in the mean.
FIRST_COST_NS, MOST_COST_NS, HIDDEN, NEWEST = 30_000, 500_000, 1.5, 0.125
# Where the processor computes less than this part of a batch, the batch waits by itself, and not for a processor.
COMPUTES = 0.3
# From one report to the next.
TOLD_NS = 10**9
# Upper ends of classes of item times, in nanoseconds: 1 us to 28 s.
EDGES = tuple(int(1000 * 2 ** (number / 4)) for number in range(100))
# Slowest items that are told; where items are read together, indices of a batch of them.
SLOWEST, SHOWN = 8, 4
# The names of the arguments of torch's function that are needed.
ARGUMENTS = (
    "dataset_kind", "dataset", "index_queue", "data_queue", "auto_collation", "collate_fn", "base_seed", "worker_id",
    "num_workers",
)  # fmt: skip
_HOLDER = "dataset_holder"
_ITERABLE = 1  # _DatasetKind.Iterable
_TORCH_DATA = "torch.utils.data."
_NEVER = 1 << 62


class Stamped:
    """The indices of a batch. Iterating notes the time before each and after the last one, all in C."""

    __slots__ = ("_indices", "_stamps")

    def __init__(self, indices: Any, stamps: list[int]) -> None:
        self._indices, self._stamps = indices, stamps

    def __iter__(self) -> Iterator[Any]:
        return map(itemgetter(1), zip(map(self._stamps.append, iter(now, -1)), self._indices))

    def __len__(self) -> int:
        return len(self._indices)


class _Buffer(deque):  # type: ignore[type-arg]
    """The batches that another thread is to send. taken: when the newest one was taken."""

    taken = 0

    def popleft(self) -> Any:
        found = deque.popleft(self)
        self.taken = now()
        return found


class _Lock:
    """The lock of the pipe to the training process. Between a batch is pickled before it, and sent within it."""

    def __init__(self, lock: Any, worker: Worker, buffer: _Buffer) -> None:
        self._lock, self._worker, self._buffer, self._got = lock, worker, buffer, 0

    def acquire(self) -> Any:
        t = now()
        found = self._lock.acquire()
        self._got = now()
        worker = self._worker
        worker.sent += 1
        worker.pickle_ns += t - self._buffer.taken
        worker.blocked_ns += self._got - t
        return found

    def release(self) -> None:
        self._lock.release()
        self._worker.send_ns += now() - self._got

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


class Worker:
    """One worker. given: arguments of torch's function by name. Raises OSError if there is no space for its file."""

    def __init__(self, folder: str, given: dict[str, Any]) -> None:
        self._given = given
        self._number, self._of = int(given["worker_id"]), int(given["num_workers"])
        self._iterable = given["dataset_kind"] == _ITERABLE
        self._stamps_items = bool(given["auto_collation"]) and (self._iterable or _by_item(given["dataset"]))
        # Whether the present batch is looked at; which of them are, and how many more are not.
        self._on, self._every, self._left = False, 1, 1
        self._luck = (int(given["base_seed"]) ^ (self._number * 7919)) & 0xFFFF
        self._begun = self._told = now()
        self._start_ns = self._first_ns = 0
        # Batches and items so far, and those that were looked at.
        self._batches = self._items = self._looked = self._looked_items = 0
        # Nanoseconds of batches that were looked at.
        self._idle_ns = self._fetch_ns = self._collate_ns = self._cpu_ns = self._bytes = 0
        self._split = 0  # batches whose items were timed apart
        self.sent = self.pickle_ns = self.blocked_ns = self.send_ns = 0
        # Times of items and of batches, and how many there were before in each class.
        self._times: list[int] = []
        self._batch_times: list[int] = []
        self._classes: dict[int, int] = {}
        self._batch_classes: dict[int, int] = {}
        self._slow: list[tuple[int, str]] = []
        self._slow_from = 0
        # Of the present batch: its number, indices, times of items, when it began, and processor time then.
        self._batch = self._t = self._cpu = self._waited = 0
        # What looking takes: of the present batch so far, and usually.
        self._cost, self._usual_cost = 0, float(FIRST_COST_NS)
        self._indices: Any = None
        self._stamps: list[int] = []
        self._profiling = False
        self._profiles = BatchProfiles(given["dataset"], given["collate_fn"], self._number)
        self._sheet = Sheet(folder, f"worker-{os.getpid()}")
        process: Any = sys.modules["multiprocessing.process"]
        parent = process.parent_process()
        self._head = {
            "pid": os.getpid(), "parent": os.getppid() if parent is None else parent.pid, "number": self._number,
            "workers": self._of, "seed": int(given["base_seed"]), "iterable": self._iterable,
            "by_item": self._stamps_items, "began_ns": self._begun,
        }  # fmt: skip
        self._tell(self._begun)

    def begin(self) -> None:
        """Observe from now on: before the first indices come, and before the first batch is sent."""
        indices, batches = self._given["index_queue"], self._given["data_queue"]
        self._given = {}
        if getattr(batches, "_thread", 1) is None and type(batches._buffer) is deque:
            buffer = batches._buffer = _Buffer(batches._buffer)
            batches._wlock = _Lock(batches._wlock, self, buffer)
        indices.get = self._gets(indices.get)
        batches.put = self._puts(batches.put)

    def _gets(self, get: Callable[..., Any]) -> Callable[..., Any]:
        def gets(*args: Any, **options: Any) -> Any:
            if self._left > 1:
                found = get(*args, **options)
                if found is None:
                    self._end()
                elif type(found) is tuple:
                    self._begins(*found)
                return found
            t = now()
            if not self._start_ns:
                self._start_ns = t - self._begun
            try:
                found = get(*args, **options)
            except BaseException:  # nothing has come for some seconds
                self._waited += now() - t
                raise
            try:
                return self._got(found, t, now())
            except Exception as error:  # noqa: BLE001
                self._failed(error)
                return found

        return gets

    def _begins(self, batch: int, indices: Any) -> None:
        """A batch begins that is not looked at: it is told for the case that it does not end."""
        try:
            if self._left < _NEVER:
                self._sheet.doing(batch, now(), indices)
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def _end(self) -> None:
        """The worker has nothing more to do."""
        try:
            if self._left < _NEVER:
                self._tell(now())
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def _got(self, found: Any, asked: int, came: int) -> Any:
        """What torch gets from the queue of indices: the same, or for a batch what notes times.

        asked, came: when it asked for it, and when it had it.
        """
        if type(found) is not tuple:
            self._waited, t = 0, now()
            if found is None or t - self._told > TOLD_NS:  # the end, or another pass
                self._tell(t)
            return found
        self._batch, indices = found
        self._waited += came - asked
        self._indices, self._stamps, self._on = indices, [], True
        count = len(indices) if type(indices) is list else 1
        self._items += count
        cpu_ns = self._cpu_ns * self._batches / max(self._looked, 1)
        self._profiling = self._profiles.begin(self._looked, cpu_ns, came - self._begun)
        self._sheet.doing(self._batch, came, indices)
        self._cpu, self._t = time.thread_time_ns(), now()
        self._cost = self._t - came
        if self._stamps_items and type(indices) is list:
            return self._batch, Stamped(indices, self._stamps)
        return found

    def _puts(self, put: Callable[..., Any]) -> Callable[..., Any]:
        def puts(item: Any) -> None:
            self._batches += 1
            if not self._on:
                self._left -= 1
                self._sheet.rests()
                put(item)
                return
            end = now()
            cpu = 0
            try:
                cpu = time.thread_time_ns() - self._cpu
                if self._profiling:
                    self._profiles.end(end - self._t, cpu, self._cpu_ns / max(self._looked, 1))
                self._on = False
                self._sheet.rests()
            except Exception as error:  # noqa: BLE001
                self._failed(error)
            self._cost += now() - end
            put(item)
            try:
                if type(item) is tuple and len(item) == 2:
                    self._put(item[1], end, cpu, now())
                del item
            except Exception as error:  # noqa: BLE001
                self._failed(error)

        return puts

    def _put(self, data: Any, end: int, cpu: int, begun: int) -> None:
        """A batch that was looked at is on its way. end: when it was made. begun: now."""
        indices, stamps, took = self._indices, self._stamps, end - self._t
        self._indices, self._stamps = None, []
        count = len(indices) if type(indices) is list else 1
        fails = class_name(type(data)) in ("ExceptionWrapper", "_IterableDatasetStopIteration")
        if self._batches == 1:
            self._first_ns = took  # opens files, imports
        if not fails and len(stamps) in (count, count + 1):
            whole = stamps if len(stamps) > count else [*stamps, end]
            each = list(map(sub, whole[1:], whole))
        else:
            stamps, each = [], [took // max(count, 1)]
        self._items_took(each, indices, bool(stamps) and not self._iterable)
        if not (self._profiling or fails or self._batches == 1):
            self._looked += 1
            self._looked_items += count
            self._fetch_ns += took
            self._batch_times.append(took)
            self._cpu_ns += cpu
            self._idle_ns += self._waited
            if len(stamps) > count:
                self._split += 1
                self._collate_ns += end - stamps[-1]
            self._bytes += _bytes(data)
        profiled, self._waited, self._profiling = self._profiling, 0, False
        if end - self._told > TOLD_NS or self._batches in (1, 4):
            self._tell(end)
        if not profiled:
            cost = min(self._cost + now() - begun, MOST_COST_NS)
            self._usual_cost += (HIDDEN * cost - self._usual_cost) * NEWEST
        self._next()

    def _next(self) -> None:
        """Choose the next batch that is looked at; irregularly, without the generators of the script."""
        usual = self._fetch_ns / max(self._looked, 1)
        if self._cpu_ns > COMPUTES * self._fetch_ns:  # the rest is waiting for a processor
            usual = self._cpu_ns / max(self._looked, 1)
        self._every = min(max(round(self._usual_cost / SHARE / usual), 1), 1000) if usual else 1
        self._luck = (self._luck * 25173 + 13849) & 0xFFFF
        self._left = 1 if self._every == 1 else 1 + self._luck % (2 * self._every - 1)

    def _items_took(self, each: list[int], indices: Any, named: bool) -> None:
        if self._profiling:
            return
        self._times += each
        if max(each) > self._slow_from:
            names: Any = map(name_of, indices)
            if not named:
                begin = self._items - len(each)
                names = map(str, range(begin, begin + len(each)))
                if not self._iterable:
                    names = [shown(indices, SHOWN)]
            found = [(ns, name) for ns, name in zip(each, names) if ns > self._slow_from]
            self._slow = sorted([*self._slow, *found], reverse=True)[:SLOWEST]
            self._slow_from = self._slow[-1][0] if len(self._slow) == SLOWEST else 0

    def _tell(self, t: int) -> None:
        """Put what is known so far into the file."""
        self._told = t
        _classify(self._times, self._classes)
        _classify(self._batch_times, self._batch_classes)
        self._sheet.tell(dumps({
            **self._head, "wall_ns": t - self._begun, "start_ns": self._start_ns, "first_ns": self._first_ns,
            "batches": self._batches, "looked": self._looked, "items": self._looked_items, "split": self._split,
            "every": self._every, "idle_ns": self._idle_ns, "fetch_ns": self._fetch_ns, "collate_ns": self._collate_ns,
            "cpu_ns": self._cpu_ns, "bytes": self._bytes, "sent": self.sent, "pickle_ns": self.pickle_ns,
            "blocked_ns": self.blocked_ns, "send_ns": self.send_ns, "slow": self._slow,
            "times": self._classes, "batch_times": self._batch_classes,
            **self._profiles.fields(),
        }))  # fmt: skip

    def _failed(self, error: BaseException) -> None:
        """End the observation after an error of ours. What a signal handler of the script has raised continues."""
        self._on, self._left = False, _NEVER
        self._profiles.drop()
        if not ours(error):
            raise error
        with Dropped():
            self._sheet.tell(dumps({**self._head, "gave_up": f"{type(error).__name__}: {error}"}))


def begin(folder: str, given: dict[str, Any]) -> None:
    """Observe this process, which is a worker. given: the ARGUMENTS of torch's function. Never raises one of ours."""
    with Dropped():
        process = sys.modules.get("multiprocessing.process")
        # Workers can be threads of the training process: they have no interpreter of their own.
        if folder and process is not None and process.parent_process() is not None:
            Worker(folder, given).begin()


def watched(probes: Probes, worker_loop: Any, folder: Callable[[], str]) -> bool:
    """Have workers observe themselves where torch's function of a worker begins; whether that is possible."""

    def begins(_probe: Any, zero: int) -> int:
        return 1

    names: tuple[str, ...] = ARGUMENTS
    if "dataset" not in arguments(worker_loop.__code__):  # from torch 2.14 on, a list has it
        names = (*(name for name in ARGUMENTS if name != "dataset"), _HOLDER)

    def begun(_probe: Any, values: Any) -> int:
        with Dropped():
            given = dict(zip(names, values))
            if _HOLDER in given:
                given["dataset"] = given.pop(_HOLDER)[-1]
            begin(folder(), given)
        return 0

    return probes.put(worker_loop, VariableHook(begins, begun, names), None, False)


def _classify(times: list[int], classes: dict[int, int]) -> None:
    """Count these times in their classes, and forget them."""
    times.sort()
    at = 0
    while at < len(times):
        number = bisect_left(EDGES, times[at])
        end = bisect_right(times, EDGES[number]) if number < len(EDGES) else len(times)
        classes[number] = classes.get(number, 0) + end - at
        at = end
    times.clear()


def _by_item(dataset: Any) -> bool:
    """Whether torch reads the items of a dataset one after another, each by its index, and nothing else sees these."""
    for _ in range(3):
        if not any(
            "__getitems__" in namespace(kind) or "__getattr__" in namespace(kind)
            for kind in bases(type(dataset))
        ):
            return True
        # Those of torch and of own training read an item for each index if their dataset has no such method.
        name, module = class_name(type(dataset)), module_of(type(dataset))
        if name == "Subset" and module.startswith(_TORCH_DATA):
            dataset = dataset.dataset
        elif name == "Collated" and module.startswith("ndd_engine."):
            dataset = dataset.data
        else:
            return False
    return False


def _bytes(data: Any, deep: int = 0) -> int:
    """Bytes of the tensors and arrays of a batch; of many of a kind, estimated from the first ones."""
    kind = type(data)
    if kind is dict:
        data, kind = list(data.values()), list
    if kind in (list, tuple) and deep < 3:
        part = data[:16]
        return sum(_bytes(one, deep + 1) for one in part) * len(data) // max(len(part), 1)
    if kind in (bytes, str):
        return len(data)
    if module_of(kind) in ("torch", "numpy"):
        found = getattr(data, "nbytes", 0)
        return found if type(found) is int else 0
    return 0
