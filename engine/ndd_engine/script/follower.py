"""Follows the records of a script's processes and puts the events of the run into its record."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from ndd_engine.hardware.gpu import Gpu, Machine
from ndd_engine.record.events import Event, MarkEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import counted, number, printable

from .captures import Captures
from .command import Command
from .facts import Facts
from .progress import Stalls
from .ranks import ScriptRanks
from .records import Line, Process, Records

# Lines of the other ranks that become marks of the run.
_TOLD = ("unobserved", "unseen")
_CAPTURES = ("capture", "uncaptured")


class Follower:
    """put: gets the events of the leading process, which is rank 0 or else the first one that trained, and those that
    compare the ranks."""

    def __init__(
        self,
        directory: RunDir,
        command: Command,
        machine: Machine,
        put: Callable[[Event], None],
        folder: Path | None = None,
    ) -> None:
        """folder: of the memories of the processes."""
        self._directory, self._command, self._machine, self._put = directory, command, machine, put
        self._records = Records(directory.ranks if folder is None else folder)
        self._facts: dict[str, Facts] = {}
        self._ranks = ScriptRanks(command.folder)
        self._stalls = Stalls()
        self._captures = Captures(directory)

    @property
    def trained(self) -> bool:
        """Whether any process has trained."""
        return bool(self._facts)

    @property
    def step(self) -> int:
        """Optimizer steps so far: of one of the ranks that train together, and of all other processes and threads."""
        return self._together + self._apart + self._elsewhere

    @property
    def trains(self) -> tuple[int | None, Gpu | None]:
        """(process id, GPU) of the leading process, if it is on this host; the GPU is None for the CPU."""
        leads = min(self._facts, key=_leading, default=None)
        if leads is None or not self._here(leads):
            return None, None
        return self._facts[leads].pid, self._facts[leads].gpu

    @property
    def _together(self) -> int:
        return max((facts.step for facts in self._facts.values() if facts.shares), default=0)

    @property
    def _apart(self) -> int:
        """Steps of processes that train by themselves."""
        return sum(facts.step for facts in self._facts.values() if not facts.shares)

    @property
    def _elsewhere(self) -> int:
        """Steps of threads whose phases are not timed."""
        return sum(process.elsewhere for process in self._records.processes)

    @property
    def _unended(self) -> int:
        """Backward passes that no step of the run has."""
        return sum(process.unended for process in self._records.processes)

    @property
    def not_shown(self) -> list[str]:
        """What the figures of the run leave out, in words."""
        found = []
        if (steps := self._elsewhere) > 0:
            found.append(f"optimizer steps of other threads: {number(steps)}, counted but not timed")
        trained = [name for name, facts in self._facts.items() if not facts.shares and facts.step]
        if len(trained) > 1:
            leading = min(trained, key=_leading)
            steps = sum(self._facts[name].step for name in trained if name != leading)
            others = counted(len(trained) - 1, "other process")
            found.append(f"optimizer steps of {others}: {number(steps)}; times are those of the first one")
        if passes := self._unended:
            after = "after the last one" if self.step else "in all"
            found.append(
                f"backward passes without a step of an optimizer of torch: {number(passes)} {after}; other updates of "
                "the parameters are not counted as steps here"
            )
        if self._facts:
            found += self._facts[min(self._facts, key=_leading)].not_seen
        return found

    @property
    def ended(self) -> tuple[str, str] | None:
        """(status, reason) that a process wrote at its end; None before that.

        Of several ranks, of the one that ended first; of other processes, of one that failed if there is one.
        """
        if (first := self._ranks.first_end()) is not None:
            return first
        found = [facts.ended for facts in self._facts.values() if facts.ended is not None]
        return next((end for end in found if end[0] != "done"), found[0] if found else None)

    def poll(self, final: bool = False) -> None:
        """Read what is new, in the order in which it was written, and look for processes that make no progress.

        final: all processes have ended.
        """
        for name, line in sorted(self._records.new(final), key=lambda item: item[1]["t"]):
            self._take(name, line)
        for reason in self._records.unobserved():
            self._put(MarkEvent("warning", self.step, f"not observed: {printable(reason)}"))
        if final:
            return
        for name, found in self._stalls.look([one for one in self.here if not one.paused], self.step):
            if isinstance(found, MarkEvent):
                self._put(self._of_rank(name, found))
            else:
                self._take(name, found)

    def finish(self) -> None:
        """Read the rest, and tell what could not be read."""
        self.poll(final=True)
        for event in self._ranks.finish():
            self._put(event)
        if damaged := self._records.damaged:
            text = f"{counted(damaged, 'line')} of the observer's records could not be read"
            self._put(MarkEvent("warning", self.step, text))

    @property
    def here(self) -> list[Process]:
        """The processes that train on this host, the leading one first."""
        newest = {one.name: one for one in self._records.processes if one.name in self._facts}
        found = [
            one
            for one in newest.values()
            if one.trains and psutil.pid_exists(one.pid) and self._here(one.name)
        ]
        return sorted(found, key=lambda one: _leading(one.name))

    def _here(self, name: str) -> bool:
        return self._facts[name].host == socket.gethostname()

    def _take(self, name: str, line: Line) -> None:
        facts = self._facts.get(name)
        if facts is None:
            facts = self._facts[name] = Facts(self._directory.name, self._command, self._machine)
        leads = min(self._facts, key=_leading)
        try:
            # First: a restart belongs to the steps before it.
            shared = list(self._ranks.take(name, line, self._facts[leads].earlier))
            events = list(facts.take(line))
            if line["type"] in _CAPTURES:
                rank = self._ranks.rank_of(name) if leads != name else None
                events = list(self._captures.taken(line, facts.step_of(line), rank))
        except (KeyError, TypeError, ValueError, IndexError):
            return  # a line of another version
        if line["type"] == "source":
            self._stalls.sources.add((str(line["file"]), str(line["function"])))
        told = line["type"] in _TOLD
        for event in events if leads == name or told else ():
            self._put(self._of_rank(name, event) if told and isinstance(event, MarkEvent) else event)
        for event in shared:
            self._put(event)

    def _of_rank(self, name: str, event: MarkEvent) -> MarkEvent:
        """With the rank in front, if there are several."""
        rank = self._ranks.rank_of(name)
        return event if rank is None else replace(event, text=f"rank {rank}: {event.text}")


def _leading(name: str) -> tuple[bool, int, str]:
    kind, _, text = name.partition("-")
    return kind != "rank", int(text) if text.isdecimal() else 0, name
