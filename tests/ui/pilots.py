"""Helpers to make apps, read their screens and wait for conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot

from ndd_console.app import ConsoleApp
from ndd_console.screens.base import CanvasScreen
from ndd_console.screens.interfaces import RunSource
from ndd_console.screens.live import LiveScreen

from .fake_sources import Clock, FakeHome
from .fakes import T0, found


def make(source: RunSource | None = None, home: FakeHome | None = None, **options: Any) -> ConsoleApp:
    return ConsoleApp(source, home, refresh_hz=10.0, clock=Clock(T0 + 12), rules=found(), **options)


def text_of(app: ConsoleApp) -> str:
    screen = app.screen
    assert isinstance(screen, CanvasScreen)
    return "\n".join("".join(text for text, _ in row) for row in screen.canvas.rows)


async def until(pilot: Pilot[Any], true: Callable[[], bool], seconds: float = 5.0) -> None:
    for _ in range(int(seconds / 0.02)):
        if true():
            return
        await pilot.pause(0.02)
    raise AssertionError("the condition was not met in time")


async def tick(pilot: Pilot[Any]) -> None:
    await pilot.pause()
    screen = pilot.app.screen
    if isinstance(screen, LiveScreen):
        screen.tick()
    await pilot.pause()
