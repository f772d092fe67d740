"""What a case is: a run with one fault planted in it, or with something that only looks like one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ndd_engine.diagnose import CAUSES
from ndd_engine.hardware.host import detect_host, usable_threads

from .plants import MODULE

Kind = Literal["fault", "innocent", "healthy"]
OWN = "own"
# What is too many or too few goes by what this machine has.
CORES = usable_threads(detect_host())
SEVERITIES = ("low", "middle", "high")

# Nothing but steps, for long enough that every change would still pay: what a case does not plant is not there.
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
    """One run and what is to be said of it.

    fault: of a planted fault its cause, of an innocent what it looks like; workload for a healthy one. sets: the
    configuration with the plant; cure: what takes the plant away again, as edits on top of it (a change of code is an
    option of the own workload), () where that is no matter of configuration. suspects: causes that an innocent must not
    be charged with. busy, asleep: processes beside the run. planted: in one line, how. seconds: of training before
    the diagnosis; trial_s: of a trial at the least, where sides take long to start. to_end: the run is diagnosed after
    its end. proved: whether the cure's gain is one of speed, which a trial can measure.
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
    truth: str = field(init=False)

    def __post_init__(self) -> None:
        truth = self.fault if self.kind == "fault" else "healthy"
        unknown = [cause for cause in (truth, *self.suspects) if cause not in CAUSES]
        if unknown:
            raise ValueError(f"case {self.fault}: there is no cause {', '.join(unknown)}")
        object.__setattr__(self, "truth", truth)

    @property
    def name(self) -> str:
        """Unique, and fit for a file name."""
        severity = f"-{self.severity}" if self.severity else ""
        return f"{self.kind}-{self.fault}{severity}-{self.workload}"

    @property
    def workload_name(self) -> str:
        """As in workload.name."""
        return f"{MODULE}:{self.factory}" if self.workload == OWN else self.workload

    def all_sets(self, folder: Path) -> tuple[str, ...]:
        """The whole configuration, the plant in it. folder: where the module of an own workload is written."""
        place = (f'workload.path=["{folder.absolute()}"]',) if self.workload == OWN else ()
        return only_last((*PLAIN, *place, *self.sets))


def only_last(sets: Iterable[str]) -> tuple[str, ...]:
    """Each key once, with the value that was given last; keys in the order in which they came first."""
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
    factory: str = "",
    seconds: float = 8.0,
    trial_s: float = 0.0,
    to_end: bool = False,
    proved: bool = True,
) -> list[Case]:
    """A fault in its severities. plants: (workload, its own sets) for each; sets: what all of them have."""
    return [
        Case(
            "fault", fault, severity, workload, planted, (*own, *sets), tuple(cure), factory, (), count,
            seconds=seconds, trial_s=trial_s, to_end=to_end, proved=proved,
        )
        for severity, (workload, own), count in zip(SEVERITIES, plants, busy, strict=True)
    ]  # fmt: skip


def chosen(cases: Iterable[Case], only: Sequence[str], workloads: Sequence[str]) -> list[Case]:
    """The cases that were asked for: `only` holds "fault", "fault:severity", a kind or a name; () for all.

    Raises ValueError for a word that is none of these.
    """
    cases = list(cases)
    known = {word for case in cases for word in _words(case)}
    if strange := [word for word in only if word not in known]:
        names = sorted({case.fault for case in cases})
        raise ValueError(f"there is no case {', '.join(strange)}; there are {', '.join(names)}")
    return [
        case
        for case in cases
        if (not only or any(word in only for word in _words(case)))
        and (not workloads or case.workload in workloads)
    ]


def _words(case: Case) -> tuple[str, ...]:
    return case.fault, f"{case.fault}:{case.severity}", case.kind, case.name
