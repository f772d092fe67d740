"""Batches in an order that depends only on the seed and the epoch, starting at any position; and their workers."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ndd_engine.batches import map_tensors, tensors
from ndd_engine.config.schema import Config, LoaderSection
from ndd_engine.errors import TrainingError
from ndd_engine.shared_folder import shared_folder
from ndd_engine.text import counted
from ndd_engine.workloads.base import Batch, Collate, Order, Stream, Workload, item_count
from ndd_watch import workers
from ndd_watch.changes import ARGUMENTS

from .item_sources import Collated, EpochBatches, ItemSource, StreamOrder, WholeBatches, make_source
from .order import ALONE, IndexOrder, Share, checksum, length, mixed

# How often the workers are checked while waiting for a batch.
CHECK_S = 2.0
# An iterator whose start failed lacks this attribute, and its finaliser would print a traceback.
_MultiProcessingDataLoaderIter._shutdown = True


class WatchedLoader(DataLoader[Any]):
    """A DataLoader that reports within seconds which worker died, and times out on workers that hang.

    torch checks workers that are not children of this process only after the whole timeout.
    """

    def __init__(self, timeout_s: float, *arguments: Any, **options: Any) -> None:
        if options["num_workers"]:
            options["timeout"] = min(CHECK_S, timeout_s)
        super().__init__(*arguments, **options)
        self.patience_s = timeout_s

    def __iter__(self) -> Any:
        if not self.num_workers:
            return super().__iter__()
        kept: Any = self._iterator  # persistent workers: announces the new epoch to them
        if kept is not None:
            _raise_if_dead(kept)
            kept._timeout = self.patience_s  # the iterator cannot be used again
        try:
            with _stops_later():
                iterator: Any = super().__iter__()
        except (OSError, EOFError, RuntimeError):
            _raise_if_dead(kept, 1.0)
            raise
        iterator._timeout = self.timeout
        return _Watched(iterator, self.patience_s)


class _Watched:
    """A loader's iterator that checks the workers. Raises RuntimeError with the id of a worker that died."""

    def __init__(self, iterator: Any, patience_s: float) -> None:
        self._iterator = iterator
        self._patience_s = patience_s

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begin = time.monotonic()
        while True:
            try:
                return next(self._iterator)
            except (OSError, EOFError, RuntimeError) as error:
                timed_out = "DataLoader timed out" in str(error)
                # A connection breaks shortly before its worker is reported as dead.
                _raise_if_dead(self._iterator, 0.0 if timed_out else 1.0)
                if not timed_out:
                    raise
                if time.monotonic() - begin >= self._patience_s:
                    raise RuntimeError(f"DataLoader timed out after {self._patience_s:g} seconds") from None


def _raise_if_dead(iterator: Any, patience_s: float = 0.0) -> None:
    """Raise RuntimeError, worded like torch's, if a worker has died."""
    workers = list(getattr(iterator, "_workers", ()))
    wait([worker.sentinel for worker in workers], patience_s)
    for worker in workers:
        if not worker.is_alive():
            code = worker.exitcode or 0
            if code < 0:
                raise RuntimeError(
                    f"DataLoader worker (pid {worker.pid}) is killed by signal: {signal.Signals(-code).name}"
                )
            raise RuntimeError(
                f"DataLoader worker (pid(s) {worker.pid}) exited unexpectedly with status {code}"
            )


