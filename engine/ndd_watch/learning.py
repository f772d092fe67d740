"""Learns from a single step where its batches come from: which function returned the first tensor of the model's input.

Every call is heard in that step, by Python's own events (3.12 and later) or by a profile function, and only there. It
keeps nothing of the script's: tensors are remembered weakly. Another profiler always has precedence.
"""

from __future__ import annotations

import weakref
from typing import Any

from .clock import now
from .exceptions import Dropped, ours
from .listening import LONGER, SPARE_NS, Listening
from .looks import Looks


class Learning:
    """source: code of the function, and its globals by `names`; None before it is known."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self.source: Any = None
        self.names: dict[str, Any] = {}
        self.reported: set[Any] = set()
        self._loop: Any = None
        self._until = 0
        self._returned: dict[int, tuple[weakref.ref[Any], Any, dict[str, Any]]] = {}
        self._listening = Listening(self._returns)

    def listen(self, loop: Any, usual_ns: int) -> bool:
        """Learn until `deaf`, or for much longer than a step usually takes: the training may be over.

        loop: code of the function with the training loop. False under another profiler.
        """
        self._loop, self._returned = loop, {}
        self._until = now() + LONGER * usual_ns + SPARE_NS
        return self._listening.begin()

    def deaf(self) -> None:
        """End `listen`."""
        self._listening.end()
        self._returned = {}

    def received(self, tensor: Any) -> None:
        """A model receives this tensor first."""
        found = self._returned.get(id(tensor))
        if self.source is None and found is not None and found[0]() is tensor:
            self.source, self.names = found[1:]

    def _returns(self, frame: Any, value: Any) -> None:
        """A function returns this value."""
        try:
            if now() > self._until:
                self.deaf()
                return
            if value is None or frame.f_back is None or frame.f_back.f_code is not self._loop:
                return
            if not self._looks.allowed():
                return
            for tensor in self._looks.tensors(value):
                known = self._returned.get(id(tensor))
                if known is None or known[0]() is not tensor:
                    # Its first returner made it; later ones pass it on.
                    self._returned[id(tensor)] = weakref.ref(tensor), frame.f_code, frame.f_globals
        except Exception as error:
            with Dropped():
                self.deaf()
            if not ours(error):
                raise
