"""Attributes, variables and functions, found without running code of the script, such as properties and metaclasses."""

from __future__ import annotations

import sys
import types
from dis import get_instructions
from inspect import CO_OPTIMIZED
from typing import Any, Callable

from .exceptions import Dropped
from .library import os

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
    """The function with this code, also a method of a class of the module; None if it is not found.

    names: the globals of its module. Before Python 3.11, a method in a class within a class is not found.
    """
    name = code.co_name
    outer, _, _ = getattr(code, "co_qualname", "").rpartition(".")
    if outer:
        holders = [_class_named(outer.split("."), names)]
    else:
        holders = [value for value in list(names.values()) if issubclass(type(value), type)]
    found = [names.get(name), *(namespace(kind).get(name) for kind in holders if kind is not None)]
    functions = (one.__func__ if type(one) in (staticmethod, classmethod) else one for one in found)
    return next((one for one in functions if type(one) is types.FunctionType and one.__code__ is code), None)


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
