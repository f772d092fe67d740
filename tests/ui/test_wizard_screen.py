"""The wizard's screen: keys and errors of its seven pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from ndd_console.app import WizardApp
from ndd_console.screens.pages import HelpScreen
from ndd_console.screens.wizard import BY_SPEED, WizardScreen, ordered
from ndd_console.view.bars import plot_rows
from ndd_console.words.wizard import COLUMNS
from ndd_engine.wizard.proposals import Measured

from . import pilots
from .fake_wizard import ROWS, TOML, FakeWizard, proposal
from .pilots import press, until


def screen_of(pilot: Pilot[Any]) -> WizardScreen:
    screen = pilot.app.screen
    assert isinstance(screen, WizardScreen)
    return screen


def text_of(pilot: Pilot[Any]) -> str:
    return pilots.text_of(pilot.app)


async def seen(pilot: Pilot[Any], text: str) -> None:
    await until(pilot, lambda: text in text_of(pilot))


@asynccontextmanager
async def at_the_table(
    app: WizardApp, wizard: FakeWizard, size: tuple[int, int] = (100, 30)
) -> AsyncIterator[Pilot[Any]]:
    """On the page of the trade-offs."""
    async with app.run_test(size=size) as pilot:
        await press(pilot, "enter", "enter", "enter")
        wizard.go_on()
        await until(pilot, lambda: screen_of(pilot).page == "trade-offs")
        yield pilot


async def test_from_the_machine_to_the_file() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard)
    async with app.run_test(size=(100, 30)) as pilot:
        await seen(pilot, "python (pid 812)")
        await press(pilot, "enter", "down", "up", "enter")
        assert screen_of(pilot).page == "goal"
        await press(pilot, "right")
        assert "low memory use" in text_of(pilot)
        await press(pilot, "left", "enter")
        assert screen_of(pilot).page == "probing"
        await seen(pilot, "40 %")
        assert "micro-batch 16" in text_of(pilot) and "9.0 s left" in text_of(pilot)
        wizard.go_on()
        await until(pilot, lambda: screen_of(pilot).page == "trade-offs")
        await pilot.resize_terminal(160, 30)
        await seen(pilot, "does not fit")
        assert "low confidence" in text_of(pilot)
        await press(pilot, "v")
        assert screen_of(pilot).page == "verify"
        assert "not measured" in text_of(pilot)
        wizard.go_on()
        await seen(pilot, "-2.9 %")
        await press(pilot, "enter")
        assert "-micro = 64" in text_of(pilot) and "changes" in text_of(pilot)
        await press(pilot, "d")
        assert TOML[2] in text_of(pilot)
        await press(pilot, "w")
        assert wizard.saved == [screen_of(pilot)._proposal]
        await press(pilot, "t")
    assert app.to_train == "mine.toml"
    assert len(wizard.saved) == 1


async def test_only_the_named_key_writes_and_a_changed_file_asks() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard)
    async with at_the_table(app, wizard) as pilot:
        await press(pilot, "enter", "enter", "enter")
        assert screen_of(pilot).page == "file" and not wizard.saved
        wizard.edited = True
        await press(pilot, "t")
        assert not wizard.saved and not app.to_train
        assert "new diff" in text_of(pilot)
        await press(pilot, "enter")
        assert not wizard.saved
        await press(pilot, "w")
        assert len(wizard.saved) == 1


async def test_back_goes_one_page_and_closes_at_the_first() -> None:
    app = WizardApp(FakeWizard())
    async with app.run_test(size=(100, 30)) as pilot:
        await press(pilot, "enter", "enter")
        for page in ("goal", "workload", "machine"):
            assert screen_of(pilot).page == page
            await press(pilot, "b")
    assert app.return_value == "quit"
    assert app.to_train == ""


async def test_stopping_keeps_the_answers() -> None:
    wizard = FakeWizard()
    async with WizardApp(wizard).run_test(size=(100, 30)) as pilot:
        await press(pilot, "enter", "enter", "right", "enter")
        await seen(pilot, "40 %")
        wizard.error = "stopped"
        await press(pilot, "b")
        assert wizard.stopped == 1
        await until(pilot, lambda: screen_of(pilot).message == ("stopped", "bad"))
        assert "retry" in text_of(pilot)
        await press(pilot, "enter")
        await seen(pilot, "40 %")
        await press(pilot, "b")
        await until(pilot, lambda: screen_of(pilot).message == ("stopped", "bad"))
        await press(pilot, "b")
        assert screen_of(pilot).page == "goal"
        assert "low memory use" in text_of(pilot)


async def test_a_problem_is_shown_and_nothing_starts() -> None:
    wizard = FakeWizard()
    wizard.trouble = "--effective-batch 7: allowed: a multiple of \x1b[31m8"
    async with WizardApp(wizard).run_test(size=(100, 30)) as pilot:
        await press(pilot, "enter", "enter")
        assert screen_of(pilot).page == "workload"
        assert "a multiple of" in text_of(pilot)
        assert "\x1b" not in text_of(pilot)
        wizard.trouble = ""
        await press(pilot, "enter")
        wizard.trouble = "no"
        await press(pilot, "right", "enter")
        assert screen_of(pilot).page == "goal"
        assert not wizard.busy


async def test_a_file_that_cannot_be_shown_keeps_the_table() -> None:
    wizard = FakeWizard()
    wizard.cannot_show = "mine.toml is no valid TOML \x1b[1m"
    async with at_the_table(WizardApp(wizard), wizard) as pilot:
        await press(pilot, "enter")
        assert screen_of(pilot).page == "trade-offs"
        assert "no valid TOML" in text_of(pilot) and "\x1b" not in text_of(pilot)
        wizard.cannot_show, wizard.there = "", False
        await press(pilot, "enter")
        assert "new file" in text_of(pilot)
        assert "changes" not in text_of(pilot)


async def test_measured_rows_stay_marked_and_failed_ones_cannot_be_written() -> None:
    wizard = FakeWizard()
    async with at_the_table(WizardApp(wizard), wizard, (120, 40)) as pilot:
        keys = {one.key for one in screen_of(pilot).marked}
        first = ROWS[4]  # the second fastest
        failed = replace(first, measured=Measured(None, None, "out of memory: 2 GiB more"))
        wizard.rows = tuple(failed if row is first else row for row in wizard.rows)
        await until(pilot, lambda: failed in screen_of(pilot).marked)
        assert {one.key for one in screen_of(pilot).marked} == keys
        assert failed.key in keys and "✔" in text_of(pilot)
        await press(pilot, "home", "down", "enter")
        assert screen_of(pilot).page == "trade-offs"
        assert "more; choose" in text_of(pilot)


async def test_for_another_gpu_training_is_not_available() -> None:
    wizard = FakeWizard()
    async with at_the_table(WizardApp(wizard, can_train=False), wizard, (120, 40)) as pilot:
        await press(pilot, "enter")
        assert all(key != "t" for key, _ in screen_of(pilot).key_words())
        await press(pilot, "t")
        assert screen_of(pilot).page == "file"
        await press(pilot, "?")
        assert isinstance(pilot.app.screen, HelpScreen)


async def test_a_proposal_that_does_not_fit_cannot_be_written() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard)
    async with at_the_table(app, wizard) as pilot:
        await press(pilot, "end", "enter")
        assert screen_of(pilot).page == "trade-offs"
        assert "choose another" in text_of(pilot)
        await press(pilot, "home", "enter")
        assert screen_of(pilot).page == "file"
        wizard.cannot_save = "mine.toml cannot be written: No space left on device"
        await press(pilot, "w")
        assert "No space left" in text_of(pilot)
        await press(pilot, "q")
    assert app.to_train == ""


async def test_marking_and_sorting() -> None:
    wizard = FakeWizard()
    async with at_the_table(WizardApp(wizard), wizard, (120, 40)) as pilot:
        assert "measure 2" in text_of(pilot)
        await press(pilot, "end", "up", "up", "space")
        marked = len(screen_of(pilot).marked)
        await press(pilot, "space")
        assert abs(len(screen_of(pilot).marked) - marked) == 1
        for _ in COLUMNS:
            await press(pilot, "s")
        assert screen_of(pilot).column == BY_SPEED
        await press(pilot, "p")
        assert not screen_of(pilot).plot


def test_proposals_that_fit_come_first_in_every_order() -> None:
    for column in range(len(COLUMNS)):
        assert ordered(ROWS, column)[-1] == ROWS[2]
    assert ordered(ROWS, BY_SPEED)[0] == ROWS[5]


@pytest.mark.parametrize(
    ("memory", "steps", "expected"),
    [
        # Nothing to compare: a sentence instead of a single dot.
        ((4.0, 4.0, 4.0001), (0.04, 0.04, 0.04), ["all 3 need 4.0 GiB and process 3,200 items/s: nothing to plot"]),
        # The same speed: one row over memory.
        ((3.0, 4.0, 5.0), (0.04, 0.04, 0.04), [
            "  3,200 ┤▲                             ●                             ●",
            "         3.0 GiB            memory, at 3,200 items/s           5.0 GiB",
        ]),
        ((3.0, 4.0, 5.0), (0.04, 0.0399, 0.0398), [
            "  3,216 ┤▲                             ●                             ●",
            "         3.0 GiB       memory, at 3,200 to 3,216 items/s       5.0 GiB",
        ]),
        # The same memory: one column, and one label in place of two that are equal.
        ((4.0, 4.0, 4.0001), (0.04, 0.02, 0.08), [
            "  6,400 ┤                              ●", "items/s ┤", *["        ┤"] * 2,
            "        ┤                              ▲", "        ┤",
            "        ┤                              ●", "        ┤", "      0 ┤",
            "                                all need 4.0 GiB",
        ]),
    ],
)  # fmt: skip
def test_the_plot_of_equal_values_says_that_they_are_equal(
    memory: tuple[float, ...], steps: tuple[float, ...], expected: list[str]
) -> None:
    rows = [proposal("medium", 256, 128, 1, *each) for each in zip(memory, steps, strict=True)]
    plot = plot_rows(rows, rows, rows[0], 70, 10)
    assert ["".join(part for part, _ in row).rstrip() for row in plot] == expected
