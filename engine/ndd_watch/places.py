"""Where in the script loaders and optimizers are made: the edit of a setting belongs there."""

from __future__ import annotations

from typing import Any, Callable

from .own import own_frame

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

    def loader_of(self, iterator: Any) -> tuple[dict[str, Any], tuple[str, int] | None]:
        """Settings of the loader that an iterator belongs to, and the place where it was made."""
        dataset, sampler = iterator._dataset, iterator._index_sampler
        # Items of a dataset with an index, joined to batches, can be cached.
        joined = getattr(iterator, "_auto_collation", None) is True
        # A sampler of the script may compute it.
        ordinary = type(sampler).__module__ == "torch.utils.data.sampler"
        return {
            "workers": iterator._num_workers, "pin_memory": bool(iterator._pin_memory),
            "prefetch": getattr(iterator, "_prefetch_factor", None) if iterator._num_workers else None,
            "persistent": bool(getattr(iterator, "_persistent_workers", False)),
            "batch_size": getattr(sampler, "batch_size", None) if ordinary else None,
            "dataset": type(dataset).__name__,
            "by_item": joined and getattr(iterator, "_dataset_kind", None) == 0,
        }, self.of(dataset)  # fmt: skip

    def remember(self, thing: object, frame: Any) -> None:
        """An optimizer, or the dataset of a loader, is made. frame: of the call."""
        frame = own_frame(frame, self._own)
        if frame is not None:
            self._found[id(thing)] = (frame.f_code.co_filename, frame.f_lineno)
            while len(self._found) > MOST_PLACES:
                del self._found[next(iter(self._found))]
