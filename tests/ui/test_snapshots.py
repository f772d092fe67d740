"""Snapshots of the screens at common terminal sizes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from textual.pilot import Pilot

from ndd_console.app import ConsoleApp, TuningApp
from ndd_console.screens.home import HomeScreen
from ndd_console.screens.trial import TrialScreen
from ndd_console.screens.tuning import TuningScreen
from ndd_console.view.style import Look
from ndd_engine.trial.request import Progress

from .fake_sources import Clock, FakeHome, FakeSource, FakeTrials
from .fake_tuning import DONE, MEASURING, FixedTuning
from .fakes import (
    FINDING,
    HEALTHY,
    MEASURED,
    SECOND,
    T0,
    empty_snapshot,
    ended,
    found,
    run_event,
    sample,
    snapshot,
    trial_event,
)

NARROW, USUAL, LARGE, WIDE = (
    pytest.param(size, id=f"{name}-terminal")
    for name, size in (("narrow", (80, 24)), ("usual", (100, 30)), ("large", (120, 40)), ("wide", (200, 50)))
)
SIZES = (NARROW, USUAL, LARGE, WIDE)


def live(**options: Any) -> ConsoleApp:
    source = options.pop("source", None) or FakeSource()
    rules = options.pop("rules", found())
    return ConsoleApp(source, None, refresh_hz=1.0, clock=Clock(T0 + 12), rules=rules, **options)


def diagnosed(**options: Any) -> ConsoleApp:
    """A run with findings, whose changes can be tried."""
    before = trial_event("no gain", sets=["loader.workers=1"], ratio=1.0, low=0.98, high=1.02)
    value = snapshot(**MEASURED, trials=(before,))
    source = FakeSource(value, tries=FakeTrials())
    return live(source=source, rules=found(FINDING, SECOND), **options)


async def loaded(pilot: Pilot[Any]) -> None:
    """Wait for the threads of the home screen."""
    for _ in range(200):
        screen = pilot.app.screen
        if (
            isinstance(screen, HomeScreen)
            and screen.view.machine is not None
            and screen.view.runs is not None
        ):
            break
        await asyncio.sleep(0.02)
    await pilot.pause()


@pytest.fixture(autouse=True)
def _one_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ndd_console.screens.home.time.localtime", __import__("time").gmtime)


@pytest.mark.parametrize("size", SIZES)
def test_live(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(live(), terminal_size=size)


@pytest.mark.parametrize("size", SIZES)
def test_live_on_the_cpu(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(live(source=FakeSource(snapshot(False))), terminal_size=size)


@pytest.mark.parametrize("size", SIZES)
def test_home(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(ConsoleApp(None, FakeHome()), terminal_size=size, run_before=loaded)


def test_live_in_ascii_without_colour(snap_compare: Any) -> None:
    assert snap_compare(live(look=Look(True, True)), terminal_size=(80, 24))


def test_home_in_ascii_without_colour(snap_compare: Any) -> None:
    app = ConsoleApp(None, FakeHome(), look=Look(True, True))
    assert snap_compare(app, terminal_size=(80, 24), run_before=loaded)


def test_help(snap_compare: Any) -> None:
    assert snap_compare(live(), terminal_size=(80, 24), press=["question_mark"])


def test_log(snap_compare: Any) -> None:
    assert snap_compare(live(), terminal_size=(80, 24), press=["l"])


@pytest.mark.parametrize("size", [NARROW, LARGE])
def test_settings(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(live(), terminal_size=size, press=["i"])


def test_question(snap_compare: Any) -> None:
    assert snap_compare(live(), terminal_size=(80, 24), press=["q"])


def test_failed(snap_compare: Any) -> None:
    reason = "CUDA out of memory at step 4,218: tried 512 MB, 210 MB free. Lower batch.micro from 128 to 96, "
    source = FakeSource(
        ended("failed", reason + "or use batch.accumulation 3; console.log has the whole message")
    )
    assert snap_compare(live(source=source), terminal_size=(80, 24))


def test_preparing(snap_compare: Any) -> None:
    value = empty_snapshot(
        run=run_event(), sample=sample(), started_t=T0, preparing_t=T0, stage="compiling the model"
    )
    assert snap_compare(live(source=FakeSource(value)), terminal_size=(80, 24))


def test_narrow(snap_compare: Any) -> None:
    assert snap_compare(live(), terminal_size=(60, 20))


BOTH = (NARROW, LARGE)


@pytest.mark.parametrize("size", SIZES)
def test_live_with_a_finding(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(diagnosed(), terminal_size=size)


def test_live_with_a_finding_in_ascii_without_colour(snap_compare: Any) -> None:
    assert snap_compare(diagnosed(look=Look(True, True)), terminal_size=(80, 24))


def test_live_that_is_healthy(snap_compare: Any) -> None:
    assert snap_compare(live(rules=found(HEALTHY)), terminal_size=(80, 24))


@pytest.mark.parametrize("size", BOTH)
def test_diagnosis(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(diagnosed(), terminal_size=size, press=["d"])


def test_diagnosis_at_its_end(snap_compare: Any) -> None:
    assert snap_compare(diagnosed(), terminal_size=(80, 24), press=["d", "end"])


@pytest.mark.parametrize("size", BOTH)
def test_trial_choosing(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(diagnosed(), terminal_size=size, press=["t"])


def test_trial_with_a_mistake(snap_compare: Any) -> None:
    keys = ["t", "tab", *"batch.mikro=8", "enter"]
    assert snap_compare(diagnosed(), terminal_size=(80, 24), press=keys)


async def measuring(pilot: Pilot[Any]) -> None:
    screen = pilot.app.screen
    assert isinstance(screen, TrialScreen)
    trials = screen._trials
    assert isinstance(trials, FakeTrials)
    trials.jobs[0].progress = Progress("measuring the candidate", 18.0, 60.0, 3, 1.4, 1.2, 1.61)
    screen.poll()
    await pilot.pause()


async def measured(pilot: Pilot[Any]) -> None:
    await pilot.press("t", "enter")
    screen = pilot.app.screen
    assert isinstance(screen, TrialScreen)
    trials = screen._trials
    assert isinstance(trials, FakeTrials)
    trials.jobs[0].result, trials.jobs[0].done = trial_event(), True
    screen.poll()
    await pilot.press("w")


async def under_way(pilot: Pilot[Any]) -> None:
    await pilot.press("t", "enter")
    await measuring(pilot)


@pytest.mark.parametrize("size", BOTH)
def test_trial_measuring(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(diagnosed(), terminal_size=size, run_before=under_way)


@pytest.mark.parametrize("size", BOTH)
def test_trial_result(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(diagnosed(), terminal_size=size, run_before=measured)


def test_trial_result_in_ascii_without_colour(snap_compare: Any) -> None:
    app = diagnosed(look=Look(True, True))
    assert snap_compare(app, terminal_size=(80, 24), run_before=measured)


async def looked(pilot: Pilot[Any]) -> None:
    screen = pilot.app.screen
    assert isinstance(screen, TuningScreen)
    screen.poll()
    await pilot.pause()


@pytest.mark.parametrize("size", [*BOTH, pytest.param((140, 30), id="wide-terminal")])
def test_tuning_measuring(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(TuningApp(FixedTuning(MEASURING)), terminal_size=size, run_before=looked)


@pytest.mark.parametrize("size", BOTH)
def test_tuning_done(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(TuningApp(FixedTuning(DONE)), terminal_size=size, run_before=looked)


def test_tuning_in_ascii_without_colour(snap_compare: Any) -> None:
    app = TuningApp(FixedTuning(DONE), look=Look(True, True))
    assert snap_compare(app, terminal_size=(80, 24), run_before=looked)
