"""`python -m tests.same [NAME…]`: run cases bare and observed, and tell whether they are the same."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.same.cases import Case, differences, lacks, parse, run_case


def chosen(cases: list[Case], names: list[str]) -> list[Case]:
    """The cases of these names or kinds; all without one. Raises ValueError."""
    known = {word for case in cases for word in (case.name, case.kind, str(case))}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no case {', '.join(unknown)}")
    return [case for case in cases if not names or {case.name, case.kind, str(case)} & set(names)]


def compare(case: Case, python: str, observed: bool) -> tuple[str, list[str]]:
    """Run a case twice, the second time observed or not: (why it cannot run or "", what differs)."""
    if reason := lacks(case, python):
        return reason, []
    with tempfile.TemporaryDirectory(prefix="same-") as folder:
        bare, other = (run_case(case, one, Path(folder), python) for one in (False, observed))
    found = differences(case, bare, other)
    return "", [line for line in found if observed or not line.startswith("steps: ")]


def main() -> int:
    """Returns 0 if all are the same, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.same", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases or kinds (default: all)")
    parser.add_argument("--python", default=sys.executable, help="of the scripts (default: this one)")
    parser.add_argument(
        "--bare", action="store_true", help="compare two bare runs: is the case itself the same?"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time (default: cores)"
    )
    given = parser.parse_args()
    given.python = os.path.abspath(given.python)  # noqa: PTH100  a link to another Python stays one
    try:
        cases = chosen(parse(), given.names)
    except ValueError as error:
        parser.error(str(error))
    same = skipped = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        results = pool.map(partial(compare, python=given.python, observed=not given.bare), cases)
        for case, (reason, found) in zip(cases, results, strict=True):
            if reason:
                skipped += 1
                print("skipped  ", case, f"({reason})", flush=True)
                continue
            same += not found
            indented = "".join(f"\n            {line}" for line in found)
            print("DIFFERENT" if found else "same     ", f"{case}{indented}", flush=True)
    print(f"{same} of {len(cases) - skipped} are the same" + (f", {skipped} skipped" if skipped else ""))
    return int(same + skipped < len(cases))


if __name__ == "__main__":
    sys.exit(main())
