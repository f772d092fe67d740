"""Looks at what belongs to the script, without running code of it, and tells which code is its own.

Only objects of exactly known types are looked at. A property, a metaclass, or a subclass of a tensor or a container
may count its reads, raise, or compute. Where a dispatch or function mode of the script is active, or torch traces,
even an ordinary tensor does not stay unnoticed.
"""

from __future__ import annotations

import ctypes
import math
import os as _os
import struct
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterable, Iterator
from dis import get_instructions
from functools import lru_cache, partial
from inspect import CO_OPTIMIZED
from itertools import chain
from types import FunctionType, GeneratorType, ModuleType
from typing import Any, Callable

from .apart import Dropped, module_of, os

# What a class has, whatever its metaclass says.
bases: Callable[[Any], Any] = type.__dict__["__mro__"].__get__
namespace: Callable[[Any], Any] = type.__dict__["__dict__"].__get__
class_name: Callable[[Any], str] = type.__dict__["__name__"].__get__
# Elements from which on the Python objects of a dataset are many, and datasets within datasets.
MANY, WITHIN = 10_000, 3

# Attributes in which a dataset has its transforms, or what it is made of; and transforms that change items at random,
# besides those whose names begin so.
TRANSFORMS = frozenset({
    "dataset", "transform", "transforms", "augment", "augmentation", "augmentations", "aug", "pipeline", "_modules",
})  # fmt: skip
RANDOM = frozenset({
    "ColorJitter", "AutoAugment", "AugMix", "TrivialAugmentWide", "RandAugment", "GaussianNoise", "ElasticTransform",
    "MixUp", "CutMix", "SpecAugment", "TimeMasking", "FrequencyMasking",
})  # fmt: skip
MOST_LOOKS = 64
_CACHED = type(lru_cache(len))
# What a function calls to get its own variables.
_SEEN_BY_ITSELF = frozenset({"locals", "vars", "eval", "exec"})
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
# What functions call to draw random numbers, and what those call that draw the same ones whenever an item is read.
DRAWS = frozenset({
    "random", "uniform", "randint", "randrange", "choice", "gauss", "shuffle", "normal", "rand", "randn", "randperm",
    "bernoulli", "uniform_", "normal_",
})  # fmt: skip
SEEDS = frozenset({"manual_seed", "seed", "Generator", "generator", "default_rng", "RandomState", "Random"})


def python_objects(dataset: Any) -> list[Any] | None:
    """[attribute, type, length, type of an element] of the longest list or dictionary of a dataset; None without."""
    best: tuple[int, list[Any] | None] = MANY - 1, None
    for _ in range(WITHIN):
        found = attributes(dataset)
        if type(found) is not dict:
            break
        for name, value in list(found.items()):
            kind = type(value)
            if type(name) is str and kind in (list, tuple, dict) and len(value) > best[0]:
                element = next(iter(value.values() if kind is dict else value))
                best = len(value), [name, class_name(kind), len(value), class_name(type(element))]
        dataset = found.get("dataset")  # of a Subset
    return best[1]


def augments(dataset: Any) -> str:
    """What of a dataset makes items at random: the class of a transform, "RandomCrop", or a function; "" if unknown."""
    todo, looks = [(dataset, 0)], 0
    while todo and looks < MOST_LOOKS:
        looks += 1
        value, depth = todo.pop(0)
        kind = type(value)
        if kind is list or kind is tuple:
            todo += [(one, depth) for one in value[:MOST_LOOKS]]
            continue
        name = class_name(kind)
        if depth and (name.startswith("Random") or name in RANDOM):
            return name
        function = value if kind is types.FunctionType else None if depth else _reads_item(kind)
        if function is not None and _draws(function.__code__):
            return str(function.__qualname__)
        found = attributes(value)
        if depth <= WITHIN and type(found) is dict:
            todo += [
                (list(dict.values(one)) if type(one) is dict else one, depth + (key != "dataset"))
                for key, one in list(found.items())
                if type(key) is str and key in TRANSFORMS
            ]
    return ""


def variables(frame: Any) -> dict[str, Any]:
    """The variables of a function that runs; empty where a debugger or itself reads them, up to Python 3.12.

    There, reading them changes the dictionary that `locals()` has given, and leaves one with all of them in the frame,
    which would keep them alive. It is emptied, unless somebody else has it.
    """
    old = sys.version_info < (3, 13)
    if old and (sys.gettrace() is not None or _sees_itself(frame.f_code)):
        return {}
    names = frame.f_locals
    found = dict(names)
    # Referred to by the frame, by `names`, and by the call. Variables of a class or a module are no copy.
    if old and frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(names) <= 3:
        names.clear()
    return found


