"""The cases of the suite: runs with a planted fault, or with something that only looks like one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ndd_engine.hardware.gpus import detect_host, usable_threads

Kind = Literal["fault", "innocent", "healthy"]
OWN = "own"
# The module of the suite's own workloads.
MODULE = Path(__file__).parents[1] / "scripts" / "planted_models.py"
# The number of workers and threads in a case depends on this machine.
CORES = usable_threads(detect_host())
SEVERITIES = ("low", "middle", "high")

# Steps only, in a run long enough for every change to pay off, so that nothing but the planted fault costs time.
PLAIN = (
    "run.epochs=1000000",
    "run.device=cpu",
    "evaluate.every_epochs=0",
    "evaluate.at_end=false",
    "checkpoint.every_epochs=0",
    "checkpoint.at_end=false",
)


@dataclass(frozen=True)
class Case:
    """One run and its expected diagnosis.

    fault: the cause of a planted fault, what an innocent looks like, or the workload of a healthy run. planted: a
    description. sets: the configuration with the fault. cure: settings that remove it (code changes are options of your
    own workload), () if settings cannot. suspects: causes that must not be reported for an innocent. busy, asleep:
    number of processes alongside the run. seconds: of training before the diagnosis. trial_s: minimum for a trial, if
    sides take long to start. to_end: diagnose after the end of the run. proved: whether the cure increases speed, which
    a trial can measure. place: that the finding has to name, "" if there is none. fails: whether the fault ends the
    run. variant: tells cases of the same fault and workload apart. memory_bytes: the limit of the control group in
    which it runs, 0 without one.
    """

    kind: Kind
    fault: str
    severity: str
    workload: str
    planted: str
    sets: tuple[str, ...]
    cure: tuple[str, ...] = ()
    factory: str = ""
    suspects: tuple[str, ...] = ()
    busy: int = 0
    asleep: int = 0
    seconds: float = 8.0
    trial_s: float = 0.0
    to_end: bool = False
    proved: bool = True
    place: str = ""
    fails: bool = False
    variant: str = ""
    memory_bytes: int = 0

    @property
    def truth(self) -> str:
        """The cause that is right."""
        return self.fault if self.kind == "fault" else "healthy"

    @property
    def name(self) -> str:
        """Unique, and usable as a file name."""
        severity = f"-{self.severity}" if self.severity else ""
        variant = f"-{self.variant}" if self.variant else ""
        return f"{self.kind}-{self.fault}{severity}-{self.workload}{variant}"

    @property
    def workload_name(self) -> str:
        """The value of workload.name."""
        return f"{MODULE.stem}:{self.factory}" if self.workload == OWN else self.workload

    @property
    def all_sets(self) -> tuple[str, ...]:
        """The whole configuration with the fault."""
        place = (f'workload.path=["{MODULE.parent}"]',) if self.workload == OWN else ()
        return only_last((*PLAIN, *place, *self.sets))


def only_last(sets: Iterable[str]) -> tuple[str, ...]:
    """Each key once, with its last value, in the order of first occurrence."""
    values: dict[str, str] = {}
    for item in sets:
        key, _, value = item.partition("=")
        values[key] = value
    return tuple(f"{key}={value}" for key, value in values.items())


def three(
    fault: str,
    planted: str,
    plants: Sequence[tuple[str, Sequence[str]]],
    *,
    sets: Sequence[str] = (),
    cure: Sequence[str] = (),
    busy: Sequence[int] = (0, 0, 0),
    **more: Any,
) -> list[Case]:
    """A fault in all severities. plants: (workload, specific sets) of each; sets: common to all; more: of a Case."""
    return [
        Case("fault", fault, severity, workload, planted, (*own, *sets), tuple(cure), busy=count, **more)
        for severity, (workload, own), count in zip(SEVERITIES, plants, busy, strict=True)
    ]


def chosen(cases: Iterable[Case], only: Sequence[str]) -> list[Case]:
    """The selected cases. only: each a "fault", "fault:severity", kind or name; () for all.

    Raises ValueError for an unknown one.
    """
    cases = list(cases)
    known = {word for case in cases for word in _words(case)}
    if strange := [word for word in only if word not in known]:
        names = sorted({case.fault for case in cases})
        raise ValueError(f"unknown case {', '.join(strange)}; allowed: {', '.join(names)}")
    return [case for case in cases if not only or any(word in only for word in _words(case))]


def _words(case: Case) -> tuple[str, ...]:
    return case.fault, f"{case.fault}:{case.severity}", case.kind, case.name
