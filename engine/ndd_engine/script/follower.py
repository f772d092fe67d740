"""Follows the records of a script's processes, and puts the events of the run into its record.

The traces of profiler captures that the processes have written on request are read here, too.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from ndd_engine.diagnose.view import COLLECT
from ndd_engine.errors import UsageError, error_text
from ndd_engine.hardware.detect import trained_on
from ndd_engine.hardware.gpus import Gpu, GpuProfile, Machine
from ndd_engine.measure.memory import placed
from ndd_engine.measure.module_times import Noted, captured
from ndd_engine.measure.process_watch import ProcessWatch, untold
from ndd_engine.measure.source import (
    adding_line,
    carrying_line,
    collecting_line,
    drawing_line,
    growing_line,
    keeping_line,
    kept_files_line,
    kept_tensors_line,
)
from ndd_engine.measure.stalls import Subject
from ndd_engine.measure.worker_watch import WorkerWatch
from ndd_engine.processes import FULL
from ndd_engine.record.event import Wait
from ndd_engine.record.events import (
    DeathEvent,
    EndEvent,
    Event,
    FunctionsEvent,
    HoldersEvent,
    KernelsEvent,
    MarkEvent,
    NotFiniteEvent,
    RunEvent,
    WindowEvent,
    decoded,
)
from ndd_engine.record.figures import capture_text
from ndd_engine.record.rundir import RunDir
from ndd_engine.recordings.recorded_files import read_trace
from ndd_engine.text import counted, number, printable
from ndd_watch import mapped

from .command import Command
from .records import Line, Process, Records
from .script_ranks import ScriptRanks
from .stack_samples import Samples

# Longer traces would take the console minutes to read.
LONGEST = 1 << 28


class RunCaptures:
    """Those of a run."""

    def __init__(self, directory: RunDir) -> None:
        self._directory = directory

    def taken(
        self, mark: MarkEvent, rank: int | None = None, profile: GpuProfile | None = None
    ) -> Iterator[Event]:
        """The process has taken a capture, and tells its file. Raises ValueError for another place.

        rank: of a process that is not the leading one; its trace is only kept. profile: of its GPU.
        """
        step, name = mark.step, str(mark.data["trace"])
        if name != Path(name).name:
            raise ValueError("not a name")
        made, kept = self._directory.path / name, self._directory.trace
        if rank is not None:
            with contextlib.suppress(OSError):
                made.replace(kept.with_name(f"{kept.stem}.rank-{rank}{kept.suffix}"))
            return
        try:
            event = folded(made, step, int(mark.data["steps"]), profile)
            made.replace(kept)
        except (UsageError, OSError, ValueError, RuntimeError, KeyError, TypeError, IndexError) as error:
            with contextlib.suppress(OSError):
                made.unlink()
            yield _failed(step, error_text(error))
            return
        event = replace(event, trace=str(kept))
        yield event
        yield MarkEvent("note", step, capture_text(event))


def folded(path: Path, step: int, steps: int, profile: GpuProfile | None = None) -> KernelsEvent:
    """The event of a trace that an observed process has written. profile: of its GPU, if there is one.

    Raises UsageError, and ValueError, RuntimeError, KeyError, TypeError or IndexError for what is no such trace.
    """
    if path.stat().st_size > LONGEST:
        raise ValueError("its trace is too long to be read")
    trace = read_trace(path)
    return captured(trace.events, Noted.of(trace.noted), step, steps, profile)


def _failed(step: int, reason: str) -> MarkEvent:
    return MarkEvent("warning", step, f"no profiler capture: {printable(reason)}")


# Of so few steps, the first ones are not seen whole.
FEW_STEPS = 3
# What the source of a script tells: the line of a fact.
_LINES: dict[str, Callable[[str], int]] = {
    "keeps": keeping_line,
    "carries": carrying_line,
    "hooks": partial(adding_line, method="register_.*hook"),
    "handlers": partial(adding_line, method="addHandler"),
    "parameters": partial(adding_line, method="add_param_group"),
    "state": partial(growing_line, name="state", attribute=True),
}


class TrainedProcesses:
    """What is known of the processes of one name: of a rank, also after a launcher has started it again.

    step: optimizer steps so far. offset: those before the process that trains now, as far as it does not count them
    itself. ended: (status, reason) that it wrote. gpu: that it trains on; None for the CPU, and before it has told.
    """

    def __init__(self, name: str, command: Command, machine: Machine) -> None:
        self._name, self._command, self._machine = name, command, machine
        self.step = self.offset = self._before = 0
        self.ended: tuple[str, str] | None = None
        self.gpu: Gpu | None = None
        self.run: RunEvent | None = None
        self._process: Process | None = None
        self._shown = self._counts_items = False
        self._lines: dict[str, int] = {}  # in the source, by the fact of the script's configuration
        self._same_ranks: list[int] = []
        # The method that makes an item, and its line that draws random numbers, 0 for none.
        self._reads, self._draws = ("", 0), 0
        self._phases: set[str] = set()

    def take(self, process: Process, line: Line) -> Iterator[Event]:
        """The events of a line, with what the console knows. Raises ValueError for a line of another format."""
        if process is not self._process:
            self._process, self._before, self.offset, self.ended = process, self.step, self.step, None
        if line["type"] == "run":
            self.offset = max(self._before - int(line.get("resumed_step") or 0), 0)
        if (parsed := decoded(_later(line, self.offset))) is None:
            raise ValueError("no event of the record")
        _, event = parsed
        if isinstance(event, RunEvent):
            self.run, self.gpu = event, self._trained_on(event)
            if self._shown:
                yield self._completed(event)
        elif isinstance(event, WindowEvent) and self.run is not None:
            known = self.run.items_per_step
            if event.items and event.steps and not known:
                self.run = replace(self.run, items_per_step=round(event.items / event.steps))
            if not self._shown or self.run.items_per_step != known:
                yield self._completed(self.run)
            self.step = event.step
            self._phases |= event.phases.keys()
            self._counts_items |= event.items > 0
            yield event
        elif isinstance(event, EndEvent):
            self.ended = event.status, printable(event.reason)
        elif isinstance(event, MarkEvent):
            yield replace(event, text=printable(event.text))
        elif isinstance(event, FunctionsEvent):
            yield replace(event, waits=[_at_call(wait) for wait in event.waits])
        elif isinstance(event, HoldersEvent):
            script = {} if self.run is None else self.run.config.get("script") or {}
            yield placed(event, [str(script.get("main") or "")])
        elif not isinstance(event, WindowEvent):
            yield event

    def shares_data(self, ranks: list[int]) -> RunEvent | None:
        """These ranks read the same batches; the event of the run if it has to be written again."""
        known, self._same_ranks = self._same_ranks, ranks
        return self._completed(self.run) if self.run is not None and self._shown and known != ranks else None

    def _completed(self, run: RunEvent) -> RunEvent:
        resumed, self._shown = None if self._shown else run.resumed_step, True
        config, host, device = dict(run.config), self._machine.host, run.device or "cpu"
        config["script"] = {**self._command.to_dict(), **config["script"]}
        for fact, line_of in _LINES.items():
            if known := config["script"].get(fact):
                self._lines[fact] = self._lines.get(fact) or line_of(known[0])
                config["script"][fact] = [known[0], self._lines[fact]]
        if config["script"].get("by_item") and (reads := config["script"].get("reads")):
            file, line = str(reads[0]), int(reads[1])
            if (file, line) != self._reads:
                self._reads, self._draws = (file, line), drawing_line(file, line)
            if self._draws:
                config["script"]["random"] = [file, self._draws]
        if self._same_ranks:
            config["script"]["same_ranks"] = self._same_ranks
        if "parallel" in config:
            config["parallel"] = {name: config["parallel"][name] for name in ("ranks", "strategy")}
        return replace(
            run, name=self._name, workload=self._command.title, config=config, device=device,
            device_name=host.cpu if device == "cpu" else device if self.gpu is None else self.gpu.name,
            gpu=None if self.gpu is None else self.gpu.to_dict(), model=printable(run.model),
            data=self._command.text, usable_cores=host.usable_cpus, resumed_step=resumed,
        )  # fmt: skip

    def _trained_on(self, run: RunEvent) -> Gpu | None:
        gpus, known = self._machine.gpus, run.gpu
        if not run.device.startswith("cuda"):
            return None
        if known is None:  # torch did not say
            return gpus[0] if len(gpus) == 1 else None
        major, minor = known["capability"]
        return trained_on(
            gpus, known["uuid"], printable(str(known["name"])), int(known["total_bytes"]),
            (int(major), int(minor)), str(known["visible"] or ""),
        )  # fmt: skip

    @property
    def shares(self) -> bool:
        """Whether it trains together with others: a step of all of them is one step."""
        return self.run is not None and "parallel" in self.run.config

    @property
    def not_seen(self) -> list[str]:
        """What could not be observed of the steps, in words."""
        if self.step <= FEW_STEPS:
            return []
        lacking = [phase for phase in ("forward", "backward") if phase not in self._phases]
        found = []
        if lacking:
            found.append(
                f"not seen in the optimizer steps: {' and '.join(lacking)} (compiled, scripted, or without modules of "
                f"torch); {'its' if len(lacking) == 1 else 'their'} time is part of other phases"
            )
        if not self._counts_items:
            found.append(
                "items/s: not counted, since no tensor that holds a batch of items was seen in the input of the model"
            )
        return found


def left_out_text(batches: int, step: int) -> str:
    """What is said of batches that were computed for nothing."""
    return (
        f"nothing is trained since step {number(step)}: at least {number(batches)} batches went through the model "
        "without a backward pass, as where a loop leaves out losses that are not finite; look at losses and weights"
    )


def uneven_text(each: Sequence[int], step: int) -> str:
    """What is said of several optimizers with other numbers of steps than the training; "" if these explain it."""
    if len(each) < 2 or (max(each) - min(each) <= 1 and min(each) <= step <= max(each)):
        return ""
    if abs(sum(each) - step) < len(each):  # they take turns, or the places of others
        return ""
    more = len(each) == mapped.MOST_OPTIMIZERS
    told = ", ".join(map(number, each[:-1])) + f" and {number(each[-1])}"
    text = f"optimizer steps of {'the first' if more else 'the'} {len(each)} optimizers: {told}"
    return (
        text
        if step in each
        else f"{text}; their rhythm is not regular, so that {number(step)} is an estimate"
    )


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
        root: int | None = None,
    ) -> None:
        """folder: of the memories of the processes. root: the process id of the command."""
        self._directory, self._command, self._machine, self._put = directory, command, machine, put
        folder = directory.ranks if folder is None else folder
        self._records = Records(folder)
        self._trained: dict[str, TrainedProcesses] = {}
        self._ranks = ScriptRanks(command.folder)
        watch = ProcessWatch(where=self._keeps, workers=WorkerWatch(folder))
        self._samples, self._watch, self._root = Samples(), watch, root
        self._captures = RunCaptures(directory)
        # Processes whose observation has ended before their training, in words.
        self._over: list[str] = []
        self._told_left_out = False

    @property
    def trained(self) -> bool:
        """Whether any process has trained."""
        return bool(self._trained)

    @property
    def step(self) -> int:
        """Optimizer steps so far: of one of the ranks that train together, and of all other processes and threads."""
        together = max((one.step for one in self._trained.values() if one.shares), default=0)
        apart = sum(one.step for one in self._trained.values() if not one.shares)
        return together + apart + self._elsewhere

    @property
    def trains(self) -> tuple[int | None, Gpu | None]:
        """(process id, GPU) of the leading process, if it is on this host; the GPU is None for the CPU."""
        leads = min(self._trained, key=_leading, default=None)
        if leads is None or not self._here(leads):
            return None, None
        leading = self._trained[leads]
        return None if leading.run is None else leading.run.pid, leading.gpu

    @property
    def _elsewhere(self) -> int:
        """Steps of threads whose phases are not timed."""
        return sum(process.elsewhere for process in self._records.processes)

    @property
    def not_shown(self) -> list[str]:
        """What the figures of the run leave out, in words."""
        found = list(self._over)
        if (steps := self._elsewhere) > 0:
            found.append(f"optimizer steps of other threads: {number(steps)}, counted but not timed")
        trained = [name for name, one in self._trained.items() if not one.shares and one.step]
        if len(trained) > 1:
            leading = min(trained, key=_leading)
            steps = sum(self._trained[name].step for name in trained if name != leading)
            others = counted(len(trained) - 1, "other process")
            found.append(f"optimizer steps of {others}: {number(steps)}; times are those of the first one")
        if passes := sum(process.unended for process in self._records.processes):
            after = "after the last one" if self.step else "in all"
            found.append(
                f"backward passes without a step of an optimizer of torch: {number(passes)} {after}; other updates of "
                "the parameters are not counted as steps here"
            )
        if batches := sum(process.left_out for process in self._records.processes):
            found.append(left_out_text(batches, self.step))
        if self._trained:
            leading = min(self._trained, key=_leading)
            found += self._trained[leading].not_seen
            newest = [process for process in self._records.processes if process.name == leading][-1]
            if text := uneven_text(newest.optimizer_steps, newest.steps):
                found.append(text)
        return found

    @property
    def ended(self) -> tuple[str, str] | None:
        """(status, reason) that a process wrote at its end; None before that.

        Of several ranks, of the one that ended first; of other processes, of one that failed if there is one.
        """
        if (first := self._ranks.first_end()) is not None:
            return first
        found = [one.ended for one in self._trained.values() if one.ended is not None]
        return next((end for end in found if end[0] != "done"), found[0] if found else None)

    def poll(self, final: bool = False, stopping: bool = False) -> None:
        """Read what is new, in the order in which it was written, and look for processes that make no progress.

        final: all processes have ended. stopping: they are asked to.
        """
        for process, line in sorted(self._records.new(final), key=lambda item: item[1]["t"]):
            self._take(process, line)
        if not self._told_left_out and (
            batches := max((one.left_out for one in self._records.processes), default=0)
        ):
            self._told_left_out = True
            self._put(MarkEvent("warning", self.step, left_out_text(batches, self.step)))
        for reason in self._records.unobserved():
            text = f"not observed: {printable(reason)}"
            self._put(MarkEvent("warning", self.step, text, data={"observed": "no more"}))
        if final or stopping:
            return
        here = self.here
        for process, line in self._samples.look([one for one in here if not one.paused]):
            self._take(process, line)
        for event in self._watch.look(self._watched(here), self._rank_names(here)):
            self._put(event)

    def _watched(self, here: Sequence[Process]) -> Sequence[Subject]:
        """The processes that are to make progress: those that train, or else the programs of the command."""
        if here:
            return [one for one in here if not one.paused]
        return [] if self._root is None else untold(self._root)

    def _rank_names(self, here: Sequence[Process]) -> dict[int, str]:
        ranks = {one.pid: self._ranks.rank_of(one.name) for one in here}
        return {pid: f"rank {rank}" for pid, rank in ranks.items() if rank is not None}

    def _keeps(self, kind: str) -> str:
        """The line of the script that keeps descriptors of this kind."""
        words = self._command.words
        path = next((Path(self._command.folder, word) for word in words if word.endswith(".py")), None)
        lines = {"shared memory": kept_tensors_line, "file": kept_files_line}
        line = lines[kind](str(path)) if path is not None and kind in lines else 0
        return f"{path.name}:{line}" if path is not None and line else ""

    def finish(self) -> None:
        """Read the rest, and tell what could not be read, and what ended the processes."""
        self.poll(final=True)
        error = "" if self.ended is None else self.ended[1]
        if (death := self._watch.children.told_by(error, self.step)) is not None and death[1]:
            self._put(death[0])
        if FULL.search(error) and (full := self._watch.descriptors.full(self.step)) is not None:
            self._put(full)
        seeds = [seed for one in self._records.processes for seed in one.loader_seeds]
        for event in self._watch.finish(self.step, seeds):
            self._put(event)
        self._watch.close()
        for event in self._ranks.finish():
            self._put(event)
        if lost := self._records.lost:
            text = f"{counted(lost, 'line')} of the observer's records could not be written or read"
            self._put(MarkEvent("warning", self.step, text))

    @property
    def deaths(self) -> Sequence[DeathEvent]:
        """Processes of the script that have died, the first one first."""
        return self._watch.children.deaths

    @property
    def here(self) -> list[Process]:
        """The processes that train on this host, the leading one first."""
        newest = {one.name: one for one in self._records.processes if one.name in self._trained}
        found = [
            one
            for one in newest.values()
            if one.trains and psutil.pid_exists(one.pid) and self._here(one.name)
        ]
        return sorted(found, key=lambda one: _leading(one.name))

    def _here(self, name: str) -> bool:
        run = self._trained[name].run
        return run is not None and run.host == socket.gethostname()

    def _take(self, process: Process, line: Line) -> None:
        name = process.name
        trained = self._trained.get(name)
        if trained is None:
            trained = TrainedProcesses(self._directory.name, self._command, self._machine)
            self._trained[name] = trained
        leads = min(self._trained, key=_leading)
        try:
            # First: a restart belongs to the steps before it.
            shared = list(self._ranks.take(name, line, self._trained[leads].offset))
            for event in trained.take(process, line):
                self._tell(name, event, leads == name)
            if line["type"] == "run" and (run := self._trained[leads].shares_data(self._ranks.same_data)):
                self._tell(leads, run, True)
        except (KeyError, TypeError, ValueError, IndexError):
            return  # a line of another version
        for event in shared:
            self._put(event)

    def _tell(self, name: str, event: Event, leads: bool) -> None:
        """Put an event of a process into the record. leads: it is the leading one."""
        if not isinstance(event, MarkEvent):
            # The batches of one rank can make the gradients of all of them infinite.
            if leads or (isinstance(event, NotFiniteEvent) and self._ranks.rank_of(name) is not None):
                self._put(event)
            return
        data = event.data
        if "timed" in data:  # where batches are made
            self._samples.sources.add((data["file"], data["function"]))
        if "observed" in data:  # what is not seen, of any process
            told = self._of_rank(name, event)
            if data["observed"] == "no more":
                self._over.append(f"{told.text}; what came later is not in these figures")
            self._put(told)
        elif "trace" in data:
            gpu = self._trained[name].gpu if name in self._trained else None
            profile = None if gpu is None else gpu.profile
            for one in self._captures.taken(event, None if leads else self._ranks.rank_of(name), profile):
                self._put(one)
        elif leads:
            self._put(event)

    def _of_rank(self, name: str, event: MarkEvent) -> MarkEvent:
        """With the rank in front, if there are several."""
        rank = self._ranks.rank_of(name)
        return event if rank is None else replace(event, text=f"rank {rank}: {event.text}")


def _at_call(wait: Wait) -> Wait:
    """A wait at the line of the call, where it is known: the profiler tells where the function around it begins."""
    file, line, function, method, calls, spent = wait
    at = collecting_line(file, line) if method == COLLECT else 0
    return file, at or line, function, method, calls, spent


def _leading(name: str) -> tuple[bool, int, str]:
    kind, _, text = name.partition("-")
    return kind != "rank", int(text) if text.isdecimal() else 0, name


def _later(line: Line, steps: int) -> Line:
    """The line of a process that was started again after so many steps."""
    if not steps:
        return line
    moved = dict(line)
    if "step" in line:
        moved["step"] += steps
    if line.get("total_steps"):
        moved["total_steps"] += steps
    if (loss := line.get("last_loss")) is not None:
        moved["last_loss"] = [loss[0] + steps, loss[1]]
    if "milestone_losses" in line:
        moved["milestone_losses"] = [[step + steps, value] for step, value in line["milestone_losses"]]
    return moved
