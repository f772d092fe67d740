"""Scripts as other people write them, bare and observed in turn: counts, output, time, diagnosis and a trial.

Five are those of docs/walkthroughs.md. The others are of kinds that differ in how they train: a GAN, reinforcement
learning, a graph network, LBFGS, a notebook, Hydra, subcommands, Fabric, Accelerate, Trainer, ranks. A script whose
packages are not installed is left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Table, compared, say, summarise

from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from qa.console import console, output, sets_of

TITLE = "others: scripts as other people write them, bare and observed"
COLUMNS = (
    "script", "steps", "told", "items", "told", "output", "time observed / bare", "95 % CI", "slow, by its code",
    "first finding", "ceiling", "trial",
)  # fmt: skip
FOLDER = Path(__file__).parents[1] / "scripts" / "others"
WALKTHROUGHS = Path(__file__).parents[2] / "docs" / "walkthroughs"
RUN = "it"
# Findings with a lower ceiling are not tried.
LEAST = 1.10
# Figures of seconds and of speed in the output of a script.
_TIMES = re.compile(
    r"\d\S*(?:ms|s)\b|ms/batch\s+\S+|(?:Time|Data)\s+\S+\s+\(\s*\S+\)|'\w+_(?:runtime|per_second)': \S+"
)


@dataclass(frozen=True)
class Script:
    """How a script is trained; the last word says for how long.

    slow: what it does slowly, by reading it. folder: where it is trained, below that of the scripts. needs: packages.
    program: the console script that trains it, beside the Python; "" for the Python itself.
    """

    name: str
    words: tuple[str, ...]
    slow: str
    folder: str = "."
    path: str = "."
    needs: tuple[str, ...] = ()
    program: str = ""

    @property
    def command(self) -> list[str]:
        python = Path(sys.executable)
        return [str(python.with_name(self.program) if self.program else python), *self.words]


def _walkthrough(name: str, slow: str, *arguments: str) -> Script:
    return Script(name, (f"{name}.py", *arguments), slow)


SCRIPTS = (
    _walkthrough("mnist", "decodes images while the model waits", "--epochs", "4"),
    _walkthrough("gpt", "evaluates often", "max_iters=400", "eval_iters=20", "eval_interval=100"),
    _walkthrough("lstm", "sets more threads than cores", "--epochs", "1"),
    _walkthrough("imagenet", "nothing", "--epochs", "1", "--width", "8"),
    _walkthrough("dcgan", "workers for data in memory", "--niter", "3"),
    Script("wgan", ("wgan.py", "25"), "rows one by one from memory; small operations"),
    Script("cart", ("-m", "cart", "600"), "physics in Python"),
    Script("graph", ("graph.py", "2500"), "evaluates after each step"),
    Script("waves", ("waves.py", "15"), "small operations, step by step"),
    Script("notebook", ("notebook.py", "12"), "rows by `iloc`", needs=("numpy", "pandas")),
    Script("configured", ("configured.py", "epochs=60"), "rows one by one from memory", needs=("hydra",)),
    Script(
        "tasks", ("main.py", "train", "--epochs", "40"), "numbers of words, made in Python", "tasks/work",
        "../library:../..",
    ),
    Script("fabric", ("fabric.py", "80"), "items of many small operations", needs=("lightning",)),
    Script(
        "accelerated", ("launch", "--cpu", "accelerated.py", "14"), "rows one by one from memory",
        needs=("accelerate",), program="accelerate",
    ),
    Script("trained", ("trained.py", "12"), "items made one by one in Python", needs=("transformers", "accelerate")),
    Script(
        "ranks", ("--standalone", "--nproc-per-node=2", "ranks.py", "12"), "slow items, slower on one rank",
        program="torchrun",
    ),
)  # fmt: skip
# Cases that --only knows.
ONLY = tuple(script.name for script in SCRIPTS)


@dataclass(frozen=True)
class Ran:
    """seconds: from the first to the last line that the script printed. lines: of its output, without times.

    ended: the figures of its last line.
    """

    seconds: float
    lines: tuple[str, ...]
    ended: dict[str, str]


def measure(options: Options) -> Table:
    """All scripts; with --quick one block each and no trials."""
    table = Table(TITLE, COLUMNS)
    for script in options.wanted(SCRIPTS, lambda script: script.name):
        missing = [name for name in script.needs if importlib.util.find_spec(name) is None]
        if missing:
            table.note(f"{script.name}: left out, {', '.join(missing)} is not installed")
            continue
        say(f"others: {script.name}")
        if options.smoke:
            script = replace(script, words=(*script.words[:-1], "1"))
        try:
            with tempfile.TemporaryDirectory(prefix="ndd-others-") as folder:
                row, note = _measured(script, Path(folder) / "scripts", options)
        except RuntimeError as error:  # the others are measured all the same
            row, note = (script.name,), str(error)
        say(f"others: {' | '.join(row)}")
        table.add(*row)
        if note:
            table.note(f"{script.name}: {note}")
    return table


def _measured(script: Script, copy: Path, options: Options) -> tuple[tuple[str, ...], str]:
    """(a row of the table, a note on other load)."""
    shutil.copytree(FOLDER, copy)
    for file in WALKTHROUGHS.glob("*.py"):
        shutil.copy(file, copy)
    place = copy / script.folder
    command = script.command
    bare: list[Ran] = []
    seen: list[Ran] = []

    def alone() -> float:
        bare.append(_run(script, place, command))
        return 1 / bare[-1].seconds

    def observed() -> float:
        shutil.rmtree(place / "runs", ignore_errors=True)
        words = (sys.executable, "-m", "ndd_console", "run", "--headless", "--run", RUN, "--", *command)
        seen.append(_run(script, place, words))
        return 1 / seen[-1].seconds

    pairs = options.pairs or options.repeats(4, 2, least=1)
    times = compared(alone, observed, pairs, options.seconds(240.0, 60.0))
    ended = bare[0].ended or _run(script, place, [sys.executable, "ended.py", *script.words]).ended
    told = load_state(RunDir(place / "runs" / RUN)).snapshot()
    spread = summarise(times.values)
    first = json.loads(output(place, "report", RUN, "--json"))["findings"][0]
    row = (
        script.name, _count(ended, "steps"), f"{told.step:,}", _count(ended, "items"), f"{told.items:,}",
        _alike(bare, seen),
        f"{1 / spread.median:.3f}", f"{1 / spread.high:.3f} to {1 / spread.low:.3f}", script.slow, first["cause"],
        "" if first["ceiling"] is None else f"{first['ceiling']:.2f}x",
        "" if options.quick else _trial(script, place, first),
    )  # fmt: skip
    return row, times.note


def _run(script: Script, place: Path, command: Sequence[str]) -> Ran:
    """Run a command. Raises RuntimeError if it fails."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=_environment(script),
        )  # fmt: skip
        assert process.stdout is not None
        lines, first, last = [], 0.0, 0.0
        for line in process.stdout:
            last = time.perf_counter()
            first = first or last
            lines.append(line.rstrip())
        if process.wait():
            errors.seek(0)
            raise RuntimeError(f"{script.name}: status {process.returncode}: {errors.read()[-2000:]}")
    ended = next((line for line in reversed(lines) if line.startswith("ENDED ")), "")
    return Ran(
        last - first, tuple(_TIMES.sub("", line) for line in lines), dict(re.findall(r"(\w+)=(\S+)", ended))
    )


