"""A machine that a test chooses, and measurements whose results it chooses."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ndd_engine.hardware.gpus import Gpu, Host, Machine
from ndd_engine.record.events import TrialEvent
from ndd_engine.trial.outcome import Progress, TrialRequest


def machine(cores: float = 2, gpu: bool = False, capability: tuple[int, int] = (9, 0)) -> Machine:
    """A CPU with so many usable cores, and a GPU if wanted."""
    host = Host("h", "Test CPU", 64, cores, None, None, {})
    found = Gpu(0, 0, "GPU-1", "Test GPU", 80 << 30, capability) if gpu else None
    return Machine((found,) if found else (), found, "cuda:0" if gpu else "cpu", {}, host)


def trial(verdict: str = "faster", ratio: float | None = None, **changes: Any) -> TrialEvent:
    """A result with an interval of two percent on either side."""
    usual = {"faster": 1.3, "slower": 0.8, "no difference": 1.0, "inconclusive": 1.01}
    value = usual.get(verdict) if ratio is None else ratio
    side = {"items_per_step": 16, "steps_per_epoch": 10, "prepare_s": 1.0, "step_s": 0.01, "peak_bytes": 1000}
    body: dict[str, Any] = {
        "sets": [], "against": "", "verdict": verdict, "text": f"{verdict}.", "ratio": value,
        "low": None if value is None else value * 0.98, "high": None if value is None else value * 1.02,
        "abba_blocks": 4, "pairs": 4, "df": 3.0, "in_effect": True, "loss": "same", "base": dict(side),
        "change": dict(side),
    }  # fmt: skip
    return TrialEvent(**{**body, **changes})


class Bench:
    """Answers each trial by the first of `results` that the change names; anything else gives no gain.

    requests: what was measured, in order. after: called with each request, before its answer.
    """

    def __init__(
        self,
        results: Mapping[str, TrialEvent | Exception],
        after: Callable[[TrialRequest], None] = lambda request: None,
    ) -> None:
        self.results, self.after = results, after
        self.requests: list[TrialRequest] = []

    def __call__(
        self, request: TrialRequest, tell: Callable[[Progress], None], stop: threading.Event | None
    ) -> TrialEvent:
        self.requests.append(request)
        tell(Progress("measuring", 1.0, request.budget_s))
        self.after(request)
        if stop is not None and stop.is_set():
            return trial("stopped", None)
        if request.base.name == "the baseline" and "all" in self.results:
            return self._answer(request, "all")
        known = [self.results[item] for item in request.sets if item in self.results]
        if request.base.name == "the baseline" and len(known) > 1:
            ratios = [item.ratio or 1.0 for item in known if isinstance(item, TrialEvent)]
            return replace(trial("faster", math.prod(ratios)), sets=list(request.sets))
        # The newest of what is set decides.
        names = [name for item in reversed(request.sets) for name in self.results if name == item]
        return (
            self._answer(request, names[0])
            if names
            else replace(trial("no difference"), sets=list(request.sets))
        )

    def _answer(self, request: TrialRequest, name: str) -> TrialEvent:
        found = self.results[name]
        if isinstance(found, Exception):
            raise found
        return replace(found, sets=list(request.sets))

    def of(self, item: str) -> TrialRequest:
        """The first request that changed this."""
        return next(request for request in self.requests if item in request.sets)
