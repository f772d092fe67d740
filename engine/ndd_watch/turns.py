"""Bytes in use of one forward and backward pass by block, and the cheapest levels of the blocks under a limit.

A turn begins where a block is called, and backward goes through the turns in reverse. What a block saves is gone
from the end of its call to its own backward pass, so each limit depends only on the savings of the blocks before it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# Nodes of the autograd graph with a larger number accumulate gradients, and belong to no block.
_OF_FORWARD = 1 << 60
# Sorts after every name of a block.
_LAST_NAME = "\U0010ffff"
# States of the search that are kept for each turn.
MOST_STATES = 400
FORWARD, BACKWARD, OUTSIDE = "forward", "backward", "outside"


class Account(TorchDispatchMode):
    """Counts storages while it is active. `call` is told of each call of a block.

    now, peak: bytes in use, and the most so far. starts: (sequence number of autograd, name) of each turn. level,
    most: bytes in use where a place begins, and the most within it. A place is (FORWARD or BACKWARD, turn), -1 before
    the first block, or (OUTSIDE, 0).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.starts: list[tuple[int, str]] = []
        self.level: dict[tuple[str, int], int] = {}
        self.most: dict[tuple[str, int], int] = {}
        self._place = (FORWARD, -1)
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._current_graph_task_id() >= 0:
            node = torch._C._current_autograd_node()
            number = -1 if node is None else node._sequence_nr()
            if 0 <= number < _OF_FORWARD:
                turn = bisect_right(self.starts, (number, _LAST_NAME)) - 1
                if self._place[0] != BACKWARD or turn < self._place[1]:
                    self._enter(BACKWARD, turn)
        elif self._place[0] == BACKWARD:
            self._enter(OUTSIDE, 0)
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, Tensor):
                self.count(item)
        return result

    def call(self, name: str) -> None:
        """A block is called. A second forward pass in a step, as of a GAN, starts the turns anew."""
        if torch._C._current_graph_task_id() >= 0:
            return
        if self._place[0] != FORWARD:
            self.starts, self.level, self.most = [], {}, {}
            self._enter(FORWARD, -1)
        self.starts.append((torch._C._autograd._get_sequence_nr(), name))
        self._enter(FORWARD, len(self.starts) - 1)

    def _enter(self, phase: str, turn: int) -> None:
        self._place = phase, turn
        self.level[self._place] = self.most[self._place] = self.now

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that may be new."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        # What is offloaded lies in host memory.
        if address in self._known or not size or (torch.cuda.is_initialized() and not tensor.is_cuda):  # type: ignore[no-untyped-call]
            return
        self._known.add(address)
        self._add(size)
        weakref.finalize(storage, self._gone, address, size).atexit = False  # type: ignore[misc]

    def _gone(self, address: int, size: int) -> None:
        self._known.discard(address)
        self._add(-size)

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
        self.most[self._place] = max(self.most.get(self._place, 0), self.now)


@dataclass(frozen=True)
class Turns:
    """Bytes by turn, relative to the bytes in use before the step.

    start, forward: where forward of a turn begins, and the most within. after: left by the backward passes of a
    turn and all later ones; one more than there are turns. backward: the most within the backward pass.
    outside: the most anywhere else.
    """

    names: tuple[str, ...]
    start: tuple[int, ...]
    forward: tuple[int, ...]
    after: tuple[int, ...]
    backward: tuple[int, ...]
    outside: int

    @property
    def peak(self) -> int:
        """The most of all."""
        return max(*self.forward, *self.backward, self.outside)


def turns_of(account: Account) -> Turns:
    """The turns of the last forward and backward pass. Raises ValueError if no block was called in one."""
    count, level, most = len(account.starts), account.level, account.most
    in_backward = [level[BACKWARD, turn] for turn in range(count) if (BACKWARD, turn) in level]
    if not count or not in_backward:
        raise ValueError("no block has a backward pass")
    after, backward = [0] * (count + 1), [0] * count
    after[count] = level.get((BACKWARD, count - 1), max(in_backward))
    for turn in range(count - 1, -1, -1):
        later = (level[BACKWARD, other] for other in range(turn - 1, -2, -1) if (BACKWARD, other) in level)
        following = next(later, level.get((OUTSIDE, 0), account.now))
        after[turn] = following if (BACKWARD, turn) in level else after[turn + 1]
        backward[turn] = most.get((BACKWARD, turn), after[turn + 1])
    return Turns(
        tuple(name for _, name in account.starts),
        tuple(level[FORWARD, turn] for turn in range(count)),
        tuple(most[FORWARD, turn] for turn in range(count)),
        tuple(after),
        tuple(backward),
        max(most.get(place, 0) for place in ((FORWARD, -1), (BACKWARD, -1), (OUTSIDE, 0))),
    )


