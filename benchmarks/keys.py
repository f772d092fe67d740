"""Latency from a key press to the repaint while training.

Runs `ndd-console train` in a real 80x24 pseudo-terminal, with steps of 1-3 ms that hold the GIL. A key is pressed at
a random moment. The latency ends when text arrives that only its repaint contains: the title of the page that opens,
the run's name when it closes (figures do not update while a page is open), or "pausing after". Resuming is not counted,
as nothing trains then.

A lone escape is measured separately: the framework waits ESCDELAY (100 ms) for the rest of a key sequence, unless the
terminal supports the newer keyboard protocol, which sends escape as a sequence.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from ndd_engine.record.file import RunReader
from ndd_engine.record.rundir import RunDir

from .common import Options, Table, Target, as_ms, quantile, say
from .engine import ONLY_STEPS, TINY, TINY_WORKLOAD
from .terminal import Terminal

TITLE = "keys: key press to repaint while training, ms"
TARGET = Target(50)
_RUN = "keyboard"
_SETTINGS = (*TINY, *ONLY_STEPS, "run.device=cpu")
_HELP, _LOG, _PAUSING = b"keys and glossary", b"log of the run", b"pausing after"
_NAME = _RUN.encode()
ESCAPE, ESCAPE_SEQUENCE = b"\x1b", b"\x1b[27u"
# (row, key, text of its repaint)
_PAGES = (
    ("? opens the help", b"?", _HELP),
    ("? closes it", b"?", _NAME),
    ("l opens the log", b"l", _LOG),
    ("escape (as a sequence) closes it", ESCAPE_SEQUENCE, _NAME),
    ("? opens the help", b"?", _HELP),
    ("q closes it", b"q", _NAME),
)
_PAUSE = "p pauses"
_LONE = "escape (lone byte), not in the total"


class Typist:
    """Presses keys in a training console, and collects the latencies."""

    def __init__(self, terminal: Terminal, reader: RunReader) -> None:
        self.terminal = terminal
        self.reader = reader
        self.times: dict[str, list[float]] = {}
        self.lost = 0
        self._moments = random.Random(0)

    def press(self, row: str, key: bytes, expected: bytes) -> None:
        """Press a key at a random moment and record the latency under `row`."""
        self.terminal.drain(self._moments.uniform(0.08, 0.3))
        begin = time.perf_counter()
        self.terminal.press(key)
        arrived = self.terminal.wait_for(expected, 5.0)
        if arrived is None:
            self.lost += 1
        else:
            self.times.setdefault(row, []).append((arrived - begin) * 1e3)

    def resume(self) -> None:
        """Resume after a pause. Raises TimeoutError."""
        for _ in range(5):
            # The screen shows the pause at its next refresh; before that, p would pause again.
            self.terminal.drain(0.4)
            self.terminal.press(b"p")
            try:
                return self.wait_status("training", timeout_s=2.0)
            except TimeoutError:
                continue
        raise TimeoutError("the run stays paused")

    def wait_status(self, status: str, steps: int = 0, timeout_s: float = 10.0) -> None:
        """Wait until the run's record shows the status. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.terminal.drain(0.05)
            self.reader.poll()
            snapshot = self.reader.snapshot()
            if snapshot.status == status and snapshot.step >= steps:
                return
            if time.monotonic() > deadline or self.terminal.ended:
                raise TimeoutError(f"the run is {snapshot.status} at step {snapshot.step}, not {status}")


def measure(options: Options) -> Table:
    """All keys in total, and each key."""
    rounds = options.repeats(32, 4)
    argv = [sys.executable, "-m", "ndd_console", "--runs"]
    command = ["train", "--workload", TINY_WORKLOAD, "--run", _RUN]
    for setting in _SETTINGS:
        command += ["--set", setting]
    table = Table(TITLE, ("key", "presses", "p50", "p95", "p99", "max", "target", "by p99"))
    say(f"keys: {rounds * (len(_PAGES) + 1)} presses")
    with (
        tempfile.TemporaryDirectory(prefix="ndd-bench-") as folder,
        Terminal([*argv, folder, *command]) as terminal,
    ):
        reader = _reader(terminal, Path(folder) / _RUN)
        typist = Typist(terminal, reader)
        typist.wait_status("training", options.repeats(1000, 1000, 50), 60.0)
        terminal.drain(options.seconds(2.0, 2.0, least=0.2))
        for _ in range(rounds):
            for row, key, expected in _PAGES:
                typist.press(row, key, expected)
            typist.press(_PAUSE, b"p", _PAUSING)
            typist.wait_status("paused")
            typist.resume()
        for _ in range(max(rounds // 2, min(rounds, 3))):
            typist.press("", b"?", _HELP)
            typist.press(_LONE, ESCAPE, _NAME)
        reader.poll()
        snapshot = reader.snapshot()
        # Stop after a checkpoint, as a user would.
        terminal.press(b"q")
        terminal.drain(0.5)
        terminal.press(b"s")
        if terminal.wait_end(20.0) is None:
            table.note("the console did not exit within 20 s of q, s")
    counted = {row: times for row, times in typist.times.items() if row not in ("", _LONE)}
    _add(table, "all", [ms for times in counted.values() for ms in times], True)
    opening = [ms for row, times in counted.items() if "opens" in row for ms in times]
    _add(table, "a page opens", opening, True)
    for row, times in sorted(typist.times.items()):
        if row:
            _add(table, row, times, False)
    if snapshot.steps_per_s:
        table.note(f"the run made {snapshot.steps_per_s:.0f} steps/s during the benchmark")
    table.note(f"{typist.lost} presses without the expected repaint within 5 s" if typist.lost else "")
    return table


def _reader(terminal: Terminal, path: Path) -> RunReader:
    """The record of the run, once it exists. Raises RuntimeError with the screen's output."""
    deadline = time.monotonic() + 30
    seen = b""
    while not (path / "events.jsonl").exists():
        chunk = terminal.read(0.1)
        seen += chunk.data if chunk is not None else b""
        if terminal.ended or time.monotonic() > deadline:
            raise RuntimeError(f"the run did not start: {seen[-600:]!r}")
    return RunReader(RunDir(path))


def _add(table: Table, row: str, times: list[float], judged: bool) -> None:
    if not times:
        table.add(row, "0")
        return
    cells = [as_ms(quantile(times, share)) for share in (0.5, 0.95, 0.99, 1.0)]
    verdict = TARGET.cells(quantile(times, 0.99), as_ms) if judged else ()
    table.add(row, str(len(times)), *cells, *verdict)
