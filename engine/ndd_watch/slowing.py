"""What makes steps slower: kept graphs, garbage, what grows, large tables and denormal numbers.

Kept graphs: `total += loss` keeps the autograd graphs of earlier steps. The graph of a step is freed when nothing of
the step refers to it any more. A mark in the metadata of some of its nodes is freed with it, so a mark that still
exists tells that its graph does. Looking at a loss costs a few microseconds, and keeps nothing. Where a state is
carried from step to step, the graph of a loss contains those of earlier steps, and each backward pass takes longer.
Nodes are numbered in the order in which they were made, so that a node with a number below that of an earlier loss is
of an earlier step.

Garbage: a collection holds the interpreter lock, so it stops the training whichever thread starts it. An exception
that a signal handler raises in a callback of the collector is lost, Ctrl-C among them. So the callback is made of
functions in C, which append the time of each begin and end to a list.

What grows is counted in steps that are profiled, and again when steps have become slower. Only objects of exactly
known types are looked at, see `looks`, and nothing is kept.

Large tables: embeddings whose gradient has a value for each row, although a step reads few of them. A table counts
only if the graph of the loss shows that nothing else uses it: where it is also the weight of an output layer, all of
its rows have a gradient. The same look at the graph tells which backend computes attention.

Denormal numbers are too small for full precision, and some processors are slow with them, which differs by operation.
A few values of parameters, their gradients and the state of optimizers are looked at.
"""

from __future__ import annotations

import heapq
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from .apart import Dropped, gc, time
from .clock import BASE, EVALUATE, S, no_phase, now
from .looks import Looks, attribute, attributes, class_name, groups_of, key_of, modules_within
from .mapped import OTHER, moved

# From this factor on, and windows of which the fastest one is the pace of the beginning.
SLOWER, FIRST_WINDOWS = 1.2, 4


class Slowing:
    """Hears the usual time of a step once a window."""

    def __init__(self) -> None:
        self._windows = self._looked_ns = 0

    def worth_a_look(self, step_ns: int) -> bool:
        """Whether steps are slower by SLOWER than at the last look, or than at the beginning. 0: unknown."""
        if not step_ns:
            return False
        self._windows += 1
        if self._windows <= FIRST_WINDOWS:
            self._looked_ns = min(self._looked_ns or step_ns, step_ns)
        elif step_ns > SLOWER * self._looked_ns:
            self._looked_ns = step_ns
            return True
        return False


_KEY = "ndd"
# Nodes of a loss that are marked: what is kept may be the loss before it was scaled, or the output of the model.
_DEPTH = 4
# Fewer marks are no evidence, and more are thinned out.
_FEW, _MOST = 8, 512
# Of the marks since the oldest one that exists, this part must exist.
_DENSE = 0.5
# Nodes of a graph that are visited, each for about 2 us; and losses whose numbers are remembered.
_VISITED_NODES, _MOST_NUMBERS = 1000, 64
# Steps in a row that are looked at where graphs are retained, the visited nodes of each graph, and attempts at most.
RETAINED_STEPS, _RETAINED_VISITED, _ATTEMPTS = 8, 10_000, 3


class _Mark:
    __slots__ = ("__weakref__",)


