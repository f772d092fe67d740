"""What a process keeps, on request: what grows and who refers to it, and lines that allocate GPU memory.

A look goes through the objects that Python's garbage collector knows: which containers and tensors have grown since an
earlier look, and who has them. It runs no code of the script: types are compared exactly, and what is in an object is
read as the collector reads it. It keeps numbers, never an object.

On request, torch records which lines allocate GPU memory, which takes about 2 microseconds per allocation. Its snapshot
is written where running out of memory ends the script: the memory of the failed step is still in use then.
"""

from __future__ import annotations

import functools
import os as _os
import pickle
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from itertools import chain, compress, islice
from statistics import median
from typing import Any, Callable, NamedTuple

from . import MEMORY
from .apart import Dropped, gc, time
from .looks import Looks, attributes, class_name, file_of, key_of, namespace, own_frame, slots, variables
from .probes import Probes

# The processor time after which a look ends, with what it has found; and the search for names.
LOOK_NS, NAME_NS = 150_000_000, 150_000_000
# Objects from one look at the clock to the next.
_EACH = 2048
# Smaller containers and tensors are not remembered by the first look.
LEAST_LENGTH, LEAST_BYTES = 8, 1 << 16
# Containers whose elements are weighed, and those that are named.
WEIGHED, NAMED = 24, 3
# Newest elements of a container that are weighed, elements within an element, and containers within containers.
NEWEST, INSIDE, DEPTH = 12, 32, 4
# Levels from an object to a name, objects of a level, and elements of a dictionary in which a key is searched.
LEVELS, WIDTH, SEARCHED = 6, 32, 200_000
# Bytes of an object that is not looked into.
_PLAIN = 64


class _Kinds:
    """Some types. A class of the script may compute its hash, and how it compares."""

    def __init__(self, *kinds: type) -> None:
        self.keys = frozenset(map(key_of, kinds))

    def __contains__(self, kind: object) -> bool:
        return key_of(kind) in self.keys


_SEQUENCES = _Kinds(list, tuple, set, frozenset, deque)
_MAPPINGS = _Kinds(dict, OrderedDict, defaultdict, Counter)
GROWS = _Kinds(list, set, deque, dict, OrderedDict, defaultdict, Counter)
_SIZED = _Kinds(str, bytes, bytearray, int, float, complex, bool, type(None), range, slice)
# What belongs to the program rather than to its data.
_CODE = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType,
    types.MethodType,
)  # fmt: skip
_CACHE = functools._lru_cache_wrapper


class Place(NamedTuple):
    """kind: "global", "local", "attribute", "class", "closure", "default", "cache" or "", which is unknown.

    name: of the variable or attribute. owner: the function or class. file, line: where that, or the module, is.
    """

    kind: str = ""
    name: str = ""
    owner: str = ""
    file: str = ""
    line: int = 0


