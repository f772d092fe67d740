"""The screens as pictures, at the sizes that people use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from textual.pilot import Pilot

from ndd_console.app import ConsoleApp
from ndd_console.screens.home import HomeScreen

from .fakes import T0, Clock, FakeHome, FakeSource, empty_snapshot, ended, run_event, sample, snapshot

SIZES = ((80, 24), (100, 30), (120, 40), (200, 50))


def live(**options: Any) -> ConsoleApp:
    source = options.pop("source", None) or FakeSource()
    return ConsoleApp(source, None, refresh_hz=1.0, clock=Clock(T0 + 12), **options)


async def loaded(pilot: Pilot[Any]) -> None:
    """Wait until the threads of the home screen have answered."""
    for _ in range(200):
        screen = pilot.app.screen
        if isinstance(screen, HomeScreen) and screen.state.card is not None and screen.state.runs is not None:
            break
        await asyncio.sleep(0.02)
    await pilot.pause()


@pytest.fixture(autouse=True)
def _one_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ndd_console.view.home.time.localtime", __import__("time").gmtime)


@pytest.mark.parametrize("size", SIZES)
def test_live(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(live(), terminal_size=size)


@pytest.mark.parametrize("size", SIZES)
def test_live_on_the_processor(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(live(source=FakeSource(snapshot(False))), terminal_size=size)


@pytest.mark.parametrize("size", SIZES)
def test_home(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(ConsoleApp(None, FakeHome()), terminal_size=size, run_before=loaded)


def test_live_in_ascii_without_colour(snap_compare: Any) -> None:
    assert snap_compare(live(ascii_only=True, monochrome=True), terminal_size=(80, 24))


def test_home_in_ascii_without_colour(snap_compare: Any) -> None:
    app = ConsoleApp(None, FakeHome(), ascii_only=True, monochrome=True)
    assert snap_compare(app, terminal_size=(80, 24), run_before=loaded)


def test_help(snap_compare: Any) -> None:
    assert snap_compare(live(), terminal_size=(80, 24), press=["question_mark"])


def test_log(snap_compare: Any) -> None:
    assert snap_compare(live(), terminal_size=(80, 24), press=["l"])


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_settings(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(live(), terminal_size=size, press=["i"])


def test_question(snap_compare: Any) -> None:
    assert snap_compare(live(), terminal_size=(80, 24), press=["q"])


def test_failed(snap_compare: Any) -> None:
    reason = "CUDA out of memory at step 4,218: tried 512 MB, 210 MB free. Lower batch.micro from 128 to 96, "
    source = FakeSource(
        ended("failed", reason + "or use batch.accumulation 3; console.log has the whole message")
    )
    assert snap_compare(live(source=source), terminal_size=(80, 24))


def test_preparing(snap_compare: Any) -> None:
    value = empty_snapshot(
        run=run_event(), sample=sample(), started_t=T0, preparing_t=T0, stage="compiling the model"
    )
    assert snap_compare(live(source=FakeSource(value)), terminal_size=(80, 24))


def test_narrow(snap_compare: Any) -> None:
    assert snap_compare(live(), terminal_size=(60, 20))