class KeptGraphs:
    """Marks the graphs of some steps, and tells from how many steps they still exist.

    wanted: how far back the next graph reaches is to be found out; reached: so many steps at least.
    """

    def __init__(self) -> None:
        # (number of the mark, step, mark), oldest first. Every `_stride`th loss is marked.
        self._marks: list[tuple[int, int, weakref.ref[_Mark]]] = []
        self._looked, self._stride = 0, 1
        # (step, number of the first node) of some losses, oldest first; and every how many of them are remembered.
        self._numbers: list[tuple[int, int]] = []
        self._apart = 1
        self.wanted, self.reached = False, 0

    def mark(self, loss: Any, step: int) -> None:
        """Mark the graph of a loss before its backward pass. loss: a plain tensor. step: its number."""
        self._looked += 1
        node = loss.grad_fn
        if self.wanted:
            self.wanted, self.reached = False, 0 if node is None else self._reach(node, step)
        if node is not None and not self._looked % self._apart:
            self._remember(step, node._sequence_nr())
        if node is None or self._looked % self._stride:
            return
        mark = _Mark()
        for _ in range(_DEPTH):
            node.metadata[_KEY] = mark
            # A parameter has its node for as long as any graph has it.
            node = next((one for one, _ in node.next_functions if one is not None), None)
            if node is None or type(node).__name__ == "AccumulateGrad":
                break
        self._marks.append((self._looked // self._stride, step, weakref.ref(mark)))
        if len(self._marks) > _MOST:
            self._clear()
            if len(self._marks) > _MOST // 2:
                self._marks = [(number // 2, step, mark) for number, step, mark in self._marks[::2]]
                self._stride *= 2

    def _remember(self, step: int, number: int) -> None:
        self._numbers.append((step, number))
        if len(self._numbers) > _MOST_NUMBERS:
            self._numbers = self._numbers[::2]
            self._apart *= 2

    def _reach(self, node: Any, step: int) -> int:
        """How many steps back the graph of a loss reaches at least; 0 if that is usual. node: its first one."""
        newest = node._sequence_nr()
        seen, left = {newest}, [(newest, 0, node)]
        for visited in range(1, _VISITED_NODES):
            # The oldest node first: that leads straight back.
            oldest, _, node = heapq.heappop(left)
            for place, (one, _) in enumerate(node.next_functions):
                # Nodes of parameters have the highest number, and lead nowhere.
                if one is not None and (number := one._sequence_nr()) < newest and number not in seen:
                    seen.add(number)
                    heapq.heappush(left, (number, visited * _VISITED_NODES + place, one))
            if not left:
                break
        oldest = min(seen)
        return next((step - then for then, number in self._numbers if number >= oldest), 0)

    def _clear(self) -> None:
        self._marks = [mark for mark in self._marks if mark[2]() is not None]

    def steps(self, step: int) -> int:
        """From how many steps before `step` on all graphs, or most of them, still exist; 0 if that is usual."""
        self._clear()
        if len(self._marks) < _FEW:
            return 0
        number, first, _ = self._marks[0]
        since = self._looked // self._stride - number + 1
        return step - first if len(self._marks) >= _DENSE * since else 0


class Retained:
    """Finds out whether a script passes `retain_graph=True` although no backward pass goes through a graph again.

    Looks at all backward passes of some steps in a row. active: these are looked at now. where: (file, line) that
    passes it without need, once that is known.
    """

    def __init__(self) -> None:
        self.active = False
        self.where: tuple[str, int] | None = None
        self._attempts = self._steps = 0
        self._line: tuple[str, int] | None = None
        # Number of the first node of the last graph: 0 before any.
        self._newest = 0

    def begin(self) -> None:
        """The next step is the first one."""
        if self.where is None and self._attempts < _ATTEMPTS:
            self.active, self._line, self._newest, self._steps = True, None, 0, 0

    def end(self) -> None:
        """What is known does not suffice, or a graph is needed again. Safe to call twice."""
        self.active = False

    def hear(self, loss: Any, retains: bool, line: tuple[str, int] | None) -> None:
        """A backward pass begins. loss: a plain tensor. retains: whether its graph stays, and gradients have none."""
        node = loss.grad_fn
        if not retains or line is None or node is None or self._oldest(node) <= self._newest:
            self.end()
            return
        self._line, self._newest = line, node._sequence_nr()

    def step_ended(self) -> bool:
        """A step has ended; whether the next one is to be looked at as well."""
        if not self.active:
            return False
        self._steps += 1
        if self._line is None:  # it had no backward pass
            self.end()
        elif self._steps == 1:
            self._attempts += 1
        elif self._steps > RETAINED_STEPS:
            self.where, self.active = self._line, False
        return self.active

    @staticmethod
    def _oldest(node: Any) -> int:
        """The lowest number of the nodes of a graph; 0 if it is too large to tell."""
        newest = node._sequence_nr()
        seen, left = {newest}, [node]
        while left:
            for one, _ in left.pop().next_functions:
                # As above.
                if one is not None and (number := one._sequence_nr()) < newest and number not in seen:
                    seen.add(number)
                    left.append(one)
            if len(seen) > _RETAINED_VISITED:
                return 0
        return int(min(seen))


# Collections that are kept until they are read.
MOST = 4096


class Garbage:
    """Times the collections between `begin` and `end`. every_steps: see `schedule`."""

    def __init__(self) -> None:
        self.every_steps = 0
        self._was_enabled = False
        self._begins: deque[int] = deque(maxlen=MOST)
        self._ends: deque[int] = deque(maxlen=MOST)
        # The collector calls it with "start" or "stop" and a dictionary, which is then the default of `getattr`.
        moments = {"start": property(_stamps(self._begins)), "stop": property(_stamps(self._ends))}
        self._callback = partial(getattr, type("Moments", (), {"__slots__": (), **moments})())

    def begin(self) -> None:
        """Begin; safe to call twice."""
        if self._callback not in gc.callbacks:
            gc.callbacks.append(self._callback)

    def end(self) -> None:
        """End, and leave collecting to Python; safe to call twice or without `begin`."""
        self.schedule(0)
        with Dropped(ValueError):
            gc.callbacks.remove(self._callback)

    def schedule(self, every_steps: int) -> None:
        """Collect only after every so many steps; 0: as Python did before."""
        if every_steps and not self.every_steps:
            self._was_enabled = gc.isenabled()
            gc.disable()
        elif self.every_steps and not every_steps and self._was_enabled:
            gc.enable()
        self.every_steps = every_steps

    def after_step(self, step: int, enter: Callable[[int], None] = no_phase) -> None:
        """Collect if it is due after a step. enter: of the clock, on which the time counts as `other`."""
        if self.every_steps and not step % self.every_steps:
            enter(OTHER)
            gc.collect()

    def drop_after(self, t: int) -> None:
        """Forget the collections that have begun since this moment, on the clock."""
        for times in (self._begins, self._ends):
            while times and times[-1] >= t:
                times.pop()

    def take(self) -> dict[str, Any]:
        """The collections since the last call, as fields of a window."""
        begins, ends = list(self._begins), list(self._ends)
        self._begins.clear()
        self._ends.clear()
        # Of the first one, only the end may be known, and only the begin of the last one.
        while begins and ends and begins[-1] > ends[-1]:
            begins.pop()
        spent = [end - begin for begin, end in zip(reversed(begins), reversed(ends))]
        return {"gc_count": len(spent), "gc_ns": sum(spent), "gc_max_ns": max(spent, default=0)}


def _stamps(times: deque[int]) -> Callable[[Any], Any]:
    """A function in C that ignores its argument and appends the present time."""
    return partial(next, map(times.append, iter(time.perf_counter_ns, None)))


# Tensors that are looked at, the largest ones, and values of each.
MOST_TENSORS, VALUES = 64, 64
# Shares below this are not told, and nothing where the processor takes less than so many times as long.
LEAST, SLOW = 0.05, 1.5
# Numbers of a test of the processor, which stay in its cache, and how often it is repeated.
_TRIED_NUMBERS, _REPEATS, _DENORMAL = 4096, 5, 1e-40


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
    # Optimizers take the square root of sums and averages of squared gradients.
    times = {name: root if "sq" in name or name == "sum" else multiply for name in found}
    return {name: (share, times[name]) for name, share in found.items() if times[name] >= SLOW}


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
        usual, small = (
            torch.full((_TRIED_NUMBERS,), value, dtype=torch.float32) for value in (1.0, _DENORMAL)
        )
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


# Modules of a model that are looked at, and names that are told, those with the highest counts.
MOST_MODULES, MOST_TOLD = 4096, 12
# Bytes that are told: reading what was moved takes some as well.
LEAST_MOVED = 4096
_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_DICTS = (dict, OrderedDict, defaultdict)


class Sizes:
    """Counts by kind and name: "hooks:block.3", "parameters:SGD", "state:SGD", "handlers:root", "graph:" (steps back).

    "read:" and "written:" are the bytes that the process has moved through files and pipes since this was made.
    """

    def __init__(self, looks: Looks) -> None:
        self._looks, self._moved = looks, moved()
        self._counts: dict[str, int] = {}
        self._seen: set[int] = set()
        # See `denormals`.
        self.denormals: dict[str, tuple[float, float]] = {}

    def model(self, module: Any) -> None:
        """Count the hooks of a model and of all modules in it."""
        if key_of(module) in self._seen or not self._looks.allowed():
            return
        with self._looks.silent():
            self._model(module)

    def _model(self, module: Any) -> None:
        left: list[tuple[str, Any]] = [("", module)]
        while left and len(self._seen) < MOST_MODULES:
            path, one = left.pop()
            if key_of(one) in self._seen:
                continue
            self._seen.add(key_of(one))
            found = attributes(one) or {}
            name = path or type(module).__name__
            for kind in _OF_MODULES:
                self._add("hooks", name, found.get(kind))
            for own, parameter in _items(found.get("_parameters")):
                if self._looks.is_tensor(parameter):
                    for kind in _OF_TENSORS:
                        self._add("hooks", f"{path}.{own}".lstrip("."), getattr(parameter, kind, None))
            children = _items(found.get("_modules"))
            left += [(f"{path}.{own}".lstrip("."), child) for own, child in children if child is not None]

    def optimizers(self, optimizers: Iterable[Any]) -> None:
        """Count the parameters of optimizers, each as often as it is in one, their state and their denormal numbers."""
        found = list(optimizers)
        self.denormals = denormals(self._looks, found)
        for one in found:
            count = sum(len(group["params"]) for group in groups_of(one))
            self._count("parameters", class_name(type(one)), count)
            self._count("state", class_name(type(one)), _entries(attribute(one, "state")))

    def handlers(self) -> None:
        """Count the handlers of loggers, each of which writes every message."""
        logging: Any = sys.modules.get("logging")
        known = getattr(getattr(logging, "Logger", None), "manager", None)
        if known is None:
            return
        for name, logger in [("root", logging.root), *_items(known.__dict__.get("loggerDict"))]:
            handlers = getattr(logger, "__dict__", {}).get("handlers")
            if type(handlers) is list and len(handlers) > 1:
                self._count("handlers", str(name), len(handlers))

    def graph(self, steps: int) -> None:
        """The graph of the loss reaches back so many steps."""
        self._count("graph", "", steps)

    def most(self, kind: str) -> int:
        """The highest count of a kind."""
        return max((count for key, count in self._counts.items() if key.startswith(f"{kind}:")), default=0)

    def counts(self) -> dict[str, int]:
        """The highest counts."""
        most = sorted(self._counts.items(), key=lambda item: -item[1])[:MOST_TOLD]
        before, now = self._moved, moved()
        if before is not None and now is not None:
            most += [
                (name, b - a)
                for name, a, b in zip(("read:", "written:"), before, now)
                if b - a >= LEAST_MOVED
            ]
        return dict(most)

    def _add(self, kind: str, name: str, held: Any) -> None:
        if type(held) in _DICTS:
            self._count(kind, name, len(held))

    def _count(self, kind: str, name: str, count: int) -> None:
        if count:
            key = f"{kind}:{name}"
            self._counts[key] = self._counts.get(key, 0) + count


def _entries(state: Any) -> int:
    """The entries of an optimizer's state, with those of lists in it, such as a history of gradients."""
    if not issubclass(type(state), dict):
        return 0
    count: int = dict.__len__(state)
    for values in list(dict.values(state)):
        if type(values) is dict:
            count += len(values) + sum(
                len(one) for one in list(values.values()) if type(one) in (list, deque)
            )
    return count


def _items(held: Any) -> list[tuple[Any, Any]]:
    return list(held.items()) if type(held) in _DICTS else []


# Rows from which on a table is large, and how many rows there are for each one that a step reads.
LEAST_ROWS, TIMES_READ = 1000, 4
# Of the elements that the optimizers update, a table has at least this part.
LEAST_SHARE = 0.05
# Nodes of a graph that are visited, each for about 2 us; in a larger graph no table counts.
_VISITED_MODULES = 10_000
# Nodes of fused attention, by a part of their name; the composite backend "math" has none.
_ATTENTION = {"FlashAttention": "flash", "EfficientAttention": "efficient", "CudnnAttention": "cudnn"}


@dataclass
class _Table:
    """Calls of an embedding so far and their indices. alone: whether a graph has shown that nothing else uses it."""

    module: weakref.ref[Any]
    calls: int = 0
    indices: int = 0
    alone: bool | None = None

    @property
    def weight(self) -> Any:
        """None if there is none, or no plain one."""
        module = self.module()
        return None if module is None else _weight(module)


class Tables:
    """devices: those of a DataParallel that was called, if there are several.

    attention: its backend, "" where a graph has no fused attention, None if no graph was looked at for it.
    """

    def __init__(self, torch: Any, looks: Looks, attends: bool = False) -> None:
        """attends: whether to look for attention."""
        self._looks, self._grad_enabled = looks, torch.is_grad_enabled
        self._kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
        self._threaded = torch.nn.DataParallel
        # By key of the weight; and the modules that were called outermost.
        self._tables: dict[int, _Table] = {}
        self._roots: dict[int, weakref.ref[Any]] = {}
        self.devices = 0
        self.attention: str | None = None
        self._attends = attends

    def enters(self, module: Any, depth: int, given: Any) -> None:
        """A module is called, so many calls deep, with these arguments."""
        if S[BASE] == EVALUATE:
            return
        if depth == 1:
            self._roots.setdefault(key_of(module), weakref.ref(module))
        kind = type(module)
        if issubclass(kind, self._threaded):
            devices = attribute(module, "device_ids")
            self.devices = max(self.devices, len(devices) if type(devices) is list else 0)
        elif issubclass(kind, self._kinds) and self._grad_enabled() and self._looks.allowed():
            self._reads(module, given)

    def leaves(self, depth: int) -> None:
        """A call ends that was so deep."""

    def _reads(self, module: Any, given: Any) -> None:
        weight = _weight(module)
        indices = self._looks.first_tensor(given)
        if attribute(module, "sparse") is not False or indices is None or not self._looks.is_tensor(weight):
            return
        shape = self._looks.shape(indices)
        if shape is None:
            return
        known = self._tables.setdefault(key_of(weight), _Table(weakref.ref(module)))
        known.calls += 1
        known.indices += prod(shape)

    def loss(self, loss: Any) -> None:
        """Follow the graph of a loss, before its backward pass, to what uses the tables. loss: a plain tensor."""
        users: dict[int, list[bool]] = {
            key: [] for key, table in self._tables.items() if self._shape(table)[0] >= LEAST_ROWS
        }
        node = loss.grad_fn
        if not (users or self._attends) or node is None:
            return
        if self._attends:
            self.attention = self.attention or ""
        seen, left = {node._sequence_nr()}, [node]
        while left and len(seen) <= _VISITED_MODULES:
            node = left.pop()
            if self._attends and not self.attention:
                self.attention = _attention(class_name(type(node)))
                if self.attention and not users:
                    return
            for one, _ in node.next_functions:
                if one is None:
                    continue
                if class_name(type(one)) == "AccumulateGrad":
                    if (key := key_of(one.variable)) in users:
                        users[key].append(node.name().startswith("Embedding"))
                elif (number := one._sequence_nr()) not in seen:
                    seen.add(number)
                    left.append(one)
        for key, found in users.items():
            table = self._tables[key]
            if left or not all(found) or len(found) > table.calls:
                table.alone = False
            elif found and table.alone is None:
                table.alone = True

    def found(self, optimizers: Iterable[Any]) -> list[list[Any]]:
        """[name, class, rows, columns, indices, share, optimizer] of each such table, the largest share first.

        share: of the elements of all parameters that are updated.
        """
        tables = {key: table for key, table in self._tables.items() if table.alone}
        if not tables or not self._looks.allowed():
            return []
        elements: dict[int, int] = {}
        owners: dict[int, str] = {}
        for optimizer in optimizers:
            for group in groups_of(optimizer):
                for one in group["params"]:
                    if self._looks.is_tensor(one):
                        elements[key_of(one)] = prod(self._looks.shape(one) or (0,))
                        owners[key_of(one)] = class_name(type(optimizer))
        names = self._names()
        rows = []
        for key, table in tables.items():
            module, (count, width) = table.module(), self._shape(table)
            if module is None or not elements.get(key):
                continue
            share = elements[key] / sum(elements.values())
            if count >= max(LEAST_ROWS, TIMES_READ * table.indices) and share >= LEAST_SHARE:
                name = names.get(key_of(module), "")
                kind = class_name(type(module))
                rows.append([name, kind, count, width, table.indices, share, owners[key]])
        return sorted(rows, key=lambda row: -row[5])

    def _shape(self, table: _Table) -> tuple[int, int]:
        weight = table.weight
        shape = self._looks.shape(weight) if self._looks.is_tensor(weight) else None
        return (shape[0], shape[1]) if shape is not None and len(shape) == 2 else (0, 0)

    def _names(self) -> dict[int, str]:
        """By key of each module: the class of the model, and the attributes that lead to it."""
        found: dict[int, str] = {}
        for root in [one for one in (known() for known in self._roots.values()) if one is not None]:
            for name, module in modules_within(root):
                path = ".".join(part for part in (class_name(type(root)), name) if part)
                found.setdefault(key_of(module), path)
        return found


def _weight(module: Any) -> Any:
    parameters = attribute(module, "_parameters")
    return parameters.get("weight") if type(parameters) is dict else None


def _attention(name: str) -> str:
    """The backend of a node of fused attention; "" for any other node."""
    if not name.startswith("ScaledDotProduct"):
        return ""
    return next((backend for part, backend in _ATTENTION.items() if part in name), "")
