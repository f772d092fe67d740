"""Finds out whether a script keeps the autograd graphs of earlier steps, as `total += loss` does.

The graph of a step is freed when nothing of the step refers to it any more. A mark in the metadata of some of its nodes
is freed with it, so a mark that still exists tells that its graph does. Looking at a loss costs a few microseconds, and
keeps nothing.

Where a state is carried from step to step, the graph of a loss contains those of earlier steps, and each backward pass
takes longer. Nodes are numbered in the order in which they were made, so that a node with a number below that of an
earlier loss is of an earlier step.
"""

from __future__ import annotations

import heapq
import weakref
from typing import Any

_KEY = "ndd"
# Nodes of a loss that are marked: what is kept may be the loss before it was scaled, or the output of the model.
_DEPTH = 4
# Fewer marks are no evidence, and more are thinned out.
_FEW, _MOST = 8, 512
# Of the marks since the oldest one that exists, this part must exist.
_DENSE = 0.5
# Nodes of a graph that are visited, each for about 2 us; and losses whose numbers are remembered.
_VISITED, _NUMBERS = 1000, 64
# Steps in a row that are looked at where graphs are retained, the visited nodes of each graph, and attempts at most.
RETAINED_STEPS, _RETAINED_VISITED, _ATTEMPTS = 8, 10_000, 3


class _Mark:
    __slots__ = ("__weakref__",)


class KeptGraphs:
    """Marks the graphs of some steps, and tells from how many steps they still exist.

    wanted: how far back the next graph reaches is to be found out; reached: so many steps at least.
    """

    def __init__(self) -> None:
        # (number of the mark, step, mark), oldest first. Every `_stride`th loss is marked.
        self._marks: list[tuple[int, int, weakref.ref[_Mark]]] = []
        self._looked, self._stride = 0, 1
        # (step, number of the first node) of some losses, oldest first; and every how many of them are remembered.
        self._numbers: list[tuple[int, int]] = []
        self._apart = 1
        self.wanted, self.reached = False, 0

    def mark(self, loss: Any, step: int) -> None:
        """Mark the graph of a loss before its backward pass. loss: a plain tensor. step: its number."""
        self._looked += 1
        node = loss.grad_fn
        if self.wanted:
            self.wanted, self.reached = False, 0 if node is None else self._reach(node, step)
        if node is not None and not self._looked % self._apart:
            self._remember(step, node._sequence_nr())
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

    def _remember(self, step: int, number: int) -> None:
        self._numbers.append((step, number))
        if len(self._numbers) > _NUMBERS:
            self._numbers = self._numbers[::2]
            self._apart *= 2

    def _reach(self, node: Any, step: int) -> int:
        """How many steps back the graph of a loss reaches at least; 0 if that is usual. node: its first one."""
        newest = node._sequence_nr()
        seen, left = {newest}, [(newest, 0, node)]
        for visited in range(1, _VISITED):
            # The oldest node first: that leads straight back.
            oldest, _, node = heapq.heappop(left)
            for place, (one, _) in enumerate(node.next_functions):
                # Nodes of parameters have the highest number, and lead nowhere.
                if one is not None and (number := one._sequence_nr()) < newest and number not in seen:
                    seen.add(number)
                    heapq.heappush(left, (number, visited * _VISITED + place, one))
            if not left:
                break
        oldest = min(seen)
        return next((step - then for then, number in self._numbers if number >= oldest), 0)

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


class Retained:
    """Finds out whether a script passes `retain_graph=True` although no backward pass goes through a graph again.

    Looks at all backward passes of some steps in a row. active: these are looked at now. where: (file, line) that
    passes it without need, once that is known.
    """

    def __init__(self) -> None:
        self.active = False
        self.where: tuple[str, int] | None = None
        self._attempts = self._steps = 0
        self._line: tuple[str, int] | None = None
        # Number of the first node of the last graph: 0 before any.
        self._newest = 0

    def begin(self) -> None:
        """The next step is the first one."""
        if self.where is None and self._attempts < _ATTEMPTS:
            self.active, self._line, self._newest, self._steps = True, None, 0, 0

    def end(self) -> None:
        """What is known does not suffice, or a graph is needed again. Safe to call twice."""
        self.active = False

    def hear(self, loss: Any, retains: bool, line: tuple[str, int] | None) -> None:
        """A backward pass begins. loss: a plain tensor. retains: whether its graph stays, and gradients have none."""
        node = loss.grad_fn
        if not retains or line is None or node is None or self._oldest(node) <= self._newest:
            self.end()
            return
        self._line, self._newest = line, node._sequence_nr()

    def step_ended(self) -> bool:
        """A step has ended; whether the next one is to be looked at as well."""
        if not self.active:
            return False
        self._steps += 1
        if self._line is None:  # it had no backward pass
            self.end()
        elif self._steps == 1:
            self._attempts += 1
        elif self._steps > RETAINED_STEPS:
            self.where, self.active = self._line, False
        return self.active

    @staticmethod
    def _oldest(node: Any) -> int:
        """The lowest number of the nodes of a graph; 0 if it is too large to tell."""
        newest = node._sequence_nr()
        seen, left = {newest}, [node]
        while left:
            for one, _ in left.pop().next_functions:
                # As above.
                if one is not None and (number := one._sequence_nr()) < newest and number not in seen:
                    seen.add(number)
                    left.append(one)
            if len(seen) > _RETAINED_VISITED:
                return 0
        return int(min(seen))
