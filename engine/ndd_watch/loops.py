"""The loop of the script: its optimizers, where steps end, and its passes over the data.

`Ends` tells at which steps of optimizers a step of the training ends. With one optimizer, each of its steps does. With
several, the one that steps most rarely ends a step, and of those that step equally often the last one. One that turns
out to step too rarely for that hands over to another, all of whose steps are counted then. Optimizers that take turns,
each for several steps, and those of which one is chosen for each batch, all end steps. Another optimizer that appears
later either joins the others or takes their place: which of them it is shows when one of them steps again.

Of passes over the data it is known how many there are, how many steps one has, and what their batches hold. Batches
are compared by a checksum: loader workers, or ranks, that give the same ones each read all of the data.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections import deque
from threading import get_ident
from types import FunctionType
from typing import Any, Callable

from .clock import BASE, DONE, EVALUATE, TRAINER, S
from .looks import Looks, attribute, key_of, own_frame, whole
from .mapped import MICRO, MOST_SEEDS, SEEDS, SEEDS_AT, STARTS

# Functions with this argument first take a closure that computes the loss.
_CLOSURE = "closure"
# Functions around a step that are looked at.
MOST_WRAPPERS = 8


def takes_closure(optimizer: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a step of an optimizer is called with a closure, and not with anything else that can be called."""
    if kwargs.get(_CLOSURE) is not None:
        return True
    if len(args) < 2 or args[1] is None:
        return False
    names: Any = ()
    function: Any = type(optimizer).step
    for _ in range(MOST_WRAPPERS):  # torch's own, and perhaps `torch.no_grad()`
        if type(function) is not FunctionType:
            break
        names = function.__code__.co_varnames
        function = function.__dict__.get("__wrapped__")
    return bool(names[1:2] == (_CLOSURE,))


def wraps_steps(step: Any) -> bool:
    """Whether this is the function that torch wraps around the steps of a class; a copy of its mark is not enough."""
    optimizers = sys.modules["torch.optim.optimizer"].__dict__
    return (
        type(step) is FunctionType and step.__globals__ is optimizers and step.__dict__.get("hooked") is True
    )


def subclasses(kind: type) -> list[type]:
    """The classes that are made of this one."""
    found = kind.__subclasses__()
    return [*found, *(inner for one in found for inner in subclasses(one))]


# An optimizer that steps more rarely than this times the most frequent one does not end steps.
RARE = 8
# Steps in a row of each of two optimizers, from which on they take turns.
TURN = 3
# Counts are halved here, so that they follow a change.
MOST_COUNTED = 64


