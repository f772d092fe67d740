"""The two sides of a trial: their processes are opened, prepared, trained and closed, pair by pair.

Does not import torch.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from ndd_engine.child import ChildError, ChildProcess, Json, Tick, Wire, answers, draft_of, spec_of, ticker
from ndd_engine.config import Config, Draft, read
from ndd_engine.errors import UsageError

from .blocks import (
    BlockPlan,
    BlocksDoNotFitError,
    can_switch,
    needs_epochs,
    never_happens,
    period,
    saves,
    switched_off,
)
from .estimates import Replicates
from .outcome import CACHES, LOSSES, MEASURING, Progress, SideFacts, TrialRequest, differences, same_steps

T = TypeVar("T")
Tell = Callable[[Progress], None]

# The same for both sides, so that only the tried settings differ: the iteration order of sets of strings, and glibc's
# handling of freed memory, which otherwise depends on the heap layout.
SHARED_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}
# Maximum seconds for the first steps of a side, and for a first estimate of its step time.
WARMUP_S = 4.0
ESTIMATE_S = 0.4
# Seconds to warm up the further processes of a side.
AGAIN_S = 0.3
# Batches that are ready beforehand are used up when this share of a run is waiting for data, or after this many times
# their number.
WAITS = 0.1
TIMES_STOCK = 2
# Seconds beyond the budget after which a side that does not answer has failed.
PATIENCE_S = 120.0
# Interval of progress reports.
TELL_S = 0.5
# By index.
SIDES = ("the baseline", "the candidate")


class Budget:
    """The time of a trial, and who hears how far it is. stage: for display. replicates: what was measured so far.

    tell: called a few times per second while a process works. stop: set to end the trial.
    """

    def __init__(self, budget_s: float, tell: Tell, stop: threading.Event | None) -> None:
        self.budget_s = budget_s
        self.replicates = Replicates()
        self.stage = "starting"
        self._tell, self._stop = tell, stop
        self._begin, self._told_s = time.monotonic(), 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative once it is spent."""
        return self.budget_s - self.elapsed_s

    def tick(self, stage: str) -> Tick:
        """The tick of a stage. It raises StoppedError once the trial is to end."""

        def tell(stage: str) -> None:
            if stage != self.stage or self.elapsed_s - self._told_s >= TELL_S:
                self.progress(stage)

        self.progress(stage)
        return ticker(stage, tell, self._stop)

    def progress(self, stage: str) -> None:
        """Tell how far the trial is."""
        self.stage, self._told_s = stage, self.elapsed_s
        found = self.replicates.estimate()
        numbers = {"ratio": found.ratio, "low": found.low, "high": found.high} if found is not None else {}
        blocks, pairs = self.replicates.blocks, self.replicates.processes
        self._tell(Progress(stage, self.elapsed_s, self.budget_s, blocks, pairs=pairs, **numbers))


class SideFailedError(Exception):
    """A side failed. index: into SIDES. kind: as in ChildError."""

    def __init__(self, index: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.index, self.kind = index, kind


class Trained:
    """The processes of a side, or of both: one for each rank. `prepare`, `train` runs, `close`.

    both: facts of each side; facts: of the first. waited_s: seconds that the last run waited for data. Methods raise
    ChildError. wires: to each of the ranks.
    """

    def __init__(self) -> None:
        self.wires: list[Wire] = []
        self.facts = SideFacts()
        self.both = [self.facts]
        self.waited_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, limit_s: float, tick: Tick) -> None:
        """Prepare up to the first run."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes and remove what they wrote; safe to call twice."""
        raise NotImplementedError

    def train(
        self,
        steps: int,
        limit_s: float,
        tick: Tick,
        *,
        lead: int = 1,
        until_s: float | None = None,
        least: int = 1,
        within: bool = False,
        index: int = 0,
        measured: bool = False,
    ) -> tuple[float, int]:
        """(seconds, steps) of a run; with until_s it ends about then, before `steps`, but not before `least`.

        index: the side, of a process with both. within, measured: see `side.OwnTrainer.begin`.
        """
        seconds, done, self.waited_s = 0.0, 0, 0.0
        count = steps if until_s is None else min(steps, least)
        while True:
            command = {"do": "train", "side": index, "lead": lead, "steps": count, "within": within}
            found = self._ask({**command, "measured": measured}, limit_s, tick)
            seconds += max(float(one["seconds"]) for one in found)
            self.waited_s += max(float(one["waited_s"]) for one in found)
            done, lead = done + count, 0
            if until_s is None or done >= steps or seconds >= until_s:
                return seconds, done
            # All ranks train the same steps. The first ones are slower, so the rest is approached in parts.
            count = max(min(int((until_s - seconds) / max(seconds / done, 1e-9) / 2), steps - done), 1)

    def learn(self, tick: Tick) -> None:
        """Update the facts."""
        self._know(self._ask({"do": "facts"}, 60.0, tick))

    def _ask(self, command: Json, limit_s: float, tick: Tick) -> list[Json]:
        for wire in self.wires:
            wire.send(command)
        return answers(self.wires, limit_s, tick)

    def _know(self, found: Sequence[Json]) -> None:
        every = [[SideFacts(**facts) for facts in each["sides"]] for each in found]
        self.both = [of_ranks(ranks) for ranks in zip(*every, strict=True)]
        self.facts = self.both[0]


