"""`python -m tests.ui.serve` opens every screen with recorded data."""

from __future__ import annotations

import pytest

from ndd_console.view.style import PLAIN

from .serve import SCREENS, main, press


@pytest.mark.parametrize("name", SCREENS)
async def test_the_screen_opens(name: str) -> None:
    app = SCREENS[name].app(PLAIN)
    async with app.run_test(size=(80, 24)) as pilot:
        before = len(app.screen_stack)
        await press(pilot, SCREENS[name].keys)
        assert app.is_running and len(app.screen_stack) >= before and not app.failures


def test_without_a_name_the_screens_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SCREENS)


@pytest.mark.parametrize("words", [["nonsense"], ["livee"], ["live", "home"], ["\x1b[31mlive"]])
def test_an_unknown_name_is_one_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "live" in error and error.count("\n") == 1 and "\x1b" not in error
