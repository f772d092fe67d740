"""Caches what a dataset's `__getitem__` returns, in a trial: what a script could do before training.

Only items that are the same whenever they are read can be cached. A few are read twice before training and again when
the trial asks whether the cache is in effect.
"""

from __future__ import annotations

import importlib
import random
import sys
import time
from typing import Any

from .switches import AtStart

# Items that are read twice, and seconds that reading all of them once may take.
CHECKED, MOST_S = 16, 30.0
# Datasets that are kept: a script may make a new one in every epoch.
MOST_KEPT = 4


class Cache(AtStart):
    """All items of a map-style dataset, read once before training, if they are the same when they are read twice."""

    def __init__(self, value: Any, observer: Any) -> None:
        super().__init__(value, observer)
        # id of a dataset -> (the dataset, its items); the dataset keeps its id taken.
        self._kept: dict[int, tuple[Any, list[Any]]] = {}
        self._refused = ""

    def switch(self, on: bool) -> None:
        kind: Any = importlib.import_module("torch.utils.data._utils.fetch")._MapDatasetFetcher
        original = kind.fetch
        change = self

        def fetched(fetcher: Any, index: Any) -> Any:
            items = change._items(fetcher.dataset) if fetcher.auto_collation else None
            if items is None:
                return original(fetcher, index)
            return fetcher.collate_fn([items[place] for place in index])

        kind.fetch = fetched

    def applied(self) -> tuple[str, bool | None, str]:
        if not self._refused and self._kept:
            for dataset, items in self._kept.values():
                self._check(dataset, items)
        if self._refused or not self._kept:
            return "false", False, self._refused or "the script reads no map-style dataset in batches"
        return "true", True, f"{sum(len(items) for _, items in self._kept.values())} items are cached"

    def _items(self, dataset: Any) -> list[Any] | None:
        """The items of a dataset; None if they are not cached."""
        if self._refused:
            return None
        known = self._kept.get(id(dataset))
        if known is None:
            if not self.torch.is_grad_enabled():
                return None  # of an evaluation
            known = dataset, self._read(dataset)
            if self._refused:
                return None
            self._kept[id(dataset)] = known
            while len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        return known[1]

    def _read(self, dataset: Any) -> list[Any]:
        """All items, unless they differ when they are read twice or take too long."""
        count = len(dataset)
        state = _random_state(self.torch)
        t = time.perf_counter()
        first = [dataset[place] for place in range(min(CHECKED, count))]
        each_s = (time.perf_counter() - t) / max(len(first), 1)
        if each_s * count > MOST_S:
            self._refused = (
                f"reading all {count} items once would take {each_s * count:.0f} s (at most {MOST_S:.0f})"
            )
        self._check(dataset, first)
        items = [] if self._refused else [*first, *(dataset[place] for place in range(len(first), count))]
        _set_random_state(self.torch, state)
        return items

    def _check(self, dataset: Any, items: list[Any]) -> None:
        """Whether items are still what the dataset returns."""
        for place in range(min(CHECKED, len(items))):
            if not same_item(self.torch, items[place], dataset[place]):
                self._refused = f"item {place} differs when it is read again"
                return


def same_item(torch: Any, one: Any, other: Any, unknown: bool = False) -> bool:
    """Whether two items are equal, NaN to itself. unknown: the answer for values that are neither numbers nor text."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.shape != other.shape or one.dtype is not other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict):
        keys = isinstance(other, dict) and one.keys() == other.keys()
        return keys and all(same_item(torch, one[key], other[key], unknown) for key in one)
    if isinstance(one, (list, tuple)):
        kind = type(one) is type(other) and len(one) == len(other)
        return kind and all(same_item(torch, a, b, unknown) for a, b in zip(one, other))
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, (str, bytes, int, float)):
        return bool(one == other or (one != one and other != other))
    return unknown or one is other


def _random_state(torch: Any) -> Any:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy is not None else None


def _set_random_state(torch: Any, state: Any) -> None:
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])
