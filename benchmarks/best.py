"""The engine's best settings vs. each guide's original settings, on this machine, for every workload.

Each setting is tried on top of the settings kept so far, in a few pairs of blocks; it is kept if the median of its
ratios is above 1.03. The kept settings are then measured vs. the original ones in new pairs, as the selecting pairs
overestimate the gain. Every candidate is a real run of the engine in a child process (see subject); compiling and
warm-up are not part of the ratios, and are reported with the number of steps after which they break even.

Ratios are of items per second, so that different batches are comparable. Losses are those of the first steps.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ndd_engine.child import ChildError

from .common import (
    Options,
    Table,
    Target,
    as_count,
    as_ms,
    as_ratio,
    as_seconds,
    paired,
    say,
    statistics_cells,
    undisturbed,
)
from .engine import ONLY_STEPS
from .guides import OTHER_BATCH, Guide, Settings, Step, as_sets, guides, merged
from .parity import WHY, parity
from .subject import Subject, compiler_cache

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


@dataclass(frozen=True)
class Effort:
    """How long to measure. search_s: limit for trying the settings of one workload."""

    block_s: float
    trial_pairs: int
    trial_s: float
    search_s: float
    pairs: int
    limit_s: float


@dataclass
class Candidate:
    """A run with its settings. steps: per block."""

    settings: dict[str, str]
    subject: Subject
    steps: int

    def rate(self) -> float:
        """Items per second of one block."""
        return self.steps * self.subject.ready.items / self.subject.train(self.steps)

    @property
    def losses(self) -> tuple[float, ...]:
        return self.subject.ready.losses


def measure(options: Options) -> list[Table]:
    """The results, and the search for them."""
    result, steps = Table(TITLE, COLUMNS), Table(STEPS_TITLE, STEP_COLUMNS)
    effort = Effort(
        block_s=options.seconds(0.6, 0.25), trial_pairs=options.repeats(3, 2), trial_s=options.seconds(8.0, 2.0),
        search_s=options.seconds(60.0, 4.0), pairs=options.repeats(10, 2), limit_s=options.seconds(25.0, 3.0),
    )  # fmt: skip
    if options.pairs is not None:
        effort = replace(effort, pairs=options.pairs, limit_s=math.inf, search_s=math.inf)
    steps.note(WHY)
    if options.quick:
        steps.note("--quick tries all settings at once, without compiling and different batches")
    with tempfile.TemporaryDirectory(prefix="ndd-bench-compiled-") as cache:
        compiler_cache(cache)
        wanted = (guide for guide in guides(options.device) if options.wants(guide.workload))
        for guide in options.cases(wanted):
            say(f"best: {guide.workload}")
            Search(guide, options, effort, result, steps).carry_out()
    return [result, steps]


class Search:
    """The search over the settings of one guide."""

    def __init__(self, guide: Guide, options: Options, effort: Effort, result: Table, steps: Table) -> None:
        self.guide, self.options, self.effort = guide, options, effort
        self.result, self.steps = result, steps
        self._scaled = (*guide.scaled, *ONLY_STEPS, f"run.device={options.device}")
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
            self._close_all()

    def _search(self, before: Candidate) -> tuple[Candidate, list[Step]]:
        best, kept = before, list[Step]()
        deadline = time.perf_counter() + self.effort.search_s
        for step in self._wanted():
            name = f"{self.guide.workload}: {step.name}"
            if time.perf_counter() > deadline:
                self.steps.note(f"{name}: not tried, the time limit for this workload was reached")
                continue
            say(f"best: {name}")
            try:
                candidate = self._candidate(merged(best.settings, step.sets))
                tried: list[float] = []
                found = paired(
                    best.rate, _kept_in(tried, candidate.rate), self.effort.trial_pairs, self.effort.trial_s
                )
            except ChildError as error:
                self.steps.add(name, "failed")
                self.steps.note(f"{name}: {error}")
                continue
            ratios = [ratio.value for ratio in found]
            keep = statistics.median(ratios) > KEPT_FROM
            self._row(name, step, before, best, candidate, statistics.median(tried), ratios, keep)
            if keep:
                kept.append(step)
                best, old = candidate, best
                if old is not before:
                    self._close(old)
            else:
                self._close(candidate)
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
        self,
        name: str,
        step: Step,
        before: Candidate,
        best: Candidate,
        candidate: Candidate,
        rate: float,
        ratios: list[float],
        keep: bool,
    ) -> None:
        ready = candidate.subject.ready
        compiling, break_even = "", ""
        if ready.compile_s is not None and best.subject.ready.compile_s is None:
            compiling = as_seconds(ready.compile_s)
            saved = ready.items / rate * (statistics.median(ratios) - 1)
            break_even = as_count(math.ceil(ready.compile_s / saved)) if saved > 0 else "never"
        self.steps.add(
            name, as_ms(ready.items / rate * 1e3), as_count(rate), str(len(ratios)),
            *(as_ratio(value) for value in (min(ratios), statistics.median(ratios), max(ratios))),
            "yes" if keep else "no", self._same(before, candidate), step.numbers, compiling, break_even,
        )  # fmt: skip
        for text in ready.not_in_effect:
            self.steps.note(f"{name}: {text}")

    def _same(self, before: Candidate, after: Candidate) -> str:
        if before.subject.ready.items != after.subject.ready.items:
            return "not comparable"
        return parity(before.losses, after.losses)

    def _conclude(self, before: Candidate, best: Candidate, kept: list[Step]) -> None:
        guide, name = self.guide, self.guide.workload
        self._note_settings(before, best, kept)
        if not kept:
            items = before.subject.ready.items
            self.result.add(name, as_ms(items / before.rate() * 1e3), "no setting made it faster")
            return
        say(f"best: {name}: before and after")
        taken: dict[str, list[float]] = {"before": [], "after": []}
        values = self._ratios(
            name, _kept_in(taken["before"], before.rate), _kept_in(taken["after"], best.rate)
        )
        old, new = (statistics.median(taken[side]) for side in ("before", "after"))
        ready, after = before.subject.ready, best.subject.ready
        figures = (
            as_ms(ready.items / old * 1e3), as_ms(after.items / new * 1e3), as_count(old), as_count(new),
            *statistics_cells(values, as_ratio),
        )  # fmt: skip
        for index, (says, ratio) in enumerate(guide.claims):
            cells = Target(ratio, at_least=True).cells(statistics.median(values), lambda value: f"{value:g}x")
            same = self._same(before, best)
            row = (name, *figures, says, cells[1], same) if index == 0 else _further(name, says, cells[1])
            self.result.add(*row)
        if guide.loads:
            self._loading(before, best, (old, new))

    def _loading(self, before: Candidate, best: Candidate, training: tuple[float, float]) -> None:
        """Data loading alone: batches are fetched and discarded. training: items per second of whole steps."""

        def rate(candidate: Candidate) -> float:
            return candidate.steps * candidate.subject.ready.items / candidate.subject.fetch(candidate.steps)

        name = f"{self.guide.workload}: data loading alone"
        taken: dict[str, list[float]] = {"before": [], "after": []}
        # Without training, optimised loading is so fast that a block needs more batches.
        quick = Candidate(best.settings, best.subject, best.steps * 8)
        values = self._ratios(
            name,
            _kept_in(taken["before"], lambda: rate(before)),
            _kept_in(taken["after"], lambda: rate(quick)),
        )
        old, new = (statistics.median(taken[side]) for side in ("before", "after"))
        ready, after = before.subject.ready, best.subject.ready
        self.result.add(
            name, as_ms(ready.items / old * 1e3), as_ms(after.items / new * 1e3), as_count(old), as_count(new),
            *statistics_cells(values, as_ratio),
        )  # fmt: skip
        self.result.note(f"{name}: {training[0] / old:.0%} of a step before, {training[1] / new:.0%} after")

    def _ratios(self, name: str, old: Callable[[], float], new: Callable[[], float]) -> list[float]:
        values, note = undisturbed(paired(old, new, self.effort.pairs, self.effort.limit_s))
        if note:
            self.result.note(f"{name}: {note}")
        return values

    def _note_settings(self, before: Candidate, best: Candidate, kept: list[Step]) -> None:
        name, note = self.guide.workload, self.result.note
        note(f"{name}, common: {' '.join(self.guide.scaled)}; {before.subject.ready.threads} threads")
        note(f"{name}, before: {_words(before.settings)}")
        changed = {key: value for key, value in best.settings.items() if before.settings.get(key) != value}
        note(f"{name}, after: {_words(changed) or 'nothing'}")
        others = [step.name for step in kept if step.numbers == OTHER_BATCH]
        if others:
            note(f"{name}: {', '.join(others)} changes what is trained; ratios count items only")
        if not self.options.device.startswith("cuda") and self.guide.needs_gpu:
            note(f"{name}: not measurable without a CUDA GPU: {self.guide.needs_gpu}")

    # Runs.

    def _candidate(self, settings: dict[str, str]) -> Candidate:
        losses = 3 if self.options.quick else LOSSES
        subject = Subject(self.guide.workload, [*self._scaled, *as_sets(settings)], losses)
        steps = max(round(self.effort.block_s / subject.ready.step_s), 2)
        candidate = Candidate(settings, subject, steps)
        self._open.append(candidate)
        return candidate

    def _close(self, candidate: Candidate) -> None:
        self._open.remove(candidate)
        candidate.subject.close()

    def _close_all(self) -> None:
        for candidate in list(self._open):
            self._close(candidate)


def _kept_in(values: list[float], measured: Callable[[], float]) -> Callable[[], float]:
    def block() -> float:
        values.append(measured())
        return values[-1]

    return block


def _further(name: str, says: str, verdict: str) -> tuple[str, ...]:
    """A row for a further claim about the same figures."""
    return (name, *("",) * (COLUMNS.index("guide's claim") - 1), says, verdict)


def _words(settings: Mapping[str, str]) -> str:
    return " ".join(as_sets(settings))
