"""Your own workloads with a fault that an option turns on; with default options none of them has one.

It is loaded like a user's own module, and does not import the benchmarks.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ndd_engine.hardware.gpus import free_in_group, read_limits

WIDTH = 256
ITEMS = 2048
MEGABYTE = 1 << 20


class Net(nn.Module):
    """Three hidden layers, (B, WIDTH) to (B, 1)."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.hidden = nn.Sequential(
            nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )  # fmt: skip
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))  # type: ignore[no-any-return]


def loss(output: Tensor, batch: Any) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(output, batch[1])


def tensors(items: int = ITEMS) -> tuple[Tensor, Tensor]:
    """Random inputs and a learnable target."""
    x = torch.randn(items, WIDTH)
    return x, x[:, :8].sum(dim=1, keepdim=True)


def in_memory(items: int = ITEMS) -> TensorDataset:
    """Items whose batches can be gathered at once."""
    return TensorDataset(*tensors(items))


class Items(Dataset[Any]):
    """So many items, each made by a function of its number. endless: numbers go on in later epochs."""

    def __init__(self, count: int, make: Callable[[int], Any], endless: bool = False) -> None:
        self.count, self.make, self.endless = count, make, endless

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count and not self.endless:
            raise IndexError(index)
        return self.make(index)


# A plain net.


def plain(settings: Any) -> dict[str, Any]:
    """Options: width of the net's layers."""
    return {"model": Net(settings.option("width", 512)), "train_data": in_memory(8 * ITEMS), "loss": loss}


# Slow storage: each item has a latency, as from a network disk.


def arrive(x: Tensor, y: Tensor, latency_s: float, index: int) -> tuple[Tensor, Tensor]:
    """An item that takes so long to arrive, without using the CPU."""
    if latency_s:
        time.sleep(latency_s)
    return x[index], y[index]


def storage(settings: Any) -> dict[str, Any]:
    """Options: latency_ms per item; rows: how often the model computes an item, to make steps longer."""
    items, latency = settings.option("items", ITEMS), settings.option("latency_ms", 0.0)
    rows = settings.option("rows", 64)

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(batch[0].repeat_interleave(rows, dim=0)).view(len(batch[0]), rows, 1).mean(dim=1)

    train = Items(items, partial(arrive, *tensors(items), latency / 1e3))
    held = Items(64, partial(arrive, *tensors(64), 0.0))
    return {"model": Net(), "train_data": train, "eval_data": held, "loss": loss, "forward": forward}


# Items that are cheap to compute, and large to send between processes.


MARGIN = 8


def crop(images: Tensor, items: int, pixels: int, index: int) -> tuple[Tensor, Tensor]:
    """An image (3, pixels, pixels), cropped at different positions every epoch, and a target (1,)."""
    epoch, item = divmod(index, items)
    x, y = 7919 * (item + 31 * epoch) % MARGIN, 104_729 * (item + 17 * epoch) % MARGIN
    image = images[item % len(images)]
    return image[:, x : x + pixels, y : y + pixels], image[0, 0, :1]


def crops(settings: Any) -> dict[str, Any]:
    """Options: pixels per side, a multiple of 16; width of the net's layers."""

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(nn.functional.adaptive_avg_pool2d(batch[0].mean(dim=1), 16).flatten(1))

    count, pixels = 8 * ITEMS, settings.option("pixels", 32)
    images = torch.randn(256, 3, pixels + MARGIN, pixels + MARGIN)
    data = Items(count, partial(crop, images, count, pixels), endless=True)
    model = Net(settings.option("width", 64))
    return {"model": model, "train_data": data, "loss": loss, "forward": forward, "epochs_differ": True}


# Short-lived Python objects.


