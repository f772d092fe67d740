"""Exchanges Python objects between ranks, and lets all of them learn of an error of one.

torch's own collectives for objects need NumPy. Objects are pickled: they come from processes of the same run only.
"""

from __future__ import annotations

import errno
import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ndd_engine.errors import CheckpointError, NddError, TrainingError, UsageError, said
from ndd_engine.limits import limit_of
from ndd_engine.text import printable

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An error of one rank, for all of them. kind: the type to raise. number: errno of an OSError."""

    kind: type[Exception]
    text: str
    number: int = errno.EIO

    def raised(self) -> Exception:
        """The error to raise."""
        return OSError(self.number, self.text) if self.kind is OSError else self.kind(self.text)


def failure_of(error: Exception, rank: int) -> Failure:
    """What the other ranks raise: an OSError with rank, file and reason, an error of the user as it is."""
    who = f"rank {rank} on {printable(socket.gethostname())}"
    if isinstance(error, OSError):
        file = f"{printable(Path(str(error.filename)).name)}: " if error.filename else ""
        limit = limit_of(error)
        text = f"{who}: {file}{limit or error.strerror or said(error)}"
        # The limits of another process are not those that the reader of the number would look up.
        return Failure(OSError, text, errno.EIO if limit else error.errno or errno.EIO)
    for kind in (CheckpointError, UsageError):
        if isinstance(error, kind):
            return Failure(kind, str(error))
    return Failure(TrainingError, f"{who}: {error if isinstance(error, NddError) else said(error)}")


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
        outcome: T | Failure | None = None
        failed: BaseException | None = None
        if self.leads:
            outcome, failed = self._tried(work)
        data, buffer = _packed(outcome)
        length = torch.tensor([data.numel()])
        dist.broadcast(length, self._first, self._group)
        if not self.leads:
            data, buffer = _room(int(length))
        dist.broadcast(data, self._first, self._group)
        return self._result(pickle.loads(buffer), failed)  # type: ignore[no-any-return]

    def from_all(self, work: Callable[[], T]) -> list[T]:
        """The results of `work` of all ranks on rank 0, [] on the others. If one raises an error, all do."""
        outcome, failed = self._tried(work)
        data, _ = _packed(outcome)
        most = torch.tensor([data.numel()])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        rooms = [_room(int(most)) for _ in range(self.size if self.leads else 0)]
        dist.gather(_padded(data, int(most)), [room for room, _ in rooms] or None, self._first, self._group)
        found = [pickle.loads(buffer) for _, buffer in rooms]
        first = next((each for each in found if isinstance(each, Failure)), None)
        failure = self.from_first(lambda: first)
        if failure is not None:
            raise failure.raised() from failed
        return found

    def everywhere(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on all ranks."""
        found = self.from_all(lambda: value)
        return self.from_first(lambda: found)

    def to_each(self, work: Callable[[], Sequence[T]]) -> T:
        """The own element of the results of `work`, which runs on rank 0. All ranks raise the error that it raises."""
        parts: list[tuple[Tensor, bytearray]] = []
        failed: BaseException | None = None
        if self.leads:
            outcome, failed = self._tried(work)
            each = [outcome] * self.size if isinstance(outcome, Failure) else outcome
            parts = [_packed(part) for part in each]
        most = torch.tensor([max((data.numel() for data, _ in parts), default=0)])
        dist.broadcast(most, self._first, self._group)
        room, buffer = _room(int(most))
        padded = [_padded(data, int(most)) for data, _ in parts]
        dist.scatter(room, padded or None, self._first, self._group)
        return self._result(pickle.loads(buffer), failed)  # type: ignore[no-any-return]

    def _tried(self, work: Callable[[], T]) -> tuple[T | Failure, BaseException | None]:
        try:
            return work(), None
        except Exception as error:  # noqa: BLE001  the other ranks have to learn of it
            return failure_of(error, self.rank), error

    def _result(self, outcome: Any, failed: BaseException | None) -> Any:
        if isinstance(outcome, Failure):
            raise outcome.raised() from failed
        return outcome


def _room(count: int) -> tuple[Tensor, bytearray]:
    """A tensor of so many bytes, and its memory."""
    buffer = bytearray(count)
    return torch.frombuffer(buffer, dtype=torch.uint8), buffer


def _packed(value: object) -> tuple[Tensor, bytearray]:
    buffer = bytearray(pickle.dumps(value))
    return torch.frombuffer(buffer, dtype=torch.uint8), buffer


def _padded(data: Tensor, count: int) -> Tensor:
    """With zeros at the end, which unpickling ignores."""
    return torch.cat([data, data.new_zeros(count - data.numel())])
