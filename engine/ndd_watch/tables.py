"""Embeddings whose gradient has a value for each row of a large table, although a step reads few of its rows.

Hears the calls of modules in a profiled step, see `Modules.watch`. A table counts only if the graph of the loss shows
that nothing else uses it: where it is also the weight of an output layer, all of its rows have a gradient.

The same look at the graph tells which backend computes attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from .attributes import attribute, class_name
from .clock import BASE, EVALUATE, S
from .looks import Looks, groups_of, key_of, modules_within

# Rows from which on a table is large, and how many rows there are for each one that a step reads.
LEAST_ROWS, TIMES_READ = 1000, 4
# Of the elements that the optimizers update, a table has at least this part.
LEAST_SHARE = 0.05
# Nodes of a graph that are visited, each for about 2 us; in a larger graph no table counts.
_VISITED = 10_000
# Nodes of fused attention, by a part of their name; the composite backend "math" has none.
_ATTENTION = {"FlashAttention": "flash", "EfficientAttention": "efficient", "CudnnAttention": "cudnn"}


@dataclass
class _Table:
    """Calls of an embedding so far and their indices. alone: whether a graph has shown that nothing else uses it."""

    module: weakref.ref[Any]
    calls: int = 0
    indices: int = 0
    alone: bool | None = None

    @property
    def weight(self) -> Any:
        """None if there is none, or no plain one."""
        module = self.module()
        return None if module is None else _weight(module)


class Tables:
    """devices: those of a DataParallel that was called, if there are several.

    attention: its backend, "" where a graph has no fused attention, None if no graph was looked at for it.
    """

    def __init__(self, torch: Any, looks: Looks, attends: bool = False) -> None:
        """attends: whether to look for attention."""
        self._looks, self._grad_enabled = looks, torch.is_grad_enabled
        self._kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
        self._threaded = torch.nn.DataParallel
        # By key of the weight; and the modules that were called outermost.
        self._tables: dict[int, _Table] = {}
        self._roots: dict[int, weakref.ref[Any]] = {}
        self.devices = 0
        self.attention: str | None = None
        self._attends = attends

    def enters(self, module: Any, depth: int, given: Any) -> None:
        """A module is called, so many calls deep, with these arguments."""
        if S[BASE] == EVALUATE:
            return
        if depth == 1:
            self._roots.setdefault(key_of(module), weakref.ref(module))
        kind = type(module)
        if issubclass(kind, self._threaded):
            devices = attribute(module, "device_ids")
            self.devices = max(self.devices, len(devices) if type(devices) is list else 0)
        elif issubclass(kind, self._kinds) and self._grad_enabled() and self._looks.allowed():
            self._reads(module, given)

    def leaves(self, depth: int) -> None:
        """A call ends that was so deep."""

    def _reads(self, module: Any, given: Any) -> None:
        weight = _weight(module)
        indices = self._looks.first_tensor(given)
        if attribute(module, "sparse") is not False or indices is None or not self._looks.is_tensor(weight):
            return
        shape = self._looks.shape(indices)
        if shape is None:
            return
        known = self._tables.setdefault(key_of(weight), _Table(weakref.ref(module)))
        known.calls += 1
        known.indices += prod(shape)

    def loss(self, loss: Any) -> None:
        """Follow the graph of a loss, before its backward pass, to what uses the tables. loss: a plain tensor."""
        users: dict[int, list[bool]] = {
            key: [] for key, table in self._tables.items() if self._shape(table)[0] >= LEAST_ROWS
        }
        node = loss.grad_fn
        if not (users or self._attends) or node is None:
            return
        if self._attends:
            self.attention = self.attention or ""
        seen, left = {node._sequence_nr()}, [node]
        while left and len(seen) <= _VISITED:
            node = left.pop()
            if self._attends and not self.attention:
                self.attention = _attention(class_name(type(node)))
                if self.attention and not users:
                    return
            for one, _ in node.next_functions:
                if one is None:
                    continue
                if class_name(type(one)) == "AccumulateGrad":
                    if (key := key_of(one.variable)) in users:
                        users[key].append(node.name().startswith("Embedding"))
                elif (number := one._sequence_nr()) not in seen:
                    seen.add(number)
                    left.append(one)
        for key, found in users.items():
            table = self._tables[key]
            if left or not all(found) or len(found) > table.calls:
                table.alone = False
            elif found and table.alone is None:
                table.alone = True

    def found(self, optimizers: Iterable[Any]) -> list[list[Any]]:
        """[name, class, rows, columns, indices, share, optimizer] of each such table, the largest share first.

        share: of the elements of all parameters that are updated.
        """
        tables = {key: table for key, table in self._tables.items() if table.alone}
        if not tables or not self._looks.allowed():
            return []
        elements: dict[int, int] = {}
        owners: dict[int, str] = {}
        for optimizer in optimizers:
            for group in groups_of(optimizer):
                for one in group["params"]:
                    if self._looks.is_tensor(one):
                        elements[key_of(one)] = prod(self._looks.shape(one) or (0,))
                        owners[key_of(one)] = class_name(type(optimizer))
        names = self._names()
        rows = []
        for key, table in tables.items():
            module, (count, width) = table.module(), self._shape(table)
            if module is None or not elements.get(key):
                continue
            share = elements[key] / sum(elements.values())
            if count >= max(LEAST_ROWS, TIMES_READ * table.indices) and share >= LEAST_SHARE:
                name = names.get(key_of(module), "")
                kind = class_name(type(module))
                rows.append([name, kind, count, width, table.indices, share, owners[key]])
        return sorted(rows, key=lambda row: -row[5])

    def _shape(self, table: _Table) -> tuple[int, int]:
        weight = table.weight
        shape = self._looks.shape(weight) if self._looks.is_tensor(weight) else None
        return (shape[0], shape[1]) if shape is not None and len(shape) == 2 else (0, 0)

    def _names(self) -> dict[int, str]:
        """By key of each module: the class of the model, and the attributes that lead to it."""
        found: dict[int, str] = {}
        for root in [one for one in (known() for known in self._roots.values()) if one is not None]:
            for name, module in modules_within(root):
                path = ".".join(part for part in (class_name(type(root)), name) if part)
                found.setdefault(key_of(module), path)
        return found


def _weight(module: Any) -> Any:
    parameters = attribute(module, "_parameters")
    return parameters.get("weight") if type(parameters) is dict else None


def _attention(name: str) -> str:
    """The backend of a node of fused attention; "" for any other node."""
    if not name.startswith("ScaledDotProduct"):
        return ""
    return next((backend for part, backend in _ATTENTION.items() if part in name), "")
