"""The app itself: held up by a training thread, and the way to the wizard and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from textual import timer
from textual.pilot import Pilot

from ndd_console.screens.base import CanvasScreen
from ndd_console.screens.home import HomeScreen
from ndd_console.screens.live import LiveScreen
from ndd_console.screens.wizard import WizardScreen
from ndd_console.source import RunSource
from ndd_console.view.wizard import FILE, TABLE

from .fake_wizard import FakeWizard
from .fakes import FakeHome, FakeSource
from .test_screens import make, text_of, until


def held_up(clock: Callable[[], float]) -> Callable[[], float]:
    """A clock that is 50 ms further at each look of a one-shot timer: one of 8 ms is late when it starts."""
    late = 0.0

    def now() -> float:
        nonlocal late
        task = asyncio.current_task()
        if task is not None and task.get_name().startswith("set_timer"):
            late += 0.05
        return clock() + late

    return now


def test_a_resize_is_seen_though_the_process_is_held_up_while_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        app = make(FakeSource())
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            screen = app.screen
            assert isinstance(screen, CanvasScreen)
            canvas = screen.canvas
            monkeypatch.setattr(timer._time, "get_time", held_up(timer._time.get_time))
            await pilot.resize_terminal(120, 40)
            await until(pilot, lambda: canvas.size.width == 120)
            await pilot.resize_terminal(100, 30)
            await until(pilot, lambda: canvas.size.width == 100)

    asyncio.run(scenario())


async def to_the_file(pilot: Pilot[Any], wizard: FakeWizard) -> WizardScreen:
    screen = pilot.app.screen
    assert isinstance(screen, WizardScreen)
    await pilot.press("enter", "enter", "enter")
    wizard.go_on()
    await until(pilot, lambda: screen.view.page == TABLE)
    await pilot.press("down", "enter")
    assert screen.view.page == FILE
    return screen


def test_from_home_to_the_wizard_and_what_it_wrote_is_trained() -> None:
    async def scenario() -> None:
        wizard, asked, trained = FakeWizard(), [], []

        def opener(source: RunSource | None) -> FakeWizard:
            asked.append(source)
            return wizard

        def train(path: str) -> FakeSource:
            trained.append(path)
            return FakeSource()

        app = make(None, FakeHome(), wizard=opener, start_file=train)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause()
            assert "wizard" in text_of(app)
            await pilot.press("w")
            screen = await to_the_file(pilot, wizard)
            assert ("t", "write and train") in screen.view.keys
            await pilot.press("t")
            await until(pilot, lambda: isinstance(app.screen, LiveScreen))
            assert asked == [None] and trained == ["mine.toml"] and wizard.saved
            assert app.wizard is None

    asyncio.run(scenario())


def test_a_closed_wizard_leads_back_home_and_its_work_ends() -> None:
    async def scenario() -> None:
        wizard = FakeWizard()
        app = make(None, FakeHome(), wizard=lambda _: wizard)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause()
            await pilot.press("w", "enter", "enter", "enter")
            assert wizard.busy
            await pilot.press("q")
            assert isinstance(app.screen, HomeScreen)
            assert not wizard.busy and wizard.stopped

    asyncio.run(scenario())


def test_beside_a_run_the_wizard_writes_and_does_not_train() -> None:
    async def scenario() -> None:
        wizard, source, asked = FakeWizard(), FakeSource(), []

        def opener(run: RunSource | None) -> FakeWizard:
            asked.append(run)
            return wizard

        app = make(source, wizard=opener, start_file=lambda _: FakeSource())
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            await pilot.press("w")
            screen = await to_the_file(pilot, wizard)
            assert all(key != "t" for key, _ in screen.view.keys)
            await pilot.press("t")
            assert not wizard.saved
            await pilot.press("w")
            assert wizard.saved
            await pilot.press("q")
            assert isinstance(app.screen, LiveScreen)
            assert asked == [source] and not source.commands

    asyncio.run(scenario())
