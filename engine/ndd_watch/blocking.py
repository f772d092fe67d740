"""The calls of a script that wait for a GPU, and those that copy to it: methods of torch.Tensor that are timed.

Waits for it: `loss.item()`, `if loss:`, `x.to("cpu")` in a profiled step. No profiler sees all of them: Python calls
`__float__` and other methods of operators from C, and a call of `to` does not tell where the copy goes. The function
with the training loop has been called before the step begins. So for that one step, the class torch.Tensor gets
functions of these names, which call the methods.

Copies to it: `x.to(device)` and `x.cuda()` in the script's own loop. They are methods in C, in which no probe has a
place, so torch.Tensor gets functions of these names as well once a script trains on a GPU. A cast is no copy: it ends
on the device where it began. A call within a forward pass, a dataset or an optimizer is part of that.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Callable

from .apart import module_of
from .clock import CURRENT, LAST, OTHER, TIMED, TO_DEVICE, S, gpu, mark, marks, now, row
from .looks import Looks

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


_MOVES = ("to", "cuda")


class Copies:
    """failed: called with an error of ours. unseen: called with the names of what is not timed, and why."""

    def __init__(
        self,
        torch: Any,
        looks: Looks,
        failed: Callable[[BaseException], None],
        unseen: Callable[[list[str], str], None],
    ) -> None:
        self._torch, self._kind = torch, torch.Tensor
        self._looks, self._failed, self._unseen = looks, failed, unseen
        self._put: dict[str, Any] = {}

    def put(self) -> None:
        """Put the functions in place, if nobody sees them. Raises AttributeError if torch has no such method."""
        if overridden(self._torch) or watched(self._torch._C):
            self._tell()
            return
        for name in _MOVES:
            if name not in self._kind.__dict__:
                self._put[name] = self._timed(getattr(self._kind, name))
                setattr(self._kind, name, self._put[name])

    def remove(self) -> None:
        """Take them out, except where somebody has put others in their place."""
        while self._put:
            name, function = self._put.popitem()
            if self._kind.__dict__.get(name) is function:
                delattr(self._kind, name)

    def _tell(self) -> None:
        self._unseen([f"torch.Tensor.{name}" for name in _MOVES], "a class or a mode of the script sees them")

    def _timed(self, method: Callable[..., Any]) -> Any:
        traced, looks, failed = self._looks.traced, self._looks, self._failed
        modes, core = self._torch._C._len_torch_function_stack, self._torch._C
        remove, tell = self.remove, self._tell

        def copy(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if modes() and watched(core):
                try:
                    remove()  # the mode is given what torch.Tensor has under this name
                    tell()
                except Exception as error:  # noqa: BLE001
                    failed(error)
                return method(self, *args, **kwargs)
            if S[TIMED] != get_ident() or S[CURRENT] != OTHER or traced() or not looks.is_tensor(self):
                return method(self, *args, **kwargs)
            marked = bool(marks)
            if marked:
                mark(TO_DEVICE)
            begin = now()
            found = method(self, *args, **kwargs)
            end = now()
            try:
                if S[CURRENT] == OTHER and looks.copied(self, found):
                    row[OTHER] += begin - S[LAST]
                    row[TO_DEVICE] += end - begin
                    S[LAST] = end
                elif marked:
                    gpu.take_back(OTHER)
                if marked and marks:
                    mark(OTHER)
            except Exception as error:  # noqa: BLE001
                failed(error)
            return found

        return like(copy, method.__name__, method)