class SideProcess(Trained):
    """Processes that train a configuration of the engine.

    spec: the configuration; with "change", that of the candidate in the same process. place: where its temporary
    folders are created; None: the system's.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        place: Path | None = None,
        environment: Mapping[str, str] = SHARED_ENVIRONMENT,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._ranks: list[ChildProcess] = []
        try:
            for _ in range(1 if "change" in spec else draft_of(dict(spec)).resolve().parallel.ranks):
                self._ranks.append(ChildProcess("ndd_engine.trial.side", place, environment))
        except BaseException:
            self.close()
            raise
        self.wires = [rank.wire for rank in self._ranks]

    def choose(self, tick: Tick) -> str:
        """The configuration as TOML with its size chosen and its paths made absolute."""
        return str(self._ranks[0].ask({"do": "choose", **self.spec}, None, tick)["config"])

    def prepare(self, limit_s: float, tick: Tick) -> None:
        """Prepare the run up to its first step."""
        ranks, command = len(self._ranks), {"do": "prepare", **self.spec}
        more: list[Json] = [{}]
        if ranks > 1:
            port = self._ranks[0].ask({"do": "meet", "ranks": ranks}, limit_s, tick)["port"]
            more = [{"rank": rank, "ranks": ranks, "port": port} for rank in range(ranks)]
        for wire, own in zip(self.wires, more, strict=True):
            wire.send({**command, **own})
        self._know([found["ready"] for found in answers(self.wires, limit_s, tick)])

    def close(self) -> None:
        for rank in self._ranks:
            rank.wire.hang_up()
        for rank in self._ranks:
            rank.close()


def of_ranks(every: Sequence[SideFacts]) -> SideFacts:
    """The facts of a side from those of its ranks, of which the first one knows what is true for all."""
    first = every[0]
    if len(every) == 1:
        return first
    missing = {key: value for facts in every for key, value in facts.settings.items() if value[2] is False}
    peaks = [facts.peak_bytes for facts in every if facts.peak_bytes is not None]
    reserved = [facts.reserved_bytes for facts in every if facts.reserved_bytes is not None]
    losses = [sum(values) / len(values) for values in zip(*same_steps(*every), strict=False)]
    steps = sorted(set.intersection(*(set(facts.loss_steps) for facts in every)))
    return replace(
        first, ranks=len(every), rank_peaks=peaks, peak_bytes=max(peaks, default=None), losses=losses, loss_steps=steps,
        reserved_bytes=max(reserved, default=None), settings={**first.settings, **missing},
        stock=max(facts.stock for facts in every),
    )  # fmt: skip


class Sides:
    """The processes of both sides, by index into SIDES. Methods raise SideFailedError and what a tick raises.

    changed: keys that differ. facts: what was measured of each side, startup times by its first process. note: why
    losses cannot be compared. doubt: another reason why losses may differ. by_epochs: the change acts at the start of
    epochs only.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.changed: list[str] = []
        self.facts = [SideFacts(), SideFacts()]
        self.note = self.doubt = ""
        # Of each pair, see SideFacts.parts_ns.
        self._parts: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        self._open: dict[int, Trained] = {}
        # Not created here: compilers do so when they write to it. A process that outlives this one removes it.
        self._caches = Path(tempfile.gettempdir()) / f".ndd-caches-{secrets.token_hex(8)}"

    # What depends on the kind of training.

    by_epochs = False

    def choose(self) -> None:
        """Choose what is to be the same in all processes. Raises UsageError if nothing is left to compare."""

    @property
    def switches(self) -> bool:
        """Whether one process can switch between both sides."""
        raise NotImplementedError

    def never_happens(self) -> str:
        """Why the change cannot be measured because what it affects never happens; "" if it does."""
        return ""

    def compare_items(self) -> str:
        """Make items of both sides comparable. Returns why they are not, "" if they are."""
        return ""

    def period(self, index: int, step_s: float) -> int:
        """The period, in steps, of what the change affects; 1 if it affects every step."""
        raise NotImplementedError

    @property
    def machine(self) -> str:
        """What processes differ on: the device, with several ranks also their number."""
        name, ranks = self.facts[0].device_name, max(facts.ranks for facts in self.facts)
        return f"{name}, {ranks} ranks" if name and ranks > 1 else name

    def started(self, index: int) -> Trained:
        """Start a process of a side. Raises ChildError."""
        raise NotImplementedError

    def started_for_both(self) -> Trained:
        """Start a process that switches between the sides. Raises ChildError."""
        raise NotImplementedError

    # Processes.

    @property
    def count(self) -> int:
        """How many sides have a process."""
        return len(self._open)

    def is_open(self, index: int) -> bool:
        """Whether a side has a process."""
        return index in self._open

    def open(self, *indices: int) -> None:
        """Start processes. They import torch at the same time."""
        for index in indices:
            with failures_of(index):
                self._open[index] = self.started(index)

    def open_one(self) -> tuple[float, float]:
        """Start one process for both sides. Returns the approximate seconds of a step of each."""
        with failures_of(0):
            process = self.started_for_both()
        self._open = dict.fromkeys(range(len(SIDES)), process)
        limit_s = max(self.budget.left_s, 0.1)
        self._asked(0, "preparing both sides", lambda side, tick: side.prepare(limit_s, tick))
        base_s, change_s = (self._warm_up(index, "warming up") for index in range(len(SIDES)))
        return base_s, change_s

    def environment(self, index: int) -> dict[str, str]:
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

    def prepare(self, index: int) -> float:
        """Prepare and warm up. Returns the approximate seconds of a step."""
        first = self.facts[index].prepare_s is None
        limit_s = max(self.budget.left_s, 0.1)
        self._asked(index, f"preparing {SIDES[index]}", lambda side, tick: side.prepare(limit_s, tick))
        stage = f"warming up {SIDES[index]}"
        if first:
            return self._warm_up(index, stage)
        # Later processes profit from warm caches.
        seconds, steps = self.train(index, 1 << 40, stage, until_s=AGAIN_S, first=True)
        self._use_up(index, steps, stage)
        return seconds / steps

    def _warm_up(self, index: int, stage: str) -> float:
        """The first steps of a side. Returns the approximate seconds of a step."""
        budget_s = self.budget.budget_s
        warmup = self.train(index, LOSSES, stage, until_s=min(WARMUP_S, budget_s / 12), first=True)
        self._learned(index, stage)
        self._use_up(index, warmup[1], stage)
        seconds, steps = self.train(index, 1 << 40, stage, until_s=min(ESTIMATE_S, budget_s / 60))
        side = self._learned(index, stage)
        side.warmup_s, side.warmup_steps = warmup
        self.facts[index] = side
        return seconds / steps

    def _learned(self, index: int, stage: str) -> SideFacts:
        self._asked(index, stage, lambda side, tick: side.learn(tick))
        both = self._open[index].both
        return both[index if len(both) > 1 else 0]

    def _use_up(self, index: int, done: int, stage: str) -> None:
        """Train on what the loader has made while nobody read it: it hides how long a batch takes. done: steps so far.

        Raises BlocksDoNotFitError if that takes too long, and the change may be about the loader.
        """
        side = self._open[index]
        stock = side.both[index if len(side.both) > 1 else 0].stock
        left, spent_s, limit_s = TIMES_STOCK * stock - done, 0.0, self.budget.left_s / 4
        while left > 0 and spent_s < limit_s:
            seconds, steps = self.train(index, min(stock, left), stage, until_s=limit_s - spent_s)
            if side.waited_s > WAITS * seconds:
                return
            spent_s, left, done = spent_s + seconds, left - steps, done + steps
        if left > 0 and any(key.startswith(("loader.", "arg.", "env.")) for key in self.changed):
            text = f"{SIDES[index]} has batches of {stock:,} steps in stock, and the budget is too small to use them up"
            raise BlocksDoNotFitError(text, 4 * TIMES_STOCK * stock * spent_s / max(done, 1))

    def train(
        self,
        index: int,
        steps: int,
        stage: str,
        plan: BlockPlan | None = None,
        until_s: float | None = None,
        first: bool = False,
        measured: bool = False,
    ) -> tuple[float, int]:
        """(seconds, steps) of a run. first: without untimed lead steps, and at least two steps."""
        before = 0 if first else plan.lead(index) if plan is not None else 1
        limit_s = max(self.budget.left_s, 0.0) + PATIENCE_S
        within, least = plan is not None and plan.within, 2 if first else 1
        return self._asked(
            index,
            stage,
            lambda side, tick: side.train(
                steps, limit_s, tick, lead=before, until_s=until_s, least=least, within=within, index=index,
                measured=measured,
            ),
        )  # fmt: skip

    def segment(self, index: int, plan: BlockPlan) -> float:
        """Items per second of one run of an ABBA block."""
        seconds, steps = self.train(index, plan.steps[index], MEASURING, plan, measured=True)
        return steps * self.facts[index].items_per_step / seconds

    def learn(self) -> None:
        """Update the facts of the open sides; what is known is kept if one does not answer."""
        for index, side in self._open.items():
            with suppress(ChildError):
                side.learn(self.budget.tick(MEASURING))
                first, now = self.facts[index], side.both[index if len(side.both) > 1 else 0]
                first.settings, first.rank_peaks, first.findings = now.settings, now.rank_peaks, now.findings
                self._parts[index].append(now.parts_ns)
                first.parts_ns = mean(self._parts[index])
                first.peak_bytes = most(first.peak_bytes, now.peak_bytes)
                first.reserved_bytes = most(first.reserved_bytes, now.reserved_bytes)
                first.peaks += [] if now.peak_bytes is None else [now.peak_bytes]

    def forget(self) -> None:
        """Forget what was measured in blocks."""
        for facts, parts in zip(self.facts, self._parts, strict=True):
            facts.peaks.clear()
            parts.clear()

    def speeds(self, rates: tuple[float, float]) -> None:
        """Put the measured items per second of both sides into the facts."""
        for rate, facts in zip(rates, self.facts, strict=True):
            facts.items_per_s, facts.step_s = rate, facts.items_per_step / rate

    def _asked(self, index: int, stage: str, ask: Callable[[Trained, Tick], T]) -> T:
        with failures_of(index):
            return ask(self._open[index], self.budget.tick(stage))


