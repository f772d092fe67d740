"""Trials and tuning on the screen: selecting, mistakes, measuring, stopping, leaving, and what is written."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from ndd_console.app import TuningApp
from ndd_console.jobs.trials import TuningJob
from ndd_console.screens.live import LiveScreen
from ndd_console.screens.trial import TrialScreen
from ndd_console.screens.tuning import TuningScreen
from ndd_engine.diagnose import Change
from ndd_engine.errors import UsageError
from ndd_engine.trial.outcome import Progress
from ndd_engine.trial.tuning import TuningState

from . import pilots
from .fake_sources import FakeSource, FakeTrials
from .fake_tuning import DONE, MEASURING, FixedTuning
from .fakes import FINDING, HEALTHY, SECOND, ended, found, snapshot, trial_event
from .pilots import press, text_of, tick, until


def running(source: FakeSource, *findings: Any, size: tuple[int, int] = (80, 24)) -> Any:
    return pilots.running(source, size=size, rules=found(*(findings or (FINDING, SECOND))))


async def look(pilot: Pilot[Any]) -> str:
    """What the screen of a trial shows once it has looked again, in one line."""
    await pilot.pause()
    screen = pilot.app.screen
    assert isinstance(screen, TrialScreen)
    screen.look_again()
    await pilot.pause()
    return " ".join(text_of(pilot.app).split())


def unclear(verdict: str, reason: str, **changes: Any) -> Any:
    """The result of a trial without a ratio."""
    return trial_event(verdict, ratio=None, low=None, high=None, reason=reason, **changes)


async def finish(pilot: Pilot[Any], trials: FakeTrials, result: Any) -> str:
    """The newest trial ends with this result; what the screen shows then."""
    trials.jobs[-1].result, trials.jobs[-1].done = result, True
    return await look(pilot)


async def test_the_finding_leads_to_a_trial_and_back() -> None:
    trials = FakeTrials()
    source = FakeSource(tries=trials)
    async with running(source) as (app, pilot):
        assert all(part in text_of(app) for part in ("57 %", "2.3x", "t try", "d diagnosis"))
        await press(pilot, "t")
        assert isinstance(app.screen, TrialScreen)
        for change in ("loader.pin_memory=true", "loader.cache=true", "optimizer.implementation=fused"):
            assert change in text_of(app)
        await press(pilot, "enter")
        assert trials.jobs[0].sets == ("loader.workers=4", "loader.pin_memory=true")
        assert trials.causes == ["few-workers"]
        for seconds, shown in ((18.0, "18 of 60 s"), (70.0, "60 of 60 s")):
            trials.jobs[0].progress = Progress("measuring", seconds, 60.0, 3, 1.4, 1.2, 1.61)
            text = await look(pilot)
            assert all(part in text for part in (shown, "1.40x (1.20 to", "├", "●")) and "70" not in text
        text = await finish(pilot, trials, trial_event())
        for part in ("1.42x (95 % CI 1.35 to 1.49)", "20 steps", "54.6 ms", "24 of 60 s", "w write"):
            assert part in text, part
        await press(pilot, "w")
        assert "charlm-001-changed.toml" in text_of(app) and "w write" not in text_of(app)
        source.value = snapshot(trials=(trial_event(),))
        await press(pilot, "t")
        assert "1.42x" in text_of(app)  # the earlier one
        await press(pilot, "escape")
        assert isinstance(app.screen, LiveScreen) and trials.jobs[0].stopped == 0


@pytest.mark.parametrize(("edits", "written"), [(False, "configuration"), (True, "diff")])
async def test_what_is_written_is_named(edits: bool, written: str) -> None:
    """A script has no configuration: its change is a diff."""
    trials = FakeTrials(edits=edits)
    async with running(FakeSource(tries=trials, script=edits)) as (_, pilot):
        await press(pilot, "t", "enter")
        assert f"the {written}" in await finish(pilot, trials, trial_event())


async def test_a_custom_change_is_checked_where_it_is_typed() -> None:
    trials = FakeTrials()
    async with running(FakeSource(tries=trials)) as (app, pilot):
        await press(pilot, "t", "tab", "enter")
        assert not trials.jobs
        await press(pilot, *"batch.mikro=q", "enter")
        assert "unknown" in text_of(app) and not trials.jobs
        assert "batch.mikro=q" in text_of(app)  # what was typed stays, to be mended
        await press(pilot, "ctrl+u", *"loadr.workers='2", "enter")
        assert "parse" in text_of(app) and not trials.jobs
        await press(pilot, "home", *["right"] * 4, "e", "end", "left", "left", "backspace", "end")
        await press(pilot, "backspace", "backspace", *"=2", "enter")
        assert [job.sets for job in trials.jobs] == [("loader.workers=2",)] and trials.causes == [None]


async def test_without_proposals_the_field_has_the_focus_and_a_proposal_can_be_edited() -> None:
    trials = FakeTrials()
    async with running(FakeSource(tries=trials), HEALTHY) as (_, pilot):
        await press(pilot, "t", *"loader.workers=2", "enter")
        await finish(pilot, trials, trial_event())
        await press(pilot, "t", "0", "enter")
    async with running(FakeSource(tries=trials)) as (app, pilot):
        await press(pilot, "t", "j", "m", "e", *" loader.workers=0", "enter")
        assert "of 120 s" in text_of(app)
    assert [job.sets for job in trials.jobs] == [
        ("loader.workers=2",), ("loader.workers=20",), ("loader.cache=true", "loader.workers=0"),
    ]  # fmt: skip
    assert trials.budgets == [60.0, 60.0, 120.0]


@pytest.mark.parametrize("key", ["escape", "q", "ctrl+c"])
async def test_stopping_waits_for_the_run_to_resume(key: str) -> None:
    trials = FakeTrials()
    source = FakeSource(tries=trials)
    async with running(source) as (app, pilot):
        await press(pilot, "t", "enter", key)
        assert trials.jobs[0].stopped == 1 and "resumes" in text_of(app)
        assert source.commands == [] and app.is_running
        assert "as asked" in await finish(pilot, trials, unclear("stopped", "as asked"))
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
    trials = FakeTrials(refused="another one")
    async with running(FakeSource(tries=trials)) as (app, pilot):
        await press(pilot, "t", "enter")
        assert "another one" in text_of(app) and not trials.jobs
        trials.refused = ""
        await press(pilot, "enter")
        trials.jobs[0].error, trials.jobs[0].done = "no answer", True
        text = await look(pilot)
        assert "no answer" in text and "w write" not in text
        await press(pilot, "t", "enter")
        text = await finish(pilot, trials, unclear("out of memory", "no memory", seconds=70.4))
        await press(pilot, "w")
        assert "60 s, and 10.4 s" in text and "no memory" in text and "w write" not in text_of(app)
        await press(pilot, "t", "enter")
        trials.full_disk = True
        await finish(pilot, trials, trial_event())
        await press(pilot, "w")
        assert "1.42x" in text_of(app) and "No space" in text_of(app)


async def test_an_inconclusive_result_can_be_measured_again_for_longer() -> None:
    trials = FakeTrials()
    reason = "setup took more than 60 s; raise --budget to about 120"
    async with running(FakeSource(tries=trials)) as (_, pilot):
        await press(pilot, "t", "enter")
        for hint in ("up to 120 s", "up to 300 s", ""):
            shown = await finish(pilot, trials, unclear("inconclusive", reason))
            assert "--budget" not in shown and "w write" not in shown and hint in shown
            assert ("press m" in shown) == bool(hint)
            await press(pilot, "m")
        assert trials.budgets == [60.0, 120.0, 300.0]
        assert len({job.sets for job in trials.jobs}) == 1


# The findings that lead to them


async def test_a_defect_in_a_rule_is_one_line_and_no_crash() -> None:
    def broken(_: object) -> Any:
        raise ZeroDivisionError("zero\nwidth")

    async with pilots.running(FakeSource(), rules=broken) as (app, pilot):
        assert "zero width" in text_of(app) and "step 4,218" in text_of(app)
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
        assert len(asked) == 1 and "97 %" in text_of(app)
        source.value = replace(source.value, step=4_300)
        await tick(pilot)
        assert len(asked) == 2


async def test_the_line_names_what_t_measures_and_other_changes_only_whole() -> None:
    change = Change("stop the process that takes the cores: python (pid 1234, 0.5 cores)")
    threads = Change("leave the neighbour its core", ("run.threads=1",))
    long = replace(FINDING, changes=(change, threads))
    async with running(FakeSource(tries=FakeTrials()), long, size=(60, 24)) as (app, pilot):
        assert "run.threads=1" in text_of(app) and "pid 1234" not in text_of(app)
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        text = " ".join(text_of(app).split())
        assert "threads=1; or" in text and "0.5 cores)" in text


# Tuning


class Sweep:
    """A sweep that a test controls, in its own thread."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.stopped = False

    def __call__(self, tell: Callable[[TuningState], None], stop: threading.Event) -> TuningState:
        tell(MEASURING)
        while not self.go_on.wait(0.01):
            if stop.is_set():
                self.stopped = True
                return replace(DONE, stopped=True, text="1 of 2")
        return DONE


