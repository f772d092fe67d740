"""What a kind of hostile attempts is, and how its attempts are made and counted."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
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
    budget_s: float | None = None,
    only: int | None = None,
) -> Outcome:
    """Make `count` attempts, or as many as `budget_s` seconds allow. only: make the attempt at this index alone.

    Prints how to make an attempt that failed again.
    """
    outcome = Outcome(kind)
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    for index, attempt in enumerate(kind.attempts(random.Random(f"{seed}/{kind.name}"), folder)):
        if index >= count or (budget_s is not None and time.monotonic() - begin >= budget_s):
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