def _environment(script: Script) -> dict[str, str]:
    # Unbuffered, so that lines arrive when they are printed.
    return {**os.environ, "PYTHONPATH": script.path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def _count(ended: dict[str, str], name: str) -> str:
    return f"{int(ended[name]):,}" if int(ended.get(name, 0)) else "n/a"


def _alike(bare: Sequence[Ran], seen: Sequence[Ran]) -> str:
    """Whether the observed runs print what the bare ones do, which may differ themselves."""
    if len({ran.lines for ran in bare}) > 1:
        return "bare runs differ"
    return "same" if {ran.lines for ran in seen} == {bare[0].lines} else "DIFFERENT"


def _trial(script: Script, place: Path, finding: dict[str, Any]) -> str:
    """The verdict on the first change that the finding offers; "" without one."""
    sets = next((change["sets"] for change in finding["changes"] if change["sets"]), [])
    if not sets or (finding["ceiling"] or 1.0) < LEAST:
        return ""
    words = ("try", RUN, *sets_of(*sets), "--json")
    done = console(place, *words, PYTHONPATH=script.path, OMP_NUM_THREADS="1")
    if done.returncode not in (0, 1):
        return f"{' '.join(sets)}: status {done.returncode}: {done.stderr.strip()[-120:]}"
    event = json.loads(done.stdout)
    return f"{' '.join(sets)}: {event['text'].partition(',')[0]}"
