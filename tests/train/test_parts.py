"""Sub-phases of forward: an inner part's time is its own, an error leaves no part open, and costly ones are dropped."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from ndd_engine.measure import phase_clock as phase
from ndd_engine.measure.phase_clock import PhaseClock
from ndd_engine.record.events import PHASES
from ndd_engine.train.step.stepper import ALLOWED_SHARE, CALL_NS, PartTimer


class Ticking:
    """A clock that the modules below advance."""

    now = 0

    def __call__(self) -> int:
        return self.now


class Takes(nn.Module):
    def __init__(
        self, ticking: Ticking, ns: int, inner: nn.Module | None = None, breaks: bool = False
    ) -> None:
        super().__init__()
        self.ticking, self.ns, self.inner, self.breaks = ticking, ns, inner, breaks

    def forward(self, x: Tensor) -> Tensor:
        self.ticking.now += self.ns
        if self.inner is not None:
            x = self.inner(self.inner(x))
        if self.breaks:
            raise RuntimeError("no")
        return x


def timed(model: nn.Module, parts: PartTimer, ticking: Ticking) -> dict[str, int]:
    clock = PhaseClock(ticking)
    parts.clock = clock
    clock.enter(phase.FORWARD)
    model(torch.zeros(1))
    parts.clock = None
    clock.enter(phase.BACKWARD)
    ticking.now += 7
    clock.end_step()
    window = clock.take()
    phases = window.phases()
    assert sum(item["host_ns"] for name, item in phases.items() if name in PHASES) == window.wall_ns
    return {name: item["host_ns"] for name, item in phases.items()}


def test_an_inner_part_is_its_own_and_both_belong_to_forward() -> None:
    ticking = Ticking()
    attention = Takes(ticking, 10)
    decoder = Takes(ticking, 100, attention)
    found = timed(
        nn.Sequential(Takes(ticking, 1000), decoder),
        PartTimer({"decoder": decoder, "attention": [attention]}),
        ticking,
    )
    assert found == {"forward": 1120, "forward/decoder": 100, "forward/attention": 20, "backward": 7}


def test_an_error_inside_leaves_no_part_open() -> None:
    ticking = Ticking()
    broken = Takes(ticking, 5, breaks=True)
    parts, clock = PartTimer({"head": broken}), PhaseClock(ticking)
    parts.clock = clock
    clock.enter(phase.FORWARD)
    with pytest.raises(RuntimeError):
        broken(torch.zeros(1))
    assert clock.current == "forward"


def test_the_most_called_parts_are_dropped_until_the_rest_is_cheap() -> None:
    ticking = Ticking()
    attention = Takes(ticking, 10)
    decoder = Takes(ticking, 100, attention)
    parts = PartTimer({"decoder": decoder, "attention": attention})
    calls = Counter({"decoder": 1, "attention": 2})
    enough = 3 * CALL_NS / ALLOWED_SHARE
    assert parts.keep_cheap(calls, enough) == []
    assert parts.keep_cheap(calls, enough / 2) == ["attention"]
    assert timed(decoder, parts, ticking) == {"forward": 120, "forward/decoder": 120, "backward": 7}
    assert parts.keep_cheap(calls, 0.0) == ["attention", "decoder"]
    assert timed(decoder, parts, ticking) == {"forward": 120, "backward": 7}
    assert parts.keep_cheap(Counter(), 0.0) == []  # a workload without parts
