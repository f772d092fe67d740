"""Separates the tensors of a checkpoint's state from the rest, and puts them back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The keys and indices that lead to a value: ("model", "head.weight"), ("optimizer", "state", 3, "exp_avg").
Path = tuple[Any, ...]
# A tensor that a saved one, of this path and size, is placed like; None for a whole tensor on the CPU.
Like = Callable[[Path, torch.Size], Tensor | None]


class Place(NamedTuple):
    """Where a tensor belongs. stride: None for a contiguous tensor, and for the shard of one."""

    path: Path
    name: str
    stride: tuple[int, ...] | None


def split(state: Mapping[str, Any]) -> tuple[Any, list[Place], dict[str, Tensor]]:
    """The state with None in the place of its tensors, their places, and the tensors by name.

    Scalars and what is not a plain dense tensor (sparse, quantized, parameters) stay in the state. A DTensor is a
    tensor like others. Names are paths joined by dots, made unique; equal states have equal names on all ranks.
    """
    places: list[Place] = []
    tensors: dict[str, Tensor] = {}

    def tensor(value: Any, path: Path) -> Any:
        if not _is_array(value):
            return value
        name = ".".join(map(str, path))
        while name in tensors:
            name += "'"
        places.append(Place(path, name, _stride(value)))
        tensors[name] = value.detach()
        return None

    return mapped(state, tensor), places, tensors


def mapped(value: Any, change: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """A copy of nested dicts, lists and tuples with `change(leaf, path)` for every other value."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        copy = kind((key, mapped(item, change, (*path, key))) for key, item in value.items())
        if attributes := getattr(value, "__dict__", None):  # torch's version numbers of the modules
            copy.__dict__.update(attributes)
        return copy
    if kind in (list, tuple):
        return kind(mapped(item, change, (*path, index)) for index, item in enumerate(value))
    return change(value, path)


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """name -> earlier name of the same memory: tied weights, which are written once and stay tied."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, value in tensors.items():
        own = local(value)
        place = (own.data_ptr(), own.device, own.dtype, tuple(own.shape), own.stride(), tuple(value.shape))
        if own.numel() and first.setdefault(place, name) != name:
            found[name] = first[place]
    return found


def local(value: Tensor) -> Tensor:
    """The shard of a DTensor in this process; any other tensor as it is."""
    return value.to_local() if is_sharded(value) else value  # type: ignore[attr-defined]


def is_sharded(value: Any) -> bool:
    """Whether it is a DTensor. Never imports torch.distributed.tensor, which takes time."""
    return hasattr(value, "to_local") and hasattr(value, "device_mesh")


def top_level(places: Collection[Place], only: Collection[str] | None) -> list[Place]:
    """The places under these keys of the state; all for None."""
    return [place for place in places if only is None or place.path[0] in only]


def _is_array(value: Any) -> bool:
    if is_sharded(value):
        return True
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.ndim > 0
        and value.numel() > 0
        and not (value.is_quantized or value.is_nested or value.is_meta or value.requires_grad)
    )


def _stride(value: Tensor) -> tuple[int, ...] | None:
    """The strides of a dense tensor of another memory format, such as channels_last."""
    if is_sharded(value) or value.is_contiguous():
        return None
    stride = torch.empty_like(value, device="meta").stride()
    return stride if stride == value.stride() else None
