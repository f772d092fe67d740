"""How many numbers on the CPU are denormal, too small for full precision, where the processor is slow with them.

Looks at a few values of parameters, their gradients and the state of optimizers, and copies nothing else. Processors
differ, also by operation: some multiply denormal numbers as fast as others, and take long for their square roots.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Callable

from .attributes import attribute
from .clock import now
from .looks import Looks, groups_of

# Tensors that are looked at, the largest ones, and values of each.
MOST_TENSORS, VALUES = 64, 64
# Shares below this are not told, and nothing where the processor takes less than so many times as long.
LEAST, SLOW = 0.05, 1.5
# Numbers of a test of the processor, which stay in its cache, and how often it is repeated.
_NUMBERS, _REPEATS, _DENORMAL = 4096, 5, 1e-40


def denormals(looks: Looks, optimizers: Iterable[Any]) -> dict[str, tuple[float, float]]:
    """(share of denormal values, how many times as long the processor takes for them) by what has them.

    Empty while a profiler of torch is on, which would tell the operators.
    """
    torch: Any = sys.modules["torch"]
    if not looks.allowed() or torch._C._autograd._profiler_enabled():
        return {}
    with looks.silent():
        found = shares(looks, optimizers)
        if not found:
            return {}
        multiply, root = slower()
    told = {name: (share, root if _has_root(name) else multiply) for name, share in found.items()}
    return {name: (share, times) for name, (share, times) in told.items() if times >= SLOW}


def _has_root(state: str) -> bool:
    """Whether an optimizer takes the square root of this state: sums and averages of squared gradients."""
    return "sq" in state or state == "sum"


def shares(looks: Looks, optimizers: Iterable[Any]) -> dict[str, float]:
    """Share of denormal values by what has them: "parameters", "gradients", or a state such as "exp_avg_sq"."""
    torch: Any = sys.modules["torch"]
    kinds = torch.float32, torch.float64
    found: list[tuple[int, str, Any]] = []
    for name, tensor in _tensors(looks, optimizers):
        size = looks.bytes_of(tensor)
        if size and tensor.dtype in kinds and tensor.device.type == "cpu" and tensor.is_contiguous():
            found.append((size, name, tensor))
    found.sort(key=lambda item: -item[0])
    sizes: dict[str, int] = {}
    small: dict[str, float] = {}
    with torch.no_grad():
        for size, name, tensor in found[:MOST_TENSORS]:
            count = looks.elements(tensor)
            some = tensor.detach().view(-1)[:: max(count // VALUES, 1)].abs()
            denormal = (some > 0) & (some < torch.finfo(tensor.dtype).tiny)
            sizes[name] = sizes.get(name, 0) + size
            small[name] = small.get(name, 0.0) + size * float(denormal.sum()) / looks.elements(some)
    return {name: share for name, size in sizes.items() if (share := small[name] / size) >= LEAST}


def _tensors(looks: Looks, optimizers: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    for optimizer in optimizers:
        state = attribute(optimizer, "state")
        for group in groups_of(optimizer):
            for parameter in group["params"]:
                if not looks.is_tensor(parameter):
                    continue
                yield "parameters", parameter
                if parameter.is_leaf and looks.is_tensor(gradient := parameter.grad):
                    yield "gradients", gradient
                values = dict.get(state, parameter) if issubclass(type(state), dict) else None
                for name, value in values.items() if type(values) is dict else ():
                    if type(name) is str and looks.is_tensor(value):
                        yield name, value


def slower() -> tuple[float, float]:
    """How many times as long the processor takes for denormal numbers as for others: to multiply, for a root."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        usual, small = (torch.full((_NUMBERS,), value, dtype=torch.float32) for value in (1.0, _DENORMAL))
        return _times(small.mul, usual.mul, usual), _times(small.sqrt, usual.sqrt)


def _times(one: Callable[..., Any], other: Callable[..., Any], *given: Any) -> float:
    return _shortest(one, given) / max(_shortest(other, given), 1)


def _shortest(call: Callable[..., Any], given: tuple[Any, ...]) -> int:
    took = []
    for _ in range(_REPEATS):
        begin = now()
        call(*given)
        took.append(now() - begin)
    return min(took)
