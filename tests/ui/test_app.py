"""The app itself and its home screen: starting runs, the way to the wizard and back, hanging up, and being held up."""

from __future__ import annotations

import asyncio
import os
import pty
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual import timer
from textual.events import Resize
from textual.geometry import Size
from textual.pilot import Pilot

from ndd_console.jobs.folder import StartRow
from ndd_console.jobs.run_sources import HomeFolder, RunRow, RunSource
from ndd_console.screens.base import TextQuestion
from ndd_console.screens.home import HomeScreen
from ndd_console.screens.live import LiveScreen
from ndd_console.screens.wizard import WizardScreen
from ndd_console.view.keys import NEEDS
from ndd_console.view.style import Look
from ndd_console.widgets.textual_private import BackgroundDriver
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


async def shows(pilot: Pilot[Any], *texts: str) -> None:
    """Wait until the screen shows all of this."""
    await until(pilot, lambda: all(text in text_of(pilot.app) for text in texts))


async def opens(pilot: Pilot[Any], kind: type) -> None:
    await until(pilot, lambda: isinstance(pilot.app.screen, kind))


# The wizard


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
        asked.append((source, row and row.name))
        return wizard

    def train(path: str) -> FakeSource:
        trained.append(path)
        return FakeSource()

    async with running(None, FakeHome(), wizard=opener, start_file=train, size=(100, 30)) as (app, pilot):
        await pilot.pause()
        await press(pilot, "w")
        screen = await to_the_file(pilot, wizard)
        assert "t" in dict(screen.key_words())
        await press(pilot, "t")
        await opens(pilot, LiveScreen)
        assert asked == [(None, "chartext")] and trained == ["mine.toml"] and wizard.saved
        assert app.wizard is None


async def test_a_closed_wizard_leads_back_home_and_its_work_ends() -> None:
    wizard = FakeWizard()
    async with running(None, FakeHome(), wizard=lambda *_: wizard, size=(100, 30)) as (app, pilot):
        await pilot.pause()
        await press(pilot, "w", "enter", "enter", "enter")
        assert wizard.busy
        await press(pilot, "q")
        assert isinstance(app.screen, HomeScreen) and not wizard.busy and wizard.stopped


async def test_beside_a_run_the_wizard_writes_and_does_not_train() -> None:
    wizard, source, asked = FakeWizard(), FakeSource(), []

    def opener(run: RunSource | None, row: StartRow | None) -> FakeWizard:
        asked.append(run)
        return wizard

    options: dict[str, Any] = {"wizard": opener, "start_file": lambda _: FakeSource()}
    async with running(source, size=(120, 40), **options) as (app, pilot):
        await pilot.pause()
        await press(pilot, "w")
        screen = await to_the_file(pilot, wizard)
        assert "t" not in dict(screen.key_words())
        await press(pilot, "t")
        assert not wizard.saved
        await press(pilot, "w")
        assert wizard.saved
        await press(pilot, "q")
        assert isinstance(app.screen, LiveScreen) and asked == [source] and not source.commands


# Home


async def test_home_starts_a_run_in_a_thread() -> None:
    source, ready, threads = FakeSource(), threading.Event(), []

    def start(row: StartRow) -> RunSource:
        threads.append(threading.current_thread())
        assert ready.wait(LIMIT_S) and row.name == "eeg"
        return source

    async with running(None, FakeHome(), start=start) as (app, pilot):
        await shows(pilot, "charlm-003", "4080")
        await press(pilot, "down", "s")
        assert (
            "starting eeg" in text_of(app) and "q quit" not in text_of(app) and "s start" not in text_of(app)
        )
        await press(pilot, "s", "enter", "ctrl+c", "q")
        assert NEEDS["not opening"] in text_of(app)
        ready.set()
        await opens(pilot, LiveScreen)
        assert threads[0] is not threading.main_thread() and len(threads) == 1 and app.source is source
        await press(pilot, "q", "d")
    assert app.return_value == "detach"


async def test_enter_opens_and_a_named_key_starts() -> None:
    started: list[str] = []

    def start(row: StartRow) -> FakeSource:
        started.append(row.name)
        return FakeSource()

    class Escaping(FakeHome):
        def workloads(self) -> list[StartRow]:
            return [StartRow("chartext", "text", ""), StartRow("eeg", "EEG \x1b[1mforecasters", "")]

    async with running(None, Escaping(), start=start, wizard=lambda *_: FakeWizard()) as (app, pilot):
        await shows(pilot, "charlm-003")
        await press(pilot, "down", "enter")
        await shows(pilot, "--workload eeg", "its defaults")
        assert "\x1b" not in text_of(app) and not started
        await press(pilot, "w")
        assert isinstance(app.screen, WizardScreen)
        await press(pilot, "q", "enter", "escape")
        assert isinstance(app.screen, HomeScreen) and not started
        await press(pilot, "end", "s")
        assert NEEDS["startable"] in text_of(app) and not started
        await press(pilot, "home", "enter", "s")
        await opens(pilot, LiveScreen)
        assert started == ["chartext"]
        await press(pilot, "q", "d")


async def test_home_writes_the_report_of_a_run(tmp_path: Path) -> None:
    directory = write(RunDir(tmp_path / "one"), [(T0, run_event()), (T0 + 1, EndEvent("done", "", 9, 0))])
    async with running(None, HomeFolder(tmp_path)) as (app, pilot):
        await shows(pilot, "one", "chartext")
        await press(pilot, "home")
        await press(pilot, "x")  # not before the selection is known: it takes the message away
        assert NEEDS["run"] in text_of(app) and not directory.report.exists()
        await press(pilot, "end", "x")
        await shows(pilot, "written:")
    assert "<html" in directory.report.read_text()


