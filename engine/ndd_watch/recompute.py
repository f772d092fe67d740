"""Blocks of a model that compute again in backward what they would keep from forward, or keep it in host memory.

`set_levels` replaces the `forward` of modules in their instances. Names, parameters and state dicts stay as they are,
and copies and pickles of the model follow. Losses, gradients, buffers and random states are those of the plain model:
random states are restored for the second forward pass, and normalisation updates its statistics in the first one only.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any, Callable

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# What a block does with what it would keep for backward: compute all of it again; the same, but keep the results of
# matrix products, convolutions and attention; keep it in host memory.
ALL, CHEAP, OFFLOAD = "all", "cheap", "offload"
LEVELS = (ALL, CHEAP, OFFLOAD)
_MUST_SAVE = frozenset(
    f"aten::{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)
# While a plan is searched: the seconds of each second pass, by the name of its block.
spent: dict[str, list[float]] | None = None
_again = 0
# While a step is traced: the function mode of its second passes, since torch takes such modes away within backward.
_mode: Any = None
# `_eagerly`, kept from the compiler. Made with the first block, since that imports the compiler, which takes a second.
_outside_compiler: Any = None


def recomputing() -> bool:
    """Whether a block computes for the second time, within backward."""
    return _again > 0


class Recomputed:
    """Takes the place of the `forward` of one module. An object, since copies and pickles cannot follow a closure."""

    def __init__(self, module: torch.nn.Module, level: str, name: str) -> None:
        self.module, self.level, self.name = module, level, name
        # Whether it was called in a forward pass that trains.
        self.used = False
        # What another library has put in the same place.
        self.before = module.__dict__.get("forward")
        self.normalises = any(isinstance(each, _NormBase) for each in module.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.before or functools.partial(type(self.module).forward, self.module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self.used = True
        if self.level == OFFLOAD:
            with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                return forward(*args, **kwargs)
        # By position: torch looks for devices, whose random states it keeps, among positional arguments only.
        call = functools.partial(_call, forward, len(args), tuple(kwargs))
        values = (*args, *kwargs.values())
        if not torch.compiler.is_compiling():
            return checkpoint(call, *values, use_reentrant=False, context_fn=self._contexts)
        if self.level == ALL and not self.normalises:
            return checkpoint(call, *values, use_reentrant=False)
        return _outside_compiler(call, values, self._contexts)

    def _contexts(self) -> tuple[Any, Any]:
        """(around the first pass, around the second)."""
        if self.level == CHEAP:
            first, again = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
            return first, _Again(self, again)
        return contextlib.nullcontext(), _Again(self, contextlib.nullcontext())


def _call(forward: Callable[..., Any], count: int, names: tuple[str, ...], *values: Any) -> Any:
    return forward(*values[:count], **dict(zip(names, values[count:])))


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if operator._schema.name in _MUST_SAVE
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _eagerly(call: Callable[..., Any], values: tuple[Any, ...], contexts: Callable[[], Any]) -> Any:
    """Compiled code accepts no contexts of ours: the graph breaks, and what the block calls is compiled by itself."""
    return checkpoint(call, *values, use_reentrant=False, context_fn=contexts)


class _Again:
    """Around a second pass, which a second backward pass enters once more.

    Statistics are updated in copies. Without them, fewer tensors would be kept than in the first pass, which torch
    refuses; and a momentum of 0 would turn an infinity into NaN.
    """

    def __init__(self, block: Recomputed, inner: Any) -> None:
        self._block, self._inner = block, inner

    def __enter__(self) -> None:
        global _again
        norms = [
            each._buffers
            for each in self._block.module.modules()
            if isinstance(each, _NormBase) and each.training
        ]
        self._statistics = [(buffers, dict(buffers)) for buffers in norms]
        for buffers in norms:
            buffers.update({key: None if item is None else item.clone() for key, item in buffers.items()})
        self._begin = _now()
        _again += 1
        if _mode is not None:
            _mode.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        global _again
        try:
            return self._inner.__exit__(*error)
        finally:
            if _mode is not None:
                _mode.__exit__(*error)
            _again -= 1
            if spent is not None:
                spent.setdefault(self._block.name, []).append(_now() - self._begin)
            for buffers, before in self._statistics:
                buffers.update(before)


def _now() -> float:
    """Seconds; while costs are measured, all work launched on the GPU has been done by then."""
    if spent is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def second_passes_in(mode: Any) -> Iterator[None]:
    """Inside, second passes are in this function mode of torch."""
    global _mode
    _mode = mode
    try:
        yield
    finally:
        _mode = None


def set_levels(model: torch.nn.Module, levels: Mapping[str, str]) -> None:
    """Give the named modules their levels; all others compute as before. Raises KeyError with a name it has not."""
    global _outside_compiler
    if levels and _outside_compiler is None:
        _outside_compiler = torch._dynamo.disable(_eagerly, recursive=False)  # type: ignore[no-untyped-call]
    modules = dict(model.named_modules())
    chosen = {name: modules[name] for name in levels}
    for module in modules.values():
        if isinstance(set_before := module.__dict__.get("forward"), Recomputed):
            del module.forward
            if set_before.before is not None:
                module.forward = set_before.before
    for name, module in chosen.items():
        module.forward = Recomputed(module, levels[name], name)


def blocks_of(model: torch.nn.Module) -> list[Recomputed]:
    """What takes the place of `forward` in the modules that have a level."""
    found = (module.__dict__.get("forward") for module in model.modules())
    return [each for each in found if isinstance(each, Recomputed)]


@contextlib.contextmanager
def watched_effects(model: torch.nn.Module, names: Mapping[str, torch.nn.Module]) -> Iterator[dict[str, str]]:
    """Inside, learn why modules that are called cannot compute twice. By name; "" for one that can.

    Normalisation may change its statistics. What a module draws from NumPy's generator, or does elsewhere, is not seen.
    """
    found: dict[str, str] = {}
    open_: dict[str, list[Any]] = {}

    def begin(name: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if not recomputing():
                open_.setdefault(name, []).append(_state(module, (args, kwargs)))

        return before

    def end(name: str) -> Callable[..., None]:
        def after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not recomputing() and open_.get(name):
                why = _effect(open_[name].pop(), _state(module, (args, kwargs)), output)
                found[name] = found.get(name) or why

        return after

    handles: list[Any] = []
    for name, module in names.items():
        handles.append(module.register_forward_pre_hook(begin(name), with_kwargs=True))
        handles.append(module.register_forward_hook(end(name), with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _state(module: torch.nn.Module, inputs: Any) -> tuple[list[int], list[int], Any]:
    """(versions of buffers, versions of inputs, state of Python's generator)."""
    buffers = [
        item._version
        for each in module.modules()
        if not isinstance(each, _NormBase)
        for item in each._buffers.values()
        if item is not None
    ]
    versions = [
        item._version
        for item in tree_iter(inputs)
        if isinstance(item, torch.Tensor) and not item.is_inference()
    ]
    return buffers, versions, random.getstate()


def _effect(before: tuple[Any, ...], after: tuple[Any, ...], output: Any) -> str:
    for one, other, why in zip(
        before, after, ("it changes its buffers", "it changes its inputs", "it draws from Python's random generator"),
    ):  # fmt: skip
        if one != other:
            return why
    tensors = [item for item in tree_iter(output) if isinstance(item, torch.Tensor)]
    return "" if any(item.requires_grad for item in tensors) else "no output of it has a gradient"
