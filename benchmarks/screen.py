"""Engine under the live screen vs. engine headless, and the bytes and CPU time of a refresh.

Runs the real console with a real run in a real 80x24 pseudo-terminal. Within one run, the screen's refresh
timer is off and on in turn for a few seconds each; an "on" block is compared with the "off" blocks on both sides of it,
so that slow drifts cancel. (Separate runs differ by more than the effect.) A block's steps per second are those of the
recorded windows that lie entirely within it. "Off" means an idle screen: unlike headless, its process, threads and
event loop exist.

Worst-case settings: steps of 1-3 ms that hold the GIL, and windows of 0.25 s at 4 refreshes per second, so that almost
every refresh updates all figures (with the default of 1 s most refreshes have nothing new).

The program in the terminal is `python -m benchmarks.screen RUNS RESULT BLOCKS BLOCK_S WARM_STEPS SETTLE_S SET …`.
"""

from __future__ import annotations

import bisect
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.timer import Timer

import ndd_console.app as app_module
from ndd_console.process.terminal import Leash
from ndd_console.screens.live import LiveScreen
from ndd_console.sessions.training import Console
from ndd_engine.config import read
from ndd_engine.hardware.load import LoadWatch
from ndd_engine.train.request import RunRequest

from . import painters
from .common import (
    STATISTICS,
    Options,
    Ratio,
    Table,
    Target,
    as_count,
    as_ms,
    as_ratio,
    say,
    statistics_cells,
    undisturbed,
)
from .engine import ONLY_STEPS, TINY, TINY_WORKLOAD, read_windows
from .terminal import Chunk, Terminal

TITLE = "screen: engine under the live screen / headless, at 80x24, 4 refreshes per second"
RATIO_TARGET = Target(0.99, at_least=True)
BYTES_TARGET = Target(1536)
_SETTINGS = (*TINY, *ONLY_STEPS, "log.window_s=0.25")
RUN = "stage"
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Stretch:
    """One block. begin, end: unix seconds. cpu_s: CPU time of all threads except the engine's.

    rate: steps per second; 0 if no window lies within the block.
    """

    on: bool
    begin: float
    end: float
    cpu_s: float
    rate: float
    foreign: float


def measure(options: Options) -> list[Table]:
    """What the screen costs a run, and what a refresh costs with other ways to paint it."""
    return [beside_a_run(options), painters.measure(options)]


def beside_a_run(options: Options) -> Table:
    """Ratio, bytes and CPU time."""
    pairs, block_s = options.repeats(options.pairs or 30, 3), options.seconds(2.5, 1.2)
    say(f"screen: {2 * pairs + 1} blocks of {block_s} s")
    with tempfile.TemporaryDirectory(prefix="ndd-bench-") as folder:
        result = Path(folder) / "result.json"
        warm = (options.repeats(1000, 1000, 50), options.seconds(3.0, 3.0, least=0.2))
        words = (folder, result, 2 * pairs + 1, block_s, *warm, *_SETTINGS, f"run.device={options.device}")
        chunks, load = _watch(result, [*map(str, words)], 150 + 2 * pairs * block_s * 2)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        windows = read_windows(Path(folder) / RUN / "events.jsonl")
    spans = [(t - window.wall_ns * 1e-9, t, window) for t, window in windows]
    blocks: list[Stretch] = []
    for block in found["blocks"]:
        inside = [window for begin, end, window in spans if begin >= block["begin"] and end <= block["end"]]
        wall_s = sum(window.wall_ns * 1e-9 for window in inside)
        rate = sum(window.steps for window in inside) / wall_s if wall_s else 0.0
        foreign = [share for t, share in load if block["begin"] <= t <= block["end"] + 0.5]
        blocks.append(Stretch(**block, rate=rate, foreign=max(foreign, default=0.0)))
    stray = sum(
        block.begin + 0.1 < tick < block.end for block in blocks if not block.on for tick in found["ticks"]
    )
    if stray:
        raise RuntimeError(f"the screen refreshed {stray} times while it was switched off")
    table = Table(TITLE, ("figure", *STATISTICS))
    values, note = undisturbed(ratios(blocks))
    table.add("steps/s, screen on / off", *statistics_cells(values, as_ratio, RATIO_TARGET))
    table.note(note)
    painted = [size for size in bytes_of_refreshes(chunks, found["ticks"], blocks) if size]
    table.add("bytes per refresh", *statistics_cells(painted, as_count, BYTES_TARGET))
    if painted:
        table.note(
            f"mean {as_count(statistics.mean(painted))} bytes over {len(painted)} refreshes with output"
        )
    table.add("CPU ms per refresh", *statistics_cells(cpu_ms_of_refreshes(blocks, found["ticks"]), as_ms))
    off = [1e3 / block.rate for block in blocks if not block.on and block.rate]
    step = f"{statistics.median(off):.2f} ms" if off else "n/a"
    table.note(f"step {step} with the screen off; blocks of {block_s} s")
    table.note("CPU: all threads except the engine's, on-blocks minus neighbouring off-blocks, per refresh")
    return table


