"""Puts what the ranks of a script did in the same steps side by side, and says which of them ended first.

Each rank ends its windows by itself, but at numbers of steps that are multiples of powers of two (see ndd_watch.steps),
so that windows of different ranks end together sooner or later. Steps that are not timed on every rank are left out.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from ndd_engine.child import PARTNER_GONE
from ndd_engine.measure.ranks import FIGURES, RanksFold
from ndd_engine.record.events import PHASES, Event, MarkEvent, RanksEvent
from ndd_engine.text import counted, number, printable

from .gone import Gone
from .records import Line

# Windows of a rank that wait for those of the others; after so many, it is compared without the ranks that are silent.
PATIENCE = 8
MOST_WINDOWS = 64
# A larger number in a record is damage.
MOST_RANKS = 1 << 16
# Lines with samples of the stack that tell where a rank takes its time: one is written every 5 s.
KEPT_LOOKS = 6
_CHARS = 160  # of a place
# A function that takes a rank longer than the others, by this part of a step, makes it a straggler.
LONGER = 0.1
_UNKNOWN = -1.0


@dataclass(frozen=True)
class _Window:
    """Timed steps of a rank: number -> (own, waiting) nanoseconds. end: steps before the next window.

    phases: nanoseconds of these steps, in the order of PHASES, without waiting.
    """

    end: int
    steps: Mapping[int, tuple[int, int]]
    phases: Sequence[int]
    cpu_ns: int


@dataclass
class _Member:
    """A rank. ended: (Unix time, status, reason), as it wrote; silent: it tells no more, or never did."""

    rank: int
    host: str
    pid: int
    step: int = 0
    windows: deque[_Window] = field(default_factory=lambda: deque(maxlen=MOST_WINDOWS))
    looks: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=KEPT_LOOKS))
    # Of the last profiled step: its nanoseconds, and those of (file, line, function, caller, phase) by itself.
    profiled_ns: int = 0
    functions: Mapping[tuple[str, int, str, str, str], int] = field(default_factory=dict)
    rss: float = _UNKNOWN
    allocated: float = _UNKNOWN
    ended: tuple[float, str, str] | None = None
    silent: bool = False

    def places(self, folder: str) -> dict[str, str]:
        """By phase, where the rank was seen most often."""
        seen: dict[str, Counter[str]] = {}
        for phase, file, line, name, _, count in (frame for frames in self.looks for frame in frames):
            if file != "?":
                place = f"{_short(str(file), folder)}:{int(line)} {name}"
                seen.setdefault(str(phase), Counter())[printable(place)[:_CHARS]] += int(count)
        return {phase: places.most_common(1)[0][0] for phase, places in seen.items()}

    def longer(self, others: Sequence[_Member], folder: str) -> dict[str, str]:
        """The function that takes this rank longer than the usual other one, by its phase; {} if none does.

        By the profiled steps: stack samples see pure Python only where it releases the interpreter lock.
        """
        known = [other.functions for other in others if other.profiled_ns]
        if not known:
            return {}
        more = {
            place: own - median(each.get(place, 0) for each in known) for place, own in self.functions.items()
        }
        place = max(more, key=more.__getitem__, default=None)
        if place is None or more[place] < LONGER * self.profiled_ns:
            return {}
        file, line, name, caller, phase = place
        called = f", called by {caller}" if caller else ""
        return {phase: printable(f"{_short(file, folder)}:{line} {name}{called}")[:_CHARS]}


class ScriptRanks:
    """The ranks that this host observes. folder: of the command; places in it are shown relative to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._host = socket.gethostname()
        self._members: dict[str, _Member] = {}
        self._gone = Gone()
        self._launch: tuple[Any, ...] = ()
        self._world = 0
        # The ranks of this host, as the launcher says, or else all of them. Those that are waited for, and those that
        # never came.
        self._here = range(0)
        self._expected: set[int] = set()
        self._absent: set[int] = set()
        self._strategy = ""
        self._fold: RanksFold | None = None
        self._folded: list[int] = []
        self._told: set[str] = set()
        self._broken = False

    def rank_of(self, name: str) -> int | None:
        """The rank of a process that exchanges data with others; None for any other process."""
        member = self._members.get(name)
        return None if member is None else member.rank

    def take(self, name: str, line: Line, earlier: int) -> Iterator[Event]:
        """The events of a line of a process. earlier: steps before the present launch.

        Raises KeyError, TypeError or ValueError for a line of another format.
        """
        kind = line["type"]
        if kind == "process":
            yield from self._joins(name, line, earlier)
        member = self._members.get(name)
        if member is None:
            return
        if kind == "window" and "ranks" in line:
            window = _window(line)
            if (rss := line["ranks"].get("rss_bytes")) is not None:
                member.rss = float(rss)
            member.step = window.end
            if not member.silent:
                member.windows.append(window)
        elif kind == "stacks":
            member.looks.append(list(line["frames"]))
        elif kind == "profile":
            member.functions = {
                (str(file), int(at), str(name), str(caller), str(phase)): int(own)
                for file, at, name, _calls, _ns, own, caller, phase in line["functions"]
            }
            member.profiled_ns = int(line["ns"])
        elif kind == "memory":
            member.allocated = float(line["allocated_bytes"])
        elif kind == "model":
            self._strategy = str(line.get("strategy") or "")
        elif kind == "end":
            member.ended = float(line["t"]), str(line["status"]), printable(str(line["reason"]))
            member.step = int(line["step"])
        if kind in ("end", "unobserved"):
            member.silent = True
        if kind in ("window", "end", "unobserved") and not self._broken:
            yield from self._guarded(earlier)

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
        """A process begins to train."""
        if not line.get("exchanges"):
            self._members.pop(name, None)
            return
        rank, world, restart = int(line["rank"]), int(line["ranks"]), line.get("restart")
        if not 0 <= rank < world <= MOST_RANKS:
            raise ValueError("no such rank")
        launch = line.get("launch"), restart, world
        if self._members and (launch != self._launch or rank in self._ranks()):
            first = self.first_end()
            reason = f"{first[1]}; " if first is not None else ""
            which = f" (restart {int(restart)})" if restart else ""
            step = earlier + max(member.step for member in self._members.values())
            about = "" if any(member.ended is not None for member in self._members.values()) else "about "
            yield MarkEvent(
                "warning", step,
                f"{reason}the ranks were started again{which} after {about}step {number(step)}; steps go on counting",
            )  # fmt: skip
            self._members.clear()
            self._expected, self._absent = set(), set()
            self._fold = None
        self._launch, self._world = launch, world
        begin, count = map(int, line.get("here") or (0, world))
        self._here = range(begin, begin + min(count, world))
        self._expected |= set(self._here) - self._absent
        member = _Member(rank, str(line["host"]), int(line["pid"]))
        self._members[name] = member
        if member.host == self._host:
            self._gone.watch(member.pid)

    def _ranks(self) -> set[int]:
        return {member.rank for member in self._members.values()}

    def _guarded(self, earlier: int) -> Iterator[Event]:
        try:
            yield from list(self._fold_all(earlier))
        except Exception as error:  # noqa: BLE001  what is shown must not end the run
            self._broken = True
            text = f"cannot compare the ranks: {type(error).__name__}: {printable(str(error))}"
            yield MarkEvent("warning", earlier, text)

    def _fold_all(self, earlier: int) -> Iterator[Event]:
        """The events of all windows that every rank has ended."""
        while True:
            members = sorted(self._members.values(), key=lambda member: member.rank)
            missing = self._expected - self._ranks()
            waiting = [member for member in members if not member.silent and not member.windows]
            if (missing or waiting) and max(len(member.windows) for member in members) < PATIENCE:
                return
            self._absent |= missing
            self._expected -= missing
            for member in waiting:
                member.silent = True
            active = [member for member in members if member.windows]
            if len(active) < 2:
                return
            end = _common_end(active)
            if end is None:
                if any(member.silent and not member.windows for member in active):
                    continue  # it ended before the others, which continue
                return
            yield from self._tell(active, earlier + end)
            event = self._event(active, end, earlier)
            if event is not None:
                yield event

    def _tell(self, active: Sequence[_Member], step: int) -> Iterator[Event]:
        """Say once which ranks are not compared."""
        seen = {member.rank for member in active}
        lacking = [rank for rank in range(self._world) if rank not in seen]
        ended = {member.rank for member in self._members.values() if member.ended is not None}
        elsewhere = [rank for rank in lacking if rank not in self._here]
        lost = [rank for rank in lacking if rank not in elsewhere and rank not in ended]
        for ranks, why in ((elsewhere, "on other hosts"), (lost, "not observed")):
            if ranks:
                text = f"{_span(ranks)} of {self._world}: {why}, so no part of the comparison of ranks"
                if text not in self._told:
                    self._told.add(text)
                    yield MarkEvent("note", step, text)

    def _event(self, active: Sequence[_Member], end: int, earlier: int) -> RanksEvent | None:
        """The event of the windows up to this number of steps, which all of them have ended."""
        taken = []
        for member in active:
            windows = []
            while member.windows and member.windows[0].end <= end:
                windows.append(member.windows.popleft())
            taken.append(windows)
        timed = [{at: each for window in windows for at, each in window.steps.items()} for windows in taken]
        common = sorted(set.intersection(*(set(steps) for steps in timed)))
        if not common:
            return None
        ranks = [member.rank for member in active]
        if self._fold is None or ranks != self._folded:
            self._fold = RanksFold(self._strategy, [member.host for member in active])
            self._folded = ranks
        rows = []
        for member, windows, steps in zip(active, taken, timed, strict=True):
            own, wait = (sum(steps[at][index] for at in common) for index in range(2))
            part = own / max(sum(each for each, _ in steps.values()), 1)
            phases = [
                sum(column) * part for column in zip(*(window.phases for window in windows), strict=True)
            ]
            figures = dict(zip(PHASES, phases, strict=True))
            cpu = sum(window.cpu_ns for window in windows) * part
            figures |= {
                "wait": wait,
                "wall": own + wait,
                "cpu": cpu,
                "steps": len(common),
                "hidden": _UNKNOWN,
            }
            figures |= {"loss_sum": 0, "loss_count": 0, "rss": member.rss, "allocated": member.allocated}
            rows.append([float(figures[name]) for name in FIGURES])
        least = sum(min(steps[at][1] for steps in timed) for at in common)
        most = sum(max(steps[at][0] for steps in timed) for at in common)

        def places(index: int) -> Mapping[str, str]:
            member = active[index]
            others = [one for one in active if one is not member]
            return {**member.places(self._folder), **member.longer(others, self._folder)}

        return self._numbered(self._fold.window(earlier + end, rows, least, most, places), ranks)

    def _numbered(self, event: RanksEvent, ranks: Sequence[int]) -> RanksEvent:
        """With the numbers of the ranks instead of their places among those that are observed."""
        if len(ranks) == self._world:
            return event
        late = event.late
        return replace(
            event,
            launched=self._world,
            first_rank=ranks[0],
            columns_us={name: [*each[:4], ranks[each[4]]] for name, each in event.columns_us.items()},
            memory_bytes={name: [*each[:4], ranks[each[4]]] for name, each in event.memory_bytes.items()},
            rows_us={str(ranks[int(index)]): row for index, row in event.rows_us.items()},
            row_hosts={str(ranks[int(index)]): host for index, host in event.row_hosts.items()},
            late=None if late is None else {**late, "rank": ranks[late["rank"]]},
        )


