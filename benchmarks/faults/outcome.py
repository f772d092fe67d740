"""What came of a case, as it is kept on disk, and whether that is right. Pure arithmetic, so that tests hold it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from .cases import Case, only_last

# A fault that costs less than this may be left unnamed; one that costs more than that has to be cured.
NEGLIGIBLE = 1.05
FELT = 1.10


@dataclass(frozen=True)
class Measured:
    """A trial's ratio, speed with the change over without it, and its interval; None where nothing was compared."""

    sets: tuple[str, ...]
    verdict: str
    ratio: float | None
    low: float | None
    high: float | None
    seconds: float = 0.0
    text: str = ""

    @classmethod
    def of_trial(cls, event: dict[str, Any]) -> Self:
        """From a trial event's fields."""
        return cls(
            tuple(event["sets"]), event["verdict"], event["ratio"], event["low"], event["high"],
            event["seconds"], event["text"],
        )  # fmt: skip

    @property
    def gains(self) -> bool:
        """Its interval lies above 1."""
        return self.low is not None and self.low > 1


@dataclass(frozen=True)
class Outcome:
    """One case, carried out. named: the verdict's cause. found: (cause, ceiling) of every finding, in order.

    fix: the edits that the verdict proposes; tried: what a trial of them measured. outside: what it proposes first is
    no setting, but a change of code or to stop other processes. cured: the same of taking the plant away by itself,
    which is what the fault costs. error: why it could not be carried out. foreign: cores that other processes used
    meanwhile, without planted ones.
    """

    case: str
    kind: str
    fault: str
    severity: str
    workload: str
    truth: str
    named: str = ""
    title: str = ""
    confidence: str = ""
    found: tuple[tuple[str, float | None], ...] = ()
    suspects: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    outside: bool = False
    tried: Measured | None = None
    cured: Measured | None = None
    speed: bool = True
    foreign: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @classmethod
    def of(cls, case: Case, **more: Any) -> Self:
        """With what the case says of itself."""
        return cls(
            case.name, case.kind, case.fault, case.severity, case.workload, case.truth,
            suspects=case.suspects, speed=case.proved, **more,
        )  # fmt: skip

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The outcome of such a line. Raises ValueError, TypeError or KeyError for any other."""
        body = json.loads(line)
        for key in ("tried", "cured"):
            if body[key] is not None:
                body[key] = Measured(**{**body[key], "sets": tuple(body[key]["sets"])})
        body["found"] = tuple((cause, ceiling) for cause, ceiling in body["found"])
        return cls(**{**body, "suspects": tuple(body["suspects"]), "fix": tuple(body["fix"])})

    @property
    def ceiling(self) -> float | None:
        """The verdict's."""
        return self.found[0][1] if self.found else None

    @property
    def cost(self) -> float | None:
        """How many times as fast the run is without its fault; None where that was not measured."""
        return self.cured.ratio if self.cured is not None else None

    @property
    def right(self) -> bool:
        """The verdict is the true cause; or it is healthy where the fault costs next to nothing.

        Where nothing is planted, a cause that a trial of its own change proves is right too.
        """
        if self.error:
            return False
        if self.kind == "fault":
            small = self.named == "healthy" and self.cost is not None and self.cost < NEGLIGIBLE
            return self.named == self.truth or small
        return not self.charges

    @property
    def charges(self) -> tuple[str, ...]:
        """False accusations in a run where nothing is planted: suspects that are named with a ceiling that matters,
        and a verdict that no trial proves."""
        if self.kind == "fault" or self.error:
            return ()
        false = [
            cause
            for cause, ceiling in self.found
            if cause in self.suspects and (ceiling is None or ceiling >= NEGLIGIBLE)
        ]
        proved = self.tried is not None and self.tried.gains
        if self.named != "healthy" and self.named not in false and not proved:
            false.append(self.named)
        return tuple(false)

    @property
    def owes_a_cure(self) -> bool:
        """The fault costs so much that the proposed fix has to gain."""
        return self.kind == "fault" and self.speed and self.cost is not None and self.cost > FELT

    @property
    def cures(self) -> bool:
        """What the verdict proposes gains, its interval above 1. Where it proposes no setting first, but what has to be
        done outside, that is the cure of the case itself, if the true cause was named."""
        proofs = [self.tried]
        if (self.outside or not self.fix) and self.named == self.truth:
            proofs.append(self.cured)
        return any(proof is not None and proof.gains for proof in proofs)

    @property
    def exceeded(self) -> bool:
        """A gain was measured that, beyond its interval, is larger than the ceiling of what it removes."""
        pairs = [(self.tried, self.ceiling)]
        pairs += [(self.cured, ceiling) for cause, ceiling in self.found if cause == self.truth]
        return any(
            measured is not None
            and measured.low is not None
            and ceiling is not None
            and measured.low > ceiling
            for measured, ceiling in pairs
        )


def same_change(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two lists of edits set the same keys to the same values, however these are quoted."""
    return _values(one) == _values(other)


def _values(sets: Sequence[str]) -> dict[str, str]:
    pairs = (item.partition("=") for item in only_last(sets))
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}


@dataclass
class Counts:
    """Of outcomes: how often each target was met."""

    outcomes: Sequence[Outcome]
    faults: list[Outcome] = field(init=False)
    clean: list[Outcome] = field(init=False)

    def __post_init__(self) -> None:
        self.faults = [outcome for outcome in self.outcomes if outcome.kind == "fault"]
        self.clean = [outcome for outcome in self.outcomes if outcome.kind != "fault"]

    @property
    def first(self) -> tuple[int, int]:
        """(planted faults whose true cause comes first, of how many)."""
        return sum(outcome.right for outcome in self.faults), len(self.faults)

    @property
    def accusations(self) -> tuple[int, int]:
        """(runs without a fault in which one is named, of how many)."""
        return sum(bool(outcome.charges) for outcome in self.clean), len(self.clean)

    @property
    def cured(self) -> tuple[int, int]:
        """(faults that cost over 10 % and whose fix gains, of how many)."""
        owing = [outcome for outcome in self.faults if outcome.owes_a_cure]
        return sum(outcome.cures for outcome in owing), len(owing)

    @property
    def exceeded(self) -> tuple[int, int]:
        """(cases in which a gain exceeds its ceiling, of those with a trial)."""
        tried = [outcome for outcome in self.outcomes if outcome.tried or outcome.cured]
        return sum(outcome.exceeded for outcome in tried), len(tried)
