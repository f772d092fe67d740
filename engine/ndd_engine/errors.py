"""What can go wrong for a user, each with the exit status that the command line returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MACHINE = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class NddError(Exception):
    """An error that is told to the user in one message, never as a traceback."""

    exit_status = EXIT_FAILED


class UsageError(NddError):
    """The user asked for something that does not exist or cannot be combined."""

    exit_status = EXIT_USAGE


class MachineError(NddError):
    """The machine lacks what was asked for: a card, a driver, a core."""

    exit_status = EXIT_MACHINE


class DoesNotFitError(MachineError):
    """What was asked for needs more memory than there is; nothing of it was allocated."""


class RunLockedError(UsageError):
    """Another process is writing this run."""


class CheckpointError(NddError):
    """A checkpoint is missing, damaged or does not belong to this run."""


class TrainingError(NddError):
    """Training cannot go on; the message says at which step, why, and what was saved."""


class OutOfMemoryError(TrainingError):
    """An allocation failed; the message says what filled the memory and what would fit."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration.

    where: the file (with line when known) or option it came from. key: dotted path. found: the value as
    written. allowed: what would be accepted. suggestion: what was probably meant.
    """

    where: str
    key: str
    message: str
    found: str | None = None
    allowed: str | None = None
    suggestion: str | None = None

    def __str__(self) -> str:
        found = f" = {self.found}" if self.found is not None else ""
        text = (
            f"{self.where}: {self.key}{found}: {self.message}"
            if self.key
            else f"{self.where}: {self.message}"
        )
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.suggestion:
            text += f"; {self.suggestion}"
        return text


class ConfigError(UsageError):
    """A configuration with mistakes; carries all of them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))
