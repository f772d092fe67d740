"""The state of a training: what a checkpoint contains, and what a forward pass changes.

In a checkpoint, tensors are separated from the rest, and put back. A forward pass that does not count changes random
generators, buffers and extra states, which are restored after it.
"""

from __future__ import annotations

import copy
import importlib
import io
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ndd_engine.batches import expanded
from ndd_engine.errors import shortened


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of torch's, Python's and, where it is imported, NumPy's generators, fit for a checkpoint."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` returned.

    NumPy is imported if the state has one of it: data that imports it later would draw other numbers. If the state has
    none although NumPy is imported now, its generator is seeded like torch's.
    """
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in state:
        if numpy is None:
            with suppress(ImportError):
                numpy = importlib.import_module("numpy")
        if numpy is not None:
            numpy.random.set_state(tuple(state["numpy"]))
    elif numpy is not None:
        numpy.random.seed(torch.initial_seed() % 2**32)


def seeded_random_state(seed: int, device: torch.device) -> dict[str, Any]:
    """What `random_state` returns right after seeding torch's and Python's generators, which stay as they are."""
    version, internal, gauss = random.Random(seed).getstate()
    state = {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "python": [version, list(internal), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.Generator(device).manual_seed(seed).get_state()
    return state


@contextmanager
def kept_random(device: torch.device) -> Iterator[None]:
    """Restore all generators on exit, so that random numbers drawn inside leave no trace."""
    before = random_state(device)
    try:
        yield
    finally:
        restore_random_state(before, device)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers, also those that the model replaces by other tensors, and extra states on exit."""
    before = [
        (module, name, buffer, None if buffer is None or expanded(buffer) else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    extra = [
        (module, copy.deepcopy(module.get_extra_state()))
        for module in model.modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                module._buffers[name] = buffer
        for module, state in extra:
            module.set_extra_state(state)


_PLAIN = (bool, float, str, type(None))
_DEEPEST = 100
# The keys and indices that lead to a value: ("model", "head.weight"), ("optimizer", "state", 3, "exp_avg").
Path = tuple[Any, ...]
# A tensor that a saved one, of this path and size, is placed like; None for a whole tensor on the CPU.
Like = Callable[[Path, torch.Size], Tensor | None]


class TensorPlace(NamedTuple):
    """Where a tensor belongs. stride: None for a contiguous tensor, and for the shard of one."""

    path: Path
    name: str
    stride: tuple[int, ...] | None


def finite_buffers(model: nn.Module) -> frozenset[str]:
    """Names of the buffers that are finite now; others, such as a mask of -inf, need not stay finite."""
    return frozenset(name for name, buffer in model.named_buffers() if _is_finite(buffer))


def not_finite(model: nn.Module, buffers: frozenset[str]) -> str | None:
    """The name of the first parameter, or of a buffer in `buffers`, that contains NaN or infinity, or None.

    Of a sharded tensor, only the shard of this rank is examined.
    """
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return shortened(name, 100)
    for name, buffer in model.named_buffers():
        if name in buffers and not _is_finite(buffer):
            return shortened(name, 100)
    return None


def _is_finite(tensor: Tensor) -> bool:
    value = local(tensor.detach())
    if value.is_meta or value.is_quantized or not (value.is_floating_point() or value.is_complex()):
        return True
    if value.is_nested:
        return all(map(_is_finite, value.unbind()))
    if value.layout is not torch.strided:
        value = value._values() if value.layout is torch.sparse_coo else value.values()
    if value.itemsize == 1:
        value = value.float()  # 8-bit floats have no isfinite
    return bool(torch.isfinite(value).all())


def layout(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """The shape of every value of a model's state, by its name; None for what is no tensor."""
    return {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in state.items()}


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """How the layout of a model's state differs from the one that a resumed run would create; None if it does not."""
    for name in [*before, *now]:
        if before.get(name, "") != now.get(name, ""):
            how = "is new" if name not in before else "is gone" if name not in now else "has another shape"
            advice = "create it in __init__, with its final shape"
            return f"{shortened(name, 100)} {how} since training began, so a run could not resume: {advice}"
    return None


def unloadable(state: dict[str, Any]) -> str | None:
    """Why a checkpoint of this state could not be loaded again, with the name of the value; None if it could."""
    for path, what in _unloadable(state, "", 0):
        name = shortened(path.removeprefix("model."), 120)
        allowed = "tensors, numbers, strings, and lists, tuples, sets or dicts of them"
        return f"{name} {what}, which a checkpoint cannot contain; allowed: {allowed}"
    return None


def _unloadable(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    kind = type(value)
    if kind in _PLAIN or kind is Tensor or kind is nn.Parameter or (kind is int and abs(value) < 2**63):
        return
    if is_sharded(value):
        return  # is saved as a plain tensor
    if depth > _DEEPEST:
        yield path, f"is nested more than {_DEEPEST} levels deep"
    elif kind in (dict, OrderedDict):
        if vars_of := getattr(value, "__dict__", None):  # torch's version numbers of the modules
            yield from _unloadable(vars_of, path, depth + 1)
        for key, item in value.items():
            if isinstance(key, Tensor) or not _loads(key):
                yield path, f"has a key of the type {shortened(type(key).__name__, 80)}"
            yield from _unloadable(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif kind in (list, tuple, set):
        for item in value:
            yield from _unloadable(item, path, depth + 1)
    elif not _loads(value):
        yield path, f"contains a value of the type {shortened(kind.__name__, 80)}"


def _loads(value: Any) -> bool:
    if type(value) is str or (type(value) is int and abs(value) < 2**63):
        return True
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001  the user's own __reduce__ may raise anything
        return False
    return True


def split(state: Mapping[str, Any]) -> tuple[Any, list[TensorPlace], dict[str, Tensor]]:
    """The state with None in the place of its tensors, their places, and the tensors by name.

    What is not a plain dense tensor (sparse, quantized, parameters) stays in the state, and so do the scalars of an
    optimizer, which has one for each parameter. A DTensor is a tensor like others. Names are paths joined by dots, made
    unique; equal states have equal names on all ranks.
    """
    places: list[TensorPlace] = []
    tensors: dict[str, Tensor] = {}

    def tensor(value: Any, path: Path) -> Any:
        if not _is_array(value) or (path[0] == "optimizer" and value.ndim == 0):
            return value
        name = ".".join(map(str, path))
        while name in tensors:
            name += "'"
        places.append(TensorPlace(path, name, _stride(value)))
        tensors[name] = value.detach()
        return None

    return mapped(state, tensor), places, tensors


def mapped(value: Any, change: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """A copy of nested dicts, lists and tuples with `change(leaf, path)` for every other value."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        copy = kind((key, mapped(item, change, (*path, key))) for key, item in value.items())
        if attributes := getattr(value, "__dict__", None):  # torch's version numbers of the modules
            copy.__dict__.update(attributes)
        return copy
    if kind in (list, tuple):
        return kind(mapped(item, change, (*path, index)) for index, item in enumerate(value))
    return change(value, path)


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """name -> earlier name of the same memory: tied weights, which are written once and stay tied."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, value in tensors.items():
        shard = local(value)
        place = (
            shard.data_ptr(),
            shard.device,
            shard.dtype,
            tuple(shard.shape),
            shard.stride(),
            tuple(value.shape),
        )
        if shard.numel() and first.setdefault(place, name) != name:
            found[name] = first[place]
    return found


def local(value: Tensor) -> Tensor:
    """The shard of a DTensor in this process; any other tensor as it is."""
    return value.to_local() if is_sharded(value) else value  # type: ignore[attr-defined]


def is_sharded(value: Any) -> bool:
    """Whether it is a DTensor. Never imports torch.distributed.tensor, which takes time."""
    return hasattr(value, "to_local") and hasattr(value, "device_mesh")


def _is_array(value: Any) -> bool:
    if is_sharded(value):
        return True
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.numel() > 0
        and not (value.is_quantized or value.is_nested or value.is_meta or value.requires_grad)
    )


def _stride(value: Tensor) -> tuple[int, ...] | None:
    """The strides of a dense tensor of another memory format, such as channels_last."""
    if is_sharded(value) or value.is_contiguous():
        return None
    stride = torch.empty_like(value, device="meta").stride()
    return stride if stride == value.stride() else None
