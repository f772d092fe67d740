"""Which code is the user's own, or a workload's, and where in it a thread is, or something is made."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from functools import lru_cache
from typing import Any, Callable

# Files of the folder of workloads, by the beginnings of their names, that only call the user's code.
_PLUMBING = ("base", "data_order", "factory_data", "own_module", "registry", "result", "training")
# Loaders and optimizers whose place is remembered.
MOST_PLACES = 64


def own(code: Any) -> bool:
    """Whether a code object is the user's own: not Python's, torch's, that of an installed package, or this program's.

    A built-in function is not.
    """
    if code is None or isinstance(code, str):
        return False
    return _own_file(code.co_filename)


@lru_cache(maxsize=4096)
def _own_file(name: str) -> bool:
    for folder in product():
        if name.startswith(folder):
            _, inside, file = name.partition(os.path.join(folder, "workloads", ""))
            return bool(inside) and not file.startswith(_PLUMBING)
    return not (name.startswith(_foreign()) or "site-packages" in name or "dist-packages" in name)


@lru_cache(maxsize=1)
def product() -> tuple[str, ...]:
    """Folders of this program's packages, with a separator at the end."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("ndd_engine", "ndd_console")]
    return tuple(
        os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in (__file__, *files) if file
    )


@lru_cache(maxsize=1)
def _foreign() -> tuple[str, ...]:
    """What files begin with that are Python's, torch's, or made by torch.compile."""
    paths = sysconfig.get_paths()
    folders = {
        paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts") if name in paths
    }
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folders |= {os.path.dirname(file) for file in (os.__file__, torch) if file}
    # A frame may name the target of a symbolic link.
    folders |= {os.path.realpath(folder) for folder in folders}
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(
        tempfile.gettempdir(), "torchinductor_"
    )
    return (*(os.path.join(folder, "") for folder in sorted(folders)), compiled, "<")


def short(file: str) -> str:
    """The path relative to the working directory if inside it, otherwise its last two parts."""
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # the folder was deleted
        here = os.sep
    return file[len(here) :] if file.startswith(here) else "/".join(file.split(os.sep)[-2:])


def own_frame(frame: Any, own: Callable[[Any], bool]) -> Any:
    """The innermost frame of the user's own code, from this one outwards; None if there is none."""
    while frame is not None and not own(frame.f_code):
        frame = frame.f_back
    return frame


class Places:
    """Where in a script its loaders and optimizers are made: the edit of a setting belongs there.

    own: whether a code object is the script's own.
    """

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
