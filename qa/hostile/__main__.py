"""`python -m tests.hostile`: make hostile attempts of every kind and print a table."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import qa.hostile as package
from qa.hostile.attempts import Kind, Outcome, attack


def all_kinds() -> dict[str, Kind]:
    """Every kind by the name of its module: a module of this package that defines KIND."""
    modules = sorted(item.name for item in pkgutil.iter_modules(package.__path__) if item.name[0] != "_")
    found = ((name, importlib.import_module(f"{package.__name__}.{name}")) for name in modules)
    return {name: module.KIND for name, module in found if hasattr(module, "KIND")}


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    lines = ["| kind | made | failed | seconds | pass criterion |", "| --- | ---: | ---: | ---: | --- |"]
    for each in outcomes:
        figures = f"{each.made:,} | {len(each.shortfalls):,} | {each.seconds:.0f}"
        lines.append(f"| {each.kind.name} | {figures} | {each.kind.holds} |")
    made, fell = sum(each.made for each in outcomes), sum(len(each.shortfalls) for each in outcomes)
    lines.append(f"| all | {made:,} | {fell:,} | {sum(each.seconds for each in outcomes):.0f} | |")
    return "\n".join(lines)


def main() -> int:
    """Returns 0 if nothing failed, 1 otherwise."""
    kinds = all_kinds()
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(kinds)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="decides every attempt (default: 0)")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds per kind (default: no limit)")
    parser.add_argument(
        "--count", type=int, metavar="N", help="attempts per kind (default: those of the kind)"
    )
    parser.add_argument("--only", type=int, metavar="INDEX", help="make only this attempt of one kind")
    given = parser.parse_args()
    if unknown := [name for name in given.kinds if name not in kinds]:
        parser.error(f"there is no kind {', '.join(unknown)}; kinds: {', '.join(kinds)}")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="ndd-hostile-") as folder:
        for name in given.kinds or kinds:
            kind = kinds[name]
            print(f"{name}: {kind.name}", file=sys.stderr, flush=True)
            count = kind.full if given.count is None else given.count
            if given.only is not None:
                count = given.only + 1
            place = Path(folder) / name
            outcomes.append(
                attack(kind, count, place, seed=given.seed, budget_s=given.budget, only=given.only)
            )
    print(f"seed {given.seed}\n\n{table(outcomes)}")
    return int(any(each.shortfalls for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
