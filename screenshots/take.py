"""Takes the pictures in this folder from real runs on this machine.

    python screenshots/take.py [run] [workers] [ranks] [tuning] [wizard]

Needs rsvg-convert and a monospace font for the PNG files; without it only SVG files are made. Pictures of a run are
written when all of them are taken: where the change is not measured as faster, as on a busy machine, the old ones stay.

live.png           a slow run: its bottleneck and ceiling; live-*.png: at other sizes
diagnosis.png      all findings of that run, with a profiler capture; model.png: the parts of its model
workers.png        the page of loader workers
trial.png          the proposed change, measured
ranks.png          two ranks, one of which waits for its data; ranks-table.png: the page of ranks
tuning.png         settings tried in turn, with their gains
home.png           the home screen
wizard.png         trade-offs; wizard-120x40.png, wizard-measured.png, wizard-file.png: the other pages
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from textual.pilot import Pilot

from ndd_console.app import ConsoleApp, ScreenApp, TuningApp, WizardApp
from ndd_console.jobs.run_sources import EngineSource, HomeFolder, RunSource
from ndd_console.jobs.trials import TuningJob
from ndd_console.jobs.wizard import WizardJob
from ndd_console.screens.pages import DiagnosisScreen
from ndd_console.screens.trial import TrialScreen
from ndd_console.screens.wizard import WizardScreen
from ndd_engine.config import read
from ndd_engine.diagnose import diagnose
from ndd_engine.run.run import Run
from ndd_engine.train.request import RunRequest
from ndd_engine.train.started_ranks import StartedRanks
from ndd_engine.train.training_run import TrainingRun
from ndd_engine.trial.outcome import Base
from ndd_engine.trial.tuning import run_tuning
from ndd_engine.wizard.proposals import Answers

FOLDER = Path(__file__).parent
# Items are tokenised on the fly, so the run waits for its data loader.
SLOW = ("loader.cache=false", "loader.workers=0", "batch.micro=2", "batch.sequence=256")
# Long enough for the findings to settle, for an evaluation and for curves.
TRAIN_S, PATIENCE_S = 75.0, 240.0
RANKS = (
    "run.name=late-001", "run.epochs=1000", "run.threads=1", "batch.micro=128",
    "parallel.ranks=2", "log.profile_every_s=10",
    "checkpoint.at_end=false",
)  # fmt: skip
WORKERS = (
    "run.name=finetune-002", "loader.cache=false", "loader.workers=2", "batch.micro=2", "batch.sequence=256",
)  # fmt: skip
TUNING_BUDGET_S = 30.0
# Name of a picture -> the screen as SVG, until all pictures of a run are taken.
taken: dict[str, str] = {}
WIZARD = Answers(workload="chartext", sizes=("mini", "tiny"), min_sequence=64)
WIZARD_BUDGET_S = 40.0
SIZES = {"live": (80, 24), "live-100x30": (100, 30), "live-120x40": (120, 40), "live-200x50": (200, 50)}


def main(names: Sequence[str]) -> int:
    """Train, measure and tune for some minutes, and picture the screens. Returns the exit status."""
    takes = {
        "run": take_run,
        "workers": take_workers,
        "ranks": take_ranks,
        "tuning": take_tuning,
        "wizard": take_wizard,
    }
    status = 0
    for name in names or takes:
        taken.clear()
        try:
            with tempfile.TemporaryDirectory() as folder:
                asyncio.run(takes[name](Path(folder)))
        except PictureError as error:
            print(f"{name}: the pictures stay as they are: {error}", file=sys.stderr)
            status = 1
        else:
            for picture, svg in taken.items():
                (FOLDER / f"{picture}.svg").write_text(svg, encoding="utf-8")
                to_png(picture, svg)
    return status


class PictureError(Exception):
    """A screen does not show what its picture is for."""


def wizard(_run: RunSource | None) -> WizardJob:
    """What the key `w` opens."""
    return WizardJob(WIZARD, None, WIZARD_BUDGET_S)


@asynccontextmanager
async def shown(run: Run) -> AsyncIterator[tuple[ConsoleApp, EngineSource, Pilot[str]]]:
    """The run trains in a thread, with its live screen at 80x24."""
    source = EngineSource(run)
    app = ConsoleApp(source, None, wizard=wizard)
    engine = threading.Thread(target=run.execute, name="engine")
    engine.start()
    app.capture(sys.stderr)  # processes of loader workers need a real one
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            yield app, source, pilot
            app.exit("quit")
    finally:
        source.close()
        run.control.request("stop")
        engine.join()
        run.close()


async def take_run(root: Path) -> None:
    """A slow run: live screen, diagnosis, the trial of the proposed change; and the home screen with this run."""
    for number in (1, 2):
        short = read(workload="eeg", overrides={"run": {"name": f"eeg-00{number}", "epochs": 2}})
        run = Run.open(TrainingRun(RunRequest(short, root)))
        run.execute()
        run.close()
    draft = read(sets=SLOW, workload="finetune", overrides={"run": {"name": "finetune-001"}})
    begin = time.monotonic()
    async with shown(Run.open(TrainingRun(RunRequest(draft, root)))) as (app, source, pilot):
        await until(lambda: ready(source, time.monotonic() - begin), pilot)
        for name, size in SIZES.items():
            await pilot.resize_terminal(*size)
            await pilot.pause(2.0)
            save(name, app)
        await pilot.press("k")
        await until(lambda: source.snapshot().kernels is not None, pilot)
        await pilot.resize_terminal(100, 46)
        await pilot.press("d")
        await pilot.pause(2.0)
        save("diagnosis", app)
        page = app.screen
        assert isinstance(page, DiagnosisScreen)
        row = next(place for place, row in enumerate(page.body.rows) if "by module in the" in str(row))
        page.body.scroll_to(y=row, animate=False)
        await pilot.pause(1.0)
        save("model", app)
        await pilot.press("t")
        await pilot.resize_terminal(80, 24)
        screen = app.screen
        assert isinstance(screen, TrialScreen)
        await pilot.press(*["down"] * cached(screen), "m", "m", "enter")
        await until(lambda: screen.view.stage == "result", pilot)
        if screen.view.result is None or screen.view.result.verdict != "faster":
            raise PictureError(f"the change is {screen.view.result and screen.view.result.verdict}")
        await pilot.pause(1.0)
        save("trial", app)
    home = ConsoleApp(None, HomeFolder(root), wizard=wizard)
    async with home.run_test(size=(80, 24)) as pilot:
        await pilot.pause(2.0)
        save("home", home)
        home.exit("quit")


async def take_workers(root: Path) -> None:
    """A run whose loader workers make its batches: the page of workers, once some batches were profiled."""
    run = Run.open(TrainingRun(RunRequest(read(sets=WORKERS, workload="finetune"), root)))
    async with shown(run) as (app, source, pilot):
        await until(lambda: (seen := source.snapshot().workers) is not None and bool(seen.functions), pilot)
        await pilot.resize_terminal(100, 46)
        await pilot.press("o")
        await pilot.pause(2.0)
        save("workers", app)


async def take_ranks(root: Path) -> None:
    """A run of two ranks, whose rank 1 reads its data from a slow disk: live screen and page of ranks."""
    os.environ.update(LATE_RANK="1", LATE_PHASE="data_wait", LATE_MS="20")
    words = ("--workload", "late_rank:factory", *(word for item in RANKS for word in ("--set", item)))
    command = [sys.executable, "-m", "ndd_console", "--runs", str(root), "train", *words]
    with contextlib.chdir(FOLDER.parent / "qa" / "scripts"):
        run = StartedRanks(RunRequest(read(sets=RANKS, workload="late_rank:factory"), root), command).open()
        async with shown(run) as (app, source, pilot):
            await until(lambda: placed(source), pilot)
            await pilot.pause(2.0)
            save("ranks", app)
            await pilot.press("r")
            await pilot.pause(2.0)
            save("ranks-table", app)


def placed(source: EngineSource) -> bool:
    """Whether the late rank is named with its code."""
    ranks = source.snapshot().ranks
    return ranks is not None and ranks.late is not None and bool(ranks.late["where"])


def ready(source: EngineSource, seconds: float) -> bool:
    """Whether the planted bottleneck is the first finding; on a busy machine, after some minutes, any of them."""
    findings = diagnose(source.snapshot())
    shown = findings[:1] if seconds < PATIENCE_S else findings
    return seconds > TRAIN_S and any("loader.cache=true" in finding.sets for finding in shown)


def cached(screen: TrialScreen) -> int:
    """Index of the change that removes the bottleneck."""
    return next(i for i, offer in enumerate(screen.view.offered) if "loader.cache=true" in offer.change.sets)


async def take_tuning(_root: Path) -> None:
    """Tuning of a run with a slow data loader, at its end."""
    base = Base("the workload eeg", workload="eeg", sets=("loader.fetch=item",))
    job = TuningJob(base.name, lambda tell, stop: run_tuning(
        base, TUNING_BUDGET_S, ("gather", "workers", "threads"), tell, stop))  # fmt: skip
    app = TuningApp(job, on_first_paint=job.start)
    async with app.run_test(size=(120, 34)) as pilot:
        await until(lambda: over(job), pilot)
        if job.state is None or not job.state.kept:
            raise PictureError(job.error or "no setting is kept")
        await pilot.pause(1.0)
        save("tuning", app)
        app.exit("quit")
    job.join()


async def take_wizard(_root: Path) -> None:
    """The wizard: trade-offs, measurements and the file."""
    job = WizardJob(WIZARD, None, WIZARD_BUDGET_S)
    app = WizardApp(job)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = app.screen
        assert isinstance(screen, WizardScreen)
        await until(lambda: job.machine is not None, pilot)
        await pilot.press("enter", "enter", "enter")
        await until(lambda: screen.page == "trade-offs", pilot)
        await pilot.pause(1.0)
        save("wizard", app)
        await pilot.press("p")
        await pilot.resize_terminal(120, 40)
        await pilot.pause(1.0)
        save("wizard-120x40", app)
        await pilot.press("v")
        await until(lambda: not job.working(), pilot)
        await pilot.resize_terminal(80, 24)
        await pilot.pause(1.0)
        save("wizard-measured", app)
        await pilot.press("enter")
        await pilot.pause(1.0)
        save("wizard-file", app)
        app.exit("quit")
    job.stop()
    job.join()


def over(job: TuningJob) -> bool:
    """Whether tuning has ended."""
    return job.error is not None or (job.state is not None and job.state.done)


async def until(true: Callable[[], bool], pilot: Pilot[str], seconds: float = 900.0) -> None:
    """Wait for a condition while the app runs."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("the expected screen did not appear")
        await pilot.pause(0.25)


def save(name: str, app: ScreenApp) -> None:
    """Keep the current screen as SVG."""
    taken[name] = app.export_screenshot(title="ndd-console")


def to_png(name: str, svg: str) -> None:
    """Convert a picture to PNG with an installed font."""
    converter = shutil.which("rsvg-convert")
    if converter is None:
        print("no PNG: rsvg-convert is not installed (Debian: librsvg2-bin)", file=sys.stderr)
        return
    # Without this, librsvg drops leading spaces and moves whole columns.
    text = svg.replace("Fira Code", "DejaVu Sans Mono").replace("<text ", '<text xml:space="preserve" ')
    target = FOLDER / f"{name}.png"
    subprocess.run([converter, "--zoom", "1", "-o", target], input=text.encode(), check=True)
    print(target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
