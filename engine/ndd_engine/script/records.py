"""Reads what observed processes share: one memory per process (see `ndd_watch.mapped`), as lines in their order.

A process writes rows and lengths of its steps, and a line where a window of them ends. Here they are joined to a line
with the figures of the window. What a process had not told when it was gone is in its memory, up to its last step.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from operator import add
from pathlib import Path
from typing import Any

import psutil

from ndd_engine.files import open_regular
from ndd_watch import mapped
from ndd_watch.phases import FIRST_BATCH, NAMES, OTHER, PHASES, WAITING

# Formats that are understood, and the bytes of the longest line.
VERSION = mapped.VERSION
LONGEST = 1 << 20
# Memory of the system in which the files lie, where it has so much space: nothing that is stored there ever waits for a
# disk. Loaders need it, too.
SHARED = Path("/dev/shm")
LEAST_FREE = 256 << 20
_PREFIX = "ndd-"
_OWNER = "owner"
# Backward passes without a step that are told: at least so many, and so many times those of a usual step.
FEW_PASSES, TIMES_USUAL = 8, 4

Line = dict[str, Any]


class Room:
    """The folder for the memories of a run's processes.

    fallback: where the system has no memory to spare; shared: whether to ask for that. Raises OSError if it cannot be
    made.
    """

    def __init__(self, fallback: Path, shared: bool = True) -> None:
        self._temporary = _shared_folder() if shared else None
        self.folder = self._temporary if self._temporary is not None else fallback
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fill()

    def fill(self) -> None:
        """Make new spare files in the place of those that were taken. Without space, processes make their own."""
        for number in range(mapped.SPARES):
            path = self.folder / f"{mapped.SPARE}{number}"
            if not path.exists():
                try:
                    os.close(mapped.make(str(path)))
                except OSError:
                    return

    def close(self) -> None:
        """Remove the files. Processes that still train keep their memory."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            return
        for path in self.folder.glob("*"):
            if path.suffix in (mapped.SUFFIX, ".unobserved") or path.name.startswith(mapped.SPARE):
                path.unlink(missing_ok=True)


def _shared_folder() -> Path | None:
    try:
        if shutil.disk_usage(SHARED).free < LEAST_FREE:
            return None
        for left in SHARED.glob(f"{_PREFIX}*/{_OWNER}"):
            _remove_left(left)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=SHARED))
        (folder / _OWNER).write_text(f"{os.getpid()} {psutil.Process().create_time()}", encoding="ascii")
    except OSError:
        return None
    return folder


def _remove_left(owner: Path) -> None:
    """Remove the folder of a console that was killed."""
    try:
        pid, created = owner.read_text(encoding="ascii").split()
        if owner.stat().st_uid != os.getuid():
            return
        if not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).create_time() != float(created):
            shutil.rmtree(owner.parent, ignore_errors=True)
    except (OSError, ValueError, psutil.Error):
        return


