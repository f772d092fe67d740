"""Keys on the live screen: commands, questions, pages, and leaving."""

from __future__ import annotations

from dataclasses import replace

import pytest
from textual.events import Key

from ndd_console.app import ConsoleApp
from ndd_console.screens.base import Question
from ndd_console.screens.live import LiveScreen
from ndd_console.screens.pages import HelpScreen, LogScreen, PageScreen, SettingsScreen
from ndd_console.words.run import STOPPING

from .fake_sources import Clock, FakeSource
from .fakes import SETTINGS, T0, empty_snapshot, ended, mark, snapshot
from .pilots import press, running, text_of, tick


async def test_keys_become_commands() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        await press(pilot, "p", "c", "k", "e")
        assert source.commands == ["pause", "checkpoint", "kernels", "evaluate"]
        assert "evaluating" in text_of(app)
        source.value = snapshot(status="paused", marks=(mark(4_218, "pause", "paused"),))
        await tick(pilot)
        assert "‖ paused" in text_of(app) and "p resume" in text_of(app) and "evaluating" not in text_of(app)
        await press(pilot, "p", "x", "s", "ctrl+z")
        assert source.commands[4:] == ["resume"]


async def test_escape_twice_in_one_go_leaves_one_page() -> None:
    async with running(FakeSource()) as (app, pilot):
        await press(pilot, "i")
        page = app.screen
        assert isinstance(page, PageScreen)
        for _ in range(2):
            page.action_use("back")
        await pilot.pause()
        assert isinstance(app.screen, LiveScreen) and app.is_running


async def test_q_asks_and_stops_after_a_checkpoint() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        await press(pilot, "q")
        text = text_of(app)
        assert isinstance(app.screen, Question) and "charlm-001" in text
        await press(pilot, "p")  # the question stays
        assert "still running" in text_of(app) and source.commands == []
        await press(pilot, "escape")
        assert "still running" not in text_of(app) and app.is_running
        await press(pilot, "q", "s")
        assert source.commands == ["stop"] and "◐ stopping" in text_of(app) and STOPPING in text_of(app)
        await press(pilot, "q")
        assert "is stopping" in text_of(app)
        await press(pilot, "escape")
        source.value = ended("stopped", "stopped from the console")
        await tick(pilot)
    assert app.return_value == "stop"


async def test_the_question_is_gone_when_the_run_has_ended() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        await press(pilot, "q")
        source.value = ended("done", "all 6,900 steps")
        await tick(pilot)
        assert "still running" not in text_of(app) and "all 6,900 steps" in text_of(app)
        assert app.is_running and source.commands == []


async def test_ctrl_c_twice_stops_at_once() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        await press(pilot, "ctrl+c")
        assert source.commands == ["interrupt"] and "Ctrl-C again" in text_of(app)
        await press(pilot, "ctrl+c")
    assert source.commands == ["interrupt", "kill"] and app.return_value == "kill"


async def test_ctrl_c_once_leaves_when_the_run_has_ended() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        await press(pilot, "ctrl+c")
        source.value = ended("stopped", "Ctrl-C")
        await tick(pilot)
    assert app.return_value == "stop"


@pytest.mark.parametrize("key", ["q", "ctrl+q", "ctrl+c"])
async def test_a_viewer_and_a_finished_run_just_close(key: str) -> None:
    for source in (FakeSource(owned=False), FakeSource(value=ended("failed", "out of memory"))):
        async with running(source) as (app, pilot):
            await press(pilot, key)
        assert app.return_value == "quit" and source.commands == []


@pytest.mark.parametrize("keys", [("n", "n"), ("escape", "escape"), ("enter", "escape"), ("d", "s")])
async def test_keys_that_arrive_together_answer_a_question_once(keys: tuple[str, str]) -> None:
    source = FakeSource(owned=False)
    async with running(source) as (app, pilot):
        await press(pilot, "s")
        assert isinstance(app.screen, Question)
        for key in keys:  # both are there before the first one is handled
            app.screen.post_message(Key(key, key if len(key) == 1 else None))
        await press(pilot)
        assert isinstance(app.screen, LiveScreen) and app.is_running


