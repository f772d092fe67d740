"""Trials with simulated processes and clock: pairs that are restarted in turn, one process that switches, failures.

The first ones are of own runs, then those of scripts: periods of steps, items of another size, losses by step, edits.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.program import refused
from tests.records import run_event

from ndd_console.cli.try_ import _edit
from ndd_engine.child import ChildError
from ndd_engine.errors import UsageError
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.script import trials as trials_module
from ndd_engine.script.trials import edit_for, run_script_trial
from ndd_engine.trial import sides as sides_module
from ndd_engine.trial import trial as trial_module
from ndd_engine.trial.estimates import Usual
from ndd_engine.trial.outcome import (
    CACHES,
    Base,
    PairVariances,
    Progress,
    SideFacts,
    TrialRequest,
    check_once,
)

USUAL = "usual difference"
CHANGE = "loader.fetch=item"
# Changes of a script: one that needs processes of its own, and one that one process can switch.
APART, TOGETHER = "env.FASTER=1", "run.threads=1"


class World:
    """A machine with its own clock.

    Of own runs: start_s, of a process; gain, of the candidate; room, for how many processes; fails, called with (side,
    number of its processes so far), raises what `prepare` raises. Of scripts: length, seconds of a step by its number
    and whether it is the candidate's; facts, what else is known of a side. life: steps until a process ends.
    """

    def __init__(self) -> None:
        self.now, self.life = 1000.0, 1 << 40
        self.random = random.Random(4)
        self.open: list[Any] = []
        self.log: list[tuple[str, int]] = []
        self.environments: list[Mapping[str, str]] = []
        self.start_s, self.step_s = 1.5, 0.01
        self.gain, self.process, self.noise, self.room = 1.0, 0.01, 0.01, 2
        # Of the candidate: steps whose batches are ready at the start, and how much longer a step takes after them.
        self.stock, self.drained = 0, 1.0
        self.fails: Callable[[int, int], None] = lambda side, number: None
        self.length: Callable[[int, bool], float] = lambda step, changed: 0.004 if changed else 0.005
        self.facts: Callable[[bool], dict[str, Any]] = lambda changed: {}
        self.measured: list[int] = []
        # Whether an edited copy of the script fails, and whether the edit has an effect.
        self.broken, self.effect = False, True
        # First losses of starts for them, by whether the change is there; how many such starts there were.
        self.losses: Callable[[bool, int], list[float]] = lambda changed, number: [0.5, 0.4]
        self.seeded = 0

    def count(self, what: str, side: int) -> int:
        return self.log.count((what, side))


class Simulated:
    """A process in the world."""

    world: World
    facts: Any

    def __init__(self) -> None:
        self.world.open.append(self)
        self.waited_s = 0.0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def both(self) -> list[SideFacts]:
        return [self.facts]

    def learn(self, tick: Any) -> None:
        """Nothing changes."""

    def close(self) -> None:
        if self in self.world.open:
            self.world.open.remove(self)


class Process(Simulated):
    """That of a side of an own run."""

    def __init__(self, spec: Mapping[str, Any], place: Path | None, environment: Mapping[str, str]) -> None:
        super().__init__()
        self.side = int(CHANGE in spec["sets"])
        self.world.environments.append(environment)
        self.facts, self.prepared = SideFacts(), False
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
            raise ChildError("ended", "the script ended")
        self.waited_s = (steps - ready) * step_s * (world.drained - 1.0)
        seconds = steps * step_s + self.waited_s
        world.now += seconds
        return seconds, steps


class ScriptProcess(Simulated):
    """That of a script."""

    def __init__(
        self,
        command: Any,
        sides: Sequence[Mapping[str, Any]],
        extra: Mapping[str, str],
        but: Path,
        outside: bool,
        edited: Any = None,
        expected: Any = None,
        given: Any = None,
        seeded: bool = False,
    ) -> None:
        self._alone, self._has = seeded, sides[0]
        self.world.seeded += seeded
        if edited and self.world.broken:
            raise ChildError("failed", "TypeError: got multiple values")
        self._expected = expected or {}
        self._both = len(sides) > 1
        self._changed = "FASTER" in extra or "--bptt" in command.words
        self._step, self._lengths = 0, list[int]()
        self.sides: list[SideFacts] = []
        super().__init__()
        self.learn(None)

    @property
    def facts(self) -> SideFacts:
        return self.sides[0]

    @property
    def both(self) -> list[SideFacts]:
        return self.sides

    def prepare(self, limit_s: float, tick: Any) -> None:
        self.world.now += 0.5
        self.learn(tick)

    def train(self, steps: int, limit_s: float, tick: Any, **options: Any) -> tuple[float, int]:
        world, until_s = self.world, options.get("until_s")
        for _ in range(options.get("lead", 1)):
            self._one(options)
        seconds = done = 0.0
        while done < steps and (until_s is None or done < options["least"] or seconds < until_s):
            seconds += self._one(options)
            done += 1
        if options.get("measured"):
            world.measured.append(int(done))
        return seconds, int(done)

    def _one(self, options: Mapping[str, Any]) -> float:
        world = self.world
        if self._step >= world.life:
            raise ChildError("ended", "the script ended")
        changed = bool(options.get("index")) if self._both else self._changed
        seconds = world.length(self._step, changed) * world.random.lognormvariate(0.0, 0.02)
        self._step += 1
        self._lengths.append(round(seconds * 1e6))
        world.now += seconds
        return seconds

    def learn(self, tick: Any) -> None:
        self.sides = [
            SideFacts(
                "cpu", "a CPU", 1, prepare_s=0.5, lengths_us=list(self._lengths),
                **{
                    "settings": {
                        key: [str(new), "2", self.world.effect, ""] for key, new in self._expected.items()
                    },
                    "items_per_step": 8,
                    **self.world.facts(changed),
                },
            )
            for changed in ([False, True] if self._both else [self._changed])
        ]  # fmt: skip
        if self._alone:
            self.sides[0].losses = self.world.losses(bool(self._has), self.world.seeded)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = World()
    monkeypatch.setattr(Simulated, "world", made, raising=False)
    monkeypatch.setattr(sides_module, "SideProcess", Process)
    monkeypatch.setattr(trials_module, "ScriptProcess", ScriptProcess)
    monkeypatch.setattr(sides_module, "time", SimpleNamespace(monotonic=lambda: made.now))
    # Another trial on this machine does not matter here.
    for module in (trial_module, trials_module):
        monkeypatch.setattr(module, "alone", lambda *_args, **_more: nullcontext())
    yield made
    assert made.open == [], "a process was left behind"


# Own runs.


def run(
    budget_s: float = 60.0,
    tell: Callable[[Progress], None] = lambda told: None,
    stop: threading.Event | None = None,
) -> TrialEvent:
    base = Base("it", None, "eeg", ("run.device=cpu",))
    return trial_module.run_trial(TrialRequest(base, (CHANGE,), budget_s, restarts=True), tell, stop)


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


def test_a_setup_beyond_the_budget_says_how_many_seconds_may_be_enough(world: World) -> None:
    for budget_s, needed in ((1.0, "to about 30"), (60.0, "to about 120")):
        world.start_s = 2 * budget_s
        event = run(budget_s)
        assert event.verdict == "inconclusive" and event.text.endswith(f"raise --budget {needed}"), event.text
        assert event.seconds < 1.5 * budget_s


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
    ("side", "numbers", "kind", "verdict", "named"),
    [
        (1, (1, 2), "oom", "out of memory", "planted"),
        (0, (1, 2), "oom", "failed", "baseline"),  # which is not blamed on the candidate
        (0, (1,), "late", "inconclusive", "--budget"),
        (1, (2,), "oom", "faster", ""),  # from then on the sides take turns
        (0, (2,), "failed", "failed", "planted"),
        (0, (3,), "late", "faster", ""),  # the result of the other pairs stays
    ],
)
def test_a_process_that_fails(
    world: World, side: int, numbers: tuple[int, ...], kind: str, verdict: str, named: str
) -> None:
    def fails(of_side: int, of_number: int) -> None:
        if of_side == side and of_number in numbers:
            raise ChildError(kind, "planted")

    world.fails, world.gain = fails, 1.5
    event = run(120.0)
    assert event.verdict == verdict, event.text
    assert named in event.text and (named or "planted" not in event.text), event.text
    if (numbers, kind) == ((2,), "oom"):
        assert event.pairs >= 4
    if (numbers, kind) == ((3,), "late"):
        assert event.pairs == 2 and event.method == USUAL


def test_a_stop_ends_the_trial_with_what_is_known(world: World) -> None:
    stop = threading.Event()
    event = run(tell=lambda told: stop.set() if told.stage == "measuring" else None, stop=stop)
    assert (event.verdict, event.abba_blocks) == ("stopped", 0)
    assert event.change["prepare_s"] == 1.5 and "1.0 GiB" in event.text


def test_a_stop_after_some_blocks_says_what_is_known_once(world: World) -> None:
    stop = threading.Event()
    event = run(tell=lambda told: stop.set() if told.low is not None else None, stop=stop)
    assert event.verdict == "stopped" and event.ratio is not None
    assert event.text.startswith("stopped: ") and "before there was a result" not in event.text
    assert "before the end of the measurement" in event.text


def test_a_stop_before_the_trial_begins_starts_no_process(world: World) -> None:
    stop = threading.Event()
    stop.set()
    assert run(stop=stop).verdict == "stopped" and world.log == []


def test_what_was_measured_before_a_script_came_to_its_end_counts(world: World) -> None:
    world.gain, world.life = 1.5, 180
    event = run()
    assert world.count("ended", 0) + world.count("ended", 1) > 1
    assert event.verdict == "faster" and event.pairs > 1, event.text


def test_a_clear_result_stays_where_a_later_start_fails(world: World) -> None:
    def stocked(side: int, number: int) -> None:
        # Of the second pair, the batches in stock cannot be used up in the rest of the budget.
        world.stock = 10**7 if number > 1 else 0

    def ends(side: int, number: int) -> None:
        if number > 2:
            raise ChildError("ended", "the script ended")

    world.gain = 4.0
    for world.fails, pairs in ((stocked, 1), (ends, 2)):
        world.log.clear()
        world.stock = 0
        event = run()
        assert (event.verdict, event.pairs) == ("faster", pairs) and "stock" not in event.text, event.text


@pytest.mark.parametrize(("gain", "verdict"), [(1.0, "no difference"), (1.5, "faster")])
def test_a_short_script_is_measured_in_short_runs(world: World, gain: float, verdict: str) -> None:
    world.gain, world.life = gain, 100
    event = run()
    assert (
        world.count("ended", 0) + world.count("ended", 1) > 0
    )  # the runs that were planned first were too long
    assert event.verdict == verdict and event.pairs >= 4, event.text
    assert event.ratio == pytest.approx(gain, rel=0.05)


def test_a_script_that_ends_while_the_rest_of_the_budget_is_used_is_no_reason(world: World) -> None:
    world.gain, world.life, world.start_s = 1.1, 300, 12.0
    event = run(32.0)
    assert world.count("ended", 0) + world.count("ended", 1) > 0
    assert event.pairs == 1 and event.abba_blocks >= 2 and "the script ended" not in event.text, event.text


def test_a_script_that_ends_before_a_block_is_no_failure(world: World) -> None:
    world.life = 30
    event = run()
    assert (event.verdict, event.ratio) == ("inconclusive", None)
    assert "the script ended" in event.text and "longer" in event.text


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


# Scripts.


def tried(folder: Path, change: str, budget_s: float = 60.0) -> TrialEvent:
    (folder / "train.py").write_text("import torch\n")
    request, run = asked(folder, change, budget_s)
    return run_script_trial(request, run.config, "cpu", lambda _: None)


def asked(folder: Path, change: str, budget_s: float = 60.0) -> tuple[TrialRequest, RunEvent]:
    directory = RunDir(folder / "base")
    directory.path.mkdir(exist_ok=True)
    directory.command.write_text(json.dumps({"command": ["python", "train.py"], "folder": str(folder)}))
    main = folder / "train.py"
    config = {"loader": {"workers": 0}, "run": {"threads": 2}, "script": {"main": str(main)}}
    return TrialRequest(Base("run base", run=directory), (change,), budget_s), run_event(config=config)


@pytest.mark.parametrize("change", [APART, TOGETHER])
@pytest.mark.parametrize("gain", [1.0, 1.3])
def test_runs_of_periodic_steps_are_whole_periods(
    world: World, tmp_path: Path, change: str, gain: float
) -> None:
    def length(step: int, changed: bool) -> float:
        return (0.3 if step % 16 == 0 else 0.005) / (gain if changed else 1.0)

    world.length = length
    event = tried(tmp_path, change)
    assert event.verdict == ("no difference" if gain == 1.0 else "faster"), event.text
    assert event.ratio == pytest.approx(gain, rel=0.05)
    assert world.measured and not any(steps % 16 for steps in world.measured)


def test_steps_that_only_vary_have_no_period(world: World, tmp_path: Path) -> None:
    assert tried(tmp_path, APART).verdict == "faster" and any(steps % 2 for steps in world.measured)


def test_a_script_that_ends_while_its_steps_are_looked_at_is_started_again(
    world: World, tmp_path: Path
) -> None:
    world.length = lambda step, changed: 0.02 if changed else 0.08
    world.life = 40
    event = tried(tmp_path, APART)
    assert event.verdict == "faster", event.text


def test_the_edit_of_a_faster_change_is_shown_once_it_has_trained(world: World, tmp_path: Path) -> None:
    event = tried(tmp_path, TOGETHER)
    assert event.verdict == "faster" and event.edit and not event.edit_refused
    request, run = asked(tmp_path, TOGETHER)
    edit = edit_for(request, run, event)
    assert "+torch.set_num_threads(1)" in edit.diff and not edit.advice
    # One that has not trained is described: without a trial, and after the file has changed.
    assert not edit_for(request, run).diff
    (tmp_path / "train.py").write_text("import torch  # other\n")
    found = edit_for(request, run, event)
    assert found.path is None and "set_num_threads(1)" in found.advice[0] and "measure" in found.advice[-1]


@pytest.mark.parametrize(("broken", "reason"), [(True, "multiple values"), (False, "run.threads is 2")])
def test_an_edit_that_does_not_do_what_was_measured_is_not_shown(
    world: World, tmp_path: Path, broken: bool, reason: str
) -> None:
    world.broken, world.effect = broken, False
    event = tried(tmp_path, TOGETHER)
    assert event.verdict == "faster" and not event.edit and reason in event.edit_refused
    found = edit_for(*asked(tmp_path, TOGETHER), event)
    assert found.path is None and "set_num_threads(1)" in found.advice[0] and reason in found.advice[-1]


def test_fp16_without_a_gradient_scaler_is_not_measured(world: World, tmp_path: Path) -> None:
    amp = ["fp16", "fp16 without a gradient scaler", False, "add a scaler"]
    world.facts = lambda changed: {"settings": {"precision.amp": amp}} if changed else {}
    event = tried(tmp_path, "precision.amp=fp16")
    assert (event.verdict, event.ratio, world.measured) == ("inconclusive", None, [])
    assert "scaler" in event.text


@pytest.mark.parametrize(("others", "measured"), [((), False), ((APART,), True)])
def test_arguments_of_a_loader_that_is_never_made_are_not_measured(
    world: World, tmp_path: Path, others: tuple[str, ...], measured: bool
) -> None:
    workers = ["2", "unchanged", False, "the script makes no DataLoader"]
    world.facts = lambda changed: {"settings": {"loader.workers": workers}}
    (tmp_path / "train.py").write_text("import torch\n")
    request, base = asked(tmp_path, "loader.workers=2")
    request = replace(request, sets=(*request.sets, *others))
    event = run_script_trial(request, base.config, "cpu", lambda _: None)
    assert bool(world.measured) == measured and "makes no DataLoader" in event.text
    assert (event.verdict == "inconclusive") != measured and "raise --budget" not in event.text


def test_two_values_of_one_key_are_refused(tmp_path: Path) -> None:
    check_once(("loader.workers=1", "loader.workers = 1"))
    with pytest.raises(UsageError, match=r"loader\.workers has two values: 1 and 2"):
        check_once(("loader.workers=1", "run.threads=1", "loader.workers=2"))
    words = ("try", "--set", "loader.workers=1", "--set", "loader.workers=2")
    assert "loader.workers has two values: 1 and 2" in refused(*words, folder=tmp_path)


def test_items_of_another_length_are_compared_by_token(world: World, tmp_path: Path) -> None:
    def facts(changed: bool) -> dict[str, Any]:
        return {"item": [32 if changed else 16], "of_tokens": True}

    world.facts, world.length = facts, lambda step, changed: 0.0094 if changed else 0.005
    event = tried(tmp_path, "arg.bptt=32")
    assert event.verdict == "faster" and event.ratio == pytest.approx(2 * 0.005 / 0.0094, rel=0.01)
    assert (event.base["unit"], event.base["items_per_step"], event.change["items_per_step"]) == (
        "token",
        128,
        256,
    )
    assert event.loss == "not comparable"


@pytest.mark.parametrize(
    ("item", "tokens"),
    [([3, 32, 32], False), ([7], False), ([], True)],
    ids=["images", "numbers", "one token"],
)
def test_other_items_of_another_size_are_not_comparable(
    world: World, tmp_path: Path, item: list[int], tokens: bool
) -> None:
    world.facts = lambda changed: {"item": item if changed else [9, *item[1:]], "of_tokens": tokens}
    event = tried(tmp_path, "arg.bptt=32")
    assert (event.verdict, event.ratio) == ("inconclusive", None) and "not comparable" in event.text


@pytest.mark.parametrize(
    ("steps", "values", "loss"),
    [
        ([1, 2, 3, 5], [0.1, 0.2, 0.3, 0.5], "same"),
        ([2, 4], [0.2, 0.4], "same"),
        ([2, 4], [0.2, 0.1], "differs"),
        ([8, 9], [0.8, 0.9], "not comparable"),
    ],
)
def test_losses_are_compared_by_the_number_of_their_step(
    world: World, tmp_path: Path, steps: list[int], values: list[float], loss: str
) -> None:
    def facts(changed: bool) -> dict[str, Any]:
        if changed:
            return {"loss_steps": steps, "losses": values}
        return {"loss_steps": [2, 3, 4, 5, 1], "losses": [0.2, 0.3, 0.4, 0.5, 0.1]}

    world.facts = facts
    assert tried(tmp_path, APART).loss == loss


def test_losses_of_a_script_that_is_not_seeded_say_nothing_and_the_speed_counts(
    world: World, tmp_path: Path
) -> None:
    starts = itertools.count(1)
    world.facts = lambda changed: {"loss_steps": [1, 2], "losses": [0.5, 0.1 * next(starts)]}
    event = tried(tmp_path, APART)
    assert (event.verdict, event.loss) == ("faster", "not comparable") and event.loss_text


@pytest.mark.parametrize(
    ("losses", "verdict", "starts"),
    [
        (lambda changed, number: [0.5, 0.4], "same", 2),
        (lambda changed, number: [0.5, 0.4 + 0.2 * changed], "differs", 3),
        # Two starts of the script as it is differ, too.
        (lambda changed, number: [0.5, 0.1 * number], "not comparable", 3),
        (lambda changed, number: [], "not comparable", 2),
    ],
)
def test_a_change_of_the_arithmetic_in_one_process_has_its_losses_compared(
    world: World, tmp_path: Path, losses: Callable[[bool, int], list[float]], verdict: str, starts: int
) -> None:
    world.losses = losses
    event = tried(tmp_path, TOGETHER)
    assert (event.verdict, event.method, event.loss) == ("faster", "one process", verdict)
    assert world.seeded == starts
    assert event.loss_text and ("losses identical" in event.text) == (verdict == "same")


def test_a_change_that_is_not_of_the_arithmetic_is_not_started_again(world: World, tmp_path: Path) -> None:
    event = tried(tmp_path, "run.gc_every_steps=50")
    assert (event.verdict, event.loss, world.seeded) == ("faster", "not comparable", 0)


def test_apply_says_that_nothing_is_written_where_the_change_is_made_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    request, run = asked(tmp_path, "run.gc_every_steps=50")
    _edit(run, request, None, True)
    printed = capsys.readouterr()
    assert "gc.disable()" in printed.out and "was written" in printed.err
    assert (tmp_path / "train.py").read_text() == "import torch\n"
