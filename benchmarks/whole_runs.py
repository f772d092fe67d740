"""A plain script in blocks of steps: bare, under `ndd-console run --headless`, and under traceml.

Each is a process of its own. All of them are started, and then train one after the other, in the order A B C D D C B A
…, while the others are stopped. A block is compared with the bare one of its own turn; the second bare script tells
what such a comparison can resolve. The script's Python is another environment's, which has torch and traceml-ai:
`python -m benchmarks observe --traceml PYTHON`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from ndd_engine.hardware.load import LoadWatch

from .common import Options, Ratio, Table, say, summarise, undisturbed

TITLE = "observe: steps of a script / those of the bare one, in blocks of processes of their own"
COLUMNS = (
    "step", "run", "blocks", "time a step", "95 % CI", "processor time a step", "whole command",
)  # fmt: skip
STEPS_MS = (1.0, 5.0, 44.0)
SIDES = ("bare", "bare again", "ndd-console run", "traceml run")
# Launches of all sides, and blocks in each: 30 blocks in all.
LAUNCHES, BLOCKS = 3, 10
# Seconds of training before steps are measured, and of one block.
WARM_S, BLOCK_S = 2.0, 2.0
TIMEOUT_S = 300.0
_LOOP = str(Path(__file__).with_name("observed_loop.py"))


@dataclass(frozen=True)
class Work:
    """Of all sides for a length of steps. python: of the script; warm, steps: before the blocks, and of each."""

    python: str
    width: int
    batch: int
    warm: int
    steps: int


@dataclass(frozen=True)
class Measured:
    """Of one block: seconds of a step by the clock and of the processor."""

    wall_s: float
    used_s: float
    loss: float
    foreign: float


def measure(options: Options) -> Table:
    """All lengths of a step. Raises RuntimeError if a side fails or trains something else."""
    table = Table(TITLE, COLUMNS)
    launches, blocks = options.repeats(LAUNCHES, 1), options.repeats(BLOCKS, 4, least=2)
    with tempfile.TemporaryDirectory(prefix="ndd-whole-") as folder:
        for step_ms in options.cases(STEPS_MS):
            work = _sized(Path(folder), options.traceml, step_ms, options.seconds(BLOCK_S, 1.0))
            turns: list[dict[str, Measured]] = []
            commands: list[dict[str, float]] = []
            for number in range(launches):
                say(f"observe: {blocks} blocks of {step_ms:g} ms steps, launch {number + 1} of {launches}")
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    found, command_s = _launched(Path(place), work, blocks)
                turns += found
                commands.append(command_s)
            _rows(table, turns, commands)
    table.note(f"script's Python: {options.traceml}; {_version(options.traceml)}")
    table.note(
        f"{launches} launches of {blocks} blocks each; each process trains {WARM_S:g} s before its blocks; "
        "whole command: to the first block and from the last one to the end, more than the bare one"
    )
    return table


def _rows(table: Table, turns: list[dict[str, Measured]], commands: list[dict[str, float]]) -> None:
    for side in SIDES[1:]:
        pairs = [(found["bare"], found[side]) for found in turns]
        ratios = [Ratio(b.wall_s / a.wall_s, max(a.foreign, b.foreign)) for a, b in pairs]
        values, note = undisturbed(ratios)
        found = summarise(values)
        low, high = found.interval or (math.nan, math.nan)
        used = median(b.used_s - a.used_s for a, b in pairs)
        more = median(command[side] - command["bare"] for command in commands)
        table.add(
            f"{median(a.wall_s for a, _ in pairs) * 1e3:.2f} ms", side, f"{len(values)} of {len(turns)}",
            f"{(found.median - 1) * 100:+.2f} %",
            f"{(low - 1) * 100:+.2f} to {(high - 1) * 100:+.2f} %" if found.interval else "n/a",
            f"{used * 1e6:+.1f} us", f"{more:+.1f} s",
        )  # fmt: skip
        table.note(note)


def _sized(folder: Path, python: str, step_ms: float, seconds: float) -> Work:
    output = folder / "sized.json"
    done = subprocess.run(
        [python, _LOOP, "sized", str(output), str(step_ms)], env=_environment(), capture_output=True, text=True,
        check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{python} ended with status {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(output.read_text())
    warm, steps = (max(round(span / found["step_s"]), 20) for span in (WARM_S, seconds))
    return Work(python, found["width"], found["batch"], warm, steps)


def _launched(folder: Path, work: Work, blocks: int) -> tuple[list[dict[str, Measured]], dict[str, float]]:
    """Each block of all sides, and the seconds of each command beside its blocks."""
    turns = []
    with ExitStack() as stack:
        # Processes that are stopped would outlive this one.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)))
        sides = {side: stack.enter_context(Side(folder / side, work, side)) for side in SIDES}
        for number in range(blocks):
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            found = {side: sides[side].block(work.steps) for side in order}
            if len({one.loss for one in found.values()}) > 1:
                raise RuntimeError(f"the sides trained to different losses: {found}")
            turns.append(found)
        return turns, {name: side.end() for name, side in sides.items()}


class Side:
    """One process of the script, with whoever observes it. All of it is stopped outside of its blocks."""

    def __init__(self, folder: Path, work: Work, side: str) -> None:
        self._folder, self._work, self._name = folder, work, side

    def __enter__(self) -> Side:
        self._folder.mkdir()
        # A path of a Unix socket is short.
        address = str(self._folder / "s")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._listener.settimeout(1.0)
        self._errors = (self._folder / "errors").open("w+")
        begin = time.perf_counter()
        self._process = psutil.Popen(
            self._command(address), cwd=self._folder, env=_environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=self._errors,
        )  # fmt: skip
        try:
            connection = self._connected()
            connection.settimeout(TIMEOUT_S)
            self._asked: Any = connection.makefile("rw")
            self._asked.readline()
        except BaseException:
            self.__exit__()
            raise
        self._connection, self._command_s = connection, time.perf_counter() - begin
        self._stopped(True)
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever is left of it."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(TIMEOUT_S)
        self._errors.close()
        self._listener.close()

    def block(self, steps: int) -> Measured:
        """Train so many steps."""
        self._stopped(False)
        watch = LoadWatch()
        print(steps, file=self._asked, flush=True)
        line = self._asked.readline()
        foreign = watch.foreign()
        if not line:
            raise self._failed()
        self._stopped(True)
        body = json.loads(line)
        return Measured(body["wall_s"] / steps, body["used_s"] / steps, body["loss"], foreign)

    def end(self) -> float:
        """Have it end by itself: the seconds of the command beside its blocks."""
        self._stopped(False)
        begin = time.perf_counter()
        self._asked.close()
        self._connection.close()
        if self._process.wait(TIMEOUT_S):
            raise self._failed()
        return self._command_s + time.perf_counter() - begin

    def _connected(self) -> socket.socket:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(TimeoutError):
                return self._listener.accept()[0]
        raise self._failed()

    def _failed(self) -> RuntimeError:
        self._errors.seek(0)
        status = self._process.poll()
        return RuntimeError(
            f"{self._name}: its process ended with status {status}: {self._errors.read()[-2000:]}"
        )

    def _processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [self._process, *self._process.children(recursive=True)]
        return []

    def _stopped(self, on: bool) -> None:
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.suspend() if on else process.resume()

    def _command(self, address: str) -> list[str]:
        work = self._work
        given = ["blocks", address, *(str(value) for value in (work.width, work.batch, work.warm))]
        if self._name == "ndd-console run":
            console = f"{sys.executable} -m ndd_console run --headless --run it --"
            return [*console.split(), work.python, _LOOP, *given]
        if self._name == "traceml run":
            tool = str(Path(work.python).with_name("traceml"))
            options = ("--logs-dir", "logs", "--run-name", "it", "--args")
            return [tool, "run", _LOOP, *options, *given, "traceml"]
        return [work.python, _LOOP, *given]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _version(python: str) -> str:
    names = ("torch", "traceml-ai")
    shown = f"*(name + ' ' + version(name) for name in {names}), sep=', '"
    code = f"from importlib.metadata import version; print({shown})"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
