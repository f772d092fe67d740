"""Compares what the ranks of a run did in the same steps: phases, exchange, skew, and which rank is the straggler.

Each rank tells of the windows that it ends, see RankEvent. Windows of different ranks end together sooner or later:
those of a script at multiples of powers of two (see ndd_watch.steps), own ones after the same steps. The steps in them
are compared that every rank timed.

All ranks take the same time for a step, since they exchange data in it: a rank that works longer waits less. Ranks are
therefore compared by their own time, the wall time without waiting for others. A straggler's own time is longer than
usual by more than a share of the step, more than ranks usually differ by, and more than it varies between windows.

The process that writes the record of a run compares: the console that observes a script, or rank 0 of an own run on a
thread, since own ranks train on without a console. Uses neither torch nor numpy.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

from ndd_engine.record.event import ASIDES, RankEvent, RanksEvent, Summary
from ndd_engine.record.events import PHASES, FunctionsEvent, MarkEvent
from ndd_engine.text import printable

# Windows of a rank that wait for those of the others.
MOST_WINDOWS = 64
# The phases of a step, and the sub-phase of them in which a rank waits for others.
IN_STEP = tuple(name for name in PHASES if name not in ASIDES)
WAITING = "exchange"
# Steps of a window that a rank tells of, about; of more of them, some are left out, on all ranks the same.
TOLD_STEPS = 128
_GOLDEN = 0x9E3779B9
# Samples of a script's stack that tell where a rank takes its time: one is written every 5 s.
KEPT_LOOKS = 6
_PLACE_CHARS = 160
# A function that takes a rank longer than the others, by this part of a step, makes it a straggler.
LONGER = 0.1
# Ranks whose rows are recorded.
KEPT_ROWS = 8
# Phases of at least this share of the wall time on some rank are part of these rows.
LEAST_PART = 0.005
# Longer names of hosts are cut, so that a window stays small.
HOST_CHARS = 32
# The cells of the heat map: one for each rank up to RANK_CELLS ranks, else one for each host or several.
RANK_CELLS = 128
MOST_CELLS = 256
# One level of the heat map, as a share of a step.
LEVEL = 0.02


def compared_steps(
    step: int, begin: int, names: Sequence[str], rows: Mapping[int, Sequence[float | None]]
) -> RankEvent:
    """What a rank tells of a window. names: of phases and sub-phases. rows: by step, nanoseconds of each of these."""
    parts = [name.partition("/") for name in names]
    waits = [at for at, (phase, _, part) in enumerate(parts) if part == WAITING and phase in IN_STEP]
    works = {
        name: [at for at, (phase, _, part) in enumerate(parts) if phase == name and part != WAITING]
        for name in IN_STEP
    }
    limit = (1 << 32) * TOLD_STEPS // max(len(rows), TOLD_STEPS)
    told = {at: row for at, row in rows.items() if at * _GOLDEN & 0xFFFFFFFF < limit}

    def spent(row: Sequence[float | None], places: Sequence[int]) -> float:
        return sum(row[at] or 0 for at in places if at < len(row))

    phases = {name: sum(spent(row, at) for row in told.values()) for name, at in works.items()}
    inside = [at for places in works.values() for at in places]
    return RankEvent(
        step=step,
        begin=begin,
        numbers=[at - begin for at in told],
        own_ns=[round(spent(row, inside)) for row in told.values()],
        wait_ns=[round(spent(row, waits)) for row in told.values()],
        phases_ns={name: round(value) for name, value in phases.items() if value},
    )


@dataclass
class _Rank:
    """A rank. silent: it is not waited for; over: it tells no more, and ended: because its training has ended."""

    number: int
    host: str
    windows: deque[RankEvent] = field(default_factory=lambda: deque(maxlen=MOST_WINDOWS))
    silent: bool = False
    over: bool = False
    ended: bool = False
    # Samples of the stack: [phase, file, line, function, ..., count]. Of the last profiled step: its nanoseconds, and
    # those of (file, line, function, caller, phase) by itself.
    looks: deque[Sequence[Sequence[Any]]] = field(default_factory=lambda: deque(maxlen=KEPT_LOOKS))
    profiled_ns: int = 0
    functions: Mapping[tuple[str, int, str, str, str], int] = field(default_factory=dict)

    def places(self, short: Callable[[str], str]) -> dict[str, str]:
        """By phase, the function that took most of the profiled step, or where samples saw the rank most often."""
        found: dict[str, str] = {}
        for (file, line, name, _, phase), _own in sorted(self.functions.items(), key=lambda item: item[1]):
            found[phase] = f"{short(file)}:{line} {name}"
        seen: dict[str, Counter[str]] = {}
        for phase, file, line, name, count, _ in (frame for frames in self.looks for frame in frames):
            if file != "?":
                place = f"{short(str(file))}:{int(line)} {name}"
                seen.setdefault(str(phase), Counter())[place] += int(count)
        return found | {phase: places.most_common(1)[0][0] for phase, places in seen.items()}

    def longer(self, others: Sequence[_Rank], short: Callable[[str], str]) -> dict[str, str]:
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
        return {phase: f"{short(file)}:{line} {name}{f', called by {caller}' if caller else ''}"}


class RankComparison:
    """Takes what ranks tell, and returns the events of the windows that all of them have ended.

    strategy: as in RanksEvent. launched: number of ranks, of which some may not be observed. patience: after so many
    windows of one rank, those that have told nothing are left out until they tell something. missing: why they do not,
    in words. folder: places in it are shown relative to it.
    """

    def __init__(self, patience: int = MOST_WINDOWS, missing: str = "not observed", folder: str = "") -> None:
        self.strategy = ""
        self.launched = 0
        # The ranks of this host, those of them that have not joined yet, and those that are waited for no more.
        self._here: range = range(0)
        self._expected: set[int] = set()
        self._absent: set[int] = set()
        self._patience, self._missing, self._folder = patience, missing, folder.rstrip("/") + "/"
        self._gave_up = False
        self._reported: set[str] = set()
        self._ranks: dict[int, _Rank] = {}
        self._compared: list[int] = []
        self._hosts: list[str] = []
        self._judge: Judge | None = None
        self._broken = False

    def clear(self) -> None:
        """The ranks are started again."""
        self._ranks, self._judge, self._expected, self._absent = {}, None, set(), set()

    def join(self, rank: int, host: str) -> None:
        """A rank begins to train."""
        self._ranks[rank] = _Rank(rank, host)

    def expect(self, ranks: range) -> None:
        """These ranks are launched on this host."""
        self._here = ranks
        self._expected |= set(ranks) - self._absent

    def leave(self, rank: int, ended: bool) -> None:
        """This rank tells no more. ended: since its training has ended."""
        if (one := self._ranks.get(rank)) is not None:
            one.silent = one.over = True
            one.ended |= ended

    @property
    def waits(self) -> bool:
        """Whether a rank has told of a window that is not compared yet."""
        return not self._broken and any(rank.windows for rank in self._ranks.values())

    def take(self, rank: int, event: RankEvent | FunctionsEvent) -> None:
        """What a rank tells."""
        one = self._ranks[rank]
        if isinstance(event, FunctionsEvent):
            one.profiled_ns = event.wall_ns
            one.functions = {
                (str(file), int(line), str(name), str(caller), str(phase)): int(own)
                for file, line, name, _calls, _ns, own, caller, phase in event.functions
            }
        elif not one.over:
            one.silent = False
            one.windows.append(event)

    def look(self, rank: int, frames: Sequence[Sequence[Any]]) -> None:
        """Samples of a rank's stack: [phase, file, line, function, caller, count] each."""
        self._ranks[rank].looks.append(frames)

    def new(self, earlier: int = 0) -> Iterator[RanksEvent | MarkEvent]:
        """The events that are new, and notes about ranks that are not compared. After a warning there are no more.

        earlier: steps before those that the ranks count.
        """
        if self._broken:
            return
        try:
            while (found := self._common()) is not None:
                active, end = found
                if (event := self._event(active, end, earlier)) is not None:
                    yield from self._left_out(event.step)
                    yield event
            if self._gave_up:
                self._gave_up = False
                steps = [rank.windows[-1].step for rank in self._ranks.values() if rank.windows]
                yield from self._left_out(earlier + max(steps, default=0))
        except Exception as error:  # noqa: BLE001  what is shown must not end the run
            self._broken = True
            text = f"cannot compare the ranks: {type(error).__name__}: {printable(str(error))}"
            yield MarkEvent("warning", earlier, text)

    def _left_out(self, step: int) -> Iterator[MarkEvent]:
        """Say once which ranks are launched but not compared."""
        waited = self._expected - self._ranks.keys()
        waited |= {rank.number for rank in self._ranks.values() if rank.windows or not rank.silent}
        lacking = [rank for rank in range(self.launched) if rank not in waited]
        elsewhere = [rank for rank in lacking if rank not in self._here]
        ended = {rank.number for rank in self._ranks.values() if rank.ended}
        lost = [rank for rank in lacking if rank in self._here and rank not in ended]
        for ranks, why in ((elsewhere, "on other hosts"), (lost, self._missing)):
            text = f"{_span(ranks)} of {self.launched}: {why}, so no part of the comparison of ranks"
            if ranks and text not in self._reported:
                self._reported.add(text)
                yield MarkEvent("note", step, text)

    def _common(self) -> tuple[list[_Rank], int] | None:
        """The ranks whose windows are compared, and the number of steps at which a window of each of them ends."""
        while True:
            ranks = sorted(self._ranks.values(), key=lambda rank: rank.number)
            begin = max((rank.windows[0].step for rank in ranks if rank.windows), default=0)
            waiting = [
                rank
                for rank in ranks
                if not rank.silent and (not rank.windows or rank.windows[-1].step < begin)
            ]
            missing = self._expected - self._ranks.keys()
            if waiting or missing:
                most = max((len(rank.windows) for rank in ranks), default=0)
                if most < self._patience:
                    return None
                self._gave_up = True
                self._absent |= missing
                self._expected -= missing
                for rank in waiting:
                    rank.silent = True
            active = [rank for rank in ranks if rank.windows]
            if len(active) < 2:
                return None
            end = _common_end(active)
            if end is not None:
                return active, end
            if all(rank.windows or not rank.silent for rank in active):
                return None
            # It ended before the others, which continue.

    def _event(self, active: Sequence[_Rank], end: int, earlier: int) -> RanksEvent | None:
        """The event of the windows up to this number of steps, which all of them have ended."""
        taken = []
        for rank in active:
            windows = []
            while rank.windows and rank.windows[0].step <= end:
                windows.append(rank.windows.popleft())
            taken.append(windows)
        numbers = [rank.number for rank in active]
        if self._judge is None or numbers != self._compared:
            self._compared = numbers
            self._hosts = [rank.host.partition(".")[0][:HOST_CHARS] for rank in active]
            self._judge = Judge(self._hosts)
        timed = [
            {
                window.begin + at: (own, wait)
                for window in windows
                for at, own, wait in zip(window.numbers, window.own_ns, window.wait_ns, strict=True)
            }
            for windows in taken
        ]
        common = sorted(set.intersection(*(set(steps) for steps in timed)))
        if not common:
            return None
        rows = [_row(windows, steps, common) for windows, steps in zip(taken, timed, strict=True)]
        steps, world = len(common), len(rows)
        waits, owns = [row.wait for row in rows], [row.own_ns for row in rows]
        wall_ns = (sum(owns) + sum(waits)) / world
        shown = {name: [row.phases.get(name, 0.0) for row in rows] for name in IN_STEP}
        phases = {name: RankFigure([value / steps for value in column]) for name, column in shown.items()}
        self._judge.add(
            Judged(earlier + end, RankFigure([own / steps for own in owns]), phases, wall_ns / steps)
        )
        late = self._judge.late(lambda index: self._places(active, index))

        shown = {name: column for name, column in shown.items() if any(column)}
        shown |= {"wait": waits, "own": owns}
        if None not in (cpu := [row.cpu for row in rows]):
            shown["cpu"] = cpu  # type: ignore[assignment]
        each_us = {name: [value / steps / 1e3 for value in column] for name, column in shown.items()}
        memory = {"rss": [row.rss for row in rows], "allocated": [row.allocated for row in rows]}
        hidden = [row.hidden for row in rows if row.hidden is not None]
        exchange = sum(min(each[at][1] for each in timed) for at in common)
        slowest = sorted(range(world), key=owns.__getitem__, reverse=True)[:KEPT_ROWS]
        if late is not None and late["rank"] not in slowest:
            slowest[-1] = late["rank"]
        floor = LEAST_PART * max(each_us["own"])
        parts = [name for name in IN_STEP if name in each_us and max(each_us[name]) >= floor]
        names = ["own", "wait", *(["cpu"] if "cpu" in each_us else []), *parts]
        cells, cell_ranks = self._cells(owns, steps)
        return RanksEvent(
            step=earlier + end,
            steps=steps,
            world=world,
            hosts=len(set(self._hosts)),
            strategy=self.strategy,
            wall_ns=round(wall_ns),
            exchange_ns=exchange,
            skew_ns=round(sum(waits) / world - exchange),
            critical_ns=sum(max(each[at][0] for each in timed) for at in common),
            hidden_ns=round(sum(hidden) * steps / world) if len(hidden) == world else None,
            columns_us={name: summary(column, _rounded, numbers) for name, column in each_us.items()},
            memory_bytes={
                name: summary([each or 0 for each in column], round, numbers)
                for name, column in memory.items()
                if None not in column and any(column)
            },
            row_names=names,
            rows_us={str(numbers[at]): [_rounded(each_us[name][at]) for name in names] for at in slowest},
            row_hosts={str(numbers[at]): self._hosts[at] for at in slowest}
            if len(set(self._hosts)) > 1
            else {},
            cells=cells,
            cell_ranks=cell_ranks,
            late=None if late is None else {**late, "rank": numbers[late["rank"]]},
            launched=None if world == self.launched else self.launched,
            first_rank=numbers[0],
        )

    def _places(self, active: Sequence[_Rank], index: int) -> Mapping[str, str]:
        """By phase, the file, line and function that takes most of a rank, where they are known."""
        others = [rank for rank in active if rank is not active[index]]
        found = active[index].places(self._short) | active[index].longer(others, self._short)
        return {phase: printable(place)[:_PLACE_CHARS] for phase, place in found.items()}

    def _short(self, file: str) -> str:
        """The path relative to the folder if it is in it, otherwise its last two parts."""
        inside = file.removeprefix(self._folder)
        return inside if inside != file and len(self._folder) > 1 else "/".join(Path(file).parts[-2:])

    def _cells(self, own: Sequence[float], steps: int) -> tuple[str, int]:
        """The heat map and the number of ranks in a cell; ("", 0) if every rank has a row."""
        world = len(own)
        if world <= KEPT_ROWS:
            return "", 0
        assert self._judge is not None
        hosts = len(set(self._hosts))
        size = 1 if world <= RANK_CELLS else max(world // hosts, 1) if hosts > 1 else 8
        while -(-world // size) > MOST_CELLS:
            size *= 2
        excess = self._judge.excess
        if not excess:
            middle = sorted(own)[world // 2]
            excess = [(value - middle) / steps for value in own]
        unit = LEVEL * max(sum(own) / world / steps, 1.0)
        groups = (excess[begin : begin + size] for begin in range(0, world, size))
        return "".join(str(min(max(int(max(group) / unit), 0), 9)) for group in groups), size


@dataclass(frozen=True, slots=True)
class _Row:
    """What a rank did in the compared steps, in nanoseconds or bytes; None is unknown. hidden: of one step."""

    own_ns: float
    wait: float
    phases: Mapping[str, float]
    cpu: float | None
    hidden: float | None
    rss: int | None
    allocated: int | None


def _row(windows: Sequence[RankEvent], steps: Mapping[int, tuple[int, int]], common: Sequence[int]) -> _Row:
    """Phases and processor time are known of whole windows only, and shared out by own time."""
    own, wait = (sum(steps[at][index] for at in common) for index in range(2))
    part = own / max(sum(each for each, _ in steps.values()), 1)
    phases: dict[str, float] = {}
    for window in windows:
        for name, spent_ns in window.phases_ns.items():
            phases[name] = phases.get(name, 0.0) + spent_ns * part
    spent = [window.cpu_ns for window in windows if window.cpu_ns is not None]
    last = windows[-1]
    cpu = sum(spent) * part if len(spent) == len(windows) else None
    return _Row(own, wait, phases, cpu, last.hidden_ns, last.rss_bytes, last.allocated_bytes)


def _common_end(active: Sequence[_Rank]) -> int | None:
    """The first number of steps at which a window of every rank ends; None before that is known.

    Forgets the windows of a rank that has ended before.
    """
    end = max(rank.windows[0].step for rank in active)
    while True:
        ends = [next((window.step for window in rank.windows if window.step >= end), 0) for rank in active]
        if not all(ends):
            for rank, found in zip(active, ends, strict=True):
                if not found and rank.silent:
                    rank.windows.clear()
            return None
        if min(ends) == max(ends):
            return ends[0]
        end = max(ends)


def _span(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 4 to 7", "ranks 1, 3, 5"; "" for none."""
    if len(ranks) < 2:
        return "".join(f"rank {rank}" for rank in ranks)
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}"


def summary(values: Sequence[float], rounded: Callable[[float], float], ranks: Sequence[int]) -> Summary:
    """[least, median, mean, most, rank of the most] of the values of these ranks."""
    order = sorted(values)
    count = len(order)
    middle = (order[(count - 1) // 2] + order[count // 2]) / 2
    least, median, mean, most = map(rounded, (order[0], middle, sum(order) / count, order[-1]))
    return least, median, mean, most, ranks[values.index(order[-1])]


def _rounded(value: float) -> float:
    """To about four digits, for a short record."""
    return round(value) if abs(value) >= 1000 else round(value, 1)


# Which rank is the straggler.

# Windows that are judged, and the first ones of a run, which have start-up costs.
KEPT_WINDOWS = 16
WARM_UP = 2
# If these have no straggler, more of them show smaller delays; not of many ranks, since rank 0 does this as it trains.
MORE_WINDOWS = 64
MOST_RANKS_FOR_MORE = 64
# Fewer windows are not judged.
LEAST_WINDOWS = 6
# Part of the windows that is left out at each end of their order: single slow windows.
TRIMMED = 0.2
# A straggler is late by this share of a step or more (in more windows, by the other share), and by this many standard
# deviations of the ranks' own times.
LATE_SHARE = 0.04
LATE_SHARE_OF_MORE = 0.03
LATE_SPREADS = 5.5
# With fewer ranks their spread is not known.
LEAST_RANKS = 4
# With fewer ranks, one of them matters for the median: it is compared with the median of the others.
FEW_RANKS = 16
# Student's t for one in a thousand, one-sided, by degrees of freedom.
STUDENT = (
    318.0, 22.3, 10.2, 7.2, 5.9, 5.2, 4.8, 4.5, 4.3, 4.1, 4.0, 3.9, 3.9, 3.8, 3.7, 3.7, 3.7, 3.6, 3.6, 3.6,
)  # fmt: skip
# A rank that is named stays named down to this part of the thresholds.
STAYS = 0.7
# A straggler in more windows has to be one in the newest as well, from this part of the threshold on.
STILL = 0.5
# Other ranks are stragglers as well from this part of the longest delay on.
ALSO_LATE = 0.5
# The median absolute deviation of normally distributed values, as a standard deviation.
MAD_TO_SIGMA = 1.4826


class RankFigure:
    """One figure of all ranks, nanoseconds per step."""

    __slots__ = ("middle", "values")

    def __init__(self, values: Sequence[float]) -> None:
        self.values = array("d", values)
        self.middle = median(values)

    def delay(self, rank: int) -> float:
        """The rank's value beyond the median of the others."""
        values = self.values
        if len(values) < FEW_RANKS:
            return values[rank] - median([*values[:rank], *values[rank + 1 :]])
        return values[rank] - self.middle

    def beyond(self) -> array[float]:
        """All values beyond the median of all."""
        middle = self.middle
        return array("d", [value - middle for value in self.values])


@dataclass(frozen=True, slots=True)
class Judged:
    """A window: own times and phases of all ranks, and their mean wall time in nanoseconds per step."""

    step: int
    own_ns: RankFigure
    phases: Mapping[str, RankFigure]
    wall_ns: float


# A rank, by how many nanoseconds a step it is later than usual, the ceiling, and all stragglers.
Lateness = tuple[int, float, float, list[int]]


class Judge:
    """Keeps the recent windows of all ranks. hosts: the host of each rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        many = len(self._hosts) > MOST_RANKS_FOR_MORE
        self._windows: deque[Judged] = deque(maxlen=KEPT_WINDOWS if many else MORE_WINDOWS)
        self._beyond: deque[array[float]] = deque(maxlen=self._windows.maxlen)
        self._skipped = 0
        self._named: int | None = None
        self._since_step = 0
        self._excess: list[float] | None = None

    def add(self, window: Judged) -> None:
        """A window with steps."""
        self._excess = None
        if self._skipped < WARM_UP:
            self._skipped += 1
        else:
            self._windows.append(window)
            self._beyond.append(window.own_ns.beyond())

    @property
    def excess(self) -> list[float]:
        """By how many nanoseconds a step each rank's own time is longer than the median; [] before the first window."""
        if self._excess is None:
            self._excess = self._excess_of(KEPT_WINDOWS)
        return self._excess

    def _excess_of(self, count: int) -> list[float]:
        newest = list(self._beyond)[-count:]
        return [trimmed_mean(values) for values in zip(*newest, strict=True)]

    def late(self, places: Callable[[int], Mapping[str, str]]) -> dict[str, Any] | None:
        """The rank that holds up the others, as record.event.Late; None if there is none, or before it is known.

        places: returns for a rank, by phase, the file, line and function that takes most of it, where they are known.
        """
        found = self._found() if len(self._windows) >= LEAST_WINDOWS and len(self._hosts) > 1 else None
        if found is None:
            self._named = None
            return None
        windows, (rank, late_ns, ceiling, also) = found
        if rank != self._named:
            self._named, self._since_step = rank, self._windows[-1].step
        phases = {
            name: trimmed_mean([window.phases[name].delay(rank) for window in windows])
            for name in windows[-1].phases
        }
        phase = max(phases, key=phases.__getitem__)
        hosts = {self._hosts[index] for index in also}
        return {
            "rank": rank,
            "host": self._hosts[rank],
            "late_ns": round(late_ns),
            "phase": phase,
            "phase_ns": round(phases[phase]),
            "ceiling": round(ceiling, 4),
            "since_step": self._since_step,
            "where": places(rank).get(phase),
            "count": len(also),
            "same_host": len(hosts) == 1 and self._hosts.count(hosts.pop()) == len(also) > 1,
        }

    def _found(self) -> tuple[Sequence[Judged], Lateness] | None:
        """The windows in which a rank is a straggler, and by how much: the newest ones, or more of them."""
        every = list(self._windows)
        newest = every[-KEPT_WINDOWS:]
        if (found := self._late(newest, self.excess, LATE_SHARE)) is not None:
            return newest, found
        if len(every) >= 2 * KEPT_WINDOWS:
            found = self._late(every, self._excess_of(MORE_WINDOWS), LATE_SHARE_OF_MORE)
            wall_ns = median(window.wall_ns for window in newest)
            if found and RankFigure(self.excess).delay(found[0]) > STILL * LATE_SHARE_OF_MORE * wall_ns:
                return every, found
        return None

    def _late(self, windows: Sequence[Judged], mean_excess: Sequence[float], share: float) -> Lateness | None:
        """The stragglers in these windows, by at least a share of the step. mean_excess: of each rank, see `excess`."""
        excess = RankFigure(mean_excess)
        values = excess.values
        order = sorted(range(len(values)), key=values.__getitem__)
        wall_ns = median(window.wall_ns for window in windows)
        rank, named = order[-1], self._named
        # Of several ranks that are equally late, the one that was named stays.
        if named is not None and excess.delay(named) >= STAYS * excess.delay(rank):
            rank = named
        ease = STAYS if rank == named else 1.0
        late_ns = excess.delay(rank)
        usual = values[rank] - late_ns
        least = share * wall_ns
        if len(values) >= LEAST_RANKS:
            spread = MAD_TO_SIGMA * median(abs(values[index] - usual) for index in order if index != rank)
            least = max(least, LATE_SPREADS * spread)
        if wall_ns <= 0 or late_ns <= ease * least or not _lasting(windows, rank, ease):
            return None
        bar = usual + max(ALSO_LATE * late_ns, ease * least)
        also = [index for index in order if values[index] >= bar or index == rank]
        rest = [values[index] for index in order if values[index] < bar and index != rank]
        # Without these ranks a step waits for the next slowest.
        gain = values[order[-1]] - max(rest, default=usual)
        return rank, late_ns, wall_ns / max(wall_ns - gain, 0.01 * wall_ns), also


def _lasting(windows: Sequence[Judged], rank: int, ease: float) -> bool:
    """Whether the rank's delay is significant beside its variation between windows."""
    mean, error, freedom = trimmed([window.own_ns.delay(rank) for window in windows])
    return mean > ease * STUDENT[min(freedom, len(STUDENT)) - 1] * error


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the largest and the smallest values."""
    cut = int(TRIMMED * len(values))
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


def trimmed(values: Sequence[float]) -> tuple[float, float, int]:
    """The trimmed mean, its standard error and degrees of freedom (Tukey and McLaughlin, 1963). At least 3 values."""
    count = len(values)
    cut = int(TRIMMED * count)
    order = sorted(values)
    kept = order[cut : count - cut]
    clipped = [*[kept[0]] * cut, *kept, *[kept[-1]] * cut]
    mean = sum(clipped) / count
    deviation = sqrt(sum((value - mean) ** 2 for value in clipped) / (count - 1))
    error = deviation / ((1 - 2 * cut / count) * sqrt(count))
    return sum(kept) / len(kept), error, len(kept) - 1
