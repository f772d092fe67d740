"""Trials of scripts, with simulated processes and clock: periods of steps, items of another size, losses by step."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.records import run_event

from ndd_console.cli.try_ import _edit
from ndd_engine.child import ChildError
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.script import trials as trials_module
from ndd_engine.script.trials import edit_for, run_script_trial
from ndd_engine.trial import sides as sides_module
from ndd_engine.trial.estimates import Estimate
from ndd_engine.trial.outcome import Base, SideFacts, TrialRequest
from ndd_engine.trial.sides import Budget, Sides

# A change that needs processes of its own, and one that one process can switch.
APART, TOGETHER = "env.FASTER=1", "run.threads=1"


class World:
    """A machine with its own clock. length: seconds of a step, from its number and whether it is the candidate's.

    facts: what else is known of a side. life: steps until the script ends.
    """

    def __init__(self) -> None:
        self.now, self.life = 1000.0, 1 << 40
        self.length: Callable[[int, bool], float] = lambda step, changed: 0.005
        self.facts: Callable[[bool], dict[str, Any]] = lambda changed: {}
        self.random = random.Random(1)
        self.measured: list[int] = []
        # Whether an edited copy of the script fails, and whether the edit has an effect.
        self.broken, self.effect = False, True
        self.open = 0
        # First losses of starts for them, by whether the change is there; how many such starts there were.
        self.losses: Callable[[bool, int], list[float]] = lambda changed, number: [0.5, 0.4]
        self.seeded = 0


class Process:
    """A process of the script."""

    world: World

    def __init__(
        self,
        command: Any,
        sides: Sequence[Mapping[str, Any]],
        extra: Mapping[str, str],
        but: Path,
        outside: bool,
        edited: Mapping[Path, str] | None = None,
        expected: Mapping[str, Any] | None = None,
        given: Mapping[str, str] | None = None,
        seeded: bool = False,
    ) -> None:
        self._alone, self._has = seeded, sides[0]
        self.world.seeded += seeded
        if edited and self.world.broken:
            raise ChildError("failed", "TypeError: got multiple values")
        self._expected = expected or {}
        self._both, self._closed = len(sides) > 1, False
        self._changed = "FASTER" in extra or "--bptt" in command.words
        self._step, self._lengths, self.waited_s = 0, list[int](), 0.0
        self.both: list[SideFacts] = []
        self.world.open += 1
        self.learn(None)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def facts(self) -> SideFacts:
        return self.both[0]

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
            raise ChildError("ended", "the script came to its end")
        changed = bool(options.get("index")) if self._both else self._changed
        seconds = world.length(self._step, changed) * world.random.lognormvariate(0.0, 0.02)
        self._step += 1
        self._lengths.append(round(seconds * 1e6))
        world.now += seconds
        return seconds

    def learn(self, tick: Any) -> None:
        self.both = [
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
            self.both[0].losses = self.world.losses(bool(self._has), self.world.seeded)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.world.open -= 1


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = World()
    monkeypatch.setattr(Process, "world", made, raising=False)
    monkeypatch.setattr(trials_module, "ScriptProcess", Process)
    monkeypatch.setattr(sides_module, "time", SimpleNamespace(monotonic=lambda: made.now))
    # Another trial on this machine does not matter here.
    monkeypatch.setattr(trials_module, "alone", lambda *_args, **_more: nullcontext())
    return made


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
    assert world.open == 0


@pytest.mark.parametrize(
    ("interval", "table", "contradicts"),
    [
        ((0.56, 0.40, 0.80), 0.95, True),
        ((0.56, 0.40, 0.80), 0.60, False),
        ((0.56, 0.40, 0.80), 0.85, False),
        ((1.05, 1.02, 1.08), 1.05, False),
        ((1.05, 1.02, 1.08), 0.99, True),
        ((4.16, 3.70, 4.67), 4.30, False),
    ],
)
def test_the_mean_speeds_have_to_show_what_the_interval_shows(
    interval: tuple[float, float, float], table: float, contradicts: bool
) -> None:
    sides = Sides(Budget(1.0, lambda _: None, None))
    assert not sides.contradicts(Estimate(*interval, 8))  # nothing is known of them
    sides.rates[0].extend([90.0, 110.0])
    sides.rates[1].append(100.0 * table)
    assert sides.contradicts(Estimate(*interval, 8)) == contradicts


@pytest.mark.parametrize("change", [APART, TOGETHER])
def test_a_verdict_does_not_contradict_its_table(world: World, tmp_path: Path, change: str) -> None:
    # Long steps that have no period hit some runs and not others.
    world.length = lambda step, changed: 1.5 if world.random.random() < 0.01 else 0.005
    event = tried(tmp_path, change, 30.0)
    rates = event.base["items_per_s"], event.change["items_per_s"]
    assert event.ratio is not None and None not in rates
    if event.verdict in ("faster", "slower"):
        assert (rates[1] > rates[0]) == (event.verdict == "faster")


def test_steps_that_only_vary_are_measured_as_before(world: World, tmp_path: Path) -> None:
    world.length = lambda step, changed: 0.004 if changed else 0.005
    event = tried(tmp_path, APART)
    assert event.verdict == "faster" and any(steps % 2 for steps in world.measured)


def test_a_script_that_ends_while_its_steps_are_looked_at_is_started_again(
    world: World, tmp_path: Path
) -> None:
    world.length = lambda step, changed: 0.02 if changed else 0.08
    world.life = 40
    event = tried(tmp_path, APART)
    assert event.verdict == "faster", event.text
    assert world.open == 0


def test_the_edit_of_a_faster_change_is_shown_once_it_has_trained(world: World, tmp_path: Path) -> None:
    world.length = lambda step, changed: 0.004 if changed else 0.005
    event = tried(tmp_path, TOGETHER)
    assert event.verdict == "faster" and event.edit and not event.edit_refused and world.open == 0
    request, run = asked(tmp_path, TOGETHER)
    edit = edit_for(request, run, event)
    assert "+torch.set_num_threads(1)" in edit.diff and not edit.advice
    # One that has not trained is described: without a trial, and after the file has changed.
    assert not edit_for(request, run, None).diff
    (tmp_path / "train.py").write_text("import torch  # other\n")
    found = edit_for(request, run, event)
    assert found.path is None and "set_num_threads(1)" in found.advice[0] and "measure" in found.advice[-1]


@pytest.mark.parametrize(("broken", "reason"), [(True, "multiple values"), (False, "run.threads is 2")])
def test_an_edit_that_does_not_do_what_was_measured_is_not_shown(
    world: World, tmp_path: Path, broken: bool, reason: str
) -> None:
    world.length = lambda step, changed: 0.004 if changed else 0.005
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
    assert "add a scaler" in event.text and world.open == 0


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
    world.length = lambda step, changed: 0.004 if changed else 0.005
    world.losses = losses
    event = tried(tmp_path, TOGETHER)
    assert (event.verdict, event.method, event.loss) == ("faster", "one process", verdict)
    assert (world.seeded, world.open) == (starts, 0)
    assert event.loss_text and ("losses identical" in event.text) == (verdict == "same")


def test_a_change_that_is_not_of_the_arithmetic_is_not_started_again(world: World, tmp_path: Path) -> None:
    world.length = lambda step, changed: 0.004 if changed else 0.005
    event = tried(tmp_path, "run.gc_every_steps=50")
    assert (event.verdict, event.loss, world.seeded) == ("faster", "not comparable", 0)


def test_apply_says_that_nothing_is_written_where_the_change_is_made_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    request, run = asked(tmp_path, "run.gc_every_steps=50")
    _edit(run, request, None, True)
    printed = capsys.readouterr()
    assert "gc.disable()" in printed.out and "nothing was written" in printed.err
    assert (tmp_path / "train.py").read_text() == "import torch\n"
