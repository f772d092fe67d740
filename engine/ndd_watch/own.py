"""Which code is the user's own, or a workload's, and where in it a thread is, or something is made."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from functools import lru_cache
from types import FunctionType, GeneratorType
from typing import Any, Callable

from .attributes import attribute, augments, bases, class_name, namespace, python_objects
from .library import module_of
from .looks import whole

# Files of the folder of workloads, by the beginnings of their names, that only call the user's code.
_PLUMBING = ("base", "factory_data", "own_module", "registry", "result")
_SAMPLERS, _OF_TORCH = "torch.utils.data.sampler", "torch.utils.data."
# Loaders and optimizers whose place is remembered.
MOST_PLACES = 64


def own(code: Any) -> bool:
    """Whether a code object is the user's own: not Python's, torch's, that of an installed package, or this program's.

    A built-in function is not.
    """
    if code is None or isinstance(code, str):
        return False
    return user_file(code.co_filename)


@lru_cache(maxsize=4096)
def user_file(name: str) -> bool:
    """Whether a file is the user's own."""
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
        workers = whole(iterator._num_workers) or 0
        # Items of a dataset with an index, joined to batches, can be cached.
        joined = getattr(iterator, "_auto_collation", None) is True
        # A sampler of the script may compute it.
        ordinary = module_of(type(sampler)) == _SAMPLERS
        known = ordinary and module_of(type(getattr(sampler, "sampler", sampler))).startswith(_OF_TORCH)
        return {
            "workers": workers, "pin_memory": bool(iterator._pin_memory),
            "prefetch": whole(getattr(iterator, "_prefetch_factor", None)) if workers else None,
            "persistent": bool(getattr(iterator, "_persistent_workers", False)),
            "in_order": getattr(iterator, "_in_order", None) if workers else None,
            "fetch": "item" if joined and _is_tensors(iterator) else None,
            "batch_size": whole(getattr(sampler, "batch_size", None)) if ordinary else None,
            "drop_last": getattr(sampler, "drop_last", None) is True if ordinary else None,
            "dataset": class_name(type(dataset)), "items": _items_of(iterator),
            "uneven": joined and not (known and getattr(iterator, "_dataset_kind", None) == 0),
            "sampler": class_name(type(getattr(sampler, "sampler", sampler) if ordinary else sampler)),
            "augments": augments(dataset),
            "reads": self._method_of(dataset, "__getitem__" if iterator._dataset_kind == 0 else "__iter__"),
            "by_item": joined and getattr(iterator, "_dataset_kind", None) == 0,
            "objects": python_objects(dataset) if workers else None,
        }, self.of(dataset)  # fmt: skip

    def _method_of(self, dataset: Any, name: str) -> tuple[str, int, str] | None:
        """File, line and name of a method of the script's own; None for one of a library."""
        for kind in bases(type(dataset)):
            if name in namespace(kind):
                method = namespace(kind)[name]
                code = method.__code__ if type(method) is FunctionType else None
                if code is None or not self._own(code):
                    return None
                return code.co_filename, code.co_firstlineno, f"{class_name(kind)}.{name}"
        return None

    def remember(self, thing: object, frame: Any) -> None:
        """An optimizer, or the dataset of a loader, is made. frame: of the call."""
        frame = own_frame(frame, self._own)
        if frame is not None:
            self._found[id(thing)] = (frame.f_code.co_filename, frame.f_lineno)
            while len(self._found) > MOST_PLACES:
                del self._found[next(iter(self._found))]


def _is_tensors(iterator: Any) -> bool:
    """Whether an iterator takes single items of tensors that could be indexed in whole batches."""
    data, dataset = sys.modules["torch.utils.data"], iterator._dataset
    if type(dataset) is data.Subset:
        dataset = dataset.dataset
    return type(dataset) is data.TensorDataset and iterator._collate_fn is data.default_collate


def _items_of(iterator: Any) -> int | None:
    """The length of the dataset that an iterator reads, as a sampler of torch has asked for it; None if unknown.

    The samplers' generators have it among their variables: asking the dataset would run code of the script.
    """
    given = attribute(iterator, "_sampler_iter")
    batches = given.gi_frame if type(given) is GeneratorType else None
    if module_of(type(iterator._index_sampler)) != _SAMPLERS or batches is None:
        return None
    items = batches.f_locals.get("sampler_iter")
    if type(items) is type(iter([])):  # what a sampler of several ranks gives
        return len(items.__reduce__()[1][0]) or None  # that of an iterator at its end is empty
    if type(items) is type(iter(range(0))):
        of: Any = items.__reduce__()[1][0]
        return int(of.stop)  # some Pythons leave out what was given
    frame = items.gi_frame if type(items) is GeneratorType else None
    if frame is not None and frame.f_globals.get("__name__") == _SAMPLERS:
        found = frame.f_locals.get("n")
        return found if type(found) is int else None
    return None