class Holders:
    """Every second look tells what has grown since the one before it.

    own: whether a code object is the user's own.
    """

    def __init__(self, looks: Looks, own: Callable[[Any], bool]) -> None:
        self._looks, self._own = looks, own
        # Of the types that are looked at.
        self._kinds = GROWS.keys | set(map(key_of, looks.kinds))
        # Of the first look: its step, lengths of containers by their id, and shapes of large tensors.
        self._first = -1
        self._lengths: dict[int, int] = {}
        self._shapes: set[tuple[int, ...]] = set()

    def look(self, step: int, frame: Any) -> dict[str, Any] | None:
        """The fields of an event of the record, see `HoldersEvent`; None where tensors cannot be looked at now.

        frame: of the training loop, or one that it has called.
        """
        if not self._looks.allowed():
            return None
        begin, spent = time.perf_counter_ns(), time.thread_time_ns()
        steps = step - self._first if 0 <= self._first < step else 0
        grown, tensors = self._scan(spent + LOOK_NS, steps > 0)
        rows = []
        if steps:
            rows = self._weighed(grown, tensors)
            self._first, self._lengths, self._shapes = -1, {}, set()
        else:
            self._first = step
        found = []
        variables = self._variables(frame) if rows else {}
        until = time.thread_time_ns() + NAME_NS
        for row in rows[:NAMED]:
            # `held` is a list that only this function knows: the search must not find it as an owner.
            held = row.pop("held")
            place = self._place(held, variables, until)
            held.clear()
            found.append({**row, **place._asdict()})
        rows.clear()
        total = Counter({shape: size for shape, (_, size) in tensors.items()})
        return {
            "step": step, "steps": steps, "ns": time.perf_counter_ns() - begin, "holders": found,
            "tensors": [
                [text_of(shape), tensors[shape][0], size] for shape, size in total.most_common(5) if size
            ],
        }  # fmt: skip

    def _scan(
        self, until: int, again: bool
    ) -> tuple[list[tuple[int, int, Any]], dict[tuple[int, ...], tuple[int, int]]]:
        """(containers and tensors with what they have grown by, number and bytes of tensors by shape)."""
        looks, lengths, shapes = self._looks, self._lengths, self._shapes
        grown: list[tuple[int, int, Any]] = []
        large: dict[tuple[int, ...], Any] = {}
        tensors: dict[tuple[int, ...], tuple[int, int]] = {}
        seen: set[int] = set()
        # What is newest comes first, as far as the collector knows.
        young, old = (
            [*gc.get_objects(generation=0), *gc.get_objects(generation=1)],
            gc.get_objects(generation=2),
        )
        old.reverse()
        ours = {key_of(one) for one in (young, old, lengths, shapes, tensors, grown, large, seen)}
        wanted = map(self._kinds.__contains__, map(key_of, map(type, chain(young, old))))
        for place, item in enumerate(compress(chain(young, old), wanted)):
            if looks.is_tensor(item):
                shape = looks.shape(item)
                if shape is not None:
                    storage, size = self._storage(item)
                    number, bytes_ = tensors.get(shape, (0, 0))
                    tensors[shape] = number + 1, bytes_ + (0 if storage in seen else size)
                    seen.add(storage)
                    if size >= LEAST_BYTES and shape not in shapes:
                        large[shape] = item
            elif (length := len(item)) >= LEAST_LENGTH and key_of(item) not in ours:
                if not again:
                    lengths[key_of(item)] = length
                elif (before := lengths.get(key_of(item))) is not None and length > before:
                    grown.append((length - before, length, item))
            if not place % _EACH and time.thread_time_ns() > until:
                break
        young.clear()
        old.clear()
        if again:
            for shape, item in large.items():
                if (old := _smaller(shape, shapes)) is not None:
                    before, after = next((a, b) for a, b in zip(old, shape) if a != b)
                    grown.append((after - before, after, item))
        else:
            shapes.update(large)
        large.clear()
        return grown, tensors

    def _storage(self, tensor: Any) -> tuple[int, int]:
        """(address, bytes) of a tensor's storage, which a view of a part of it keeps as a whole."""
        with self._looks.silent():
            if tensor.layout is not _strided() or tensor.device.type == "meta":
                return key_of(tensor), 0
            storage = tensor.untyped_storage()
            return storage.data_ptr() or key_of(tensor), storage.nbytes()

    # Weighing.

    def _weighed(self, grown: list[tuple[int, int, Any]], tensors: Any) -> list[dict[str, Any]]:
        """The containers that have grown by most bytes, each in a list of its own, "held"."""
        grown.sort(key=lambda one: -one[0])
        # Few but large elements weigh as much as many small ones.
        rows: list[dict[str, Any]] = []
        for by, length, item in grown[: 4 * WEIGHED]:
            if self._looks.is_tensor(item):
                shape, size = self._looks.shape(item) or (), self._storage(item)[1]
                rows.append({
                    "type": "tensor", "length": length, "grown": by, "bytes": size * by // length,
                    "holds": text_of(shape), "graphs": self._has_graph(item), "limit": None, "held": [item],
                })  # fmt: skip
                continue
            newest, seen = list(_newest(item))[:NEWEST], {key_of(item)}
            sizes = [self._bytes(element, DEPTH, seen) for element in newest]
            each = median(sizes) if sizes else 0
            key_bytes = 100 if type(item) in _MAPPINGS else 8
            rows.append({
                "type": class_name(type(item)), "length": length, "grown": by,
                "bytes": int((each + key_bytes) * by), "holds": self.described(newest[0]) if newest else "",
                "graphs": any(self._has_graph(one) for one in newest),
                "limit": item.maxlen if type(item) is deque else None, "held": [item],
            })  # fmt: skip
            del newest
        grown.clear()
        rows.sort(key=lambda row: -row["bytes"])
        return rows

    def _has_graph(self, value: Any) -> bool:
        tensor = self._looks.first_tensor(value)
        if tensor is None:
            return False
        with self._looks.silent():
            return bool(tensor.requires_grad and not tensor.is_leaf)

    def _bytes(self, value: Any, depth: int, seen: set[int]) -> int:
        """About the bytes that are freed with a value, as far as it is known to have them alone."""
        kind = type(value)
        if kind in _SIZED:
            return sys.getsizeof(value)
        if key_of(value) in seen or (issubclass(kind, _CODE) and kind is not types.FunctionType):
            return 0
        seen.add(key_of(value))
        if self._looks.is_tensor(value):
            address, size = self._storage(value)
            if address in seen:
                return _PLAIN
            seen.add(address)
            return _PLAIN + size
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind is numpy.ndarray:
            base = value.base
            whole = base if type(base) is numpy.ndarray else value
            known = key_of(whole) in seen and whole is not value
            seen.add(key_of(whole))
            return _PLAIN if known else _PLAIN + int(whole.nbytes)
        if not depth:
            return _PLAIN
        own = _PLAIN
        if kind in _SEQUENCES or kind in _MAPPINGS:
            number, children, own = len(value), list(islice(_newest(value), INSIDE)), sys.getsizeof(value)
        elif kind is types.FunctionType:  # without its module
            number, children = 1, [value.__closure__, value.__defaults__, value.__kwdefaults__]
        else:
            children = gc.get_referents(value)
            number = len(children)
        inner = sum(self._bytes(child, depth - 1, seen) for child in children[:INSIDE])
        return own + int(inner * max(number / INSIDE, 1))

    def described(self, value: Any, depth: int = 3) -> str:
        """ "tensor 4 x 512", "dict" or the name of a class. depth: of lists in lists, which may contain themselves."""
        if self._looks.is_tensor(value):
            return text_of(self._looks.shape(value) or ())
        kind = type(value)
        if depth and (kind is tuple or kind is list) and 0 < len(value) <= INSIDE:
            return f"{class_name(kind)} of {self.described(value[0], depth - 1)}"
        return class_name(kind)

    # Naming.

    def _place(self, held: list[Any], variables: dict[int, Place], until: int) -> Place:
        """Who refers to the only element of `held`: the nearest variable or attribute that a user can find."""
        level, ours = [held[0]], {key_of(held), key_of(variables)}
        for _ in range(LEVELS):
            for one in level:
                if (found := variables.get(key_of(one))) is not None:
                    return found
            if time.thread_time_ns() > until:
                break
            ours |= {key_of(level), *map(key_of, level)}
            referrers = [
                one
                for one in gc.get_referrers(*level)
                if key_of(one) not in ours and type(one) is not types.FrameType
            ]
            ours.add(key_of(referrers))
            for value in level:
                for one in referrers:
                    if (place := self._named(value, one)) is not None:
                        return place
            level = [one for one in referrers if not issubclass(type(one), _CODE)][:WIDTH]
            del referrers
            if not level:
                break
        return Place()

    def _variables(self, frame: Any) -> dict[int, Place]:
        """The variables of the functions that run, and of their modules, by the key of their value."""
        found: dict[int, Place] = {}
        frame = own_frame(frame, self._own)
        while frame is not None:
            code = frame.f_code
            if code.co_flags & _OPTIMIZED:
                for name, key in _locals(frame):
                    found.setdefault(
                        key, Place("local", name, code.co_name, code.co_filename, code.co_firstlineno)
                    )
            for name, value in list(frame.f_globals.items()) if type(frame.f_globals) is dict else ():
                if type(name) is str and type(value) not in _SIZED:
                    found.setdefault(key_of(value), Place("global", name, "", code.co_filename, 0))
            frame = own_frame(frame.f_back, self._own)
        return found

    def _named(self, value: Any, referrer: Any) -> Place | None:
        """The name that a referrer has for a value, if it is a name at all."""
        kind = type(referrer)
        if kind is _CACHE:
            wrapped = getattr(referrer, "__wrapped__", None)
            code = getattr(wrapped, "__code__", None) if type(wrapped) is types.FunctionType else None
            if code is not None:
                return Place("cache", code.co_name, code.co_name, code.co_filename, code.co_firstlineno)
            return None
        if kind is types.CellType or kind is tuple:
            return self._of_function(value, referrer)
        if kind is types.GeneratorType:
            inner = referrer.gi_frame
            names = (
                [name for name, key in _locals(inner) if key == key_of(value)] if inner is not None else []
            )
            if names:
                code = inner.f_code
                return Place("local", names[0], code.co_name, code.co_filename, code.co_firstlineno)
            return None
        if kind is dict:
            return self._ofnamespace(value, referrer)
        if kind in GROWS or kind in _SEQUENCES or issubclass(kind, _CODE):
            return None
        names = _keys(attributes(referrer), value) or slots(referrer, value)
        return self._attribute(referrer, names[0]) if names else None

    def _of_function(self, value: Any, referrer: Any) -> Place | None:
        """A variable that a function has closed over, or the default of an argument."""
        for level in (gc.get_referrers(referrer),):
            for one in level:
                if type(one) is types.FunctionType:
                    code, defaults = one.__code__, one.__defaults__
                    if referrer is defaults:
                        arguments = code.co_varnames[: code.co_argcount][-len(defaults) :]
                        name = next((n for n, v in zip(arguments, defaults) if v is value), "")
                        return Place("default", name, code.co_name, code.co_filename, code.co_firstlineno)
                elif type(referrer) is types.CellType and type(one) is tuple:
                    for function in gc.get_referrers(one):
                        if type(function) is types.FunctionType and function.__closure__ is one:
                            code = function.__code__
                            names = [n for n, c in zip(code.co_freevars, one) if c is referrer]
                            if names:
                                return Place(
                                    "closure", names[0], code.co_name, code.co_filename, code.co_firstlineno
                                )
        return None

    def _ofnamespace(self, value: Any, names: dict[Any, Any]) -> Place | None:
        """A variable of a module, or an attribute: the dictionary is that of a module, a class or an object."""
        keys = _keys(names, value)
        if not keys:
            return None
        for module in list(sys.modules.values()):
            if type(module) is types.ModuleType and module.__dict__ is names:
                return Place("global", keys[0], "", getattr(module, "__file__", None) or "", 0)
        for owner in gc.get_referrers(names):
            kind = type(owner)
            if kind is types.FunctionType and owner.__globals__ is names:
                return Place("global", keys[0], "", owner.__code__.co_filename, 0)
            if issubclass(kind, type) and namespace(owner).get(keys[0]) is value:
                return Place("class", keys[0], class_name(owner), file_of(owner), 0)
            if kind not in GROWS and kind not in _SEQUENCES and attributes(owner) is names:
                return self._attribute(owner, keys[0])
        return None

    def _attribute(self, owner: Any, name: str) -> Place:
        kind = type(owner)
        return Place("attribute", name, class_name(kind), file_of(kind), 0)


