"""What a checkpoint may contain: finite parameters and buffers, and values that torch loads without running code."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ndd_engine.errors import shortened

from .checkpoint_tree import is_sharded, local

_PLAIN = (bool, float, str, type(None))
_DEEPEST = 100


def finite_buffers(model: nn.Module) -> frozenset[str]:
    """Names of the buffers that are finite now; others, such as a mask of -inf, need not stay finite."""
    return frozenset(name for name, buffer in model.named_buffers() if _is_finite(buffer))


def not_finite(model: nn.Module, buffers: frozenset[str]) -> str | None:
    """The name of the first parameter, or of a buffer in `buffers`, that contains NaN or infinity, or None.

    Of a sharded tensor, only the shard of this rank is examined.
    """
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return shortened(name, 100)
    for name, buffer in model.named_buffers():
        if name in buffers and not _is_finite(buffer):
            return shortened(name, 100)
    return None


def _is_finite(tensor: Tensor) -> bool:
    value = local(tensor.detach())
    if value.is_meta or value.is_quantized or not (value.is_floating_point() or value.is_complex()):
        return True
    if value.is_nested:
        return all(map(_is_finite, value.unbind()))
    if value.layout is not torch.strided:
        value = value._values() if value.layout is torch.sparse_coo else value.values()
    if value.itemsize == 1:
        value = value.float()  # 8-bit floats have no isfinite
    return bool(torch.isfinite(value).all())


def layout(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """The shape of every value of a model's state, by its name; None for what is no tensor."""
    return {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in state.items()}


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """How the layout of a model's state differs from the one that a resumed run would create; None if it does not."""
    for name in [*before, *now]:
        if before.get(name, "") != now.get(name, ""):
            how = "is new" if name not in before else "is gone" if name not in now else "has another shape"
            advice = "create it in __init__, with its final shape"
            return f"{shortened(name, 100)} {how} since training began, so a run could not resume: {advice}"
    return None


def unloadable(state: dict[str, Any]) -> str | None:
    """Why a checkpoint of this state could not be loaded again, with the name of the value; None if it could."""
    for path, what in _unloadable(state, "", 0):
        name = shortened(path.removeprefix("model."), 120)
        allowed = "tensors, numbers, strings, and lists, tuples, sets or dicts of them"
        return f"{name} {what}, which a checkpoint cannot contain; allowed: {allowed}"
    return None


def _unloadable(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    kind = type(value)
    if kind in _PLAIN or kind is Tensor or kind is nn.Parameter or (kind is int and abs(value) < 2**63):
        return
    if is_sharded(value):
        return  # is saved as a plain tensor
    if depth > _DEEPEST:
        yield path, f"is nested more than {_DEEPEST} levels deep"
    elif kind in (dict, OrderedDict):
        if vars_of := getattr(value, "__dict__", None):  # torch's version numbers of the modules
            yield from _unloadable(vars_of, path, depth + 1)
        for key, item in value.items():
            if isinstance(key, Tensor) or not _loads(key):
                yield path, f"has a key of the type {shortened(type(key).__name__, 80)}"
            yield from _unloadable(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif kind in (list, tuple, set):
        for item in value:
            yield from _unloadable(item, path, depth + 1)
    elif not _loads(value):
        yield path, f"contains a value of the type {shortened(kind.__name__, 80)}"


def _loads(value: Any) -> bool:
    if type(value) is str or (type(value) is int and abs(value) < 2**63):
        return True
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001  the user's own __reduce__ may raise anything
        return False
    return True
