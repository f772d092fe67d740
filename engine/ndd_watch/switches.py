"""How the changes of the table in `changes` are made without an edit, and how they are read back.

A `Change` can be switched while the script trains. An `AtStart` has to be there before the script creates its loader or
its optimizer. A `Global` is a switch of torch for the whole process, a `Loader` an argument of a DataLoader: runs of
our own make these by their rows, too.
"""

from __future__ import annotations

import importlib
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable

from .apart import gc
from .looks import groups_of

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class Switch:
    """requested: as text. `switch` turns it on and off; `applied` returns (value, in effect, how that is known)."""

    at_start = False
    most_probes = 0

    def __init__(self, value: Any, observer: Any) -> None:
        self.value, self.requested = value, str(value)
        self.observer = observer
        self.torch: Any = sys.modules["torch"]
        self.done = 0

    def switch(self, on: bool) -> None:
        """Turn it on or off."""

    def probes(self) -> Iterator[None]:
        """Steps that it needs before it can be switched, at most `most_probes`: each turn is one."""
        return iter(())

    def peak_bytes(self, on: bool) -> int | None:
        """The peak memory of a step with or without it, if its probe has measured that."""
        return None

    def applied(self) -> tuple[str, bool | None, str]:
        """(value in effect, whether it is the requested one, how that is known)."""
        return self.requested, None, ""

    def found(self) -> tuple[str, bool | None, str]:
        """The same where it is not made from here: the script itself makes it, after an edit."""
        return self.requested, None, ""


class AtStart(Switch):
    """It is switched on once, before the script begins."""

    at_start = True


class Global(Switch):
    """A switch of torch for the whole process. on_gpu: whether it concerns work on a GPU only."""

    on_gpu = False

    def get(self) -> Any:
        """The value in effect."""

    def set(self, value: Any) -> None:
        """Put a value into effect."""

    def switch(self, on: bool) -> None:
        if not self.done:
            self.before, self.done = self.get(), 1
        self.set(self.value if on else self.before)

    def applied(self) -> tuple[str, bool | None, str]:
        found = self.get()
        return str(found).lower(), found == self.value, "read back from torch"

    def found(self) -> tuple[str, bool | None, str]:
        return self.applied()


class Threads(Global):
    """Set while the script trains."""

    def get(self) -> int:
        return int(self.torch.get_num_threads())

    def set(self, value: int) -> None:
        self.torch.set_num_threads(value)


class Autocast(Switch):
    """Autocast around the modules that the script calls; what leaves them is fp32 again, so that its loss is."""

    def switch(self, on: bool) -> None:
        around = self.observer.modules.around
        if on and self._around not in around:
            around.append(self._around)
        elif not on and self._around in around:
            around.remove(self._around)

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        torch, dtype = self.torch, getattr(self.torch, _DTYPES[self.value])

        def inside(module: Any, *args: Any, **kwargs: Any) -> Any:
            device = next((item.device.type for item in module.parameters()), None)
            if device is None or not torch.is_grad_enabled():
                return call(module, *args, **kwargs)
            with torch.autocast(device, dtype=dtype):
                found = call(module, *args, **kwargs)
            self.done += 1
            return _upcast(torch, found, dtype)

        return inside

    def applied(self) -> tuple[str, bool | None, str]:
        if self.done and self.value == "fp16" and not self.observer.steps.finite.scales:
            return (
                "fp16 without a gradient scaler",
                False,
                "small gradients become zero: use bf16, or add a scaler",
            )
        return (self.requested, True, f"{self.done:,} calls of modules under autocast") if self.done else (
            "off", False, "no module with parameters was called outermost"
        )  # fmt: skip


