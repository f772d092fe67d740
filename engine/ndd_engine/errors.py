"""Errors shown to the user, with the exit status of the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ndd_engine.text import printable

# Characters of somebody else's text in a message.
LONGEST = 300
# A loader worker sends its exception as text: "Caught KeyError in DataLoader worker process 0." and the traceback.
_IN_WORKER = re.compile(r"Caught .{1,200} in DataLoader worker process \d+\.")

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MACHINE = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
# The reasons for the last two.
INTERRUPTED = "interrupted (Ctrl-C)"
TERMINATED = "terminated (SIGTERM)"


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


class CaptureError(TrainingError):
    """A step cannot be captured in a CUDA graph, and the process cannot continue to train."""


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


def shortened(text: str, longest: int = LONGEST) -> str:
    """The text on one line, printable, with at most `longest` characters."""
    line = printable(" ".join(text[: 4 * longest].split()))
    return line if len(line) <= longest else line[: longest - 1] + "…"


def text_of(error: BaseException) -> str:
    """str(error), or why an exception's own __str__ has none."""
    try:
        return (error.msg or "") if isinstance(error, SyntaxError) else str.strip(str(error))
    except Exception as broken:  # noqa: BLE001  the code of a user's exception
        return f"its message cannot be shown: __str__ raises {type(broken).__name__}"


def message_of(error: BaseException) -> str:
    """The first line of an exception's message, shortened; "no message" without one."""
    text = text_of(error)
    if _IN_WORKER.match(text):
        text = _raised_in_worker(text, type(error).__name__)
    first, _, rest = text.partition("\n")
    # torch's errors about a state start with "Error(s) in loading state_dict for Net:".
    return shortened(
        f"{first} {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else first or "no message"
    )


def said(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its message."""
    return f"{shortened(type(error).__name__, 80)}: {message_of(error)}"


def error_text(error: BaseException) -> str:
    """The message of an expected error; other errors with their type."""
    return str(error) if isinstance(error, (NddError, OSError)) else said(error)


def _raised_in_worker(text: str, name: str) -> str:
    """The message of the exception in a worker's traceback, which starts after the last frame. name: its type."""
    lines = text[text.rfind('\n  File "') + 1 :].splitlines()
    message = next((line for line in lines if line[:1].strip()), "")
    kind, _, rest = message.partition(":")
    return rest.strip() if kind.rpartition(".")[2] == name else message
