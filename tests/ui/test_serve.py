"""`python -m tests.ui.serve` opens every screen with recorded data."""

from __future__ import annotations

import pytest

from .serve import SCREENS, main


def test_without_a_name_the_screens_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SCREENS)


@pytest.mark.parametrize("words", [["nonsense"], ["livee"], ["live", "home"], ["\x1b[31mlive"]])
def test_an_unknown_name_is_one_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "live" in error and error.count("\n") == 1 and "\x1b" not in error