def _upcast(torch: Any, found: Any, dtype: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return found.float() if found.dtype is dtype else found
    if isinstance(found, (list, tuple)):
        values = [_upcast(torch, item, dtype) for item in found]
        return type(found)(*values) if hasattr(found, "_fields") else type(found)(values)
    if isinstance(found, dict):
        for key in found:
            found[key] = _upcast(torch, found[key], dtype)
    return found


class Tf32(Switch):
    """Set while the script trains.

    They are switched through the older of torch's two APIs, which sets the newer one (`fp32_precision`, torch 2.9) as
    well. A script that used the newer one cannot read the older one: torch raises an error.
    """

    def switch(self, on: bool) -> None:
        if not self.done:
            self.before, self.done = self._older(), 1
            self._newer = [(place, place.fp32_precision) for place in self._places()]
        self.torch.set_float32_matmul_precision(("high" if self.value else "highest") if on else self.before)
        if not on:
            for place, before in self._newer:
                place.fp32_precision = before

    def applied(self) -> tuple[str, bool | None, str]:
        places = self._places()
        found = places[0].fp32_precision == "tf32" if places else self._older() != "highest"
        return str(found).lower(), found == self.value, "read back from torch"

    def found(self) -> tuple[str, bool | None, str]:
        return self.applied()

    def _older(self) -> str:
        try:
            return str(self.torch.get_float32_matmul_precision())
        except RuntimeError:  # the newer API turned TF32 on, and nothing the older one
            return "highest"

    def _places(self) -> list[Any]:
        """What `set_float32_matmul_precision` sets in the newer API; [] where torch lacks it."""
        backends = self.torch.backends
        places = (backends.cuda.matmul, getattr(backends.mkldnn, "matmul", None))
        return [place for place in places if hasattr(place, "fp32_precision")]


class CudnnBenchmark(Global, AtStart):
    """Set from the start.

    torch keeps the algorithm that it has chosen for a shape, whatever the switch says later: `run_single_conv` in
    cudnn/Conv_v8.cpp looks into one cache.
    """

    on_gpu = True

    def get(self) -> bool:
        return bool(self.torch.backends.cudnn.benchmark)

    def set(self, value: bool) -> None:
        self.torch.backends.cudnn.benchmark = value


class FlushDenormal(Global, AtStart):
    """Set from the start: threads take it from the one that creates them."""

    def get(self) -> bool:
        return self._flushes(1)

    def set(self, value: bool) -> None:
        self.torch.set_flush_denormal(value)

    def applied(self) -> tuple[str, bool | None, str]:
        found = self._flushes(1 << 20)  # in all threads
        return str(found).lower(), found == self.value, "a product of denormal numbers was computed"

    def _flushes(self, count: int) -> bool:
        return not bool((self.torch.full((count,), 1e-40) * 1).any())


# What a fused optimizer of torch sets when it is made, and `GradScaler.step` asks for.
_UNSCALES = "_step_supports_amp_scaling"


class Implementation(Switch):
    """The flags of the parameter groups, which every step reads again.

    A fused kernel reads the counter of steps where its parameter is, and would follow a pointer of the host on a GPU
    (`_init_group` of torch.optim.Adam creates it by the flags). So counters move there and back with the flag. A
    gradient scaler leaves unscaling to an optimizer that says so, which only fused kernels can do.
    """

    def __init__(self, value: Any, observer: Any) -> None:
        super().__init__(value, observer)
        # Optimizers by id: the flags of their groups, and whether a scaler leaves unscaling to them; None: unsaid.
        self._flags: dict[int, tuple[Any, list[tuple[Any, Any]], bool | None]] = {}

    def switch(self, on: bool) -> None:
        for optimizer in self.observer.steps.optimizers():
            if id(optimizer) not in self._flags and "foreach" in optimizer.param_groups[0]:
                flags = [(group.get("foreach"), group.get("fused")) for group in optimizer.param_groups]
                self._flags[id(optimizer)] = optimizer, flags, optimizer.__dict__.get(_UNSCALES)
        for optimizer, flags, unscales in self._flags.values():
            if "fused" in optimizer.param_groups[0]:
                if on or unscales is not None:
                    setattr(optimizer, _UNSCALES, self.value == "fused" if on else unscales)
                else:
                    optimizer.__dict__.pop(_UNSCALES, None)
            for group, (foreach, fused) in zip(optimizer.param_groups, flags):
                group["foreach"] = self.value == "foreach" if on else foreach
                if "fused" in group:
                    group["fused"] = self.value == "fused" if on else fused
                    self._place_counters(optimizer, group)

    def _place_counters(self, optimizer: Any, group: dict[str, Any]) -> None:
        """Move the counters of steps to where the optimizer would create them."""
        beside = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            counter = state.get("step")
            if isinstance(counter, self.torch.Tensor):
                device = parameter.device if beside else self.torch.device("cpu")
                if counter.device != device:
                    state["step"] = counter.to(device)

    def applied(self) -> tuple[str, bool | None, str]:
        if not self._flags:
            return "unchanged", False, "no optimizer of torch has this choice"
        return self.found()

    def found(self) -> tuple[str, bool | None, str]:
        groups = [group for one in self.observer.steps.optimizers() for group in groups_of(one)]
        known = {_implementation(group) for group in groups if "foreach" in group}
        return (
            ", ".join(sorted(known)) or "unchanged",
            known == {self.value},
            "read from the parameter groups",
        )


def _implementation(group: dict[str, Any]) -> str:
    if group.get("fused") is True:
        return "fused"
    return {True: "foreach", False: "loop"}.get(group["foreach"], "default")


class Collections(Switch):
    """Set while the script trains: automatic collection is off, and steps collect."""

    def switch(self, on: bool) -> None:
        self.observer.steps.garbage.schedule(int(self.value) if on else 0)

    def applied(self) -> tuple[str, bool | None, str]:
        if bool(self.value) == gc.isenabled():  # some loops turn it on by themselves
            return "0" if gc.isenabled() else "off", False, "read back from Python's garbage collector"
        return self.requested, True, "automatic collection is read back from Python's garbage collector"

    def found(self) -> tuple[str, bool | None, str]:
        return self.applied()


class Loader(AtStart):
    """An argument of every `DataLoader` of the script, from its start."""

    # The argument, its place after the dataset (99 for one that is given by name only), and what `Places` calls it.
    name, place, fact = "", 99, ""
    needs_workers = False

    def switch(self, on: bool) -> None:
        loaders = importlib.import_module("torch.utils.data")
        kind, name, place, value = loaders.DataLoader, self.name, self.place, self.value
        original = kind.__init__
        change = self

        def __init__(loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            if len(args) < place:
                kwargs[name] = value
            else:
                args = (*args[: place - 1], value, *args[place:])
            if name == "num_workers" and not value:
                # They need workers.
                kwargs.pop("prefetch_factor", None)
                kwargs.pop("persistent_workers", None)
            original(loader, dataset, *args, **kwargs)
            change.done += 1

        kind.__init__ = __init__

    def applied(self) -> tuple[str, bool | None, str]:
        if not self.done:
            return "unchanged", False, "the script makes no DataLoader"
        return self.found()

    def found(self) -> tuple[str, bool | None, str]:
        if not self.observer.loader:
            return "unchanged", False, "the training reads no DataLoader"
        found = self.observer.loader.get(self.fact)
        return str(found).lower(), found == self.value, "read from the loader of the training"


class Workers(Loader):
    """Processes that load batches."""

    name, place, fact = "num_workers", 5, "workers"


class PinMemory(Loader):
    """Batches in pinned memory."""

    name, place, fact = "pin_memory", 7, "pin_memory"


class Prefetch(Loader):
    """Batches that each worker loads ahead."""

    name, fact = "prefetch_factor", "prefetch"
    needs_workers = True


class InOrder(Loader):
    """Batches in the order of the data, or as soon as a worker has made them."""

    name = fact = "in_order"
    needs_workers = True


class Persistent(Loader):
    """Workers that stay between epochs."""

    name, fact = "persistent_workers", "persistent"
    needs_workers = True


class NonBlocking(Switch):
    """Copies from pinned host memory to the GPU do not wait."""

    def switch(self, on: bool) -> None:
        kind = self.torch.Tensor
        if not hasattr(self, "_before"):
            self._before = {name: kind.__dict__.get(name, getattr(kind, name)) for name in ("to", "cuda")}
            self._ours = {name: self._asynchronous(original) for name, original in self._before.items()}
        for name, function in (self._ours if on else self._before).items():
            setattr(kind, name, function)

    def _asynchronous(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu" and tensor.is_pinned() and len(args) < 2:
                kwargs["non_blocking"] = True
                self.done += 1
            return original(tensor, *args, **kwargs)

        return copy

    def applied(self) -> tuple[str, bool | None, str]:
        if not self.done:
            return "false", False, "nothing is copied from pinned memory"
        return "true", True, f"{self.done} copies"


_BACKENDS = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}


class Attention(Switch):
    """Set while the script trains."""

    def switch(self, on: bool) -> None:
        cuda = self.torch.backends.cuda
        if not self.done:
            self.before = {name: getattr(cuda, f"{name}_sdp_enabled")() for name in self._known()}
            self.done = 1
        wanted = _BACKENDS.get(self.value)
        for name, before in self.before.items():
            getattr(cuda, f"enable_{name}_sdp")(name == wanted if on and wanted else before)

    def _known(self) -> list[str]:
        cuda = self.torch.backends.cuda
        return [name for name in _BACKENDS.values() if hasattr(cuda, f"enable_{name}_sdp")]

    def applied(self) -> tuple[str, bool | None, str]:
        cuda = self.torch.backends.cuda
        enabled = [name for name in self._known() if getattr(cuda, f"{name}_sdp_enabled")()]
        return ", ".join(enabled), enabled == [_BACKENDS.get(self.value)], "read back from torch"


class ChannelsLast(AtStart):
    """The modules that the script calls and the images given to them, from its start."""

    def switch(self, on: bool) -> None:
        self._seen: dict[int, Any] = {}
        self.observer.modules.around.append(self._around)

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        layout = self.torch.channels_last

        def inside(module: Any, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in self._seen:
                self._seen[id(module)] = module
                module.to(memory_format=layout)
            return call(module, *(self._images(item, layout) for item in args), **kwargs)

        return inside

    def _images(self, item: Any, layout: Any) -> Any:
        if not isinstance(item, self.torch.Tensor) or item.dim() != 4:
            return item
        self.done += 1
        return item.contiguous(memory_format=layout)

    def applied(self) -> tuple[str, bool | None, str]:
        if not self.done:
            return "false", False, "no module is called with images"
        return "true", True, f"{self.done:,} batches in this format"

    def found(self) -> tuple[str, bool | None, str]:
        layout, looks = self.torch.channels_last, self.observer.looks
        groups = [group for one in self.observer.steps.optimizers() for group in groups_of(one)]
        weights = [
            one for group in groups for one in group["params"] if looks.is_tensor(one) and one.dim() == 4
        ]
        # One of 1 x 1 has both formats.
        kept = any(one.is_contiguous(memory_format=layout) and not one.is_contiguous() for one in weights)
        return str(kept).lower(), kept, "read from the parameters of the optimizer"


class Compile(AtStart):
    """`module.compile()` at the first call of each outermost module, from its start."""

    def switch(self, on: bool) -> None:
        self._seen: dict[int, Any] = {}
        self.observer.modules.around.append(self._around)

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        torch = self.torch
        options = {} if self.value in (True, "default") else {"mode": self.value}

        def inside(module: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                id(module) not in self._seen
                and torch.is_grad_enabled()
                and next(module.parameters(), None) is not None
            ):
                self._seen[id(module)] = module
                module.compile(**options)
            return call(module, *args, **kwargs)

        return inside

    def applied(self) -> tuple[str, bool | None, str]:
        if not self._seen:
            return "off", False, "no module with parameters was called outermost"
        return self.found()

    def found(self) -> tuple[str, bool | None, str]:
        utilities = sys.modules.get("torch._dynamo.utils")
        compiled = utilities is not None and bool(utilities.counters["frames"].get("ok"))
        return (
            (self.requested if compiled else "off"),
            compiled,
            "read from torch's count of compiled functions",
        )


class Gather(AtStart):
    """Batches of a TensorDataset, or of a Subset of one, by one indexing operation instead of item by item."""

    def switch(self, on: bool) -> None:
        data = importlib.import_module("torch.utils.data")
        kind: Any = importlib.import_module("torch.utils.data._utils.fetch")._MapDatasetFetcher
        original, change = kind.fetch, self

        def fetched(fetcher: Any, index: Any) -> Any:
            dataset, places = fetcher.dataset, index
            plain = fetcher.auto_collation and fetcher.collate_fn is data.default_collate
            if plain and type(dataset) is data.Subset:
                dataset, places = dataset.dataset, [dataset.indices[place] for place in index]
            if not plain or type(dataset) is not data.TensorDataset:
                return original(fetcher, index)
            change.done += 1
            return [tensor[places] for tensor in dataset.tensors]

        kind.fetch = fetched

    def applied(self) -> tuple[str, bool | None, str]:
        if self.done:
            return self.requested, True, f"{self.done:,} batches are gathered"
        loader = self.observer.loader
        kind = loader.get("dataset") if loader.get("workers") else None
        if kind not in ("TensorDataset", "Subset"):
            return "item", False, "the script reads no TensorDataset item by item"
        return (
            self.requested,
            True if kind == "TensorDataset" else None,
            "given to the fetchers of the workers",
        )


# Items that are read twice, and seconds that reading all of them once may take.
CHECKED, MOST_S = 16, 30.0
# Datasets that are kept: a script may make a new one in every epoch.
MOST_KEPT = 4


class Cache(AtStart):
    """All items of a map-style dataset, read before training if they are the same twice; forked workers share them."""

    def __init__(self, value: Any, observer: Any) -> None:
        super().__init__(value, observer)
        # id of a dataset -> (the dataset, its items); the dataset keeps its id taken.
        self._cached: dict[int, tuple[Any, list[Any]]] = {}
        self._refused = ""

    def switch(self, on: bool) -> None:
        kind: Any = importlib.import_module("torch.utils.data._utils.fetch")._MapDatasetFetcher
        original = kind.fetch
        change = self

        def fetched(fetcher: Any, index: Any) -> Any:
            items = change._items(fetcher.dataset) if fetcher.auto_collation else None
            if items is None:
                return original(fetcher, index)
            return fetcher.collate_fn([items[place] for place in index])

        kind.fetch = fetched
        iterator: Any = importlib.import_module("torch.utils.data.dataloader")._MultiProcessingDataLoaderIter
        begins = iterator.__init__

        def begin(made: Any, loader: Any) -> None:
            if loader._auto_collation and not hasattr(loader.dataset, "__iter__"):
                change._before_workers(loader)
            begins(made, loader)

        iterator.__init__ = begin

    def _before_workers(self, loader: Any) -> None:
        """Workers that are forked have the items that are read before."""
        context = loader.multiprocessing_context or sys.modules["multiprocessing"]
        method = context.get_start_method()
        if method == "fork":
            self._items(loader.dataset)
        elif self.torch.is_grad_enabled() and not self._refused:
            self._refused = f"its workers are started by {method}: only those that are forked share the items"

    def applied(self) -> tuple[str, bool | None, str]:
        if not self._refused and self._cached:
            for dataset, items in self._cached.values():
                self._check(dataset, {place: items[place] for place in checked_places(len(items))})
        if self._refused or not self._cached:
            return "false", False, self._refused or "the script reads no map-style dataset in batches"
        return "true", True, f"{sum(len(items) for _, items in self._cached.values())} items are cached"

    def found(self) -> tuple[str, bool | None, str]:
        kept = self.observer.loader.get("dataset") == "list"
        return str(kept).lower(), kept, "the training reads a list of items"

    def _items(self, dataset: Any) -> list[Any] | None:
        """The items of a dataset; None if they are not cached."""
        if self._refused:
            return None
        known = self._cached.get(id(dataset))
        if known is None:
            if not self.torch.is_grad_enabled() or self.torch.utils.data.get_worker_info() is not None:
                return None  # of an evaluation, or in a worker that would read all of them for itself
            known = dataset, self._read(dataset)
            if self._refused:
                return None
            self._cached[id(dataset)] = known
            while len(self._cached) > MOST_KEPT:
                del self._cached[next(iter(self._cached))]
        return known[1]

    def _read(self, dataset: Any) -> list[Any]:
        """All items, unless they differ when they are read twice or take too long."""
        count = len(dataset)
        state = _random_state(self.torch)
        t = time.perf_counter()
        first = {place: dataset[place] for place in checked_places(count)}
        each_s = (time.perf_counter() - t) / max(len(first), 1)
        if each_s * count > MOST_S:
            self._refused = (
                f"reading all {count:,} items once would take {each_s * count:.0f} s (at most {MOST_S:.0f})"
            )
        self._check(dataset, first)
        places = range(0 if self._refused else count)
        items = [first[place] if place in first else dataset[place] for place in places]
        _set_random_state(self.torch, state)
        return items

    def _check(self, dataset: Any, items: dict[int, Any]) -> None:
        """Whether items are still what the dataset returns."""
        for place, item in items.items():
            if not same_item(self.torch, item, dataset[place]):
                self._refused = f"item {place} differs when it is read again"
                return


def checked_places(count: int) -> list[int]:
    """The items that are read twice: from all parts of the data, which may be sorted by class."""
    return sorted({place * count // CHECKED for place in range(CHECKED)} if count else ())


def same_item(torch: Any, one: Any, other: Any, unknown: bool = False) -> bool:
    """Whether two items are equal, NaN to itself. unknown: the answer for values that are neither numbers nor text."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.shape != other.shape or one.dtype is not other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict):
        keys = isinstance(other, dict) and one.keys() == other.keys()
        return keys and all(same_item(torch, one[key], other[key], unknown) for key in one)
    if isinstance(one, (list, tuple)):
        kind = type(one) is type(other) and len(one) == len(other)
        return kind and all(same_item(torch, a, b, unknown) for a, b in zip(one, other))
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, (str, bytes, int, float)):
        return bool(one == other or (one != one and other != other))
    return unknown or one is other


def _random_state(torch: Any) -> Any:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy is not None else None


def _set_random_state(torch: Any, state: Any) -> None:
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])