class Process:
    """One process: its memory, the path of it, and how far it was read. name: "rank-0" or "pid-7"."""

    def __init__(self, name: str, path: Path, reader: mapped.Reader) -> None:
        self.name, self.path, self._reader = name, path, reader
        self.pid = reader.value(mapped.PID)
        self._step = self._shown = self._micro = self._first_ns = 0
        self.damaged = 0
        self._over = False
        # Unix time of the last line.
        self._t = 0.0

    @property
    def steps(self) -> int:
        """Steps of the thread that trains, so far."""
        return max(self._reader.value(mapped.DONE) + self._correction, 0)

    @property
    def _correction(self) -> int:
        return self._reader.value(mapped.CORRECTION) + self._reader.value(mapped.PENDING)

    @property
    def unended(self) -> int:
        """Backward passes that no step has, if they are more than usual in a step; 0 otherwise."""
        value = self._reader.value
        passes, done = value(mapped.PASSES) + value(mapped.OPEN), value(mapped.DONE)
        if not self.steps:
            return passes
        usual = value(mapped.MICRO) / max(done, 1)
        return (
            passes
            if passes >= FEW_PASSES and passes > TIMES_USUAL * usual and not value(mapped.PENDING)
            else 0
        )

    @property
    def elsewhere(self) -> int:
        """Steps of other threads, whose phases are not timed."""
        return self._reader.value(mapped.ELSEWHERE)

    @property
    def trains(self) -> bool:
        """Whether it is observed at present."""
        return self._reader.value(mapped.TRAINER) != 0

    @property
    def done(self) -> int:
        """Steps as the process counts them."""
        return self._reader.value(mapped.DONE)

    @property
    def paused(self) -> bool:
        """Whether it waits until the console lets it go on."""
        return bool(self._reader.value(mapped.PAUSED))

    @property
    def thread(self) -> int:
        """The system's id of the thread that trains."""
        return self._reader.value(mapped.NATIVE)

    @property
    def phase(self) -> str:
        """The current phase; "?" in a step that is timed as a whole."""
        timed, current = self._reader.value(mapped.TIMED), self._reader.value(mapped.CURRENT)
        if timed < 0:
            return "evaluate"
        return NAMES[current] if timed and 0 <= current < len(NAMES) else "?"

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes whenever the process makes progress."""
        return tuple(
            self._reader.value(index) for index in (mapped.LAST, mapped.DONE, mapped.ELSEWHERE, mapped.LINES)
        )

    def new(self, gone: bool) -> Iterator[Line]:
        """The lines since the last call. gone: the process has ended; what it had not told yet follows."""
        for text in self._reader.lines():
            line = decoded(text)
            if line is None:
                self.damaged += 1
                continue
            self._t = float(line["t"])
            if line["type"] != "steps":
                if line["type"] == "end":
                    yield from self._rest()
                    self._over = True
                yield line
            elif (joined := self._joined(line)) is not None:
                yield joined
            else:
                self.damaged += 1
        if gone and not self._over:
            self._over = True
            yield from self._rest()

    def close(self) -> None:
        """Unmap the memory."""
        self._reader.close()

    def _rest(self) -> Iterator[Line]:
        """A window of the steps that no window has."""
        reader = self._reader
        done, correction = reader.value(mapped.DONE), self._correction
        if done > self._step or done + correction != self._shown:
            lengths = reader.lengths(self._step, done)
            wall, first = sum(length >> 1 for length in lengths), reader.value(mapped.INPUT)
            line = {
                "v": VERSION, "type": "steps", "t": self._t, "step": done, "correction": correction,
                "micro_steps": max(reader.value(mapped.MICRO) - self._micro, 0), "wall_ns": wall,
                "rest": [0] * len(NAMES), "loss": None, "loss_step": None, "lr": None,
                "shape": [first] if first else None, "gc_ns": None,
                "gc_count": None, "gc_max_ns": None, "skipped_updates": reader.value(mapped.SKIPPED),
                "first_ns": reader.value(mapped.FIRST_NS),
            }  # fmt: skip
            joined = self._joined(line)
            if joined is not None:
                yield joined

    def _joined(self, line: Line) -> Line | None:
        """The window that a line of steps ends; None if it does not fit."""
        try:
            begin, end = self._step, int(line["step"])
            rest = [int(value) for value in line.pop("rest")]
            device = [
                {str(name): float(spent) for name, spent in row.items()} for row in line.pop("device", ())
            ]
            outside = {str(name): float(spent) for name, spent in line.pop("outside", {}).items()}
            rows = [row for row in self._reader.rows(end) if row[0] >= begin]
            lengths = self._reader.lengths(begin, end)
            # Less than before where steps that were counted have turned out to be none.
            shown = max(end + int(line.pop("correction")), 0)
            if end < begin or len(rest) != len(NAMES):
                return None
            wholes = [length >> 1 for length in lengths if length and not length & 1]
            timed = [row[1:] for row in rows]
            known = sum(map(sum, timed)) + sum(wholes) + sum(rest)
            # Steps that were overwritten before they were read.
            rest[OTHER] += int(line["wall_ns"]) - known
            found = {
                **line,
                "type": "window",
                "step": shown,
                "steps": max(shown - self._shown, 0),
                "timed_steps": len(rows),
                "device_steps": len(device),
            }
            found.update(figures(timed, wholes, rest, device, outside))
            first_ns = int(line.get("first_ns") or 0)
            if first_ns > self._first_ns:
                found["phases"][FIRST_BATCH] = {"host_ns": first_ns - self._first_ns}
                self._first_ns = first_ns
            if "cpu_ns" in line:
                numbers = [row[0] for row in rows]
                found["ranks"] = {
                    **of_rank(timed, int(line["wall_ns"]), numbers, begin, int(line["cpu_ns"])),
                    "rss_bytes": line.get("rss_bytes"),
                }
            self._micro += int(line["micro_steps"])
            self._step, self._shown = end, shown
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return found


class Records:
    """The processes of a folder, as they come. damaged: lines that could not be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[Process] = []
        self._known: set[str] = set()

    @property
    def damaged(self) -> int:
        """Lines that could not be read."""
        return sum(process.damaged for process in self.processes)

    def new(self, final: bool = False) -> Iterator[tuple[str, Line]]:
        """(process, line) of everything since the last call, in order for each process. final: all have ended."""
        self._look()
        newest = {process.name: process for process in self.processes}
        for process in self.processes:
            # After a restart or `exec`, the same name belongs to another one.
            gone = final or newest[process.name] is not process or not psutil.pid_exists(process.pid)
            for line in process.new(gone):
                yield process.name, line

    def unobserved(self) -> Iterator[str]:
        """Why processes could not be observed."""
        for path in sorted(self._folder.glob("*.unobserved")):
            if path.name not in self._known:
                self._known.add(path.name)
                try:
                    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
                        yield f"process {path.stem.removeprefix('pid-')}: {file.read(200).decode(errors='replace')}"
                except OSError:
                    continue

    def close(self) -> None:
        """Unmap all memories."""
        for process in self.processes:
            process.close()
        self.processes = []

    def _look(self) -> None:
        """Find processes that have begun to train."""
        try:
            names = {entry.name for entry in os.scandir(self._folder) if entry.name.endswith(mapped.SUFFIX)}
        except OSError:  # nothing has trained yet
            return
        for name in sorted(names - self._known, key=_rank):
            try:
                handle = open_regular(self._folder / name, os.O_RDONLY)
                try:
                    reader = mapped.Reader(handle)
                finally:
                    os.close(handle)
            except (OSError, ValueError):
                self._known.add(name)
                continue
            if not reader.begun:  # it is about to begin
                reader.close()
                continue
            self._known.add(name)
            shown = name.removesuffix(mapped.SUFFIX).partition("~")[0]
            self.processes.append(Process(shown, self._folder / name, reader))
        self.processes.sort(key=lambda process: _rank(process.name))


