"""Reads what the workers of a loader tell of themselves, see `ndd_watch.workers`, and what Linux knows of them.

Workers that every pass over the data starts again are added up by their numbers. From profiles by the clock on the wall
and by that of the processor follows which functions take the time of a batch, also on a busy machine: computing counts
as the processor does, and waiting as the wall does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ndd_engine.files import open_regular
from ndd_engine.hardware.process_state import open_files, own_memory, state_of, waiting_of
from ndd_engine.record.worker_events import WAITS, WorkerFigures, WorkerFunction, WorkersEvent
from ndd_engine.text import printable
from ndd_watch import sheet
from ndd_watch.mapped import pss_bytes
from ndd_watch.workers import EDGES, SLOWEST

from .stalls import Standing, why

# From one look at the files to the next, and between two events: the first ones soon, the later ones rarely.
LOOK_S, TOLD_S = 0.5, (2.0, 5.0, 10.0, 20.0, 40.0)
RARE_S = 60.0
# Functions and transforms of an event, and quantiles of the times of batches.
MOST_FUNCTIONS, MOST_TRANSFORMS, QUANTILES = 12, 16, 20
# What takes less of a function's time is not told.
LEAST_KIND = 0.01
# A batch is told that takes longer than so many usual ones, and seconds.
LONG, LONG_S = 5.0, 2.0
# The part of a batch's time that nothing explains up to which it is none, and the same of its time without a processor.
# On a busy machine, a thread also waits for the interpreter lock of another one that has no processor.
UNEXPLAINED, BESIDE_LATE = 0.05, 1.0
# Nanoseconds that the system takes for a page that is touched first, at most; and the part of computing from which on
# it is told.
MOST_FAULT_NS, LEAST_TOUCHED = 5000.0, 0.05
_SUMMED = (
    "batches", "looked", "items", "split", "idle_ns", "fetch_ns", "collate_ns", "cpu_ns", "bytes", "sent", "pickle_ns",
    "blocked_ns", "send_ns", "start_ns", "first_ns",
)  # fmt: skip
Report = dict[str, Any]


@dataclass
class _Place:
    """All workers that have had a number. newest: the report and process id of the present one."""

    starts: int = 0
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0))
    times: dict[int, int] = field(default_factory=dict)
    batch_times: dict[int, int] = field(default_factory=dict)
    slow: list[tuple[int, str]] = field(default_factory=list)
    newest: Report | None = None
    # What Linux last knew.
    system: dict[str, Any] = field(default_factory=dict)

    def end(self) -> None:
        """The newest one has ended: add it to those before."""
        if self.newest is None:
            return
        report, self.newest = self.newest, None
        for name in _SUMMED:
            self.ended[name] += int(report.get(name, 0))
        _add(self.times, report["times"])
        _add(self.batch_times, report["batch_times"])
        self.slow = _slowest(self.slow, report["slow"])


class WorkerWatch:
    """folder: of the files of the workers. Never raises; what cannot be read is left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[int, _Place] = {}
        self._known: dict[int, Report] = {}
        self._doing: dict[int, tuple[int, int, str]] = {}
        self._profiles: dict[int, Report] = {}
        self._begun = time.monotonic()
        self._next, self._told, self._count = 0.0, 0.0, 0
        # Seeds of the iterators that the training has read; those of evaluations are others.
        self._seeds: set[int] = set()
        self._stream = False
        # Process ids and batches of workers that take long, as they were told.
        self._long: set[tuple[int, int]] = set()

    def look(self, seeds: Iterable[int], step: int, final: bool = False) -> Iterator[WorkersEvent]:
        """What is to be recorded now. seeds: of the newest iterators that the training has read, as far as known."""
        self._seeds |= {*seeds}
        now = time.monotonic()
        if now < self._next and not final:
            return
        self._next = now + LOOK_S
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            self._read()
        wait = TOLD_S[self._count] if self._count < len(TOLD_S) else RARE_S
        stuck = {(pid, batch) for pid in self._known if (batch := self._stuck(pid)) is not None}
        news, self._long = not stuck <= self._long, stuck
        if not self._places or not (final or news or now - (self._told or self._begun) >= wait):
            return
        event = self._event(step)
        if event is not None:
            self._told, self._count = now, self._count + 1
            yield event

    def told_of(self, pid: int) -> str:
        """What a worker makes or made last: "batch 12 (items 3, 4)"; "" if that is not known."""
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            self._read()  # it may have begun another batch since the last look
        batch, begun, items = self._doing.get(pid, (0, 0, ""))
        return f"batch {batch} (items {printable(items)})" if begun and items else ""

    def _stuck(self, pid: int) -> int | None:
        """The batch that a worker has been making for unusually long; None if it has not."""
        batch, begun, _ = self._doing.get(pid, (0, 0, ""))
        report = self._known.get(pid)
        if not begun or report is None:
            return None
        usual_ns = report.get("fetch_ns", 0) / max(report.get("looked", 0), 1)
        return batch if time.perf_counter_ns() - begun > max(LONG * usual_ns, LONG_S * 1e9) else None

    def _doing_long(self, pid: int) -> str:
        batch, begun, items = self._doing[pid]
        spent = (time.perf_counter_ns() - begun) * 1e-9
        return f"batch {batch} for {spent:.0f} s (items {printable(items)}); it {_waits(pid)}"

    def _read(self) -> None:
        for path in self._folder.glob(f"*{sheet.SUFFIX}"):
            with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
                found = sheet.read(file.read(sheet.SIZE + 1))
            if found is None:
                continue
            report, batch, begun, items = found
            pid = int(report["pid"])
            lives = (state := state_of(pid)) is not None and state.letter not in "ZX"
            if "gave_up" not in report:
                self._doing[pid] = batch, begun, items
                self._take(pid, report)
            if not lives:
                path.unlink(missing_ok=True)
                if pid in self._known and (place := self._places.get(int(report["number"]))) is not None:
                    if place.newest is not None and place.newest["pid"] == pid:
                        place.end()
                    del self._known[pid]

    def _take(self, pid: int, report: Report) -> None:
        if self._seeds and int(report["seed"]) not in self._seeds:
            return  # of another loader
        self._stream = bool(report["iterable"])
        place = self._places.setdefault(int(report["number"]), _Place())
        if pid not in self._known:
            place.end()
            place.starts += 1
        self._known[pid] = place.newest = report
        if report.get("functions"):
            self._profiles[pid] = report

    def _event(self, step: int) -> WorkersEvent | None:
        workers = [
            figures for number in sorted(self._places) if (figures := self._figures(number)) is not None
        ]
        if not workers:
            return None
        batches: dict[int, int] = {}
        for place in self._places.values():
            _add(batches, place.batch_times)
            if place.newest is not None:
                _add(batches, place.newest["batch_times"])
        profiles = sum(int(clock[0]) for one in self._profiles.values() for clock in one["profiles"])
        return WorkersEvent(
            step, workers, profiles, functions_of(list(self._profiles.values())),
            transforms_of(list(self._profiles.values())), quantiles(batches, QUANTILES), self._stream,
        )  # fmt: skip

    def _figures(self, number: int) -> WorkerFigures | None:
        place = self._places[number]
        report: Report = place.newest or {}
        sums = {name: place.ended[name] + int(report.get(name, 0)) for name in _SUMMED}
        times = dict(place.times)
        _add(times, report.get("times", {}))
        looked, sent = sums["looked"], max(sums["sent"], 1)
        if not looked or not times:
            return None
        found = WorkerFigures(
            number, int(report.get("pid", 0)), place.starts, sums["batches"],
            round(sums["items"] * sums["batches"] / looked), sums["fetch_ns"] / looked, sums["cpu_ns"] / looked,
            (quantile(times, 0.5), quantile(times, 0.9), quantile(times, 0.99)),
            sums["collate_ns"] / sums["split"] if sums["split"] else None, sums["pickle_ns"] / sent,
            sums["blocked_ns"] / sent, sums["send_ns"] / sent, sums["idle_ns"] / looked, sums["bytes"] / looked,
            sums["start_ns"] / max(place.starts, 1), sums["first_ns"] / max(place.starts, 1),
            [(ns, printable(name)) for ns, name in _slowest(place.slow, report.get("slow", []))],
        )  # fmt: skip
        if report:
            place.system.update(self._system(found, report))
        return replace(found, **{**place.system, **({} if report else {"doing": ""})})

    def _system(self, found: WorkerFigures, report: Report) -> dict[str, Any]:
        """Fields with what Linux knows of the newest worker, without those that it does not know."""
        pid, batches = found.pid, max(int(report["batches"]), 1)
        memory = own_memory(pid)
        faults, late = _faults(pid), _late(pid)
        read_bytes = _read_bytes(pid)
        doing = self._doing_long(pid) if self._stuck(pid) is not None else ""
        known = {
            "pid": pid, "descriptors": open_files(pid), "private_bytes": None if memory is None else memory[0],
            "pss_bytes": pss_bytes(pid), "faults": None if faults is None else faults / batches,
            "read_bytes": None if read_bytes is None else read_bytes / batches,
            "late": None if late is None else min(late / max(int(report["wall_ns"]), 1), 1.0),
        }  # fmt: skip
        return {"doing": doing, **{name: value for name, value in known.items() if value is not None}}


