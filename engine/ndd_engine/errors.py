"""Errors shown to the user, with the exit status of the command line."""

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
    """An error that is shown to the user as a message without a traceback."""

    exit_status = EXIT_FAILED


class UsageError(NddError):
    """An invalid request: something does not exist or cannot be combined."""

    exit_status = EXIT_USAGE


class MachineError(NddError):
    """The machine lacks what was requested, such as a GPU or a driver."""

    exit_status = EXIT_MACHINE


class DoesNotFitError(MachineError):
    """The request needs more memory than available; raised before anything is allocated."""


class RunLockedError(UsageError):
    """Another process is writing to this run."""


class CheckpointError(NddError):
    """A checkpoint is missing, corrupt or does not match this run."""


class TrainingError(NddError):
    """Training cannot continue; the message gives the step, the reason and the saved checkpoint."""


class OutOfMemoryError(TrainingError):
    """An allocation failed; the message gives the memory in use and a micro-batch that would fit."""


@dataclass(frozen=True)
class Problem:
    """A mistake in a configuration.

    where: file (with line if known) or option. key: dotted key, "" if none. found: the value as written. allowed:
    valid values. suggestion: probable intention, such as "did you mean micro?".
    """

    where: str
    key: str
    message: str
    found: str | None = None
    allowed: str | None = None
    suggestion: str | None = None

    def __str__(self) -> str:
        found = f" = {self.found}" if self.found is not None else ""
        text = f"{self.where}: " + (f"{self.key}{found}: " if self.key else "") + self.message
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.suggestion:
            text += f"; {self.suggestion}"
        return text


class ConfigError(UsageError):
    """An invalid configuration, with all its problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


def error_text(error: BaseException) -> str:
    """The message of an expected error; other errors with their type."""
    return str(error) if isinstance(error, (NddError, OSError)) else f"{type(error).__name__}: {error}"
