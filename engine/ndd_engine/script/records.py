"""Reads what observed processes share: their records, by rank, and samples of their stacks.

Each has one memory (see `ndd_watch.mapped`), with lines in their order. A process writes rows and lengths of its
steps, and a line where a window of them ends. Here they are joined to a line with the figures of the window. What a
process had not told when it was gone is in its memory, up to its last step. Of ranks, it is known which one ended
first, and whether they start again. Stacks are sampled from outside: which lines the processes are at, by phase.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ndd_engine.child import PARTNER_GONE
from ndd_engine.files import open_regular
from ndd_engine.measure.phase_clock import Window
from ndd_engine.measure.process_watch import Gone
from ndd_engine.measure.stalls import UnreadableError, find, place_of, threads
from ndd_engine.measure.stragglers import RankComparison, compared_steps
from ndd_engine.record.events import Event, FunctionsEvent, MarkEvent, RankEvent, checker
from ndd_engine.shared_folder import shared_folder
from ndd_engine.text import counted, number, printable
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
    "heap_bytes", "first_skipped",
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

    def __init__(self, name: str, path: Path, reader: mapped.Reader) -> None:
        self.name, self.path, self._reader = name, path, reader
        self.pid = reader.value(mapped.PID)
        # At the end of the last window: steps in the memory, steps that were shown, and micro-steps; and the window.
        self._end = self._shown = self._micro = self._first_ns = self._starts = self._skipped = 0
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
        """Whether it waits until the console lets it go on."""
        return bool(self._reader.value(mapped.PAUSED))

    @property
    def loader_seed(self) -> int:
        """That of the iterator of a loader that the training reads, by which its workers are known; 0 before."""
        return self._reader.value(mapped.SEED)

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
        timed = {
            "end": done, "shown": shown, "rest": [0] * len(NAMES), "device": [], "outside": {},
            "first_ns": value(mapped.FIRST_NS) - self._first_ns,
        }  # fmt: skip
        yield {
            **last, **dict.fromkeys(_UNMEASURED), "v": VERSION, "type": "window", "t": self._t,
            "step": last["step"] + shown - self._shown, "steps": max(shown - self._shown, 0),
            "epoch_step": max(last["epoch_step"] + shown - self._shown, 0), "micro_steps": micro,
            "items": round(each * micro), "profiled": False, "timed": timed,
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
        device = [[row.get(name) for name in NAMES] for row in timed["device"]]
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
        window = Window(names, wall_ns, steps, [*rest, first_ns], device, outside, wholes)
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
        # The ranks of this host, as the launcher says, or else all of them.
        self._here = range(0)
        self._comparison = RankComparison(PATIENCE, str(folder))
        self._reported: set[str] = set()

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
            comparison.leave(member.rank)
        if kind in ("window", "end", "mark"):
            for event in comparison.new(earlier):
                yield from self._tell(event.step)
                yield event

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
                f"{reason}the ranks were started again{which} after {about}step {number(step)}; steps go on counting",
            )  # fmt: skip
            self._members.clear()
            self._comparison.clear()
        self._launch, self._comparison.launched = launch, world
        begin, count = map(int, place["here"] or (0, world))
        self._here = range(begin, begin + min(count, world))
        member = self._members[name] = _Member(rank, int(line["pid"]))
        self._comparison.join(rank, str(line["host"]))
        self._comparison.expect(self._here)
        if line["host"] == self._host:
            self._gone.watch(member.pid)

    def _ranks(self) -> set[int]:
        return {member.rank for member in self._members.values()}

    def _tell(self, step: int) -> Iterator[Event]:
        """Say once which ranks are not compared."""
        lacking = self._comparison.lacking()
        ended = {member.rank for member in self._members.values() if member.ended is not None}
        elsewhere = [rank for rank in lacking if rank not in self._here]
        lost = [rank for rank in lacking if rank not in elsewhere and rank not in ended]
        for ranks, why in ((elsewhere, "on other hosts"), (lost, "not observed")):
            if ranks:
                launched = self._comparison.launched
                text = f"{_span(ranks)} of {launched}: {why}, so no part of the comparison of ranks"
                if text not in self._reported:
                    self._reported.add(text)
                    yield MarkEvent("note", step, text)


def _step(member: _Member) -> int:
    return member.step


def _span(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 4 to 7", "ranks 1, 3, 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}"


# From one look at the stack to the next: at first, for so many looks, and later.
LOOK_S, FEW_LOOKS, RARE_LOOK_S = 1.0, 15, 5.0
# Looks of a line of the record, and places that it names.
LOOKS, TOP = 5, 12
# Processes whose stacks are looked at.
MOST_PROCESSES = 4
# Functions of torch, with their files, and the phase of what they call.
_PHASES = {
    ("torch/autograd/__init__.py", "backward"): "backward",
    ("torch/utils/data/dataloader.py", "__next__"): "data_wait",
    ("torch/utils/data/dataloader.py", "__iter__"): "data_wait",
    ("torch/nn/modules/module.py", "_wrapped_call_impl"): "forward",
    ("torch/nn/modules/module.py", "zero_grad"): "zero_grad",
    ("torch/optim/optimizer.py", "zero_grad"): "zero_grad",
    ("torch/optim/optimizer.py", "wrapper"): "optimizer",
    ("torch/serialization.py", "save"): "checkpoint",
}


@dataclass
class _Watched:
    looks: int = 0
    next_look: float = 0.0
    seen: Counter[tuple[str, str, int, str]] = field(default_factory=Counter)


class _Look(threading.Thread):
    """Asks py-spy where a process is. stack: frames of the thread that trains, innermost first; None if unknown."""

    def __init__(self, spy: str, process: Process) -> None:
        super().__init__(name="ndd-samples", daemon=True)
        self.process, self.phase, self._spy = process, process.phase, spy
        self._pid, self._thread = process.pid, process.thread
        self.stack: list[dict[str, Any]] | None = None

    def run(self) -> None:
        with suppress(UnreadableError, LookupError, TypeError, AttributeError, ValueError):
            found = threads(self._spy, self._pid)
            one = next((one for one in found if one.get("os_thread_id") == self._thread), None)
            if one is None:
                one = next((one for one in found if one.get("owns_gil")), found[0])
            self.stack = list(one["frames"])


class Samples:
    """The processes of this host. Never raises."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._looks: list[_Look] = []
        self._spy = find()
        # Where batches are made, as a process has told: file and function.
        self.sources: set[tuple[str, str]] = set()

    def look(self, processes: Sequence[Process]) -> Iterator[tuple[Process, Line]]:
        """(process, line) with samples of the stacks of the first processes."""
        now = time.monotonic()
        for process in processes[:MOST_PROCESSES] if self._spy is not None else ():
            watched = self._watched.setdefault(process.name, _Watched())
            if process.trains and now >= watched.next_look:
                watched.looks += 1
                watched.next_look = now + (LOOK_S if watched.looks <= FEW_LOOKS else RARE_LOOK_S)
                self._ask(process)
        for look in [one for one in self._looks if not one.is_alive()]:
            self._looks.remove(look)
            yield from self._answered(look)

    def _ask(self, process: Process) -> None:
        if self._spy is not None and all(one.process.name != process.name for one in self._looks):
            look = _Look(self._spy, process)
            look.start()
            self._looks.append(look)

    def _answered(self, look: _Look) -> Iterator[tuple[Process, Line]]:
        if not look.stack:
            return
        watched = self._watched[look.process.name]
        phase = "evaluate" if look.phase == "evaluate" else phase_of(look.stack, self.sources)
        file, at, name = place_of(look.stack) or ("?", 0, "?")
        watched.seen[(phase, file, at, name)] += 1
        if sum(watched.seen.values()) >= LOOKS:
            seen, watched.seen = watched.seen, Counter()
            frames = [[*place, count, int(place[1] != "?")] for place, count in seen.most_common(TOP)]
            yield look.process, {
                "v": VERSION, "type": "stacks", "t": time.time(), "step": look.process.steps,
                "looks": sum(seen.values()), "frames": frames,
            }  # fmt: skip


def readable_by(pid: int) -> dict[str, str]:
    """The environment of a script whose stack this process and what it starts may read; {} without py-spy."""
    # Linux with Yama lets only ancestors read a process, unless it names others.
    return {"NDD_WATCH_TRACER": str(pid)} if find() else {}


def phase_of(stack: Sequence[dict[str, Any]], sources: set[tuple[str, str]]) -> str:
    """The phase of a stack: that of the outermost function that has one."""
    for frame in reversed(stack):
        file, name = str(frame["filename"]), str(frame["name"])
        if (file, name) in sources:
            return "data_wait"
        _, found, inside = file.partition("-packages/torch/")
        phase = _PHASES.get((f"torch/{inside}", name)) if found else None
        if phase is not None:
            return phase
    return "other"
