"""Every screen with strange values at every size: a whole frame, no control character, no row that is too wide."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tests.terminal.screen import Terminal
from tests.trial.written_runs import steady, windows, write_run
from tests.ui import fake_ranks, fake_tuning, fake_wizard, fakes
from tests.ui.fake_sources import FakeHome, FakeSource, FakeTrials
from tests.ui.pilots import text_of

from ndd_console.app import ConsoleApp
from ndd_console.jobs.folder import StartRow
from ndd_console.jobs.run_sources import RunRow
from ndd_console.render.rows import block_rows
from ndd_console.screens import home as home_screen
from ndd_console.screens import trial as trial_screen
from ndd_console.screens import tuning as tuning_screen
from ndd_console.screens import wizard as wizard_screen
from ndd_console.screens.live import LiveScreen
from ndd_console.screens.pages import help_lines, own_values_lines, ranks_lines, settings_lines
from ndd_console.screens.trial import BUDGETS_S, ProposedChange, TrialState
from ndd_console.screens.wizard import WIZARD_PAGES
from ndd_console.view.bars import plot_rows
from ndd_console.view.keys import LIVE_KEYS
from ndd_console.view.live import LiveState, live_rows
from ndd_console.view.rows import Entry, aligned, framed, inner_width, paragraph, width_of
from ndd_console.view.style import COLOUR, Row, to_ascii
from ndd_console.widgets.canvas import Canvas, changes
from ndd_console.words.blocks import Text
from ndd_console.words.finding import Diagnosis, diagnosis_blocks
from ndd_console.words.wizard import PROPOSAL_COLUMNS, about_text
from ndd_engine.diagnose import diagnose
from ndd_engine.record.events import TextsEvent
from ndd_engine.record.snapshot import STATUSES, Snapshot
from ndd_engine.trial.outcome import Progress
from ndd_engine.wizard.proposals import Measured
from qa.hostile import _strange as strange
from qa.hostile.attempts import Attempt, Kind

Draw = Callable[[int, int], list[Row]]


def attempts(rng: random.Random, folder: Path) -> Iterator[Attempt]:
    screens = (live, live, live, page, diagnosis, home, trial, tuning, wizard, wizard)
    for number in count(1):
        make, seed = rng.choice(screens), rng.getrandbits(48)
        if number % 200 == 0:
            yield Attempt(f"a terminal with seed {seed}", partial(in_terminal, seed, folder / f"{number}"))
        elif number % 50 == 0:
            yield Attempt(f"an app with seed {seed}", partial(in_app, seed))
        else:
            yield Attempt(f"{make.__name__} with seed {seed}", partial(check, make, seed))


def check(make: Callable[[random.Random], Draw], seed: int) -> None:
    rng = random.Random(seed)
    draw = make(rng)
    for _ in range(3):
        width, height = strange.size(rng)
        rows = draw(width, height)
        whole(rows, width, height)
        in_ascii: list[Row] = [tuple((to_ascii(text), style) for text, style in row) for row in rows]
        whole(in_ascii, width, height, ascii_only=True)
        painted(rows, make(rng)(width, height))


def whole(rows: list[Row], width: int, height: int, ascii_only: bool = False) -> None:
    """The rows are a frame of this size."""
    assert len(rows) == height, f"{len(rows)} rows of {height} at {width}x{height}"
    for row in rows:
        assert width_of(row) == width, f"{width_of(row)} cells of {width}: {row!r}"
        for text, style in row:
            assert text.isprintable(), f"a control character in {text!r}"
            assert not ascii_only or text.isascii(), f"not ASCII: {text!r}"
            assert style in COLOUR


def painted(before: list[Row], after: list[Row]) -> None:
    """The escape sequences from one frame to the next contain nothing but moves and colours."""
    canvas = Canvas()
    canvas.show(after)
    for y, (old, new) in enumerate(zip(before, after, strict=True)):
        sent = canvas.patch((y, start, end) for start, end in changes(old, new))
        assert all(char.isprintable() or char == "\x1b" for char in sent), repr(sent)


# Real apps and terminals, with keys and resizes.

KEYS = (
    *"pcekdtwilsq?rmbvnyjkhgG0+- ", "up", "down", "left", "right", "home", "end", "pageup", "pagedown", "enter",
    "escape", "tab", "backspace", "delete", "ctrl+t", "ctrl+u", "f1", "ctrl+z", "é", "漢", "👍",
)  # fmt: skip
RAW = (
    "p", "d", "t", "i", "l", "?", "\x1b", "\r", "j", "k", "q", "w", "\x1b[A", "\x1b[B", "\x1b[5~", "\x1b[999;999H",
    "\x1b[200~" + "pasted " * 3000 + "\x1b[201~", "\x1b]0;title\x07", "\x1b[<0;1;1M", "\x1b[?1;2c", "\x00", "\x7f",
    "\x9b", "漢字", "\udce9", "\udcf0\udc9f", "\x1bP+r\x1b\\", "\x1b[48;99;299;1;1t", "\x1b[I\x1b[O", "x" * 5000,
)  # fmt: skip


def in_app(seed: int) -> None:
    """Keys and resizes, through Textual."""
    rng = random.Random(seed)
    at_home = rng.random() < 0.3
    app = ConsoleApp(
        None if at_home else FakeSource(snapshot(rng), owned=False, tries=FakeTrials()), FakeHome()
    )

    async def scenario() -> None:
        async with app.run_test(size=strange.size(rng)) as pilot:
            for _ in range(40):
                if app.closing:
                    return
                if rng.random() < 0.2:
                    await pilot.resize_terminal(*strange.size(rng))
                else:
                    await pilot.press(rng.choice(KEYS))
                if isinstance(app.screen, LiveScreen) and not app.closing:
                    canvas = app.screen.canvas
                    if rows := list(canvas.rows):
                        whole(rows, width_of(rows[0]), len(rows))
                elif not app.closing:
                    assert all(line.isprintable() for line in text_of(app).split("\n"))

    asyncio.run(scenario())
    assert app.failures == [], app.failures[0][-1500:]


def in_terminal(seed: int, folder: Path) -> None:
    """Raw input and resizes, through a terminal; then SIGTERM."""
    rng = random.Random(seed)
    write_run(
        folder / "foreign", windows(steady(20, 0.1)), model=strange.text(rng), item=strange.text(rng),
        data=strange.text(rng), device_name=strange.text(rng), workload=strange.text(rng), token=strange.text(rng),
    )  # fmt: skip
    arguments = rng.choice(((), ("attach", "foreign"), ("wizard",)))
    columns, rows = strange.size(rng)
    with Terminal(*arguments, runs=folder, columns=max(columns, 2), rows=max(rows, 2)) as terminal:
        terminal.until(lambda _: b"\x1b[?1049h" in terminal.raw)
        os.set_blocking(terminal.process.fd, False)
        for _ in range(30):
            if not terminal.process.isalive():
                break
            if rng.random() < 0.3:
                columns, rows = strange.size(rng)
                terminal.resize(max(columns, 2), max(rows, 2))
            else:
                # On the home screen, the return key starts a run.
                keys = rng.choice(RAW if arguments else [keys for keys in RAW if keys != "\r"])
                with contextlib.suppress(OSError):  # what does not fit into the terminal's buffer is dropped
                    os.write(terminal.process.fd, keys.encode("utf-8", "surrogateescape"))
            terminal.pump(0.05)
        if terminal.process.isalive():
            terminal.process.kill(signal.SIGTERM)
        assert terminal.wait() in (0, 143)
        assert terminal.echoes(), "the terminal is raw"
        assert b"Traceback" not in terminal.raw and b"screen failed" not in terminal.raw, terminal.raw[-1500:]


# The screens. Each function draws its values from the generator and returns what draws them.


def snapshot(rng: random.Random) -> Snapshot:
    cuda = rng.random() < 0.5
    base = fakes.snapshot(cuda, **(fakes.MEASURED if rng.random() < 0.6 else {}))
    if rng.random() < 0.25:
        base = fakes.ended(rng.choice(STATUSES[6:]), strange.text(rng))
    if rng.random() < 0.1:
        base = fakes.empty_snapshot(stage=strange.text(rng))
    if rng.random() < 0.2:
        base = fake_ranks.planted_snapshot(rng.choice((2, 8, 64)))
    if rng.random() < 0.3:
        base = replace(base, trials=(fakes.trial_event(), fakes.trial_event("loss")))
    found = strange.mutated(rng, base, rng.choice((0.02, 0.1, 0.4, 1.0)))
    return replace(found, status=rng.choice((*STATUSES, found.status)))


def result_of(rng: random.Random, found: Snapshot) -> Any:
    if rng.random() < 0.5:
        return Diagnosis(diagnose).of(found)
    findings = (fakes.FINDING, fakes.SECOND, fakes.HEALTHY)[: rng.randrange(4)]
    return Diagnosis(fakes.found(*(strange.mutated(rng, one, 0.3) for one in findings))).of(found)


def live(rng: random.Random) -> Draw:
    found = snapshot(rng)
    message = strange.text(rng) if rng.random() < 0.5 else None
    keys = (("t", "try"), ("d", "diagnosis"), ("p", "pause"), ("?", "help"), ("q", "quit"))
    waited = rng.choice((None, 0, 12.0, 1e9))
    diagnosed, can_try = result_of(rng, found), rng.random() < 0.5
    state = LiveState(strange.text(rng), found.status, keys, message, waited, diagnosed, can_try)
    return partial(live_rows, found, state)


def in_frame(make: Callable[[int, int], list[Row]]) -> Draw:
    """The rows that `make` returns for the width between the margins."""
    return lambda width, height: framed(make(inner_width(width), height), [], width, height)


def rows_of(entries: list[Entry]) -> list[Row]:
    return [row for item in entries for row in item.rows]


def page(rng: random.Random) -> Draw:
    several = strange.mutated(
        rng, fake_ranks.planted_snapshot(rng.choice((2, 8, 64))), rng.choice((0.02, 0.3))
    )
    scalars = (("accuracy", ((1, 0.25), (2, 0.5))), ("own/recall", ((7, 1e-6),)), ("other", ()))
    texts = TextsEvent(1200, ["def f(x):\n    return x", "a text"])
    told = strange.mutated(rng, fakes.snapshot(scalars=scalars, texts=texts), rng.choice((0.1, 0.6)))
    lines = rng.choice(
        (
            partial(help_lines, LIVE_KEYS), partial(settings_lines, snapshot(rng)), partial(ranks_lines, several),
            partial(own_values_lines, told),
        )
    )  # fmt: skip
    return in_frame(lambda width, height: lines(width))


def diagnosis(rng: random.Random) -> Draw:
    found = snapshot(rng)
    result, name, can_try = result_of(rng, found), strange.text(rng), rng.random() < 0.5
    return in_frame(lambda width, height: block_rows(diagnosis_blocks(found, result, name, can_try), width))


def home(rng: random.Random) -> Draw:
    run = RunRow("charlm-003", "chartext", "training", 4_218, 6_900, fakes.T0, "loss 1.498", True)
    start = StartRow("chartext", "character-level text model", "sizes tiny, mini")
    machine = tuple(Text(strange.text(rng)) for _ in range(rng.randrange(5)))
    starts = tuple(strange.mutated(rng, start, 0.4) for _ in range(rng.randrange(6)))
    runs = tuple(strange.mutated(rng, run, 0.4) for _ in range(rng.randrange(30)))
    return in_frame(
        lambda width, height: [
            *home_screen.heading(machine, width, height), *rows_of(home_screen.entries(starts, runs, width))
        ]
    )  # fmt: skip


def trial(rng: random.Random) -> Draw:
    offered = tuple(
        ProposedChange(
            strange.mutated(rng, fakes.FINDING.changes[0], 0.4), strange.mutated(rng, fakes.FINDING, 0.4)
        )
        for _ in range(rng.randrange(5))
    )
    progress = Progress("measuring", 12.0, 60.0, 3, 1.1, 0.96, 1.26)
    state = TrialState(
        rng.choice(("choose", "measure", "result")), strange.text(rng), offered,
        rng.choice(("", strange.text(rng))),
        tuple(strange.mutated(rng, fakes.trial_event(), 0.3) for _ in range(rng.randrange(4))),
        (strange.text(rng),), rng.choice(("", strange.text(rng))), rng.choice(BUDGETS_S),
        rng.choice((None, strange.mutated(rng, progress, 0.3))), rng.random() < 0.3,
        rng.choice((None, strange.mutated(rng, fakes.trial_event(), 0.3))), rng.choice(("", strange.text(rng))),
    )  # fmt: skip

    def draw(width: int, height: int) -> list[Row]:
        if state.stage == "measure":
            return trial_screen.measuring(state, width)
        if state.stage == "result":
            return trial_screen.result(state, width, height)
        return [
            *trial_screen.heading(state, width, height), *rows_of(trial_screen.entries(state, width)),
            *trial_screen.problems(state, width, height),
        ]  # fmt: skip

    return in_frame(draw)


def tuning(rng: random.Random) -> Draw:
    state = strange.mutated(
        rng, rng.choice((fake_tuning.MEASURING, fake_tuning.DONE)), rng.choice((0.05, 0.3))
    )
    stage = rng.choice((state.stage, "stopping"))
    return in_frame(
        lambda width, height: [
            *aligned([tuning_screen.table_row(row) for row in state.rows], width),
            *tuning_screen.selected_rows(next(iter(state.rows), None), width),
            *(
                tuning_screen.progress_rows(state.progress, stage, width, plot=height >= 18)
                if state.progress is not None
                else ()
            ),
            *tuning_screen.result_rows(state, width, height),
        ]
    )


def wizard(rng: random.Random) -> Draw:
    share = rng.choice((0.05, 0.3))
    measured = replace(fake_wizard.ROWS[0], measured=Measured(0.12, 6 * fakes.GB))
    known = (*fake_wizard.ROWS, measured)
    rows = tuple(
        strange.mutated(rng, rng.choice(known), share, strange.POSITIVE) for _ in range(rng.randrange(12))
    )
    start = StartRow("chartext", "character-level text model", "sizes tiny, mini")
    texts = tuple(strange.text(rng) for _ in range(rng.randrange(6)))
    goal = fake_wizard.FakeWizard().fields()[0]
    fields = tuple(strange.mutated(rng, goal, 0.4) for _ in range(3))
    workloads = tuple(strange.mutated(rng, start, 0.4) for _ in range(rng.randrange(5)))
    column, progress = (
        rng.choice(PROPOSAL_COLUMNS),
        (rng.choice((0.0, 0.4, 1.0)), rng.choice((None, 9.0, 1e12))),
    )
    lines, stage = tuple(map(Text, texts)), strange.text(rng)
    chosen, diff = rng.choice((None, *rows)), rng.random() < 0.3
    parts: dict[str, Callable[[int], list[Row]]] = {
        "machine": lambda width: block_rows(lines, width),
        "workload": lambda width: aligned([((one.name, "bold"), (one.title, "text")) for one in workloads], width),
        "goal": lambda width: [
            *aligned([((one.name, "bold"), (one.value, "accent")) for one in fields], width),
            *wizard_screen.data_rows(texts[:2], width),
        ],
        "probing": lambda width: wizard_screen.stage_rows(stage, *progress, width),
        "trade-offs": lambda width: [
            *aligned([cells for _, cells in wizard_screen.proposal_table(rows, rows[:3], rows[1:3], column)[1]], width),
            *paragraph(about_text(chosen) if chosen is not None else "", width),
            *plot_rows(rows, rows[:3], chosen, width, 10),
        ],
        "verify": lambda width: [
            *aligned([cells for _, cells in wizard_screen.verified_table(rows[:4], chosen)], width),
            *wizard_screen.advice_rows(rows[:4], stage, "warn", width),
        ],
        "file": lambda width: wizard_screen.file_rows(texts, diff, width),
    }  # fmt: skip
    page = rng.choice(WIZARD_PAGES)
    return in_frame(lambda width, height: [wizard_screen.trail(page, width), *parts[page](width)])


KIND = Kind(
    name="screens with strange values",
    holds="a whole frame of the terminal's size, no exception, no control character",
    full=1000,
    short=60,
    attempts=attempts,
)
