"""The ranks as this process sees them: the process groups, and small values that they exchange.

Values go over a gloo group of their own, also on GPUs, and as bytes: torch's collectives for objects need NumPy.
"""

from __future__ import annotations

import io
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ndd_engine.errors import NddError, UsageError

from .place import Place

# Rank 0 may choose a model size or read data for a while before it shares what it found.
STORE_TIMEOUT = timedelta(hours=2)
# Votes continue while a rank compiles or evaluates; a rank that hangs is noticed by `hang`.
CONTROL_TIMEOUT = timedelta(days=7)

T = TypeVar("T")


class OtherRankError(NddError):
    """Rank 0 failed and reports why; this rank has nothing to add."""


@dataclass(frozen=True)
class Member:
    """A rank: its host and process."""

    rank: int
    host: str
    pid: int


class World:
    """The ranks of this run. Use `World.join`.

    store: shared by all ranks. control: the gloo group for values. members: the ranks in order.
    """

    def __init__(self, place: Place, store: Store, device: torch.device) -> None:
        self.place, self.store, self.device = place, store, device
        self.control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        mine = {"host": socket.gethostname(), "pid": os.getpid()}
        everyone = self.gather(mine)
        self.members = [Member(rank, one["host"], one["pid"]) for rank, one in enumerate(everyone)]

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [member.host for member in self.members]

    @classmethod
    def join(cls, place: Place, store: Store, device: torch.device) -> World:
        """Meet the other ranks; waits for all of them. device: where this rank trains."""
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=PrefixStore("ndd/groups", store),
            rank=place.rank,
            world_size=place.size,
            device_id=device if on_gpu else None,
        )
        return cls(place, store, device)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in their order; values are what torch.load(weights_only=True) loads."""
        file = io.BytesIO()
        torch.save(value, file)
        mine = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()]), group=self.control)
        longest = int(max(map(int, sizes)))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        every = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(every, padded, group=self.control)
        return [
            torch.load(io.BytesIO(bytes(one[: int(size)].tolist())), weights_only=True)
            for one, size in zip(every, sizes, strict=True)
        ]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks of a tensor on the host; changes it in place."""
        dist.all_reduce(values, group=self.control)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.control)


def connect(place: Place) -> tuple[Store, Place]:
    """The store of the ranks, and the place with what the ranks know of restarts; waits for all ranks.

    Raises NddError if the store cannot be reached.
    """
    try:
        store, _rank, _size = next(rendezvous("env://", place.rank, place.size))
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise NddError(
            f"rank {place.rank} cannot reach the store of the ranks at {address}: {error}"
        ) from None
    store.set_timeout(STORE_TIMEOUT)
    attempt = _attempt(PrefixStore("ndd", store), place)
    return PrefixStore(f"ndd/{attempt}", store), replace(place, restart=max(place.restart, attempt - 1))


def _attempt(store: Store, place: Place) -> int:
    """The number of this start of all ranks, from 1 on, which rank 0 tells to the others.

    After a restart the store may still have what the ranks before have left. TORCHELASTIC_RESTART_COUNT does not set
    the attempts apart: with several nodes, torchrun counts a restart only where it noticed the failure. So each process
    asks under a name of its own.
    """
    if not place.first:
        name = uuid.uuid4().hex
        store.set(f"asking/{store.add('asking', 1)}", name)
        attempt = int(store.get(f"attempt/{name}"))
        store.set(f"here/{attempt}/{place.rank}", "")
        return attempt
    attempt = store.add("attempts", 1)
    answered: set[int] = set()
    here = [f"here/{attempt}/{rank}" for rank in range(1, place.size)]
    deadline = time.monotonic() + STORE_TIMEOUT.total_seconds()
    while not store.check(here):
        for number in range(1, store.add("asking", 0) + 1):
            if number not in answered and store.check([f"asking/{number}"]):
                answered.add(number)
                store.set(f"attempt/{store.get(f'asking/{number}').decode()}", str(attempt))
        if time.monotonic() > deadline:
            raise NddError(f"not all of the {place.size} ranks have started")
        time.sleep(0.02)
    return attempt


def from_first(store: Store, place: Place, key: str, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on all ranks; JSON values. If rank 0 raises, the others raise OtherRankError."""
    if not place.first:
        found = json.loads(store.get(key))
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