async def test_a_viewer_can_stop_the_run() -> None:
    source = FakeSource(owned=False)
    async with running(source) as (app, pilot):
        assert "s stop" in text_of(app) and "q close" in text_of(app)
        await press(pilot, "s")
        assert isinstance(app.screen, Question)
        await press(pilot, "s")
        assert source.commands == ["stop"] and "stop requested" in text_of(app) and app.is_running


async def test_notices_are_shown() -> None:
    source = FakeSource(said="did not answer")
    async with running(source) as (app, pilot):
        assert "did not answer" in text_of(app)
        source.said = None
        await tick(pilot)
        assert "did not answer" not in text_of(app)


async def test_nothing_is_drawn_while_nothing_changes() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        screen = app.screen
        assert isinstance(screen, LiveScreen)
        await pilot.pause()
        rows = screen.canvas.rows
        await tick(pilot)
        assert screen.canvas.rows is rows
        source.value = snapshot(step=4_219)
        await tick(pilot)
        assert screen.canvas.rows is not rows and "4,219" in text_of(app)


async def test_preparing_counts_seconds() -> None:
    clock = Clock(T0)
    app = ConsoleApp(FakeSource(empty_snapshot()), None, refresh_hz=4.0, clock=clock)
    async with app.run_test(size=(80, 24)) as pilot:
        assert "importing torch" in text_of(app)
        clock.t += 7.4
        await tick(pilot)
        assert " 7 s" in text_of(app)


async def test_help_and_log() -> None:
    source = FakeSource(output=[f"line {i} of the output" for i in range(100)])
    async with running(source) as (app, pilot):
        await press(pilot, "question_mark")
        assert isinstance(app.screen, HelpScreen)
        text, pages = "", 0
        while "not in effect, not requested" not in text and pages < 20:
            text, pages = text + text_of(app), pages + 1
            await press(pilot, "space")
        words = ("Ctrl-C", "micro-step", "data_wait", "GPU idle", "host clock", "MFU", "ABBA block", "n/a")
        for word in words:
            assert word in text, word
        await press(pilot, "escape", "l")
        screen = app.screen
        assert isinstance(screen, LogScreen)
        assert "line 99 " in text_of(app) and "line 10 " not in text_of(app)
        await press(pilot, "home")
        assert "line 0 " in text_of(app)
        source.output = [*source.output, "one more"]
        screen.look_again()
        assert "line 0 " in text_of(app) and "one more" not in text_of(app)
        await press(pilot, "end")
        await pilot.pause()
        assert "one more" in text_of(app)
        source.output = [*source.output, "and another"]
        screen.look_again()
        await pilot.pause(0.02)
        assert "and another" in text_of(app)
        await press(pilot, "pageup", "up")
        assert "and another" not in text_of(app)
        source.value = snapshot(step=4_300)
        await press(pilot, "q")
        await tick(pilot)
        assert isinstance(app.screen, LiveScreen) and "4,300" in text_of(app)


async def test_the_page_of_settings_follows_the_run() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        await press(pilot, "i")
        screen = app.screen
        assert isinstance(screen, SettingsScreen)
        lines = [line.strip() for line in text_of(app).splitlines()]
        # What is not in effect comes first, what was left at its default last.
        assert [line.partition("  ")[2].split()[0] for line in lines if line[:1] in ("✖", "✔", "·")] == [
            "speed.attention", "loader.workers", "loader.pin_memory", "precision.amp", "optimizer.implementation",
        ]  # fmt: skip
        assert [line[:1] for line in lines if line[:1] in ("✖", "✔", "·")] == ["✖", "✔", "✔", "✔", "·"]
        assert "MFU 34 %" in text_of(app) and "bfloat16 98 %" in text_of(app)
        fixed = replace(SETTINGS[-1], applied="flash", in_effect=True, verified="flash was seen")
        source.value = snapshot(settings=(*SETTINGS[:-1], fixed))
        screen.look_again()
        assert "✖" not in text_of(app) and "flash was seen" in text_of(app)
        await press(pilot, "i")
        assert isinstance(app.screen, LiveScreen)
    async with running(FakeSource(empty_snapshot(), live=False)) as (app, pilot):
        await press(pilot, "i")
        assert "No setting" in text_of(app)
