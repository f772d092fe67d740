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

from ndd_console.app import ConsoleApp
from ndd_console.sources import EngineSource, HomeFolder
from ndd_engine.config import read
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.train.run import Run, RunRequest

FOLDER = Path(__file__).parent
# Long enough for curves that look like something, and for an evaluation or two.
TRAIN_S = 75.0
SIZES = {"live": (80, 24), "live-100x30": (100, 30), "live-120x40": (120, 40), "live-200x50": (200, 50)}


def main() -> int:
    """Train for a little over a minute and picture the screens."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(take(Path(folder)))
    to_png()
    return 0


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
            await picture(name, size, ConsoleApp(EngineSource(run), None), lambda snapshot: snapshot.step > 0)
        await picture("home", (80, 24), ConsoleApp(None, HomeFolder(root)), None)
    finally:
        run.control.request("stop")
        engine.join()
        run.close()


async def picture(
    name: str, size: tuple[int, int], app: ConsoleApp, ready: Callable[[Snapshot], bool] | None
) -> None:
    """One screen as SVG, once it shows what it should."""
    async with app.run_test(size=size) as pilot:
        await pilot.pause(2.0)
        while ready is not None and app.source is not None and not ready(app.source.snapshot()):
            await pilot.pause(0.5)
        (FOLDER / f"{name}.svg").write_text(app.export_screenshot(title="ndd-console"), encoding="utf-8")
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
