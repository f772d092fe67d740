"""Makes the pictures in this folder from the running program: real runs on this machine, nothing staged.

make screenshots        needs rsvg-convert and a monospace font for the PNG; without it only the SVG is made
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from textual.pilot import Pilot

from ndd_console.app import CanvasApp, ConsoleApp, TuningApp, WizardApp
from ndd_console.jobs.run_sources import EngineSource, HomeFolder
from ndd_console.jobs.tuning import TuningJob
from ndd_console.jobs.wizard import WizardJob
from ndd_console.screens.interfaces import RunSource
from ndd_console.screens.trial import TrialScreen
from ndd_console.screens.wizard import WizardScreen
from ndd_console.view.wizard import TABLE
from ndd_engine.config import read
from ndd_engine.diagnose import diagnose
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.train.run import Run, RunRequest
from ndd_engine.trial.request import Base
from ndd_engine.trial.tuning import run_tuning
from ndd_engine.wizard.answers import Answers

FOLDER = Path(__file__).parent
# Long enough for curves that look like something, and for an evaluation or two.
TRAIN_S = 75.0
# Items are encoded on the fly here, so that there is something to find and to try.
SLOW = ("batch.micro=2", "batch.sequence=256")
TUNING_BUDGET_S = 30.0
WIZARD = Answers(workload="chartext", sizes=("mini", "tiny"), min_sequence=64)
WIZARD_BUDGET_S = 40.0
SIZES = {"live": (80, 24), "live-100x30": (100, 30), "live-120x40": (120, 40), "live-200x50": (200, 50)}


def main() -> int:
    """Train, try a change and climb the ladder for some minutes, and picture the screens."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(take(Path(folder)))
        asyncio.run(take_findings(Path(folder)))
        asyncio.run(take_tuning())
        asyncio.run(take_wizard())
    to_png()
    return 0


def wizard(_run: RunSource | None) -> WizardJob:
    """What the key `w` opens."""
    return WizardJob(WIZARD, None, WIZARD_BUDGET_S)


async def take(root: Path) -> None:
    """The live screen at several sizes from one run, then the home screen with what ran."""
    for number in (1, 2):
        short = read(workload="ndd", overrides={"run": {"name": f"ndd-00{number}", "epochs": 2}})
        run = Run.open(RunRequest(short, root))
        run.execute()
        run.close()
    run = Run.open(RunRequest(read(overrides={"run": {"name": "chartext-001"}}), root))
    engine = threading.Thread(target=run.execute, name="engine")
    engine.start()
    try:
        begin = time.monotonic()
        while time.monotonic() - begin < TRAIN_S and not run.finished.is_set():
            await asyncio.sleep(0.5)
        for name, size in SIZES.items():
            await picture(
                name,
                size,
                ConsoleApp(EngineSource(run), None, wizard=wizard),
                lambda snapshot: snapshot.step > 0,
            )
        await picture("home", (80, 24), ConsoleApp(None, HomeFolder(root), wizard=wizard), None)
    finally:
        run.control.request("stop")
        engine.join()
        run.close()


async def take_findings(root: Path) -> None:
    """A run that something holds back: its finding, the diagnosis with a burst in it, and the change measured."""
    run = Run.open(
        RunRequest(read(sets=SLOW, workload="finetune", overrides={"run": {"name": "finetune-001"}}), root)
    )
    engine = threading.Thread(target=run.execute, name="engine")
    engine.start()
    source = EngineSource(run)
    app = ConsoleApp(source, None, wizard=wizard)
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            await until(lambda: any(found.sets for found in diagnose(source.snapshot())), pilot)
            await pilot.press("k")
            await until(lambda: source.snapshot().kernels is not None, pilot)
            await pilot.pause(5.0)
            save("finding", app)
            await pilot.resize_terminal(100, 46)
            await pilot.press("d")
            await pilot.pause(1.0)
            save("diagnosis", app)
            await pilot.press("t")
            await pilot.resize_terminal(80, 24)
            await pilot.pause(1.0)
            save("trial-choosing", app)
            await pilot.press("m", "enter")
            screen = app.screen
            assert isinstance(screen, TrialScreen)
            await until(lambda: screen.state.stage == "result", pilot)
            await pilot.pause(1.0)
            save("trial", app)
            app.exit("quit")
    finally:
        source.close()
        run.control.request("stop")
        engine.join()
        run.close()


async def take_tuning() -> None:
    """The ladder of a small run, at its end."""
    base = Base("the workload ndd", workload="ndd", sets=("loader.fetch=item",))
    job = TuningJob(base.name, lambda tell, stop: run_tuning(
        base, TUNING_BUDGET_S, ("gather", "workers", "threads"), tell, stop))  # fmt: skip
    app = TuningApp(job, on_first_paint=job.start)
    async with app.run_test(size=(120, 34)) as pilot:
        await until(lambda: over(job), pilot)
        await pilot.pause(1.0)
        save("ladder", app)
        app.exit("quit")
    job.join()


async def take_wizard() -> None:
    """The wizard from this machine to a file: its trade-offs, the measurements, the TOML."""
    job = WizardJob(WIZARD, None, WIZARD_BUDGET_S)
    app = WizardApp(job)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = app.screen
        assert isinstance(screen, WizardScreen)
        await until(lambda: screen.view.machine is not None, pilot)
        await pilot.press("enter", "enter")
        await pilot.pause(0.5)
        save("wizard-goal", app)
        await pilot.press("enter")
        await until(lambda: screen.view.page == TABLE, pilot)
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
    """Whether the ladder is at its end."""
    return job.error is not None or (job.state is not None and job.state.done)


async def until(true: Callable[[], bool], pilot: Pilot[str], seconds: float = 900.0) -> None:
    """Wait for something, while the app goes on."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("the screen did not come to what was to be pictured")
        await pilot.pause(0.25)


def save(name: str, app: CanvasApp) -> None:
    """The screen as it is, as SVG."""
    (FOLDER / f"{name}.svg").write_text(app.export_screenshot(title="ndd-console"), encoding="utf-8")


async def picture(
    name: str, size: tuple[int, int], app: ConsoleApp, ready: Callable[[Snapshot], bool] | None
) -> None:
    """One screen as SVG, once it shows what it should."""
    async with app.run_test(size=size) as pilot:
        await pilot.pause(2.0)
        while ready is not None and app.source is not None and not ready(app.source.snapshot()):
            await pilot.pause(0.5)
        save(name, app)
        app.exit("quit")


def to_png() -> None:
    """Each SVG as PNG, in a font that is installed."""
    converter = shutil.which("rsvg-convert")
    if converter is None:
        print("no PNG: rsvg-convert is not installed (Debian: librsvg2-bin)", file=sys.stderr)
        return
    for svg in sorted(FOLDER.glob("*.svg")):
        text = svg.read_text(encoding="utf-8").replace("Fira Code", "DejaVu Sans Mono")
        # librsvg drops leading spaces otherwise, which moves whole columns.
        text = re.sub(r"<text ", '<text xml:space="preserve" ', text)
        target = svg.with_suffix(".png")
        subprocess.run([converter, "--zoom", "1", "-o", target], input=text.encode(), check=True)
        print(target)


if __name__ == "__main__":
    sys.exit(main())