def _waits(pid: int) -> str:
    """What a worker waits for, as Linux tells: "sleeps in time.sleep"; "computes" if it runs; "" if it is gone."""
    state = state_of(pid)
    if state is None or state.letter in "ZX":
        return ""
    return "computes" if state.letter == "R" else why(Standing(state, "", waiting_of(pid, pid))).words


def functions_of(reports: Sequence[Report]) -> list[WorkerFunction]:
    """The functions of all profiles, the largest share first."""
    wall_n = cpu_n = wall_ns = cpu_ns = late_ns = system_ns = faults = 0
    on_wall: dict[tuple[str, int, str], dict[str, float]] = {}
    of_cpu: dict[tuple[str, int, str], dict[str, float]] = {}
    whole: dict[tuple[str, int, str], int] = {}
    calls: dict[tuple[str, int, str], int] = {}
    for report in reports:
        (count, wall, cpu, late, *_), (other, *_) = report["profiles"]
        wall_n, cpu_n, wall_ns, cpu_ns, late_ns = (
            wall_n + count, cpu_n + other, wall_ns + wall, cpu_ns + cpu, late_ns + late,
        )  # fmt: skip
        system_ns += sum(clock[4] for clock in report["profiles"])
        faults += sum(clock[5] for clock in report["profiles"])
        for file, line, name, times, total, walls, cpus in report["functions"]:
            key = str(file), int(line), str(name)
            whole[key] = whole.get(key, 0) + int(total)
            calls[key] = calls.get(key, 0) + int(times)
            _add(on_wall.setdefault(key, {}), walls)
            _add(of_cpu.setdefault(key, {}), cpus)
    spent: dict[tuple[str, int, str], dict[str, float]] = {key: {} for key in on_wall}
    blocked: dict[tuple[str, int, str], float] = {}
    named = 0.0
    # A thread waits for a processor where it would compute, also within a call that reads a file.
    computing = sum(ns for kinds in of_cpu.values() for ns in kinds.values()) / max(cpu_n, 1)
    late = late_ns / max(wall_n, 1) / computing if computing else 0.0
    for key, kinds in spent.items():
        computes = 0.0
        for kind in {*on_wall[key], *of_cpu[key]}:
            wall = on_wall[key].get(kind, 0.0) / max(wall_n, 1)
            cpu = of_cpu[key].get(kind, 0.0) / max(cpu_n, 1)
            if kind in WAITS:
                kinds[kind] = max(wall - late * cpu, cpu)
                named += kinds[kind]
            else:
                kinds[kind] = cpu if cpu_n else wall
                computes += max(wall - cpu, 0.0)
        blocked[key] = computes
    rest = (wall_ns - cpu_ns - late_ns) / max(wall_n, 1) - named
    if cpu_n and wall_n and rest > max(UNEXPLAINED * wall_ns, BESIDE_LATE * late_ns) / wall_n:
        total = max(sum(blocked.values()), 1.0)
        for key, ns in blocked.items():
            spent[key]["waits"] = spent[key].get("waits", 0.0) + rest * ns / total
    _touches(spent, system_ns / max(wall_n + cpu_n, 1), faults / max(wall_n + cpu_n, 1))
    total = max(sum(sum(kinds.values()) for kinds in spent.values()), 1.0)
    rows = [
        (
            *key, calls[key], sum(kinds.values()) / total,
            max(min(whole[key] / max(wall_ns, 1), 1.0), sum(kinds.values()) / total),
            {
                kind: ns / total for kind, ns in sorted(kinds.items(), key=lambda item: -item[1])
                if ns > LEAST_KIND * sum(kinds.values())
            },
        )
        for key, kinds in spent.items() if any(kinds.values())
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row[4])[:MOST_FUNCTIONS]


