"""Startup times: the command, the home screen, and the record of a very long run.

- `--help` and `--version` as whole processes, alternating with an empty interpreter.
- The home screen in a real pseudo-terminal: from the spawn until its title appears, then until runs and workloads are
  listed. torch is imported in the background after the first paint; `q` is pressed during that import.
- A record of over a million windows, written by the real Recorder with its fold events: opened by the reader
  (open, poll, snapshot) like `attach` does, by `attach` as a whole process, and by its screen until the first paint.
  The file is in the page cache, because it was just written.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.trial.written_runs import STEPS, run_event, sample, window

from ndd_engine.record.events import EndEvent
from ndd_engine.record.file import Recorder, RunReader
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import duration, size

from .common import STATISTICS, Options, Table, Target, as_seconds, say, statistics_cells, whole_process
from .terminal import Terminal

TITLE = "start: seconds to start"
OPEN_TARGET = Target(2.0)
COMMAND_TARGET = Target(0.3)
HOME_TARGET = Target(1.0)
_TITLE_BYTES = b"see where the time goes"
_LISTED_BYTES = b"EEG forecasters"
_CONSOLE = [sys.executable, "-m", "ndd_console"]
_RUN = "million"
# Put this many events, then wait for the recorder, as its queue is not measured.
_BATCH = 5_000
STEPS_PER_EPOCH = 1_000


def measure(options: Options) -> Table:
    """One row per measured start."""
    table = Table(TITLE, ("what", *STATISTICS))
    _commands(table, options.repeats(15, 4))
    _home(table, options.repeats(10, 3))
    _long_run(table, options.repeats(1_050_000, 60_000, 1_000), options.repeats(7, 3))
    return table


def _commands(table: Table, times: int) -> None:
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "ndd-console --version": [*_CONSOLE, "--version"],
        "ndd-console --help": [*_CONSOLE, "--help"],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(times):
        for name, argv in commands.items():
            taken[name].append(whole_process(argv)[0])
    for name, values in taken.items():
        target = COMMAND_TARGET if "ndd-console" in name else None
        table.add(f"{name}, whole process", *statistics_cells(values, as_seconds, target))


def _home(table: Table, times: int) -> None:
    say(f"start: home screen, {times} times")
    painted: list[float] = []
    listed: list[float] = []
    left: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ndd-bench-") as folder:
        for index in range(times):
            with Terminal([*_CONSOLE, "--runs", folder]) as terminal:
                arrived = terminal.wait_for_all((_TITLE_BYTES, _LISTED_BYTES), 20.0)
                if arrived[0] is None:
                    raise RuntimeError("the home screen did not appear within 20 s")
                painted.append(arrived[0] - terminal.spawned)
                if arrived[1] is not None:
                    listed.append(arrived[1] - terminal.spawned)
                # During the import of torch, at a different point each time.
                terminal.drain(0.1 + index / times)
                begin = time.perf_counter()
                terminal.press(b"q")
                if (end := terminal.wait_end(20.0)) is not None:
                    left.append(end - begin)
    table.add("home screen: first paint", *statistics_cells(painted, as_seconds, HOME_TARGET))
    table.add("home screen: workloads and runs listed", *statistics_cells(listed, as_seconds))
    table.add("home screen: q to exit", *statistics_cells(left, as_seconds))
    if len(left) < times:
        table.note(f"{times - len(left)} of {times} home screens did not exit within 20 s of q")


def _long_run(table: Table, windows: int, times: int) -> None:
    with tempfile.TemporaryDirectory(prefix="ndd-bench-") as folder:
        run = RunDir(Path(folder) / _RUN)
        run.path.mkdir()
        say(f"start: writing {windows:,} windows")
        begin = time.perf_counter()
        step = _write(run, windows)
        taken = time.perf_counter() - begin
        length = run.events.stat().st_size
        table.note(
            f"the record: {windows:,} windows, {size(length)}, written by the recorder in {duration(taken)} "
            f"({taken / windows * 1e6:.0f} µs per window, including fold and queue)"
        )
        opened: list[float] = []
        for _ in range(times):
            begin = time.perf_counter()
            reader = RunReader(run)
            reader.poll()
            snapshot = reader.snapshot()
            opened.append(time.perf_counter() - begin)
        right = "correct" if snapshot.step == step and snapshot.status == "done" else "WRONG"
        table.note(f"the snapshot read back is {right}: step {snapshot.step:,}, {snapshot.status}")
        argv = [*_CONSOLE, "--runs", folder, "attach", _RUN]
        whole = [whole_process([*argv, "--headless"])[0] for _ in range(times)]
        painted = [_attach_screen(argv) for _ in range(times)]
    name = f"{windows / 1e6:.2f} million windows"
    table.add(f"{name}: open, poll, snapshot", *statistics_cells(opened, as_seconds, OPEN_TARGET))
    table.add(f"{name}: attach --headless, whole process", *statistics_cells(whole, as_seconds, OPEN_TARGET))
    table.add(
        f"{name}: attach, first paint of the screen", *statistics_cells(painted, as_seconds, OPEN_TARGET)
    )


def _attach_screen(argv: Sequence[str]) -> float:
    with Terminal(argv) as terminal:
        if (at := terminal.wait_for(_RUN.encode(), 20.0)) is None:
            raise RuntimeError("the screen of attach did not appear within 20 s")
        terminal.press(b"q")
        terminal.wait_end(10.0)
        return at - terminal.spawned


def _write(run: RunDir, windows: int) -> int:
    """Write the record of a run with that many windows; returns its last step."""
    usage, first = sample(1 << 30), window(STEPS, 1.0, 4.0)
    recorder = Recorder(run.events)
    recorder.start()
    recorder.put(run_event(name=_RUN, total_steps=windows * STEPS, steps_per_epoch=STEPS_PER_EPOCH))
    step = 0
    for index in range(windows):
        step += STEPS
        loss = 1 + 3 / (1 + index * 1e-4)
        epoch, epoch_step = divmod(step, STEPS_PER_EPOCH)
        place = {"step": step, "epoch": epoch, "epoch_step": epoch_step}
        recorder.put(replace(first, **place, loss=loss, last_loss=(step, loss)))
        if index % 60 == 0:
            recorder.put(usage)
        if index % _BATCH == 0:
            recorder.flush(60.0)
    recorder.put(EndEvent("done", f"all {step} steps are done", step, 0))
    recorder.close(60.0)
    return step
