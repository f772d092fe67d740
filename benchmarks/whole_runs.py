"""Whole runs of a plain script: bare, under `ndd-console run --headless`, and under traceml.

Every run is a process of its own. Their order is A B C D D C B A …, and each is compared with the bare run of its own
round; the second bare run tells what such a comparison can resolve. The script's Python is another environment's, which
has torch and traceml-ai: `python -m benchmarks observe --traceml PYTHON`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ndd_engine.hardware.load import LoadWatch

from .common import Options, Ratio, Table, say, summarise, undisturbed

TITLE = "observe: steps of whole runs / those of the bare script, processes of their own"
COLUMNS = (
    "step", "run", "launches", "time a step", "95 % CI", "processor time a step", "whole command",
)  # fmt: skip
STEPS_MS = (1.0, 5.0, 44.0)
SIDES = ("bare", "bare again", "ndd-console run", "traceml run")
# Seconds of training before and while steps are measured.
WARM_S = 2.0
TIMEOUT_S = 300.0
_LOOP = str(Path(__file__).with_name("plain_loop.py"))


@dataclass(frozen=True)
class Work:
    """Of all runs of a length of steps. python: of the script; warm, steps: before and while they are measured."""

    python: str
    width: int
    batch: int
    warm: int
    steps: int


@dataclass(frozen=True)
class Measured:
    """Of one run: seconds of a step by the clock and of the processor, of the whole command."""

    wall_s: float
    used_s: float
    command_s: float
    loss: float
    foreign: float


def measure(options: Options) -> Table:
    """All lengths of a step. Raises RuntimeError if a run fails or trains something else."""
    table = Table(TITLE, COLUMNS)
    launches, measured_s = options.repeats(10, 2), options.seconds(8.0, 2.0)
    with tempfile.TemporaryDirectory(prefix="ndd-whole-") as folder:
        for step_ms in options.cases(STEPS_MS):
            work = _sized(Path(folder), options.traceml, step_ms, measured_s)
            rounds = []
            for number in range(launches):
                say(f"observe: whole runs of {step_ms:g} ms steps, {number + 1} of {launches}")
                order = SIDES if number % 2 == 0 else SIDES[::-1]
                found = {side: _run(Path(folder), work, side) for side in order}
                if len({one.loss for one in found.values()}) > 1:
                    raise RuntimeError(f"the runs trained to different losses: {found}")
                rounds.append(found)
            _rows(table, rounds)
    table.note(f"script's Python: {options.traceml}; {_version(options.traceml)}")
    table.note(
        f"each run trains {WARM_S:g} s before its steps are measured; whole command: more than the bare one"
    )
    return table


def _rows(table: Table, rounds: list[dict[str, Measured]]) -> None:
    for side in SIDES[1:]:
        pairs = [(found["bare"], found[side]) for found in rounds]
        ratios = [Ratio(b.wall_s / a.wall_s, max(a.foreign, b.foreign)) for a, b in pairs]
        values, note = undisturbed(ratios)
        found = summarise(values)
        low, high = found.interval or (math.nan, math.nan)
        used = median(b.used_s - a.used_s for a, b in pairs)
        more = median(b.command_s - a.command_s for a, b in pairs)
        table.add(
            f"{median(a.wall_s for a, _ in pairs) * 1e3:.2f} ms", side, f"{len(values)} of {len(rounds)}",
            f"{(found.median - 1) * 100:+.2f} %",
            f"{(low - 1) * 100:+.2f} to {(high - 1) * 100:+.2f} %" if found.interval else "n/a",
            f"{used * 1e6:+.1f} us", f"{more:+.1f} s",
        )  # fmt: skip
        table.note(note)


def _sized(folder: Path, python: str, step_ms: float, seconds: float) -> Work:
    output = folder / "sized.json"
    _execute(folder, [python, _LOOP, str(output), str(step_ms)])
    found = json.loads(output.read_text())
    step_s = found["step_s"]
    warm, steps = (max(round(span / step_s), 20) for span in (WARM_S, seconds))
    return Work(python, found["width"], found["batch"], warm, steps)


def _run(folder: Path, work: Work, side: str) -> Measured:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        output = Path(place) / "result.json"
        given = [str(output), *(str(value) for value in (work.width, work.batch, work.warm, work.steps))]
        command = [work.python, _LOOP, *given]
        if side == "ndd-console run":
            console = f"{sys.executable} -m ndd_console run --headless --run it --"
            command = [*console.split(), *command]
        elif side == "traceml run":
            tool = str(Path(work.python).with_name("traceml"))
            options = ("--logs-dir", "logs", "--run-name", "it", "--args")
            command = [tool, "run", _LOOP, *options, *given, "traceml"]
        watch = LoadWatch()
        begin = time.perf_counter()
        _execute(Path(place), command)
        command_s = time.perf_counter() - begin
        foreign = watch.foreign()
        body = json.loads(output.read_text())
    wall_s, used_s = (body[name] / work.steps for name in ("wall_s", "used_s"))
    return Measured(wall_s, used_s, command_s, body["loss"], foreign)


def _execute(folder: Path, command: list[str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        timeout=TIMEOUT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command[:3]} ended with status {done.returncode}: {done.stderr[-2000:]}")


def _version(python: str) -> str:
    names = ("torch", "traceml-ai")
    shown = f"*(name + ' ' + version(name) for name in {names}), sep=', '"
    code = f"from importlib.metadata import version; print({shown})"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
