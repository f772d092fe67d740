"""Reads what observed processes share: the memory with their records, by rank.

Each has one memory (see `ndd_watch.mapped`), with lines in their order. A process writes rows and lengths of its
steps, and a line where a window of them ends. Here they are joined to a line with the figures of the window. What a
process had not told when it was gone is in its memory, up to its last step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from ndd_engine.files import open_regular
from ndd_engine.measure.stragglers import compared_steps
from ndd_engine.measure.window import StepKinds, Window
from ndd_engine.shared_folder import shared_folder
from ndd_watch import mapped, sheet
from ndd_watch.mapped import DATA_WAIT, FIRST_BATCH, NAMES, OTHER

# Formats that are understood, and the bytes of the longest line.
VERSION = mapped.VERSION
LONGEST = 1 << 20
# Backward passes without a step that are told: at least so many, and so many times those of a usual step.
FEW_PASSES, TIMES_USUAL = 8, 4
# Steps of a training by which those of its optimizers differ, in percent up to this number, or one.
MOST_APART = 3
# Batches without a backward pass that are told: losses of so many are not added up for one.
MANY_BATCHES = 100
# Fields of a window that nobody has measured where its process is gone.
_UNMEASURED = (
    "step_p50_ns", "step_p95_ns", "step_max_ns", "loss", "last_loss", "lr", "gc_ns", "gc_count", "gc_max_ns",
    "heap_bytes", "heap_free_bytes", "first_skipped", "grad_norm",
)  # fmt: skip

Line = dict[str, Any]


class Room:
    """The folder for the memories of a run's processes.

    fallback: where the system has no memory to spare; shared: whether to ask for that. Raises OSError if it cannot be
    made.
    """

    def __init__(self, fallback: Path, shared: bool = True) -> None:
        self._temporary = shared_folder() if shared else None
        self.folder = self._temporary if self._temporary is not None else fallback
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fill()

    def fill(self) -> None:
        """Make new spare files in the place of those that were taken. Without space, processes make their own."""
        for index in range(mapped.SPARES):
            path = self.folder / f"{mapped.SPARE}{index}"
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
            if path.suffix in (mapped.SUFFIX, sheet.SUFFIX, ".unobserved") or path.name.startswith(
                mapped.SPARE
            ):
                path.unlink(missing_ok=True)


class Process:
    """One process: its memory, the path of it, and how far it was read. name: "rank-0" or "pid-7"."""

    def __init__(self, name: str, path: Path, reader: mapped.MappedReader) -> None:
        self.name, self.path, self._reader = name, path, reader
        self.pid = reader.value(mapped.PID)
        # At the end of the last window: steps in the memory, steps that were shown, and micro-steps; and the window.
        self._end = self._shown = self._micro = self._first_ns = self._starts = self._skipped = 0
        self._kinds = StepKinds()
        self._last: Line = {
            "step": 0, "epoch": 0, "epoch_step": 0, "micro_steps": 0, "items": 0, "tokens": 0,
        }  # fmt: skip
        self.damaged = 0
        # Unix time of the last line.
        self._t = 0.0

    @property
    def too_long(self) -> int:
        """Lines that the process could not write, since they were too long."""
        return self._reader.value(mapped.DROPPED)

    @property
    def steps(self) -> int:
        """Steps of the thread that trains, so far."""
        value = self._reader.value
        steps = max(value(mapped.DONE) + value(mapped.CORRECTION) + value(mapped.PENDING), 0)
        each = self.optimizer_steps
        if len(each) < 2:
            return steps
        # Those of one of several, or of all that take turns: the first ones may have been parts of a step.
        nearest = min((*each, sum(each)), key=lambda one: abs(one - steps))
        return nearest if abs(nearest - steps) <= max(min(steps // 100, MOST_APART), 1) else steps

    @property
    def optimizer_steps(self) -> list[int]:
        """Steps of each optimizer, of those that exist at a time in their order; of the first ones if they are many."""
        return [steps for steps in self._reader.values(mapped.STEPPED, mapped.MOST_OPTIMIZERS) if steps]

    @property
    def unended(self) -> int:
        """Backward passes that no step has, if they are more than usual in a step; 0 otherwise."""
        value = self._reader.value
        passes, done = value(mapped.PASSES) + value(mapped.OPEN), value(mapped.DONE)
        if not self.steps:
            return passes
        usual = value(mapped.MICRO) / max(done, 1)
        more = passes >= FEW_PASSES and passes > TIMES_USUAL * usual and not value(mapped.PENDING)
        return passes if more else 0

    @property
    def left_out(self) -> int:
        """Batches since the last step that the model computed, and that no backward pass has; 0 if they are few."""
        batches = self._reader.value(mapped.LEFT)
        return batches if batches >= MANY_BATCHES else 0

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
        """Whether it waits until the console lets it continue."""
        return bool(self._reader.value(mapped.PAUSED))

    @property
    def loader_seeds(self) -> list[int]:
        """Those of the newest iterators of a loader that the training has read, by which their workers are known."""
        return [seed for seed in self._reader.values(mapped.SEEDS_AT, mapped.MOST_SEEDS) if seed]

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
        for line in self._new_lines(gone):
            try:
                yield self._window(line) if line["type"] == "window" else line
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                self.damaged += 1

    def _new_lines(self, gone: bool) -> Iterator[Line]:
        for text in self._reader.lines():
            line = decoded(text)
            if line is None:
                self.damaged += 1
                continue
            self._t = float(line["t"])
            if line["type"] == "end":
                yield from self._rest()
            yield line
        if gone:  # also what threads have trained after the main thread had ended
            yield from self._rest()

    def close(self) -> None:
        """Unmap the memory."""
        self._reader.close()

    def _rest(self) -> Iterator[Line]:
        """A window of the steps that no window has."""
        value, last, shown = self._reader.value, self._last, self.steps
        done, micro = value(mapped.DONE), max(value(mapped.MICRO) - self._micro, 0)
        if done <= self._end and shown == self._shown:
            return
        each = last["items"] / last["micro_steps"] if last["micro_steps"] else value(mapped.INPUT)
        tokens = last["tokens"] / last["items"] if last["items"] else 0.0
        timed = {
            "end": done, "shown": shown, "rest": [0] * len(NAMES), "device": [], "outside": {},
            "first_ns": value(mapped.FIRST_NS) - self._first_ns,
        }  # fmt: skip
        yield {
            **last, **dict.fromkeys(_UNMEASURED), "v": VERSION, "type": "window", "t": self._t,
            "step": last["step"] + shown - self._shown, "steps": max(shown - self._shown, 0),
            "epoch_step": max(last["epoch_step"] + shown - self._shown, 0), "micro_steps": micro,
            "items": round(each * micro), "tokens": round(each * micro * tokens), "profiled": False,
            "evaluations": 0, "checkpoints": 0, "received": {}, "left_out": 0, "milestone_losses": [], "timed": timed,
            "passes": max(value(mapped.STARTS) - self._starts, 0),
            "skipped": max(value(mapped.SKIPPED) - self._skipped, 0),
            "wall_ns": sum(length >> 1 for length in self._reader.lengths(self._end, done)),
        }  # fmt: skip

    def _window(self, line: Line) -> Line:
        """The line of a window with the figures of its steps. Raises an error if it does not fit."""
        timed, begin = line.pop("timed"), self._end
        for name in ("step", "epoch_step", "steps", "micro_steps", "items", "wall_ns", "passes", "skipped"):
            line[name] = int(line.get(name, 0))
        end, wall_ns, first_ns = int(timed["end"]), line["wall_ns"], int(timed["first_ns"])
        rest = [int(value) for value in timed["rest"]]
        device = [
            (int(key), {NAMES.index(name): float(spent) for name, spent in row.items()})
            for key, row in timed["device"]
        ]
        if end < begin or len(rest) != len(NAMES):
            raise ValueError("no window of this process")
        rows = [row for row in self._reader.rows(end) if row[0] >= begin]
        wholes = [length >> 1 for length in self._reader.lengths(begin, end) if length and not length & 1]
        steps = [row[1:] for row in rows]
        known = sum(map(sum, steps)) + sum(wholes) + sum(rest)
        # Steps that were overwritten before they were read; and those of a window whose line was lost.
        rest[OTHER] += max(wall_ns - known, 0)
        wall_ns = max(wall_ns, known)
        # Waiting for the first batch is a part of waiting for data, outside the steps.
        rest[DATA_WAIT] -= first_ns
        outside = {NAMES.index(name): float(spent) for name, spent in timed["outside"].items()}
        names = [*NAMES, FIRST_BATCH]
        window = Window(names, wall_ns, steps, [*rest, first_ns], device, outside, wholes, self._kinds)
        if "cpu_ns" in timed:
            told = compared_steps(int(timed["shown"]), begin, NAMES, {row[0]: row[1:] for row in rows})
            cpu_ns = round(int(timed["cpu_ns"]) * told.wall_ns / max(wall_ns, 1))
            line["ranks"] = {**asdict(told), "cpu_ns": cpu_ns, "rss_bytes": timed["rss_bytes"]}
        line |= window.figures()
        self._end, self._shown, self._first_ns = end, int(timed["shown"]), self._first_ns + first_ns
        self._micro += line["micro_steps"]
        self._starts += line["passes"]
        self._skipped += line["skipped"]
        self._last = {name: value for name, value in line.items() if name != "ranks"}
        return line


class Records:
    """The processes of a folder, as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[Process] = []
        self._known: set[str] = set()

    @property
    def lost(self) -> int:
        """Lines that could not be read, or not be written since they were too long."""
        return sum(process.damaged + process.too_long for process in self.processes)

    def new(self, final: bool = False) -> Iterator[tuple[Process, Line]]:
        """(process, line) of everything since the last call, in order for each process. final: all have ended."""
        self._look()
        newest = {process.name: process for process in self.processes}
        for process in self.processes:
            # After a restart or `exec`, the same name belongs to another one.
            gone = final or newest[process.name] is not process or not psutil.pid_exists(process.pid)
            for line in process.new(gone):
                yield process, line

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
                    reader = mapped.MappedReader(handle)
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
