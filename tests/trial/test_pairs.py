"""How a trial uses its budget: pairs of processes that are restarted, in turn, and what happens if one fails.

Processes and the clock are simulated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ndd_engine.child import ChildError
from ndd_engine.record.events import TrialEvent
from ndd_engine.trial import sides as sides_module
from ndd_engine.trial import trial as trial_module
from ndd_engine.trial.estimates import Usual
from ndd_engine.trial.outcome import CACHES, Base, PairVariances, Progress, SideFacts, TrialRequest

USUAL = "usual difference"
CHANGE = "loader.fetch=item"


class World:
    """A machine with its own clock. start_s: of a process. gain: of the candidate. room: for how many processes.

    fails: called with (side, number of its processes so far), raises what `prepare` raises. life: steps that a process
    trains before it comes to its end.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.start_s, self.step_s = 1.5, 0.01
        self.gain = 1.0
        self.process = 0.01
        self.noise = 0.01
        self.room = 2
        # Of the candidate: steps whose batches are ready at the start, and how much longer a step takes after them.
        self.stock, self.drained = 0, 1.0
        self.life = 1 << 40
        self.fails: Callable[[int, int], None] = lambda side, number: None
        self.random = random.Random(4)
        self.open: list[Process] = []
        self.log: list[tuple[str, int]] = []
        self.environments: list[Mapping[str, str]] = []

    def count(self, what: str, side: int) -> int:
        return self.log.count((what, side))


class Process:
    """One side's process."""

    world: World

    def __init__(self, spec: Mapping[str, Any], place: Path | None, environment: Mapping[str, str]) -> None:
        self.side = int(CHANGE in spec["sets"])
        self.world.environments.append(environment)
        self.world.open.append(self)
        self.facts = SideFacts()
        self.waited_s = 0.0
        self.prepared = False
        self.step_s = 0.01 * math.exp(self.world.random.gauss(0, self.world.process / math.sqrt(2)))

    def prepare(self, limit_s: float, tick: Callable[[str | None], None]) -> None:
        world = self.world
        tick(None)
        world.log.append(("prepare", self.side))
        world.now += min(world.start_s, limit_s)
        if world.start_s > limit_s:
            raise ChildError("late", "no answer within the time limit")
        world.fails(self.side, world.count("prepare", self.side))
        if sum(other.prepared for other in world.open) >= world.room:
            raise ChildError("oom", "tried to allocate 9 GiB")
        self.prepared, self.trained = True, 0
        self.facts = SideFacts("cpu", "a CPU", 1, 16, 10**6, prepare_s=world.start_s, peak_bytes=1 << 30)
        self.facts.stock = world.stock if self.side else 0

    def train(self, steps: int, limit_s: float, tick: Any, **options: Any) -> tuple[float, int]:
        world = self.world
        until_s, least = options.get("until_s"), options.get("least", 1)
        step_s = self.step_s * world.step_s / 0.01 / (world.gain if self.side else 1.0)
        step_s *= math.exp(world.random.gauss(0, world.noise))
        if until_s is not None:
            steps = min(steps, max(least, int(until_s / step_s)))
        else:
            world.log.append(("run", self.side))
        tick(None)
        ready = min(max(world.stock - self.trained, 0), steps) if self.side else steps
        self.trained += steps
        if self.trained > world.life:
            world.log.append(("ended", self.side))
            raise ChildError("ended", "the script came to its end")
        self.waited_s = (steps - ready) * step_s * (world.drained - 1.0)
        seconds = steps * step_s + self.waited_s
        world.now += seconds
        return seconds, steps

    @property
    def both(self) -> list[SideFacts]:
        return [self.facts]

    def learn(self, tick: Any) -> None:
        """Nothing changes."""

    def close(self) -> None:
        self.world.open.remove(self)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = World()
    monkeypatch.setattr(Process, "world", made, raising=False)
    monkeypatch.setattr(sides_module, "SideProcess", Process)
    monkeypatch.setattr(sides_module, "time", SimpleNamespace(monotonic=lambda: made.now))
    # Another trial on this machine does not matter here.
    monkeypatch.setattr(trial_module, "alone", lambda *_args, **_more: nullcontext())
    yield made
    assert made.open == [], "a process was left behind"


