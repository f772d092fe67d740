"""Snapshots of the screens at common terminal sizes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from ndd_console.view.style import PLAIN, Look

from .serve import SCREENS, press

SMALL, USUAL, LARGE, WIDE = (80, 24), (100, 30), (120, 40), (200, 50)
FOUR, TWO = (SMALL, USUAL, LARGE, WIDE), (SMALL, LARGE)
PICTURES = {
    "live": ((60, 20), *FOUR), "live-cpu": FOUR, "live-finding": FOUR, "home": FOUR, "tuning": (*TWO, (140, 30)),
}  # fmt: skip
IN_ASCII = ("live", "live-finding", "live-1024-ranks", "home", "trial-done", "tuning-done", "wizard-table")


@pytest.fixture(autouse=True)
def _one_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.localtime", time.gmtime)


def picture(snap_compare: Any, name: str, size: tuple[int, int], look: Look) -> bool:
    scene = SCREENS[name]

    async def reach(pilot: Pilot[Any]) -> None:
        await press(pilot, scene.keys)
        for field in pilot.app.screen.query(Input):
            field.cursor_blink = False  # on a busy machine the picture comes when the cursor is off
        await pilot.pause()

    same: bool = snap_compare(scene.app(look), terminal_size=size, run_before=reach)
    return same


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, id=f"{name}-{size[0]}x{size[1]}")
        for name in SCREENS
        for size in PICTURES.get(name, TWO)
        if name != "palette"  # Textual's own
    ],
)
def test_screen(snap_compare: Any, name: str, size: tuple[int, int]) -> None:
    assert picture(snap_compare, name, size, PLAIN)


@pytest.mark.parametrize("name", IN_ASCII)
def test_in_ascii_without_colour(snap_compare: Any, name: str) -> None:
    assert picture(snap_compare, name, SMALL, Look(ascii_only=True, monochrome=True))
