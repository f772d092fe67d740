"""Counts what can grow while a model trains, so that each step takes longer than the one before.

It looks in steps that are profiled, and only at objects of exactly known types, see `looks`. It keeps nothing.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

from .attributes import attribute, attributes, class_name
from .denormals import denormals
from .looks import Looks, groups_of, key_of
from .process import moved

# Modules of a model that are looked at, and names that are told, those with the highest counts.
MOST_MODULES, MOST_TOLD = 4096, 12
# Bytes that are told: reading what was moved takes some as well.
LEAST_MOVED = 4096
_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_DICTS = (dict, OrderedDict, defaultdict)


class Sizes:
    """Counts by kind and name: "hooks:block.3", "parameters:SGD", "state:SGD", "handlers:root", "graph:" (steps back).

    "read:" and "written:" are the bytes that the process has moved through files and pipes since this was made.
    """

    def __init__(self, looks: Looks) -> None:
        self._looks, self._moved = looks, moved()
        self._counts: dict[str, int] = {}
        self._seen: set[int] = set()
        # See `denormals`.
        self.denormals: dict[str, tuple[float, float]] = {}

    def model(self, module: Any) -> None:
        """Count the hooks of a model and of all modules in it."""
        if key_of(module) in self._seen or not self._looks.allowed():
            return
        with self._looks.silent():
            self._model(module)

    def _model(self, module: Any) -> None:
        left: list[tuple[str, Any]] = [("", module)]
        while left and len(self._seen) < MOST_MODULES:
            path, one = left.pop()
            if key_of(one) in self._seen:
                continue
            self._seen.add(key_of(one))
            found = attributes(one) or {}
            name = path or type(module).__name__
            for kind in _OF_MODULES:
                self._add("hooks", name, found.get(kind))
            for own, parameter in _items(found.get("_parameters")):
                if self._looks.is_tensor(parameter):
                    for kind in _OF_TENSORS:
                        self._add("hooks", f"{path}.{own}".lstrip("."), getattr(parameter, kind, None))
            children = _items(found.get("_modules"))
            left += [(f"{path}.{own}".lstrip("."), child) for own, child in children if child is not None]

    def optimizers(self, optimizers: Iterable[Any]) -> None:
        """Count the parameters of optimizers, each as often as it is in one, their state and their denormal numbers."""
        found = list(optimizers)
        self.denormals = denormals(self._looks, found)
        for one in found:
            count = sum(len(group["params"]) for group in groups_of(one))
            self._count("parameters", class_name(type(one)), count)
            self._count("state", class_name(type(one)), _entries(attribute(one, "state")))

    def handlers(self) -> None:
        """Count the handlers of loggers, each of which writes every message."""
        logging: Any = sys.modules.get("logging")
        known = getattr(getattr(logging, "Logger", None), "manager", None)
        if known is None:
            return
        for name, logger in [("root", logging.root), *_items(known.__dict__.get("loggerDict"))]:
            handlers = getattr(logger, "__dict__", {}).get("handlers")
            if type(handlers) is list and len(handlers) > 1:
                self._count("handlers", str(name), len(handlers))

    def graph(self, steps: int) -> None:
        """The graph of the loss reaches back so many steps."""
        self._count("graph", "", steps)

    def most(self, kind: str) -> int:
        """The highest count of a kind."""
        return max((count for key, count in self._counts.items() if key.startswith(f"{kind}:")), default=0)

    def counts(self) -> dict[str, int]:
        """The highest counts."""
        most = sorted(self._counts.items(), key=lambda item: -item[1])[:MOST_TOLD]
        before, now = self._moved, moved()
        if before is not None and now is not None:
            most += [
                (name, b - a)
                for name, a, b in zip(("read:", "written:"), before, now)
                if b - a >= LEAST_MOVED
            ]
        return dict(most)

    def _add(self, kind: str, name: str, held: Any) -> None:
        if type(held) in _DICTS:
            self._count(kind, name, len(held))

    def _count(self, kind: str, name: str, count: int) -> None:
        if count:
            key = f"{kind}:{name}"
            self._counts[key] = self._counts.get(key, 0) + count


def _entries(state: Any) -> int:
    """The entries of an optimizer's state, with those of lists in it, such as a history of gradients."""
    if not issubclass(type(state), dict):
        return 0
    count: int = dict.__len__(state)
    for values in list(dict.values(state)):
        if type(values) is dict:
            count += len(values) + sum(
                len(one) for one in list(values.values()) if type(one) in (list, deque)
            )
    return count


def _items(held: Any) -> list[tuple[Any, Any]]:
    return list(held.items()) if type(held) in _DICTS else []
