"""Finds the first thing in a step that is not finite: an input, what a module or function returns, or a gradient.

Steps are looked at closely once a loss or gradients are known not to be finite. In such a step each function of Python
that returns is heard, in the order of the computation, and the tensors of modules, of torch.nn.functional and of the
user's own functions are reduced to their smallest and largest value. On a GPU this waits for the device. Nothing of
the script is kept.

Only NaN and +inf count: -inf alone is what masks of attention are filled with.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Callable

from .clock import now
from .exceptions import Dropped, ours
from .listening import Listening
from .looks import Looks
from .modules import modules_within
from .own import own, own_frame
from .steps import Steps

# Steps in a row that are looked at until one is not finite, looks at most, and nanoseconds between two.
MOST_STEPS, MOST_LOOKS, AGAIN_NS = 40, 5, 30 * 10**9
# Listening ends where the steps take much longer than usual: so many times, and so many nanoseconds more.
LONGER, SPARE_NS = 20, 10**9
# Positions of a dimension that are named, and the sizes from which on that is of use.
MOST_NAMED, LEAST_SIZE = 3, 4

Found = dict[str, Any]


class Origin:
    """wanted: the next step is to be looked at. active: the present one is. found: see NotFiniteEvent of the record."""

    def __init__(self, torch: Any, looks: Looks, steps: Steps) -> None:
        self._torch, self._looks, self._steps = torch, looks, steps
        self.wanted = self.active = False
        self._looked, self._again, self._until = 0, 0, 0
        self._count = 0
        self._call = torch.nn.Module._call_impl.__code__
        self._functional = torch.nn.functional.__file__
        self._listening = Listening(self._returns)
        self._forget()

    def _forget(self) -> None:
        self.found: Found = {}
        # The first value of the data that was not finite; parameters that are not; the model; whether it was called.
        self._made: Found = {}
        self._damaged: Found = {}
        self._root: weakref.ref[Any] | None = None
        self._checked = False

    def ask(self, t: int) -> bool:
        """Something is not finite, at t on our clock; whether a closer look is due."""
        if not (self.active or self.wanted) and self._looked < MOST_LOOKS and t >= self._again:
            self.wanted = True
        return self.wanted

    def begin(self, t: int) -> bool:
        """Look at the step that begins; whether that is possible."""
        self.wanted = False
        self._looked, self._again, self._count = self._looked + 1, t + AGAIN_NS, 0
        self._until = t + MOST_STEPS * LONGER * sum(self._steps.last_row) + SPARE_NS
        self._forget()
        self.active = self._looks.allowed() and self._listening.begin()
        return self.active

    def step(self, t: int) -> bool:
        """A step has ended; whether the next one is looked at, too."""
        self._count += 1
        if not self.found and self._damaged:
            self.found = self._damaged
        goes_on = not (self.found or self._listening.ended) and self._count < MOST_STEPS
        if goes_on:
            self._forget()
        else:
            self.end()
        return goes_on

    def end(self) -> None:
        """End the look. Safe to call twice."""
        self._listening.end()
        self.active = False
        if self.found:
            self._looked = MOST_LOOKS  # it is known

    # What is heard.

    def _returns(self, frame: Any, value: Any) -> None:
        """A function returns this value."""
        try:
            if now() > self._until:
                self.end()
                return
            code = frame.f_code
            if value is None or self.found or code.co_name == "<module>":
                return
            is_module = code is self._call
            if not is_module and code.co_filename != self._functional and not own(code):
                return
            if not self._looks.allowed():
                return
            if is_module:
                self._module(frame, value)
            elif self._first_bad(value) is not None:
                self._function(frame, value)
        except Exception as error:
            with Dropped():
                self.end()
            if not ours(error):
                raise

    def _module(self, frame: Any, value: Any) -> None:
        """A module returns."""
        outer = self._outermost(frame)
        root = outer.f_locals["self"]
        if self._root is None:
            self._root = weakref.ref(root)
        if outer is frame and not self._damaged and not self._checked:
            self._checked = True
            self._parameters(root)
        bad = self._first_bad(value)
        if bad is None:
            return
        given = (outer.f_locals["args"], outer.f_locals["kwargs"])
        if (wrong := self._first_bad(given)) is not None:
            self.found = {**self._input(wrong, outer, given), **self._made_by()}
            return
        if not self._damaged:
            self._parameters(root)
        if self._damaged:
            self.found = self._damaged
            return
        module, args = frame.f_locals["self"], (frame.f_locals["args"], frame.f_locals["kwargs"])
        name = next((path for path, one in modules_within(root) if one is module), "")
        kind = type(module).__name__
        between = self._first_bad(args)
        place = _place(own_frame(frame.f_back, own))
        if between is not None:  # computed between two modules
            self.found = {"what": "before", "name": name, "kind": kind, **self._part(between), **place}
        else:
            self.found = {"what": "output", "name": name, "kind": kind, **self._part(bad), **place}

    def _function(self, frame: Any, value: Any) -> None:
        """A function of torch or of the user returns what is not finite."""
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        given = {name: frame.f_locals.get(name) for name in code.co_varnames[:count]}
        bad, outer = self._first_bad(value), self._outermost(frame)
        place = _place(frame if own(code) else own_frame(frame.f_back, own))
        name = str(getattr(code, "co_qualname", code.co_name)).rpartition("<locals>.")[2]
        here = {"what": "function", "name": name, "kind": "", **self._part(bad), **place}
        wrong = self._first_bad(list(given.values()))
        if outer is not None:
            args = (outer.f_locals["args"], outer.f_locals["kwargs"])
            if (first := self._first_bad(args)) is not None:
                self.found = {**self._input(first, outer, args), **self._made_by()}
                return
            if self._root is None:
                self._root = weakref.ref(outer.f_locals["self"])
            self._parameters(outer.f_locals["self"])
            if self._damaged:
                self.found = self._damaged
            elif wrong is None:
                self.found = here
        elif self._root is None:  # the data
            if wrong is None and not self._made:
                self._made = here
        elif wrong is None:
            self.found = here
        elif not self._torch.is_grad_enabled() or not _needs_gradient(self._looks, wrong):
            self.found = {**self._input(wrong, frame, given), **self._made_by()}

    def loss(self, loss: Any, frame: Any) -> None:
        """A backward pass begins. frame: of torch's function."""
        if self.found or not self._is_bad(loss):
            return
        caller = own_frame(frame, own)
        if caller is not None:
            # What else the function knows: targets, weights of classes.
            known = [
                one
                for one in self._looks.tensors(dict(caller.f_locals), 2)
                if one is not loss and not _needs_gradient(self._looks, one) and self._is_bad(one)
            ]
            if known:
                self.found = {
                    "what": "input", "name": _name_in(caller, known[0]), "kind": "", **self._part(known[0]),
                    **_place(caller), **self._made_by(),
                }  # fmt: skip
                return
        if self._damaged or (self._root is None and self._made):
            self.found = self._damaged or self._made
            return
        self.found = {"what": "loss", "name": "", "kind": "", **self._part(loss), **_place(caller)}

    def gradients(self) -> None:
        """A backward pass has ended: everything before it was finite."""
        root = None if self._root is None else self._root()
        if self.found or root is None:
            return
        named = [(name, item.grad) for name, item in _parameters_of(root, self._looks)]
        plain = [(name, grad) for name, grad in named if self._looks.is_tensor(grad)]
        bad = [(name, grad) for name, grad in plain if self._is_bad(grad)]
        if bad:  # the backward pass begins with the last ones
            name, grad = bad[-1]
            self.found = {
                "what": "gradient", "name": name, "kind": "", **self._part(grad), "count": len(bad), "of": len(plain),
                "file": "", "line": 0, "function": "",
            }  # fmt: skip

    def _parameters(self, root: Any) -> None:
        """Look at the parameters of a model."""
        named = _parameters_of(root, self._looks)
        bad = [(name, item) for name, item in named if self._is_bad(item)]
        if bad:
            name, item = bad[0]
            self._damaged = {
                "what": "parameter", "name": name, "kind": "", **self._part(item), "count": len(bad),
                "of": len(named), "file": "", "line": 0, "function": "",
            }  # fmt: skip

    # Inside.

    def _outermost(self, frame: Any) -> Any:
        """The frame of the outermost call of a module around this one; None outside of modules."""
        found = None
        while frame is not None:
            if frame.f_code is self._call:
                found = frame
            frame = frame.f_back
        return found

    def _input(self, tensor: Any, frame: Any, given: Any) -> Found:
        """What a model or a function has received. frame: of its call; given: its arguments."""
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name in ("_wrapped_call_impl", "__call__", "call_module"):
            caller = caller.f_back
        name = _name_in(caller, tensor) if caller is not None and own(caller.f_code) else ""
        if not name:
            named = given if type(given) is dict else _arguments(frame, given)
            name = next((str(key) for key, one in named.items() if one is tensor), "")
        return {
            "what": "input", "name": name, "kind": "", **self._part(tensor),
            **_place(own_frame(frame.f_back, own)),
        }  # fmt: skip

    def _made_by(self) -> Found:
        """The function of the user that has made data that is not finite."""
        made = self._made
        return {"made": [made["file"], made["line"], made["name"]]} if made else {}

    def _first_bad(self, value: Any) -> Any:
        return next((one for one in self._looks.tensors(value) if self._is_bad(one)), None)

    def _is_bad(self, tensor: Any) -> bool:
        """Whether a tensor has NaN or +inf."""
        torch = self._torch
        with self._looks.silent():
            plain = tensor.is_floating_point() and not tensor.is_nested and tensor.layout is torch.strided
            if not plain or tensor.device.type == "meta" or tensor.itemsize == 1 or not tensor.numel():
                return False
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                return False
            if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
            highest = float(tensor.detach().amax().item())
        return not highest < math.inf

    def _part(self, tensor: Any) -> Found:
        """Which part of a tensor is not finite: its values, their share, and the positions of a dimension."""
        torch = self._torch
        with self._looks.silent():
            tensor = tensor.detach()
            wrong = ~torch.isfinite(tensor)
            nan = bool(torch.isnan(tensor).any().item())
            infinite = bool(torch.isinf(tensor).any().item())
            share = float(wrong.float().mean().item())
            found: Found = {"nan": nan, "infinite": infinite, "share": share, "axis": "", "at": [], "size": 0}
            # Images have their channels first.
            dimension = 1 if wrong.ndim == 4 else wrong.ndim - 1
            for axis, name in ((dimension, "channel" if wrong.ndim == 4 else "column"), (0, "item")):
                if wrong.ndim < 2 or wrong.shape[axis] < LEAST_SIZE:
                    continue
                others = [one for one in range(wrong.ndim) if one != axis]
                places = wrong.sum(dim=others).nonzero().flatten().tolist()
                if len(places) <= MOST_NAMED or (name == "item" and len(places) < wrong.shape[axis]):
                    at, size = places[:MOST_NAMED], int(wrong.shape[axis])
                    found |= {"axis": name, "at": at, "places": len(places), "size": size}
                    break
        return found


