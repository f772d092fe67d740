"""An error in a screen is shown in its place, reported once, and decides the exit status."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ndd_console.app import ConsoleApp, ScreenApp, TuningApp, WizardApp
from ndd_console.screens import home, live, pages, trial, tuning, wizard
from ndd_console.sessions.hosting import report_failure

from .fake_sources import FakeHome, FakeSource, FakeTrials
from .fake_tuning import MEASURING, FixedTuning
from .fake_wizard import FakeWizard
from .pilots import press, text_of


def on_live() -> ConsoleApp:
    return ConsoleApp(FakeSource(owned=False, tries=FakeTrials()), None)


# The module and the function that draw a screen, the app, and the keys that open the screen.
SCREENS: dict[str, tuple[ModuleType, str, Callable[[], ScreenApp], str]] = {
    "live": (live, "live_rows", on_live, ""),
    "page": (pages, "help_lines", on_live, "?"),
    "trial": (trial, "heading", on_live, "t"),
    "home": (home, "entries", lambda: ConsoleApp(None, FakeHome()), ""),
    "wizard": (wizard, "machine_rows", lambda: WizardApp(FakeWizard()), ""),
    "tuning": (tuning, "table", lambda: TuningApp(FixedTuning(MEASURING)), ""),
}


@pytest.mark.parametrize("name", SCREENS)
async def test_an_error_while_drawing_is_shown_and_reported(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, drawn_by, make, keys = SCREENS[name]

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a width of \x1b[31mzero")

    monkeypatch.setattr(module, drawn_by, broken)
    app = make()
    assert report_failure(app) == 0 and capsys.readouterr().err == ""
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await press(pilot, *keys)
        await pilot.pause()
        text = text_of(app)
        assert "ZeroDivisionError" in text and r"\x1b[31mzero" in text
        await press(pilot, "p")
        await pilot.pause()
        assert len(app.failures) == 1
        app.leave()
    assert app.return_value == "quit" and report_failure(app) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told and "ZeroDivisionError" in told and "\x1b" not in told
