"""What a training tells in passing of numbers that are not finite: skipped updates, losses, the scale of gradients.

A gradient scaler skips updates whose gradients are not finite, and halves its scale. At the start it does so until
the scale fits, and then about once in 2,000 steps. More than that is worth a closer look, see `origin`.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Callable

from .attributes import attribute
from .clock import S
from .looks import key_of
from .mapped import SKIPPED

# Updates that may be skipped before the first one: with them the scale falls from 65,536 to below 1.
SETTLING = 20
# Skipped updates in a row, or within so many steps, that are more than usual.
IN_A_ROW, MANY, WITHIN = 3, 5, 1000


class Finite:
    """Of the thread that trains; steps are numbers of steps done before.

    suspicious: called where more is skipped than usual, and for each loss that is not finite. loss: while losses are
    not finite, (value in words, the first step with it, and of the finite ones before: the step of the last one, its
    value, and the lowest value; or None). since: the first of the skipped updates in a row, None without one. first:
    the first skipped update that counts since this was set to None.
    """

    def __init__(self) -> None:
        self.suspicious: Callable[[], None] = lambda: None
        self.loss: tuple[str, int, int | None, float | None, float | None] | None = None
        self.since: int | None = None
        self.first: int | None = None
        self._last: tuple[int | None, float | None, float | None] = (None, None, None)
        self._settled, self._row = False, 0
        # Skipped updates and steps where they began to be counted as many.
        self._many = (0, 0)
        self._scaler: weakref.ref[Any] | None = None
        self._key = 0

    def updated(self, skipped: bool, done: int) -> None:
        """A gradient scaler has updated the parameters, or skipped that."""
        if not skipped:
            self._settled, self._row, self.since = True, 0, None
            return
        if not self._row:
            self.since = done
        self._row += 1
        if self._settled or self._row > SETTLING:
            S[SKIPPED] += 1
        elif self._row == SETTLING:
            S[SKIPPED] += SETTLING
        else:
            return
        if self.first is None:
            self.first = self.since
        count, begun = self._many
        if done - begun > WITHIN:
            self._many = count, begun = int(S[SKIPPED]) - 1, done
        if self._row >= IN_A_ROW or S[SKIPPED] - count >= MANY:
            self.suspicious()

    def read(self, done: int, value: float) -> bool:
        """Whether the loss of a step is finite."""
        if math.isfinite(value):
            lowest = self._last[2]
            self._last = done, value, value if lowest is None else min(lowest, value)
            self.loss = None
            return True
        first = done if self.loss is None else self.loss[1]
        self.loss = "NaN" if math.isnan(value) else "infinite", first, *self._last
        self.suspicious()
        return False

    @property
    def scales(self) -> bool:
        """Whether a gradient scaler was seen to multiply losses."""
        return self._scaler is not None

    def remember(self, scaler: Any) -> None:
        """This scaler multiplies the losses."""
        if self._key != key_of(scaler):
            self._key, self._scaler = key_of(scaler), weakref.ref(scaler)

    @property
    def scale(self) -> Any:
        """The tensor with the scale; None without one."""
        scaler = None if self._scaler is None else self._scaler()
        return None if scaler is None else attribute(scaler, "_scale")