@asynccontextmanager
async def tuning(
    job: TuningJob, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[TuningApp, Pilot[str]]]:
    app = TuningApp(job, on_first_paint=job.start)
    try:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: job.failed() != "" or "◐ measuring" in text_of(app))
            yield app, pilot
    finally:
        job.stop()
        job.join()


async def test_the_sweep_and_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuning.toml").write_text("mine")
    sweep = Sweep()
    job = TuningJob("chartext.toml", sweep)
    async with tuning(job, (120, 40)) as (app, pilot):
        for part in (
            "chartext.toml", "✔ kept", "◐ measuring", "· waiting", "1.62x (1.55 to 1.70)", "12 of 60 s",
            "1.10x (0.96 to 1.26)",
        ):  # fmt: skip
            await until(pilot, lambda part=part: part in text_of(app))  # type: ignore[misc]
        await press(pilot, "w")
        assert not (tmp_path / "tuning-2.toml").exists()
        sweep.go_on.set()
        await until(pilot, lambda: "1.6x (1.52 to 1.69)" in text_of(app))
        assert "✖ dropped" in text_of(app) and "w write" in text_of(app)
        await press(pilot, "w")
        assert "tuning-2.toml" in text_of(app) and "w write" not in text_of(app)
        assert (tmp_path / "tuning-2.toml").read_text() == DONE.toml
        assert (tmp_path / "tuning.toml").read_text() == "mine"
        await press(pilot, "q")
    assert app.return_value == "quit" and job.state is DONE


