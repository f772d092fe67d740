"""Step times of real runs, for `benchmarks.trend`: what the observer has recorded of five scripts without a fault.

`python -m benchmarks step_times` records them anew, into `step_times.json` beside this file.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.common import Options, Table, machine, say
from benchmarks.engine import events_of

from ndd_engine.record.rundir import RunDir

from .script_cases import SLOWING
from .script_faults import observe

FILE = Path(__file__).with_suffix(".json")
TITLE = "step_times: step times of real runs"
# Of a run, and its first windows, in which it warms up.
SECONDS, WARM = 60.0, 3
SCRIPTS = {
    "small": (SLOWING, "hooks", "0"),
    "recurrent": ("innocent.py", "recurrent"),
    "convolutions": ("innocent.py", "convolutions"),
    "transformer": ("innocent.py", "transformer"),
    "accumulates": ("innocent.py", "accumulates"),
}


@cache
def recorded() -> dict[str, list[float]]:
    """The median step time of each window, in nanoseconds, by the name of the script."""
    runs: dict[str, list[int]] = json.loads(FILE.read_text("utf-8"))["microseconds"]
    return {name: [us * 1e3 for us in values] for name, values in runs.items()}


def measure(options: Options) -> Table:
    """Record each script; with --smoke nothing is written."""
    table = Table(TITLE, ("script", "windows", "step"))
    found: dict[str, list[int]] = {}
    for name in options.cases(SCRIPTS):
        script, *words = SCRIPTS[name]
        say(f"step_times: {name}")
        with TemporaryDirectory(prefix="ndd-step-times-") as folder:
            observe(Path(folder), script, *words, seconds=options.seconds(SECONDS, SECONDS / 4, least=1.5))
            events = events_of(RunDir(Path(folder) / "runs" / "it"))
        windows = [
            one for one in events if one["type"] == "window" and one["step_p50_ns"] and not one["profiled"]
        ]
        found[name] = [round(one["step_p50_ns"] / 1e3) for one in windows[WARM:]]
        middle = f"{median(found[name]) / 1e3:.2g} ms" if found[name] else "n/a"
        table.add(name, str(len(found[name])), middle)
    if not options.smoke:
        FILE.write_text(json.dumps({"machine": machine(), "microseconds": found}) + "\n", "utf-8")
    return table
