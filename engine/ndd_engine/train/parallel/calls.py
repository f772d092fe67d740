"""Calls all ranks to vote soon, after the same step: to stop, to pause, or because one has found a loss of NaN.

The regular votes are rare, see `agreement`. A rank that cannot wait for the next one sets a key in the store of the
ranks. On each rank a thread waits for that key; until it is set, nothing is sent. Then each rank promises not to pass
the end of its present step, and tells rank 0 how many it has done. Rank 0 answers with the first step that none of them
has ended. Threads do this because a rank in the middle of a step waits for the others to take theirs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistStoreError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Fits into 31 bits of milliseconds. After so long without a call, only the regular votes are left.
PATIENCE = timedelta(days=20)
# How long rank 0 waits for the answers to a call, while the ranks wait between two steps.
ANSWER_S = 5.0
_NEVER = 0  # the step of a vote that does not take place
_CALL, _OVER = "call", "over"


class Calls:
    """The calls of all ranks. store: shared by them; this opens a connection of its own, since a wait occupies one.

    Where a rank does not answer or the store fails, nobody is called any more: requests wait for the regular votes.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        if not rank:
            store.set("calls", uuid4().hex)
        name = bytes(store.get("calls")).decode()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._store = PrefixStore(name, store)
        if isinstance(store, TCPStore):
            store = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
        self._listening = PrefixStore(name, store)
        self._begun = 0  # how often training has begun
        self._number = 0  # of the next call since then
        self._called = False
        # Optimizer steps done; the step whose end this rank promised to wait at; the step after which all ranks vote.
        self._step = 0
        self._promised: int | None = None
        self._at: int | None = None
        self._lock = threading.Lock()
        self._known, self._voted = threading.Event(), threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, step: int) -> None:
        """Training begins after so many steps."""
        self._begun, self._number = self._begun + 1, 0
        self._step, self._promised, self._at = step, None, None
        self._called = self._stopping = False
        self._known, self._voted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="ndd-calls", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Training has ended, and with it the calls of all ranks. Waits for a moment."""
        if self._thread is None:
            return
        self._stopping = True
        self._voted.set()
        self._set_first(_OVER)
        self._thread.join(1.0)

    def call(self) -> None:
        """Call all ranks to vote, unless this rank has done so."""
        if not self._called:
            self._called = True
            self._set_first(_CALL)

    def after_step(self, step: int) -> bool:
        """After each step: whether all ranks vote now."""
        with self._lock:
            self._step = step
            promised = self._promised
        if promised is None or step < promised:
            return False
        self._known.wait()
        if self._at is not None and step < self._at:
            return False
        now = self._at == step
        self._called = not now  # no other call after one in vain
        self._promised, self._at = None, None
        self._number += 1
        self._known.clear()
        self._voted.set()
        return now

    def _set_first(self, value: str) -> None:
        """What comes next, unless another rank was first."""
        with contextlib.suppress(Exception):  # the store is gone
            self._store.compare_set(self._name, "", value)

    @property
    def _name(self) -> str:
        """The key of the next call."""
        return f"{self._begun}/{self._number}"

    def _work(self) -> None:
        try:
            while self._heard(self._name) == _CALL:
                self._answer(self._number, self._name)
        except Exception:  # noqa: BLE001  the store is gone, and soon this rank
            self._known.set()

    def _answer(self, number: int, name: str) -> None:
        with self._lock:
            done = self._step
            self._promised = done + 1
        self._listening.set(f"{name}/{self._rank}", str(done))
        if not self._rank:
            self._listening.set(f"{name}/at", str(self._first_free(name)))
        self._at = int(self._heard(f"{name}/at"))
        self._known.set()
        self._voted.wait()
        self._voted.clear()
        if self._stopping:
            if self._number == number:  # the step of the vote was not reached
                self._number += 1
            self._set_first(_OVER)

    def _first_free(self, name: str) -> int:
        """The first step that no rank has ended; _NEVER if one does not answer."""
        deadline, every = time.monotonic() + ANSWER_S, []
        for key in (f"{name}/{rank}" for rank in range(self._size)):
            try:
                self._listening.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            except DistStoreError:
                return _NEVER
            every.append(int(self._listening.get(key)))
        return max(every) + 1

    def _heard(self, key: str) -> str:
        """The value of a key, when it has one."""
        self._listening.wait([key], PATIENCE)
        return bytes(self._listening.get(key)).decode()
