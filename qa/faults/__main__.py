"""`python -m benchmarks.faults`: plant faults, diagnose them, measure the fixes, and print tables."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from benchmarks.common import Environment, Table, add_output, report, say, write

from ndd_engine.config.workload_sections import WORKLOADS
from ndd_engine.hardware.detect import detect
from qa.trials.nulls import table

from . import matrix, null
from .cases import OWN, chosen
from .faulty import GPU_CASES
from .innocent import all_cases
from .suite import FIX_S, Suite

KEPT = Path(tempfile.gettempdir()) / "ndd-faults"


def main() -> int:
    """Run the suite. Returns 0 regardless of the figures, 2 for a mistake in the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="FAULT[:SEVERITY]",
        help="only these cases: a fault, a fault and severity, a kind (fault, innocent, healthy) or the name of a case",
    )  # fmt: skip
    parser.add_argument("--workload", action="append", default=[], choices=(*WORKLOADS, OWN))
    parser.add_argument(
        "--no-trials", action="store_true", help="diagnose only, without measuring fixes and costs"
    )
    parser.add_argument(
        "--null", type=int, metavar="N", help="run N A/A trials instead, of a change without effect"
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help=f"seconds per trial (default: {FIX_S:g}; with --null {null.BUDGET_S:g})",
    )
    parser.add_argument(
        "--resume", action="store_true", help="skip cases that already have an outcome in --keep"
    )
    parser.add_argument(
        "--keep", type=Path, default=KEPT, metavar="DIR",
        help=f"folder for outcomes, records and snapshots (default: {KEPT})",
    )  # fmt: skip
    parser.add_argument(
        "--tables", action="store_true", help="only print the tables of the outcomes in --keep"
    )
    parser.add_argument("--list", action="store_true", help="only print the cases")
    add_output(parser, "faults")
    given = parser.parse_args()
    if given.null is not None and given.null < 1:
        parser.error("--null has to be at least 1")
    gpu = detect(use_torch=False).device != "cpu"
    if not gpu:
        say(f"no CUDA GPU: {len(GPU_CASES)} cases that need one are left out")
    try:
        cases = chosen(all_cases(gpu), given.only, given.workload)
    except ValueError as error:
        parser.error(str(error))
    if given.list:
        for case in cases:
            print(f"{case.name:42} {case.planted}")
        return 0
    environment = Environment(shlex.join(["python", "-m", "benchmarks.faults", *sys.argv[1:]]))
    found: list[Table]
    keep = given.keep.absolute()
    if given.null is not None:
        nulls = null.run(keep, given.null, given.resume, given.budget or null.BUDGET_S)
        found = [table(nulls, null.TITLE)]
    else:
        suite = Suite(keep, not given.no_trials, given.budget or FIX_S)
        if given.tables:
            names = {case.name for case in cases}
            outcomes = [outcome for outcome in suite.kept() if outcome.case.name in names]
        else:
            outcomes = suite.run(cases, given.resume)
        found = matrix.tables(outcomes)
    text = report(found, environment)
    print(text, flush=True)
    if given.output is not None:
        write(text, given.output, "null" if given.null is not None else "faults")
    return 0


if __name__ == "__main__":
    sys.exit(main())
