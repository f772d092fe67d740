"""Plants faults into a script that knows nothing of the console: are they named first, and does the proposed fix gain?

Each case is `ndd-console run --headless -- python …`, its report, and a trial of the first proposed setting if
its ceiling is over 1.1x. The twin of each fault, and innocent scripts, must not be accused. Functions of a
known duration must be stated with that duration. Hangs are also timed, see `timed_hangs`. The last tables are
Markdown, as BENCHMARKS.md has them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Table, say
from benchmarks.engine import events_of

from ndd_engine.diagnose.view import View
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from qa.console import LIMIT_S, console, output, python_words, sets_of
from qa.trials import nulls
from qa.trials.nulls import Null

from . import quota, timed_hangs
from .observed import neighbours
from .script_cases import (
    FAULTS,
    FRAMEWORKS,
    HANGS,
    HAZARDS,
    INNOCENTS,
    NOT_SLOWING,
    SLOWING,
    WORK,
    WORK_INNOCENTS,
    Fault,
)

TITLE = "script_faults: faults in scripts that are only observed"
COLUMNS = ("case", "named first", "ceiling", "place", "trial of the fix", "", "")
FOLDER = Path(__file__).parents[1] / "scripts"
# Parts of the whole, beside the names of faults.
PARTS = ("planted", "twins", "innocent", "models", "durations", "hangs")
ONLY = (*PARTS, *(fault.name for fault in FAULTS))
TRIAL_S = 60.0  # the default of `try`
# Causes that accuse an innocent script if their ceiling is higher than this.
ACCUSED = 1.10
# How close the stated time of a function has to come to its time.
CLOSE = 0.10
# Without a setting that could remove them; their advice is in words.
WORDS = frozenset({
    "slow-function", "slowing", "user-code", "checkpoint", "evaluation", "anomaly", "straggler", "leak", "recompile",
    "not-finite", "iterator-restart", "short-epochs", "repeated-items", "logging", "worker-memory", "evaluation-memory",
    "hang", "died", "open-files", "dense-embedding", "retain-graph", "checkpoint-memory", "piling-up", "clip", "skew",
    "exchange", "neighbour-cores", "compile-cost", "quota", "sequential-loop", "large-vocabulary", "unfused-attention",
    "computed-twice", "unused-gradients",
})  # fmt: skip
INNOCENT_SCRIPTS = {"innocent.py": INNOCENTS, SLOWING: NOT_SLOWING}
FIRST, LATER, MISSED = "found first", "found later", "missed"


@dataclass
class Counts:
    """What was found of each kind. kinds: right cause -> how often which; twins, accused: of each kind."""

    kinds: dict[str, list[str]] = field(default_factory=dict)
    twins: dict[str, list[bool]] = field(default_factory=dict)
    gains: list[bool] = field(default_factory=list)
    innocent: list[bool] = field(default_factory=list)
    durations: list[bool] = field(default_factory=list)

    def kinds_table(self) -> Table:
        """One row for each cause."""
        table = Table("by cause", ("cause", FIRST, LATER, MISSED, "twins accused"), markdown=True)
        for cause in sorted({*self.kinds, *self.twins}):
            found, twins = self.kinds.get(cause, []), self.twins.get(cause, [])
            figures = (str(found.count(one)) for one in (FIRST, LATER, MISSED))
            table.add(f"`{cause}`", *figures, f"{sum(twins)} of {len(twins)}" if twins else "")
        return table

    def table(self) -> Table:
        """The figures of all cases."""
        table = Table("all cases", ("measurement", "result", "target"), markdown=True)

        def add(what: str, of: Sequence[bool], target: str) -> None:
            if of:
                table.add(what, f"{sum(of)} of {len(of)}", target)

        found = [one for each in self.kinds.values() for one in each]
        first = [one == FIRST for one in found]
        add("the planted fault is named first, with the function if there is one", first, "90 %")
        add("it is named, also later", [one != MISSED for one in found], "")
        add("twins that are accused", [one for each in self.twins.values() for one in each], "none")
        add("scripts without a fault that are accused", self.innocent, "none")
        within = f"within {CLOSE:.0%}"
        add("the stated time of a function vs. its time in usual steps", self.durations, within)
        add(f"the proposed setting gains in a trial of {TRIAL_S:.0f} s", self.gains, "all")
        return table


def measure(options: Options) -> list[Table]:
    """All cases; with --quick without trials. With --only, these parts, or these faults and their twins.

    models: the planted and the innocent models only.
    """
    parts = [part for part in PARTS if part in options.only]
    models = "models" in parts
    chosen = [one for one in FAULTS if one.name in options.only or (models and one.script == WORK)]
    if not options.only:
        parts, chosen = list(PARTS[:1] if options.smoke else PARTS), []
    elif chosen:
        parts += ["planted", "twins"]
    counts = Counts()
    faults, reasons = _possible(options.cases(chosen or FAULTS), options.python or sys.executable)
    made: dict[str, Callable[[], Table]] = {
        "planted": lambda: _all_planted(faults, reasons, options, counts),
        "twins": lambda: _twins(faults, options, counts),
        "innocent": lambda: _innocents(options, counts, INNOCENT_SCRIPTS),
        "models": lambda: _innocents(options, counts, {WORK: WORK_INNOCENTS}),
        "durations": lambda: _durations(options, counts),
        "hangs": lambda: timed_hangs.table(options),
    }
    tables = [made[part]() for part in PARTS if part in parts]
    return [*tables, *(table for table in (counts.kinds_table(), counts.table()) if table.rows)]


def _possible(faults: Sequence[Fault], python: str) -> tuple[list[Fault], list[str]]:
    """(the faults whose packages this Python has, why the others are left out)."""
    missing = []
    for package in dict.fromkeys(fault.package for fault in faults if fault.package):
        program = f"import importlib.util as u; raise SystemExit(u.find_spec({package!r}) is None)"
        if subprocess.run([python, "-c", program], check=False).returncode:
            missing.append(package)
    reasons = [
        f"skipped: {sum(fault.package == package for fault in faults)} faults; {package} is not installed for "
        f"{python}, see --python"
        for package in missing
    ]
    if any(fault.quota for fault in faults) and (why := quota.missing(quota.limited(1.0))):
        reasons.append(f"skipped: quota; {why}")
        faults = [fault for fault in faults if not fault.quota]
    return [fault for fault in faults if fault.package not in missing], reasons


def _all_planted(faults: Sequence[Fault], reasons: Sequence[str], options: Options, counts: Counts) -> Table:
    table = Table(TITLE, COLUMNS, notes=[*reasons])
    for fault in faults:
        for level in options.cases(dict.fromkeys(fault.levels)):
            row, found, gain = _planted(fault, level, options)
            table.add(*row)
            counts.kinds.setdefault(fault.causes[0], []).append(found)
            if gain is not None:
                counts.gains.append(gain)
    return table


def _twins(faults: Sequence[Fault], options: Options, counts: Counts) -> Table:
    """Level 0 of each fault: it may have other findings, but neither this cause nor a hazard."""
    table = Table("innocent twins", COLUMNS)
    for fault in faults:
        say(f"script_faults: {fault.name} 0")
        with tempfile.TemporaryDirectory(prefix="ndd-scripts-") as folder:
            found = _observed(Path(folder), fault, 0, options)
        costly = [one for one in found if (one["ceiling"] or ACCUSED) >= ACCUSED]
        own = {one["cause"] for one in costly} & {*fault.causes}
        accused = [one for one in found if one["cause"] in HAZARDS | own]
        counts.twins.setdefault(fault.causes[0], []).append(bool(accused))
        first = accused[0] if accused else found[0]
        table.add(
            f"{fault.name} 0", first["cause"], _times(first["ceiling"]), "", "", "ACCUSED" if accused else ""
        )
    return table


def _innocents(options: Options, counts: Counts, scripts: Mapping[str, Sequence[str]]) -> Table:
    table = Table("innocent models" if WORK in scripts else "innocent scripts", COLUMNS)
    for script, kind in [(name, kind) for name, kinds in scripts.items() for kind in options.cases(kinds)]:
        say(f"script_faults: innocent {kind}")
        words = (kind,) if script == "innocent.py" else (kind, "0")
        with tempfile.TemporaryDirectory(prefix="ndd-scripts-") as folder:
            found = observe(Path(folder), script, *words, seconds=_seconds(options))
        # The steps of the one that becomes slower are short: something beside the model takes time.
        # Other processes of the machine are nothing that the script does.
        own = [one for one in found if one["cause"] != "neighbour-cores"]
        costs = script != SLOWING and bool(own) and (own[0]["ceiling"] or 1.0) >= ACCUSED
        wrong = costs or any(one["cause"] in HAZARDS for one in found)
        counts.innocent.append(wrong)
        table.add(kind, found[0]["cause"], _times(found[0]["ceiling"]), "", "", "ACCUSED" if wrong else "")
    return table


def _planted(fault: Fault, level: float, options: Options) -> tuple[tuple[str, ...], str, bool | None]:
    """(row, whether it was found first or later, whether its fix gains; None if there was no trial)."""
    name = f"{fault.name} {level:g}"
    say(f"script_faults: {name}")
    with tempfile.TemporaryDirectory(prefix="ndd-scripts-") as text:
        folder = Path(text)
        findings = _observed(folder, fault, level, options)
        placed = [_is_named(fault, one) for one in findings]
        rights = [one["cause"] in fault.causes and at for one, at in zip(findings, placed, strict=True)]
        found = FIRST if rights[0] else LATER if any(rights) else MISSED
        first = findings[0]
        sets = next((change["sets"] for change in first["changes"] if change["sets"]), [])
        costs = (first["ceiling"] or ACCUSED) >= ACCUSED
        gain, shown = None, ""
        if not options.quick and rights[0] and sets and costs and first["cause"] not in WORDS:
            event = attempt(folder, sets_of(*sets))
            gain, shown = event["verdict"] == "faster", f"{' '.join(sets)}: {event['text'].partition(',')[0]}"
    place = fault.function if placed[0] else "not named"
    wrong = "" if found == FIRST else "WRONG"
    row = (name, first["cause"], _times(first["ceiling"]), place, shown, found, wrong)
    return row, found, gain


def _is_named(fault: Fault, finding: dict[str, Any]) -> bool:
    """Whether a finding has the function."""
    where = finding["title"] + "".join(change["where"] or "" for change in finding["changes"])
    return fault.function in where


def _observed(folder: Path, fault: Fault, level: float, options: Options) -> list[dict[str, Any]]:
    python = (options.python if fault.script == FRAMEWORKS else "") or sys.executable
    beside: AbstractContextManager[object] = nullcontext()
    if fault.busy:
        beside = neighbours(int(level), 0 if level else 3)
    elif fault.quota:
        beside = quota.limited(1 / level if level else 64.0)
    with beside:
        return observe(
            folder, fault.script, fault.name, f"{level:g}", ranks=fault.ranks,
            seconds=_seconds(options, fault.seconds), python=python,
        )  # fmt: skip


def _durations(options: Options, counts: Counts) -> Table:
    """Functions that take about a known time: what the profiled step says of them."""
    table = Table("the stated time of a slow function", ("function", "its time", "stated", "error", ""))
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
            counts.durations.append(abs(error) <= CLOSE)
            table.add(
                f"{kind}, {level:g} ms", f"{actual_ms:.2f} ms", f"{stated_ms:.2f} ms", f"{error:+.1%}",
                "" if abs(error) <= CLOSE else "WRONG",
            )  # fmt: skip
    table.note("its time: the mean of all steps, which the script measures")
    return table


def _seconds(options: Options, usual: float = 14.0) -> float:
    """The training of a case."""
    return options.seconds(usual, usual, least=1.5)


def observe(
    folder: Path, script: str, *arguments: str, seconds: float, ranks: int = 1, python: str = sys.executable
) -> list[dict[str, Any]]:
    """The findings of an observed run of a script."""
    words = python_words(str(FOLDER / script), *arguments, ranks=ranks, python=python)
    run = console if script == HANGS else output
    limit_s = LIMIT_S + 2 * seconds
    run(folder, "run", "--headless", "--run", "it", "--", *words, limit_s=limit_s, SCRIPT_S=f"{seconds:g}")
    found: list[dict[str, Any]] = json.loads(output(folder, "report", "it", "--json"))["findings"]
    return found


def attempt(folder: Path, change: Sequence[str], budget_s: float = TRIAL_S) -> dict[str, Any]:
    """The outcome of a trial of the run. change: options of `try`. Raises RuntimeError without one."""
    done = console(folder, "try", "it", *change, "--budget", f"{budget_s:g}", "--json")
    if not done.stdout:
        raise RuntimeError(f"the trial has no result: status {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


# Trials of a change without effect.
NULL_TITLE = "script_null: trials of a change without effect, on scripts"
NULL_S = 20.0
SWITCHED, RESTARTED = ["--set", "speed.attention=math"], ["--env", "NDD_UNUSED=1"]


def without_effect(options: Options) -> list[Table]:
    """How many intervals contain 1, and how many verdicts are false?

    `--real N` trials, spread over innocent scripts: one of four in pairs of processes (an unused variable of the
    environment), the others in one process (a setting of cuDNN, on the CPU). Every process is a new start of the
    script. With `--keep DIR` they can be interrupted and continued.
    """
    subjects = INNOCENTS[:6]

    def one(number: int) -> Null:
        subject = subjects[number % len(subjects)]
        place = folder / subject
        if not (place / "runs" / "it" / "events.jsonl").exists():
            observe(place, "innocent.py", subject, seconds=options.seconds(6.0, 6.0, least=1.0))
        restarts = number // len(subjects) % 4 == 3
        change = RESTARTED if restarts else SWITCHED
        event = attempt(place, change, options.seconds(NULL_S, NULL_S, least=1.0))
        figures = (event[name] for name in ("verdict", "ratio", "low", "high", "seconds"))
        return Null(number, subject, *figures, restarts=restarts)

    with tempfile.TemporaryDirectory(prefix="ndd-null-") as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        count = options.real or options.repeats(4, 4, 1)
        found = nulls.run(folder / "nulls.jsonl", count, True, one)
        return nulls.tables(found, f"{NULL_TITLE} ({NULL_S:g} s each)")


# Scripts that keep something for each step.
LEAKS = "leaks.py"
WAYS = (
    "local", "global", "dict", "attribute", "deque", "writer", "class", "dataset", "cache", "default", "closure",
    "hooks", "state", "numbers", "bytes", "view", "buffer",
)  # fmt: skip
LIMITED = ("none", "not-deque", "not-ring", "not-freed")
SIZES = (10e3, 100e3, 1e6, 10e6)
LEAKS_S = 40.0


def leaks(options: Options) -> list[Table]:
    """Scripts that keep something for each step, in many ways: is what holds it named, with the line that keeps it?

    Each case is `ndd-console run --headless -- python leaks.py WAY BYTES`. Those that keep a limited amount must not be
    accused at the end.
    """
    table = Table(
        "leaks: memory that grows, and what holds it",
        ("way", "bytes a step", "found", "named at", "after", ""),
    )
    named = cases = 0
    for way in options.cases(WAYS):
        for size in options.cases(SIZES):
            row, right = _held(way, size, options)
            table.add(*row)
            cases, named = cases + 1, named + right
    table.note(f"named with the line that keeps: {named} of {cases}")
    accused = 0
    for way in () if options.smoke else LIMITED:
        row, right = _held(way, 100e3, options)
        table.add(*row)
        accused += not right
    if not options.smoke:
        table.note(f"accused: {accused} of {len(LIMITED)} that keep a limited amount")
    return [table]


def _held(way: str, size: float, options: Options) -> tuple[tuple[str, ...], bool]:
    say(f"leaks: {way} {size:g}")
    with tempfile.TemporaryDirectory(prefix="ndd-leaks-") as text:
        folder = Path(text)
        found = observe(folder, LEAKS, way, f"{size:g}", seconds=options.seconds(LEAKS_S, LEAKS_S, least=1.5))
        events = events_of(RunDir(folder / "runs" / "it"))
    leaks = [one for one in found if one["cause"] == "leak"]
    where = next((change["where"] or "" for one in leaks for change in one["changes"]), "")
    line = _line(way)
    after = _after(events, f"{LEAKS}:{line}")
    right = where == f"{LEAKS}:{line}" if line else not leaks
    title = leaks[0]["title"] if leaks else "-"
    return (way, f"{size:g}", title, where, after, "" if right else "WRONG"), right


def _after(events: list[dict[str, Any]], where: str) -> str:
    """When the finding first had the line: seconds since the first window, and the growth since then."""
    sizes = [
        (one["t"], size)
        for one in events
        if one["type"] == "sample" and (size := one["host"].get("rss_bytes"))
    ]
    begin = next((one["t"] for one in events if one["type"] == "window"), 0.0)
    for one in events:
        told = one["type"] == "finding" and one["cause"] == "leak" and not one["gone"]
        if told and one["finding"]["changes"][0]["where"] == where:
            before = next((size for t, size in sizes if t >= begin), 0)
            now = next((size for t, size in sizes if t >= one["t"]), before)
            return f"{one['t'] - begin:.0f} s, {(now - before) / 2**20:.0f} MiB"
    return "-"


def _line(way: str) -> int:
    """The line of the script that keeps; 0 for a way that keeps a limited amount."""
    lines = (FOLDER / LEAKS).read_text(encoding="utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if line.endswith(f"# keeps {way}")), 0)
