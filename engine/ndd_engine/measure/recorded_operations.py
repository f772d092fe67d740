"""Operators of a profiler recording as operations whose kernels can be estimated. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from ndd_engine.hardware.kernels import Kernels, Op, Shape, kernels_of

# Profilers name types as C++ does: bytes of an element, and the name in `Shape`.
_TYPES = {
    "float": (4, "fp32"), "c10::Half": (2, "fp16"), "c10::BFloat16": (2, "bf16"), "double": (8, "fp64"),
    "bool": (1, "bool"), "long int": (8, "other"), "long": (8, "other"), "int": (4, "other"), "short": (2, "other"),
    "unsigned char": (1, "other"), "signed char": (1, "other"),
}  # fmt: skip
_LISTS = ("TensorList", "GenericList")
# Operators whose kernels are launched by further ones inside: the outer one has the arguments.
_WHOLE = frozenset({
    "convolution", "convolution_backward", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
})  # fmt: skip
_SAME = {
    "cudnn_batch_norm": "native_batch_norm", "cudnn_batch_norm_backward": "native_batch_norm_backward",
    "miopen_batch_norm": "native_batch_norm", "miopen_batch_norm_backward": "native_batch_norm_backward",
}  # fmt: skip
# Whose arguments differ from those of operations that can be estimated.
_UNKNOWN = (
    "cudnn_",
    "_cudnn_",
    "miopen_",
    "mkldnn_",
    "thnn_",
    "_thnn_",
    "_flash_",
    "_efficient_",
    "_triton_",
)


def whole(name: str) -> bool:
    """Whether the kernels of all operators inside belong to this one."""
    return name.removeprefix("aten::") in _WHOLE


def recorded_kernels(name: str, given: Any, tf32: bool) -> list[Kernels]:
    """The kernels of an operator, by what the profiler says it was given; [] if they cannot be estimated.

    given: with the names of traces ("Input Dims", "Input type", "Concrete Inputs"), as a file may have them.
    """
    op = _operation(name, given)
    try:
        return [] if op is None else kernels_of(op, tf32)
    except (
        AttributeError,
        IndexError,
        TypeError,
        ValueError,
        ZeroDivisionError,
    ):  # other arguments than it has
        return []


def _operation(name: str, given: Any) -> Op | None:
    space, _, short = name.partition("::")
    short = _SAME.get(short, short)
    if space != "aten" or short.startswith(_UNKNOWN) or not isinstance(given, dict):
        return None
    lists = (given.get(key) for key in ("Input Dims", "Input type", "Concrete Inputs"))
    dims, types, values = ([*one] if isinstance(one, (list, tuple)) else [] for one in lists)
    if not dims or len(dims) != len(types):
        return None
    values += [""] * (len(dims) - len(values))
    # The elements of a list have no type of their own.
    common = next((str(kind) for kind in types if str(kind) in _TYPES), "float")
    args = tuple(
        _tensors(dim, common) if kind in _LISTS else _argument(dim, str(kind), value)
        for dim, kind, value in zip(dims, types, values, strict=False)
    )
    if not any(isinstance(arg, (Shape, tuple)) for arg in args):
        return None
    out = _convolved(args) if short == "convolution" else None
    return None if short == "convolution" and out is None else Op("", short, args, out)


def _argument(dim: Any, kind: str, value: Any) -> Any:
    if kind in _TYPES:
        return _shape(dim, kind)
    try:
        found = ast.literal_eval(str(value))
    except (ValueError, SyntaxError):
        return None
    return tuple(found) if isinstance(found, list) else found


def _tensors(dims: Any, kind: str) -> tuple[Shape, ...]:
    found = [_shape(dim, kind) for dim in dims] if isinstance(dims, (list, tuple)) else []
    return tuple(shape for shape in found if shape is not None)


def _shape(dim: Any, kind: str) -> Shape | None:
    if not isinstance(dim, (list, tuple)) or not all(type(one) is int and one >= 0 for one in dim):
        return None
    width, name = _TYPES[kind]
    return Shape(tuple(dim), width, name)


def _convolved(args: Sequence[Any]) -> tuple[int, ...] | None:
    """The dimensions of the result of aten::convolution; None if an argument is not known."""
    x, weight = args[:2]
    if not isinstance(x, Shape) or not isinstance(weight, Shape) or len(args) < 9:
        return None
    stride, padding, dilation, transposed, more, groups = args[3:9]
    lists = (stride, padding, dilation, more)
    if not all(isinstance(one, tuple) and one for one in lists) or not isinstance(groups, int):
        return None
    found = []
    for place, (length, kernel) in enumerate(zip(x.dims[2:], weight.dims[2:], strict=False)):
        step, around, apart, rest = (one[min(place, len(one) - 1)] for one in lists)
        reach = apart * (kernel - 1)
        found.append(
            (length - 1) * step - 2 * around + reach + rest + 1
            if transposed
            else (length + 2 * around - reach - 1) // step + 1
        )
    return (x.dims[0], weight.dims[1] * groups if transposed else weight.dims[0], *found)
