"""The two sides of a trial: their processes are opened, prepared, trained and closed, pair by pair."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ndd_engine.child import ChildError, Json, Tick, draft_of, spec_of

from .blocks import BlockPlan, saves, switched_off
from .process import SHARED_ENVIRONMENT, SideProcess
from .request import MEASURING, Base
from .side import CACHES, LOSSES, RANKS, SideFacts

T = TypeVar("T")

# Maximum seconds for the first steps of a side, and for a first estimate of its step time.
WARMUP_S = 4.0
ESTIMATE_S = 0.4
# Seconds to warm up the further processes of a side.
AGAIN_S = 0.3
# Seconds beyond the budget after which a side that does not answer has failed.
PATIENCE_S = 120.0
# By index.
SIDES = ("the baseline", "the candidate")


class SideFailedError(Exception):
    """A side failed. index: into SIDES. kind: as in ChildError."""

    def __init__(self, index: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.index, self.kind = index, kind


class Sides:
    """The processes of both sides, by index into SIDES. Methods raise SideFailedError and what a tick raises.

    sets: of the candidate. changed: keys that differ. left_s: seconds left of the budget. tick: makes the tick of a
    stage. facts: what was measured of each side, startup times by its first process.
    """

    def __init__(
        self,
        base: Base,
        sets: Sequence[str],
        changed: Sequence[str],
        budget_s: float,
        left_s: Callable[[], float],
        tick: Callable[[str], Tick],
    ) -> None:
        self.base, self.changed = base, list(changed)
        self.facts = [SideFacts(), SideFacts()]
        self.rates: tuple[list[float], list[float]] = ([], [])
        # Of each pair, see SideFacts.parts_ns.
        self._parts: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        self._sets = tuple(sets)
        self._budget_s, self._left_s, self._tick = budget_s, left_s, tick
        self._open: dict[int, SideProcess] = {}
        # Why losses cannot be compared.
        self.note = ""
        # Not created here: compilers do so when they write to it. A process that outlives this one removes it.
        self._caches = Path(tempfile.gettempdir()) / f".ndd-caches-{secrets.token_hex(8)}"

    @property
    def count(self) -> int:
        """How many processes are open."""
        return len(self._open)

    def is_open(self, index: int) -> bool:
        """Whether a side has a process."""
        return index in self._open

    def open(self, *indices: int) -> None:
        """Start processes. They import torch at the same time."""
        run = self.base.run
        # On the run's own disk if write speed matters, else in the temporary folder.
        place = run.path.parent if run is not None and saves(self.changed) else None
        for index in indices:
            spec = self._spec(index)
            ranks = {RANKS: str(draft_of(spec).resolve().parallel.ranks)}
            with failures_of(index):
                self._open[index] = SideProcess(spec, place, {**self._environment(index), **ranks})

    def _spec(self, index: int) -> Json:
        sets = (*self.base.sets, *(self._sets if index else ()))
        return spec_of(self.base.config, self.base.workload, sets, switched_off(self.changed))

    def open_one(self) -> tuple[float, float]:
        """Start one process for both sides. Returns the approximate seconds of a step of each."""
        with failures_of(0):
            process = self._both()
        self._open = dict.fromkeys(range(len(SIDES)), process)
        limit_s = max(self._left_s(), 0.1)
        self._asked(0, "preparing both sides", lambda side, tick: side.prepare(limit_s, tick))
        self.facts = process.both
        until_s = min(ESTIMATE_S, self._budget_s / 60)
        base, change = (
            self.train(index, 1 << 40, "warming up", until_s=until_s) for index in range(len(SIDES))
        )
        return base[0] / base[1], change[0] / change[1]

    def _both(self) -> SideProcess:
        """Start a process that changes between the sides."""
        warmup_s = min(WARMUP_S, self._budget_s / 12)
        spec = {**self._spec(0), "change": self._spec(1), "warmup_s": warmup_s}
        return SideProcess(spec, None, self._environment(0))

    def _environment(self, index: int) -> dict[str, str]:
        """Caches of compiled code of its own: the first process of a side compiles, further ones read the caches."""
        folder = self._caches / ("baseline", "candidate")[index]
        names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        private = {name: str(folder / part) for name, part in names.items()}
        return {**SHARED_ENVIRONMENT, **private, CACHES: str(self._caches)}

    def close(self, *indices: int) -> None:
        """End processes; all of them without an argument."""
        for index in indices or tuple(self._open):
            if (side := self._open.pop(index, None)) is not None:
                side.close()

    def clean_up(self) -> None:
        """End all processes and remove the caches."""
        self.close()
        shutil.rmtree(self._caches, ignore_errors=True)

    def choose(self) -> str:
        """The baseline's configuration with its size chosen, as TOML."""
        self.open(0)
        found = self._asked(0, "choosing the model size", lambda side, tick: side.choose(tick))
        self.close(0)
        return found

    def prepare(self, index: int) -> float:
        """Prepare and warm up. Returns the approximate seconds of a step."""
        name = SIDES[index]
        first = self.facts[index].prepare_s is None
        limit_s = max(self._left_s(), 0.1)
        self._asked(index, f"preparing {name}", lambda side, tick: side.prepare(limit_s, tick))
        stage = f"warming up {name}"
        if not first:  # later processes profit from warm caches
            seconds, steps = self.train(index, 1 << 40, stage, until_s=AGAIN_S, first=True)
            return seconds / steps
        until_s = min(WARMUP_S, self._budget_s / 12)
        warmup = self.train(index, LOSSES, stage, until_s=until_s, first=True)
        side = self._open[index]
        seconds, steps = self.train(index, 1 << 40, stage, until_s=min(ESTIMATE_S, self._budget_s / 60))
        self._asked(index, stage, lambda side, tick: side.learn(tick))
        side.facts.warmup_s, side.facts.warmup_steps = warmup
        self.facts[index] = side.facts
        return seconds / steps

    def train(
        self,
        index: int,
        steps: int,
        stage: str,
        plan: BlockPlan | None = None,
        until_s: float | None = None,
        first: bool = False,
    ) -> tuple[float, int]:
        """(seconds, steps) of a run. first: without untimed lead steps, and at least two steps."""
        before = 0 if first else plan.lead(index) if plan is not None else 1
        limit_s = max(self._left_s(), 0.0) + PATIENCE_S
        within, least = plan is not None and plan.within, 2 if first else 1
        return self._asked(
            index,
            stage,
            lambda side, tick: side.train(
                steps, limit_s, tick, lead=before, until_s=until_s, least=least, within=within, index=index
            ),
        )

    def segment(self, index: int, plan: BlockPlan) -> float:
        """Items per second of one run of an ABBA block."""
        seconds, steps = self.train(index, plan.steps[index], MEASURING, plan)
        rate = steps * self.facts[index].items_per_step / seconds
        self.rates[index].append(rate)
        return rate

    def learn(self) -> None:
        """Update the facts of the open sides; what is known is kept if one does not answer."""
        for index, side in self._open.items():
            with suppress(ChildError):
                side.learn(self._tick(MEASURING))
                first, now = self.facts[index], side.both[index] if len(side.both) > 1 else side.facts
                first.settings, first.rank_peaks, first.findings = now.settings, now.rank_peaks, now.findings
                self._parts[index].append(now.parts_ns)
                first.parts_ns = mean(self._parts[index])
                first.peak_bytes = most(first.peak_bytes, now.peak_bytes)
                first.reserved_bytes = most(first.reserved_bytes, now.reserved_bytes)
                first.peaks += [] if now.peak_bytes is None else [now.peak_bytes]

    def forget(self) -> None:
        """Forget what was measured in blocks."""
        for rates, facts, parts in zip(self.rates, self.facts, self._parts, strict=True):
            rates.clear()
            facts.peaks.clear()
            parts.clear()

    def speeds(self) -> None:
        """Put the mean speeds into the facts."""
        for rates, facts in zip(self.rates, self.facts, strict=True):
            if rates:
                facts.items_per_s = sum(rates) / len(rates)
                facts.step_s = facts.items_per_step / facts.items_per_s

    def _asked(self, index: int, stage: str, ask: Callable[[SideProcess, Tick], T]) -> T:
        with failures_of(index):
            return ask(self._open[index], self._tick(stage))


@contextmanager
def failures_of(index: int) -> Iterator[None]:
    """Errors of a process as those of its side."""
    try:
        yield
    except ChildError as error:
        raise SideFailedError(index, error.kind, str(error)) from None


def mean(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each value over the mappings that are not empty; a missing value is 0."""
    known = [one for one in every if one]
    names = dict.fromkeys(name for one in known for name in one)
    return {name: sum(one.get(name, 0.0) for one in known) / len(known) for name in names}


def most(first: int | None, second: int | None) -> int | None:
    """The larger of the known values."""
    return max((value for value in (first, second) if value is not None), default=None)
