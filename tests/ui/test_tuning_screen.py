"""The tuning screen: progress, stopping, result and file; and ratios drawn as intervals."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from ndd_console.app import TuningApp
from ndd_console.jobs.trials import TuningJob
from ndd_console.screens.tuning import TuningScreen
from ndd_console.view.bars import interval_rows, progress_rows
from ndd_console.view.style import COLOUR, Row
from ndd_engine.errors import UsageError
from ndd_engine.trial.outcome import Progress
from ndd_engine.trial.tuning import TuningState

from .fake_tuning import DONE, MEASURING, FixedTuning
from .pilots import press, text_of, until


def plain(rows: list[Row]) -> str:
    return "\n".join("".join(text for text, _ in row) for row in rows)


class Sweep:
    """A sweep that a test controls, in its own thread."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.go_on = threading.Event()
        self.stopped = False

    def __call__(self, tell: Callable[[TuningState], None], stop: threading.Event) -> TuningState:
        tell(MEASURING)
        self.told.set()
        while not self.go_on.wait(0.01):
            if stop.is_set():
                self.stopped = True
                return replace(DONE, stopped=True, text="1 of 2 settings that were measured help")
        return DONE


@asynccontextmanager
async def tuning(
    job: TuningJob, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[TuningApp, Pilot[str]]]:
    app = TuningApp(job, on_first_paint=job.start)
    try:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: job.failed() != "" or "measuring" in text_of(app))
            yield app, pilot
    finally:
        job.stop()
        job.join()


async def test_the_sweep_and_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuning.toml").write_text("mine")
    sweep = Sweep()
    job = TuningJob("chartext.toml", sweep)
    async with tuning(job, (120, 40)) as (app, pilot):
        text = text_of(app)
        for part in (
            "tuning chartext.toml", "✔ kept", "◐ measuring", "· waiting", "cache encoded items",
            "1.62x (1.55 to 1.70)", "2 loader workers", "12 of 60 s", "1.10x (0.96 to 1.26)",
            "no CUDA GPU",
        ):  # fmt: skip
            assert part in text, part
        await press(pilot, "w")
        assert not (tmp_path / "tuning-2.toml").exists()
        sweep.go_on.set()
        await until(pilot, lambda: "measured directly" in text_of(app))
        assert "✖ dropped" in text_of(app) and "w write" in text_of(app)
        await press(pilot, "w")
        assert "tuning-2.toml" in text_of(app) and "w write" not in text_of(app)
        assert (tmp_path / "tuning-2.toml").read_text() == DONE.toml
        assert (tmp_path / "tuning.toml").read_text() == "mine"
        await press(pilot, "q")
    assert app.return_value == "quit" and job.state is DONE


@pytest.mark.parametrize("key", ["escape", "q", "ctrl+c"])
async def test_stopping_keeps_what_was_measured(key: str, tmp_path: Path) -> None:
    sweep = Sweep()
    job = TuningJob("chartext.toml", sweep, tmp_path / "out.toml")
    async with tuning(job) as (app, pilot):
        await press(pilot, key)
        await until(pilot, lambda: "1 of 2 settings" in text_of(app))
        assert (
            sweep.stopped
            and "written to" in text_of(app)
            and (tmp_path / "out.toml").read_text() == DONE.toml
        )
        assert app.is_running
        await press(pilot, key)
    assert app.return_value == "quit"


async def test_a_sweep_that_cannot_begin_says_why() -> None:
    def refuse(*_: object) -> TuningState:
        raise UsageError("--only wrokers: no such setting")

    job = TuningJob("chartext.toml", refuse)
    async with tuning(job) as (app, pilot):
        await until(pilot, lambda: "no such setting" in text_of(app))
        await press(pilot, "w", "q")
    assert isinstance(job.error, UsageError) and job.state is None


async def test_long_tunings_scroll_and_show_what_is_measured() -> None:
    rows = tuple(
        replace(MEASURING.rows[2], candidate=replace(MEASURING.rows[2].candidate, title=f"setting {i}"))
        for i in range(60)
    )
    rows = (*rows[:40], replace(rows[40], state="measuring"), *rows[41:])

    app = TuningApp(FixedTuning(replace(MEASURING, rows=rows)))
    async with app.run_test(size=(80, 24)) as pilot:
        screen = app.screen
        assert isinstance(screen, TuningScreen)
        screen.look_again()
        await until(pilot, lambda: "setting 40" in text_of(app))
        assert "setting 40" in text_of(app) and "setting 3 " not in text_of(app)
        await press(pilot, "home")
        assert "setting 0 " in text_of(app) and "setting 40" not in text_of(app)
        await press(pilot, "end")
        assert "setting 59" in text_of(app)


@pytest.mark.parametrize(
    ("ratio", "low", "high", "style"),
    [
        (1.42, 1.35, 1.49, "good"),
        (0.9, 0.85, 0.95, "bad"),
        (1.01, 0.97, 1.05, "warn"),
        (9.0, 7.0, 12.0, "good"),
    ],
)
def test_an_interval_is_drawn_where_it_lies(ratio: float, low: float, high: float, style: str) -> None:
    scale, line = (plain([row]) for row in interval_rows(ratio, low, high, 60))
    assert len(scale) == len(line) == 60
    dot, left, right = (line.index(char) for char in "●├┤")
    assert left < dot < right
    one = scale.split().index("1")
    assert one >= 0
    at_one = next(i for i, char in enumerate(scale) if char == "1" and not scale[i + 1 : i + 2].strip())
    # 1 lies left of a gain, right of a loss, and inside an interval that says neither.
    assert (left > at_one) is (style == "good") and (right < at_one) is (style == "bad")
    assert interval_rows(ratio, low, high, 60)[1][1][1] == style and style in COLOUR
    assert interval_rows(ratio, low, high, 12) == [] and interval_rows(None, low, high, 60) == []
    assert interval_rows(float("nan"), low, high, 60) == [] and interval_rows(ratio, 0.0, high, 60) == []


async def test_what_a_narrow_table_leaves_out_is_shown_with_enter() -> None:
    app = TuningApp(FixedTuning(DONE))
    async with app.run_test(size=(80, 24)) as pilot:
        assert "breaks even after 310 steps" not in text_of(app)
        await press(pilot, "enter")
        shown = " ".join(text_of(app).split())
        assert "breaks even after 310 steps" in shown and "vs. baseline 1.60x" in shown
        await press(pilot, "end", "enter")
        assert "why no CUDA GPU" in " ".join(text_of(app).split())


def test_progress_without_a_ratio_says_so() -> None:
    text = plain(progress_rows(Progress("warming up", 3.0, 60.0), "fused AdamW", 78))
    assert "no ratio yet" in text and ", 3 of 60 s" in text
    late = plain(progress_rows(Progress("measuring", 70.0, 60.0, 3), "fused AdamW", 78))
    assert "block, 60 of 60" in late and "3 ABBA blocks" in late
