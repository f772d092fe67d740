"""Hooks of the modules that the script itself calls.

Only the classes of modules that are called from outside other modules are hooked, each once: a hook on
`nn.Module.__call__` costs every module of a model 0.2 us a call, and torch.compile traces into it. A class that is
changed again and again loses CPython's method cache for good (3.13, after 1,000 changes).
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, Callable

from .clock import (
    BACKWARD,
    BASE,
    CURRENT,
    EVALUATE,
    FORWARD,
    LAST,
    LOSS,
    NAMES,
    OTHER,
    TIMED,
    TRAINER,
    WAITING,
    S,
    enter,
    now,
    row,
)
from .steps import Steps


class Modules:
    """Hooked classes. base: torch.nn.Module."""

    def __init__(
        self, base: type, steps: Steps, compiling: Callable[[], bool], grad_enabled: Callable[[], bool]
    ) -> None:
        self.hooked: dict[type, Any] = {}
        # Code of hooks -> the phase of what they call.
        self.roots: dict[Any, str] = {}
        # In a trial: what wraps the call of an outermost module, the innermost one first.
        self.around: list[Callable[..., Any]] = []
        self._base, self._steps = base, steps
        self._compiling, self._grad_enabled = compiling, grad_enabled

    def hook(self, kind: type, time_first: bool = False) -> None:
        """Time the outermost calls of modules of a class. time_first: their input is (time, batch, ...)."""
        if kind in self.hooked:
            return
        base, steps = self._base, self._steps
        compiling, grad_enabled = self._compiling, self._grad_enabled
        inherited = next(one.__dict__["__call__"] for one in kind.__mro__ if "__call__" in one.__dict__)
        ordinary = inherited is base.__dict__["__call__"]
        phase = LOSS if "modules.loss" in kind.__module__ else FORWARD
        self.hooked[kind] = kind.__dict__.get("__call__")

        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            # Looked up for each call: torch.fx replaces nn.Module.__call__ for a while.
            call: Any = base.__call__ if ordinary else inherited
            if compiling() or S[TRAINER] != get_ident():
                return call(module, *args, **kwargs)
            if S[BASE] == EVALUATE:
                if not (module.training and grad_enabled()):
                    return call(module, *args, **kwargs)
                self.evaluation(False)
            elif not (module.training or grad_enabled()):
                self.evaluation(True)
                return call(module, *args, **kwargs)
            outer = S[CURRENT]
            # Inside another module, or recomputed within the backward pass.
            if not S[TIMED] or FORWARD <= outer % WAITING <= BACKWARD:
                return call(module, *args, **kwargs)
            t = now()
            row[outer] += t - S[LAST]
            S[LAST] = t
            S[CURRENT] = phase
            try:
                for wrap in self.around:
                    call = wrap(call)
                return call(module, *args, **kwargs)
            finally:
                t = now()
                row[S[CURRENT]] += t - S[LAST]
                S[LAST] = t
                S[CURRENT] = outer
                if steps.shape is None and phase == FORWARD:
                    shape = shape_of((*args, *kwargs.values()))
                    steps.shape = (
                        (shape[1], shape[0], *shape[2:]) if shape and time_first and shape[1:] else shape
                    )

        self.calls(__call__, FORWARD)  # the classes of losses share this code; they are torch's
        kind.__call__ = __call__  # type: ignore[method-assign]

    def calls(self, hook: Any, phase: int) -> None:
        """What a hook calls belongs to a phase."""
        self.roots[hook.__code__] = NAMES[phase]

    def unhook_all(self) -> None:
        """Restore all classes that nobody else has changed since."""
        while self.hooked:
            kind, before = self.hooked.popitem()
            ours = kind.__dict__.get("__call__")
            if getattr(ours, "__module__", "") != __name__:
                continue
            if before is None:
                del kind.__call__
            else:
                kind.__call__ = before  # type: ignore[method-assign]

    def evaluation(self, on: bool) -> None:
        """The script begins or ends an evaluation; all of it belongs to one phase."""
        S[BASE] = EVALUATE if on else OTHER
        S[TIMED] = -1 if on else S[TRAINER] * (not self._steps.skip)
        enter(S[BASE])


def shape_of(values: Any, depth: int = 3) -> tuple[int, ...] | None:
    """The shape of the first tensor of nested containers; None without one."""
    for value in values:
        shape = getattr(value, "shape", None)
        if shape is not None:
            try:
                return tuple(int(size) for size in shape)
            except (TypeError, ValueError):
                continue
        if depth and isinstance(value, dict):
            value = list(value.values())
        if depth and isinstance(value, (list, tuple)):
            found = shape_of(value, depth - 1)
            if found is not None:
                return found
    return None
