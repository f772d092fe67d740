"""What classes of optimizers have: their steps as torch wraps them, and the closures that these take."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

# Functions with this argument first take a closure that computes the loss.
_CLOSURE = "closure"
# Functions around a step that are looked at.
MOST_WRAPPERS = 8


def takes_closure(optimizer: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a step of an optimizer is called with a closure, and not with anything else that can be called."""
    if kwargs.get(_CLOSURE) is not None:
        return True
    if len(args) < 2 or args[1] is None:
        return False
    names: Any = ()
    function: Any = type(optimizer).step
    for _ in range(MOST_WRAPPERS):  # torch's own, and perhaps `torch.no_grad()`
        if type(function) is not FunctionType:
            break
        names = function.__code__.co_varnames
        function = function.__dict__.get("__wrapped__")
    return bool(names[1:2] == (_CLOSURE,))


def wraps_steps(step: Any) -> bool:
    """Whether this is the function that torch wraps around the steps of a class; a copy of its mark is not enough."""
    optimizers = sys.modules["torch.optim.optimizer"].__dict__
    return (
        type(step) is FunctionType and step.__globals__ is optimizers and step.__dict__.get("hooked") is True
    )


def subclasses(kind: type) -> list[type]:
    """The classes that are made of this one."""
    found = kind.__subclasses__()
    return [*found, *(inner for one in found for inner in subclasses(one))]
