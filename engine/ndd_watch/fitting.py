"""Blocks of a script's model that compute again in backward: given, or chosen for a memory budget.

For a budget, steps of the script are the probe. One shows which blocks there are, one what each keeps, and one for each
level what that saves. What is chosen counts only if the peak of a further step stays within the budget. On a GPU that
is what torch reserves; on the CPU, the process and the tensors of the step. Its heap may hold a little more.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any, Callable

from .switches import Switch

# Bytes of the units of a budget.
UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}
# Blocks with the same reason that are named.
MOST_NAMED = 3
# Steps in which the levels that are chosen are measured, each corrected by the one before.
CONFIRMED = 3
# Depths of containers of blocks that are measured, each in a step.
MOST_CONTAINERS = 3


class RefusedError(ValueError):
    """The change cannot be made in this script, with the reason."""


def budget_bytes(budget: str) -> int | None:
    """Bytes of a budget such as "8GB"; None for "auto" and for what is no size."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?(MB|GB|MiB|GiB)", budget)
    return int(float(found[1]) * UNITS[found[2]]) if found else None


class Recompute(Switch):
    """Blocks of the modules that the script calls compute again in backward, or keep activations in host memory."""

    # Its key in the configuration.
    key = "memory.recompute"
    most_probes = 3

    def __init__(self, value: Any, observer: Any) -> None:
        super().__init__(value, observer)
        self.levels: dict[str, str] = {}
        if isinstance(value, list):
            self.levels = dict(text.split("=") for text in value)
            self.requested = ", ".join(value)
        self._models: list[Any] = []

    def switch(self, on: bool) -> None:
        if self._models:
            _blocks().set_levels(self._model(), self.levels if on else {})

    def probes(self) -> Iterator[None]:
        """Each turn is a step that the script trains before anything is measured. Raises RefusedError for a refusal."""
        yield from self._find_models()
        modules = dict(self._model().named_modules())
        unknown = [name for name in self.levels if name not in modules]
        if unknown:
            raise RefusedError(f"memory.recompute: the model has no module {', '.join(unknown)}")
        with _blocks().watched_effects(
            self._model(), {name: modules[name] for name in self.levels}
        ) as effects:
            yield
        for name in self.levels:
            if why := effects.get(name, "it is not called"):
                raise RefusedError(f"memory.recompute: {name} cannot compute again: {why}")

    def applied(self) -> tuple[str, bool | None, str]:
        used = [block for block in _blocks().blocks_of(self._model()) if block.used] if self._models else []
        text = ", ".join(f"{block.name}={block.level}" for block in used) or "no block"
        return text, {block.name: block.level for block in used} == self.levels, self._how()

    def found(self) -> tuple[str, bool | None, str]:
        return "unknown", None, "an edit of the script is not looked at"

    def _how(self) -> str:
        return "read back from the modules"

    def _find_models(self) -> Iterator[None]:
        """Two steps: calls are seen from the second call of a class on. Raises RefusedError if there is none."""
        around = self.observer.modules.around
        around.append(self._around)
        try:
            yield
            yield
        finally:
            around.remove(self._around)
        if not self._models:
            raise RefusedError(f"{self.key}: no module with parameters is called outermost")
        for model in self._models:
            if type(model).__name__ == "OptimizedModule" or getattr(model, "_compiled_call_impl", None):
                raise RefusedError(f"{self.key}: the model is compiled: try it without torch.compile")
            kinds = {type(item).__name__ for item in (*model.modules(), *model.parameters())}
            if kinds & {"DTensor", "FullyShardedDataParallel"}:
                raise RefusedError(f"{self.key}: the model is sharded; choose its blocks by hand")

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(module: Any, *args: Any, **kwargs: Any) -> Any:
            known = any(module is model for model in self._models)
            if not known and self.torch.is_grad_enabled() and next(module.parameters(), None) is not None:
                self._models.append(module)
            return call(module, *args, **kwargs)

        return inside

    def _model(self) -> Any:
        """The outermost module; of several a list of them, whose numbers begin the paths of its blocks."""
        return self._models[0] if len(self._models) == 1 else self.torch.nn.ModuleList(self._models)


