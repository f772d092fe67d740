"""Calls the factory of the configured workload, reads the parts that it returned, and prepares their data.

Everything wrong in the parts is told at once. The data gets its order, is split for evaluation, tried once, and made
ready for the loader.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    default_convert,
)

from ndd_engine.batches import leaves, tensors
from ndd_engine.config.schema import Config
from ndd_engine.errors import said, shortened
from ndd_engine.hardware.gpus import free_memory
from ndd_engine.text import size
from ndd_watch.switches import same_item

from . import interface
from .base import (
    Batch,
    CheckedWeight,
    Collate,
    GatherItems,
    Order,
    Stream,
    Workload,
    batch_size,
    has_state,
    item_count,
    items_at,
    keep_in_bf16,
    position,
    seed_all,
)
from .interface import Settings, calling, kind
from .problems import Problems, Progress, in_toml
from .result import NAME_LENGTH, Reader, check_conflicts, read_training, wrong_result

MAP_STYLE = "a map-style dataset with __len__ and __getitem__(index)"
DATA = f"{MAP_STYLE}, or an IterableDataset"
ORDER_BYTES = 8  # of an item's index
# Its __iter__ keeps the state of a loader, which the run does itself.
_STATEFUL = "torchdata.stateful_dataloader"
EVAL_SHARE = 0.1
_PLAIN = (Tensor, str, bytes, int, float, complex, type(None))


@dataclass(frozen=True)
class Data:
    """A dataset, the collate function of its DataLoader (None: torch's default), and its order (None: the default)."""

    data: Any = None
    collate: Collate | None = None
    order: Order | None = None

    @property
    def streams(self) -> bool:
        """Whether it is an IterableDataset."""
        return isinstance(self.data, IterableDataset)


def read_data(name: str, found: Any, config: Config, problems: Problems) -> Data:
    """The data that a factory returned as `name`: "train_data" or "eval_data".

    Adds a problem for each part of a DataLoader that cannot be used.
    """
    if isinstance(found, DataLoader):
        read = _read_loader(name, found, config, problems)
    elif isinstance(found, IterableDataset):
        train = name == "train_data"
        read = Data(found, None, Order(shuffle=False, drop_last=train, name=name))
    else:
        read = Data(found)
    data = read.data
    if isinstance(data, IterableDataset):
        _check_stream(name, data, config, problems)
    elif isinstance(data, (Mapping, str, bytes)):
        problems.add(name, f"is {kind(data)}", None, DATA)
    elif lacks := [method for method in ("__len__", "__getitem__") if not hasattr(type(data), method)]:
        message = f"{kind(data)} has no {' and no '.join(lacks)}"
        problems.add(name, message, None, DATA, f"define {' and '.join(lacks)}")
    else:
        with calling(f"len({name})", where=problems.where):
            count = len(data)
        if not count:
            problems.add(name, "is empty", None, "at least one item")
        elif (order := count * ORDER_BYTES) > free_memory():
            message = f"len() is {count:,}; the order of these items needs {size(order)} of memory"
            problems.add(name, message, None, None, "return the real number of items")
    return read


def with_parts(
    read: Data, shuffle: bool | None, sampler: Any, batch_sampler: Any, config: Config, problems: Problems
) -> Data:
    """The training data with the order that the factory returned as parts of their own beside it."""
    given = [
        name
        for name, value in (("shuffle", shuffle), ("sampler", sampler), ("batch_sampler", batch_sampler))
        if value is not None
    ]
    if given and read.order is not None:
        of = "an IterableDataset has an order of its own" if read.streams else "train_data is a DataLoader"
        advice = "remove it" if read.streams else f"pass {given[0]} to the DataLoader"
        problems.add(given[0], f"cannot be used: {of}", None, None, advice)
        return read
    if len(given) > 1:
        message = f"{given[0]} and {given[1]} are mutually exclusive, as in torch's DataLoader"
        problems.add(given[1], message, None, None, f"return one of {', '.join(given)}")
        return read
    for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if value is not None and not _iterates(value):
            what = "indices" if name == "sampler" else "lists of indices"
            problems.add(name, f"is {kind(value)}", None, f"an iterable of {what}, such as a torch Sampler")
            return read
    if sampler is not None or batch_sampler is not None:
        order = _unwrapped(Order(shuffle=False, sampler=sampler, batch_sampler=batch_sampler))
        _check_size("batch_sampler", order, config, problems)
        return Data(read.data, read.collate, order)
    return read if shuffle is None else Data(read.data, read.collate, Order(shuffle=shuffle))


def check_order(train: Data, has_eval: bool, config: Config, problems: Problems) -> None:
    """Adds a problem for settings that do not go with the order of the training data."""
    order, run, loader = train.order, config.run, config.loader
    chosen = None if order is None else order.chosen
    if train.data is None:
        return
    if (train.streams or chosen is not None) and not has_eval:
        why = "it is an IterableDataset" if train.streams else "its sampler covers all of its items"
        message = f"is missing, and no part of train_data can be kept for evaluation: {why}"
        problems.add("eval_data", message, None, None, "add eval_data")
    settings = Problems("workload", found=problems.found)
    if loader.shuffle is not None and order is not None:
        of = None
        if train.streams:
            of = "train_data is an IterableDataset, which decides the order itself"
        elif chosen is not None:
            of = f"the {order.title} decides the order"
        elif order.shuffle != loader.shuffle:
            of = f"the factory asks for shuffle={order.shuffle}"
        if of is not None:
            settings.add("loader.shuffle", f"cannot be used: {of}", loader.shuffle, None, "remove it")
    if order is None:
        return
    unknown = train.streams or (chosen is not None and not hasattr(type(chosen), "__len__"))
    if unknown and run.max_steps is None:
        if not train.streams:
            message = f"the {order.title} has no len(), so a pass over it may not end"
            settings.add("run.epochs", message, run.epochs, None, "set run.max_steps, or define __len__")
        elif config.schedule.kind == "cosine":
            message = "the schedule needs the number of steps, but the length of train_data is unknown"
            settings.add("schedule.kind", message, config.schedule.kind, None, "set run.max_steps")


def _read_loader(name: str, loader: Any, config: Config, problems: Problems) -> Data:
    """The parts of a DataLoader; adds a problem for each argument that the run does not use."""
    train, settings = name == "train_data", config.loader

    def refuse(argument: str, message: str, advice: str = "remove it") -> None:
        problems.add(f"{name}.{argument}", message, None, None, advice)

    if type(loader).__iter__ is not DataLoader.__iter__ and not type(loader).__module__.startswith(_STATEFUL):
        message = f"{type(loader).__name__} replaces DataLoader.__iter__, which is not called"
        advice = (
            "move what it does into the dataset or collate_fn, or return an IterableDataset of the batches"
        )
        refuse("__iter__", message, advice)
    if loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        message = "is None, so that each index is a whole batch"
        refuse("batch_size", message, "return items and give batch_size, or return an IterableDataset")
    order = _order_of(name, loader)
    pin = settings.pin_memory
    if not train and settings.eval_pin_memory is not None:
        pin = settings.eval_pin_memory
    prefix = "" if train else "eval_"
    in_order = getattr(loader, "in_order", True)  # torchdata may not have it
    for argument, value, key, same in (
        ("num_workers", loader.num_workers, f"{prefix}workers", (0,)),
        ("pin_memory", loader.pin_memory, f"{prefix}pin_memory", (False, pin)),
        # Of training, persistent workers are the default.
        ("persistent_workers", loader.persistent_workers, f"{prefix}persistent", (False,)),
        ("prefetch_factor", loader.prefetch_factor, f"{prefix}prefetch", (None, 2)),
        ("timeout", loader.timeout, "timeout_s", (0,)),
        *((("in_order", in_order, "in_order", (True,)),) if train else ()),
    ):
        now = getattr(settings, key)
        default = train and now is None and argument == "persistent_workers"
        if value not in (*same, now) and not default:
            written = "not set" if now is None else in_toml(now)
            advice = f"remove it from the DataLoader, and set loader.{key} = {in_toml(value)}"
            refuse(argument, f"is {value}, but loader.{key} is {written}", advice)
    context = loader.multiprocessing_context
    method = context if isinstance(context, str) or context is None else context.get_start_method()
    if method not in (None, "forkserver"):
        message = f'is "{method}", but workers are started with forkserver, because the run has threads'
        refuse("multiprocessing_context", message)
    if getattr(loader, "pin_memory_device", ""):
        message = f'is "{loader.pin_memory_device}", but memory is pinned for the device of the run'
        refuse("pin_memory_device", message)
    if not train and not in_order:
        refuse("in_order", "is False: an evaluation reads its batches in the order of the data")
    if getattr(loader, "snapshot_every_n_steps", 1) != 1:
        message = f"is {loader.snapshot_every_n_steps}, but the run itself decides when it copies states"
        refuse("snapshot_every_n_steps", message)
    _check_size("batch_size", order, config, problems, name)
    plain = loader.collate_fn in (default_collate, default_convert)
    return Data(loader.dataset, None if plain else loader.collate_fn, order)


def _order_of(name: str, loader: Any) -> Order:
    order = Order(False, generator=loader.generator, worker_init_fn=loader.worker_init_fn, name=name)
    size, data, sampler = loader.batch_size, loader.dataset, loader.sampler
    if isinstance(data, IterableDataset):
        return replace(order, batch_size=size, whole=size is None, drop_last=loader.drop_last)
    if size is None:
        return _unwrapped(replace(order, batch_sampler=loader.batch_sampler))
    order = replace(order, batch_size=size, drop_last=loader.drop_last)
    whole = getattr(sampler, "data_source", None) is data
    if whole and type(sampler) is SequentialSampler:
        return order
    # With a generator of the user's, the order is that of torch's own DataLoader.
    plain = whole and type(sampler) is RandomSampler and sampler.generator is None
    if plain and not sampler.replacement and sampler.num_samples == len(data):
        return replace(order, shuffle=True)
    return replace(order, sampler=sampler)


def _check_stream(name: str, data: Any, config: Config, problems: Problems) -> None:
    """Adds a problem for settings that need items with an index."""
    kind_of = shortened(type(data).__name__, 80)
    if type(data).__iter__ is IterableDataset.__iter__:
        problems.add(name, f"{kind_of} does not define __iter__", None, DATA)
    loader = config.loader
    settings = Problems("workload", found=problems.found)
    why = f"{name} is an IterableDataset ({kind_of}), whose items have no index"
    for key, on in (
        ("cache", loader.cache),
        ("placement", loader.placement == "device"),
        ("fetch", loader.fetch == "batch"),
    ):
        if on and not any(problem.key == f"loader.{key}" for problem in problems.found):
            found = getattr(loader, key)
            settings.add(f"loader.{key}", f"cannot be used: {why}", found, None, "remove it")


def _check_size(
    argument: str, order: Order, config: Config, problems: Problems, name: str = "train_data"
) -> None:
    """Adds a problem if the size of the training batches is not `batch.micro`, a step would stay incomplete, or each
    rank would get a share of its share.
    """
    batch, train = config.batch, name == "train_data"
    found = order.batch_size
    if order.batch_sampler is not None and isinstance(
        of := getattr(order.batch_sampler, "batch_size", None), int
    ):
        found, argument = of, "batch_sampler"
    key = argument if train and argument == "batch_sampler" else f"{name}.{argument}"
    if train and found is not None and found != batch.micro:
        makes = "makes batches of" if argument == "batch_sampler" else "is"
        message = f"{makes} {found}, but batch.micro is {batch.micro}"
        advice = f"build it with settings.micro, or set batch.micro = {found}"
        problems.add(key, message, None, None, advice)
    ranks = config.parallel.ranks
    step = batch.accumulation * ranks
    if train and order.batch_size is not None and not order.drop_last and step > 1:
        of = " of all ranks" if ranks > 1 else ""
        message = f"is False, but steps of {step} micro-batches{of} leave out an incomplete last step"
        keys = "parallel.ranks = 1 and batch.accumulation = 1" if ranks > 1 else "batch.accumulation = 1"
        problems.add(f"{name}.drop_last", message, None, None, f"set drop_last=True, or {keys}")
    sampler = order.sampler if order.batch_sampler is None else getattr(order.batch_sampler, "sampler", None)
    if ranks > 1 and isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        message = f"is a DistributedSampler, but the run itself deals the batches to its {ranks} ranks"
        advice = "use RandomSampler, or shuffle=True without a sampler"
        problems.add(f"{name}.sampler", message, None, None, advice)


def _unwrapped(order: Order) -> Order:
    """torch's own BatchSampler as its sampler, batch size and drop_last, which say more about the position."""
    found = order.batch_sampler
    if type(found) is not BatchSampler:
        return order
    size, drop = found.batch_size, found.drop_last
    return replace(order, batch_sampler=None, sampler=found.sampler, batch_size=size, drop_last=drop)


def _iterates(value: Any) -> bool:
    return hasattr(type(value), "__iter__") and not isinstance(value, (str, bytes, Mapping, type))


def restarts(order: Order | None, data: Any, iterator: Any = None) -> str | None:
    """What a resumed run cannot restore, as a note for the start of the training; None if it restores the position."""
    if isinstance(data, Stream):
        if has_state(data.data) or has_state(iterator):
            return None
        what = f"train_data ({type(data.data).__name__})"
    elif order is not None and position(order) == "anew":
        what = f"the {order.title}"
    else:
        return None
    return (
        f"{shortened(what, 120)} has no state_dict and load_state_dict, so its position cannot be saved: a resumed run "
        "starts the pass over train_data again, and sees some items twice."
    )


class GatherTensors(GatherItems):
    """A TensorDataset that makes a batch in one gather; items are tuples and batches lists, as in torch."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)

    def __len__(self) -> int:
        return int(self.tensors[0].shape[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def batch(self, indices: Tensor) -> list[Tensor]:
        return [tensor[indices] for tensor in self.tensors]


class DatasetSlice(Dataset[Any]):
    """`count` items of a dataset from `start` on, in every epoch of one whose items change each epoch."""

    def __init__(self, data: Any, start: int, count: int) -> None:
        self.data, self.start, self.count = data, start, count
        self._whole = len(data)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.data[self._index(index)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return items_at(self.data, [self._index(index) for index in indices])

    def _index(self, index: int) -> int:
        epoch, item = divmod(index, self.count)
        return epoch * self._whole + self.start + item


class GatherSlice(DatasetSlice):
    """A slice of a dataset that makes whole batches."""

    def batch(self, indices: Tensor) -> Batch:
        return self.data.batch(indices + self.start)

    def to(self, device: torch.device) -> GatherSlice:
        """The same items on another device, with the whole dataset that they belong to."""
        return GatherSlice(self.data.to(device), self.start, self.count)

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


def split(workload: Workload, config: Config) -> None:
    """Make its data ready for the loader. Without eval_data, the last items of train_data become it.

    An IterableDataset becomes a Stream. Raises ConfigError if train_data has only one item.
    """
    loader, evaluation = config.loader, workload.eval_data
    workload.train_data = train = _read(workload.train_data, workload.collate, loader.workers > 0)
    if evaluation is not None:
        workload.eval_data = _read(evaluation, workload.collate, loader.eval_workers > 0, evaluates=True)
        return
    total, problems = len(train), Problems(workload.where)
    kept = max(int(total * EVAL_SHARE), 1)
    if kept >= total:
        message = "is missing, and train_data has only one item, so none can be kept for evaluation"
        problems.add("eval_data", message, suggestion="add eval_data, or more items")
        problems.check()
    share = f"the last {kept:,} of {total:,} items are kept for evaluation ({kept / total:.0%})"
    workload.remarks.append(f"Without eval_data, {share}.")
    workload.train_data = _slice(train, 0, total - kept)
    workload.eval_data = _slice(train, total - kept, kept)


def try_items(workload: Workload, config: Config) -> list[str]:
    """Fetches and collates a few items, and returns notes about what a resumed run will not see again.

    Raises ConfigError that names the line of the user's code, or the allowed contents of a batch.
    """
    train, where = workload.train_data, workload.where
    join = workload.collate or default_collate
    advice = None if workload.collate else "add collate, a function from a list of items to a batch"
    problems = Problems(where)
    for name, data, order in (
        ("train_data", train, workload.order),
        ("eval_data", workload.eval_data, workload.eval_order),
    ):
        whole = isinstance(data, Stream) and order is not None and order.whole
        if isinstance(data, Stream):
            with calling(f"reading the first items of {name}", where=where):
                items = data.peek(1 if whole else min(2, config.batch.micro))
            if not items:
                problems.add(name, "is empty: its __iter__ yields nothing", allowed="at least one item")
                continue
        else:
            with calling(f"{name}[0]", where=where):
                items = [data[0], data[min(1, len(data) - 1)]]
        with calling(f"collating two items of {name}", advice, where):
            if whole:
                batch = items[0] if workload.collate is None else workload.collate(items[0])
            else:
                batch = join(items)
        _check_batch(batch, name, "change" if workload.collate else "add", problems)
        micro = config.batch.micro
        if whole and name == "train_data" and not problems.found and (count := batch_size(batch)) != micro:
            message = f"yields batches of {count} items, but batch.micro is {micro}"
            problems.add(
                name, message, suggestion=f"set batch.micro = {count}, or yield batches of settings.micro"
            )
    if isinstance(train, Stream):
        if workload.epochs_differ:
            message = "cannot be used with an IterableDataset, whose items have no index"
            problems.add("epochs_differ", message, suggestion="remove it")
        problems.check()
        note = restarts(workload.order, train, train.first_iterator)
        return [note] if note else []
    with calling("train_data[0]", where=where):
        steady = same_item(torch, train[0], train[0], unknown=True)
    if workload.epochs_differ:
        total = len(train)
        with calling(f"train_data[{total}] (epochs_differ: item 0 of the second epoch)", where=where):
            train[total]
    problems.check()
    notes = [note] if (note := restarts(workload.order, train)) else []
    if workload.order is not None and workload.order.batch_sampler is not None:
        notes.append(
            f"The {workload.order.title} decides the number of items of each batch; batch.micro = {config.batch.micro} "
            "is used for predictions and for the test step only."
        )
    if steady:
        return notes
    return [
        *notes,
        "train_data[0] is a different item each time, so a resumed run will not see the same data. Draw random numbers "
        "from a generator seeded with settings.seed and the index; if items change every epoch, set epochs_differ.",
    ]


def _read(data: Any, collate: Collate | None, in_workers: bool, evaluates: bool = False) -> Any:
    if isinstance(data, IterableDataset):
        return Stream(data, in_workers, again=evaluates)
    return GatherTensors(data.tensors) if type(data) is TensorDataset and collate is None else data


def check_workers(workload: Workload, config: Config, problems: Problems) -> None:
    """Adds a problem if loader workers are configured and the data cannot be pickled for them."""
    for key, workers, name, data, order in (
        ("loader.workers", config.loader.workers, "train_data", workload.train_data, workload.order),
        (
            "loader.eval_workers",
            config.loader.eval_workers,
            "eval_data",
            workload.eval_data,
            workload.eval_order,
        ),
    ):
        if not workers:
            continue
        try:
            _PickleCheck(_NullFile(), pickle.HIGHEST_PROTOCOL).dump(
                (data, workload.collate, order and order.worker_init_fn)
            )
        except Exception as error:  # noqa: BLE001  a user's __reduce__ may raise anything
            message = f"{name} or its collate function cannot be pickled for a worker process: {said(error)}"
            advice = "define classes and functions at the top level of the module (no lambda)"
            advice += f" and open files in __getitem__, or set {key} to 0"
            problems.add(key, message, workers, suggestion=advice)


class _PickleCheck(pickle.Pickler):
    """Pickles everything except the contents of tensors, which can always be pickled."""

    def persistent_id(self, thing: object) -> str | None:
        return "tensor" if type(thing) is Tensor else None


class _NullFile:
    def write(self, data: Any) -> int:
        return len(data)


def _slice(data: Any, start: int, count: int) -> Dataset[Any]:
    if isinstance(data, GatherTensors):
        return GatherTensors([tensor[start : start + count] for tensor in data.tensors])
    gathers = all(hasattr(data, name) for name in ("batch", "to", "nbytes"))
    return (GatherSlice if gathers else DatasetSlice)(data, start, count)


def _check_batch(batch: Batch, name: str, verb: str, problems: Problems) -> None:
    """Adds a problem unless a batch consists of tensors that can be moved to the GPU."""
    wrong = next((type(leaf).__name__ for leaf in leaves(batch) if not isinstance(leaf, _PLAIN)), None)
    allowed = "a tensor, or a tuple, list or dict of tensors"
    advice = f"{verb} collate, a function from a list of items to such a batch"
    if wrong is not None:
        message = f"a batch contains a {wrong}, which cannot be moved to the GPU"
        problems.add(name, message, allowed=allowed, suggestion=advice)
    elif not any(tensor.ndim for tensor in tensors(batch)):
        problems.add(name, "a batch contains no tensor", allowed=allowed, suggestion=advice)


RESULT = "an object, dict or SimpleNamespace with model, train_data and loss"
PARTS = (
    "model", "train_data", "loss", "eval_data", "forward", "metric", "weight", "better", "item", "token",
    "tokens_per_item", "collate", "parts", "epochs_differ", "alternatives", "describe_model", "describe_data", "notes",
    "shuffle", "sampler", "batch_sampler", "optimizer", "scheduler", "scheduler_every", "lr", "step", "eval_step",
    "state", "stateful", "on_step", "on_evaluate", "on_checkpoint", "samples",
)  # fmt: skip


def prepare(config: Config, progress: Progress = lambda _: None) -> Workload:
    """The workload that the factory returns, on the CPU.

    Raises ConfigError with everything that is wrong in the settings, the data and the factory's result, or with the
    line at which the user's code failed, caused by its exception. `progress` is called with short texts to show.
    """
    section = config.workload
    settings = Settings.of(config, progress)
    problems = settings.problems
    progress(f"importing {section.name.partition(':')[0]}")
    factory, where = interface.load(section)
    # Random numbers drawn by the import must not matter: the module is imported once, but prepared several times.
    seed_all(config.run.seed)
    progress(f"calling {section.name}")
    with calling("the factory", where=where):
        value = factory(settings)
    for name, allowed in settings.options.wrong.items():
        problems.add(
            f"workload.options.{name}", "the factory needs another type", settings.options[name], allowed
        )
    problems.check()
    progress(f"checking the data of {section.name}")
    workload = read_result(value, where, config, settings)
    if ":" in section.name:
        workload.remarks.insert(0, f"{section.name} is defined at {where}")
    split(workload, config)
    workload.remarks += try_items(workload, config)
    if hasattr(section, "options"):
        settings.options.unused(problems)
    if (items := item_count(workload.train_data)) is not None and workload.order is None:
        settings.check_items(items, f"{workload.item}s")
    check_workers(workload, config, problems)
    problems.check()
    if config.precision.parameters == "bf16":
        keep_in_bf16(workload.model)
    return workload


def read_result(value: object, where: str, config: Config, settings: Settings) -> Workload:
    """The parts of the value that a factory returned. where: file and line of the factory.

    Raises ConfigError with everything that is missing or wrong.
    """
    problems = Problems(where)
    if (wrong := wrong_result(value)) is not None:
        problems.add("", f"the factory returned {wrong}", allowed=RESULT)
        problems.check()
    reader = Reader(value, problems)
    model = reader.model()
    train, evaluation = (
        Data() if found is None else read_data(name, found, config, problems)
        for name, found in (
            ("train_data", reader.get("train_data", needed=True)),
            ("eval_data", reader.get("eval_data")),
        )
    )
    chosen = (
        reader.typed("shuffle", bool, "True or False"),
        reader.get("sampler"),
        reader.get("batch_sampler"),
    )
    if train.data is not None:
        train = with_parts(train, *chosen, config, problems)
    check_order(train, evaluation.data is not None, config, problems)
    loss = reader.function("loss", ("output", "batch"), needed=not reader.given("step", "eval_step"))
    if isinstance(loss, nn.modules.loss._Loss):
        name = type(loss).__name__
        advice = f"write it as: lambda output, batch: nn.{name}()(output, batch[1])"
        reader.add("loss", f"nn.{name} takes (output, target)", "a function loss(output, batch)", advice)
    better = reader.text("better") or "lower"
    if better not in ("lower", "higher"):
        message = "this is not a direction in which a metric improves"
        problems.add("better", message, better, '"lower" or "higher"')
    training = read_training(reader, model, config, better)
    check_conflicts(reader, training, config, settings)
    reader.check_unknown(PARTS)
    collate = reader.function("collate", ("items",))
    if collate is None:
        collate = train.collate
        if train.data is not None and evaluation.data is not None and collate != evaluation.collate:
            message = "the DataLoaders train_data and eval_data have different collate functions"
            allowed = "one function for both, from a list of items to a batch"
            reader.add("collate", message, allowed=allowed, suggestion="return it as collate")
    carried = ("state",) if training.state is not None else ()
    functions = {
        "loss": loss,
        "forward": reader.function("forward", ("model", "batch", *carried)),
        "metric": reader.function("metric", ()),
    }
    weight = reader.function("weight", ("batch",))
    others: dict[str, Any] = {
        "weight": None if weight is None else CheckedWeight(weight, where),
        "better": better,
        "item": reader.text("item", longest=NAME_LENGTH) or "item",
        "token": reader.text("token", longest=NAME_LENGTH),
        "tokens_per_item": reader.tokens_per_item(),
        "collate": collate,
        "parts": reader.parts(model),
        "epochs_differ": reader.typed("epochs_differ", bool, "True or False") is True,
        "alternatives": reader.alternatives(),
        "model_text": reader.text("describe_model", called=True),
        "data_text": reader.text("describe_data", called=True),
        "remarks": reader.lines("notes"),
        "order": train.order,
        "eval_order": evaluation.order,
        "training": training,
    }
    problems.check()
    assert model is not None
    return Workload(config.workload.name, where, model, train.data, evaluation.data, functions, **others)
