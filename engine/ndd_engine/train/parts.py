"""Times the sub-phases of forward by hooks on the modules that make them up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ndd_engine.workloads.base import Parted

from .clock import PhaseClock

# What the two hooks of one call cost on a slow core, and the share of a step that they may take.
CALL_NS = 6_000
ALLOWED_SHARE = 0.003


class PartTimer:
    """While `clock` is set, time inside a part's modules belongs to "forward/<part>"; an inner part's to itself."""

    def __init__(self, parts: Mapping[str, Parted]) -> None:
        self.clock: PhaseClock | None = None
        self.calls = 0
        self._outer: list[int] = []
        self._handles: list[Any] = []
        for name, part in parts.items():
            for module in (part,) if isinstance(part, nn.Module) else part:
                self._handles += self._watch(name, module)

    def _watch(self, name: str, module: nn.Module) -> tuple[Any, Any]:
        def enter(_module: nn.Module, _inputs: Any) -> None:
            self.calls += 1
            if (clock := self.clock) is not None:
                self._outer.append(clock.enter_part(name))

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            if (clock := self.clock) is not None and self._outer:
                clock.enter(self._outer.pop())

        # Called even when the module raised: the phases must not be left inside it.
        return module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)

    def keep_if_cheap(self, calls: int, micro_step_ns: float) -> bool:
        """Take the hooks off where `calls` of them would cost a noticeable share of a micro-step; false then."""
        cheap = calls * CALL_NS <= micro_step_ns * ALLOWED_SHARE
        if not cheap:
            self.remove()
        return cheap

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
