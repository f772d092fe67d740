"""Snapshots of the wizard's pages at common terminal sizes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from ndd_console.app import WizardApp
from ndd_console.screens.wizard import WizardScreen
from ndd_console.view.style import Look

from .fake_wizard import FakeWizard
from .pilots import until
from .test_snapshots import LARGE, NARROW

Steps = Callable[[Pilot[Any]], Awaitable[None]]


def steps(fake: FakeWizard, page: str) -> Steps:
    """Presses keys up to a page."""

    async def go(pilot: Pilot[Any]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, WizardScreen)
        for _ in range(min(("machine", "workload", "goal", "probing", page).index(page), 3)):
            await pilot.press("enter")
        if page in ("table", "plot", "measured", "file"):
            fake.go_on()
            await until(pilot, lambda: screen.page == "trade-offs")
        if page == "plot":
            await pilot.press("p")
        if page in ("measured", "file"):
            await pilot.press("v")
            fake.go_on()
        screen.look_again()
        if page == "file":
            await pilot.press("enter")
        await pilot.pause()

    return go


@pytest.mark.parametrize("size", [NARROW, LARGE])
@pytest.mark.parametrize(
    "page", ["machine", "workload", "goal", "probing", "table", "plot", "measured", "file"]
)
def test_page(snap_compare: Any, page: str, size: tuple[int, int]) -> None:
    fake = FakeWizard()
    assert snap_compare(WizardApp(fake), terminal_size=size, run_before=steps(fake, page))


def test_table_in_ascii_without_colour(snap_compare: Any) -> None:
    fake = FakeWizard()
    app = WizardApp(fake, look=Look(True, True))
    assert snap_compare(app, terminal_size=(80, 24), run_before=steps(fake, "table"))
