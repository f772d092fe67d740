"""Finds out whether a script keeps the autograd graphs of earlier steps, as `total += loss` does.

The graph of a step is freed when nothing of the step refers to it any more. A mark in the metadata of some of its nodes
is freed with it, so a mark that still exists tells that its graph does. Looking at a loss costs a few microseconds, and
keeps nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

_KEY = "ndd"
# Nodes of a loss that are marked: what is kept may be the loss before it was scaled, or the output of the model.
_DEPTH = 4
# Fewer marks are no evidence, and more are thinned out.
_FEW, _MOST = 8, 512
# Of the marks since the oldest one that exists, this part must exist.
_DENSE = 0.5


class _Mark:
    __slots__ = ("__weakref__",)


class KeptGraphs:
    """Marks the graphs of some steps, and tells from how many steps they still exist."""

    def __init__(self) -> None:
        # (number of the mark, step, mark), oldest first. Every `_stride`th loss is marked.
        self._marks: list[tuple[int, int, weakref.ref[_Mark]]] = []
        self._looked, self._stride = 0, 1

    def mark(self, loss: Any, step: int) -> None:
        """Mark the graph of a loss before its backward pass. loss: a plain tensor. step: its number."""
        self._looked += 1
        node = loss.grad_fn
        if node is None or self._looked % self._stride:
            return
        mark = _Mark()
        for _ in range(_DEPTH):
            node.metadata[_KEY] = mark
            # A parameter has its node for as long as any graph has it.
            node = next((one for one, _ in node.next_functions if one is not None), None)
            if node is None or type(node).__name__ == "AccumulateGrad":
                break
        self._marks.append((self._looked // self._stride, step, weakref.ref(mark)))
        if len(self._marks) > _MOST:
            self._clear()
            if len(self._marks) > _MOST // 2:
                self._marks = [(number // 2, step, mark) for number, step, mark in self._marks[::2]]
                self._stride *= 2

    def _clear(self) -> None:
        self._marks = [mark for mark in self._marks if mark[2]() is not None]

    def steps(self, step: int) -> int:
        """From how many steps before `step` on all graphs, or most of them, still exist; 0 if that is usual."""
        self._clear()
        if len(self._marks) < _FEW:
            return 0
        number, first, _ = self._marks[0]
        since = self._looked // self._stride - number + 1
        return step - first if len(self._marks) >= _DENSE * since else 0
