"""What the rules say: a finding, with its evidence, its ceiling and the change to try."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Confidence = Literal["certain", "likely", "possible"]

# Every cause there is, and how it is called on a screen.
CAUSES: dict[str, str] = {
    "too-short": "too short to judge",
    "healthy": "nothing holds it back",
    # The loader.
    "item-collate": "batches are made item by item",
    "on-the-fly": "items are encoded on the fly",
    "few-workers": "too few loader workers",
    "many-workers": "too many loader workers",
    "in-memory-workers": "workers for data that lies in memory",
    "worker-restart": "workers are restarted each epoch",
    "slow-storage": "slow storage",
    "data-wait": "waiting for data",
    # The processor.
    "oversubscribed": "more threads than cores",
    "few-threads": "fewer threads than cores",
    "neighbour-cores": "another process on the cores",
    "quota": "held up by the processor quota",
    "gc": "garbage collection pauses",
    # The card.
    "transfer": "copying to the card",
    "launch-bound": "launching takes longer than computing",
    "sync": "waiting for the card",
    "neighbour-card": "another process on the card",
    "throttling": "the card is throttled",
    "thrash": "the allocator has to free and retry",
    # The step.
    "small-micro": "micro-batches too small to pay for themselves",
    "stepwise": "work repeated inside a loop",
    "optimizer": "the optimizer's step",
    "clip": "clipping",
    "evaluation": "evaluating often",
    "checkpoint": "saving often",
    "logging": "recording often",
    "user-code": "host code between the operators",
    "recompile": "compiling again and again",
    "compile-cost": "compiling does not pay back",
    "deterministic": "deterministic algorithms",
    "tf32": "TF32 is off",
    "amp": "mixed precision is off",
    "cudnn-benchmark": "cuDNN's choice of algorithms",
    "cudnn-shapes": "cuDNN timed again for each shape",
    "no-effect": "a setting without effect",
    # Hazards, which cost no time until they end the run.
    "leak": "memory grows",
    "near-limit": "memory is nearly full",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One figure: what it says, in words with its unit, and where it comes from ("host clock", "samples")."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Change:
    """Something to try. sets: configuration edits "loader.workers=2", () for a change of code.

    where: "file.py:12 in load", from stack samples, None where it is not known.
    """

    text: str
    sets: tuple[str, ...] = ()
    where: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What holds a run back, or threatens it.

    title: one line, "input-bound: 57 % of each step waits for the loader". share: of wall time that it costs at
    most, 0..1. ceiling: removing it gains at most so many times; None for what is not a matter of speed, or where it
    cannot be bounded. leave: why it is not worth changing in this run, empty where it is.
    """

    cause: str
    title: str
    evidence: tuple[Evidence, ...]
    confidence: Confidence
    share: float | None = None
    ceiling: float | None = None
    changes: tuple[Change, ...] = ()
    leave: str = ""

    @property
    def sets(self) -> tuple[str, ...]:
        """The edits of the first change that is one of the configuration; () where there is none."""
        return next((change.sets for change in self.changes if change.sets), ())

    def to_dict(self) -> dict[str, Any]:
        """For a finding event and for --json."""
        return asdict(self)
