"""Where in the script loaders and optimizers are made: the edit of a setting belongs there."""

from __future__ import annotations

import contextlib
import sys
from functools import wraps
from typing import Any, Callable

from .own import own_frame

Function = Callable[..., Any]
# Loaders and optimizers whose place is remembered.
MOST_PLACES = 64


class Places:
    """own: whether a code object is the script's own."""

    def __init__(self, own: Callable[[Any], bool]) -> None:
        self._own = own
        # By id of an optimizer, and of the dataset of a loader: file and line.
        self._found: dict[int, tuple[str, int]] = {}

    def of(self, thing: object) -> tuple[str, int] | None:
        """File and line of an optimizer, or of the loader of a dataset; None if that is unknown."""
        return self._found.get(id(thing))

    def loader_made(self, original: Function) -> Function:
        """Hook of DataLoader.__init__."""

        @wraps(original)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            with contextlib.suppress(Exception):
                self._remember(loader.dataset, sys._getframe(1))

        return __init__

    def optimizer_made(self, original: Function, steps: Any) -> Function:
        """Hook of Optimizer.__init__. steps: see Steps."""

        @wraps(original)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            steps.has_optimizer = True
            original(optimizer, *args, **kwargs)
            with contextlib.suppress(Exception):
                self._remember(optimizer, sys._getframe(1))

        return __init__

    def loader_of(self, iterator: Any) -> tuple[dict[str, Any], tuple[str, int] | None]:
        """Settings of the loader that an iterator belongs to, and the place where it was made."""
        dataset = iterator._dataset
        sized = hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")
        return {
            "workers": iterator._num_workers, "pin_memory": bool(iterator._pin_memory),
            "prefetch": getattr(iterator, "_prefetch_factor", None) if iterator._num_workers else None,
            "persistent": bool(getattr(iterator, "_persistent_workers", False)),
            "batch_size": getattr(iterator._index_sampler, "batch_size", None),
            "items": len(dataset) if sized else None, "dataset": type(dataset).__name__,
        }, self.of(dataset)  # fmt: skip

    def _remember(self, thing: object, frame: Any) -> None:
        """frame: the innermost one of the call that made it."""
        frame = own_frame(frame, self._own)
        if frame is not None:
            self._found[id(thing)] = (frame.f_code.co_filename, frame.f_lineno)
            while len(self._found) > MOST_PLACES:
                del self._found[next(iter(self._found))]