def _touches(spent: Mapping[Any, dict[str, float]], system_ns: float, faults: float) -> None:
    """Tell the time in which the system finds memory for pages that are touched first from that of computing.

    system_ns, faults: of a batch. What the system does for files and connections has a kind already. The rest belongs
    to all functions in proportion to what they compute: which one touched a page is not known.
    """
    computes = sum(kinds.get("computes", 0.0) for kinds in spent.values())
    named = sum(kinds.get(kind, 0.0) for kinds in spent.values() for kind in ("storage", "connection"))
    touched = min(max(system_ns - named, 0.0), faults * MOST_FAULT_NS, computes)
    if not touched or touched < LEAST_TOUCHED * computes:
        return
    for kinds in spent.values():
        if own := kinds.get("computes", 0.0):
            kinds["touches"] = own * touched / computes
            kinds["computes"] = own - kinds["touches"]


def transforms_of(reports: Sequence[Report]) -> list[tuple[str, float]]:
    """[name, share] of transforms in all profiles, the largest first."""
    found: dict[str, int] = {}
    for report in reports:
        for name, ns in report["transforms"]:
            found[str(name)] = found.get(str(name), 0) + int(ns)
    wall_ns = max(sum(int(report["profiles"][0][1]) for report in reports), 1)
    rows = [(printable(name), min(ns / wall_ns, 1.0)) for name, ns in found.items()]
    return sorted(rows, key=lambda row: -row[1])[:MOST_TRANSFORMS]


