"""Helpers to make apps, read their screens and wait for conditions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from textual.app import App
from textual.pilot import Pilot

from ndd_console.app import ConsoleApp
from ndd_console.jobs.run_sources import RunSource
from ndd_console.screens.live import LiveScreen
from tests.waiting import LIMIT_S

from .fake_sources import Clock, FakeHome
from .fakes import T0, found


def make(source: RunSource | None = None, home: FakeHome | None = None, **options: Any) -> ConsoleApp:
    return ConsoleApp(
        source, home, **{"refresh_hz": 10.0, "clock": Clock(T0 + 12), "rules": found(), **options}
    )


@asynccontextmanager
async def running(
    *sources: Any, size: tuple[int, int] = (80, 24), **options: Any
) -> AsyncIterator[tuple[ConsoleApp, Pilot[str]]]:
    """The app on a screen of this size."""
    app = make(*sources, **options)
    async with app.run_test(size=size) as pilot:
        yield app, pilot


def text_of(app: App[Any]) -> str:
    """The text on the screen, as the terminal shows it."""
    strips = app.screen._compositor.render_strips(app.size)
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def until(pilot: Pilot[Any], true: Callable[[], bool]) -> None:
    for _ in range(int(LIMIT_S / 0.02)):
        if true():
            return
        await pilot.pause(0.02)
    raise AssertionError("the condition was not met in time")


async def press(pilot: Pilot[Any], *keys: str) -> None:
    """Press keys, and wait until their effect is painted."""
    await pilot.press(*keys)
    for _ in range(4):  # a new screen, its widgets, their layout, and what depends on it
        await pilot.pause(0.01)


async def tick(pilot: Pilot[Any]) -> None:
    await pilot.pause()
    for screen in pilot.app.screen_stack:
        if isinstance(screen, LiveScreen):
            screen.tick()
    await pilot.pause()