def _sees_itself(code: Any) -> bool:
    """Whether a function may ask for its own variables; `model.eval()` is only an attribute of that name."""
    if _SEEN_BY_ITSELF.isdisjoint(code.co_names):
        return False
    return any(one.opname in _LOADS and one.argval in _SEEN_BY_ITSELF for one in get_instructions(code))


def function_of(code: Any, names: dict[str, Any]) -> Any:
    """The function with this code, also a method of a class of the module, or one that a decorator of Python wraps.

    None if it is not found, or if it is the code of several, as that of a decorator's inner function may be. names: the
    globals of its module. Before Python 3.11, a method in a class within a class is not found.
    """
    outer, _, _ = getattr(code, "co_qualname", "").rpartition(".")
    values = list(names.values())
    holders = [value for value in values if issubclass(type(value), type)]
    if outer and (inner := _class_named(outer.split("."), names)) is not None:
        holders.append(inner)
    places = [values, *(list(namespace(kind).values()) for kind in holders)]
    found = {
        id(function): function
        for value in chain.from_iterable(places)
        for function in _functions(value)
        # Python reports each look at a code to audit hooks.
        if function.__name__ == code.co_name or "__wrapped__" in function.__dict__
        if function.__code__ is code
    }
    return next(iter(found.values())) if len(found) == 1 else None


def _functions(value: Any) -> Iterator[Any]:
    """The functions in a value of a module or a class: of properties and caches, too."""
    for _ in range(WITHIN):
        kind = type(value)
        if kind is FunctionType:
            yield value
            return
        if kind is staticmethod or kind is classmethod:
            value = value.__func__
        elif kind is property:
            value = value.fget
        elif kind is _CACHED:
            value = attribute(value, "__wrapped__")
        else:
            return


def _class_named(path: list[str], names: dict[str, Any]) -> Any:
    kind = names.get(path[0])
    for name in path[1:]:
        kind = namespace(kind).get(name) if issubclass(type(kind), type) else None
    return kind if issubclass(type(kind), type) else None


def _reads_item(kind: Any) -> Any:
    """The function by which datasets of a class read an item; None without one."""
    found = next(
        (namespace(base)["__getitem__"] for base in bases(kind) if "__getitem__" in namespace(base)), None
    )
    return found if type(found) is types.FunctionType else None


def _draws(code: Any) -> bool:
    names = set(code.co_names) | {
        name for one in code.co_consts if type(one) is tuple for name in one if type(name) is str
    }
    return bool(names & DRAWS) and not names & SEEDS


def attributes(thing: Any) -> Any:
    """The attributes of an object; None if it has none. A property of this name is not run."""
    for base in bases(type(thing)):
        found = namespace(base).get("__dict__")
        if found is not None:
            return found.__get__(thing) if type(found) is types.GetSetDescriptorType else None
    return None


def attribute(thing: Any, name: str) -> Any:
    """An attribute that an object itself has; None without it. Nothing of its class is run."""
    found = attributes(thing)
    return found.get(name) if type(found) is dict else None


def slots(thing: Any, value: Any) -> list[str]:
    """The slots in which an object has a value."""
    found = []
    for base in bases(type(thing)):
        for name, slot in list(namespace(base).items()):
            if type(slot) is types.MemberDescriptorType:
                with Dropped(AttributeError):  # it is empty
                    if slot.__get__(thing) is value:
                        found.append(name)
    return found


def file_of(kind: Any) -> str:
    """The file of the module in which a class is defined."""
    name = namespace(kind).get("__module__")
    module = sys.modules.get(name) if type(name) is str else None
    found = getattr(module, "__file__", None) if type(module) is types.ModuleType else None
    return os.path.abspath(found) if type(found) is str else ""


# Tells objects apart while they exist. Unlike `id`, Python does not report it to audit hooks, which would take about a
# microsecond in a step.
key_of: Callable[[Any], int] = object.__hash__
# Classes of NumPy whose values are numbers.
_SCALARS = (
    "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool_",
)  # fmt: skip
# Containers within containers that are looked into.
DEPTH = 3


# Parts of a batch that are looked into. The first numbers that are compared, and how many different ones at least.
MOST_FIELDS, FEW_NUMBERS, LEAST_NUMBERS = 8, 16, 4
_LARGE = 1e38  # the largest float32 is larger
# Whether numbers of torch are floating, and their bytes -> their format.
_FORMATS = {(True, 4): "f", (True, 8): "d", (False, 4): "i", (False, 8): "q"}