class Ends:
    """Of one thread. Optimizers are known by their id, so that none is kept.

    counts: recent steps of each optimizer, in the order of their first ones.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        # The one that ends a step, and those that stepped too rarely for that.
        self._ender = 0
        self._rare: set[int] = set()
        # New ones whose first step may belong to a step that was counted already.
        self._new: list[int] = []
        # Those whose place others have taken, the steps that they had ended, and those that the only one of the others
        # has ended since.
        self._gone: list[int] = []
        self._gone_rounds = self._alone = 0
        # Since these optimizers train together: steps of each of them, and those of the training.
        self._together: dict[int, int] = {}
        self._rounds = 0
        # Before that: the one that ended steps, and these steps; how many of the last ones are parts of one step.
        self._earlier = self._earlier_rounds = 0
        self._parts = 1
        # Steps without each of them, after one with it; whether each of their steps is one of the training, as of
        # optimizers that are chosen at random.
        self._missing: dict[int, int] = {}
        self._apart = False
        self._lengths: set[int] = set()  # of rows, see below
        # The first step of the one that ends them was not counted, but that of another one in its place.
        self._behind = False
        # Steps of each optimizer since the last end, and in the step before that.
        self._since: dict[int, int] = {}
        self._before: dict[int, int] = {}
        # The optimizer that stepped last, its steps in a row, the steps that these have ended, and whether the one
        # before it stepped in a row, too.
        self._last = self._row = self._row_ended = 0
        self._rows = self._turns = False
        self._turned = 0
        # Steps of all optimizers, and how many of them have ended a step; and before the present ones trained together.
        self._all = self._all_before = self._ended = self._ended_before = 0

    @property
    def only(self) -> int:
        """The id of the only optimizer; 0 where there are several."""
        return self._ender if len(self.counts) == 1 and not self._new else 0

    @property
    def batches(self) -> int:
        """Micro-steps of the step that ends, of several optimizers: each takes a batch for each of its own steps."""
        return 1 if self._turns else max(self._before.values(), default=1)

    @property
    def begun(self) -> int:
        """The same of the step that has not ended."""
        return max(self._since.values(), default=0)

    def stepped(self, key: int) -> tuple[int, int]:
        """An optimizer has stepped: (steps that end now: 0 or 1; what has to be added to those counted before)."""
        self._all += 1
        wrong = 0
        if key == self._last:
            self._row += 1
        else:
            self._rows = self._row >= TURN
            if self._turns and not self._rows:  # the last row was no turn, but part of a step
                self._turns, wrong = False, self._row - self._row_ended
            self._lengths.add(min(self._row, TURN))
            self._last, self._row, self._row_ended = key, 1, 0
        ended, missed = self._stepped(key)
        self._row_ended += ended + missed
        missed -= wrong
        self._ended += ended + missed
        if self._turns:
            ended, missed = 1, 0
        elif self._rows and self._row >= TURN:
            self._turns, self._turned = True, self._turned + 1
            self._apart |= self._turned >= TURN  # they do so irregularly
            missed += self._all - self._ended
        else:
            return ended, missed
        self._ended = self._all
        return ended, missed

    def _stepped(self, key: int) -> tuple[int, int]:
        counts = self.counts
        if not counts:
            self._ender = key
            counts[key] = self._together[key] = self._alone = self._rounds = 1
            return 1, 0
        missed = 0
        if key not in counts and key not in self._new:
            if key not in self._gone or self._alone > RARE:
                self._new.append(key)
                # Its only step before was part of the first one of those that seemed to have taken its place.
                return 0, -(key in self._gone and self._gone_rounds == 1)
            # It was not replaced: the others step several times for one step of this.
            missed -= self._alone
            several = self._alone > 1
            self._begin([*self._gone, *counts], self._gone[-1] if several else next(reversed(counts)))
        elif self._new and key in self._new:
            # It steps again, and none of the earlier ones did: it has taken their place.
            gone, new, told = list(counts), self._new, self._rounds
            self._begin(new, new[-1])
            self._gone, self._gone_rounds, self._alone, missed = gone, told, len(new) == 1, 1
            self._ended = self._all - 2  # whatever those before did is right
        elif self._new:
            earlier, told = self._ender, self._rounds + self._earlier_rounds
            self._begin([*counts, *self._new], self._new[-1])
            self._earlier, self._earlier_rounds = earlier, told
            self._behind = True
        counts = self.counts
        counts[key] += 1
        self._together[key] += 1
        if len(counts) == 1:
            self._alone += 1
            self._rounds += 1
            return 1, missed
        if self._apart:
            return 1, missed
        first = not self._since
        self._since[key] = self._since.get(key, 0) + 1
        if first or (self._since[key] > RARE and key != self._ender):
            missed += self._judge(key)
        if key != self._ender:
            return 0, missed
        self._rounds += 1
        if self._rounds <= RARE and self._earlier_rounds:
            # The last of the earlier steps were parts of the first one that these optimizers have ended together.
            parts = self._since.get(self._earlier, 0)
            if self._parts < parts <= self._earlier_rounds:
                missed -= parts - self._parts
                self._parts = parts
        for one in self._before:
            if one not in self._since:
                self._missing[one] = self._missing.get(one, 0) + 1
        self._before, self._since = self._since, {}
        if counts[key] >= MOST_COUNTED:
            self.counts = {one: count // 2 for one, count in counts.items()}
        others = [one for one in counts if one != key and one not in self._rare]
        if self._rounds >= MOST_COUNTED // 2 and others and len(self._lengths) == TURN:
            self._apart = all(5 * self._missing.get(one, 0) > self._rounds for one in others)
            if self._apart:
                missed = self._all - self._all_before - 1 - (self._ended - self._ended_before)
        return 1, missed

    def renew(self, key: int) -> int:
        """The optimizers so far do not exist any more, and this one trains. Returns the steps that were not counted."""
        missed = len(self._new) if self.counts else 0
        self._begin([key], key)
        self._ended = self._all
        return missed

    def finished(self) -> int:
        """The training has ended: steps that were not counted, since it did not show where they end."""
        others = {one: count for one, count in self._before.items() if one != self._ender}
        whole = bool(others) and all(self._since.get(one, 0) >= count for one, count in others.items())
        missed = len(self._new) + (whole and self._behind)
        self._new, self._since = [], {}
        return missed

    def _begin(self, keys: list[int], ender: int) -> None:
        """These optimizers train from now on."""
        self.counts, self._together = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)
        self._ender, self._rare = ender, set()
        self._all_before, self._ended_before = self._all - 1 - len(self._new), self._ended
        self._alone = self._rounds = self._gone_rounds = self._earlier = self._earlier_rounds = 0
        self._parts, self._missing, self._apart, self._lengths = 1, {}, False, set()
        self._new, self._gone, self._since, self._before = [], [], {}, {}
        self._behind = False

    def _judge(self, key: int) -> int:
        """See which optimizer ends steps. Returns how many steps were not counted, if it is another one from now on."""
        overdue = self._since[key] > RARE
        recent = self._since if overdue else {**self._before, **self._since}
        live = {one: count for one, count in self.counts.items() if one in recent}
        most = max(live.values())
        if most <= RARE:  # too few steps tell nothing about their frequency
            return 0
        often = {
            one: count
            for one, count in live.items()
            if (4 * count >= 3 * most if one in self._rare else (count + 1) * RARE >= most)
        }
        # In the middle of a step, equally frequent optimizers differ by one.
        rarest = [one for one, count in often.items() if count <= min(often.values()) + 1]
        if self._ender in rarest and not overdue:
            return 0
        ender, self._ender = self._ender, rarest[-1]
        self._rare.add(ender)
        self._rare.discard(self._ender)
        # All of its steps since they train together are steps of the training, but this one, which is counted apart.
        missed = max(self._together[self._ender] - (key == self._ender) - self._rounds, 0)
        self._rounds += missed
        missed += self._parts - 1
        self._parts, self._earlier = 1, 0
        return missed


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
        if new:
            # Passes may be shorter than what is between two looks at them.
            S[SEEDS_AT + S[SEEDS] % MOST_SEEDS] = whole(attribute(iterator, "_base_seed")) or 0
            S[SEEDS] += 1
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
