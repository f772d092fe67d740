"""The wizard's screen: keys and errors of its seven pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot

from ndd_console.app import WizardApp
from ndd_console.screens.pages import HelpScreen
from ndd_console.screens.wizard import WizardScreen
from ndd_console.view.style import ascii_rows
from ndd_console.view.tradeoffs import BY_SPEED, COLUMNS, ordered, plot_rows
from ndd_console.view.wizard import (
    FILE,
    GOAL,
    MACHINE,
    PROBING,
    TABLE,
    VERIFY,
    WORKLOAD,
    Preview,
    WizardView,
    wizard_rows,
)
from ndd_engine.wizard.proposals import Measured, pareto

from .fake_wizard import ROWS, TOML, FakeWizard, proposal
from .pilots import until
from .test_view import assert_fits


def screen_of(pilot: Pilot[Any]) -> WizardScreen:
    found = pilot.app.screen
    assert isinstance(found, WizardScreen)
    return found


def text_of(pilot: Pilot[Any], width: int = 100, height: int = 30) -> str:
    rows = screen_of(pilot).draw(width, height)
    return "\n".join("".join(text for text, _ in row) for row in rows)


async def seen(pilot: Pilot[Any], what: Callable[[WizardView], bool]) -> None:
    await until(pilot, lambda: what(screen_of(pilot).view))


async def test_from_the_machine_to_the_file() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard)
    async with app.run_test(size=(100, 30)) as pilot:
        await seen(pilot, lambda view: view.machine is not None)
        assert "RTX 4080 SUPER" in text_of(pilot)
        assert "python (pid 812)" in text_of(pilot)
        await pilot.press("enter", "down", "up", "enter")
        assert screen_of(pilot).view.page == GOAL
        await pilot.press("right")
        assert "low memory use" in text_of(pilot)
        await pilot.press("left", "enter")
        assert screen_of(pilot).view.page == PROBING
        await seen(pilot, lambda view: view.share is not None)
        assert "timing micro-batch 16" in text_of(pilot)
        assert "40%" in text_of(pilot) and "left" in text_of(pilot)
        wizard.go_on()
        await seen(pilot, lambda view: view.page == TABLE)
        assert "does not fit" in text_of(pilot, 160)
        assert "low confidence in memory" in text_of(pilot, 160)
        await pilot.press("v")
        assert screen_of(pilot).view.page == VERIFY
        assert "not measured yet" in text_of(pilot)
        wizard.go_on()
        await seen(pilot, lambda view: view.share is None and view.verified[0].measured is not None)
        assert "-2.9 %" in text_of(pilot)
        await pilot.press("enter")
        assert "-micro = 64" in text_of(pilot) and "changes to mine.toml" in text_of(pilot)
        await pilot.press("d")
        assert TOML[2] in text_of(pilot)
        await pilot.press("w")
        assert wizard.saved == [screen_of(pilot)._chosen]
        assert "wrote mine.toml" in text_of(pilot)
        await pilot.press("t")
    assert app.to_train == "mine.toml"
    assert len(wizard.saved) == 1


async def test_only_the_named_key_writes_and_a_changed_file_asks() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("enter", "enter", "enter")
        wizard.go_on()
        await seen(pilot, lambda view: view.page == TABLE)
        await pilot.press("enter", "enter", "enter")
        assert screen_of(pilot).view.page == FILE and not wizard.saved
        assert "press w to write mine.toml" in text_of(pilot)
        wizard.edited = True
        await pilot.press("t")
        assert not wizard.saved and not app.to_train
        assert "mine.toml was changed after it was read" in text_of(pilot)
        await pilot.press("enter")
        assert not wizard.saved
        await pilot.press("w")
        assert len(wizard.saved) == 1 and "wrote mine.toml" in text_of(pilot)


async def test_back_goes_one_page_and_closes_at_the_first() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("enter", "enter")
        for page in (GOAL, WORKLOAD, MACHINE):
            assert screen_of(pilot).view.page == page
            await pilot.press("b")
    assert app.return_value == "quit"
    assert app.to_train == ""


async def test_stopping_keeps_the_answers() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("enter", "enter", "right", "enter")
        await seen(pilot, lambda view: view.share is not None)
        wizard.error = "stopped"
        await pilot.press("b")
        assert wizard.stopped == 1
        await seen(pilot, lambda view: view.bad)
        assert "retry" in text_of(pilot)
        await pilot.press("enter")
        await seen(pilot, lambda view: view.share is not None and not view.bad)
        await pilot.press("b")
        await seen(pilot, lambda view: view.bad)
        await pilot.press("b")
        assert screen_of(pilot).view.page == GOAL
        assert "low memory use" in text_of(pilot)


async def test_a_problem_is_shown_and_nothing_starts() -> None:
    wizard = FakeWizard()
    wizard.trouble = "--effective-batch 7: allowed: a multiple of \x1b[31m8"
    app = WizardApp(wizard)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("enter", "enter")
        assert screen_of(pilot).view.page == WORKLOAD
        assert "a multiple of" in text_of(pilot)
        assert "\x1b" not in text_of(pilot)
        wizard.trouble = ""
        await pilot.press("enter")
        wizard.trouble = "no"
        await pilot.press("right", "enter")
        assert screen_of(pilot).view.page == GOAL
        assert not wizard.busy


async def test_a_file_that_cannot_be_shown_keeps_the_table() -> None:
    wizard = FakeWizard()
    wizard.cannot_show = "mine.toml is no valid TOML \x1b[1m"
    async with WizardApp(wizard).run_test(size=(100, 30)) as pilot:
        await pilot.press("enter", "enter", "enter")
        wizard.go_on()
        await seen(pilot, lambda view: view.page == TABLE)
        await pilot.press("enter")
        assert screen_of(pilot).view.page == TABLE
        assert "no valid TOML" in text_of(pilot) and "\x1b" not in text_of(pilot)
        wizard.cannot_show, wizard.there = "", False
        await pilot.press("enter")
        assert "new file mine.toml" in text_of(pilot)
        assert "changes" not in text_of(pilot)


async def test_measured_rows_stay_marked_and_failed_ones_cannot_be_written() -> None:
    wizard = FakeWizard()
    async with WizardApp(wizard).run_test(size=(120, 40)) as pilot:
        await pilot.press("enter", "enter", "enter")
        wizard.go_on()
        await seen(pilot, lambda view: view.page == TABLE)
        keys = {one.key for one in screen_of(pilot).view.marked}
        first = ROWS[4]  # the second fastest
        failed = replace(first, measured=Measured(None, None, "out of memory: 2 GB more"))
        wizard.rows = tuple(failed if row is first else row for row in wizard.rows)
        await seen(pilot, lambda view: failed in view.rows)
        assert {one.key for one in screen_of(pilot).view.marked} == keys
        assert failed.key in keys and "✔" in text_of(pilot)
        await pilot.press("home", "down", "enter")
        assert screen_of(pilot).view.page == TABLE
        assert "out of memory: 2 GB more; choose another" in text_of(pilot)


async def test_for_another_gpu_training_is_not_available() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard, can_train=False)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("enter", "enter", "enter")
        wizard.go_on()
        await seen(pilot, lambda view: view.page == TABLE)
        await pilot.press("enter")
        assert "write and train" not in text_of(pilot)
        await pilot.press("t")
        assert screen_of(pilot).view.page == FILE
        await pilot.press("?")
        page = pilot.app.screen
        assert isinstance(page, HelpScreen)
        assert "mark a row" in "\n".join(text for row in page.draw(120, 40) for text, _ in row)


async def test_a_proposal_that_does_not_fit_cannot_be_written() -> None:
    wizard = FakeWizard()
    app = WizardApp(wizard)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("enter", "enter", "enter")
        wizard.go_on()
        await seen(pilot, lambda view: view.page == TABLE)
        await pilot.press("end", "enter")
        assert screen_of(pilot).view.page == TABLE
        assert "choose another" in text_of(pilot)
        await pilot.press("home", "enter")
        assert screen_of(pilot).view.page == FILE
        wizard.cannot_save = "mine.toml cannot be written: No space left on device"
        await pilot.press("w")
        assert "No space left" in text_of(pilot)
        await pilot.press("q")
    assert app.to_train == ""


async def test_marking_and_sorting() -> None:
    wizard = FakeWizard()
    async with WizardApp(wizard).run_test(size=(120, 40)) as pilot:
        await pilot.press("enter", "enter", "enter")
        wizard.go_on()
        await seen(pilot, lambda view: view.page == TABLE)
        assert "measure 2" in text_of(pilot)
        await pilot.press("end", "up", "up", "space")
        marked = len(screen_of(pilot).view.marked)
        await pilot.press("space")
        assert abs(len(screen_of(pilot).view.marked) - marked) == 1
        for _ in COLUMNS:
            await pilot.press("s")
        assert screen_of(pilot).view.column == BY_SPEED
        await pilot.press("p")
        assert not screen_of(pilot).view.plot


def test_proposals_that_fit_come_first_in_every_order() -> None:
    for column in range(len(COLUMNS)):
        assert ordered(ROWS, column)[-1] == ROWS[2]
    assert ordered(ROWS, BY_SPEED)[0] == ROWS[5]


def test_marks_of_the_plot() -> None:
    rows = plot_rows(ROWS, pareto(ROWS), ROWS[0], 80, 10)
    text = "\n".join("".join(part for part, _ in row) for row in rows)
    for mark in ("●", "✖", "▲", "│", "memory"):
        assert mark in text
    assert plot_rows(ROWS[:1], (), None, 80, 10) == []


@pytest.mark.parametrize(
    ("memory", "steps", "expected"),
    [
        # Nothing to compare: a sentence instead of a single dot.
        ((4.0, 4.0, 4.0001), (0.04, 0.04, 0.04), ["all 3 need 4.0 GB and process 3,200 items/s: nothing to plot"]),
        # The same speed: one row over memory.
        ((3.0, 4.0, 5.0), (0.04, 0.04, 0.04), [
            "  3,200 ┤▲                             ●                             ●",
            "         3.0 GB             memory, at 3,200 items/s            5.0 GB",
        ]),
        ((3.0, 4.0, 5.0), (0.04, 0.0399, 0.0398), [
            "  3,216 ┤▲                             ●                             ●",
            "         3.0 GB        memory, at 3,200 to 3,216 items/s        5.0 GB",
        ]),
        # The same memory: one column, and one label in place of two that are equal.
        ((4.0, 4.0, 4.0001), (0.04, 0.02, 0.08), [
            "  6,400 ┤                              ●", *["        ┤"] * 3,
            "        ┤                              ▲", "        ┤",
            "        ┤                              ●", "        ┤", "      0 ┤",
            "                                all need 4.0 GB",
        ]),
    ],
)  # fmt: skip
def test_the_plot_of_equal_values_says_that_they_are_equal(
    memory: tuple[float, ...], steps: tuple[float, ...], expected: list[str]
) -> None:
    rows = [proposal("medium", 256, 128, 1, *each) for each in zip(memory, steps, strict=True)]
    found = plot_rows(rows, rows, rows[0], 70, 10)
    assert ["".join(part for part, _ in row).rstrip() for row in found] == expected


PAGES = st.builds(
    WizardView,
    page=st.integers(MACHINE, FILE),
    machine=st.one_of(st.none(), st.just(FakeWizard().machine_lines())),
    workloads=st.just(FakeWizard().workloads()),
    facts=st.just(FakeWizard().choose(0)),
    fields=st.just(FakeWizard().fields()),
    rows=st.sampled_from([(), ROWS]),
    best=st.just(tuple(pareto(ROWS))),
    verified=st.sampled_from([(), ROWS]),
    chosen=st.integers(0, 5),
    column=st.integers(0, len(COLUMNS) - 1),
    share=st.one_of(st.none(), st.floats(0, 1)),
    file=st.just(Preview(TOML, "a\x1b[0m.toml", True, ("-a", "+b\x1b[0m"))),
    show_diff=st.booleans(),
    message=st.sampled_from(["", "not good", "many words " * 40]),
)


@given(PAGES, st.integers(1, 200), st.integers(1, 60))
def test_every_page_fits_every_terminal(view: WizardView, width: int, height: int) -> None:
    rows = wizard_rows(view, width, height)
    assert_fits(rows, width, height)
    assert_fits(ascii_rows(rows), width, height)


@pytest.mark.parametrize("page", range(7))
def test_pages_name_themselves(page: int) -> None:
    rows = wizard_rows(WizardView(page=page), 120, 40)
    first = "".join(text for text, _ in rows[0])
    assert f"{page + 1} " in first