@contextmanager
def _stops_later() -> Iterator[None]:
    """Raise what a signal handler raises (a stop at once) after the block: half-started workers print tracebacks."""
    raised: list[BaseException] = []

    def later(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as stop:  # noqa: BLE001
                raised.append(stop)

        return handle

    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if callable(handler := signal.getsignal(number)):
                    before[number] = handler
                    signal.signal(number, later(handler))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if raised:
        raise raised[0]


def loader_options(
    section: LoaderSection,
    prefix: str = "",
    begin: Callable[[int], Any] | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """The options of torch's DataLoader that the table of changes knows, as configured, and what its workers need.

    prefix: "eval_" for those of evaluations. begin: a worker_init_fn of the user's. folder: where workers tell of
    themselves, see `ndd_watch.workers`; None for nowhere.
    """
    workers = getattr(section, f"{prefix}workers")
    options = {
        kind.name: value
        for key, kind in ARGUMENTS.items()
        if (value := getattr(section, prefix + key.partition(".")[2], None)) is not None
        and (workers or not kind.needs_workers)
    }
    if not workers:
        return options
    # Other threads exist (recorder, sampler, console): a fork could copy locks that they hold.
    method = "forkserver" if sys.platform == "linux" else "spawn"
    if method == "forkserver":
        start_server()
    return {
        "persistent_workers": True,
        "worker_init_fn": partial(_begin, begin, "" if folder is None else str(folder)),
        "multiprocessing_context": multiprocessing.get_context(method),
        **options,
    }


def start_server() -> None:
    """Start the fork server, which imports torch once instead of in every worker; no effect if it is running."""
    multiprocessing.set_forkserver_preload(["torch"])
    # Workers put their sockets into this folder if it exists before they start; a folder of their own would stay.
    multiprocessing.util.get_temp_dir()
    resource_tracker.ensure_running()  # would unblock the signal again
    # The server and its workers inherit the mask: Ctrl-C during its import would print a traceback. torchrun sends
    # SIGTERM also to the workers of a rank, which still needs them: a rank alone cannot stop.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    blocked = {signal.SIGINT} if alone else {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def belong(_worker: int) -> None:
    """Set up a worker: ignore Ctrl-C, which the training process handles, and exit when that process dies.

    torch's own watchdog watches the fork server, which in turn waits for its workers: both would stay forever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (owner := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(owner,), name="ndd-owner", daemon=True).start()


def _begin(begin: Callable[[int], Any] | None, folder: str, worker: int) -> None:
    """Called by torch's function of a worker."""
    belong(worker)
    if folder:
        given = sys._getframe(1).f_locals
        workers.begin(folder, {name: given[name] for name in workers.ARGUMENTS if name in given})
    if begin is not None:
        begin(worker)


def _end_with(owner: Any) -> None:
    owner.join()
    os._exit(1)


def worker_pids(iterator: Any) -> tuple[int, ...]:
    """Ids of the running workers of a loader's iterator."""
    inner = getattr(iterator, "_iterator", iterator)
    return tuple(worker.pid for worker in getattr(inner, "_workers", ()) if worker.is_alive())


CPU = torch.device("cpu")


@dataclass(frozen=True)
class FirstBatch:
    """What an epoch's first batch shows of the loader: worker ids, pinned memory, device."""

    workers: tuple[int, ...]
    pinned: bool
    device: str


class _Loaded:
    """Batches of a source, from a DataLoader or created in this process.

    seen: what the first batch of the newest epoch shows. loader: None if torch's DataLoader would have nothing to do.
    """

    def __init__(
        self,
        source: ItemSource | StreamOrder,
        config: Config,
        options: dict[str, Any],
        rank: int = 0,
        **order: Any,
    ) -> None:
        """options: see loader_options. order: the DataLoader's options that choose the items of a batch.

        rank: whose workers draw random numbers of their own, except for a stream, which all ranks read alike.
        """
        self.source = source
        self.seen: FirstBatch | None = None
        self.loader: DataLoader[Any] | None = None
        self._pin = options["pin_memory"]
        data: Any = None
        if isinstance(source, StreamOrder):
            data = source.shards
        elif config.loader.placement != "device" and (source.gather is None or options["num_workers"]):
            data = Collated(source) if source.gather is None else WholeBatches(source.gather)
        if data is not None:
            seed = config.run.seed
            self.loader = WatchedLoader(
                config.loader.timeout_s,
                dataset=data,
                collate_fn=_as_it_is,
                # A separate generator: drawing the workers' seeds must not advance the model's.
                generator=torch.Generator().manual_seed(mixed(seed, rank) if rank else seed),
                **options,
                **order,
            )

    def _begun(self, lists: Iterator[Tensor]) -> Iterator[Batch]:
        """All batches of an epoch; looks at the first one. lists: the indices of each batch."""
        pids: tuple[int, ...] = ()
        iterator: Iterator[Batch]
        if self.loader is not None:
            iterator = iter(self.loader)
            pids = worker_pids(iterator)
        else:
            assert isinstance(self.source, ItemSource)
            iterator = gathered(self.source, lists, self._pin)
        return self._looked(iterator, pids)

    def _streamed(self, stream: StreamOrder) -> Iterator[Batch]:
        """All batches of a pass over a stream."""
        started: list[Any] = []

        def iterate() -> Iterator[Any]:
            assert self.loader is not None
            started.append(iter(self.loader))
            return iter(started[0])

        batches = stream.begin(iterate)
        if self.loader is None and self._pin and torch.cuda.is_available():
            batches = (map_tensors(batch, Tensor.pin_memory) for batch in batches)
        return self._looked(batches, worker_pids(started[0]) if started else ())

    def _looked(self, iterator: Iterator[Batch], pids: tuple[int, ...]) -> Iterator[Batch]:
        self.seen = None
        first = next(iterator, None)
        if first is None:
            return iter(())
        if (tensor := next(tensors(first), None)) is not None:
            pinned = tensor.device.type == "cpu" and tensor.is_pinned()
            self.seen = FirstBatch(pids, pinned, str(tensor.device))
        return chain((first,), iterator)


class Batches(_Loaded):
    """The training batches of a run. `epoch(n, start)` iterates; the loader lives as long as the run.

    collate, epochs_differ, order: the workload's. device: target of `placement = "device"`. tell: called with the
    progress of encoding. own_order: that of a user's own sampler or stream, which counts its passes itself; None for
    the engine's order, which follows from the step. share: of this rank. observed: whether workers tell of themselves,
    in `worker_folder`. resumes: whether a run may resume with them: items are read then, to recognise the data. Raises
    UsageError and DoesNotFitError, see make_source.
    """

    def __init__(
        self,
        data: Dataset[Any],
        config: Config,
        collate: Collate | None = None,
        epochs_differ: bool = False,
        device: torch.device = CPU,
        tell: Callable[[str], None] = lambda _text: None,
        order: Order | None = None,
        share: Share = ALONE,
        observed: bool = False,
        resumes: bool = True,
    ) -> None:
        loader, micro, seed = config.loader, config.batch.micro, config.run.seed
        self.share = share
        self.worker_folder = shared_folder() if observed and loader.workers else None
        if self.worker_folder is not None:
            weakref.finalize(self, shutil.rmtree, self.worker_folder, ignore_errors=True)
        order = order or Order()
        shuffle = order.shuffle if loader.shuffle is None else loader.shuffle
        options = loader_options(loader, begin=order.worker_init_fn, folder=self.worker_folder)
        if isinstance(data, Stream):
            options.pop("in_order", None)  # each worker sends its position, in turn
        items = item_count(data)
        self.shuffled = shuffle
        self.own_order: IndexOrder | StreamOrder | None = None
        self.accumulation = config.batch.accumulation
        self.crc: int | None = None
        if isinstance(data, Stream):
            of = seed if order.generator is None else order.generator.initial_seed()
            stream = self.own_order = StreamOrder(
                data, order, micro, collate, of, loader.workers, share.of > 1
            )
            self.sampler = EpochBatches(0, micro, seed, True)
            self.order = f"a stream ({type(data.data).__name__})"
            super().__init__(stream, config, options, batch_size=None)
            return
        assert items is not None
        self.sampler = EpochBatches(items, micro, seed, epochs_differ, shuffle, share)
        self.order = "shuffled" if shuffle else "in the order of the dataset"
        chosen: Any = self.sampler
        if order.chosen is not None or (not order.drop_last and items % micro):
            chosen = self.own_order = IndexOrder(
                replace(order, shuffle=shuffle), items, micro, seed, epochs_differ, share, self.accumulation
            )
            if order.chosen is not None:
                self.order = f"by the {order.title}"
            elif items % micro:
                self.order += ", with a smaller last batch"
        self.crc = checksum(data, items) if resumes else None
        source = make_source(data, collate, loader, device, epochs_differ, tell)
        super().__init__(source, config, options, share.rank, batch_sampler=chosen)

    def sample(self, items: int | None = None) -> Batch:
        """The first micro-batch of the first epoch, or its first `items`, created in this process.

        Of the engine's own order, whatever sampler there is; of a stream its first items. Raises what the data raises.
        """
        if isinstance(self.own_order, StreamOrder):
            return self.own_order.sample(items)
        assert isinstance(self.source, ItemSource)
        micro = self.sampler.micro
        self.sampler.set(0)
        lists = islice(self.sampler.tensors(), 1 if items is None else -(-items // micro))
        first = torch.cat(list(lists))[:items]
        return next(gathered(self.source, iter([first]), False))

    @property
    def items(self) -> int | None:
        """Number of training items; None for a stream."""
        return None if isinstance(self.own_order, StreamOrder) else self.sampler.items

    @property
    def per_epoch(self) -> int | None:
        """This rank's micro-batches per epoch; None if that is unknown."""
        if self.own_order is not None:
            of_all = self.own_order.per_pass
            return None if of_all is None else of_all // self.share.of
        return self.sampler.items // self.sampler.micro // self.share.of

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps per epoch; None if that is unknown."""
        return None if self.per_epoch is None else self.per_epoch // self.accumulation

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches of one epoch, starting at micro-batch `start`; of `own`, its present pass, in whole steps."""
        if isinstance(self.own_order, StreamOrder):
            return self._whole_steps(self._streamed(self.own_order))
        if isinstance(self.own_order, IndexOrder):
            self.own_order.start()
            return self._whole_steps(_counted(self._begun(self.own_order.tensors()), self.own_order))
        self.sampler.set(epoch, start)
        return self._begun(self.sampler.tensors())

    def _whole_steps(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches without those that no step is left for: half a step's gradients would stay behind."""
        if isinstance(self.own_order, StreamOrder):
            # Every rank reads the whole stream, so that all agree on what a step takes.
            return batches if self.of_step == 1 else self.share.dealt(batches, self.accumulation)
        return batches if self.accumulation == 1 else Share().dealt(batches, self.accumulation)

    @property
    def of_step(self) -> int:
        """Micro-batches of an optimizer step, of all ranks."""
        return self.accumulation * self.share.of

    @property
    def items_per_epoch(self) -> int | None:
        """Items of an epoch, without those that no step is left for; None if that is unknown."""
        steps, own = self.steps_per_epoch, self.own_order
        if steps is None or (isinstance(own, IndexOrder) and own.order.batch_sampler is not None):
            return None
        items = steps * self.of_step * self.sampler.micro
        if not isinstance(own, IndexOrder) or own.order.drop_last:
            return items
        return min(items, own.items if own.order.sampler is None else len(own.order.sampler))

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, optimizer step in it) after `step` steps of the run; of `own`, the place that it counts itself."""
        if self.own_order is not None:
            return self.own_order.passes, self.own_order.batches // self.of_step
        return divmod(step, self.per_epoch // self.accumulation)  # type: ignore[operator]

    @property
    def counters(self) -> tuple[Callable[[], tuple[int, int]], Callable[[], int]] | tuple[()]:
        """Functions for the (epoch, step in it) and the items made so far; () if both follow from the step."""
        own = self.own_order
        return () if own is None else ((lambda: self.place(0)), (lambda: own.made))

    def state(self) -> dict[str, Any] | None:
        """The position in `own`, for a checkpoint; None if it follows from the step."""
        return None if self.own_order is None else self.own_order.state()

    def load(self, state: dict[str, Any] | None) -> None:
        """Continue at a position that `state` returned."""
        if self.own_order is not None and state is not None:
            self.own_order.load(state)


class EvalBatches(_Loaded):
    """Evaluation batches in their original order, or in the order of a DataLoader; the last one may be smaller."""

    def __init__(
        self,
        data: Dataset[Any],
        config: Config,
        collate: Collate | None = None,
        device: torch.device = CPU,
        tell: Callable[[str], None] = lambda _text: None,
        order: Order | None = None,
        share: Share = ALONE,
    ) -> None:
        """share: of this rank; `shares` tells whether the order can be shared, see `divide`."""
        loader = config.loader
        self._share, self.shares = share, False
        order = order or Order(shuffle=False, drop_last=False, name="eval_data")
        self._micro = order.batch_size or config.batch.micro
        options = {"pin_memory": loader.pin_memory, **loader_options(loader, "eval_", order.worker_init_fn)}
        self._items = item_count(data)
        self._own_order: IndexOrder | StreamOrder | None = None
        if isinstance(data, Stream):
            stream = self._own_order = StreamOrder(
                data, order, self._micro, collate, config.run.seed, loader.eval_workers
            )
            super().__init__(stream, config, options, batch_size=None)
            return
        assert self._items is not None
        self._places: Sequence[int] | None = None
        source = make_source(data, collate, loader, device, False, tell)
        if order.chosen is None and not order.drop_last and not order.shuffle:
            self.shares = share.of > 1
            lists: dict[str, Any] = {"batch_size": self._micro, "shuffle": False}
            super().__init__(
                source, config, options, **({"batch_sampler": _Lists(self)} if self.shares else lists)
            )
            return
        self._own_order = IndexOrder(order, self._items, self._micro, config.run.seed)
        super().__init__(source, config, options, batch_sampler=self._own_order)
        self._first = self._own_order.state()

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self._own_order, StreamOrder):
            self._own_order.restart()
            return self._streamed(self._own_order)
        if isinstance(self._own_order, IndexOrder):
            self._own_order.load(self._first)  # the same order every time
            self._own_order.start()
            return self._begun(self._own_order.tensors())
        return self._begun(iter(self.lists()))

    def divide(self, limit: int | None, even: bool) -> int:
        """Iterate over this rank's share of the first `limit` batches from now on; returns how many these are.

        even: every rank gets as many batches as the one with most; of the rest, which are not the rank's own, only the
        number matters.
        """
        assert self._items is not None
        count = -(-self._items // self._micro)
        count = count if limit is None else min(limit, count)
        mine = range(self._share.rank, count, self._share.of)
        missing = -(-count // self._share.of) - len(mine)
        self._places = [*mine, *[0] * missing] if even else mine
        return len(mine)

    def lists(self) -> Sequence[Tensor]:
        """The indices of the batches, in the engine's order; those of this rank after `divide`."""
        assert self._items is not None
        every = torch.split(torch.arange(self._items), self._micro)
        return every if self._places is None else [every[place] for place in self._places]


class _Lists(Sampler[list[int]]):
    """The index lists of a shared evaluation."""

    def __init__(self, of: EvalBatches) -> None:
        self._of = of

    def __len__(self) -> int:
        return len(self._of.lists())

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self._of.lists())


def _counted(batches: Iterator[Batch], order: IndexOrder) -> Iterator[Batch]:
    for batch in batches:
        order.delivered()
        yield batch


def _as_it_is(batch: Batch) -> Batch:
    return batch


def gathered(source: ItemSource, lists: Iterator[Tensor], pin: bool) -> Iterator[Batch]:
    """One batch per list of indices, created in this process on the device that holds the data."""
    pin = pin and source.on.type == "cpu" and torch.cuda.is_available()
    items = Collated(source)
    for indices in lists:
        if source.gather is not None:
            batch = source.gather.batch(indices.to(source.on, non_blocking=True))
        else:
            batch = items.__getitems__(indices.tolist())
        yield map_tensors(batch, Tensor.pin_memory) if pin else batch


def to_device(batch: Batch, device: torch.device, non_blocking: bool = True) -> Batch:
    """Move a batch to the device, tensor by tensor; copies from pinned memory need not block."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


OwnOrder = IndexOrder | StreamOrder


def at_pass_end(own: OwnOrder | None, of_step: int) -> TypeGuard[OwnOrder]:
    """Whether no step is left of the present pass; False if its length is unknown. of_step: see Batches."""
    if own is None or own.per_pass is None:
        return False
    return own.batches // of_step == own.per_pass // of_step


def end_pass(own: OwnOrder, of_step: int) -> None:
    """Count a pass whose batches were all delivered. Raises TrainingError if it had no complete step."""
    if own.batches < of_step:
        what = counted(own.batches, "micro-batch")
        raise TrainingError(
            f"pass {own.passes + 1} over {own.order.name} has only {what}, and a step needs {of_step}: "
            "does its iteration end early, or can it be iterated only once?"
        )
    own.end_pass()


def no_step(batches: Batches, config: Config) -> str:
    """Why nothing can be trained: a pass over the data has fewer micro-batches than a step of all ranks."""
    found, instead = counted(batches.per_epoch or 0, "micro-batch"), "lower batch.micro or batch.accumulation"
    if config.parallel.ranks > 1:
        found, instead = f"{found} for each rank", f"{instead}, or train with fewer ranks"
    items = counted(config.batch.micro, "item")
    needed = f"{counted(config.batch.accumulation, 'micro-batch')} of {items}"
    return f"a pass over the training data has {found}, but a step needs {needed}: {instead}"


def cannot_load(batches: Batches, before: dict[str, Any] | None) -> str | None:
    """Why a checkpoint's position does not apply to these batches; None if it can be loaded."""
    now = batches.state()
    if before is None or now is None:
        return None
    if before["kind"] != now["kind"] or before.get("position") != now.get("position"):
        return "the order of the data cannot be continued: its state_dict is new, or is gone"
    if before["micro"] != now["micro"] and now.get("position", now["kind"]) != "anew":
        was = before["micro"]
        return f"the position in the data counts micro-batches of {was}: set batch.micro = {was}"
    if before.get("workers", 0) != now.get("workers", 0) and before.get("position") == "state":
        was = before["workers"]
        return f"each loader worker continues its own part of the stream: set loader.workers = {was}"
    return None


def ordered_steps(workload: Workload, config: Config) -> int | None:
    """Optimizer steps of an epoch of the workload in its own order; None if that is unknown."""
    items = item_count(workload.train_data)
    if items is None:
        return None
    batches = length(workload.order or Order(), items, config.batch.micro)
    return None if batches is None else batches // config.batch.accumulation
