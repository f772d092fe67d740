"""Trials of a change without effect on scripts: how many intervals contain 1, and how many verdicts are false?

`--real N` trials, spread over the innocent scripts: one of four in pairs of processes (an unused variable of the
environment), the others in one process (a setting of cuDNN, on the CPU). Every process is a new start of the script.
With `--keep DIR` they can be interrupted and continued.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Table, say

from .script_faults import FOLDER, INNOCENTS, attempt, observe

TITLE = "script_null: trials of a change without effect, on scripts"
SUBJECTS = INNOCENTS[:6]
BUDGET_S = 20.0
SWITCHED, RESTARTED = ["--set", "speed.cudnn_benchmark=true"], ["--env", "NDD_UNUSED=1"]
FALSE = ("faster", "slower")


def measure(options: Options) -> list[Table]:
    """All trials."""
    with tempfile.TemporaryDirectory(prefix="ndd-null-") as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        record = folder / "nulls.jsonl"
        for number in range(len(_kept(record)), options.real or options.repeats(4, 4)):
            found = _trial(folder, number, options)
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            say(
                f"script_null: {number + 1} {found['subject']} {found['verdict']} {found['low']} to {found['high']}"
            )
        return [_table(_kept(record))]


def _kept(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text("utf-8").splitlines()] if record.exists() else []


def _trial(folder: Path, number: int, options: Options) -> dict[str, Any]:
    subject = SUBJECTS[number % len(SUBJECTS)]
    place = folder / subject
    if not (place / "runs" / "it" / "events.jsonl").exists():
        place.mkdir(exist_ok=True)
        observe(place, "innocent.py", subject, seconds=options.seconds(6.0, 6.0, least=4.0))
    restarts = number // len(SUBJECTS) % 4 == 3
    event = attempt(
        place, RESTARTED if restarts else SWITCHED, options.seconds(BUDGET_S, BUDGET_S, least=3.0)
    )
    wanted = {key: event[key] for key in ("verdict", "ratio", "low", "high", "seconds", "pairs", "in_effect")}
    return {"subject": subject, "way": "pairs" if restarts else "one process", **wanted}


def _table(nulls: Sequence[dict[str, Any]]) -> Table:
    columns = ("subject", "way", "trials", "no difference", "inconclusive", "faster or slower", "contain 1")
    table = Table(f"{TITLE} ({BUDGET_S:g} s each, {FOLDER.name}/innocent.py)", columns)
    keys = list(dict.fromkeys((null["subject"], null["way"]) for null in nulls))
    groups = [(*key, [null for null in nulls if (null["subject"], null["way"]) == key]) for key in keys]
    for subject, way, some in [*groups, ("all", "", list(nulls))]:
        known = [null for null in some if null["low"] is not None]
        inside = sum(null["low"] <= 1 <= null["high"] for null in known)
        verdicts = [null["verdict"] for null in some]
        table.add(
            subject, way, str(len(some)), str(verdicts.count("no difference")), str(verdicts.count("inconclusive")),
            str(sum(verdict in FALSE for verdict in verdicts)), f"{inside} of {len(known)}",
        )  # fmt: skip
    return table