class MemoryBudget(Recompute):
    """As `memory.recompute`, of blocks that are chosen by measuring a few steps of the script."""

    key, most_probes = "memory.budget", 6 + MOST_CONTAINERS + CONFIRMED

    def __init__(self, value: Any, observer: Any) -> None:
        super().__init__(value, observer)
        self._plain = self._peak = self._limit = 0

    def peak_bytes(self, on: bool) -> int | None:
        return self._peak if on else self._plain

    def _how(self) -> str:
        limit, peak, plain = map(_size, (self._limit, self._peak, self._plain))
        without = f", {plain} without" if self.levels else ""
        how = "reserved on the GPU" if self._on_gpu else "in use"
        return f"at most {peak} of {limit} {how} in a step{without}"

    def probes(self) -> Iterator[None]:
        yield from self._find_models()
        recompute, turns, model = _blocks(), _turns(), self._model()
        self._limit = budget_bytes(self.value) or self._free()
        tree_account = turns.Account()
        tree = turns.CallTree(model, tree_account)
        modules = {name: module for name, module in model.named_modules() if name}
        with recompute.watched_effects(model, modules) as effects, tree_account:
            yield
        tree.detach()
        blocks = turns.blocks_of(tree.root, effects)
        account, self._plain = yield from self._measured({}, blocks.names)
        self._peak = self._plain
        if self._plain <= self._limit:
            return
        if not blocks.names:
            why = "no module of the model keeps much for backward"
            raise RefusedError(
                f"memory.budget: no block can compute again{_reasons(blocks.refused) or f': {why}'}"
            )
        table = turns.TurnTable(turns.turns_of(account))
        around = self._plain - table.plain.peak
        least = self._plain
        # What fits of these: seconds that it costs, levels, peak.
        fitting: list[tuple[float, dict[str, str], int]] = []
        groups = [(recompute.CHEAP, blocks.names), (recompute.ALL, blocks.names)]
        groups += [(recompute.ALL, names) for names in blocks.containers[:MOST_CONTAINERS]]
        for level, names in groups:
            recompute.spent = {}
            try:
                account, peak = yield from self._measured(dict.fromkeys(names, level), blocks.names)
                seconds = {name: sum(each) for name, each in recompute.spent.items()}
            finally:
                recompute.spent = None
            table.add(level, turns.turns_of(account), names, seconds)
            least = min(least, peak)
            if peak <= self._limit:
                fitting.append((sum(seconds.values()), dict.fromkeys(names, level), peak))
        limit = float(self._limit - around)
        for _ in range(CONFIRMED):
            choice = table.cheapest(limit, lambda option: True)
            levels = list(table.everything(recompute.ALL))[-1] if choice is None else choice.levels
            _, peak = yield from self._measured(levels, blocks.names)
            least = min(least, peak)
            if peak <= self._limit:
                self.levels, self._peak = levels, peak
                return
            if choice is None:
                break
            limit = min(limit - (peak - self._limit), choice.peak_bytes - 1.0)
        if fitting:
            _, self.levels, self._peak = min(fitting, key=lambda one: one[0])
            return
        needed = f"training needs at least {_size(least)} of the {_size(self._limit)} that it may use"
        what = "parameters, gradients, optimizer state and what blocks cannot compute again take more"
        raise RefusedError(f"memory.budget: {needed}: {what}{_reasons(blocks.refused)}")

    def _measured(self, levels: dict[str, str], names: Any) -> Any:
        """A step with these levels. A generator that returns (its account, the measured peak of the process)."""
        model, account = self._model(), _turns().Account()
        _blocks().set_levels(model, levels)
        modules = dict(model.named_modules())
        handles = [
            modules[name].register_forward_pre_hook(lambda _module, _given, name=name: account.call(name))
            for name in names
        ]
        for parameter in model.parameters():
            if parameter.grad is not None:  # the step may free it
                account.count(parameter.grad)
        before = account.now
        resident = self._begin_peak()
        try:
            with account:
                yield
        finally:
            for handle in handles:
                handle.remove()
            _blocks().set_levels(model, {})
        return account, self._end_peak(resident + account.peak - before)

    @property
    def _on_gpu(self) -> bool:
        device = self.observer.steps.device
        return device is not None and device.type == "cuda"

    def _begin_peak(self) -> int:
        """Forget the peak so far. Returns the bytes of the process now, without free ones of its heap."""
        cuda = self.torch.cuda
        if self._on_gpu:
            cuda.synchronize()
            cuda.empty_cache()
            cuda.reset_peak_memory_stats()
            return 0
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
        return _status("VmRSS")

    def _end_peak(self, counted: int) -> int:
        """The peak since then: what torch has reserved on a GPU, else the bytes in use that were counted."""
        return int(self.torch.cuda.max_memory_reserved()) if self._on_gpu else counted

    def _free(self) -> int:
        """What this process may use: its own memory, and what is free."""
        if self._on_gpu:
            return int(self.torch.cuda.mem_get_info()[0]) + int(self.torch.cuda.memory_reserved())
        with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
            return free + _status("VmRSS")
        raise RefusedError("memory.budget: the free memory is unknown: set a number of bytes")


def _reasons(refused: dict[str, str]) -> str:
    """Why blocks cannot compute again: each reason once, with its blocks."""
    by_reason: dict[str, list[str]] = {}
    for name, why in refused.items():
        by_reason.setdefault(why, []).append(name)
    named = ((names[:MOST_NAMED], len(names) - MOST_NAMED, why) for why, names in by_reason.items())
    return "".join(
        f"; {', '.join(names)}{f' and {more} more' if more > 0 else ''}: {why}" for names, more, why in named
    )


def _blocks() -> Any:
    """The module `recompute`, imported late: it needs torch. Raises RefusedError where that is too old for it."""
    try:
        return importlib.import_module(f"{__package__}.recompute")
    except ImportError:
        version = sys.modules["torch"].__version__
        raise RefusedError(f"torch {version} is too old: this needs torch 2.4") from None


def _turns() -> Any:
    return importlib.import_module(f"{__package__}.turns")


def _status(name: str) -> int:
    """Bytes that /proc/self/status names; 0 if it has none."""
    with (
        contextlib.suppress(OSError, ValueError, IndexError, StopIteration),
        open("/proc/self/status") as file,
    ):
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
    return 0


def _size(count: int) -> str:
    for unit, each in (("GB", 10**9), ("MB", 10**6)):
        if count >= each:
            return f"{count / each:.3g} {unit}"
    return f"{count} bytes"
