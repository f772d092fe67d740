"""`python -m benchmarks.faults`: plant faults, diagnose them, measure the fixes, and print tables."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from benchmarks.common import Environment, add_output, report, say, write

from ndd_engine.hardware.detect import detect
from qa.trials import nulls

from . import matrix, quota
from .cases import chosen
from .faulty import GPU_CASES
from .innocent import all_cases
from .suite import NULL_TITLE, Suite, without_effect

KEPT = Path(tempfile.gettempdir()) / "ndd-faults"


def main() -> int:
    """Run the suite. Returns 0 regardless of the figures, 2 for a mistake in the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="FAULT[:SEVERITY]",
        help="only these cases: a fault, a fault and severity, a kind (fault, innocent, healthy) or the name of a case",
    )  # fmt: skip
    parser.add_argument(
        "--null", type=int, metavar="N", help="run N A/A trials instead, of a change without effect"
    )
    parser.add_argument(
        "--resume", action="store_true", help="skip cases that already have an outcome in --keep"
    )
    parser.add_argument(
        "--keep", type=Path, default=KEPT, metavar="DIR",
        help=f"folder for outcomes, records and snapshots (default: {KEPT})",
    )  # fmt: skip
    add_output(parser, "faults")
    given = parser.parse_args()
    if given.null is not None and given.null < 1:
        parser.error("--null has to be at least 1")
    gpu = detect(use_torch=False).device != "cpu"
    if not gpu:
        say(f"no CUDA GPU: {len(GPU_CASES)} cases that need one are left out")
    try:
        cases = chosen(all_cases(gpu), given.only)
    except ValueError as error:
        parser.error(str(error))
    limited = [case for case in cases if case.memory_bytes]
    if limited and (why := quota.missing(quota.memory_group(limited[0].memory_bytes))):
        say(f"{len(limited)} cases with a memory limit are left out: {why}")
        cases = [case for case in cases if case not in limited]
    environment = Environment(shlex.join(["python", "-m", "benchmarks.faults", *sys.argv[1:]]))
    keep = given.keep.absolute()
    if given.null is not None:
        found = [nulls.table(without_effect(keep, given.null, given.resume), NULL_TITLE)]
    else:
        found = matrix.tables(Suite(keep).run(cases, given.resume))
    text = report(found, environment)
    print(text, flush=True)
    if given.output is not None:
        write(text, given.output, "null" if given.null is not None else "faults")
    return 0


if __name__ == "__main__":
    sys.exit(main())