def at_size(small: Turns, large: Turns, at: tuple[int, int], size: int) -> Turns:
    """The turns at another micro-batch, on the lines through two. Raises ValueError if their blocks differ."""
    if small.names != large.names:
        raise ValueError("the blocks that are called depend on the micro-batch")

    def line(one: int, other: int) -> int:
        return round(other + (other - one) / (at[1] - at[0]) * (size - at[1]))

    def lines(name: str) -> tuple[int, ...]:
        return tuple(map(line, getattr(small, name), getattr(large, name)))

    return Turns(
        large.names, lines("start"), lines("forward"), lines("after"), lines("backward"),
        line(small.outside, large.outside),
    )  # fmt: skip


@dataclass(frozen=True)
class Option:
    """A level of a block, or of a container of blocks, for the turns begin..end (exclusive).

    saves: bytes less from its call to its backward pass. forward, backward: how much more than before and after it is
    in use within them, at most. seconds: what it costs.
    """

    begin: int
    end: int
    name: str
    level: str
    saves: int
    forward: int
    backward: int
    seconds: float


@dataclass(frozen=True)
class LevelChoice:
    """levels: by block; blocks that keep everything are left out. peak_bytes, seconds: predicted."""

    levels: dict[str, str]
    peak_bytes: int
    seconds: float


@dataclass
class TurnTable:
    """The turns of the plain model and the options of each block."""

    plain: Turns
    options: list[Option] = field(default_factory=list)

    def __post_init__(self) -> None:
        one = self.plain
        for turn, name in enumerate(one.names):
            rise = one.forward[turn] - one.start[turn], one.backward[turn] - one.after[turn + 1]
            self.options.append(Option(turn, turn + 1, name, "", 0, *rise, 0.0))

    def add(self, level: str, found: Turns, names: Sequence[str], seconds: Mapping[str, float]) -> None:
        """Options from the turns of a step in which all of `names` had this level. seconds: of each of them."""
        plain_ends = [*self.plain.start, self.plain.after[-1]]
        ends = [*found.start, found.after[-1]]
        for name in names:
            for begin, end in self._spans(name):
                # Blocks before it have saved something as well.
                saves = plain_ends[end] - ends[end] - (plain_ends[begin] - ends[begin])
                forward = max(found.forward[begin:end]) - found.start[begin]
                backward = max(found.backward[begin:end]) - found.after[end]
                cost = seconds.get(name, 0.0) / max(len(self._spans(name)), 1)
                self.options.append(Option(begin, end, name, level, saves, forward, backward, cost))

    def _spans(self, name: str) -> list[tuple[int, int]]:
        """The turns of each call of a block; of a container, those of the blocks inside if they are neighbours."""
        own = [turn for turn, other in enumerate(self.plain.names) if other == name]
        if own:
            return [(turn, turn + 1) for turn in own]
        inside = [turn for turn, other in enumerate(self.plain.names) if other.startswith(f"{name}.")]
        if not inside or any(later != earlier + 1 for earlier, later in zip(inside, inside[1:])):
            return []
        return [(inside[0], inside[-1] + 1)]

    def cheapest(self, limit: float, allowed: Callable[[Option], bool]) -> LevelChoice | None:
        """The options of all turns that cost the least and never exceed `limit` bytes, or None."""
        if self.plain.outside > limit:
            return None
        names = self.plain.names
        repeated = {name for name in names if names.count(name) > 1}
        reached: dict[int, list[_State]] = defaultdict(list)
        reached[0] = [_State(0, 0.0, self.plain.outside, ())]
        by_begin: dict[int, list[Option]] = defaultdict(list)
        for option in self.options:
            if not option.level or allowed(option):
                by_begin[option.begin].append(option)
        for turn in range(len(names)):
            for state in _best(reached.pop(turn, [])):
                for option in by_begin[turn]:
                    if option.name in repeated and not state.agrees(option):
                        continue
                    here = self._peak(state, option)
                    if here <= limit:
                        reached[option.end].append(state.then(option, here))
        ended = _best(reached.get(len(names), []))
        if not ended:
            return None
        best = min(ended, key=lambda state: (state.seconds, state.peak))
        return LevelChoice({name: level for name, level in best.chosen if level}, best.peak, best.seconds)

    def everything(self, level: str) -> Iterator[dict[str, str]]:
        """Levels with which every block has this one: each by itself, and in larger containers."""
        spans = {option.name: (option.begin, option.end) for option in self.options if option.level == level}
        for largest in (False, True):
            levels: dict[str, str] = {}
            place = 0
            while place < len(self.plain.names):
                here = [name for name, (begin, _) in spans.items() if begin == place]
                name = (max if largest else min)(here, key=lambda name: spans[name][1], default=None)
                if name is not None:
                    levels[name] = level
                place = place + 1 if name is None else spans[name][1]
            if levels:
                yield levels

    def _peak(self, state: _State, option: Option) -> int:
        one, saved = self.plain, state.saved
        return max(
            one.start[option.begin] - saved + option.forward,
            one.after[option.end] - saved - option.saves + option.backward,
        )


