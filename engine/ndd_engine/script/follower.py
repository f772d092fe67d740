"""Follows the records of a script's processes and puts the events of the run into its record."""

from __future__ import annotations

from collections.abc import Callable

from ndd_engine.hardware.gpu import Machine
from ndd_engine.record.events import Event, MarkEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import counted

from .command import Command
from .facts import Facts
from .records import Line, Records


class Follower:
    """put: gets the events of the leading process, which is rank 0 or else the first one that trained."""

    def __init__(
        self, directory: RunDir, command: Command, machine: Machine, put: Callable[[Event], None]
    ) -> None:
        self._directory, self._command, self._machine, self._put = directory, command, machine, put
        self._records = Records(directory.ranks)
        self._facts: dict[str, Facts] = {}

    @property
    def trained(self) -> bool:
        """Whether any process has trained."""
        return bool(self._facts)

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return max((facts.step for facts in self._facts.values()), default=0)

    @property
    def ended(self) -> tuple[str, str] | None:
        """(status, reason) that a process wrote at its end, of one that failed if there is one; None before that."""
        found = [facts.ended for facts in self._facts.values() if facts.ended is not None]
        return next((end for end in found if end[0] != "done"), found[0] if found else None)

    def poll(self) -> None:
        """Read what is new."""
        for name, line in self._records.new():
            self._take(name, line)

    def finish(self) -> None:
        """Read the rest, and tell what could not be read."""
        self.poll()
        if damaged := self._records.damaged:
            text = f"{counted(damaged, 'line')} of the observer's records could not be read"
            self._put(MarkEvent("warning", self.step, text))

    def _take(self, name: str, line: Line) -> None:
        facts = self._facts.get(name)
        if facts is None:
            facts = self._facts[name] = Facts(self._directory.name, self._command, self._machine)
        leads = min(self._facts, key=_leading) == name
        try:
            events = list(facts.take(line))
        except (KeyError, TypeError, ValueError, IndexError):
            return  # a line of another version
        for event in events if leads else ():
            self._put(event)


def _leading(name: str) -> tuple[bool, int, str]:
    kind, _, text = name.partition("-")
    return kind != "rank", int(text) if text.isdecimal() else 0, name