def ratios(blocks: Sequence[Stretch]) -> list[Ratio]:
    """Each on-block over the mean of its neighbouring off-blocks."""
    out = []
    for before, block, after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        if block.on and before.rate and after.rate:
            rate = (before.rate + after.rate) / 2
            out.append(Ratio(block.rate / rate, max(before.foreign, block.foreign, after.foreign)))
    return out


def bytes_of_refreshes(
    chunks: Sequence[Chunk], ticks: Sequence[float], blocks: Sequence[Stretch]
) -> list[float]:
    """Bytes between each tick of the screen in an on-block and the next tick."""
    sizes = [0] * len(ticks)
    for chunk in chunks:
        if (place := bisect.bisect_right(ticks, chunk.t) - 1) >= 0:
            sizes[place] += len(chunk.data)
    # The last tick of a block is followed by seconds without one: exclude it.
    inside = [any(block.on and block.begin <= tick <= block.end - 0.3 for block in blocks) for tick in ticks]
    return [float(size) for size, keep in zip(sizes, inside, strict=True) if keep]


def cpu_ms_of_refreshes(blocks: Sequence[Stretch], ticks: Sequence[float]) -> list[float]:
    """For each on-block: CPU ms per refresh, above its neighbouring off-blocks."""
    out = []
    for before, block, after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        count = bisect.bisect_right(ticks, block.end) - bisect.bisect_left(ticks, block.begin)
        if block.on and count:
            idle = (_cpu_share(before) + _cpu_share(after)) / 2
            out.append((_cpu_share(block) - idle) * (block.end - block.begin) / count * 1e3)
    return out


def _cpu_share(block: Stretch) -> float:
    return block.cpu_s / (block.end - block.begin)


def _watch(result: Path, words: list[str], limit_s: float) -> tuple[list[Chunk], list[tuple[float, float]]]:
    """Read the terminal to its end: the chunks, and (unix seconds, cores used by others) every second."""
    chunks: list[Chunk] = []
    load: list[tuple[float, float]] = []
    deadline = time.monotonic() + limit_s
    with Terminal([sys.executable, "-m", "benchmarks.screen", *words]) as terminal:
        watch = LoadWatch()
        due = time.monotonic() + 1
        while not terminal.ended and time.monotonic() < deadline:
            chunk = terminal.read(max(due - time.monotonic(), 0))
            if chunk is not None:
                chunks.append(chunk)
            if time.monotonic() >= due:
                load.append((time.time(), watch.foreign()))
                watch.restart()
                due = time.monotonic() + 1
    if not result.exists():
        raise RuntimeError(
            "the console exited early; its last output: " + repr(b"".join(c.data for c in chunks)[-600:])
        )
    return chunks, load


# The program in the terminal: the console with a screen that can be switched off.


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
    """The program in the terminal; returns the exit status of the console.

    It trains in the console like `ndd-console train`. A thread switches the refresh timer of the live screen off and
    on, block by block, and writes the times to RESULT. The engine trains throughout; its own record shows what it did
    in each block.
    """
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
