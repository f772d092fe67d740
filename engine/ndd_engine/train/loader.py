"""Batches in an order that depends on the seed and the epoch alone, from any position on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ndd_engine.config.schema import Config

# While a batch is waited for, the workers are looked after this often.
CHECK_S = 2.0


class EpochBatches(Sampler[list[int]]):
    """Index lists of one epoch's micro-batches; `set` chooses the epoch and where in it to begin.

    The incomplete batch at the end is left out, so that every step has the same shape.
    """

    def __init__(self, items: int, micro: int, seed: int) -> None:
        self.items, self.micro, self.seed = items, micro, seed
        self.epoch = 0
        self.start = 0

    def set(self, epoch: int, start: int = 0) -> None:
        """Epoch (0-based) and number of micro-batches to leave out at its beginning."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return self.items // self.micro - self.start

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(_mix(self.seed, self.epoch))
        order = torch.randperm(self.items, generator=generator)
        for batch in range(self.start, self.items // self.micro):
            yield order[batch * self.micro : (batch + 1) * self.micro].tolist()


def _mix(seed: int, epoch: int) -> int:
    # Neighbouring (seed, epoch) pairs must not share an order, as seed + epoch would.
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % (2**63)


class Batches:
    """The training batches of a run. `epoch(n, start)` iterates; the loader lives as long as the run."""

    def __init__(self, data: Dataset[Any], config: Config) -> None:
        self.sampler = EpochBatches(len(data), config.batch.micro, config.run.seed)  # type: ignore[arg-type]
        self.crc = checksum(data, self.sampler.items)
        loader = config.loader
        self.loader: DataLoader[Any] = _Loader(
            loader.timeout_s,
            data,
            batch_sampler=self.sampler,
            # Its own generator: the loader draws a number for the workers' seeds, which must not move the model's.
            generator=torch.Generator().manual_seed(config.run.seed),
            pin_memory=loader.pin_memory,
            persistent_workers=loader.workers > 0 if loader.persistent is None else loader.persistent,
            **_workers(loader.workers, loader.prefetch),
        )

    @property
    def per_epoch(self) -> int:
        """Micro-batches in a whole epoch."""
        return self.sampler.items // self.sampler.micro

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Batches of one epoch from micro-batch `start` on."""
        self.sampler.set(epoch, start)
        return iter(self.loader)


def eval_loader(data: Dataset[Any], config: Config) -> DataLoader[Any]:
    """Evaluation batches in their natural order, the last one possibly smaller."""
    loader = config.loader
    return _Loader(
        loader.timeout_s,
        data,
        batch_size=config.batch.micro,
        shuffle=False,
        generator=torch.Generator().manual_seed(config.run.seed),
        pin_memory=loader.pin_memory,
        **_workers(loader.eval_workers, None),
    )


class _Loader(DataLoader[Any]):
    """A loader that says which worker died, within seconds, and gives up on workers that are stuck.

    torch's own check of the workers waits for the whole timeout, and for workers that are not children of this
    process it is the only one.
    """

    def __init__(self, timeout_s: float, *arguments: Any, **options: Any) -> None:
        if options["num_workers"]:
            options["timeout"] = min(CHECK_S, timeout_s)
        super().__init__(*arguments, **options)
        self.patience_s = timeout_s

    def __iter__(self) -> Any:
        if not self.num_workers:
            return super().__iter__()
        kept: Any = self._iterator  # of persistent workers, which now hear of the new epoch
        if kept is not None:
            _raise_if_dead(kept)
            kept._timeout = self.patience_s  # no second try is possible here
        try:
            iterator: Any = super().__iter__()
        except (OSError, EOFError, RuntimeError):
            _raise_if_dead(kept, 1.0)
            raise
        iterator._timeout = self.timeout
        return _Watched(iterator, self.patience_s)


class _Watched:
    """A loader's iterator with an eye on the workers. Raises RuntimeError that names the one that died."""

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
                # A connection breaks a moment before its worker counts as dead.
                _raise_if_dead(self._iterator, 0.0 if timed_out else 1.0)
                if not timed_out:
                    raise
                if time.monotonic() - begin >= self._patience_s:
                    raise RuntimeError(f"DataLoader timed out after {self._patience_s:g} seconds") from None


def _raise_if_dead(iterator: Any, patience_s: float = 0.0) -> None:
    """Raise RuntimeError, in torch's own words, when a worker of the iterator is no more."""
    workers = list(getattr(iterator, "_workers", ()))
    wait([worker.sentinel for worker in workers], patience_s)
    for worker in workers:
        if not worker.is_alive():
            code = worker.exitcode or 0
            if code < 0:
                raise RuntimeError(
                    f"DataLoader worker (pid {worker.pid}) is killed by signal: {signal.Signals(-code).name}"
                )
            raise RuntimeError(f"DataLoader worker (pid(s) {worker.pid}) exited unexpectedly")


def _workers(workers: int, prefetch: int | None) -> dict[str, Any]:
    if workers == 0:
        return {"num_workers": 0}
    # Threads exist (recorder, sampler, perhaps the console): forking would copy their locks mid-flight.
    method = "forkserver" if sys.platform == "linux" else "spawn"
    if method == "forkserver":
        # Imported once there instead of once in every worker.
        multiprocessing.set_forkserver_preload(["torch"])
    return {
        "worker_init_fn": belong,
        "num_workers": workers,
        "prefetch_factor": prefetch,
        "multiprocessing_context": multiprocessing.get_context(method),
    }


def belong(_worker: int) -> None:
    """In a worker: Ctrl-C is for the training process, which still wants batches; its death ends the worker too.

    torch's own watch looks at the fork server, and the fork server waits for its workers: both would stay for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (owner := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(owner,), name="ndd-owner", daemon=True).start()


def _end_with(owner: Any) -> None:
    owner.join()
    os._exit(1)


def checksum(data: Dataset[Any], items: int, looked_at: int = 16) -> int:
    """CRC-32 of some items, evenly spread: whether a resumed run meets the data it was trained on."""
    crc = 0
    for index in range(0, items, max(items // looked_at, 1)):
        for tensor in _tensors(data[index]):
            crc = zlib.crc32(bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()), crc)
    return crc


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        if item.numel():
            yield item.cpu()
    elif isinstance(item, (list, tuple, dict)):
        for value in item.values() if isinstance(item, dict) else item:
            yield from _tensors(value)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch on the device, tensor by tensor; copies from page-locked memory do not block."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
