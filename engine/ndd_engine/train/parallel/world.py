"""The ranks as this process sees them: how they meet, their devices, the process groups, and values that they exchange.

Values go over a gloo group of their own, also on GPUs, and as bytes: torch's collectives for objects need NumPy. They
are pickled: they come from processes of the same run only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import socket
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ndd_engine.errors import (
    EXIT_USAGE,
    CheckpointError,
    NddError,
    TrainingError,
    UsageError,
    message_of,
    said,
)
from ndd_engine.processes import limit_of
from ndd_engine.run.control import StopNow
from ndd_engine.text import counted, printable
from ndd_engine.train.data.loader import Batches
from ndd_engine.train.data.order import checksum

from .rank_place import Member, Notes, OtherRankError, RankPlace, first_over, own_launcher
from .strategy import GATHER

if TYPE_CHECKING:
    from ndd_engine.train.parallel.rank_place import OtherRanks
    from ndd_engine.train.request import OpenRun


# Rank 0 may choose a model size or read data for a while before it shares what it found.
STORE_TIMEOUT = timedelta(hours=2)
# Ranks wait while one of them compiles or evaluates; one that hangs is noticed by `hang`.
CONTROL_TIMEOUT = timedelta(days=7)
# The flight recorder lists the collectives that a rank waits in; older versions of torch keep it for NCCL only.
# (torch compares its version with a string as versions.)
FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE" if torch.__version__ >= "2.8" else "TORCH_NCCL_TRACE_BUFFER_SIZE"
FLIGHT_ENTRIES = "2000"
# Between two looks for the other ranks, and before saying which are missing.
LOOK_S = 0.05
MISSING_S = 5.0

T = TypeVar("T")


class World:
    """The ranks of this run. Use `World.join`.

    store, notes: shared by all ranks. control: the gloo group for values; exchange: of objects, over it. members: the
    ranks in order.
    """

    def __init__(self, place: RankPlace, store: Store, notes: Notes, device: torch.device) -> None:
        self.place, self.store, self.notes, self.device = place, store, notes, device
        self.control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        self.exchange = Exchange(self.control)
        self.members = self.exchange.everywhere(Member.mine(place.rank))

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
    def join(cls, run: OpenRun, ranks: OtherRanks, device: torch.device) -> World:
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


def _meet(run: OpenRun, ranks: OtherRanks, device: torch.device) -> None:
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


def connect(place: RankPlace) -> tuple[Store, RankPlace]:
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
def _patient(place: RankPlace, text: str) -> Iterator[None]:
    """If it takes long, the first rank of a host says on standard error what it waits for: no run can record it yet."""
    timer = threading.Timer(MISSING_S, lambda: sys.stderr.write(f"ndd-console: {text}\n"))
    timer.daemon = True
    if not place.local_rank:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _attempt(store: Store, place: RankPlace) -> int:
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


def from_first(store: Store, place: RankPlace, key: str, make: Callable[[], Any]) -> Any:
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


def from_others(store: Store, place: RankPlace, key: str, make: Callable[[], T]) -> T | None:
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


@dataclass(frozen=True)
class RankFailure:
    """An error of one rank, for all of them. kind: the type to raise. number: errno of an OSError."""

    kind: type[Exception]
    text: str
    number: int = errno.EIO

    def raised(self) -> Exception:
        """The error to raise."""
        return OSError(self.number, self.text) if self.kind is OSError else self.kind(self.text)


def failure_of(error: Exception, rank: int) -> RankFailure:
    """What the other ranks raise: an OSError with rank, file and reason, an error of the user as it is."""
    who = f"rank {rank} on {printable(socket.gethostname())}"
    if isinstance(error, OSError):
        file = f"{printable(Path(str(error.filename)).name)}: " if error.filename else ""
        limit = limit_of(error)
        text = f"{who}: {file}{limit or error.strerror or said(error)}"
        # The limits of another process are not those that the reader of the number would look up.
        return RankFailure(OSError, text, errno.EIO if limit else error.errno or errno.EIO)
    for kind in (CheckpointError, UsageError):
        if isinstance(error, kind):
            return RankFailure(kind, str(error))
    return RankFailure(TrainingError, f"{who}: {error if isinstance(error, NddError) else said(error)}")


class Exchange:
    """The ranks of a process group on the CPU (gloo). All ranks call each method together, in the same order.

    rank, size: of this process in the group, and of the group. If a rank dies, the others raise RuntimeError.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def from_first(self, work: Callable[[], T]) -> T:
        """The result of `work` on rank 0, on all ranks, which raise the error that it raises."""
        outcome, failed = self._tried(work) if self.leads else (None, None)
        buffer = bytearray(pickle.dumps(outcome))
        length = torch.tensor([len(buffer)])
        dist.broadcast(length, self._first, self._group)
        if not self.leads:
            buffer = bytearray(int(length))
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), self._first, self._group)
        found = pickle.loads(buffer)
        if isinstance(found, RankFailure):
            raise found.raised() from failed
        return found  # type: ignore[no-any-return]

    def from_all(self, work: Callable[[], T]) -> list[T]:
        """The results of `work` of all ranks on rank 0, [] on the others. If one raises an error, all do."""
        outcome, failed = self._tried(work)
        found: list[Any] = self.everywhere(outcome)
        for each in found:
            if isinstance(each, RankFailure):
                raise each.raised() from failed
        return found if self.leads else []

    def everywhere(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on all ranks."""
        mine = pickle.dumps(value)
        most = torch.tensor([len(mine)])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        length = int(most)
        # Zeros at the end are ignored when it is unpickled.
        sent = torch.frombuffer(bytearray(mine.ljust(length, b"\0")), dtype=torch.uint8)
        buffer = memoryview(bytearray(length * self.size))
        getattr(dist, GATHER)(torch.frombuffer(buffer, dtype=torch.uint8), sent, group=self._group)
        return [pickle.loads(buffer[begin : begin + length]) for begin in range(0, len(buffer), length)]

    def to_each(self, work: Callable[[], Sequence[T]]) -> T:
        """The own element of the results of `work`, which runs on rank 0. All ranks raise the error that it raises."""
        return self.from_first(work)[self.rank]

    def _tried(self, work: Callable[[], T]) -> tuple[T | RankFailure, BaseException | None]:
        try:
            return work(), None
        except Exception as error:  # noqa: BLE001  the other ranks have to learn of it
            return failure_of(error, self.rank), error


def device_of(asked: str, place: RankPlace) -> str:
    """The device of a rank: with several on a host, each has a GPU of its own. Raises UsageError if it has none.

    asked: run.device.
    """
    if asked == "cpu" or not torch.cuda.is_available():
        return asked
    # Where a cluster gives each process a GPU of its own, it is the only one that the process sees.
    gpus = torch.cuda.device_count()
    if asked.startswith("cuda:"):
        if place.local_size > 1 and gpus > 1:
            raise UsageError(f'run.device = "{asked}", which all ranks would share: set run.device = "auto"')
        return asked
    if gpus > 1 and place.local_rank >= gpus:
        text = (
            f"{counted(place.local_size, 'rank')} on {printable(socket.gethostname())}, which has {gpus} GPUs"
        )
        raise UsageError(f"{text}: start at most {gpus} there (parallel.ranks, --nproc-per-node)")
    return f"cuda:{place.local_rank if gpus > 1 else 0}"


@dataclass(frozen=True)
class Used:
    """What a rank trains on. device: "cpu" or "cuda". gpu: what tells the GPUs of a host apart."""

    host: str
    device: str
    gpu: str = ""


def used(device: torch.device) -> Used:
    """What this rank trains on."""
    gpu = ""
    if device.type == "cuda":
        known = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        gpu = str(known or f"{device} of {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}")
    return Used(socket.gethostname(), device.type, gpu)


def conflict(each: Sequence[Used]) -> str:
    """Why these ranks cannot train together, or "". each: in the order of the ranks."""
    on_gpu = [rank for rank, one in enumerate(each) if one.device == "cuda"]
    if 0 < len(on_gpu) < len(each):
        without = next(rank for rank, one in enumerate(each) if one.device != "cuda")
        have = f"rank {on_gpu[0]} (on {each[on_gpu[0]].host}) has a GPU"
        return (
            f"{have}, rank {without} (on {each[without].host}) has none that it can use: repair that, or set "
            'run.device = "cpu" for all of them'
        )
    owner: dict[Used, int] = {}
    for rank in on_gpu:
        first = owner.setdefault(each[rank], rank)
        if first != rank:
            text = f"ranks {first} and {rank} (on {each[rank].host}) have the same GPU: each rank needs one of its own"
            return f"{text}; start at most as many ranks on a host as it has GPUs (parallel.ranks, --nproc-per-node)"
    return ""


# Of each parameter, this many elements are compared: what is drawn at random differs everywhere.
LOOKED_AT = 1024


def check_data(world: World, batches: Batches) -> None:
    """Raise UsageError on all ranks if one of them has other training data than rank 0: items would be lost.

    Of a stream, the first micro-batch is compared.
    """
    streams = batches.items is None
    crc = checksum([batches.sample()], 1) if streams else batches.crc
    words = {
        "items": "another number of training items",
        "order": "training data in another order",
        "crc": "another first batch of its stream" if streams else "other training data",
    }
    advice = "every rank has to read all of the data alike, and the run deals each its share of the batches"
    _compare(world, {"items": batches.items, "order": batches.order, "crc": crc}, words, advice)


def check_model(world: World, model: nn.Module) -> None:
    """Raise UsageError on all ranks if one of them has built another model than rank 0.

    DistributedDataParallel begins with the parameters of rank 0, but shards come from every rank. Call it before.
    """
    crc = 0
    for name, parameter in model.named_parameters():
        value = parameter.detach().flatten()[:LOOKED_AT].cpu()
        crc = zlib.crc32(bytes(value.view(torch.uint8).tolist()), zlib.crc32(name.encode(), crc))
    advice = "draw them from torch's generator, or from one that is seeded by settings.seed"
    _compare(world, {"crc": crc}, {"crc": "other initial parameters"}, advice)


def _compare(world: World, mine: dict[str, Any], words: dict[str, str], advice: str) -> None:
    first, *others = world.exchange.everywhere(mine)
    for member, other in zip(world.members[1:], others, strict=True):
        for key, text in words.items():
            if other[key] != first[key]:
                raise UsageError(f"rank {member.rank} ({member.host}) has {text} than rank 0: {advice}")
