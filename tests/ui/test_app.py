"""The app itself: held up by a training thread, and the way to the wizard and back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual import timer
from textual.pilot import Pilot

from ndd_console.app import ConsoleApp
from ndd_console.jobs.folder import StartRow
from ndd_console.jobs.run_sources import HomeFolder, RunRow, RunSource
from ndd_console.screens.base import TextQuestion
from ndd_console.screens.home import HomeScreen
from ndd_console.screens.live import LiveScreen
from ndd_console.screens.wizard import WizardScreen
from ndd_console.view.keys import NEEDS
from ndd_console.view.style import Look
from ndd_console.words.blocks import Block
from ndd_engine.errors import UsageError
from ndd_engine.record.events import EndEvent
from ndd_engine.record.rundir import RunDir
from tests.records import run_event, window, write
from tests.waiting import LIMIT_S

from .fake_sources import FakeHome, FakeSource
from .fake_wizard import FakeWizard
from .fakes import T0, ended
from .pilots import make, press, running, text_of, tick, until


def held_up(clock: Callable[[], float]) -> Callable[[], float]:
    """A clock that advances 50 ms whenever a one-shot timer reads it: a timer of 8 ms is late when it starts."""
    late = 0.0

    def now() -> float:
        nonlocal late
        task = asyncio.current_task()
        if task is not None and task.get_name().startswith("set_timer"):
            late += 0.05
        return clock() + late

    return now


async def test_a_resize_is_seen_though_the_process_is_held_up_while_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(FakeSource()) as (app, pilot):
        await pilot.pause()
        screen = app.screen
        assert isinstance(screen, LiveScreen)
        canvas = screen.canvas
        monkeypatch.setattr(timer._time, "get_time", held_up(timer._time.get_time))
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: canvas.size.width == 120)
        await pilot.resize_terminal(100, 30)
        await until(pilot, lambda: canvas.size.width == 100)


async def to_the_file(pilot: Pilot[Any], wizard: FakeWizard) -> WizardScreen:
    screen = pilot.app.screen
    assert isinstance(screen, WizardScreen)
    await press(pilot, "enter", "enter", "enter")
    wizard.go_on()
    await until(pilot, lambda: screen.page == "trade-offs")
    await press(pilot, "down", "enter")
    assert screen.page == "file"
    return screen


async def test_from_home_to_the_wizard_and_what_it_wrote_is_trained() -> None:
    wizard, asked, trained = FakeWizard(), [], []

    def opener(source: RunSource | None, row: StartRow | None) -> FakeWizard:
        asked.append((source, row))
        return wizard

    def train(path: str) -> FakeSource:
        trained.append(path)
        return FakeSource()

    async with running(None, FakeHome(), wizard=opener, start_file=train, size=(100, 30)) as (app, pilot):
        await pilot.pause()
        assert "wizard" in text_of(app)
        await press(pilot, "w")
        screen = await to_the_file(pilot, wizard)
        assert ("t", "write and train") in screen.key_words()
        await press(pilot, "t")
        await until(pilot, lambda: isinstance(app.screen, LiveScreen))
        assert (
            [(source, row.name) for source, row in asked] == [(None, "chartext")]
            and trained == ["mine.toml"]
            and wizard.saved
        )
        assert app.wizard is None


async def test_a_closed_wizard_leads_back_home_and_its_work_ends() -> None:
    wizard = FakeWizard()
    async with running(None, FakeHome(), wizard=lambda *_: wizard, size=(100, 30)) as (app, pilot):
        await pilot.pause()
        await press(pilot, "w", "enter", "enter", "enter")
        assert wizard.busy
        await press(pilot, "q")
        assert isinstance(app.screen, HomeScreen)
        assert not wizard.busy and wizard.stopped


async def test_beside_a_run_the_wizard_writes_and_does_not_train() -> None:
    wizard, source, asked = FakeWizard(), FakeSource(), []

    def opener(run: RunSource | None, row: StartRow | None) -> FakeWizard:
        asked.append(run)
        return wizard

    async with running(source, wizard=opener, start_file=lambda _: FakeSource(), size=(120, 40)) as (
        app,
        pilot,
    ):
        await pilot.pause()
        await press(pilot, "w")
        screen = await to_the_file(pilot, wizard)
        assert all(key != "t" for key, _ in screen.key_words())
        await press(pilot, "t")
        assert not wizard.saved
        await press(pilot, "w")
        assert wizard.saved
        await press(pilot, "q")
        assert isinstance(app.screen, LiveScreen)
        assert asked == [source] and not source.commands


async def test_home_starts_a_run_in_a_thread() -> None:
    source, ready, threads = FakeSource(), threading.Event(), []

    def start(row: StartRow) -> RunSource:
        threads.append(threading.current_thread())
        assert ready.wait(LIMIT_S) and row.name == "eeg"
        return source

    async with running(None, FakeHome(), start=start) as (app, pilot):
        await until(pilot, lambda: "charlm-003" in text_of(app) and "4080" in text_of(app))
        await press(pilot, "down", "s", "s")
        assert "starting eeg…" in text_of(app)
        ready.set()
        await until(pilot, lambda: isinstance(app.screen, LiveScreen))
        assert threads[0] is not threading.main_thread() and len(threads) == 1 and app.source is source
        await press(pilot, "q", "d")
    assert app.return_value == "detach"


async def test_enter_opens_and_a_named_key_starts() -> None:
    started: list[str] = []

    def start(row: StartRow) -> FakeSource:
        started.append(row.name)
        return FakeSource()

    async with running(None, FakeHome(), start=start, wizard=lambda *_: FakeWizard()) as (app, pilot):
        await until(pilot, lambda: "charlm-003" in text_of(app))
        await press(pilot, "down", "enter")
        await until(pilot, lambda: "ndd-console train --workload eeg" in text_of(app))
        assert "details of" in text_of(app) and "\x1b" not in text_of(app) and not started
        await press(pilot, "w")
        assert isinstance(app.screen, WizardScreen)
        await press(pilot, "q", "enter", "escape")
        assert isinstance(app.screen, HomeScreen) and not started
        await press(pilot, "end", "s")
        assert NEEDS["startable"] in text_of(app) and not started
        await press(pilot, "home", "enter")
        await press(pilot, "s")
        await until(pilot, lambda: isinstance(app.screen, LiveScreen))
        assert started == ["chartext"]
        await press(pilot, "q", "d")


async def test_home_writes_the_report_of_a_run(tmp_path: Path) -> None:
    directory = write(RunDir(tmp_path / "one"), [(T0, run_event()), (T0 + 1, EndEvent("done", "", 9, 0))])
    async with running(None, HomeFolder(tmp_path)) as (app, pilot):
        await until(pilot, lambda: "one" in text_of(app) and "chartext" in text_of(app))
        await press(pilot, "home", "x")
        assert NEEDS["run"] in text_of(app) and not directory.report.exists()
        await press(pilot, "end", "x")
        await until(pilot, lambda: "written:" in text_of(app))
    assert "<html" in directory.report.read_text()


async def test_home_shows_how_far_a_script_is_whose_end_is_unknown() -> None:
    class Scripts(FakeHome):
        def runs(self) -> list[RunRow]:
            first = super().runs()[0]
            return [
                replace(first, name="ran", step=1_200, total_steps=0),
                replace(first, step=0, total_steps=0),
            ]

    app = make(None, Scripts())
    async with app.run_test(size=(120, 30)) as pilot:
        await until(pilot, lambda: "not started" in text_of(app))
        assert "1,200 " in text_of(app) and text_of(app).count("not started") == 1


async def test_home_compares_two_runs(tmp_path: Path) -> None:
    for name, step_ns in (("one", 4_000_000), ("two", 2_000_000)):
        windows = [(T0 + n, window(10 * n, wall_ns=10 * step_ns)) for n in range(1, 9)]
        end = (T0 + 10, EndEvent("done", "", 80, 0))
        write(RunDir(tmp_path / name), [(T0, run_event(name=name)), *windows, end])
    async with running(None, HomeFolder(tmp_path)) as (app, pilot):
        await until(pilot, lambda: "two" in text_of(app))
        await press(pilot, "end", "c")
        assert "select another run" in text_of(app)
        await press(pilot, "up", "c")
        await until(pilot, lambda: "2.000x" in text_of(app) or "0.500x" in text_of(app))
        await press(pilot, "escape", "c", "c")  # a run is not compared with itself
        assert isinstance(app.screen, HomeScreen)


async def test_an_own_workload_is_asked_for_its_epochs() -> None:
    started: list[StartRow] = []

    class Own(FakeHome):
        def workloads(self) -> list[StartRow]:
            return [StartRow("mine:factory", "your own workload", "", kind="own")]

    def start(row: StartRow) -> FakeSource:
        started.append(row)
        raise UsageError("cannot import mine")

    async with running(None, Own(), start=start) as (app, pilot):
        await until(pilot, lambda: "charlm-003" in text_of(app))
        await press(pilot, "s", "x", "1", "2", "backspace")
        assert "mine:factory" in text_of(app)
        assert isinstance(app.screen, TextQuestion) and app.screen.input.value == "1"
        assert "charlm-003" in text_of(app)  # the list is still seen
        await press(pilot, "escape")
        assert isinstance(app.screen, HomeScreen) and not started
        await press(pilot, "s", "0", "enter")  # zero epochs are no run: the default remains
        await until(pilot, lambda: "import mine" in text_of(app))
        await press(pilot, "escape")
        assert "import mine" not in text_of(app) and app.return_value is None
        await press(pilot, "enter")
        await until(pilot, lambda: "details of" in text_of(app))
        await press(pilot, "s", "3", "enter")
        await until(pilot, lambda: len(started) == 2)
        assert [row.epochs for row in started] == [1, 3]


async def test_home_shows_why_a_run_cannot_start() -> None:
    def refuse(row: StartRow) -> RunSource:
        raise UsageError(f"{row.name}: batch.micro = 0: must be at least 1")

    async with running(
        None, FakeHome(), start=refuse, attach=lambda name: FakeSource(name=name, owned=False)
    ) as (app, pilot):
        await until(pilot, lambda: "charlm-003" in text_of(app))
        await press(pilot, "s")
        await until(pilot, lambda: "must be at least 1" in text_of(app))
        # A run opens, and closing its viewer comes back to the list.
        await press(pilot, "end", "enter")
        await until(pilot, lambda: isinstance(app.screen, LiveScreen))
        source = app.source
        assert isinstance(source, FakeSource) and source.name == "charlm-001"
        await press(pilot, "q")
        await until(pilot, lambda: isinstance(app.screen, HomeScreen))
        assert source.closed and app.source is None
        await press(pilot, "r", "question_mark", "escape", "q")
    assert app.return_value == "quit"


async def test_first_paint_waits_for_nothing() -> None:
    looked, painted = threading.Event(), []

    class SlowHome(FakeHome):
        def machine(self) -> list[Block]:
            assert looked.wait(LIMIT_S)
            raise OSError("no driver")

    async with running(None, SlowHome(), on_first_paint=lambda: painted.append(1)) as (app, pilot):
        await until(pilot, lambda: painted == [1])
        assert "detecting" in text_of(app)
        looked.set()
        await until(pilot, lambda: "no driver" in text_of(app))
    assert painted == [1]


async def test_hanging_up_from_a_thread() -> None:
    async with running(FakeSource()) as (app, pilot):
        threading.Thread(target=app.hang_up).start()
        await until(pilot, lambda: app.return_value is not None)
    assert app.return_value == "hangup"
    app.hang_up()  # too late, and harmless


async def test_hanging_up_before_the_first_paint() -> None:
    app = make(FakeSource())
    app.hang_up()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.return_value is not None)
    assert app.return_value == "hangup"


async def test_leaving_when_somebody_else_stopped_the_run() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        app.leave_when_final()
        await until(pilot, lambda: "stopping" in text_of(app))
        assert source.commands == []
        source.value = ended("terminated", "terminated (SIGTERM)")
        await tick(pilot)
    assert app.return_value == "stop"


async def test_over_ssh_it_is_slower_while_nobody_looks() -> None:
    source = FakeSource()
    async with running(source, look=Look(ssh=True)) as (app, pilot):
        screen = app.screen
        assert isinstance(screen, LiveScreen)
        app.app_focus = False
        before = source.asked
        for _ in range(8):
            screen.tick()
        await asyncio.sleep(0)
        assert source.asked - before <= 3
        await pilot.pause()


async def test_a_narrow_home_screen_keeps_its_name() -> None:
    app = ConsoleApp(None, FakeHome())
    async with app.run_test(size=(50, 24)) as pilot:
        await until(pilot, lambda: "RTX 4080" in text_of(app))
        assert text_of(app).strip().startswith("ndd-console")
        app.leave()
