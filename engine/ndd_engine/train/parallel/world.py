"""The ranks as this process sees them: the process groups, and small values that they exchange.

Values go over a gloo group of their own, also on GPUs, and as bytes: torch's collectives for objects need NumPy.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ndd_engine.errors import EXIT_USAGE, NddError, UsageError, message_of
from ndd_engine.run.control import StopNow
from ndd_engine.text import counted, printable

from .devices import Used, conflict, used
from .exchange import Exchange
from .failures import first_over
from .notes import Notes
from .place import OtherRankError, Place, own_launcher

if TYPE_CHECKING:
    from ndd_engine.train.request import OpenRun, Ranks

# Rank 0 may choose a model size or read data for a while before it shares what it found.
STORE_TIMEOUT = timedelta(hours=2)
# Votes continue while a rank compiles or evaluates; a rank that hangs is noticed by `hang`.
CONTROL_TIMEOUT = timedelta(days=7)
# The flight recorder lists the collectives that a rank waits in; older versions of torch keep it for NCCL only.
# (torch compares its version with a string as versions.)
FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE" if torch.__version__ >= "2.8" else "TORCH_NCCL_TRACE_BUFFER_SIZE"
FLIGHT_ENTRIES = "2000"
# Between two looks for the other ranks, and before saying which are missing.
LOOK_S = 0.05
MISSING_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A rank: its host and process."""

    rank: int
    host: str
    pid: int

    @property
    def here(self) -> bool:
        """Whether it runs on this host."""
        return self.host == socket.gethostname()

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it. Raises psutil.Error."""
        return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def state(self) -> str:
        """What the system says about its process, as far as this host can know."""
        if self.here:
            with contextlib.suppress(psutil.Error):
                if self.stopped:
                    return f"is stopped (process {self.pid}; kill -CONT {self.pid} continues it)"
                return f"does not answer: a call outside of Python holds the interpreter lock (process {self.pid})"
        return f"does not answer: its process ({self.pid}) is stopped or gone, or holds the interpreter lock"


class World:
    """The ranks of this run. Use `World.join`.

    store, notes: shared by all ranks. control: the gloo group for values; exchange: of objects, over it. members: the
    ranks in order.
    """

    def __init__(self, place: Place, store: Store, notes: Notes, device: torch.device) -> None:
        self.place, self.store, self.notes, self.device = place, store, notes, device
        self.control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        self.exchange = Exchange(self.control)
        mine = socket.gethostname(), os.getpid()
        everyone = self.exchange.everywhere(mine)
        self.members = [Member(rank, host, pid) for rank, (host, pid) in enumerate(everyone)]

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def pids_here(self) -> list[int]:
        """The processes of the other ranks on this host."""
        return [member.pid for member in self.members if member.here and member.rank != self.rank]

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [member.host for member in self.members]

    @classmethod
    def join(cls, run: OpenRun, ranks: Ranks, device: torch.device) -> World:
        """Meet the other ranks; waits for all of them. device: where this rank trains.

        Raises UsageError if two of them have the same GPU, or only some have one. Raises OtherRankError on other ranks
        then, or if another one has failed; StopNow if this one is to stop.
        """
        place, on_gpu = ranks.place, device.type == "cuda"
        _meet(run, ranks, device)
        os.environ.setdefault(FLIGHT_RECORDER, FLIGHT_ENTRIES)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=PrefixStore("ndd/groups", ranks.store),
            rank=place.rank,
            world_size=place.size,
            device_id=device if on_gpu else None,
        )
        return cls(place, ranks.store, ranks.notes, device)


def _meet(run: OpenRun, ranks: Ranks, device: torch.device) -> None:
    """Wait until all ranks are ready. torch would also wait for ranks that have failed, and despite a stop."""
    here, notes = ranks.place, ranks.notes
    notes.put(f"ready/{here.rank}", json.dumps(asdict(used(device))))
    begin, told = time.monotonic(), -1
    each: list[Used] = []
    run.stage("waiting for the other ranks")
    while (verdict := notes.get("ready")) is None:
        if run.control.stopping:
            raise StopNow
        if (cause := first_over(ranks)) is not None:
            raise OtherRankError(cause.text, cause.exit_status, cause.curable)
        if here.first:
            while len(each) < here.size and (text := notes.get(f"ready/{len(each)}")) is not None:
                each.append(Used(**json.loads(text)))
            if len(each) == here.size:
                why = printable(conflict(each))
                notes.put("ready", why)
                if why:
                    raise UsageError(why)
                return
            if time.monotonic() - begin > MISSING_S and told != len(each):
                told = len(each)
                run.stage(f"waiting for rank {told} of {counted(here.size, 'rank')}")
        time.sleep(LOOK_S)
    if verdict:
        raise OtherRankError(verdict, EXIT_USAGE)


def connect(place: Place) -> tuple[Store, Place]:
    """The store of the ranks, and the place with what the ranks know of restarts; waits for all ranks.

    Raises NddError if the store cannot be reached.
    """
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        waits = (
            f"waits for the {place.size} ranks to reach"
            if place.first
            else "has not reached the store of the ranks at"
        )
        with _patient(place, f"rank {place.rank} {waits} {address}"):
            store, _rank, _size = next(rendezvous("env://", place.rank, place.size))
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise NddError(
            f"rank {place.rank} cannot reach the store of the ranks at {address}: {error}"
        ) from None
    store.set_timeout(STORE_TIMEOUT)
    if own_launcher() is not None:
        # It counts the restarts of one host, and sets the attempts apart.
        attempt, begun_t = place.restart + 1, psutil.Process(os.getppid()).create_time()
    else:
        ours = PrefixStore("ndd", store)
        attempt = _attempt(ours, place)
        if place.first and not ours.check(["begun"]):
            ours.set("begun", str(time.time()))
        begun_t = float(ours.get("begun"))
    here = replace(place, restart=max(place.restart, attempt - 1), begun_t=begun_t)
    return PrefixStore(f"ndd/{attempt}", store), here


@contextlib.contextmanager
def _patient(place: Place, text: str) -> Iterator[None]:
    """If it takes long, the first rank of a host says on standard error what it waits for: no run can record it yet."""
    timer = threading.Timer(MISSING_S, lambda: sys.stderr.write(f"ndd-console: {text}\n"))
    timer.daemon = True
    if not place.local_rank:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _attempt(store: Store, place: Place) -> int:
    """The number of this start of all ranks, from 1 on, which rank 0 tells to the others.

    After a restart the store may still have what the ranks before have left. TORCHELASTIC_RESTART_COUNT does not set
    the attempts apart: with several nodes, torchrun counts a restart only where it noticed the failure. So each process
    asks under a name of its own.
    """
    if not place.first:
        name = uuid.uuid4().hex
        store.set(f"asking/{store.add('asking', 1)}", name)
        with _patient(place, f"rank {place.rank} waits for rank 0"):
            attempt = int(store.get(f"attempt/{name}"))
        store.set(f"here/{attempt}/{place.rank}", "")
        return attempt
    attempt = store.add("attempts", 1)
    answered: set[int] = set()
    here = [f"here/{attempt}/{rank}" for rank in range(1, place.size)]
    begin, told = time.monotonic(), False
    while not store.check(here):
        waited_s = time.monotonic() - begin
        if waited_s > MISSING_S and not told:
            told = True
            missing = [rank for rank, key in enumerate(here, 1) if not store.check([key])]
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            names = ", ".join(f"rank {rank}" for rank in missing[:8])
            sys.stderr.write(f"ndd-console: rank 0 waits for {names}{more}\n")
        for number in range(1, store.add("asking", 0) + 1):
            if number not in answered and store.check([f"asking/{number}"]):
                answered.add(number)
                store.set(f"attempt/{store.get(f'asking/{number}').decode()}", str(attempt))
        if waited_s > STORE_TIMEOUT.total_seconds():
            raise NddError(f"not all of the {place.size} ranks have started")
        time.sleep(0.02)
    return attempt


def from_first(store: Store, place: Place, key: str, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on all ranks; JSON values. If rank 0 raises, the others raise OtherRankError."""
    if not place.first:
        try:
            found = json.loads(store.get(key))
        except (dist.DistError, RuntimeError) as error:
            raise OtherRankError(f"rank 0 is gone: {message_of(error)}") from None
        if "error" in found:
            raise OtherRankError(found["error"])
        return found["value"]
    try:
        value = make()
    except BaseException as error:
        store.set(key, json.dumps({"error": str(error)[:1000]}))
        raise
    store.set(key, json.dumps({"value": value}))
    return value


def from_others(store: Store, place: Place, key: str, make: Callable[[], T]) -> T | None:
    """What this rank makes, None on rank 0, which waits for the others and raises UsageError if one of them failed."""
    if place.first:
        for rank in range(1, place.size):
            if failed := store.get(f"{key}/{rank}").decode():
                raise UsageError(failed)
        return None
    try:
        made = make()
    except BaseException as error:
        text = str(error)[:1000] or type(error).__name__
        store.set(f"{key}/{place.rank}", f"rank {place.rank} ({socket.gethostname()}): {text}")
        raise
    store.set(f"{key}/{place.rank}", "")
    return made
