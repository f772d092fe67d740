"""`python -m tests.hostile`: what a kind of hostile attempts is, how they are made and counted, and the command."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Attempt:
    """One attempt. check: raises an exception if the program falls short. name: what is attempted."""

    name: str
    check: Callable[[], None]


@dataclass(frozen=True)
class Kind:
    """A kind of attempts.

    holds: what the program has to do, for the table. full: attempts of `make hostile`. short: attempts of `make
    test`. attempts: yields attempts, endless or until they are exhausted; called with the random generator that
    decides them all and an empty folder. The same generator state has to yield the same attempts, whether the
    earlier ones were made or not.
    """

    name: str
    holds: str
    full: int
    short: int
    attempts: Callable[[random.Random, Path], Iterator[Attempt]]

    @property
    def module(self) -> str:
        """The name of its module, and on the command line."""
        return self.attempts.__module__.rpartition(".")[2]


@dataclass
class Outcome:
    """The attempts of one kind. made: their number; seconds: their duration; shortfalls: what failed, and why."""

    kind: Kind
    made: int = 0
    seconds: float = 0.0
    shortfalls: list[str] = field(default_factory=list)


def attack(
    kind: Kind,
    count: int,
    folder: Path,
    *,
    seed: int = 0,
    only: int | None = None,
) -> Outcome:
    """Make `count` attempts. only: make the attempt at this index alone.

    Prints how to make an attempt that failed again.
    """
    outcome = Outcome(kind)
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    for index, attempt in enumerate(kind.attempts(random.Random(f"{seed}/{kind.name}"), folder)):
        if index >= count:
            break
        if only is not None and index != only:
            continue
        outcome.made += 1
        try:
            attempt.check()
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001  whatever it is, the attempt failed
            again = f"python -m tests.hostile {kind.module} --seed {seed} --only {index}"
            why = f"{type(error).__name__}: {error}"[:2000]
            outcome.shortfalls.append(f"  {attempt.name}\n    {why}\n    {again}")
            print(outcome.shortfalls[-1], file=sys.stderr, flush=True)
    outcome.seconds = time.monotonic() - begin
    return outcome


def all_kinds() -> dict[str, Kind]:
    """Every kind by the name of its module: a module of this package that defines KIND."""
    modules = sorted(
        item.name for item in pkgutil.iter_modules([str(Path(__file__).parent)]) if item.name[0] != "_"
    )
    found = ((name, importlib.import_module(f"{__package__}.{name}")) for name in modules)
    return {name: module.KIND for name, module in found if hasattr(module, "KIND")}


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    lines = ["| kind | made | failed | seconds | pass criterion |", "| --- | ---: | ---: | ---: | --- |"]
    rows = [
        (each.kind.name, each.made, len(each.shortfalls), each.seconds, each.kind.holds) for each in outcomes
    ]
    totals = (sum(column) for column in list(zip(*rows, strict=True))[1:4])
    for name, made, fell, seconds, holds in (*rows, ("all", *totals, "")):
        lines.append(f"| {name} | {made:,} | {fell:,} | {seconds:.0f} | {holds} |")
    return "\n".join(lines)


def main() -> int:
    """Returns 0 if nothing failed, 1 otherwise."""
    kinds = all_kinds()
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(kinds)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="decides every attempt (default: 0)")
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
            outcomes.append(attack(kind, count, place, seed=given.seed, only=given.only))
    print(f"seed {given.seed}\n\n{table(outcomes)}")
    return int(any(each.shortfalls for each in outcomes))
