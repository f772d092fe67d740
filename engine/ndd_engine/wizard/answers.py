"""What the user wants of a configuration: the goal, and what may be changed for it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ndd_engine.config import Config, Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.hardware.profiles import GpuProfile, load

Goal = Literal["throughput", "beside", "reproducible", "time"]
GOALS: dict[Goal, str] = {
    "throughput": "most items per second",
    "beside": "fits beside others",
    "reproducible": "the same result again",
    "time": "shortest time to a number of items",
}
# Of the memory that is free, what is left free unless the user says otherwise: evaluations and other libraries.
LEFT_FREE = 0.08
# Of the memory that a card is sold with, what it has for programs at least: a T4 shows 14.6 of 16 GB.
USABLE = 0.91
GIB = 1 << 30
# Seconds of the verification.
BUDGET_S = 75.0


@dataclass(frozen=True)
class Answers:
    """config, workload, sets: the configuration to begin with, as in `config.read`.

    card: a card that is not here, by its name, None for what this machine has. goal: see GOALS; items: of the goal
    "time". effective: items of an optimizer step to hold, None to leave the batch free. shortest: the shortest
    acceptable sequence, None to keep it. sizes: of the model that are acceptable, () for the one that is configured.
    leave_bytes: memory to leave free, None for LEFT_FREE of it.
    """

    config: Path | None = None
    workload: str | None = None
    sets: tuple[str, ...] = ()
    card: str | None = None
    goal: Goal = "throughput"
    items: int | None = None
    effective: int | None = None
    hold_effective: bool = True
    shortest: int | None = None
    sizes: tuple[str, ...] = ()
    leave_bytes: int | None = None

    @property
    def all_sets(self) -> tuple[str, ...]:
        """The edits on top of the file, the goal's own below the user's."""
        goal = ("run.preset=reproducible",) if self.goal == "reproducible" else ()
        return (*goal, *self.sets)

    def draft(self) -> Draft:
        """The configuration to begin with. Raises ConfigError."""
        return read(self.config, self.all_sets, self.workload)

    def checked(self, sequence: int, known_sizes: tuple[str, ...]) -> Answers:
        """Itself, if it makes sense. Raises UsageError that says what is allowed.

        sequence: that is configured; as long as the size is not known, see `longest_sequence`.
        """
        if self.goal not in GOALS:
            raise UsageError(f"--goal {self.goal}: there is no such goal; allowed: {', '.join(GOALS)}")
        if self.goal == "time" and self.items is None:
            raise UsageError('the goal "time" needs the number of items: --items N')
        for name, value in (("--items", self.items), ("--effective", self.effective)):
            if value is not None and value < 1:
                raise UsageError(f"{name} {value}: allowed: 1 or more")
        if self.shortest is not None and not 2 <= self.shortest <= sequence:
            raise UsageError(
                f"--shortest {self.shortest}: allowed: 2 to {sequence}, which is the sequence now"
            )
        if self.leave_bytes is not None and self.leave_bytes < 0:
            raise UsageError(f"--leave {self.leave_bytes}: allowed: 0 or more")
        strange = [size for size in self.sizes if size not in known_sizes]
        if strange:
            allowed = ", ".join(known_sizes) or "none: this workload has no sizes"
            raise UsageError(f"--size {', '.join(strange)}: there is no such size; allowed: {allowed}")
        if self.card is not None:
            gpu_named(self.card)
        return self

    def step_items(self, config: Config) -> int | None:
        """Items of an optimizer step to hold, None where the batch is free."""
        if not self.hold_effective:
            return None
        return self.effective if self.effective is not None else config.batch.items


def usable_bytes(card: GpuProfile) -> int:
    """Of a card that is not here, what is there for programs at least."""
    return int(card.memory_gb * USABLE * GIB)


def longest_sequence(draft: Draft) -> int:
    """The configured sequence; where the size of the model is yet to be found, the longest of any size."""
    if draft.size != "auto":
        return draft.resolve().batch.sequence
    return max(draft.resolve(size).batch.sequence for size in draft.sizes)


def gpu_named(name: str) -> GpuProfile:
    """The published figures of a card by its name, its file's name, or a part of either that only it has.

    Raises UsageError that lists what is known.
    """
    wanted = _plain(name)
    exact = [card for card in load() if wanted in (_plain(card.name), _plain(card.slug))]
    found = exact or [
        card for card in load() if wanted and (wanted in _plain(card.name) or wanted in _plain(card.slug))
    ]
    if len(found) == 1:
        return found[0]
    names = ", ".join(card.name for card in found or load())
    what = "there is more than one such card" if found else "there are no figures of such a card"
    raise UsageError(f"--card {name!r}: {what}; allowed: {names}")


def _plain(name: str) -> str:
    return "".join(
        letter for letter in name.lower().replace("nvidia", "").replace("geforce", "") if letter.isalnum()
    )