class Buffer:
    """Holds the newest `held` small containers and adds `each` new ones at a time.

    It is filled after training has begun: earlier objects are frozen, and ignored by the garbage collector.
    """

    def __init__(self, held: int, each: int) -> None:
        self.held, self.each = held, each
        self.parts: deque[list[list[int]]] = deque()
        self._calls = 0

    def step(self) -> None:
        """One step's worth of containers."""
        self._calls += 1
        if not self.each or (not self.parts and not self._begun()):
            return
        if not self.parts:
            self.parts.extend([[] for _ in range(self.each)] for _ in range(self.held // self.each))
        self.parts.append([[] for _ in range(self.each)])
        self.parts.popleft()

    def _begun(self) -> bool:
        # Only until it is true: counting frozen objects takes milliseconds.
        return gc.get_freeze_count() > 0 or self._calls > 200


def garbage(settings: Any) -> dict[str, Any]:
    """Options: each: containers created per step, 0 for none; held: number of live containers."""
    buffer = Buffer(settings.option("held", 1_000_000), settings.option("each", 0))

    def forward(model: nn.Module, batch: Any) -> Any:
        if model.training:
            buffer.step()
        return model(batch[0])

    return {"model": Net(), "train_data": in_memory(), "loss": loss, "forward": forward}


# Retained memory.


def keeping(settings: Any) -> dict[str, Any]:
    """Options: keep_mb: outputs retained per step; limit_mb: in total (a cache), 0 for no limit (a leak)."""
    keep, limit = settings.option("keep_mb", 0.0), settings.option("limit_mb", 0)
    kept: list[Tensor] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        output = model(batch[0])
        if model.training and keep and (not limit or len(kept) * keep < limit):
            kept.append(output.detach().new_ones(int(keep * MEGABYTE) // 4))
        return output

    return {"model": Net(1024), "train_data": in_memory(), "loss": loss, "forward": forward}


# What a loader worker has made.
_made: deque[Tensor] = deque()


def made(kilobytes: int, most: int, index: int) -> tuple[Tensor, Tensor]:
    """An item, of which the worker keeps so much: of all items, or of the newest ones."""
    _made.append(torch.ones(kilobytes * 256))
    if most and len(_made) > most:
        _made.popleft()
    return torch.full((WIDTH,), index % 7 / 7), torch.full((1,), index % 3 / 3)


def hoarding(settings: Any) -> dict[str, Any]:
    """Options: keep_kb: what a loader worker keeps of each item; most: of so many items, 0 for all of them."""
    kilobytes, most = settings.option("keep_kb", 16), settings.option("most", 100)
    data = Items(40 * 64, partial(made, kilobytes, most))  # short passes: in the first one, it may be a cache
    return {"model": Net(), "train_data": data, "eval_data": in_memory(64), "loss": loss}


def opening(settings: Any) -> dict[str, Any]:
    """Options: every: after how many steps a file is opened, 0 for never; close: whether it is closed as well."""
    every, close = settings.option("every", 0), settings.option("close", 0)
    folder, calls, kept = tempfile.mkdtemp(prefix="planted-"), itertools.count(1), []

    def forward(model: nn.Module, batch: Any) -> Any:
        if model.training and every and next(calls) % every == 0:
            kept.append(Path(folder, "values.txt").open("w"))  # noqa: SIM115  open until the end
            if close:
                kept.pop().close()
        return model(batch[0])

    return {"model": Net(), "train_data": in_memory(8 * ITEMS), "loss": loss, "forward": forward}


# Values that are not finite.

INPUT, LOSS, GRADIENT, MASK = 1, 2, 3, 4


def damaged(settings: Any) -> dict[str, Any]:
    """Options: what is not finite (INPUT and so on); first: the step from which on it is; every: of how many steps.

    MASK: scores of -inf, which a softmax turns into zeros.
    """
    what, first, every = (
        settings.option("what", 0),
        settings.option("first", 200),
        settings.option("every", 1),
    )
    calls, now = itertools.count(), [False]

    def forward(model: nn.Module, batch: Any) -> Any:
        step = next(calls) if model.training else 0
        now[0] = model.training and step >= first and step % every == 0
        x = batch[0]
        if what == INPUT and now[0]:
            x = x.index_fill(1, torch.tensor([3]), float("nan"))
        if what == MASK:
            x = x * x.index_fill(1, torch.tensor([3]), float("-inf")).softmax(1)
        return model(x)

    def error(output: Tensor, batch: Any) -> Tensor:
        value = loss(output, batch)
        if now[0] and what == LOSS:
            value = value + (value.detach() * 0.0).log()
        if now[0] and what == GRADIENT:
            value = value + (output * 0.0).abs().sum().sqrt()  # the slope of a root is infinite at 0
        return value

    return {"model": Net(), "train_data": in_memory(8 * ITEMS), "loss": error, "forward": forward}


# A tensor that takes most of the memory of a GPU, or of the control group.


def occupying(settings: Any) -> dict[str, Any]:
    """Options: free: the part of the memory that is left when the first batch has been computed."""
    part, held = settings.option("free", 0.5), list[Tensor]()

    def forward(model: nn.Module, batch: Any) -> Any:
        output = model(batch[0])
        groups = read_limits().memory if not held and not output.is_cuda else ()  # none in a trial
        if not held and model.training and (groups or output.is_cuda):
            if output.is_cuda:
                free, total = torch.cuda.mem_get_info()
            else:
                group, total = min(groups, key=lambda one: one[1])
                free = free_in_group(group, total)
            size = max(int(free - part * total), 0)
            held.append(torch.full((size,), 1, dtype=torch.uint8, device=output.device))
        return output

    return {"model": Net(), "train_data": in_memory(), "loss": loss, "forward": forward}


# Processes that wait for each other, or die.

FIFO, LOCK, DEAD = 1, 2, 3
# Numbers that are sorted for an item.
WORK = 150
# Calls in this process.
_items = itertools.count()


def from_worker(kind: int, after: int, path: str, index: int) -> tuple[Tensor, Tensor]:
    """An item, until so many have been made: then it waits for ever, or the process ends by this signal."""
    if kind and next(_items) >= after:
        if kind == FIFO:
            Path(path).read_bytes()
        elif kind == LOCK:
            lock = threading.Lock()
            with lock:
                lock.acquire()
        else:
            if kind != -signal.SIGKILL:
                signal.signal(-kind, signal.SIG_DFL)
            os.kill(os.getpid(), -kind)
    # Some work, without which a worker costs more than it saves.
    value = sorted(index * number % 97 for number in range(WORK))[WORK // 2] % 7 / 7
    return torch.full((WIDTH,), value), torch.full((1,), value)


def answer(queue: Any) -> None:
    """Of another process, which ends before it has answered."""
    os.kill(os.getpid(), signal.SIGKILL)
    queue.put(1)


def waiting(settings: Any) -> dict[str, Any]:
    """Options: kind: FIFO, LOCK or DEAD; or -N: a loader worker ends by signal N; 0 for nothing of this.

    after: so many items of a worker, or steps.
    """
    kind, after = settings.option("kind", 0), settings.option("after", 4000)
    path, calls = str(Path(tempfile.mkdtemp(prefix="planted-"), "items.bin")), itertools.count()
    os.mkfifo(path)

    def forward(model: nn.Module, batch: Any) -> Any:
        if kind == DEAD and model.training and next(calls) == after:
            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            context.Process(target=answer, args=(queue,)).start()
            queue.get()
        return model(batch[0])

    in_worker = kind if kind != DEAD else 0
    data = Items(64 * ITEMS, partial(from_worker, in_worker, after, path))
    return {"model": Net(), "train_data": data, "eval_data": in_memory(64), "loss": loss, "forward": forward}


# Work that grows with each step.


def growing(settings: Any) -> dict[str, Any]:
    """Options: more: values that are kept per step, all of which each step sorts; most: at a time, 0 for no limit.

    hooks: number of hooks that each step registers.
    """
    more, most = settings.option("more", 0), settings.option("most", 0)
    hooks = settings.option("hooks", 0)
    kept: deque[float] = deque(maxlen=most or None)

    def forward(model: nn.Module, batch: Any) -> Any:
        output = model(batch[0])
        if model.training:
            kept.extend([0.5] * more)
            middle(kept)
            for _ in range(hooks):
                model.head.register_forward_hook(seen)
        return output

    return {"model": Net(), "train_data": in_memory(8 * ITEMS), "loss": loss, "forward": forward}


def middle(values: deque[float]) -> float:
    """The median of all values."""
    return sorted(values, key=abs)[len(values) // 2] if values else 0.0


def seen(_module: nn.Module, _given: Any, output: Tensor) -> None:
    """A hook that looks at activations."""
    output.detach().mean()


# Python code instead of operators.


def loop(settings: Any) -> dict[str, Any]:
    """Options: rounds: of a Python loop in forward that computes a constant."""
    rounds = settings.option("rounds", 0)

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]) + penalty(rounds)

    return {"model": Net(), "train_data": in_memory(), "loss": loss, "forward": forward}


def penalty(rounds: int) -> float:
    """Zero, slowly."""
    total = 0.0
    for number in range(rounds):
        total += (number % 7) * 1e-9
    return total * 0.0


# Many small parameters.


class ManyScales(nn.Module):
    """A net whose input is scaled by many small parameters, stacked in one operation."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.net = Net()
        self.scales = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        if len(self.scales):
            x = x * (1 + torch.stack(list(self.scales)).sum(dim=0))
        return self.net(x)  # type: ignore[no-any-return]


def scales(settings: Any) -> dict[str, Any]:
    """Options: count: number of small parameters."""
    return {"model": ManyScales(settings.option("count", 0)), "train_data": in_memory(), "loss": loss}


# A table of which a step reads few rows.


class WithTable(nn.Module):
    """A net that adds a row of a table to each item."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.net = Net()
        self.table = nn.Embedding(rows, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0].abs() * 1e5).long() % self.table.num_embeddings
        return self.net(x + self.table(rows))  # type: ignore[no-any-return]


def table(settings: Any) -> dict[str, Any]:
    """Options: rows: of the table."""
    return {"model": WithTable(settings.option("rows", 16)), "train_data": in_memory(), "loss": loss}


# A debugging mode that was left on.


def debugging(settings: Any) -> dict[str, Any]:
    """Options: until: the step until which autograd looks for anomalies, 0 for never; width of the net's layers."""
    until, calls = settings.option("until", 0), itertools.count()

    def forward(model: nn.Module, batch: Any) -> Any:
        if model.training:
            torch.autograd.set_detect_anomaly(next(calls) < until)
        return model(batch[0])

    model = Net(settings.option("width", 512))
    return {"model": model, "train_data": in_memory(8 * ITEMS), "loss": loss, "forward": forward}


# Dynamic shapes.


def shorter(x: Tensor, kinds: int, index: int) -> Tensor:
    """A sequence of one of so many different lengths."""
    return x[: len(x) - 4 * (index % kinds)]


def longest(items: list[Tensor]) -> Tensor:
    """A batch padded to its longest item."""
    return nn.utils.rnn.pad_sequence(items, batch_first=True)


def lengths(settings: Any) -> dict[str, Any]:
    """Options: kinds: number of lengths, 1 to 15."""

    def error(output: Tensor, batch: Tensor) -> Tensor:
        return (output.squeeze(2) - batch.mean(dim=2)).square().mean()

    data = Items(ITEMS, partial(shorter, torch.randn(64, WIDTH), settings.option("kinds", 1)))
    return {"model": Net(), "train_data": data, "loss": error, "collate": longest, "forward": model_of}


def model_of(model: nn.Module, batch: Tensor) -> Any:
    """The model on a batch that is one tensor."""
    return model(batch)


# Faults that need a GPU.


def reading(settings: Any) -> dict[str, Any]:
    """Options: rounds through the net; reads: after how many of them a value is read from the GPU; empty: whether to
    empty the allocator's cache.
    """
    rounds, reads = settings.option("rounds", 24), settings.option("reads", 0)
    empty = settings.option("empty", 0)

    def forward(model: nn.Module, batch: Any) -> Any:
        total = torch.zeros(len(batch[0]), 1, device=batch[0].device)
        for index in range(rounds):
            total = total + model(batch[0])
            if index < reads:
                total = total + 0.0 * total.mean().item()
        if empty:
            torch.cuda.empty_cache()
        return total / rounds

    return {"model": Net(1024), "train_data": in_memory(8 * ITEMS), "loss": loss, "forward": forward}


def heavy(settings: Any) -> dict[str, Any]:
    """Options: megabytes of a batch of 256 items, which costs nothing to make and little to compute."""
    columns = max(settings.option("megabytes", 1) * MEGABYTE // 4 // 256 // WIDTH, 1) * WIDTH
    x = torch.randn(256, columns)
    y = x[:, :8].sum(dim=1, keepdim=True)

    def collate(items: list[Tensor]) -> tuple[Tensor, Tensor]:
        return x[: len(items)], y[: len(items)]

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(batch[0].view(len(batch[0]), -1, WIDTH).mean(dim=1))

    data = Items(8 * ITEMS, torch.tensor)
    return {"model": Net(), "train_data": data, "loss": loss, "forward": forward, "collate": collate}


# For the first checks of `make gpu`.


def fallback(settings: Any) -> dict[str, Any]:
    """A loss that waits for the GPU, so its step cannot be captured; dropout draws from the random state of the GPU.

    Option event: it waits in a way that only the capture itself refuses, for an event that was recorded in it.
    """
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    by_event = settings.option("event", 0)

    def error(output: Tensor, batch: Any) -> Tensor:
        value = loss(output, batch)
        if by_event and output.is_cuda:
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        elif not by_event:
            value = value * (1.0 if value.item() < 1e9 else 0.5)
        return value

    return {"model": model, "train_data": in_memory(), "loss": error}


def slow_item(index: int) -> Tensor:
    """An item that takes half a millisecond of the processor: a batch of 64 takes 32 ms."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.0005:
        pass
    return torch.full((64,), float(index % 7))


class Repeated(nn.Module):
    """Computes an item in so many rows."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.first, self.middle, self.last = (
            nn.Linear(64, width),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(batch).repeat(self.rows, 1)
        for _ in range(12):
            x = torch.relu(self.middle(x))
        return self.last(x)  # type: ignore[no-any-return]


def slow(settings: Any) -> dict[str, Any]:
    """Slow items. Options: width and rows of the model."""
    model = Repeated(settings.option("width", 64), settings.option("rows", 1))
    return {
        "model": model,
        "train_data": Items(100_000, slow_item),
        "loss": lambda out, batch: out.square().mean(),
    }


# A twentieth more work with more than one thread, for `benchmarks power`. All operators are too small for a second
# thread, so that the number of threads changes nothing else.

UNITS = 20
# Operators of a unit, and the elements of each: torch uses further threads from 32,768 on.
OPERATORS, ELEMENTS = 100, 8192


class Scaled(nn.Module):
    """Scales its input. more: units of work that it does with several threads."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.values = torch.ones(ELEMENTS)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(OPERATORS * (UNITS + (self.more if torch.get_num_threads() > 1 else 0))):
                self.values.mul_(1.0)
        return (x * self.scale).sum(1, keepdim=True)


def gain(settings: Any) -> dict[str, Any]:
    """Options: more: units of work with several threads; 0 is the innocent twin."""
    return {"model": Scaled(settings.option("more", 1)), "train_data": in_memory(), "loss": loss}