def listed_numbers(value: Any, depth: int = DEPTH - 1) -> Iterator[Any]:
    """(sizes, first numbers) of the lists of numbers in a value, as torch would make tensors of them."""
    kind = type(value)
    if kind is dict:
        value = tuple(value.values())
    elif kind is not tuple and kind is not list:
        return
    sizes, inner = [], value
    while type(inner) in (list, tuple) and inner:
        sizes.append(len(inner))
        last, inner = inner, inner[0]
    if type(inner) in (int, float):
        yield from _alike(tuple(sizes), last[:FEW_NUMBERS])
    if depth and len(value) <= MOST_FIELDS:
        for one in value:
            yield from listed_numbers(one, depth - 1)


def _alike(sizes: tuple[int, ...], numbers: Any) -> Iterator[Any]:
    """The sizes, and the numbers as of float32; nothing where these are too few to tell lists apart."""
    known = tuple(numbers)
    plain = all(type(one) in (int, float) and abs(one) < _LARGE for one in known)
    if plain and len({*known}) >= LEAST_NUMBERS:
        yield sizes, struct.pack(f"{len(known)}f", *known)


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

    def stored(self, tensor: Any) -> tuple[Any, int] | None:
        """(what a tensor is a part of, how often that was changed in place); None if changes may not be counted.

        NumPy and other processes write to memory that they share without a count.
        """
        with self.silent(), Dropped(RuntimeError, NotImplementedError):  # those of functorch have no storage
            if tensor.is_nested or tensor.layout is not self._strided or tensor.is_inference():
                return None
            shared = tensor.device.type == "cpu" and tensor.is_shared()
            if shared or not tensor.untyped_storage().resizable():
                return None
            whole = tensor if tensor._base is None else tensor._base
            return (whole, int(tensor._version)) if self.is_tensor(whole) else None
        return None

    def first_numbers(self, tensor: Any) -> Any:
        """(sizes, first numbers of its first row) of a tensor on the CPU, as `listed_numbers`; None without any."""
        shape, span = self.shape(tensor), self.span(tensor)
        if not shape or span is None:
            return None
        with self.silent():
            key = bool(self._floating(tensor)), int(tensor.element_size())
        if key not in _FORMATS:
            return None
        count = min(shape[-1], FEW_NUMBERS)
        data = ctypes.string_at(span[0], count * key[1])
        return next(_alike(shape, struct.unpack(f"{count}{_FORMATS[key]}", data)), None)

    def offset(self, tensor: Any) -> int:
        """Where the elements of a tensor begin in its memory."""
        with self.silent():
            return int(tensor.storage_offset())

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


# Files of the folder of workloads, by the beginnings of their names, that only call the user's code.
_PLUMBING = ("base", "factory_data", "own_module", "registry", "result")
_SAMPLERS, _OF_TORCH = "torch.utils.data.sampler", "torch.utils.data."
# Loaders and optimizers whose place is remembered.
MOST_PLACES = 64


def own(code: Any) -> bool:
    """Whether a code object is the user's own: not Python's, torch's, that of an installed package, or this program's.

    A built-in function is not.
    """
    if code is None or isinstance(code, str):
        return False
    return user_file(code.co_filename)


@lru_cache(maxsize=4096)
def user_file(name: str) -> bool:
    """Whether a file is the user's own."""
    for folder in product():
        if name.startswith(folder):
            _, inside, file = name.partition(_os.path.join(folder, "workloads", ""))
            return bool(inside) and not file.startswith(_PLUMBING)
    return not (name.startswith(_foreign()) or "site-packages" in name or "dist-packages" in name)


@lru_cache(maxsize=1)
def product() -> tuple[str, ...]:
    """Folders of this program's packages, with a separator at the end."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("ndd_engine", "ndd_console")]
    return tuple(
        _os.path.join(_os.path.dirname(_os.path.abspath(file)), "") for file in (__file__, *files) if file
    )


@lru_cache(maxsize=1)
def _foreign() -> tuple[str, ...]:
    """What files begin with that are Python's, torch's, or made by torch.compile."""
    paths = sysconfig.get_paths()
    folders = {
        paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts") if name in paths
    }
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folders |= {_os.path.dirname(file) for file in (_os.__file__, torch) if file}
    # A frame may name the target of a symbolic link.
    folders |= {_os.path.realpath(folder) for folder in folders}
    compiled = _os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _os.path.join(
        tempfile.gettempdir(), "torchinductor_"
    )
    return (*(_os.path.join(folder, "") for folder in sorted(folders)), compiled, "<")


def short(file: str) -> str:
    """The path relative to the working directory if inside it, otherwise its last two parts."""
    try:
        here = _os.path.join(_os.getcwd(), "")
    except OSError:  # the folder was deleted
        here = _os.sep
    return file[len(here) :] if file.startswith(here) else "/".join(file.split(_os.sep)[-2:])


def own_frame(frame: Any, own: Callable[[Any], bool]) -> Any:
    """The innermost frame of the user's own code, from this one outwards; None if there is none."""
    while frame is not None and not own(frame.f_code):
        frame = frame.f_back
    return frame