def _needs_gradient(looks: Looks, tensor: Any) -> bool:
    with looks.silent():
        return bool(tensor.requires_grad)


def _place(frame: Any) -> Found:
    """The line that a frame is at; the first one of its function where that is known better."""
    if frame is None:
        return {"file": "", "line": 0, "function": ""}
    code = frame.f_code
    return {"file": code.co_filename, "line": frame.f_lineno or code.co_firstlineno, "function": code.co_name}


def _name_in(frame: Any, tensor: Any) -> str:
    """The variable of a frame that is this tensor, or has it: "x", "batch['x']", "batch[0]"; "" without one."""
    for name, value in list(frame.f_locals.items()):
        if value is tensor:
            return str(name)
    for name, value in list(frame.f_locals.items()):
        kind = type(value)
        if kind is dict:
            for key, inner in value.items():
                if inner is tensor and type(key) is str:
                    return f"{name}[{key!r}]"
        elif kind is list or kind is tuple:
            for place, inner in enumerate(value):
                if inner is tensor:
                    return f"{name}[{place}]"
    return ""


def _arguments(frame: Any, given: Any) -> dict[str, Any]:
    """The arguments of a module's `forward` by their names."""
    args, kwargs = given
    forward: Any = next(
        (one.__dict__["forward"] for one in type(frame.f_locals["self"]).__mro__ if "forward" in one.__dict__),
        None,
    )
    names = getattr(getattr(forward, "__code__", None), "co_varnames", ())[1:]
    return {**dict(zip(names, args)), **kwargs}


def _parameters_of(root: Any, looks: Looks) -> list[tuple[str, Any]]:
    """(name, parameter) of a model, in the order of its modules."""
    return [
        (f"{path}.{key}" if path else str(key), item)
        for path, module in modules_within(root)
        for key, item in (module.__dict__.get("_parameters") or {}).items()
        if looks.is_tensor(item)
    ]