def run(budget_s: float = 60.0, tell: Callable[[Progress], None] = lambda told: None) -> TrialEvent:
    base = Base("it", None, "eeg", ("run.device=cpu",))
    return trial_module.run_trial(TrialRequest(base, (CHANGE,), budget_s, restarts=True), tell)


def test_cheap_starts_are_repeated_and_alternate(world: World) -> None:
    told: list[Progress] = []
    event = run(tell=told.append)
    assert event.pairs >= 4 and event.abba_blocks >= 2 * event.pairs and event.method == "pairs"
    assert event.df == event.pairs - 1 and event.between is None
    assert event.seconds <= 66
    prepared = [side for what, side in world.log if what == "prepare"]
    assert prepared == [1, 0, 0, 1] * (event.pairs // 2) + [1, 0] * (event.pairs % 2)
    runs = [side for what, side in world.log if what == "run"]
    blocks = [tuple(runs[at : at + 4]) for at in range(0, len(runs), 4)]
    per_pair = event.abba_blocks // event.pairs
    assert blocks[:per_pair] == [(0, 1, 1, 0)] * per_pair
    assert blocks[per_pair : 2 * per_pair] == [(1, 0, 0, 1)] * per_pair
    assert told[-1].pairs == event.pairs and told[-1].abba_blocks == event.abba_blocks
    assert len(event.base["peaks"]) == event.pairs


@pytest.mark.parametrize(
    ("gain", "verdict"), [(1.08, "faster"), (1 / 1.08, "slower"), (1.0, "no difference")]
)
def test_the_verdict_is_that_of_the_machine(world: World, gain: float, verdict: str) -> None:
    world.gain, world.noise, world.process = gain, 0.003, 0.004
    event = run()
    assert event.verdict == verdict and event.pairs >= 4
    assert event.low is not None and event.high is not None and event.low <= gain <= event.high


def test_dear_starts_use_what_earlier_trials_measured(world: World) -> None:
    world.start_s, world.noise = 12.0, 0.001
    few = run()
    assert few.pairs < 4 and few.method == USUAL and few.between == pytest.approx(0.01)
    for _ in range(20):
        PairVariances().add("a CPU", Usual(0.025**2, 3.0))
    other = run()
    assert other.between is not None and other.between > 0.02


def test_the_budget_is_used_where_no_other_pair_fits(world: World) -> None:
    world.start_s = 14.0
    event = run(50.0)
    assert event.pairs == 1 and event.abba_blocks >= 4
    assert 44 <= event.seconds <= 52


def test_a_trial_adds_to_what_is_known(world: World) -> None:
    assert not PairVariances().path.exists()
    run()
    assert PairVariances().path.exists() and PairVariances().usual("a CPU") != Usual()
    before = PairVariances().path.read_text()
    world.gain = 2.0  # the differences between processes are larger, too
    assert run().verdict == "faster"
    assert PairVariances().path.read_text() == before


def test_a_large_effect_ends_after_the_fourth_pair_or_a_few_blocks(world: World) -> None:
    world.gain = 1.5
    assert run().pairs == 4
    world.start_s = 12.0
    event = run()
    assert event.verdict == "faster" and event.pairs < 4 and event.abba_blocks == 3


def test_without_room_for_both_there_is_one_process_at_a_time(world: World) -> None:
    world.room, world.gain, world.noise = 1, 1.2, 0.003
    event = run(120.0)
    assert event.verdict == "faster" and event.pairs >= 4
    order = [side for what, side in world.log if what == "run"]
    # Each process runs once, and the order alternates.
    sides = [order[0], *(after for before, after in pairwise(order) if before != after)]
    assert sides[:4] == [0, 1, 0, 1]
    assert world.count("prepare", 1) >= event.pairs


@pytest.mark.parametrize(
    ("side", "number", "kind", "verdict"),
    [
        (1, 2, "oom", "faster"),  # from then on the sides take turns
        (0, 2, "failed", "failed"),
        (0, 3, "late", "faster"),  # the result of the other pairs stays
    ],
)
def test_a_later_pair_that_fails(world: World, side: int, number: int, kind: str, verdict: str) -> None:
    def fails(of_side: int, of_number: int) -> None:
        if (of_side, of_number) == (side, number):
            raise ChildError(kind, "planted")

    world.fails, world.gain = fails, 1.5
    event = run(120.0)
    assert event.verdict == verdict
    assert ("planted" in event.text) == (kind == "failed")
    if kind == "oom":
        assert event.pairs >= 4
    if kind == "late":
        assert event.pairs == 2 and event.method == USUAL


def test_what_was_measured_before_a_script_came_to_its_end_counts(world: World) -> None:
    world.gain, world.life = 1.5, 180
    event = run()
    assert world.count("ended", 0) + world.count("ended", 1) > 1
    assert event.verdict == "faster" and event.pairs > 1, event.text


def test_a_clear_result_stays_where_a_later_start_takes_too_long(world: World) -> None:
    # Of the second pair, the batches in stock cannot be used up in the rest of the budget.
    def fails(side: int, number: int) -> None:
        world.stock = 10**7 if number > 1 else 0

    world.fails, world.gain = fails, 4.0
    event = run()
    assert (event.verdict, event.pairs) == ("faster", 1) and "stock" not in event.text, event.text


def test_a_script_that_ends_while_it_starts_again_loses_no_result(world: World) -> None:
    def fails(side: int, number: int) -> None:
        if number > 2:
            raise ChildError("ended", "the script came to its end")

    world.fails, world.gain = fails, 4.0
    event = run()
    assert (event.verdict, event.pairs) == ("faster", 2), event.text


def test_a_script_that_ends_before_a_block_is_no_failure(world: World) -> None:
    world.life = 60
    event = run()
    assert (event.verdict, event.ratio) == ("inconclusive", None)
    assert "came to its end" in event.text and "longer" in event.text


def test_batches_that_were_ready_beforehand_are_no_gain(world: World) -> None:
    # A step takes 1 s on either side, but the candidate's workers have made 64 batches before the first one is read.
    world.step_s, world.gain, world.stock, world.drained = 1.0, 20.0, 64, 20.0
    event = run(240.0)
    assert event.verdict != "faster" and (event.ratio is None or event.ratio < 1.1), event.text
    assert event.abba_blocks >= 2


def test_a_stock_that_the_budget_cannot_use_up_is_no_result(world: World) -> None:
    world.step_s, world.gain, world.stock, world.drained = 3.0, 2.0, 64, 2.0
    event = run(60.0)
    assert (event.verdict, event.ratio) == ("inconclusive", None)
    assert "in stock" in event.text and "--budget" in event.text


def test_an_inconclusive_result_names_a_budget_that_resolves_it(world: World) -> None:
    world.noise = world.process = 0.05
    event = run(30.0)
    assert event.verdict == "inconclusive" and "--budget" in event.text


def test_compilers_have_caches_of_their_own(world: World, tmp_path: Path) -> None:
    run()
    assert len({environment[CACHES] for environment in world.environments}) == 1
    folders = {environment["TORCHINDUCTOR_CACHE_DIR"] for environment in world.environments}
    assert len(folders) == 2  # of the two sides, kept for all of their processes
    assert folders.isdisjoint({environment["TRITON_CACHE_DIR"] for environment in world.environments})
    assert not any(Path(environment[CACHES]).exists() for environment in world.environments)
