"""Walks over nested batches: tensors in tuples, named tuples, lists and dicts, at any depth.

torch.utils._pytree takes subclasses of dict, list and tuple that it does not know for leaves, so it is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in the tree that is not a tuple, list or dict."""
    if isinstance(tree, (list, tuple, dict)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(value)
    else:
        yield tree


def tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor in the tree, in order."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))


def same_constants(one: Any, other: Any) -> bool:
    """Whether two trees differ in the values of their tensors only: the same keys in the same order, places of tensors
    and other leaves. What cannot be compared is not the same."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor)
    if isinstance(one, dict) and isinstance(other, dict):
        same = len(one) == len(other) and all(map(_same, one, other))
        return same and all(map(same_constants, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same_constants, one, other))
    return _same(one, other)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and _equal(a, b))


def _equal(a: Any, b: Any) -> bool:
    try:
        found = a == b
        return bool(found.all()) if hasattr(found, "all") else bool(found)
    except Exception:  # noqa: BLE001  objects of the user may compare as they like
        return False


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with `change` applied to every tensor; other leaves are kept."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [map_tensors(value, change) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def expanded(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of `expand` do, so that it cannot be written to."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
