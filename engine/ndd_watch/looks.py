"""Looks at what belongs to the script without running code of the script: only at objects of exactly known types.

A subclass of a tensor or a container may count its reads, raise, or compute. Where a dispatch or function mode of the
script is active, or torch traces, even an ordinary tensor does not stay unnoticed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, Callable

from .attributes import attribute, attributes

# Tells objects apart while they exist. Unlike `id`, Python does not report it to audit hooks, which would take about a
# microsecond in a step.
key_of: Callable[[Any], int] = object.__hash__
# Classes of NumPy whose values are numbers.
_SCALARS = (
    "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool_",
)  # fmt: skip
# Containers within containers that are looked into.
DEPTH = 3


class Looks:
    """torch: the module of the script. compiling: whether torch compiles at present."""

    def __init__(self, torch: Any) -> None:
        core = torch._C
        self.compiling: Callable[[], bool] = (
            getattr(torch.compiler, "is_dynamo_compiling", None) or torch._dynamo.is_compiling
        )
        # What torch's compiler knows of the function that it traces on this thread; None while it traces none. It
        # computes with constants of that function, and our probes are some.
        self._of_thread = torch._guards._TLS
        self.traced: Callable[[], Any] = partial(getattr, self._of_thread, "tracing_context", None)
        self.kinds = self._tensor, self._parameter = torch.Tensor, torch.nn.Parameter
        # Methods of tensors as C has them: a script may replace those of `torch.Tensor`, to find out who calls them.
        base = getattr(core, "TensorBase", torch.Tensor)
        self._item, self._numel, self._contiguous = base.item, base.numel, base.is_contiguous
        self._complex, self._floating = base.is_complex, base.is_floating_point
        self._strided = torch.strided
        self._tracing = core._get_tracing_state
        self._modes: Callable[[], int] = getattr(core, "_len_torch_dispatch_stack", lambda: 0)
        self._mode: Callable[[Any], Any] | None = getattr(core, "_get_dispatch_mode", None)
        self._keys = getattr(core, "_TorchDispatchModeKey", None)
        # In its body, neither classes nor modes of the script see functions of torch.
        self.silent: Callable[[], Any] = core.DisableTorchFunction

    def prepare(self) -> None:
        """Have `traced` find something on this thread: where it finds nothing, Python makes an exception first."""
        self._of_thread.tracing_context = self.traced()

    def faking(self) -> bool:
        """Whether tensors have no values at present, as in FakeTensorMode and while torch traces."""
        if self._tracing() is not None:
            return True
        mode, keys = self._mode, self._keys
        if mode is None or keys is None or not self._modes():
            return False
        return mode(keys.FAKE) is not None or mode(keys.PROXY) is not None

    def allowed(self) -> bool:
        """Whether tensors can be looked at."""
        return not self._modes() and self._tracing() is None

    def is_tensor(self, value: Any) -> bool:
        """Whether this is a tensor, and nothing that only behaves like one."""
        return type(value) is self._tensor or type(value) is self._parameter

    def tensors(self, value: Any, depth: int = DEPTH) -> Iterator[Any]:
        """The tensors in tuples, lists and dictionaries."""
        kind = type(value)
        if self.is_tensor(value):
            yield value
        elif depth and (kind is tuple or kind is list or kind is dict):
            for item in value.values() if kind is dict else value:
                yield from self.tensors(item, depth - 1)

    def first_tensor(self, value: Any, depth: int = DEPTH) -> Any:
        """The first of them; None without one."""
        return next(self.tensors(value, depth), None)

    def shape(self, tensor: Any) -> tuple[int, ...] | None:
        """The sizes of a tensor; None if they are no numbers, as of a nested or symbolic one."""
        with self.silent():
            if tensor.is_nested:
                return None
            sizes = tuple(tensor.shape)
        return sizes if all(type(size) is int for size in sizes) else None

    def fractions(self, tensor: Any) -> bool:
        """Whether the elements of a tensor are no whole numbers."""
        with self.silent():
            return bool(self._floating(tensor))

    def elements(self, tensor: Any) -> int:
        """The number of elements of a tensor."""
        with self.silent():
            return int(self._numel(tensor))

    def updated_elements(self, parameters: Iterable[Any]) -> int:
        """The number of elements of the parameters that have gradients."""
        with self.silent():
            return sum(int(self._numel(one)) for one in parameters if one.requires_grad)

    def changes(self, tensor: Any) -> int:
        """How often a tensor has been changed in place; 0 if that is not counted."""
        with self.silent():
            return 0 if tensor.is_inference() else int(tensor._version)

    def bytes_of(self, tensor: Any) -> int:
        """The bytes of the elements of a tensor; 0 if they cannot be counted."""
        with self.silent():
            plain = not tensor.is_nested and tensor.layout is self._strided
            return int(self._numel(tensor) * tensor.element_size()) if plain else 0

    def span(self, tensor: Any) -> tuple[int, int] | None:
        """(address, bytes) of the elements of a tensor on the CPU; None if it has no such."""
        size = self.bytes_of(tensor)
        with self.silent():
            if not size or tensor.device.type != "cpu" or not self._contiguous(tensor):
                return None
            # A storage may have been made smaller, or be gone.
            end = tensor.storage_offset() * tensor.element_size() + size
            return (int(tensor.data_ptr()), size) if end <= tensor.untyped_storage().nbytes() else None

    def whole_numbers(self, tensor: Any) -> bool:
        """Whether the elements of a tensor are whole numbers, such as tokens."""
        with self.silent():
            return not (self._floating(tensor) or self._complex(tensor))

    def device(self, tensor: Any) -> Any:
        """The device of a tensor."""
        with self.silent():
            return tensor.device

    def on_host(self, tensor: Any) -> float | None:
        """The value of a tensor with one element on the CPU; on a GPU, reading it would wait for the device."""
        with self.silent():
            if (
                tensor.device.type != "cpu"
                or tensor.is_nested
                or self._numel(tensor) != 1
                or self._complex(tensor)
            ):
                return None
            return float(self._item(tensor))

    def number_on_gpu(self, value: Any) -> bool:
        """Whether this is a plain tensor on a GPU with a single real value."""
        if not (self.is_tensor(value) and self.allowed()):
            return False
        with self.silent():
            plain = value.is_cuda and not value.is_nested
            return bool(plain and self._numel(value) == 1 and not self._complex(value))

    def copied(self, tensor: Any, found: Any) -> bool:
        """Whether a tensor was copied from the host to a device."""
        if not (self.is_tensor(found) and self.allowed()):
            return False
        with self.silent():
            return bool(tensor.device.type == "cpu" and found.device.type != "cpu")

    def number(self, value: Any) -> float | None:
        """A finite number, or the value of such a tensor; None for anything else."""
        found = self._number(value)
        return found if found is not None and math.isfinite(found) else None

    def _number(self, value: Any) -> float | None:
        kind = type(value)
        if self.is_tensor(value):
            return self.on_host(value) if self.allowed() else None
        return float(value) if kind is int or kind is float or kind is bool or scalar(kind) else None


def scalar(kind: type) -> bool:
    """Whether values of a class are numbers of NumPy, with an attribute `device` and operators as tensors have."""
    numpy = sys.modules.get("numpy")
    found = numpy.__dict__ if type(numpy) is ModuleType else {}
    return any(found.get(name) is kind for name in _SCALARS)


def whole(value: Any) -> int | None:
    """A whole number; None for anything else, and for a class of the script, which may compute it."""
    kind = type(value)
    return int(value) if kind is int or kind is bool or (scalar(kind) and value == int(value)) else None


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer that are as torch makes them, with a list of parameters."""
    found = attributes(optimizer)
    groups = found.get("param_groups") if type(found) is dict else None
    return [group for group in groups if _plain(group)] if type(groups) is list else []


def _plain(group: Any) -> bool:
    return type(group) is dict and type(group.get("params")) is list


def modules_within(root: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of a module and those in it, each once, in their order. The name of the first one is ""."""
    seen: set[int] = set()
    todo = [("", root)]
    while todo:
        name, module = todo.pop()
        if module is None or key_of(module) in seen:
            continue
        seen.add(key_of(module))
        yield name, module
        inner = attribute(module, "_modules")
        if type(inner) is dict:
            todo += [(f"{name}.{key}" if name else str(key), one) for key, one in reversed(inner.items())]
