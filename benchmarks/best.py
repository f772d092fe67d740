"""The engine's best settings vs. each guide's original settings, on this machine, for every workload.

Each setting is tried on top of the settings kept so far, in a few pairs of blocks; it is kept if the median of its
ratios is above 1.03. The kept settings are then measured vs. the original ones in new pairs, as the selecting pairs
overestimate the gain. Every candidate is a real run of the engine in a child process; compiling and warm-up are not
part of the ratios, and are reported with the number of steps after which they break even.

Ratios are of items per second, so that different batches are comparable. Losses are those of the first steps.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, islice

from ndd_engine.child import ChildError, spec_of
from ndd_engine.train.loop import Loop
from ndd_engine.trial.outcome import not_in_effect
from ndd_engine.trial.sides import SHARED_ENVIRONMENT, SideProcess
from ndd_engine.wizard.session import PATIENCE_S

from .common import (
    PARITY,
    Compared,
    Options,
    Table,
    Target,
    as_count,
    as_ms,
    as_ratio,
    as_seconds,
    compared,
    ignore,
    parity,
    say,
    statistics_cells,
)
from .engine import ONLY_STEPS, engine, step_s
from .guides import OTHER_BATCH, Guide, Settings, Step, as_sets, guides, merged

TITLE = (
    "best: the engine's best settings / the guide's original settings (items per second, neighbouring blocks)"
)
STEPS_TITLE = "best, setting by setting: each on top of the previously kept ones"
COLUMNS = (
    "workload", "before, ms", "after, ms", "before, items/s", "after, items/s", "n", "min", "median", "max",
    "95 % CI of the median", "guide's claim", "by the median", "first losses",
)  # fmt: skip
STEP_COLUMNS = (
    "workload: setting", "step, ms", "items/s", "n", "min", "median", "max", "kept", "first losses", "numbers",
    "compiling, s", "breaks even after (steps)",
)  # fmt: skip
KEPT_FROM = 1.03
LOSSES = 5


@dataclass
class Candidate:
    """A run with its settings."""

    settings: dict[str, str]
    side: SideProcess
    block_s: float

    @property
    def items(self) -> int:
        """Of an optimizer step."""
        return self.side.facts.items_per_step

    def rate(self) -> float:
        """Items per second of one block."""
        return self.items / step_s(self.side, self.block_s)


def measure(options: Options) -> list[Table]:
    """The results, and the search for them."""
    result, steps = Table(TITLE, COLUMNS), Table(STEPS_TITLE, STEP_COLUMNS)
    steps.note(PARITY)
    if options.quick:
        steps.note("--quick tries all settings at once, without compiling and different batches")
    with tempfile.TemporaryDirectory(prefix="ndd-bench-compiled-") as cache:
        for guide in options.cases(guides(options.device)):
            say(f"best: {guide.workload}")
            Search(guide, options, result, steps, cache).carry_out()
    return [result, steps]


class Search:
    """The search over the settings of one guide. cache: a folder for compiled code, cold at first."""

    def __init__(self, guide: Guide, options: Options, result: Table, steps: Table, cache: str) -> None:
        self.guide, self.options, self.result, self.steps = guide, options, result, steps
        self._scaled = (
            *guide.scaled,
            *options.small(guide.workload),
            *ONLY_STEPS,
            f"run.device={options.device}",
        )
        self._environment = {**SHARED_ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": cache}
        self._open: list[Candidate] = []

    def carry_out(self) -> None:
        """Search, then measure the kept settings."""
        try:
            before = self._candidate(merged(self.guide.before))
            best, kept = self._search(before)
            self._conclude(before, best, kept)
        except ChildError as error:
            self.result.add(self.guide.workload, "failed")
            self.result.note(f"{self.guide.workload}: {error}")
        finally:
            for candidate in self._open:
                candidate.side.close()

    def _search(self, before: Candidate) -> tuple[Candidate, list[Step]]:
        best, kept = before, list[Step]()
        options, limit_s = self.options, self.options.seconds(60.0, 4.0)
        deadline = math.inf if options.pairs else time.perf_counter() + limit_s
        for step in self._wanted():
            name = f"{self.guide.workload}: {step.name}"
            if time.perf_counter() > deadline:
                self.steps.note(f"{name}: not tried, the time limit for this workload was reached")
                continue
            say(f"best: {name}")
            try:
                candidate = self._candidate(merged(best.settings, step.sets))
                found = compared(best.rate, candidate.rate, options.repeats(3, 2), options.seconds(8.0, 2.0))
            except ChildError as error:
                self.steps.add(name, "failed")
                self.steps.note(f"{name}: {error}")
                continue
            keep = found.median > KEPT_FROM
            self._row(name, step, before, best, candidate, found, keep)
            loser = best if keep else candidate
            if keep:
                kept.append(step)
                best = candidate
            if loser is not before:
                self._open.remove(loser)
                loser.side.close()
        return best, kept

    def _wanted(self) -> list[Step]:
        gpu = self.options.device.startswith("cuda")
        fitting = [step for step in self.guide.steps if gpu or not step.gpu]
        if not self.options.quick:
            return fitting
        plain = [step for step in fitting if not step.apart]
        combined: Settings = {}
        for step in plain:
            combined = {**combined, **step.sets}
        numbers = ", ".join(dict.fromkeys(step.numbers for step in plain))
        return [Step("all at once", combined, numbers)]

    def _row(
        self, name: str, step: Step, before: Candidate, best: Candidate, candidate: Candidate, found: Compared,
        keep: bool,
    ) -> None:  # fmt: skip
        facts, rate = candidate.side.facts, found.subject
        compiling, break_even = "", ""
        if facts.compile_s is not None and best.side.facts.compile_s is None:
            compiling = as_seconds(facts.compile_s)
            saved = candidate.items / rate * (found.median - 1)
            break_even = as_count(math.ceil(facts.compile_s / saved)) if saved > 0 else "never"
        self.steps.add(
            name, as_ms(candidate.items / rate * 1e3), as_count(rate), str(len(found.values)),
            *(as_ratio(value) for value in (min(found.values), found.median, max(found.values))),
            "yes" if keep else "no", _same(before, candidate), step.numbers, compiling, break_even,
        )  # fmt: skip
        for text in not_in_effect(facts.settings):
            self.steps.note(f"{name}: {text}")

    def _conclude(self, before: Candidate, best: Candidate, kept: list[Step]) -> None:
        guide, name = self.guide, self.guide.workload
        self._note_settings(before, best, kept)
        if not kept:
            self.result.add(name, as_ms(before.items / before.rate() * 1e3), "no setting made it faster")
            return
        say(f"best: {name}: before and after")
        found = self._compared(name, before, best)
        for index, (says, ratio) in enumerate(guide.claims):
            verdict = Target(ratio, at_least=True).cells(found.median, as_ratio)[1]
            figures = _figures(found, before, best) if index == 0 else ("",) * 9
            self.result.add(name, *figures, says, verdict, _same(before, best) if index == 0 else "")
        if guide.loads:
            self._loading(before, best, found)

    def _compared(self, name: str, before: Candidate | Loading, best: Candidate | Loading) -> Compared:
        pairs = self.options.pairs or self.options.repeats(10, 2)
        limit_s = math.inf if self.options.pairs else self.options.seconds(25.0, 3.0)
        found = compared(before.rate, best.rate, pairs, limit_s)
        self.result.note(f"{name}: {found.note}" if found.note else "")
        return found

    def _loading(self, before: Candidate, best: Candidate, training: Compared) -> None:
        """Data loading alone: batches are fetched and discarded."""
        name = f"{self.guide.workload}: data loading alone"
        sets = [[*self._scaled, *as_sets(one.settings)] for one in (before, best)]
        with engine(self.guide.workload, sets[0]) as old, engine(self.guide.workload, sets[1]) as new:
            block_s = self.options.seconds(0.6, 0.25, least=0.05)
            loading = [Loading(one.loop, block_s) for one in (old, new)]
            found = self._compared(name, *loading)
        self.result.add(name, *_figures(found, before, best))
        shares = [training.baseline / found.baseline, training.subject / found.subject]
        self.result.note(f"{name}: {shares[0]:.0%} of a step before, {shares[1]:.0%} after")

    def _note_settings(self, before: Candidate, best: Candidate, kept: list[Step]) -> None:
        name, note = self.guide.workload, self.result.note
        note(f"{name}, common: {' '.join(self.guide.scaled)}; {before.side.facts.threads} threads")
        note(f"{name}, before: {_words(before.settings)}")
        changed = {key: value for key, value in best.settings.items() if before.settings.get(key) != value}
        note(f"{name}, after: {_words(changed) or 'nothing'}")
        others = [step.name for step in kept if step.numbers == OTHER_BATCH]
        if others:
            note(f"{name}: {', '.join(others)} changes what is trained; ratios count items only")
        if not self.options.device.startswith("cuda") and self.guide.needs_gpu:
            note(f"{name}: not measurable without a CUDA GPU: {self.guide.needs_gpu}")

    def _candidate(self, settings: dict[str, str]) -> Candidate:
        """A run that has trained its first steps. Raises ChildError."""
        spec = spec_of(None, self.guide.workload, [*self._scaled, *as_sets(settings)])
        side = SideProcess(spec, environment=self._environment)
        candidate = Candidate(settings, side, self.options.seconds(0.6, 0.25, least=0.05))
        self._open.append(candidate)
        side.prepare(PATIENCE_S, ignore)
        side.train(LOSSES, PATIENCE_S, ignore, lead=0)
        side.learn(ignore)
        return candidate


class Loading:
    """Fetches batches of a run without training on them."""

    def __init__(self, loop: Loop, block_s: float) -> None:
        self._block_s, self._items = block_s, loop.config.batch.items
        self._batches = (batch for epoch in count(1) for batch in loop.batches.epoch(epoch))
        for _ in islice(self._batches, 1 + loop.config.loader.workers * (loop.config.loader.prefetch or 2)):
            pass  # workers have caught up

    def rate(self) -> float:
        """Items per second of one block."""
        begin = time.perf_counter()
        for fetched, _ in enumerate(self._batches, start=1):
            if (taken := time.perf_counter() - begin) >= self._block_s:
                return fetched * self._items / taken
        raise RuntimeError("the data ended")


def _figures(found: Compared, before: Candidate, best: Candidate) -> tuple[str, ...]:
    """Milliseconds and items per second of both, and the statistics of their ratio."""
    sides = ((before.items, found.baseline), (best.items, found.subject))
    times = (as_ms(items / rate * 1e3) for items, rate in sides)
    return (*times, *(as_count(rate) for _, rate in sides), *statistics_cells(found.values, as_ratio))


def _same(before: Candidate, after: Candidate) -> str:
    if before.items != after.items:
        return "not comparable"
    return parity(*(one.side.facts.losses[:LOSSES] for one in (before, after)))


def _words(settings: Mapping[str, str]) -> str:
    return " ".join(as_sets(settings))
