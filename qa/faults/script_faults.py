"""Plants faults into a script that knows nothing of the console: are they named first, and does the proposed fix gain?

Each case is `ndd-console run --headless -- python …`, its report, and a trial of the first proposed setting if
its ceiling is over 1.1x. Innocent scripts must not be accused. Functions of a
known duration must be stated with that duration.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Table, say

from ndd_engine.diagnose import ENDINGS
from ndd_engine.diagnose.view import View
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from qa.console import console, output, sets_of

TITLE = "script_faults: faults in scripts that are only observed"
COLUMNS = ("case", "named first", "ceiling", "place", "trial of the fix", "")
FOLDER = Path(__file__).parents[1] / "scripts"
TRIAL_S = 60.0  # the default of `try`
# Causes that accuse an innocent script if their ceiling is higher than this.
ACCUSED = 1.10
# Causes that accuse it in any place, since they cost no time.
HAZARDS = frozenset({
    *ENDINGS, "leak", "worker-memory", "evaluation-memory", "near-limit", "repeated-items", "retain-graph", "anomaly",
    "slowing",
})  # fmt: skip
# How close the stated time of a function has to come to its time.
CLOSE = 0.10
# Without a setting that could remove them; their advice is in words.
WORDS = frozenset({
    "slow-function", "slowing", "user-code", "checkpoint", "evaluation", "anomaly", "straggler", "leak", "recompile",
    "not-finite", "iterator-restart", "short-epochs", "repeated-items", "logging", "worker-memory", "evaluation-memory",
    "hang", "died", "open-files", "dense-embedding", "retain-graph",
})  # fmt: skip
HANGS = "hangs.py"
INNOCENTS = (
    "dense", "convolutions", "transformer", "recurrent", "accumulates", "worker", "generator", "evaluates", "scales",
    "stream", "one-batch", "logs", "tokens",
)  # fmt: skip
# Innocent kinds of the script that becomes slower.
NOT_SLOWING = ("bounded", "larger-batches", "evaluates", "detached")


@dataclass(frozen=True)
class Fault:
    """causes: the right ones. function: that a finding must name, "" if there is none. levels: low and high.

    ranks: of the script, under torchrun if there are several. script: in which it is planted; hangs.py may fail.
    """

    name: str
    causes: tuple[str, ...]
    levels: tuple[float, float]
    function: str = ""
    ranks: int = 1
    script: str = "planted.py"


FAULTS = (
    Fault("slow-item", ("data-wait",), (2, 10), "work, called by Items.__getitem__"),
    Fault("slow-storage", ("data-wait",), (2, 10), "__getitem__"),
    Fault("slow-collate", ("data-wait",), (2, 10), "work, called by collate"),
    Fault("slow-batch", ("data-wait", "slow-function"), (2, 10), "work, called by get_batch"),
    Fault("slow-generator", ("slow-function",), (2, 10), "work, called by tokenize"),
    Fault("slow-function", ("slow-function",), (2, 10), "work, called by schedule"),
    Fault("log-norms", ("user-code", "slow-function"), (2, 10), "log_norms"),
    Fault("many-workers", ("many-workers", "data-wait"), (1, 1)),
    Fault("worker-restart", ("worker-restart",), (2, 10)),
    Fault("iterator-restart", ("iterator-restart",), (2, 10), "planted.py"),
    Fault("short-epochs", ("short-epochs",), (2, 10)),
    Fault("repeated-items", ("repeated-items",), (2, 4), "Stream.__iter__"),
    Fault("leak", ("leak",), (0.5, 1)),
    Fault("not-finite", ("not-finite",), (1, 4), "input x"),
    Fault("python-objects", ("worker-memory",), (4, 10)),
    Fault("evaluation-keeps", ("evaluation-memory", "evaluation"), (10, 40)),
    Fault("recompile", ("recompile",), (1, 1), "weighed"),
    Fault("dense-embedding", ("dense-embedding",), (2, 10), "WithIds.table"),
    Fault("denormals", ("denormals",), (2, 10)),
    Fault("retain-graph", ("retain-graph",), (1, 1), "planted.py"),
    Fault("optimizer-loop", ("optimizer",), (2, 8)),
    Fault("checkpoint", ("checkpoint",), (2, 10)),
    Fault("evaluate", ("evaluation",), (2, 10)),
    Fault("evaluate-joins", ("evaluation",), (4, 16), "in evaluate"),
    Fault("logging", ("logging",), (2, 10), "Board.add_scalar"),
    Fault("threads", ("oversubscribed",), (4, 16)),
    Fault("garbage", ("gc",), (2, 10)),
    Fault("anomaly", ("anomaly",), (1, 1)),
    Fault("straggler", ("straggler",), (5, 20), "augment", ranks=2),
    *(
        Fault(name, ("slowing",), levels, function, script="slowing.py")
        for name, levels, function in (
            ("graph", (1, 1), "graphs of at least"),
            ("hooks", (10, 40), "hooks of block.2"),
            ("sorts", (10, 40), "median_loss"),
            ("concatenates", (20, 60), "Net.recall"),
            ("rewrites", (10, 40), "save_history"),
            ("handlers", (10, 40), "handlers of the logger train"),
            ("parameters", (20, 60), "parameters in SGD"),
        )
    ),
    Fault("fork-threads", ("hang",), (1, 2), "__getitem__", script=HANGS),
    Fault("fork-lock", ("hang",), (1, 2), "__getitem__", script=HANGS),
    Fault("full-queue", ("hang",), (1, 2), "aside", script=HANGS),
    Fault("dead-process", ("hang",), (1, 2), "aside", script=HANGS),
    Fault("storage", ("hang",), (1, 2), "__getitem__", script=HANGS),
    Fault("collective", ("hang",), (1, 2), "main", ranks=2, script=HANGS),
    Fault("killed", ("died",), (20, 60), script=HANGS),
    Fault("crashed", ("died",), (20, 60), script=HANGS),
    Fault("exits", ("died",), (20, 60), script=HANGS),
    Fault("kept-tensors", ("open-files",), (1, 2), "hangs.py", script=HANGS),
    Fault("kept-files", ("open-files",), (1, 10), "hangs.py", script=HANGS),
)


def measure(options: Options) -> list[Table]:
    """All cases; with --quick without trials."""
    planted, innocent = Table(TITLE, COLUMNS), Table("innocent scripts", COLUMNS)
    right = done = gained = tried = 0
    for fault in options.cases(FAULTS):
        for level in options.cases(dict.fromkeys(fault.levels)):
            row, is_right, gain = _planted(fault, level, options)
            planted.add(*row)
            done, right = done + 1, right + is_right
            if gain is not None:
                tried, gained = tried + 1, gained + gain
    planted.note(f"named first: {right} of {done}; the proposed setting gains: {gained} of {tried}")
    if options.smoke:
        return [planted]
    accused, kinds = 0, options.cases(INNOCENTS)
    for kind in kinds:
        say(f"script_faults: innocent {kind}")
        with tempfile.TemporaryDirectory(prefix="ndd-scripts-") as folder:
            first, *others = observe(Path(folder), "innocent.py", kind, seconds=_seconds(options))
        wrong = (first["ceiling"] or 1.0) >= ACCUSED or any(
            each["cause"] in HAZARDS for each in (first, *others)
        )
        accused += wrong
        innocent.add(kind, first["cause"], _times(first["ceiling"]), "", "", "ACCUSED" if wrong else "")
    for kind in (steady := options.cases(NOT_SLOWING)):
        say(f"script_faults: innocent {kind}")
        with tempfile.TemporaryDirectory(prefix="ndd-scripts-") as folder:
            causes = [
                item["cause"]
                for item in observe(Path(folder), "slowing.py", kind, "0", seconds=_seconds(options))
            ]
        wrong = "slowing" in causes
        accused += wrong
        innocent.add(f"slowing.py {kind}", causes[0], "", "", "", "ACCUSED" if wrong else "")
    twins = options.cases([fault for fault in FAULTS if fault.script == HANGS])
    for fault in twins:
        say(f"script_faults: innocent {fault.name}")
        with tempfile.TemporaryDirectory(prefix="ndd-scripts-") as folder:
            each = observe(Path(folder), HANGS, fault.name, "0", ranks=fault.ranks, seconds=_seconds(options))
        wrong = any(one["cause"] in ENDINGS for one in each)
        accused += wrong
        innocent.add(f"{fault.name} 0", each[0]["cause"], "", "", "", "ACCUSED" if wrong else "")
    innocent.note(f"accused: {accused} of {len(kinds) + len(steady) + len(twins)}")
    return [planted, innocent, _durations(options)]


def _planted(fault: Fault, level: float, options: Options) -> tuple[tuple[str, ...], bool, bool | None]:
    """(row, whether it was named, whether its fix gains; None if there was no trial)."""
    name = f"{fault.name} {level:g}"
    say(f"script_faults: {name}")
    with tempfile.TemporaryDirectory(prefix="ndd-scripts-") as text:
        folder = Path(text)
        found = observe(
            folder, fault.script, fault.name, f"{level:g}", ranks=fault.ranks, seconds=_seconds(options)
        )[0]
        where = found["title"] + "".join(change["where"] or "" for change in found["changes"])
        placed = not fault.function or fault.function in where
        right = found["cause"] in fault.causes and placed
        sets = next((change["sets"] for change in found["changes"] if change["sets"]), [])
        costs = (found["ceiling"] or ACCUSED) >= ACCUSED
        gain, shown = None, ""
        if not options.quick and right and sets and costs and found["cause"] not in WORDS:
            event = attempt(folder, sets_of(*sets))
            gain, shown = event["verdict"] == "faster", f"{' '.join(sets)}: {event['text'].partition(',')[0]}"
    place = fault.function if placed else "not named"
    row = (name, found["cause"], _times(found["ceiling"]), place, shown, "" if right else "WRONG")
    return row, right, gain


def _durations(options: Options) -> Table:
    """Functions that take about a known time: what the profiled step says of them."""
    table = Table("the stated time of a slow function", ("function", "its time", "stated", "error", ""))
    right = done = 0
    for kind in options.cases(("loop", "calls", "builtins")):
        for level in options.cases((1.0, 3.0)):
            say(f"script_faults: duration {kind} {level:g} ms")
            with tempfile.TemporaryDirectory(prefix="ndd-scripts-") as text:
                folder = Path(text)
                observe(folder, "fixed_work.py", kind, f"{level:g}", seconds=_seconds(options))
                actual_ms = float((folder / "milliseconds").read_text())
                view = View(load_state(RunDir(folder / "runs" / "it")).snapshot())
                stated = (item.ns for item in view.functions if item.file.endswith("fixed_work.py"))
                stated_ms = sum(stated) / 1e6
            error = stated_ms / actual_ms - 1
            done, right = done + 1, right + (abs(error) <= CLOSE)
            table.add(
                f"{kind}, {level:g} ms", f"{actual_ms:.2f} ms", f"{stated_ms:.2f} ms", f"{error:+.1%}",
                "" if abs(error) <= CLOSE else "WRONG",
            )  # fmt: skip
    table.note(
        f"within {CLOSE:.0%}: {right} of {done}; its time: the mean of all steps, which the script measures"
    )
    return table


def _seconds(options: Options) -> float:
    """The training of a case."""
    return options.seconds(14.0, 14.0, least=1.5)


def observe(
    folder: Path, script: str, *arguments: str, seconds: float, ranks: int = 1
) -> list[dict[str, Any]]:
    """The findings of an observed run of a script."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    words = [sys.executable, *(launcher if ranks > 1 else ()), str(FOLDER / script), *arguments]
    run = console if script == HANGS else output
    run(folder, "run", "--headless", "--run", "it", "--", *words, SCRIPT_S=f"{seconds:g}")
    found: list[dict[str, Any]] = json.loads(output(folder, "report", "it", "--json"))["findings"]
    return found


def attempt(folder: Path, change: Sequence[str], budget_s: float = TRIAL_S) -> dict[str, Any]:
    """The outcome of a trial of the run. change: options of `try`."""
    words = ("try", "it", *change, "--budget", f"{budget_s:g}", "--json")
    found: dict[str, Any] = json.loads(console(folder, *words).stdout)
    return found


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"
