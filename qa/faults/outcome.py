"""The outcome of a case, as saved on disk, and whether it is correct. No input or output, so it is easy to test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from ndd_engine.record.events import TrialEvent
from ndd_engine.trial.estimates import Estimate

from .cases import Case, only_last
from .innocent import all_cases

# A fault with a lower cost than NEGLIGIBLE need not be reported; one with a higher cost than FELT needs a cure.
NEGLIGIBLE = 1.05
FELT = 1.10


@dataclass(frozen=True)
class Measured:
    """The ratio of a trial, candidate over baseline, and its interval; None if nothing was compared."""

    sets: tuple[str, ...]
    verdict: str
    ratio: float | None
    low: float | None
    high: float | None
    seconds: float = 0.0
    text: str = ""

    @classmethod
    def of_trial(cls, event: TrialEvent) -> Self:
        """The result of a trial."""
        return cls(
            tuple(event.sets), event.verdict, event.ratio, event.low, event.high, event.seconds, event.text
        )

    @classmethod
    def of_estimate(cls, alone: Estimate | None) -> Self:
        """The speed without neighbours over that beside them; None if the run was too slow to measure that."""
        if alone is None:
            return cls(
                (), "not measured", None, None, None, 0.0, "too slow between two stops of its neighbours"
            )
        return cls((), "measured", alone.ratio, alone.low, alone.high)

    @property
    def gains(self) -> bool:
        """Whether its interval lies above 1."""
        return self.low is not None and self.low > 1


@dataclass(frozen=True)
class Outcome:
    """One completed case. named: the cause of the verdict. found: (cause, ceiling) of every finding, in order.

    fix: the settings that the verdict proposes; tried: a trial of them. outside: whether its first proposal is not a
    setting, but a code change or stopping other processes. cured: a trial that removes the fault, which measures its
    cost. foreign: cores used by other processes, without planted ones. error: why the case failed. where: the title of
    the verdict and its places.
    """

    case: Case
    named: str = ""
    found: tuple[tuple[str, float | None], ...] = ()
    fix: tuple[str, ...] = ()
    outside: bool = False
    tried: Measured | None = None
    cured: Measured | None = None
    foreign: float = 0.0
    seconds: float = 0.0
    error: str = ""
    where: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps({**asdict(self), "case": self.case.name})

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The reverse of to_json. Raises ValueError, TypeError or KeyError for other lines."""
        body = json.loads(line)
        case = {case.name: case for case in all_cases(gpu=True)}[body["case"]]
        for key in ("tried", "cured"):
            if body[key] is not None:
                body[key] = Measured(**{**body[key], "sets": tuple(body[key]["sets"])})
        found = tuple((cause, ceiling) for cause, ceiling in body["found"])
        return cls(**{**body, "case": case, "found": found, "fix": tuple(body["fix"])})

    @property
    def planted(self) -> bool:
        """Whether there is a fault."""
        return self.case.kind == "fault"

    @property
    def ceiling(self) -> float | None:
        """The ceiling of the verdict."""
        return self.found[0][1] if self.found else None

    @property
    def cost(self) -> float | None:
        """The speedup of the run without its fault; None if not measured."""
        return self.cured.ratio if self.cured is not None else None

    @property
    def right(self) -> bool:
        """Whether the verdict is correct: the true cause, or `healthy` if the fault costs almost nothing.

        Without a planted fault, a cause whose fix gains in a trial is correct too.
        """
        if self.error:
            return False
        if self.planted:
            small = self.named == "healthy" and self.cost is not None and self.cost < NEGLIGIBLE
            return (self.named == self.case.truth and self.case.place in self.where) or small
        return not self.charges

    @property
    def charges(self) -> tuple[str, ...]:
        """False positives in a run without a planted fault: suspects reported with a significant ceiling, and a verdict
        that no trial confirms."""
        if self.planted or self.error:
            return ()
        false = [
            cause
            for cause, ceiling in self.found
            if cause in self.case.suspects and (ceiling is None or ceiling >= NEGLIGIBLE)
        ]
        proved = self.tried is not None and self.tried.gains
        if self.named != "healthy" and self.named not in false and not proved:
            false.append(self.named)
        return tuple(false)

    @property
    def owes_a_cure(self) -> bool:
        """Whether the fault costs so much that the proposed fix has to gain."""
        return self.planted and self.case.proved and self.cost is not None and self.cost > FELT

    @property
    def cures(self) -> bool:
        """Whether the proposed fix gains. If the first proposal is not a setting, the case's own cure counts, provided
        that the true cause was named."""
        proofs = [self.tried]
        if (self.outside or not self.fix) and self.named == self.case.truth:
            proofs.append(self.cured)
        return any(proof is not None and proof.gains for proof in proofs)

    @property
    def exceeded(self) -> bool:
        """Whether a measured gain, including its interval, is larger than the ceiling of the finding."""
        pairs = [(self.tried, self.ceiling)]
        pairs += [(self.cured, ceiling) for cause, ceiling in self.found if cause == self.case.truth]
        return any(
            measured is not None
            and measured.low is not None
            and ceiling is not None
            and measured.low > ceiling
            for measured, ceiling in pairs
        )


def same_change(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two lists of settings have the same keys and values, regardless of quoting."""
    return _values(one) == _values(other)


def _values(sets: Sequence[str]) -> dict[str, str]:
    pairs = (item.partition("=") for item in only_last(sets))
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}
