"""Passes over the data of a script: how many there are, how many steps one has, and what their batches hold.

Batches are compared by a checksum: loader workers, or ranks, that give the same ones each read all of the data.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections import deque
from threading import get_ident
from typing import Any, Callable

from .clock import BASE, DONE, EVALUATE, TRAINER, S
from .looks import Looks, key_of
from .mapped import MICRO, STARTS
from .own import own_frame

# Batches of each worker, and of each rank, whose checksums are taken, and the bytes of a tensor that these are of.
LOOKS, RANK_LOOKS, MOST_BYTES = 3, 6, 1 << 16
# Sizes of batches that are kept until they are counted, and by how many batches a script reads ahead of its steps.
MOST_SIZES, AHEAD = 1 << 16, 64
# Values of `_dataset_kind` of an iterator.
_ITERABLE = 1


class Passes:
    """Of the training, not of evaluations.

    own: whether a code object is the script's own. per_pass: the steps from the last but one begin to the last one, 0
    before that is known. found: what the configuration of the run is to say, see `news`.
    """

    def __init__(self, own: Callable[[Any], bool], looks: Looks) -> None:
        self._own, self._looks = own, looks
        self.per_pass = 0
        # Whether batches of this process are compared with those of other ranks.
        self.ranks = False
        # Steps when the last pass began, and batches that it has given; its end counts as one. The training begins with
        # one that was read before.
        self._begun_at, self._given = 0, 1
        # Passes that have begun, and have not given their first batch.
        self._waiting = 0
        # Keys of datasets whose batches were looked at, and batches that are left to look at.
        self._seen: set[int] = set()
        self._left = 0
        # Of the next batch: its number in its pass, and the worker that made it, -1 if that is unknown.
        self._next = (0, -1)
        self._batches: list[tuple[int, int, int]] = []
        # Of the loader: items of a batch, by how many the last one of a pass is smaller, and batches of a pass.
        self._size = self._smaller = self._whole = 0
        # Whether only the batches tell their sizes; those of batches that were read, and are not counted yet.
        self.uneven = False
        self._sizes: deque[int] = deque(maxlen=MOST_SIZES)
        self._latest: deque[int] = deque(maxlen=AHEAD)  # those that were counted last
        # Micro-steps before the pass, and whether its last batch is counted; items that such batches lacked.
        self._micro, self._over, self._lacked = 0, False, 0
        self._news: dict[str, Any] = {}

    def news(self) -> dict[str, Any]:
        """What was found since the last call, for the configuration of the run.

        wasted: file and line where an iterator was made that gave one batch only. batch_bytes: of the tensors in a
        batch. batches: [number in its pass, worker or -1, checksum] of some.
        """
        found, self._news = self._news, {}
        return found

    def began(self, frame: Any) -> None:
        """An iterator of a loader was made. frame: of the function of torch that made it."""
        S[STARTS] += 1
        self._end()
        self._micro, self._over = S[MICRO], False
        self._waiting += 1
        steps = S[DONE] - self._begun_at
        if steps <= 1 and self._given == 1:
            found = own_frame(frame.f_back, self._own)
            if found is not None:
                self._news["wasted"] = found.f_code.co_filename, found.f_lineno
        if steps:
            self.per_pass, self._begun_at = steps, S[DONE]
        self._given = 0

    def reads(self, iterator: Any, new: bool) -> None:
        """The training is about to read an iterator. new: another one than before."""
        if new and key_of(iterator._dataset) not in self._seen:
            self._seen.add(key_of(iterator._dataset))
            self._batches, self._left = [], 1
            if self.ranks:
                self._left = RANK_LOOKS
            elif iterator._dataset_kind == _ITERABLE and iterator._num_workers > 1:
                self._left = LOOKS * iterator._num_workers + 1
        if self._left:
            self._next = iterator._num_yielded, _worker(iterator)

    def gave(self, frame: Any) -> bool:
        """An iterator has given a batch, or come to its end. Returns whether it was its first one.

        frame: of the iterator's function.
        """
        if self._left and self._looks.allowed() and (batch := frame.f_locals.get("data")) is not None:
            self._left -= 1
            self._look(batch)
        self._given += 1
        if not self._waiting:
            return False
        self._waiting -= 1
        return True

    def reads_loader(self, settings: dict[str, Any]) -> None:
        """The training begins to read a loader with these settings, see `Places`."""
        size, items = settings["batch_size"] or 0, settings["items"]
        self.uneven = settings.get("uneven", False)
        if items is None and size == self._size:
            return  # it is not known at each moment
        self._size, self._smaller, self._whole = size, 0, 0
        if size and items and not settings["drop_last"]:
            self._smaller, self._whole = -items % size, -(-items // size)

    def counting(self, leaves: Callable[[Any, int], int], failed: Callable[[BaseException], None]) -> Any:
        """A hook: an iterator has made a batch. leaves: what else is done then. failed: called with an error."""
        traced = self._looks.traced

        def ends(probe: Any, zero: int) -> int:
            if self.uneven and S[TRAINER] == get_ident() and S[BASE] != EVALUATE and not traced():
                try:
                    self.count(sys._getframe(1).f_locals.get("data"))
                except Exception as error:  # noqa: BLE001
                    failed(error)
            return leaves(probe, zero)

        return ends

    def count(self, batch: Any) -> None:
        """Remember the size of a batch whose sampler does not tell it."""
        tensor = self._looks.first_tensor(batch) if self._looks.allowed() else None
        shape = None if tensor is None else self._looks.shape(tensor)
        if shape:
            self._sizes.append(shape[0])

    def counted(self, micro: int, looked: int | None) -> int | None:
        """Items of so many micro-steps by the sizes of their batches; None if these are unknown.

        looked: items of an input of the model, None without one. Where it is that of no batch, the model gets others.
        """
        sizes, latest = self._sizes, self._latest
        # A script that reads ahead may train the batch that was counted last.
        known = looked in (None, *sizes, *latest)
        if not self.uneven or not (sizes or latest) or len(sizes) > micro + AHEAD or not known:
            sizes.clear()
            latest.clear()
            return None
        items, usual = 0, sorted(sizes or latest)
        each = usual[len(usual) // 2]
        for _ in range(micro):  # the first ones were read before
            latest.append(sizes.popleft() if sizes else each)
            items += latest[-1]
        return items

    def full(self, items: int, before: int) -> int:
        """Items of a usual micro-step, if the one that was looked at has so many, and earlier ones had `before`."""
        last = self._size - self._smaller
        if not self._smaller:
            return items
        if items * self._size == before * last:
            return before
        return self._size if items == last else items

    def lacked(self, each: int) -> int:
        """Items that the last batches of passes lacked since the last call, if a usual micro-step has `each`."""
        self._end()
        found, self._lacked = self._lacked, 0
        return found * each // self._size if self._size else 0

    def _end(self) -> None:
        """Count the last batch of a pass if as many micro-steps were made of it as it has batches."""
        if self._smaller and not self._over and S[MICRO] - self._micro == self._whole:
            self._over = True
            self._lacked += self._smaller

    def _look(self, batch: Any) -> None:
        tensors = list(self._looks.tensors(batch))
        if not self._batches:
            self._news["batch_bytes"] = sum(map(self._looks.bytes_of, tensors))
        parts = [part for tensor in tensors if (part := self._looks.span(tensor)) is not None]
        if parts:
            checksum = 0
            for address, size in parts:
                checksum = zlib.crc32(ctypes.string_at(address, min(size, MOST_BYTES)), checksum)
            self._batches.append((*self._next, checksum))
        if not self._left and len(self._batches) > 1:
            self._news["batches"] = self._batches


def _worker(iterator: Any) -> int:
    """The worker that makes the next batch of an iterator; -1 if it is not known, 0 without workers."""
    if not iterator._num_workers:
        return 0
    info = iterator._task_info.get(iterator._rcvd_idx) if getattr(iterator, "_in_order", True) else None
    return -1 if info is None else int(info[0])
