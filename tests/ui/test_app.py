"""The app itself, held up by a training thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from textual import timer

from ndd_console.screens.base import CanvasScreen

from .fakes import FakeSource
from .test_screens import make, until


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
