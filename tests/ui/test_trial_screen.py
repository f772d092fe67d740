"""Trials from the live screen: selecting, mistakes, measuring, stopping, leaving."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from ndd_console.screens.live import LiveScreen
from ndd_console.screens.trial import TrialScreen
from ndd_engine.diagnose import Change
from ndd_engine.trial.outcome import Progress

from . import pilots
from .fake_sources import FakeSource, FakeTrials
from .fakes import FINDING, HEALTHY, SECOND, ended, found, snapshot, trial_event
from .pilots import press, text_of, tick


def running(source: FakeSource, *findings: Any, size: tuple[int, int] = (80, 24)) -> Any:
    return pilots.running(source, size=size, rules=found(*(findings or (FINDING, SECOND))))


async def look(pilot: Pilot[Any]) -> None:
    await pilot.pause()
    screen = pilot.app.screen
    assert isinstance(screen, TrialScreen)
    screen.look_again()
    await pilot.pause()


async def test_the_finding_leads_to_a_trial_and_back() -> None:
    trials = FakeTrials()
    source = FakeSource(tries=trials)
    async with running(source) as (app, pilot):
        text = text_of(app)
        assert "waits 57 %" in text and "at most 2.3x" in text
        assert "press t to try" in text and "t try" in text and "d diagnosis" in text
        await press(pilot, "t")
        assert isinstance(app.screen, TrialScreen)
        text = text_of(app)
        assert "loader.pin_memory=true" in text and "is paused and" in text
        assert "loader.cache=true" in text and "optimizer.implementation=fused" in text
        await press(pilot, "enter")
        assert trials.jobs[0].sets == ("loader.workers=4", "loader.pin_memory=true")
        assert trials.causes == ["few-workers"] and "starting…" in text_of(app)
        trials.jobs[0].progress = Progress("measuring the candidate", 18.0, 60.0, 3, 1.4, 1.2, 1.61)
        await look(pilot)
        text = text_of(app)
        assert "the candidate…" in text and "18 of 60 s" in text
        assert "1.40x (1.20 to" in text and "├" in text and "●" in text and "is paused" in text
        trials.jobs[0].progress = Progress("measuring", 70.0, 60.0, 3, 1.4, 1.2, 1.61)
        await look(pilot)
        text = text_of(app)
        assert "budget spent" in text and "60 of 60 s" in text and "70" not in text
        trials.jobs[0].result, trials.jobs[0].done = trial_event(), True
        await look(pilot)
        text = text_of(app)
        for part in (
            "faster 1.42x (1.35 to 1.49)",
            "1.42 times as many windows",
            "same: 20 steps",
            "54.6 ms",
            "24 of 60 s",
        ):
            assert part in text, part
        await press(pilot, "w")
        assert "charlm-001-changed.toml" in text_of(app) and "w write" not in text_of(app)
        source.value = snapshot(trials=(trial_event(),))
        await press(pilot, "t")
        assert "earlier trials" in text_of(app) and "faster 1.42x" in text_of(app)
        await press(pilot, "escape")
        assert isinstance(app.screen, LiveScreen) and trials.jobs[0].stopped == 0


@pytest.mark.parametrize("edits", [False, True])
async def test_what_is_written_is_named(edits: bool) -> None:
    """A script has no configuration: its change is a diff."""
    trials = FakeTrials(edits=edits)
    async with running(FakeSource(tries=trials, script=edits)) as (app, pilot):
        await press(pilot, "t", "enter")
        trials.jobs[0].result, trials.jobs[0].done = trial_event(), True
        await look(pilot)
        assert f"w write the {'diff' if edits else 'configuration'}" in text_of(app)


async def test_a_custom_change_is_checked_where_it_is_typed() -> None:
    trials = FakeTrials()
    async with running(FakeSource(tries=trials)) as (app, pilot):
        await press(pilot, "t", "tab", "enter")
        assert "enter a change" in text_of(app) and not trials.jobs
        await press(pilot, *"batch.mikro=q", "enter")
        assert "unknown key" in text_of(app) and not trials.jobs
        assert "batch.mikro=q" in text_of(app)  # what was typed stays, to be mended
        await press(pilot, "ctrl+u", *"loadr.workers='2", "enter")
        assert "cannot parse" in text_of(app) and not trials.jobs
        await press(
            pilot, "home", *["right"] * 4, "e", "end", "left", "left", "backspace", "x", "backspace", "end"
        )
        await press(pilot, "backspace", "backspace", *"=2", "enter")
        assert [job.sets for job in trials.jobs] == [("loader.workers=2",)] and trials.causes == [None]


async def test_without_proposals_the_field_has_the_focus() -> None:
    trials = FakeTrials()
    async with running(FakeSource(tries=trials), HEALTHY) as (_, pilot):
        await press(pilot, "t", *"loader.workers=2", "enter")
        assert [job.sets for job in trials.jobs] == [("loader.workers=2",)]
        trials.jobs[0].result, trials.jobs[0].done = trial_event(), True
        await look(pilot)
        await press(pilot, "t", "0", "enter")
        assert [job.sets for job in trials.jobs][1:] == [("loader.workers=20",)]


async def test_a_proposal_can_be_edited_first() -> None:
    trials = FakeTrials()
    async with running(FakeSource(tries=trials)) as (app, pilot):
        await press(pilot, "t", "j", "m", "e")
        assert "loader.cache=true" in text_of(app).split("your own change")[1]
        await press(pilot, *" loader.workers=0", "enter")
        assert trials.jobs[0].sets == ("loader.cache=true", "loader.workers=0")
        assert trials.budgets == [120.0] and "of 120 s" in text_of(app)


@pytest.mark.parametrize("key", ["escape", "q", "ctrl+c"])
async def test_stopping_waits_for_the_run_to_resume(key: str) -> None:
    trials = FakeTrials()
    source = FakeSource(tries=trials)
    async with running(source) as (app, pilot):
        await press(pilot, "t", "enter", key)
        assert trials.jobs[0].stopped == 1 and "resumes when" in text_of(app)
        assert source.commands == [] and app.is_running
        trials.jobs[0].result = trial_event(
            "stopped", ratio=None, low=None, high=None, text="stopped when asked to"
        )
        trials.jobs[0].done = True
        await look(pilot)
        assert "when asked to" in text_of(app)
        await press(pilot, key)
        assert isinstance(app.screen, LiveScreen)


@pytest.mark.parametrize("how", ["hangup", "ended", "leave"])
async def test_leaving_the_app_stops_the_trial(how: str) -> None:
    trials = FakeTrials()
    source = FakeSource(tries=trials)
    async with running(source) as (app, pilot):
        await press(pilot, "t", "enter")
        if how == "hangup":
            app.hang_up()
        elif how == "leave":
            app.leave()
        else:
            app.leave_when_final()
            source.value = ended("terminated", "terminated (SIGTERM)")
            live = app.screen_stack[0]
            assert isinstance(live, LiveScreen)
            live.tick()
        await pilot.pause()
    assert trials.jobs[0].stopped >= 1
    assert app.return_value == {"hangup": "hangup", "ended": "stop", "leave": "quit"}[how]


async def test_a_trial_that_fails_or_cannot_begin_says_why() -> None:
    trials = FakeTrials(refused="another trial is still ending")
    async with running(FakeSource(tries=trials)) as (app, pilot):
        await press(pilot, "t", "enter")
        assert "still ending" in text_of(app) and not trials.jobs
        trials.refused = ""
        await press(pilot, "enter")
        trials.jobs[0].problem, trials.jobs[0].done = "the run did not answer within 3 s", True
        await look(pilot)
        assert "within 3 s" in text_of(app)
        assert "w write" not in text_of(app)
        await press(pilot, "t", "enter")
        result = trial_event(
            "out of memory", ratio=None, low=None, high=None, text="out of memory with the change"
        )
        trials.jobs[1].result, trials.jobs[1].done = replace(result, seconds=70.4), True
        await look(pilot)
        await press(pilot, "w")
        assert "60 s, and 10.4 s" in " ".join(text_of(app).split())
        assert "out of memory" in text_of(app) and "w write" not in text_of(app)
        await press(pilot, "t", "enter")
        trials.jobs[2].result, trials.jobs[2].done, trials.full_disk = trial_event(), True, True
        await look(pilot)
        await press(pilot, "w")
        assert "faster 1.42x" in text_of(app) and "No space left" in text_of(app)


async def test_an_inconclusive_result_can_be_measured_again_for_longer() -> None:
    trials = FakeTrials()
    text = "inconclusive: setup took more than 60 s; raise --budget above 60; losses close"
    async with running(FakeSource(tries=trials)) as (app, pilot):
        await press(pilot, "t", "enter")
        for index, hint in enumerate(("m measure up to 120 s", "m measure up to 300 s", "")):
            result = trial_event("inconclusive", ratio=None, low=None, high=None, text=text)
            trials.jobs[index].result, trials.jobs[index].done = result, True
            await look(pilot)
            shown = " ".join(text_of(app).split())
            assert "--budget" not in shown and "w write" not in shown and hint in shown
            assert ("press m" in shown) == bool(hint)
            await press(pilot, "m")
        assert trials.budgets == [60.0, 120.0, 300.0]
        assert len({job.sets for job in trials.jobs}) == 1


async def test_a_defect_in_a_rule_is_one_line_and_no_crash() -> None:
    def broken(_: object) -> Any:
        raise ZeroDivisionError("division\nby zero")

    async with pilots.running(FakeSource(), rules=broken) as (app, pilot):
        assert "division by zero" in text_of(app)
        assert "step 4,218" in text_of(app)
        await press(pilot, "d")
        assert "ZeroDivisionError" in text_of(app)


async def test_the_rules_are_asked_once_a_snapshot() -> None:
    asked: list[object] = []

    def rules(value: object) -> Any:
        asked.append(value)
        return (HEALTHY,)

    source = FakeSource()
    async with pilots.running(source, rules=rules) as (app, pilot):
        for _ in range(3):
            await tick(pilot)
        await press(pilot, "d", "escape")
        assert len(asked) == 1 and "found: 97 %" in text_of(app)
        source.value = replace(source.value, step=4_300)
        await tick(pilot)
        assert len(asked) == 2


async def test_the_line_names_what_t_measures_and_other_changes_only_whole() -> None:
    change = Change(
        "stop the process that takes the cores, or let it run elsewhere: python (pid 1234, 0.5 cores)"
    )
    threads = Change("leave the neighbour its core", ("run.threads=1",))
    long = replace(FINDING, changes=(change, threads))
    async with running(FakeSource(tries=FakeTrials()), long, size=(60, 24)) as (app, pilot):
        text = text_of(app)
        assert "run.threads=1" in text
        assert "pid 1234" not in text
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        text = " ".join(text_of(app).split())
        assert "threads=1; or" in text and "0.5 cores)" in text