_OPTIMIZED = 0x01  # CO_OPTIMIZED: the code of a function, whose variables are in no dictionary


@functools.lru_cache(maxsize=1)
def _strided() -> Any:
    return sys.modules["torch"].strided


def text_of(shape: tuple[int, ...]) -> str:
    """ "tensor 4 x 512"."""
    return f"tensor {' x '.join(map(str, shape))}" if shape else "tensor of one value"


def _smaller(shape: tuple[int, ...], others: set[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The largest of the other shapes that differs in one size only, which is smaller there."""
    alike = [
        other
        for other in others
        if len(other) == len(shape)
        and sum(a != b for a, b in zip(shape, other)) == 1
        and all(a >= b for a, b in zip(shape, other))
    ]
    return max(alike, default=None)


def _newest(value: Any) -> Iterator[Any]:
    """The elements of a container, the newest first where it has an order."""
    kind = type(value)
    if kind in _MAPPINGS:
        return iter(list(islice(reversed(dict.values(value)), INSIDE)))
    if kind is list or kind is tuple:
        return iter(value[: -INSIDE - 1 : -1])
    if kind is deque:
        return islice(reversed(value), INSIDE)
    return islice(value, INSIDE)


def _keys(names: Any, value: Any) -> list[str]:
    """The names under which a dictionary has a value."""
    if type(names) not in _MAPPINGS or len(names) > SEARCHED:
        return []
    return [key for key, one in list(dict.items(names)) if one is value and type(key) is str]


def _locals(frame: Any) -> list[tuple[str, int]]:
    """The variables of a function that runs, with the keys of their values."""
    return [(name, key_of(value)) for name, value in variables(frame).items() if type(value) not in _SIZED]


# Out of memory on a GPU where torch does not raise its own OutOfMemoryError, because a library, the driver or the
# compiler allocates. A pattern, in any case of its letters.
OF_GPU = (
    r"\b(?:CUDA|HIP|cuDNN|MIOpen|NCCL|RCCL)\b[^\n]{0,40}\bout of memory|\bfailed to allocate (?:GPU|device) memory"
    r"|\b(?:CU|HIP)[A-Z]+_(?:STATUS_)?ALLOC_FAILED|CUDNN_STATUS_\w*ALLOC(?:ATION)?_FAILED"
    r"|rocblas_status_memory_error|rocsparse_status_memory_error|miopenStatusAllocFailed"
    r"|\b(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)\b|\b(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY\b"
)
# The same on the host, also where torch raises a plain RuntimeError.
OF_HOST = r"can't allocate memory|not enough memory|DefaultCPUAllocator|Cannot allocate memory"
# The start of the names of snapshots.
NAME = "memory"
# Entries of the history that are kept, the newest ones.
ENTRIES = 20_000


class Allocations:
    """Of this process."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._folder = _os.environ.get(MEMORY, "")
        self._recording = False

    def begin(self, probes: Probes) -> None:
        """Record from the moment on at which the script uses CUDA."""

        def initialised(_probe: Any, zero: int) -> int:
            with Dropped():
                self._record()
            return zero

        if self._folder:
            probes.put(self._torch.cuda._lazy_init, None, initialised, False)

    def failed(self, error: Any) -> None:
        """This error ends the script. Where the GPU's memory ran out, write the snapshot."""
        if not self._recording:
            return
        with Dropped():
            if not self._of_gpu(error):
                return
            body = self._torch.cuda.memory._snapshot()
            rank = _os.environ.get("RANK", "")
            place = _os.path.join(
                self._folder, f"{NAME}-{rank}.pickle" if rank.isdigit() else f"{NAME}.pickle"
            )
            unfinished = f"{place}.{_os.getpid()}.tmp"
            with open(unfinished, "wb") as file:
                pickle.dump(body, file)
                file.flush()
                _os.fsync(file.fileno())
            _os.replace(unfinished, place)

    def _of_gpu(self, error: Any) -> bool:
        """Whether a GPU's memory ran out. A class of the script is not asked for its text: that would run its code."""
        if isinstance(error, self._torch.OutOfMemoryError):
            return True
        torchs = RuntimeError, getattr(self._torch, "AcceleratorError", RuntimeError)
        text = error.args[0] if type(error) in torchs and error.args else None
        if type(text) is not str:
            return False
        import re  # the script has ended

        return re.search(OF_GPU, text, re.IGNORECASE) is not None

    def _record(self) -> None:
        if not self._recording and self._torch.cuda.is_initialized():
            self._recording = True
            record(self._torch.cuda.memory)


def record(memory: Any) -> None:
    """Have torch record a Python stack for each allocation. memory: torch.cuda.memory."""
    memory._record_memory_history("all", context="alloc", stacks="python", max_entries=ENTRIES)
