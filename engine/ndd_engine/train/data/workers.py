"""Loader worker processes: start them, report within seconds which one died, and end them with the run."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

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


def worker_options(
    workers: int, prefetch: int | None, persistent: bool, begin: Callable[[int], Any] | None = None
) -> dict[str, Any]:
    """The options of torch's DataLoader that concern its workers. begin: a worker_init_fn of the user's."""
    if workers == 0:
        return {"num_workers": 0, "persistent_workers": persistent}
    # Other threads exist (recorder, sampler, console): a fork could copy locks that they hold.
    method = "forkserver" if sys.platform == "linux" else "spawn"
    if method == "forkserver":
        start_server()
    return {
        "worker_init_fn": belong if begin is None else partial(_belong_and, begin),
        "num_workers": workers,
        "persistent_workers": persistent,
        "prefetch_factor": prefetch,
        "multiprocessing_context": multiprocessing.get_context(method),
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


def _belong_and(begin: Callable[[int], Any], worker: int) -> None:
    belong(worker)
    begin(worker)


def _end_with(owner: Any) -> None:
    owner.join()
    os._exit(1)


def worker_pids(iterator: Any) -> tuple[int, ...]:
    """Ids of the running workers of a loader's iterator."""
    inner = getattr(iterator, "_iterator", iterator)
    return tuple(worker.pid for worker in getattr(inner, "_workers", ()) if worker.is_alive())