class OwnSides(Sides):
    """The sides of a configuration of the engine. drafts: of baseline and candidate."""

    def __init__(self, request: TrialRequest, drafts: tuple[Draft, Draft], budget: Budget) -> None:
        super().__init__(budget)
        self._base, self._sets = request.base, request.sets
        self._chosen: tempfile.TemporaryDirectory[str] | None = None
        self._drafts = drafts
        self._know_configs()

    def _know_configs(self) -> None:
        base, change = (draft.resolve() for draft in self._drafts)
        self._configs: tuple[Config, Config] = (base, change)
        self.changed = list(differences(base, change))
        self.by_epochs = needs_epochs(base, change, self.changed)

    def choose(self) -> None:
        """Choose the size "auto" once, so that all processes have the same."""
        if self._drafts[0].size != "auto":
            return
        self.open(0)
        process = self._open[0]
        assert isinstance(process, SideProcess)
        stage = "choosing the model size"
        with failures_of(0):
            found = process.choose(self.budget.tick(stage))
        self.close(0)
        self._chosen = tempfile.TemporaryDirectory(prefix="ndd-trial-")
        path = Path(self._chosen.name, "base.toml")
        path.write_text(found, encoding="utf-8")
        self._drafts = (read(path), read(path, self._sets))
        self._know_configs()
        if not self.changed:
            raise UsageError(
                f"{', '.join(self._sets)}: {self._base.name} already resolves to this on this machine; there is "
                "nothing to compare"
            )
        self._base = replace(self._base, config=path, workload=None, sets=())

    @property
    def switches(self) -> bool:
        return can_switch(self._configs, self.changed)

    def never_happens(self) -> str:
        return never_happens(*self._configs, self.changed, all(facts.steps_per_epoch for facts in self.facts))

    def period(self, index: int, step_s: float) -> int:
        epoch, budget_s = self.facts[index].steps_per_epoch, self.budget.budget_s
        return period(self._configs[index], self.changed, epoch, step_s, budget_s)

    def started(self, index: int) -> SideProcess:
        run = self._base.run
        # On the run's own disk if write speed matters, else in the temporary folder.
        place = run.path.parent if run is not None and saves(self.changed) else None
        return SideProcess(self._spec(index), place, self.environment(index))

    def started_for_both(self) -> SideProcess:
        return SideProcess({**self._spec(0), "change": self._spec(1)}, None, self.environment(0))

    def _spec(self, index: int) -> Json:
        sets = (*self._base.sets, *(self._sets if index else ()))
        return spec_of(self._base.config, self._base.workload, sets, switched_off(self.changed))

    def clean_up(self) -> None:
        super().clean_up()
        if self._chosen is not None:
            self._chosen.cleanup()


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
