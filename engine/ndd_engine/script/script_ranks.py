"""The ranks of an observed script: which process is which, which one ended first, whether they start again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndd_engine.child import PARTNER_GONE
from ndd_engine.measure.process_watch import Gone
from ndd_engine.measure.stragglers import RankComparison
from ndd_engine.record.events import Event, FunctionsEvent, MarkEvent, RankEvent, checker
from ndd_engine.text import counted, number, printable

from .records import Line

# Windows of a rank that wait for those of the others; after so many, it is compared without the ranks that are silent.
PATIENCE = 8
# Strategies whose ranks are to read different data, and different batches that have to be equal on all ranks.
_OWN_DATA, COMPARED = ("ddp", "fsdp2"), 3
# A larger number in a record is damage.
MOST_RANKS = 1 << 16


@dataclass
class _Member:
    """A rank. ended: (Unix time, status, reason), as it wrote. allocated: bytes of its GPU's memory, if it has one.

    batches: checksums of some of its first ones, in their order.
    """

    rank: int
    pid: int
    step: int = 0
    ended: tuple[float, str, str] | None = None
    allocated: int | None = None
    batches: list[int] = field(default_factory=list)


class ScriptRanks:
    """The ranks that this host observes. folder: of the command; places in it are shown relative to it."""

    def __init__(self, folder: Path) -> None:
        self._host = socket.gethostname()
        self._members: dict[str, _Member] = {}
        self._gone = Gone()
        self._launch: tuple[Any, ...] = ()
        self._comparison = RankComparison(PATIENCE, folder=str(folder))

    def rank_of(self, name: str) -> int | None:
        """The rank of a process that exchanges data with others; None for any other process."""
        member = self._members.get(name)
        return None if member is None else member.rank

    @property
    def same_data(self) -> list[int]:
        """The ranks that have read the same batches one after the other, each different from the others; [] if none.

        Of ranks that share a model in a strategy that gives each of them its own data.
        """
        if self._comparison.strategy not in _OWN_DATA:
            return []
        members = sorted(self._members.values(), key=lambda member: member.rank)
        read = [member.batches for member in members]
        count = min(map(len, read), default=0)
        first = read[0][:count] if read else []
        same = len(members) > 1 and len(set(first)) >= COMPARED and all(one[:count] == first for one in read)
        return [member.rank for member in members] if same else []

    def take(self, name: str, line: Line, earlier: int) -> Iterator[Event]:
        """The events of a line of a process. earlier: steps before the present launch.

        Raises KeyError, TypeError or ValueError for a line of another format.
        """
        kind, comparison = line["type"], self._comparison
        if kind == "run":
            yield from self._joins(name, line, earlier)
        member = self._members.get(name)
        if member is None:
            return
        if kind == "run":
            member.batches = [int(checksum) for *_, checksum in line["config"]["script"].get("batches") or ()]
        if kind == "window" and "ranks" in line:
            member.step = int(line["step"])
            told = {**line["ranks"], "allocated_bytes": member.allocated}
            comparison.take(member.rank, checker(RankEvent).validate_python(told))
        elif kind == "stacks":
            comparison.look(member.rank, line["frames"])
        elif kind == "functions" and not line.get("inside"):
            comparison.take(member.rank, FunctionsEvent(0, int(line["wall_ns"]), line["functions"]))
        elif kind == "memory":
            member.allocated = int(line["allocated_bytes"])
        elif kind == "end":
            member.ended = float(line["t"]), str(line["status"]), printable(str(line["reason"]))
            member.step = int(line["step"])
        if kind == "end" or (kind == "mark" and line["data"].get("observed") == "no more"):
            comparison.leave(member.rank, kind == "end")
        if kind in ("window", "end", "mark"):
            yield from comparison.new(earlier)

    def first_end(self) -> tuple[str, str] | None:
        """(status, reason) of the rank that ended before the others; None if none did, or all of them have come to
        their end."""
        members = self._members.values()
        # The first one decides; the kernel may report later that a process is gone than its partner notices.
        found: list[tuple[bool, float, str, str]] = []
        for member in members:
            who = f"rank {member.rank}"
            if member.ended is not None:
                t, status, reason = member.ended
                after = f"{who} ended first, after {counted(member.step, 'step')}"
                secondary = any(text in reason.lower() for text in PARTNER_GONE)
                found.append((secondary, t, status, f"{who}: {reason}" if status != "done" else after))
            elif t := self._gone.times.get(member.pid, 0.0):
                reason = (
                    f"{who} (process {member.pid}) exited first, without an end event: killed, or by os._exit"
                )
                found.append((False, t, "failed", reason))
        all_done = all(member.ended is not None and member.ended[1] == "done" for member in members)
        if len(members) < 2 or all_done or not found:
            return None
        return min(found)[2:]

    def finish(self) -> Iterator[Event]:
        """At the end of the command: say how far the ranks came, if they did not come equally far."""
        self._gone.close()
        ended = [member for member in self._members.values() if member.ended is not None]
        if len(ended) > 1 and len({member.step for member in ended}) > 1:
            least, most = min(ended, key=_step), max(ended, key=_step)
            yield MarkEvent(
                "warning", most.step,
                f"the ranks ran different numbers of steps: {counted(least.step, 'step')} on rank {least.rank}, "
                f"{number(most.step)} on rank {most.rank}",
            )  # fmt: skip

    def _joins(self, name: str, line: Line, earlier: int) -> Iterator[Event]:
        """A process begins to train, or more is known of it."""
        place = line["config"].get("parallel")
        if place is None:
            self._members.pop(name, None)
            return
        rank, world, restart = int(place["rank"]), int(place["ranks"]), place["restart"]
        if not 0 <= rank < world <= MOST_RANKS:
            raise ValueError("no such rank")
        launch, self._comparison.strategy = (place["launch"], restart, world), str(place["strategy"])
        if name in self._members and self._members[name].pid == int(line["pid"]) and launch == self._launch:
            return
        if self._members and (launch != self._launch or rank in self._ranks()):
            first = self.first_end()
            reason = f"{first[1]}; " if first is not None else ""
            which = f" (restart {int(restart)})" if restart else ""
            step = earlier + max(member.step for member in self._members.values())
            about = "" if any(member.ended is not None for member in self._members.values()) else "about "
            yield MarkEvent(
                "warning", step,
                f"{reason}the ranks were started again{which} after {about}step {number(step)}; "
                "steps are counted from there",
            )  # fmt: skip
            self._members.clear()
            self._comparison.clear()
        self._launch, self._comparison.launched = launch, world
        # The ranks of this host, as the launcher says, or else all of them.
        begin, count = map(int, place["here"] or (0, world))
        member = self._members[name] = _Member(rank, int(line["pid"]))
        self._comparison.join(rank, str(line["host"]))
        self._comparison.expect(range(begin, begin + min(count, world)))
        if line["host"] == self._host:
            self._gone.watch(member.pid)

    def _ranks(self) -> set[int]:
        return {member.rank for member in self._members.values()}


def _step(member: _Member) -> int:
    return member.step
