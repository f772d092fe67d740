"""Times reads of tensors on a GPU, which wait for it, in a profiled step: `loss.item()`, `if loss:`, `x.to("cpu")`.

No profiler sees all of them. Python calls `__float__` and other methods of operators from C, and a call of `to` does
not tell where the copy goes. The function with the training loop has been called before the step begins. So for that
one step, the class torch.Tensor gets functions of these names, which call the methods.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Callable

from .clock import now
from .library import module_of

# Methods, and what they are called in a report. torch warns once where a tensor with a gradient becomes a number.
_NUMBERS = {"__float__": "float", "__int__": "int", "__bool__": "bool", "item": "item", "tolist": "tolist"}
# Functions of torch that read values, and what they are called.
_READERS = {"__format__": "format", "__repr__": "repr", "__contains__": "in"}
_NAMES = {**_NUMBERS, "cpu": "cpu", "nonzero": "nonzero", "numpy": "numpy", "to": "to"}


class Blocking:
    """spent: calls and nanoseconds by (code that calls, its line, name)."""

    def __init__(self) -> None:
        self.spent: dict[tuple[Any, int, str], list[int]] = {}
        # By name: our function, and one in the class that was there before.
        self._put: dict[str, tuple[Any, Any]] = {}
        self._kind: Any = None

    def begin(self) -> None:
        """Begin on this thread, if torch uses a GPU in this process."""
        self.spent = {}
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        if overridden(torch) or watched(torch._C):
            return
        self._kind = torch.Tensor
        for name in _NAMES:
            before = self._kind.__dict__.get(name)
            function = self._timed(torch, name, getattr(self._kind, name))
            setattr(self._kind, name, function)
            self._put[name] = function, before

    def end(self) -> None:
        """End; safe to call twice."""
        while self._put:
            name, (function, before) = self._put.popitem()
            if self._kind.__dict__.get(name) is not function:
                continue  # somebody has put another one in its place
            if before is None:
                delattr(self._kind, name)
            else:
                setattr(self._kind, name, before)

    def _timed(self, torch: Any, name: str, method: Callable[..., Any]) -> Any:
        kinds, detach = (torch.Tensor, torch.nn.Parameter), torch.Tensor.detach
        modes, thread, spent, told = torch._C._len_torch_function_stack, get_ident(), self.spent, _NAMES[name]
        end = self.end
        copies, number = name == "to", name in _NUMBERS
        inside = torch.Tensor.__format__.__code__.co_filename, sys.modules["torch._tensor_str"].__file__

        def read(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if modes() and watched(torch._C):
                end()
                return method(self, *args, **kwargs)
            if type(self) not in kinds or get_ident() != thread or on_host(self):
                return method(self, *args, **kwargs)
            # torch's warning would name this line.
            given = detach(self) if number and self.requires_grad else self
            begin = now()
            found = method(given, *args, **kwargs)
            took = now() - begin
            if not copies or on_host(found):
                frame, what = sys._getframe(1), told
                # torch itself reads it, for `print(x)` and the like.
                while frame.f_code.co_filename in inside and frame.f_back is not None:
                    what = _READERS.get(frame.f_code.co_name, what)
                    frame = frame.f_back
                one = spent.setdefault((frame.f_code, frame.f_lineno, what), [0, 0])
                one[0] += 1
                one[1] += took
            return found

        return like(read, name, method)


def like(function: Any, name: str, method: Any) -> Any:
    """The function, with the names of the method of torch.Tensor in whose place it is put."""
    function.__name__, function.__qualname__ = name, f"Tensor.{name}"
    function.__module__, function.__doc__ = "torch", method.__doc__
    return function


def on_host(tensor: Any) -> bool:
    """Whether reading this tensor waits for no device."""
    return bool(tensor.is_cpu)


def watched(core: Any) -> bool:
    """Whether a mode that is not torch's sees functions and methods at present. core: torch._C."""
    modes = (core._get_function_stack_at(place) for place in range(core._len_torch_function_stack()))
    return any(not module_of(type(mode)).startswith("torch.") for mode in modes)


def overridden(torch: Any) -> bool:
    """Whether a class of tensors that is not torch's gets methods to see, with its `__torch_function__`.

    torch looks up the method of torch.Tensor for it, and it may compare that with one that it has looked up before.
    """
    disabled = torch._C._disabled_torch_function_impl
    kinds = [torch.Tensor]
    while kinds:
        for kind in type.__subclasses__(kinds.pop()):
            kinds.append(kind)
            attributes = type.__getattribute__(kind, "__dict__")
            seen = attributes.get("__torch_function__", disabled) is not disabled
            if seen and not str(attributes.get("__module__")).startswith("torch."):
                return True
    return False