@pytest.mark.parametrize("key", ["escape", "q", "ctrl+c"])
async def test_stopping_keeps_what_was_measured(key: str, tmp_path: Path) -> None:
    sweep = Sweep()
    job = TuningJob("chartext.toml", sweep, tmp_path / "out.toml")
    async with tuning(job) as (app, pilot):
        await press(pilot, key)
        await until(pilot, lambda: "1 of 2" in text_of(app) and "out.toml" in text_of(app))
        assert sweep.stopped and (tmp_path / "out.toml").read_text() == DONE.toml
        assert app.is_running
        await press(pilot, key)
    assert app.return_value == "quit"


async def test_a_sweep_that_cannot_begin_says_why() -> None:
    def refuse(*_: object) -> TuningState:
        raise UsageError("--only wrokers")

    job = TuningJob("chartext.toml", refuse)
    async with tuning(job) as (app, pilot):
        await until(pilot, lambda: "--only wrokers" in text_of(app))
        await press(pilot, "w", "q")
    assert isinstance(job.error, UsageError) and job.state is None


async def test_long_tunings_scroll_and_show_what_is_measured() -> None:
    candidate = MEASURING.rows[2].candidate
    rows = [replace(MEASURING.rows[2], candidate=replace(candidate, title=f"setting {i}")) for i in range(60)]
    rows[40] = replace(rows[40], state="measuring")
    app = TuningApp(FixedTuning(replace(MEASURING, rows=tuple(rows))))
    async with app.run_test(size=(80, 24)) as pilot:
        screen = app.screen
        assert isinstance(screen, TuningScreen)
        screen.look_again()
        await until(pilot, lambda: "◐ measuring" in text_of(app))
        assert "setting 40" in text_of(app)
        assert "setting 3 " not in text_of(app)
        await press(pilot, "home")
        assert "setting 0 " in text_of(app) and "setting 40" not in text_of(app)
        await press(pilot, "end")
        assert "setting 59" in text_of(app)


async def test_what_a_narrow_table_leaves_out_is_below_it_and_to_the_right() -> None:
    app = TuningApp(FixedTuning(DONE))
    async with app.run_test(size=(80, 24)) as pilot:
        await press(pilot)
        assert DONE.rows[0].reason in " ".join(text_of(app).split())
        await press(pilot, "end")
        assert DONE.rows[3].reason in text_of(app) and "losses" not in text_of(app)
        await press(pilot, *["right"] * 40)
        await until(pilot, lambda: "losses" in text_of(app))
        assert "✔ kept" in text_of(app) and "cache encoded" in text_of(app)
        assert "tuning.toml" not in text_of(app)
        await press(pilot, "w")
        assert "tuning.toml" in text_of(app)