def quantile(classes: dict[int, int], part: float) -> float:
    """Of times by classes, in nanoseconds: the middle of the class, on a scale of factors."""
    wanted, so_far = part * sum(classes.values()), 0
    for number in sorted(classes):
        so_far += classes[number]
        if so_far >= wanted:
            return float(EDGES[min(number, len(EDGES) - 1)]) / 2**0.125
    return 0.0


def quantiles(classes: dict[int, int], count: int) -> list[float]:
    """So many of them at equal distances; [] without times."""
    return [quantile(classes, (number + 0.5) / count) for number in range(count)] if classes else []


def _add(sums: dict[Any, Any], more: dict[Any, Any]) -> None:
    for key, value in more.items():
        key = int(key) if isinstance(key, str) and key.isdecimal() else key
        sums[key] = sums.get(key, 0) + value


def _slowest(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> list[tuple[int, str]]:
    """Of two lists; an index once."""
    best: dict[str, int] = {}
    for ns, name in (*one, *other):
        best[str(name)] = max(best.get(str(name), 0), int(ns))
    return sorted(((ns, name) for name, ns in best.items()), reverse=True)[:SLOWEST]


def _words(path: str) -> list[str]:
    return Path(path).read_text(encoding="ascii", errors="replace").split()


def _faults(pid: int) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[7])
    return None


def _late(pid: int) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        return int(_words(f"/proc/{pid}/task/{pid}/schedstat")[1])
    return None


def _read_bytes(pid: int) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        words = _words(f"/proc/{pid}/io")
        return int(words[words.index("read_bytes:") + 1])
    return None