class Places:
    """Where in a script its loaders and optimizers are made: the edit of a setting belongs there.

    own: whether a code object is the script's own.
    """

    def __init__(self, own: Callable[[Any], bool]) -> None:
        self._own = own
        # By id of an optimizer, and of the dataset of a loader: file and line.
        self._found: dict[int, tuple[str, int]] = {}

    def of(self, thing: object) -> tuple[str, int] | None:
        """File and line of an optimizer, or of the loader of a dataset; None if that is unknown."""
        return self._found.get(id(thing))

    def loader_of(self, iterator: Any) -> tuple[dict[str, Any], tuple[str, int] | None]:
        """Settings of the loader that an iterator belongs to, and the place where it was made."""
        dataset, sampler = iterator._dataset, iterator._index_sampler
        workers = whole(iterator._num_workers) or 0
        # Items of a dataset with an index, joined to batches, can be cached.
        joined = getattr(iterator, "_auto_collation", None) is True
        # A sampler of the script may compute it.
        ordinary = module_of(type(sampler)) == _SAMPLERS
        known = ordinary and module_of(type(getattr(sampler, "sampler", sampler))).startswith(_OF_TORCH)
        return {
            "workers": workers, "pin_memory": bool(iterator._pin_memory),
            "prefetch": whole(getattr(iterator, "_prefetch_factor", None)) if workers else None,
            "persistent": bool(getattr(iterator, "_persistent_workers", False)),
            "in_order": getattr(iterator, "_in_order", None) if workers else None,
            "fetch": "item" if joined and _is_tensors(iterator) else None,
            "batch_size": whole(getattr(sampler, "batch_size", None)) if ordinary else None,
            "drop_last": getattr(sampler, "drop_last", None) is True if ordinary else None,
            "dataset": class_name(type(dataset)), "items": _items_of(iterator),
            "uneven": joined and not (known and getattr(iterator, "_dataset_kind", None) == 0),
            "sampler": class_name(type(getattr(sampler, "sampler", sampler) if ordinary else sampler)),
            "augments": augments(dataset),
            "reads": self._method_of(dataset, "__getitem__" if iterator._dataset_kind == 0 else "__iter__"),
            "by_item": joined and getattr(iterator, "_dataset_kind", None) == 0,
            "objects": python_objects(dataset) if workers else None,
        }, self.of(dataset)  # fmt: skip

    def _method_of(self, dataset: Any, name: str) -> tuple[str, int, str] | None:
        """File, line and name of a method of the script's own; None for one of a library."""
        for kind in bases(type(dataset)):
            if name in namespace(kind):
                method = namespace(kind)[name]
                code = method.__code__ if type(method) is FunctionType else None
                if code is None or not self._own(code):
                    return None
                return code.co_filename, code.co_firstlineno, f"{class_name(kind)}.{name}"
        return None

    def remember(self, thing: object, frame: Any) -> None:
        """An optimizer, or the dataset of a loader, is made. frame: of the call."""
        frame = own_frame(frame, self._own)
        if frame is not None:
            self._found[id(thing)] = (frame.f_code.co_filename, frame.f_lineno)
            while len(self._found) > MOST_PLACES:
                del self._found[next(iter(self._found))]


def _is_tensors(iterator: Any) -> bool:
    """Whether an iterator takes single items of tensors that could be indexed in whole batches."""
    data, dataset = sys.modules["torch.utils.data"], iterator._dataset
    if type(dataset) is data.Subset:
        dataset = dataset.dataset
    return type(dataset) is data.TensorDataset and iterator._collate_fn is data.default_collate


def _items_of(iterator: Any) -> int | None:
    """The length of the dataset that an iterator reads, as a sampler of torch has asked for it; None if unknown.

    The samplers' generators have it among their variables: asking the dataset would run code of the script.
    """
    given = attribute(iterator, "_sampler_iter")
    batches = given.gi_frame if type(given) is GeneratorType else None
    if module_of(type(iterator._index_sampler)) != _SAMPLERS or batches is None:
        return None
    items = batches.f_locals.get("sampler_iter")
    if type(items) is type(iter([])):  # what a sampler of several ranks gives
        return len(items.__reduce__()[1][0]) or None  # that of an iterator at its end is empty
    if type(items) is type(iter(range(0))):
        of: Any = items.__reduce__()[1][0]
        return int(of.stop)  # some Pythons leave out what was given
    frame = items.gi_frame if type(items) is GeneratorType else None
    if frame is not None and frame.f_globals.get("__name__") == _SAMPLERS:
        found = frame.f_locals.get("n")
        return found if type(found) is int else None
    return None
