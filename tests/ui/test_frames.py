"""Every screen is a whole frame at every size, in ASCII too, without control characters; `make serve` opens it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from textual.app import App
from textual.pilot import Pilot

from ndd_console.app import ConsoleApp, TuningApp
from ndd_console.jobs.folder import StartRow
from ndd_console.jobs.run_sources import RunRow
from ndd_console.view.style import PLAIN, Look
from ndd_console.words.blocks import Block, Text
from ndd_engine.record.events import TextsEvent
from ndd_engine.trial.outcome import Progress
from ndd_engine.trial.tuning import TuningRow

from . import serve
from .fake_sources import Clock, FakeHome, FakeJob, FakeSource, FakeTrials
from .fake_tuning import DONE, MEASURING, FixedTuning
from .fakes import FINDING, MEASURED, SECOND, SETTINGS, T0, found, snapshot, trial_event
from .pilots import press, text_of, until

# In ASCII only the first three, and few screens: one filter makes it of any frame.
SIZES = ((80, 24), (20, 5), (39, 9), (40, 12), (1, 1), (63, 16), (120, 40), (200, 50), (3, 2), (100, 30))
ASCII = Look(ascii_only=True, monochrome=True)
HOSTILE = "数据\x1b[2J\x07[b]" * 20


def assert_whole(app: App[Any], ascii_only: bool) -> None:
    lines = text_of(app).split("\n")
    assert len(lines) == app.size.height
    for line in lines:
        assert cell_len(line) == app.size.width, line
        assert line.isprintable(), line
        assert line.isascii() or not ascii_only, line


class HostileHome(FakeHome):
    def machine(self) -> list[Block]:
        return [*super().machine(), Text(HOSTILE)]

    def runs(self) -> list[RunRow]:
        return [*super().runs(), RunRow(HOSTILE, HOSTILE, "lost", 1, 2, 1e99, HOSTILE, False)]

    def workloads(self) -> list[StartRow]:
        return [StartRow(HOSTILE, HOSTILE, HOSTILE, kind="own"), *super().workloads()]


def hostile_trials() -> FakeTrials:
    result = trial_event(text=HOSTILE, sets=[HOSTILE])
    return serve.FixedTrials(
        job=FakeJob(progress=Progress(HOSTILE, 18.0, 60.0, 3, 1.4), result=result, done=True)
    )


def run(trials: Callable[[], FakeTrials] = FakeTrials) -> Callable[[Look], ConsoleApp]:
    change = replace(FINDING, title=HOSTILE, changes=(replace(FINDING.changes[0], text=HOSTILE),))
    values = {
        **MEASURED, "settings": (*SETTINGS, replace(SETTINGS[0], name="x" * 70, requested=HOSTILE)),
        "texts": TextsEvent(7, [HOSTILE, "a\nb"]), "scalars": ((HOSTILE, ((1, 0.5),)),),
    }  # fmt: skip

    def make(look: Look) -> ConsoleApp:
        source = FakeSource(snapshot(**values), tries=trials(), output=["x" * 300, "[b]", "数据" * 99])
        rules = found(FINDING, change, SECOND)
        return ConsoleApp(source, None, look=look, refresh_hz=4.0, clock=Clock(T0), rules=rules)

    return make


def hostile_tuning(look: Look) -> TuningApp:
    row = TuningRow(replace(DONE.rows[0].candidate, title=HOSTILE), "skipped", reason=HOSTILE)
    return TuningApp(FixedTuning(replace(MEASURING, rows=(row, *MEASURING.rows))), look)


# Name: the app, and the keys that open the screen.
SCREENS: dict[str, tuple[Callable[[Look], App[str]], Sequence[str]]] = {
    "home": (lambda look: ConsoleApp(None, HostileHome(), look=look), ()),
    "start page": (lambda look: ConsoleApp(None, HostileHome(), look=look), ("enter",)),
    "epochs": (lambda look: ConsoleApp(None, HostileHome(), look=look), ("s",)),
    "live": (run(), ()),
    "question": (run(), ("q",)),
    "palette": (run(), ("ctrl+p",)),
    "help": (run(), ("question_mark",)),
    "diagnosis": (run(), ("d",)),
    "settings": (run(), ("i",)),
    "values": (run(), ("v",)),
    "log": (run(), ("l", "slash")),
    "trial": (run(), ("t",)),
    "trial with a mistake": (run(), ("t", "e", "[", "b", "]", "=", "'", "enter")),
    "measuring": (run(), ("t", "enter")),
    "trial with a result": (run(hostile_trials), ("t", "enter")),
    "tuning": (hostile_tuning, ()),
    **{
        name: (scene.app, scene.keys)
        for name, scene in serve.SCREENS.items()
        if name.startswith(("tuning-done", "ranks", "wizard-"))
    },
}


async def through_all_sizes(pilot: Pilot[Any], ascii_only: bool) -> None:
    app = pilot.app
    for size in SIZES[: 3 if ascii_only else None]:
        await pilot.resize_terminal(*size)
        await until(pilot, lambda size=size: app.size == size)  # type: ignore[misc]
        await pilot.pause(0.02)
        assert_whole(app, ascii_only)
    assert not app.failures, app.failures  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "look"),
    [
        *(pytest.param(name, PLAIN, id=name) for name in SCREENS),
        *(
            pytest.param(name, ASCII, id=f"{name} in ASCII")
            for name in ("home", "live", "trial", "wizard-table")
        ),
    ],
)
async def test_a_whole_frame(name: str, look: Look) -> None:
    make, keys = SCREENS[name]
    async with make(look).run_test(size=(80, 24)) as pilot:
        await serve.press(pilot, keys)
        await through_all_sizes(pilot, look.ascii_only)


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (39, 8)])
async def test_the_selected_entry_of_a_long_list_is_on_the_screen(size: tuple[int, int]) -> None:
    class Long(FakeHome):
        def runs(self) -> list[RunRow]:
            return [replace(super(Long, self).runs()[0], name=f"run-{place}") for place in range(40)]

    app = ConsoleApp(None, Long())
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "chartext" in text_of(app))
        await press(pilot, "end")
        assert "run-39" in text_of(app) and "run-0 " not in text_of(app)
        await press(pilot, "home")
        assert "chartext" in text_of(app) and "run-39" not in text_of(app)


def test_without_a_name_the_screens_are_listed_and_an_unknown_one_is_one_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert serve.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(serve.SCREENS)
    for words in (["nonsense"], ["livee"], ["live", "home"], ["\x1b[31mlive"]):
        assert serve.main(words) == 2
        error = capsys.readouterr().err
        assert "live" in error and error.count("\n") == 1 and "\x1b" not in error
