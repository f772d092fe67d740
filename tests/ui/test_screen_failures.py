"""An error in a screen is shown in its place, reported once, and decides the exit status."""

from __future__ import annotations

from typing import Any

import pytest

from ndd_console.screens.base import KeyScreen
from ndd_console.sessions.hosting import report_failure
from ndd_console.view.style import PLAIN

from . import serve
from .pilots import text_of

# The others are no screens of ours, or have nothing but fixed words: the palette and questions.
SCREENS = [name for name in serve.SCREENS if name not in ("palette", "question", "log-search")]


@pytest.mark.parametrize("name", SCREENS)
async def test_an_error_while_drawing_is_shown_and_reported(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a width of \x1b[31mzero")

    scene = serve.SCREENS[name]
    app = scene.app(PLAIN)
    assert report_failure(app) == 0 and capsys.readouterr().err == ""
    async with app.run_test(size=(80, 24)) as pilot:
        await serve.press(pilot, scene.keys)
        screen = app.screen
        assert isinstance(screen, KeyScreen)
        monkeypatch.setattr(type(screen), "draw", broken)
        for _ in range(2):
            screen.paint()
            await pilot.pause()
        text = text_of(app)
        assert "ZeroDivisionError" in text and r"\x1b[31mzero" in text
        assert len(app.failures) == 1
        app.leave()
    assert app.return_value == "quit" and report_failure(app) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told and "ZeroDivisionError" in told and "\x1b" not in told


@pytest.mark.parametrize("name", SCREENS)
async def test_a_screen_that_was_left_is_not_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = serve.SCREENS[name]
    app = scene.app(PLAIN)
    async with app.run_test(size=(80, 24)) as pilot:
        await serve.press(pilot, scene.keys)
        screen = app.screen
        assert isinstance(screen, KeyScreen)
        drawn: list[tuple[int, int]] = []
        monkeypatch.setattr(type(screen), "draw", lambda self, *size: drawn.append(size))
        screen.paint()
        assert drawn == [(80, 24)]
        if len(app.screen_stack) > 1:
            app.pop_screen()
            drawn.clear()
            screen.paint()  # as a resize does that arrives meanwhile
            assert drawn == []
        app.leave()