async def test_home_shows_how_far_a_script_is_whose_end_is_unknown() -> None:
    class Scripts(FakeHome):
        def runs(self) -> list[RunRow]:
            first = super().runs()[0]
            return [replace(first, step=step, total_steps=0) for step in (1_200, 0)]

    async with running(None, Scripts(), size=(120, 30)) as (app, pilot):
        await shows(pilot, "not started", "1,200 ")
        assert text_of(app).count("not started") == 1


async def test_home_compares_two_runs(tmp_path: Path) -> None:
    for name, step_ns in (("one", 4_000_000), ("two", 2_000_000)):
        windows = [(T0 + n, window(10 * n, wall_ns=10 * step_ns)) for n in range(1, 9)]
        end = (T0 + 10, EndEvent("done", "", 80, 0))
        write(RunDir(tmp_path / name), [(T0, run_event(name=name)), *windows, end])
    async with running(None, HomeFolder(tmp_path)) as (app, pilot):
        await shows(pilot, "two")
        await press(pilot, "end", "c", "up", "c")
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
        raise UsageError("no module")

    async with running(None, Own(), start=start) as (app, pilot):
        await shows(pilot, "charlm-003")
        await press(pilot, "s", "x", "1", "2", "backspace")
        assert isinstance(app.screen, TextQuestion) and app.screen.input.value == "1"
        assert "mine:factory" in text_of(app) and "charlm-003" in text_of(app)  # the list is still seen
        await press(pilot, "escape")
        assert isinstance(app.screen, HomeScreen) and not started
        await press(pilot, "s", "0", "enter")  # zero epochs are no run: the default remains
        await shows(pilot, "no module")
        await press(pilot, "escape")
        assert "no module" not in text_of(app) and app.return_value is None
        await press(pilot, "enter")
        await shows(pilot, "--workload mine:factory")
        await press(pilot, "s", "3", "enter")
        await until(pilot, lambda: len(started) == 2)
        assert [row.epochs for row in started] == [1, 3]


async def test_home_shows_why_a_run_cannot_start_and_closing_a_run_comes_back_to_it() -> None:
    def refuse(row: StartRow) -> RunSource:
        raise UsageError(f"{row.name}: batch.micro")

    def attach(name: str) -> RunSource:
        return FakeSource(name=name, owned=False)

    async with running(None, FakeHome(), start=refuse, attach=attach) as (app, pilot):
        await shows(pilot, "charlm-003")
        await press(pilot, "s")
        await shows(pilot, "chartext: batch.micro")
        await press(pilot, "end", "enter")
        await opens(pilot, LiveScreen)
        source = app.source
        assert isinstance(source, FakeSource) and source.name == "charlm-001"
        await press(pilot, "q")
        await opens(pilot, HomeScreen)
        assert source.closed and app.source is None
        await press(pilot, "r", "question_mark", "escape", "q")
    assert app.return_value == "quit"


async def test_first_paint_waits_for_nothing_and_a_narrow_screen_keeps_its_name() -> None:
    looked, painted = threading.Event(), []

    class SlowHome(FakeHome):
        def machine(self) -> list[Block]:
            assert looked.wait(LIMIT_S)
            raise OSError("driver?")

    options: dict[str, Any] = {"on_first_paint": lambda: painted.append(1), "size": (50, 24)}
    async with running(None, SlowHome(), **options) as (app, pilot):
        await until(pilot, lambda: painted == [1])
        assert text_of(app).strip().startswith("ndd-console") and "driver?" not in text_of(app)
        looked.set()
        await shows(pilot, "driver?")
    assert painted == [1]


# Ways to end, and to be held up


@pytest.mark.parametrize("painted", [True, False])
async def test_hanging_up(painted: bool) -> None:
    app = make(FakeSource())
    if not painted:
        app.hang_up()
    async with app.run_test(size=(80, 24)) as pilot:
        if painted:
            threading.Thread(target=app.hang_up).start()
        await until(pilot, lambda: app.return_value is not None)
    assert app.return_value == "hangup"
    app.hang_up()  # too late, and harmless


async def test_the_thread_that_reads_keys_ends_with_its_terminal() -> None:
    """Also where no SIGHUP tells it. Reading a terminal that is gone returns at once, every time."""
    app = make(FakeSource())
    driver = BackgroundDriver(app)
    ours, driver.fileno = pty.openpty()
    try:
        os.close(ours)
        driver.run_input_thread()
    finally:
        os.close(driver.fileno)
    await app.run_async(headless=True)
    assert app.return_value == "hangup"


@pytest.mark.parametrize("above", [(), ("?",), ("q",), ("ctrl+p",)])
async def test_a_size_that_the_terminal_no_longer_has_is_not_drawn(above: tuple[str, ...]) -> None:
    async with running(FakeSource()) as (app, pilot):
        await press(pilot, *above)
        screen, size = app.screen, app.size
        for other in (Size(70, 20), size, Size(60, 20)):
            screen.post_message(Resize(other, other))
            await tick(pilot)
            assert screen.outer_size == app.size == size
        await pilot.resize_terminal(70, 20)
        await until(pilot, lambda: screen.outer_size == Size(70, 20))


async def test_leaving_when_somebody_else_stopped_the_run() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        app.leave_when_final()
        await shows(pilot, "stopping")
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
        monkeypatch.setattr(timer._time, "get_time", held_up(timer._time.get_time))
        for size in ((120, 40), (100, 30)):
            await pilot.resize_terminal(*size)
            await until(pilot, lambda size=size: screen.canvas.size.width == size[0])  # type: ignore[misc]
