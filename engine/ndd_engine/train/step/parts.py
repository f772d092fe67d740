"""Times the sub-phases of forward by hooks on the modules that make them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from ndd_engine.measure.clock import PhaseClock
from ndd_engine.workloads.base import Parted

# What the two hooks of one call cost on a slow core, and the share of a micro-batch that they may take.
CALL_NS = 6_000
ALLOWED_SHARE = 0.003


class PartTimer:
    """While `clock` is set, time inside a part's modules belongs to "forward/<part>"; an inner part's to itself.

    calls: of each part's modules so far.
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
            self.calls[name] += 1
            if (clock := self.clock) is not None:
                self._outer.append(clock.enter_part(name))

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            if (clock := self.clock) is not None and self._outer:
                clock.enter(self._outer.pop())

        # Called even when the module raised: the phases must not be left inside it.
        return module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)

    def keep_cheap(self, calls: Counter[str], micro_ns: float) -> list[str]:
        """Stop timing the parts that are called most until the rest costs little; returns which.

        calls: of each part in one micro-batch, which takes micro_ns. What a dropped part takes counts for the part
        around it, or for forward itself.
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