@dataclass(frozen=True)
class _State:
    """Turns up to some place are decided. chosen: (name, level) of each."""

    saved: int
    seconds: float
    peak: int
    chosen: tuple[tuple[str, str], ...]

    def agrees(self, option: Option) -> bool:
        """Whether earlier calls of the same block have this level."""
        return all(level == option.level for name, level in self.chosen if name == option.name)

    def then(self, option: Option, peak: int) -> _State:
        chosen = (*self.chosen, (option.name, option.level))
        return _State(self.saved + option.saves, self.seconds + option.seconds, max(self.peak, peak), chosen)


def _best(states: list[_State]) -> list[_State]:
    """Those that no other one beats in both saved bytes and seconds."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda each: (-each.saved, each.seconds, each.peak)):
        if not kept or state.seconds < kept[-1].seconds:
            kept.append(state)
    if len(kept) <= MOST_STATES:
        return kept
    step = -(-len(kept) // MOST_STATES)
    return [*kept[::step], kept[-1]]


@dataclass
class Call:
    """One call of a module in forward: what it added to the bytes in use, and the calls inside."""

    name: str
    grown: int
    inside: list[Call] = field(default_factory=list)


class CallTree:
    """While it is attached, the tree of calls of a model's modules. names: by module."""

    def __init__(self, model: nn.Module, account: Account) -> None:
        self.root = Call("", 0)
        self._account, self._open = account, [self.root]
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if name:
                self._handles += self._watch(name, module)

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        def enter(_module: nn.Module, _inputs: Any) -> None:
            if torch._C._current_graph_task_id() < 0:
                self._open.append(Call(name, -self._account.now))

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            if torch._C._current_graph_task_id() < 0:
                call = self._open.pop()
                call.grown += self._account.now
                self._open[-1].inside.append(call)

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave)

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


# A module whose call adds more than this share of the whole is opened: its parts are the blocks.
OPENED_SHARE = 0.125
# One that adds less is no block.
LEAST_SHARE = 0.01


@dataclass(frozen=True)
class Blocks:
    """names: in the order of their calls. containers: modules with several blocks inside, by depth. refused: why."""

    names: tuple[str, ...]
    containers: tuple[tuple[str, ...], ...]
    refused: dict[str, str]


def blocks_of(root: Call, effects: Mapping[str, str]) -> Blocks:
    """The blocks of a model from the calls of one step. effects: why modules cannot compute twice, "" if they can."""
    total = max(sum(call.grown for call in root.inside), 1)
    names: dict[str, None] = {}
    containers: dict[int, dict[str, None]] = defaultdict(dict)
    refused: dict[str, str] = {}

    def visit(call: Call, depth: int) -> None:
        if call.grown <= LEAST_SHARE * total:
            return
        why = effects.get(call.name, "")
        if why:
            refused[call.name] = why
        large = [inner for inner in call.inside if inner.grown > LEAST_SHARE * total]
        most_inside = sum(inner.grown for inner in large) > 0.5 * call.grown
        if large and most_inside and (why or call.grown > OPENED_SHARE * total):
            if not why and len(large) > 1:
                containers[depth][call.name] = None
            for inner in call.inside:
                visit(inner, depth + 1)
        elif not why:
            names[call.name] = None

    for call in root.inside:
        visit(call, 0)
    return Blocks(tuple(names), tuple(tuple(each) for _, each in sorted(containers.items())), refused)
