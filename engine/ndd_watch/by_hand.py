"""Training without an optimizer and without `backward`: gradients of `torch.autograd.grad`, and updates by hand.

A call is a backward pass of a training if the tensors that it differentiates by have been changed in place since an
earlier call. Those of an attack or a saliency map are new each time, and beside a penalty there is an optimizer.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Callable

from .clock import BACKWARD, CURRENT, OTHER, TIMED, S, enter
from .looks import Looks, key_of
from .mapped import OPEN
from .own import own_frame
from .probes import Look
from .steps import Steps

# Tensors that are remembered.
MOST_KNOWN = 64


class ByHand:
    """The hooks of `torch.autograd.grad`.

    own: whether a code object is the script's own. begins: begins the training on this thread; whether it is timed.
    loss: called with the outputs, whether their graph is retained, and whether one is made, of a call that is timed.
    """

    def __init__(
        self,
        steps: Steps,
        looks: Looks,
        own: Callable[[Any], bool],
        begins: Callable[[], bool],
        loss: Callable[[Any, Any, Any], None],
    ) -> None:
        self._steps, self._looks, self._own, self._begins, self._loss = steps, looks, own, begins, loss
        # First tensor of a call -> how often it had been changed in place; and the one whose calls end steps.
        self._changes: dict[int, int] = {}
        self._ender = 0
        self._timed = False

    def hooks(self) -> tuple[Look, Look]:
        """What begins and what ends."""
        steps, looks = self._steps, self._looks

        def due(_probe: Any, zero: int) -> int:
            if looks.traced():
                return zero
            if S[TIMED] == get_ident():
                steps.retained.end()
            return zero if steps.has_optimizer() else 1

        def begun(_probe: Any, given: Any) -> int:
            try:
                self._timed = S[TIMED] == get_ident() and S[CURRENT] == OTHER
                if self._timed:
                    self._loss(*given)
                    steps.phases.append(OTHER)
                    enter(BACKWARD)
            except Exception as error:  # noqa: BLE001
                steps.missed(error)
            return 0

        def ended(_probe: Any, given: Any) -> int:
            try:
                if self._timed:
                    self._timed = False
                    if steps.phases:
                        enter(steps.phases.pop())
                if looks.allowed():
                    self._ended(given[0])
            except Exception as error:  # noqa: BLE001
                steps.failed(error)
            return 0

        names = "outputs", "retain_graph", "create_graph"
        return Look(due, begun, names), Look(due, ended, ("t_inputs",))

    def _ended(self, inputs: Any) -> None:
        """The gradients by these tensors are there."""
        steps, first = self._steps, self._looks.first_tensor(inputs, 1)
        if first is None:
            return
        key, changes, before = key_of(first), self._looks.changes(first), self._changes.get(key_of(first))
        if len(self._changes) < MOST_KNOWN or before is not None:
            self._changes[key] = changes
        if before is None or changes <= before:
            return
        earlier = not self._ender
        if earlier:
            self._ender = key
        if S[TIMED] != get_ident() and not self._begins():
            return
        steps.backwards += 1
        S[OPEN] = steps.backwards
        if steps.caller is None:
            found = own_frame(sys._getframe(2), self._own)
            steps.caller = found.f_code if found is not None else None
        if key == self._ender and not steps.ends_known:
            steps.ended_backward(earlier)
