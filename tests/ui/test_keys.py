"""Keys as data: bindings, footers, the command palette, and what a key says that cannot work; mouse and clipboard."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from rich.segment import Segment
from textual.events import MouseScrollDown
from textual.pilot import Pilot

from ndd_console.app import ConsoleApp, TuningApp, WizardApp
from ndd_console.screens import base
from ndd_console.screens.base import KeyScreen
from ndd_console.screens.live import MESSAGE_S, LiveScreen
from ndd_console.screens.pages import HelpScreen, SettingsScreen, StartScreen
from ndd_console.screens.trial import TrialScreen
from ndd_console.view.keys import NEEDS, TABLES
from ndd_console.view.style import Look
from ndd_console.widgets.lines import segments
from ndd_console.words.blocks import Block, Text

from .fake_sources import Clock, FakeHome, FakeSource, FakeTrials
from .fake_tuning import DONE, FixedTuning
from .fake_wizard import FakeWizard
from .fakes import FINDING, SECOND, empty_snapshot, ended, found, run_event, snapshot, trial_event
from .pilots import make, press, running, text_of, tick, until

# A letter that is no key of any screen.
TAKEN = {name for table in TABLES.values() for key in table for name in key.names.split(",")}
UNUSED = min(set(ascii_lowercase) - TAKEN)


def with_finding(**options: Any) -> ConsoleApp:
    return ConsoleApp(FakeSource(tries=FakeTrials(), **options), None, rules=found(FINDING))


def test_every_table_of_keys_is_unambiguous_and_every_key_has_an_action() -> None:
    for table in TABLES.values():
        names = [each for key in table for each in key.names.split(",")]
        assert len(names) == len(set(names))
        assert all(key.word and set(key.needs) <= set(NEEDS) for key in table)
    kinds = KeyScreen.__subclasses__()
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert all(hasattr(kind, f"action_{key.action}") for key in kind.keys), kind


@pytest.mark.parametrize(
    ("key", "source", "need"),
    [
        ("c", FakeSource(script=True), "checkpoints"),
        ("e", FakeSource(script=True), "evaluations"),
        ("c", FakeSource(value=ended("done", "all steps done")), "commands"),
        ("e", FakeSource(empty_snapshot()), "training"),
        ("k", FakeSource(live=False), "commands"),
        ("s", FakeSource(), "attached"),
        ("r", FakeSource(), "ranks"),
        ("o", FakeSource(), "workers"),
        ("v", FakeSource(), "values"),
        ("w", FakeSource(), "wizard"),
        ("t", FakeSource(), "change"),
        ("i", FakeSource(script=True), "own settings"),
        ("y", FakeSource(), "command"),
    ],
)
async def test_a_key_that_cannot_work_is_not_offered_and_says_why(
    key: str, source: FakeSource, need: str
) -> None:
    async with running(source, size=(200, 40)) as (app, pilot):
        screen = app.screen
        assert isinstance(screen, LiveScreen)
        assert key not in [shown for shown, _ in screen.key_words()]
        await press(pilot, key)
        assert NEEDS[need] in text_of(app) and source.commands == []


async def test_a_key_without_effect_says_so_and_pages_of_a_run_have_the_keys_of_the_live_screen() -> None:
    source = FakeSource(tries=FakeTrials())
    async with running(source, rules=found(FINDING)) as (app, pilot):
        for page in ("d", "i", "l", ""):
            await press(pilot, *page, UNUSED)
            assert NEEDS["a key"] in text_of(app) and source.commands == []
            assert isinstance(app.screen, LiveScreen) == (not page)
            await press(pilot, *(["escape"] if page else []))
        await press(pilot, "d", "k")
        assert isinstance(app.screen, LiveScreen) and source.commands == ["kernels"]
        await press(pilot, "d", "i")
        assert isinstance(app.screen, SettingsScreen)
        await press(pilot, "o")
        assert isinstance(app.screen, LiveScreen) and NEEDS["workers"] in text_of(app)
        await press(pilot, "t", "tab", UNUSED, "escape", "?", UNUSED)
        assert NEEDS["a key"] in text_of(app)


async def click_on(pilot: Pilot[Any], text: str, times: int = 1) -> None:
    await press(pilot)
    lines = text_of(pilot.app).split("\n")
    y = next(place for place, line in reversed(list(enumerate(lines))) if text in line)
    await pilot.click(offset=(lines[y].index(text), y), times=times)
    await pilot.pause(0.02)


async def test_the_mouse_presses_keys_and_selects() -> None:
    trials = FakeTrials()
    async with running(FakeSource(tries=trials), rules=found(FINDING, SECOND)) as (app, pilot):
        await click_on(pilot, "p pause")
        assert isinstance(app.source, FakeSource) and app.source.commands == ["pause"]
        await press(pilot, "t")
        await click_on(pilot, "loader.cache=true")
        assert trials.jobs == [] and isinstance(app.screen, TrialScreen)
        assert app.screen.body.chosen is not None and "loader.cache=true" in str(app.screen.body.chosen)
        await click_on(pilot, "loader.cache=true", times=2)
        await until(pilot, lambda: len(trials.jobs) == 1)
        assert trials.jobs[0].sets == ("loader.cache=true",)


async def test_entries_of_home_are_opened_by_the_mouse_and_escape_never_closes_it() -> None:
    home = ConsoleApp(None, FakeHome())
    async with home.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "EEG" in text_of(home) and "4080" in text_of(home))
        await press(pilot, "x")
        assert NEEDS["run"] in text_of(home)
        await press(pilot, "down")
        assert NEEDS["run"] not in text_of(home)  # that was of another entry
        await click_on(pilot, "EEG")
        await until(pilot, lambda: isinstance(home.screen, StartScreen))
        assert "--workload eeg" in text_of(home)
        await click_on(pilot, "esc back")
        await press(pilot, "escape", "escape")
        assert home.is_running and "EEG" in text_of(home)


async def test_a_page_scrolls_by_wheel_and_footer_and_every_page_has_help() -> None:
    app = with_finding()
    async with app.run_test(size=(80, 12)) as pilot:
        await press(pilot, "d")
        first = FINDING.changes[0].text
        assert first in text_of(app)
        for _ in range(20):
            await pilot._post_mouse_events([MouseScrollDown], offset=(5, 5))
        await pilot.pause(0.05)
        assert first not in text_of(app)
        await press(pilot, "home")
        assert first in text_of(app)
        await click_on(pilot, "space next page")
        assert first not in text_of(app)
        for key in ("d", "t"):
            await press(pilot, "escape", key, "question_mark")
            assert isinstance(app.screen, HelpScreen)
            await press(pilot, "question_mark")
            assert not isinstance(app.screen, HelpScreen)


async def test_the_palette_offers_the_keys_that_work() -> None:
    app = with_finding()
    async with app.run_test(size=(100, 40)) as pilot:
        commands = {command.title for command in app.get_system_commands(app.screen)}
        assert "profile (k)" in commands and "settings (i)" in commands and "ranks (r)" not in commands
        await press(pilot, "ctrl+p")
        await pilot.press(*"settings")
        await until(pilot, lambda: "settings (i)" in text_of(app))
        await press(pilot, "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, SettingsScreen))


async def test_the_command_of_a_finding_and_the_diff_of_a_trial_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "MESSAGE_S", 0.2)
    app = with_finding()
    async with app.run_test(size=(120, 40)) as pilot:
        command = "ndd-console try charlm-001 --set loader.workers=4 --set loader.pin_memory=true"
        await press(pilot, "y")
        assert app.clipboard == command and f"copied: {command}" in text_of(app)
        app.copy_to_clipboard("")
        await press(pilot, "d", "y")
        assert app.clipboard == command
        await press(pilot, "d", "t", "enter")
        screen = app.screen
        assert isinstance(screen, TrialScreen) and isinstance(screen._trials, FakeTrials)
        screen._trials.jobs[0].result, screen._trials.jobs[0].done = trial_event(), True
        screen.look_again()
        await press(pilot, "y")
        assert app.clipboard == "+loader.workers=4\n+loader.pin_memory=true"
        await until(pilot, lambda: "copied" not in text_of(app))


def test_a_place_in_code_that_exists_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative place belongs to the folder of the run, and never to that of the console."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips.py").write_text("")
    row = (("in clips.py:41 in x, other.py:3", "text"),)

    def links(folder: Path | None) -> list[tuple[str, str | None]]:
        found = segments(row, Look(links=True), folder)
        return [(part.text, part.style.link if part.style else None) for part in found]

    linked = ("clips.py:41", f"file://{tmp_path}/clips.py")
    assert links(tmp_path) == [("in ", None), linked, (" in x, other.py:3", None)]
    assert links(None) == links(tmp_path / "elsewhere") == [(row[0][0], None)]
    assert list(segments(row, Look(), tmp_path)) == [Segment(row[0][0], Look().styles["text"])]


async def test_places_on_the_trial_screen_and_in_a_comparison_are_links(tmp_path: Path) -> None:
    """Of a list, of an error below it, and of a page that is read in a thread; relative to the folder of the code."""
    for name in ("clips.py", "model.py"):
        (tmp_path / name).write_text("")
    change = replace(FINDING.changes[0], text="cache what clips.py:41 makes")
    event = run_event(config={"script": {"folder": str(tmp_path)}}, host=socket.gethostname())

    class Home(FakeHome):
        def compare(self, a: str, b: str) -> tuple[list[Block], Path | None]:
            return [Text("model.py:7 changed")], tmp_path

    def links_of(app: ConsoleApp) -> set[str]:
        strips = app.screen._compositor.render_strips(app.size)
        return {part.text for strip in strips for part in strip if part.style and part.style.link}

    trials = FakeTrials(refused="model.py:7 cannot be imported")
    finding = replace(FINDING, changes=(change,))
    source = FakeSource(snapshot(run=event), tries=trials)
    async with running(source, size=(160, 40), look=Look(links=True), rules=found(finding)) as (app, pilot):
        await press(pilot, "t")
        assert links_of(app) == {"clips.py:41", "model.py:7"}
    async with running(None, Home(), size=(120, 40), look=Look(links=True)) as (app, pilot):
        await until(pilot, lambda: "charlm-003" in text_of(app))
        await press(pilot, "end", "c", "up", "c")
        await until(pilot, lambda: "model.py" in text_of(app))
        assert links_of(app) == {"model.py:7"}


async def test_ctrl_z_stops_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    for app in (make(FakeSource()), TuningApp(FixedTuning(DONE)), WizardApp(FakeWizard())):
        async with app.run_test(size=(80, 24)) as pilot:
            monkeypatch.setattr(type(app), "is_headless", False)
            await press(pilot, "ctrl+z")
    assert sent == [(0, signal.SIGTSTP)] * 3


async def test_ctrl_c_in_the_palette_does_what_it_does_without_it() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        await press(pilot, "ctrl+p", "ctrl+c")
        assert isinstance(app.screen, LiveScreen) and source.commands == ["interrupt"]
    home = ConsoleApp(None, FakeHome())
    async with home.run_test(size=(80, 24)) as pilot:
        await press(pilot, "ctrl+p", "ctrl+c")
    assert home.return_value == "quit"


@pytest.mark.parametrize(
    ("source", "left_out"),
    [
        (FakeSource(script=True), ("c", "e", "i", "r", "w")),
        (FakeSource(value=ended("done", "")), ("c", "e", "k", "p", "s")),
    ],
)
async def test_the_help_page_of_a_run_lists_the_keys_that_work_for_it(
    source: FakeSource, left_out: tuple[str, ...]
) -> None:
    async with running(source, size=(120, 60)) as (app, pilot):
        await press(pilot, "question_mark")
        listed = [line.split()[0] for line in text_of(app).splitlines() if line.strip()]
    assert {"d", "q", "l"} <= set(listed) and not set(left_out) & set(listed)


async def test_why_a_key_does_not_work_is_readable_in_whole_and_goes_away_again() -> None:
    clock = Clock()
    async with running(FakeSource(script=True), clock=clock) as (app, pilot):
        await press(pilot, "c")
        why = " ".join(NEEDS["checkpoints"].split())
        assert why in " ".join(text_of(app).split())
        clock.t += MESSAGE_S + 1
        await tick(pilot)
        assert why not in " ".join(text_of(app).split())
        await press(pilot, "p")
        clock.t += 1_000
        await tick(pilot)
        assert "pausing" in text_of(app)  # it has not paused yet
