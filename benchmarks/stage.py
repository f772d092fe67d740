"""The program in the terminal of the screen benchmark: the console with a screen that can be switched off.

`python -m benchmarks.stage RUNS RESULT BLOCKS BLOCK_S WARM_STEPS SETTLE_S [key=value ...]` trains in the console like
`ndd-console train`.
A thread switches the refresh timer of the live screen off and on, block by block, and writes the times to RESULT. The
engine trains throughout; its own record shows what it did in each block.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from textual.timer import Timer

import ndd_console.app as app_module
from ndd_console.jobs.training import Console
from ndd_console.process.launcher import Leash
from ndd_console.screens.live import LiveScreen
from ndd_engine.config import read
from ndd_engine.train.run import RunRequest

from .engine import TINY_WORKLOAD

RUN = "stage"
_PATIENCE_S = 120.0


class SwitchedScreen(LiveScreen):
    """The live screen; exposes its timer, and records when it refreshed (unix seconds)."""

    shown: SwitchedScreen | None = None
    timer: Timer

    def set_interval(self, interval: float, callback: Any = None, **named: Any) -> Timer:
        timer = super().set_interval(interval, callback, **named)
        # The framework creates timers of its own.
        if callback == self.on_time:
            self.timer = timer
            self.ticks: list[float] = []
            SwitchedScreen.shown = self
        return timer

    def tick(self) -> None:
        self.ticks.append(time.time())
        super().tick()


def main() -> int:
    """Returns the exit status of the console."""
    root, result, *figures = sys.argv[1:7]
    sets = sys.argv[7:]
    # The app looks up its live screen by this name.
    vars(app_module)["LiveScreen"] = SwitchedScreen
    draft = read(sets=sets, workload=TINY_WORKLOAD, overrides={"run": {"name": RUN}})
    request = RunRequest(draft, Path(root))
    switch = threading.Thread(target=_direct, args=(Path(result), *map(float, figures)), daemon=True)
    switch.start()
    return Console(Leash(None), request.root, False).train(request, ())  # one rank


def _direct(result: Path, blocks: float, block_s: float, warm_steps: float, settle_s: float) -> None:
    """Switch off, on, off, …, off; then end the run and close the screen."""
    deadline = time.monotonic() + _PATIENCE_S
    while (screen := SwitchedScreen.shown) is None or screen.source.snapshot().step < warm_steps:
        if time.monotonic() > deadline:
            os._exit(1)  # nothing trains; without a result the benchmark prints the screen
        time.sleep(0.2)
    time.sleep(settle_s)
    app = screen.app
    stretches: list[dict[str, Any]] = []
    for index in range(int(blocks)):
        on = index % 2 == 1
        app.call_from_thread(screen.timer.resume if on else screen.timer.pause)
        begin, cpu = time.time(), _outside_the_engine_s()
        time.sleep(block_s)
        end, spent = time.time(), _outside_the_engine_s() - cpu
        stretches.append({"on": on, "begin": begin, "end": end, "cpu_s": spent})
    result.write_text(json.dumps({"blocks": stretches, "ticks": screen.ticks}), encoding="utf-8")
    screen.source.command("kill")
    while screen.source.live:
        time.sleep(0.05)
    app.call_from_thread(app.exit, "quit")


def _outside_the_engine_s() -> float:
    """CPU seconds of this process without those of the engine's thread."""
    engine = next((thread for thread in threading.enumerate() if thread.name == "ndd-engine"), None)
    if engine is None or engine.ident is None:
        return time.process_time()
    return time.process_time() - time.clock_gettime(time.pthread_getcpuclockid(engine.ident))


if __name__ == "__main__":
    sys.exit(main())
