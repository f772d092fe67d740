"""Changes of how a script is started: arguments of its command and variables of its environment.

They stand beside settings as "arg.NAME=VALUE" and "env.NAME=VALUE".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ndd_engine.errors import UsageError
from ndd_engine.text import printable

from .command import Command

ARGUMENT, VARIABLE = "arg.", "env."
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# NAME=VALUE as a word of its own, as in `python train.py lr=0.1`.
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*=")
# The value of an argument that the command does not have.
DEFAULT = "default"


@dataclass(frozen=True)
class Start:
    """A changed start. changed: key -> (old, new) value."""

    command: Command
    environment: Mapping[str, str]
    changed: Mapping[str, tuple[str, str]]

    @property
    def advice(self) -> list[str]:
        """How a user makes the change."""
        found = []
        if any(key.startswith(VARIABLE) for key in self.changed):
            found.append(
                "set in the environment: " + " ".join(f"{k}={v}" for k, v in self.environment.items())
            )
        if any(key.startswith(ARGUMENT) for key in self.changed):
            found.append(f"start it as: {self.command.text}")
        return [printable(text) for text in found]


def is_start(item: str) -> bool:
    """Whether "key=value" changes the start."""
    return item.lstrip().startswith((ARGUMENT, VARIABLE))


def started(command: Command, sets: Sequence[str], environment: Mapping[str, str]) -> Start:
    """The start with the changes among `sets`. environment: of this process. Raises UsageError for a wrong name."""
    more: dict[str, str] = {}
    changed: dict[str, tuple[str, str]] = {}
    for item in sets:
        if not is_start(item):
            continue
        key, found, value = (part.strip() for part in item.partition("="))
        kind, name = key[: len(ARGUMENT)], key[len(ARGUMENT) :]
        if not found or not _NAME.fullmatch(name):
            option = "--arg" if kind == ARGUMENT else "--env"
            raise UsageError(f"{option} {printable(item[len(ARGUMENT) :])}: expected NAME=VALUE")
        if kind == ARGUMENT:
            command, old = with_argument(command, name, value)
        else:
            old, more[name] = environment.get(name, "not set"), value
        if old == value:
            raise UsageError(f"{printable(name)} is {printable(value)} already; there is nothing to compare")
        changed[key] = old, value
    return Start(command, more, changed)


def with_argument(command: Command, name: str, value: str) -> tuple[Command, str]:
    """(the command with an argument, its old value): --NAME VALUE, --NAME=VALUE, -NAME VALUE or NAME=VALUE.

    An argument that the command does not have is added at its end, in the way in which its others are written.
    """
    words = list(command.words)
    for place, word in enumerate(words):
        option, found, old = word.partition("=")
        if _same(option, name) and (found or option.startswith("-")):
            if found:
                words[place] = f"{option}={value}"
            elif place + 1 < len(words):
                old, words[place + 1] = words[place + 1], value
            else:
                continue
            return replace(command, words=tuple(words)), old
    script = max((place for place, word in enumerate(words) if word.endswith(".py")), default=0)
    rest = words[script + 1 :]
    plain = any(map(_PLAIN.match, rest)) and not any(word.startswith("-") for word in rest)
    added = (f"{name}={value}",) if plain else (f"--{name}", value)
    return replace(command, words=(*words, *added)), DEFAULT


def _same(option: str, name: str) -> bool:
    return option.lstrip("-").replace("_", "-") == name.replace("_", "-")