def _window(line: Line) -> _Window:
    told = line["ranks"]
    begin = int(told["begin"])
    steps = {
        begin + int(at): (int(own), int(wait))
        for at, own, wait in zip(told["numbers"], told["own_ns"], told["wait_ns"], strict=True)
    }
    phases = [int(value) for value in told["phases_ns"]] or [0] * len(PHASES)
    if len(phases) != len(PHASES):
        raise ValueError("another number of phases")
    return _Window(int(line["step"]), steps, phases, int(told["cpu_ns"]))


def _common_end(active: Sequence[_Member]) -> int | None:
    """The first number of steps at which a window of every rank ends; None before that is known.

    Forgets the windows of a rank that has ended before.
    """
    end = max(member.windows[0].end for member in active)
    while True:
        ends = [next((window.end for window in member.windows if window.end >= end), 0) for member in active]
        if not all(ends):
            for member, found in zip(active, ends, strict=True):
                if not found and member.silent:
                    member.windows.clear()
            return None
        if min(ends) == max(ends):
            return ends[0]
        end = max(ends)


def _step(member: _Member) -> int:
    return member.step


def _span(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 4 to 7", "ranks 1, 3, 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}"


def _short(file: str, folder: str) -> str:
    """The path relative to the folder if it is in it, otherwise its last two parts."""
    inside = file.removeprefix(folder.rstrip("/") + "/")
    return inside if inside != file else "/".join(Path(file).parts[-2:])
