"""Times sub-phases: parts of the model, by hooks of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from ndd_engine.workloads.result import Parted
from ndd_watch import recompute
from ndd_watch.clock import PhaseClock

# Cost of the two hooks of one call on a slow core, and the share of a micro-batch that all hooks may take. In a loop of
# nothing else a call takes 2 us more; in a step, which has filled the caches meanwhile, about ten times that.
CALL_NS = 20_000
ALLOWED_SHARE = 0.003


class PartTimer:
    """While `clock` is set, counts time inside a part's modules towards "forward/<part>"; inner parts count separately.

    calls: module calls per part so far.
    """

    def __init__(self, parts: Mapping[str, Parted]) -> None:
        self.clock: PhaseClock | None = None
        self.calls: Counter[str] = Counter()
        self._outer: list[int] = []
        self._handles = {
            name: [
                handle
                for module in ((part,) if isinstance(part, nn.Module) else part)
                for handle in self._watch(name, module)
            ]
            for name, part in parts.items()
        }

    def _watch(self, name: str, module: nn.Module) -> tuple[Any, Any]:
        def enter(_module: nn.Module, _inputs: Any) -> None:
            if recompute.recomputing():
                return  # it is part of backward
            self.calls[name] += 1
            if (clock := self.clock) is not None:
                self._outer.append(clock.enter_part(name))

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            if (clock := self.clock) is not None and self._outer and not recompute.recomputing():
                clock.enter(self._outer.pop())

        # Runs even if the module raises: the clock must not stay inside the part.
        return module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)

    def keep_cheap(self, calls: Counter[str], micro_ns: float) -> list[str]:
        """Stop timing the most frequently called parts until the rest is cheap; returns the dropped parts.

        calls: module calls per part in one micro-batch, which takes micro_ns. The time of a dropped part counts
        towards the part around it, or towards forward.
        """
        dropped = []
        allowed = micro_ns * ALLOWED_SHARE / CALL_NS
        for name, _ in calls.most_common():
            if sum(calls[kept] for kept in self._handles) <= allowed:
                break
            for handle in self._handles.pop(name, []):
                handle.remove()
            dropped.append(name)
        return dropped
