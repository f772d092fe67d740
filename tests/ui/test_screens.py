"""The live screen: commands, questions, pages, the log, ways to leave it, and how often it is drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from textual.events import Key

from ndd_console.app import ConsoleApp
from ndd_console.jobs.log_tail import LogTail
from ndd_console.screens.base import Question
from ndd_console.screens.live import SHARE, DrawPace, LiveScreen
from ndd_console.screens.pages import MOST_LINES, LogScreen, PageScreen, SettingsScreen
from ndd_console.words.stopping import RUN_STOPPING

from .fake_sources import Clock, FakeSource
from .fakes import SETTINGS, T0, empty_snapshot, ended, mark, snapshot
from .pilots import press, running, text_of, tick


async def test_keys_become_commands_and_notices_are_shown() -> None:
    source = FakeSource(said="no answer")
    async with running(source) as (app, pilot):
        assert "no answer" in text_of(app)
        source.said = None
        await press(pilot, "p", "c", "k", "e")
        assert source.commands == ["pause", "checkpoint", "kernels", "evaluate"]
        assert "evaluating" in text_of(app) and "no answer" not in text_of(app)
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


async def test_a_key_that_arrives_while_its_page_closes_has_no_effect() -> None:
    async with running(FakeSource()) as (app, pilot):
        await press(pilot, "i")
        page = app.screen
        assert isinstance(page, PageScreen)
        page.action_use("back")
        page.on_key(Key("l", "l"))  # typed ahead: it would open the log, or ask a body that is gone
        await pilot.pause()
        assert isinstance(app.screen, LiveScreen) and app.is_running


async def test_q_asks_and_stops_after_a_checkpoint() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        await press(pilot, "q")
        assert isinstance(app.screen, Question) and "charlm-001" in text_of(app)
        await press(pilot, "p")  # the question stays
        assert isinstance(app.screen, Question) and source.commands == []
        await press(pilot, "escape")
        assert isinstance(app.screen, LiveScreen) and app.is_running
        await press(pilot, "q", "s")
        assert source.commands == ["stop"] and "◐ stopping" in text_of(app) and RUN_STOPPING in text_of(app)
        await press(pilot, "q", "escape")
        source.value = ended("stopped", "stopped from the console")
        await tick(pilot)
    assert app.return_value == "stop" and source.commands == ["stop"]


async def test_the_question_is_gone_when_the_run_has_ended() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        await press(pilot, "q")
        source.value = ended("done", "all 6,900 steps")
        await tick(pilot)
        assert isinstance(app.screen, LiveScreen) and "all 6,900 steps" in text_of(app)
        assert app.is_running and source.commands == []


async def test_ctrl_c_twice_stops_at_once_and_once_when_the_run_has_ended() -> None:
    for ends in (False, True):
        source = FakeSource()
        async with running(source) as (app, pilot):
            await press(pilot, "ctrl+c")
            if ends:
                source.value = ended("stopped", "Ctrl-C")
                await tick(pilot)
            else:
                assert "◐ stopping" in text_of(app)
                await press(pilot, "ctrl+c")
        assert source.commands == (["interrupt"] if ends else ["interrupt", "kill"])
        assert app.return_value == ("stop" if ends else "kill")


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
        assert source.commands == ["stop"] and app.is_running


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


@pytest.mark.parametrize(
    ("refresh_ms", "a_second"), [(0.5, 4.0), (1.8, 4.0), (3.6, 2.0), (7.0, 1.0), (80.0, 1.0)]
)
def test_a_screen_is_drawn_as_often_as_its_share_of_a_core_allows(refresh_ms: float, a_second: float) -> None:
    now = cpu = 0.0
    drawn = 0
    pace = DrawPace(lambda: now, lambda: cpu)
    while now < 40.0:
        now += 0.25
        if pace.due():
            drawn += 1
            # One refresh that was slow does not slow the next ones.
            cpu += 0.05 if drawn == 1 else refresh_ms * 1e-3
    assert drawn / 40.0 == pytest.approx(a_second, rel=0.1)
    assert a_second == 1.0 or cpu / 40.0 <= SHARE * 1.2


async def test_preparing_counts_seconds() -> None:
    clock = Clock(T0)
    app = ConsoleApp(FakeSource(empty_snapshot(stage="reading")), None, refresh_hz=4.0, clock=clock)
    async with app.run_test(size=(80, 24)) as pilot:
        assert "reading" in text_of(app)
        clock.t += 7.4
        await tick(pilot)
        assert " 7 s" in text_of(app)


# Pages


async def test_the_page_of_settings_follows_the_run() -> None:
    source = FakeSource()
    async with running(source) as (app, pilot):
        await press(pilot, "i")
        screen = app.screen
        assert isinstance(screen, SettingsScreen)
        lines = [line.strip() for line in text_of(app).splitlines()]
        # What is not in effect comes first, what was left at its default last.
        shown = [line for line in lines if line[:1] in ("✖", "✔", "·")]
        assert [line.partition("  ")[2].split()[0] for line in shown] == [
            "speed.attention", "loader.workers", "loader.pin_memory", "precision.amp", "optimizer.implementation",
        ]  # fmt: skip
        assert [line[:1] for line in shown] == ["✖", "✔", "✔", "✔", "·"]
        assert "MFU 34 %" in text_of(app) and "bfloat16 98 %" in text_of(app)
        fixed = replace(SETTINGS[-1], applied="flash", in_effect=True, verified="seen")
        source.value = snapshot(settings=(*SETTINGS[:-1], fixed))
        screen.look_again()
        assert "✖" not in text_of(app) and "seen" in text_of(app)
        await press(pilot, "i")
        assert isinstance(app.screen, LiveScreen)


async def test_the_log_grows_below_what_is_read_and_is_searched() -> None:
    source = FakeSource(output=[f"step {i}" for i in range(200)] + ["CUDA [b]out"])
    async with running(source, size=(40, 12)) as (app, pilot):
        await press(pilot, "l")
        screen = app.screen
        assert isinstance(screen, LogScreen) and "[b]out" in text_of(app) and "step 10 " not in text_of(app)
        await press(pilot, "home")
        source.output = [*source.output, "more"]
        screen.look_again()
        assert "step 0 " in text_of(app) and "more" not in text_of(app)
        await press(pilot, "end")
        await pilot.pause()
        assert "more" in text_of(app)
        source.output = [*source.output, "last"]
        screen.look_again()
        await pilot.pause(0.02)
        assert "last" in text_of(app)
        await press(pilot, "slash", *"step 17", "enter")
        assert "11 of 11" in text_of(app) and "step 179" in text_of(app)
        found = [
            part.text for line in screen.body.lines for part in line if part.style and part.style.reverse
        ]
        assert found == ["step 17"] * 11
        await press(pilot, "n")
        assert "10 of 11" in text_of(app)
        source.value = snapshot(step=4_300)
        await press(pilot, "escape")
        await tick(pilot)
        assert isinstance(app.screen, LiveScreen) and "4,300" in text_of(app)


async def test_the_log_keeps_its_last_lines_and_what_is_read_stays_in_place() -> None:
    source = FakeSource(output=[f"line {i} of an output that is wrapped" for i in range(60)])
    async with running(source, size=(60, 12)) as (app, pilot):
        await press(pilot, "l")
        screen = app.screen
        assert isinstance(screen, LogScreen) and " log of" in text_of(app)
        await press(pilot, "slash", *"line 20 ", "enter")
        await pilot.resize_terminal(24, 9)
        await pilot.pause(0.02)
        assert "line 20 " in text_of(app) and "line 59 " not in text_of(app)
        source.output = [*source.output, *(f"line {i} more" for i in range(60, MOST_LINES + 10))]
        screen.look_again()
        await press(pilot, "n")
        assert "line 20 " in text_of(app) and "1 of 1" in text_of(app)
        source.output = [*source.output, "line 20 of the end"]
        screen.look_again()
        await press(pilot, "N")
        assert "line 20 of the end" in text_of(app) and "2 of 2" in text_of(app)
        source.output = [*source.output, *(f"line {i} again" for i in range(12))]
        screen.look_again()
        await press(pilot, "n")
        await pilot.resize_terminal(60, 12)
        await pilot.pause(0.02)
        assert "line 20 of the end" in text_of(app) and "1 of 1" in text_of(app)
        assert len(screen.body.lines) == MOST_LINES and f"last {MOST_LINES:,} lines of" in text_of(app)
        await press(pilot, "home")
        assert "line 23 " in text_of(app) and "line 22 " not in text_of(app)
        await press(pilot, "end")
        await pilot.resize_terminal(60, 9)
        await pilot.pause(0.02)
        source.output = [*source.output, "the newest"]
        screen.look_again()
        await pilot.pause(0.02)
        assert "the newest" in text_of(app)
        await press(pilot, "slash", *"wrapped", "enter")
        assert "line 59 " in text_of(app) and "36 of 36" in text_of(app)
        source.output = [*source.output, "the last"]
        screen.look_again()
        await pilot.pause(0.02)
        assert "line 59 " in text_of(app)
        await press(pilot, "n")
        assert "line 58 " in text_of(app) and "34 of 35" in text_of(app)


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    tail = LogTail(path)
    assert tail.read() == []
    path.write_bytes(b"one\n\x1b[31mtwo\x1b[0m\n 10%\r 20%")
    assert tail.read() == ["one", "two"] and tail.unfinished == " 20%"
    with path.open("ab") as file:
        file.write(b"\r100%\n\x07three\n")
    assert tail.read() == ["100%", "\\x07three"] and tail.unfinished == ""
    path.write_bytes(b"new\n")  # shorter: it was cut
    assert tail.read() == ["new"]
    path.write_bytes(b"x" * 2_000_000 + b"\nlast\n")
    assert tail.read()[-1] == "last"
