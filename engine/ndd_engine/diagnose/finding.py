"""A finding: the cause, its evidence, its ceiling and the changes to try."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Confidence = Literal["certain", "likely", "possible"]

# Every cause, with its label on a screen.
CAUSES: dict[str, str] = {
    "too-short": "too short to judge",
    "healthy": "no bottleneck found",
    # Data loading.
    "item-collate": "batches collated item by item",
    "on-the-fly": "items encoded on the fly",
    "few-workers": "too few loader workers",
    "many-workers": "too many loader workers",
    "in-memory-workers": "loader workers for in-memory data",
    "worker-restart": "workers restarted every epoch",
    "slow-storage": "slow storage",
    "data-wait": "waiting for data",
    # CPU.
    "oversubscribed": "more threads than cores",
    "few-threads": "fewer threads than cores",
    "neighbour-cores": "another process on the CPU cores",
    "quota": "throttled by the CPU quota",
    "gc": "garbage collection pauses",
    # GPU.
    "transfer": "host-to-device copies",
    "launch-bound": "kernel launch overhead",
    "sync": "host-device synchronisation",
    "collectives": "communication between GPUs",
    "neighbour-card": "another process on the GPU",
    "throttling": "GPU throttling",
    "thrash": "allocator retries",
    # Several ranks.
    "late-rank": "straggler",
    "exchange": "exchange between the ranks",
    "skew": "ranks of uneven speed",
    # Training step.
    "small-micro": "micro-batches too small",
    "stepwise": "repeated work in the decoder loop",
    "optimizer": "optimizer step",
    "clip": "gradient clipping",
    "evaluation": "frequent evaluations",
    "checkpoint": "frequent checkpoints",
    "logging": "frequent logging",
    "user-code": "host code between operators",
    "slow-function": "a slow function",
    "anomaly": "anomaly detection is on",
    "recompile": "repeated recompilation",
    "compile-cost": "compile time exceeds the gain",
    "deterministic": "deterministic algorithms",
    "tf32": "TF32 is off",
    "amp": "mixed precision is off",
    "cudnn-benchmark": "cuDNN algorithms not benchmarked",
    "cudnn-shapes": "cuDNN benchmarks every new shape",
    "no-effect": "setting not in effect",
    # Hazards: no cost in time until they end the run.
    "leak": "memory grows steadily",
    "near-limit": "memory almost full",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One measurement: a sentence with figures and units, and where it comes from ("host clock", "NVML")."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change to try.

    sets: configuration edits ("loader.workers=2"); () for a code change. where: "file.py:12 in load" from a
    profiled step; None if unknown.
    """

    text: str
    sets: tuple[str, ...] = ()
    where: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A bottleneck or a hazard of a run.

    title: one line, "input-bound: 57 % of each step is spent waiting for the loader". share: upper bound of the
    fraction of wall time it costs (0..1). ceiling: maximum speedup from removing it (1.42 is "at most 1.42x"); None if
    it does not affect speed or cannot be bounded. Both are figures of the same cost: ceiling = 1 / (1 - share).
    leave: why the change is not worthwhile, or "". from_steps: the change breaks even only in a run of this many steps
    and more, which this run does not have; None if it has them.
    """

    cause: str
    title: str
    evidence: tuple[Evidence, ...]
    confidence: Confidence
    share: float | None = None
    ceiling: float | None = None
    changes: tuple[Change, ...] = ()
    leave: str = ""
    from_steps: int | None = None

    @property
    def condition(self) -> str:
        """ "for a run of 1,200 steps and more", or ""."""
        return "" if self.from_steps is None else f"for a run of {self.from_steps:,} steps and more"

    def advice(self, change: Change) -> str:
        """The text of one of its changes, with the condition under which it is worthwhile."""
        return f"{self.condition}: {change.text}" if self.condition and change.sets else change.text

    @property
    def sets(self) -> tuple[str, ...]:
        """The edits of the first configuration change; () if there is none."""
        return next((change.sets for change in self.changes if change.sets), ())

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for a finding event and --json."""
        return asdict(self)
