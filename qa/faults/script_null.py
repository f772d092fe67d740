"""Trials of a change without effect on scripts: how many intervals contain 1, and how many verdicts are false?

`--real N` trials, spread over the innocent scripts: one of four in pairs of processes (an unused variable of the
environment), the others in one process (a setting of cuDNN, on the CPU). Every process is a new start of the script.
With `--keep DIR` they can be interrupted and continued.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import Options, Table

from qa.trials import nulls
from qa.trials.nulls import Null

from .script_cases import INNOCENTS
from .script_faults import attempt, observe

TITLE = "script_null: trials of a change without effect, on scripts"
SUBJECTS = INNOCENTS[:6]
BUDGET_S = 20.0
SWITCHED, RESTARTED = ["--set", "speed.attention=math"], ["--env", "NDD_UNUSED=1"]


def measure(options: Options) -> list[Table]:
    """All trials."""
    with tempfile.TemporaryDirectory(prefix="ndd-null-") as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        count = options.real or options.repeats(4, 4, 1)
        found = nulls.run(folder / "nulls.jsonl", count, True, lambda number: _trial(folder, number, options))
        return nulls.tables(found, f"{TITLE} ({BUDGET_S:g} s each)")


def _trial(folder: Path, number: int, options: Options) -> Null:
    subject = SUBJECTS[number % len(SUBJECTS)]
    place = folder / subject
    if not (place / "runs" / "it" / "events.jsonl").exists():
        place.mkdir(exist_ok=True)
        observe(place, "innocent.py", subject, seconds=options.seconds(6.0, 6.0, least=1.0))
    restarts = number // len(SUBJECTS) % 4 == 3
    change = RESTARTED if restarts else SWITCHED
    event = attempt(place, change, options.seconds(BUDGET_S, BUDGET_S, least=1.0))
    figures = (event[name] for name in ("verdict", "ratio", "low", "high", "seconds"))
    return Null(number, subject, *figures, restarts=restarts)
