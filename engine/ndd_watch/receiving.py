"""What the process that trains does with batches of loader workers: it waits for them, receives and pins them.

Where batches are taken in their order, one that is ready may wait behind an earlier one that is not. To receive a batch
is to read its message and to make tensors of the shared memory that it names. With pinned memory, another thread does
this and copies the batch. Own training uses this module, too.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Callable

from .apart import ours
from .clock import now
from .looks import attribute
from .probes import Probes, VariableHook


class Receiving:
    """Sums of the batches that were received, see `take`. due: whether this thread waits for a batch to train on."""

    def __init__(self, due: Callable[[], bool]) -> None:
        self._due = due
        # The thread that waits, since when, when a message began to be read, and whether another batch was ready.
        self._thread = self._since = self._arrived = 0
        self._ready = False
        # The thread that pins, when a message began to be read there, when pinning began, and calls within each other.
        self._pinner = self._pin_arrived = self._pin_begun = self._deep = 0
        self._batches = self._behind_ns = self._receive_ns = self._pin_ns = 0
        self._switches: list[Callable[[bool], None]] = []

    def install(self, probes: Probes) -> None:
        """Put the probes in place; a part is missing where the source of its function is another one.

        They rest where steps are timed as a whole, see `Probes.rest`.
        """
        from torch.utils.data import dataloader
        from torch.utils.data._utils import pin_memory

        connection: Any = sys.modules["multiprocessing.connection"]
        waits: Any = dataloader._MultiProcessingDataLoaderIter._get_data

        # A probe calls functions, but no methods, see `probes`.
        def due(_probe: Any, zero: int) -> int:
            return 1 if self._due() else zero

        def begins(_probe: Any, given: Any) -> int:
            self._begins(*given)
            return 0

        def hook(hears: Callable[[], None]) -> Callable[[Any, int], int]:
            def heard(_probe: Any, zero: int) -> int:
                hears()
                return zero

            return heard

        reads: Any = connection._ConnectionBase.recv_bytes
        pins: Any = pin_memory.pin_memory
        for function, first, last in (
            (waits, VariableHook(due, begins, ("self",)), hook(self._has)),
            (reads, hook(self._reads), None),
            (pins, hook(self._pins), hook(self._pinned)),
        ):
            if probes.put(function, first, last, False, "all"):
                self._switches.append(probes.switch(function))

    def take(self) -> dict[str, int]:
        """Sums since the last call: batches; behind_ns: waiting while another batch was ready; receive_ns, pin_ns."""
        found = {
            "batches": self._batches, "behind_ns": self._behind_ns, "receive_ns": self._receive_ns,
            "pin_ns": self._pin_ns,
        }  # fmt: skip
        self._batches = self._behind_ns = self._receive_ns = self._pin_ns = 0
        return found if found["batches"] else {}

    def _begins(self, iterator: Any) -> None:
        """The training waits for the next batch that arrives."""
        try:
            outstanding, known = (attribute(iterator, name) for name in ("_tasks_outstanding", "_task_info"))
            in_order = attribute(iterator, "_in_order") is not False  # before torch 2.6, always
            self._ready = (
                in_order and type(known) is dict and type(outstanding) is int and len(known) > outstanding
            )
            thread = attribute(iterator, "_pin_memory_thread")
            self._pinner = attribute(thread, "_ident") or 0 if thread is not None else 0
            self._arrived, self._thread, self._since = 0, get_ident(), now()
        except Exception as error:
            self._thread = 0
            if not ours(error):
                raise

    def _reads(self) -> None:
        """A message of another process has come."""
        if self._thread or self._pinner:
            me = get_ident()
            # Later ones belong to the batch: tensors come through connections of their own.
            if me == self._thread and not self._arrived:
                self._arrived = now()
            elif me == self._pinner and not self._pin_arrived:
                self._pin_arrived = now()

    def _has(self) -> None:
        """The training has received a batch."""
        if self._thread == get_ident():
            t, self._thread = now(), 0
            self._batches += 1
            if self._ready:
                self._behind_ns += (self._arrived or t) - self._since
            if self._arrived:
                self._receive_ns += t - self._arrived

    def _pins(self) -> None:
        """Something of a batch is about to be pinned, within the whole batch."""
        if self._pinner == get_ident():
            if not self._deep:
                self._pin_begun = now()
                if self._pin_arrived:
                    self._receive_ns += self._pin_begun - self._pin_arrived
            self._deep += 1

    def _pinned(self) -> None:
        if self._pinner == get_ident() and self._deep:
            self._deep -= 1
            if not self._deep:
                self._pin_ns += now() - self._pin_begun
                self._pin_arrived = 0

    def rest(self) -> None:
        """Take the probes out until steps are timed by phase: in a process that does not train, and in a child."""
        self._thread = self._pinner = 0
        self.take()
        for put in self._switches:
            put(False)