def decoded(text: bytes) -> Line | None:
    """A line of a record; None if it is damaged or of another version."""
    if len(text) > LONGEST:
        return None
    try:
        line = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    known = isinstance(line, dict) and line.get("v") == VERSION and isinstance(line.get("type"), str)
    time_ok = known and isinstance(line.get("t"), (int, float))
    return line if time_ok else None


def _rank(name: str) -> tuple[int, int, str]:
    kind, _, number = name.removesuffix(mapped.SUFFIX).partition("~")[0].partition("-")
    return (0 if kind == "rank" else 1, int(number) if number.isdecimal() else 0, name)


def figures(
    rows: Sequence[Sequence[int]],
    wholes: Sequence[int],
    rest: Sequence[int],
    device: Sequence[Mapping[str, float]] = (),
    outside: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The phases of a window and the quantiles of its steps, in nanoseconds. Phases add up to the wall time.

    The time of steps that were timed as a whole is shared out like that of the others; `other` takes the rounding.
    device: of the steps that the GPU's clock has timed, nanoseconds by phase. outside: the same of evaluations.
    """
    on_device = {**_means(device), **(outside or {})}
    phases: dict[str, Any] = {}
    columns = list(zip(*rows, strict=True)) or [()] * len(NAMES)
    lengths, whole_ns = [*map(sum, rows)], sum(wholes)
    timed, left = sum(lengths), whole_ns
    for index, name in enumerate(PHASES):
        values, waits = columns[index], sum(columns[index + WAITING])
        if waits:
            values = tuple(map(add, values, columns[index + WAITING]))
        inside = sum(values)
        if inside:
            values = tuple(sorted(values))
        total = inside + rest[index] + rest[index + WAITING]
        if name == PHASES[-1]:
            total += left
        elif wholes and timed:
            share = round(whole_ns * inside / timed)
            left -= share
            total += share
        if total:
            phases[name] = {
                "host_ns": total, "p50_ns": _at(values, 0.5), "p95_ns": _at(values, 0.95),
                "max_ns": values[-1] if values else None, "device_ns": on_device.get(name),
            }  # fmt: skip
        if wholes and timed:
            waits += round(whole_ns * waits / timed)
        if waits := waits + rest[index + WAITING]:
            phases[NAMES[index + WAITING]] = {
                "host_ns": waits,
                "device_ns": on_device.get(NAMES[index + WAITING]),
            }
    whole = sorted([*lengths, *wholes])
    last = whole[-1] if whole else None
    return {
        "phases": phases,
        "step_p50_ns": _at(whole, 0.5),
        "step_p95_ns": _at(whole, 0.95),
        "step_max_ns": last,
    }


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Nanoseconds of each phase in a step, by the GPU's clock. Waiting for other ranks is part of its phase."""
    sums: dict[str, float] = {}
    for row in rows:
        for name, spent in row.items():
            for key in {name, name.partition("/")[0]}:
                sums[key] = sums.get(key, 0.0) + spent
    return {name: round(spent / len(rows)) for name, spent in sums.items()}


def _at(ordered: Sequence[int], share: float) -> int | None:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None


def of_rank(
    rows: Sequence[Sequence[int]], wall_ns: int, numbers: Sequence[int], begin: int, cpu_ns: int
) -> dict[str, Any]:
    """What a rank tells of the timed steps of a window, so that it can be compared with others.

    begin: steps before the window; numbers: steps before each row. Waiting for others is no part of phases_ns and
    own_ns; cpu_ns, processor time, is scaled to these steps. Evaluations and checkpoints are no part of a step.
    """
    owns = [sum(each[:WAITING]) for each in rows]
    waits = [sum(each[WAITING:]) for each in rows]
    phases = [sum(column) for column in zip(*rows, strict=True)][:WAITING]
    part = (sum(owns) + sum(waits)) / max(wall_ns, 1)
    return {
        "begin": begin, "numbers": [number - begin for number in numbers], "own_ns": owns, "wait_ns": waits,
        "phases_ns": phases, "cpu_ns": round(cpu_ns * part),
    }  # fmt: skip
