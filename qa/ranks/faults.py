"""Requests to runs of several ranks, and their failures: do all ranks act alike, and do they go on?

Every run is `ndd-console train --ranks N` with a workload of small steps (12 ms), on this machine's CPU, by gloo. The
records of the ranks and their checkpoints are compared. Times are from the request, signal or fault on.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from benchmarks.common import Options, Table, as_seconds, say
from tests.states import equal

from ndd_engine.run.channel import send

from .job import LIMIT_S, RanksJob

TITLE = "ranks_faults: requests to runs of several ranks, and failures of ranks"
COLUMNS = ("case", "right", "of", "median", "longest", "limit", "")
HANG_S = 3.0
# Repetitions of a case: all, and with --quick.
REQUESTS, STOPS, KILLS, RUNS, HANGS, LEAVES = (20, 4), (10, 1), (100, 2), (20, 1), (5, 1), (40, 1)
KILLS_A_RUN, STEPS_A_KILL = 25, 400
QUIET = ("--set", "evaluate.every_epochs=0", "--set", "checkpoint.every_epochs=0")


@dataclass
class Found:
    """Of a case: how often it went right, and the seconds it took. limit_s: None without one."""

    name: str
    limit_s: float | None
    right: int = 0
    tries: int = 0
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, wrong: str, seconds: float | None = None) -> None:
        """One try. wrong: what went wrong, "" if nothing did."""
        if not wrong and seconds is not None and self.limit_s is not None and seconds > self.limit_s:
            wrong = f"took {seconds:.1f} s"
        self.tries += 1
        self.right += not wrong
        if seconds is not None:
            self.seconds.append(seconds)
        if wrong:
            self.wrong.append(wrong)
        took = "" if seconds is None else f", {seconds:.2f} s"
        say(f"ranks_faults: {self.name} {self.tries}: {wrong or 'right'}{took}")

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        median, longest = "", ""
        if self.seconds:
            median, longest = as_seconds(statistics.median(self.seconds)), as_seconds(max(self.seconds))
        limit = "" if self.limit_s is None else as_seconds(self.limit_s)
        verdict = "" if self.right == self.tries else "WRONG"
        return self.name, str(self.right), str(self.tries), median, longest, limit, verdict


def measure(options: Options) -> Table:
    """All cases, or those of --only."""
    table = Table(TITLE, COLUMNS)
    random.seed(7)
    for name in options.wanted(CASES, str):
        with tempfile.TemporaryDirectory(prefix="ndd-faults-") as folder:
            for found in CASES[name](Path(folder), options):
                table.add(*found.cells())
                for wrong in dict.fromkeys(found.wrong):
                    table.note(f"{found.name}: {wrong}")
    table.note("seconds; from the request, signal or fault on")
    return table


@contextmanager
def training(
    folder: Path, *words: str, within_s: float = 1.0, **more: int
) -> Iterator[tuple[RanksJob, float]]:
    """A run that trains, at a random moment within so many seconds; and that moment (Unix time)."""
    with RanksJob(folder, *QUIET, *words, **more) as job:
        job.trains()
        time.sleep(random.uniform(0.0, within_s))
        yield job, time.time()


def requests(folder: Path, options: Options) -> Iterator[Found]:
    """Requests to one run, which goes on: on all ranks after the same step."""
    kinds = {"checkpoint": "checkpoint", "evaluate": "evaluation", "pause": "pause", "resume": "resume"}
    found = {action: Found(f"{action}: same step", None) for action in kinds}
    with RanksJob(folder, *QUIET, "--set", "checkpoint.every_steps=0") as job:
        job.trains()
        for _ in range(options.repeats(*REQUESTS)):
            for action, mark in kinds.items():
                time.sleep(random.uniform(0.05, 0.6))
                before = [len(job.marks(rank, mark)) for rank in (0, 1)]
                t = time.time()
                send(job.run.control_socket, action)
                new = [_next(job, rank, mark, count) for rank, count in enumerate(before)]
                steps = [one["step"] for one in new]
                wrong = "" if len(set(steps)) == 1 else f"steps {steps}"
                found[action].note(wrong, max(one["t"] for one in new) - t)
    yield from found.values()


def _next(job: RanksJob, rank: int, mark: str, count: int) -> dict[str, Any]:
    """The mark of a rank after so many of its kind. Raises TimeoutError."""
    found: dict[str, Any] = job.until(lambda: job.marks(rank, mark)[count])
    return found


def _stop_socket(job: RanksJob) -> None:
    send(job.run.control_socket, "stop")


def _signal(number: int, whom: Callable[[RanksJob], int], job: RanksJob) -> None:
    os.kill(whom(job), number)


def _twice(job: RanksJob) -> None:
    os.kill(job.console.pid, signal.SIGINT)
    time.sleep(0.005)  # less than the steps until they stop
    os.kill(job.console.pid, signal.SIGINT)


def _rank(rank: int) -> Callable[[RanksJob], int]:
    return lambda job: job.pid(rank)


STOP_WAYS: dict[str, tuple[Callable[[RanksJob], None], int]] = {
    "stop from another terminal": (_stop_socket, 0),
    "SIGINT to the console": (partial(_signal, signal.SIGINT, lambda job: job.console.pid), 130),
    "SIGTERM to the console": (partial(_signal, signal.SIGTERM, lambda job: job.console.pid), 143),
    "SIGTERM to the launcher": (partial(_signal, signal.SIGTERM, RanksJob.launcher), 143),
    "SIGTERM to rank 0": (partial(_signal, signal.SIGTERM, _rank(0)), 143),
    "SIGTERM to rank 1": (partial(_signal, signal.SIGTERM, _rank(1)), 143),
    "SIGINT twice": (_twice, 130),
}


def stops(folder: Path, options: Options) -> Iterator[Found]:
    """Ways to stop: the same step on all ranks, the documented status, and how long until the end is recorded."""
    for name, (stop, status) in STOP_WAYS.items():
        found = Found(f"{name}: same step, status {status}", 2.0)
        for index in range(options.repeats(*STOPS)):
            with training(folder / f"{name} {index}") as (job, t):
                stop(job)
                rc = job.wait()
                steps = [job.end(rank).get("step") for rank in (0, 1)]
                alike = steps[0] == steps[1] or name == "SIGINT twice"
                wrong = "" if alike and rc == status else f"steps {steps}, status {rc}"
                found.note(wrong, job.end()["t"] - t)
        yield found


def kills(folder: Path, options: Options) -> Iterator[Found]:
    """kill -9 of a random rank at random moments, with --restarts; compared with one uninterrupted run."""
    again, same = Found("kill -9 of a rank: training again", 10.0), Found("weights as uninterrupted", None)
    runs = max(options.repeats(*KILLS) // KILLS_A_RUN, 1)
    count = options.repeats(*KILLS) // runs
    steps = STEPS_A_KILL * count
    with RanksJob(folder / "plain", *QUIET, steps=steps) as job:
        job.wait(LIMIT_S + steps * 0.1)
        plain = job.weights()
    for index in range(runs):
        with RanksJob(folder / f"killed {index}", "--restarts", str(count), *QUIET, steps=steps) as job:
            since = 0.0
            for _ in range(count):
                rank = random.randrange(2)
                try:
                    job.trains(since_t=since)
                    time.sleep(random.uniform(0.0, 2.0))
                    t = since = time.time()
                    os.kill(job.pid(rank), signal.SIGKILL)
                    again.note("", job.trains(1, since_t=t) - t)
                except (TimeoutError, ProcessLookupError) as error:
                    again.note(f"no training before or after rank {rank} was killed: {str(error)[-300:]}")
                    break
            rc = job.wait(LIMIT_S + steps * 0.1)
            alike = rc == 0 and equal(plain, job.weights())
            same.note("" if alike else f"differ, status {rc}")
    yield again
    yield same


def launcher(folder: Path, options: Options) -> Iterator[Found]:
    """kill -9 of the launcher: no rank is left."""
    found = Found("launcher killed: no rank left", 5.0)
    for index in range(options.repeats(*RUNS)):
        with training(folder / str(index)) as (job, t):
            ranks = [psutil.Process(job.pid(rank)) for rank in (0, 1)]
            os.kill(job.launcher(), signal.SIGKILL)
            _, alive = psutil.wait_procs(ranks, timeout=20)
            seconds = time.time() - t
            rc = job.wait()
            found.note("" if not alive and rc == 1 else f"{len(alive)} ranks left, status {rc}", seconds)
    yield found


HANG_KINDS = {
    "stop": "a stopped rank",
    "sleep": "a rank that sleeps in the data",
    "loop": "a rank in an endless loop",
    "lock": "a rank that holds the interpreter lock",
    "extra": "a rank in another collective",
}
# What the message has to name beside the rank: the place, and what the others wait in.
HANG_WORDS = {
    "stop": ("is stopped", "wait in"),
    "sleep": ("rank_faults.py", "__getitem__", "wait in"),
    "loop": ("rank_faults.py", "endless", "wait in"),
    "lock": ("holds the interpreter lock", "rank_faults.py", "loss", "wait in"),
    "extra": ("different collectives", "broadcast of", "rank_faults.py"),
}


def hangs(folder: Path, options: Options) -> Iterator[Found]:
    """Ranks that hang: named by the console, with what is known of the place and of the others."""
    for kind, title in HANG_KINDS.items():
        found = Found(f"{title}: named", HANG_S + 5)
        for index in range(options.repeats(*HANGS)):
            rank = 1 - index % 2
            with training(folder / f"{kind} {index}", "--set", f"parallel.hang_s={HANG_S}") as (job, t):
                job.plant(rank, kind)
                try:
                    said = str(job.until(lambda: _hang(job)))
                except TimeoutError:
                    found.note(f"rank {rank} not named: {job.end().get('reason', 'no word')}")
                    continue
                words = (f"rank {rank}", *HANG_WORDS[kind])
                found.note("" if all(word in said for word in words) else said, time.time() - t)
        yield found


def _hang(job: RanksJob) -> str:
    return next((line for line in job.said().splitlines() if "has not ended" in line), "")


LEAVE_WAYS: dict[str, tuple[Callable[[RanksJob], None] | None, int]] = {
    "done": (None, 0),
    "SIGTERM": (partial(_signal, signal.SIGTERM, lambda job: job.console.pid), 143),
    "Ctrl-C": (partial(_signal, signal.SIGINT, lambda job: job.console.pid), 130),
    "an error of rank 3": (lambda job: job.plant(3, "raise"), 1),
    "rank 2 killed": (partial(_signal, signal.SIGKILL, _rank(2)), 1),
}


def leaves(folder: Path, options: Options) -> Iterator[Found]:
    """Runs of four ranks: they leave after their end, with the documented status."""
    for name, (act, status) in LEAVE_WAYS.items():
        found = Found(f"4 ranks, {name}: status {status}, all left", 5.0)
        for index in range(options.repeats(*LEAVES)):
            steps = 60 if act is None else 10**6
            with training(folder / f"{name} {index}", within_s=0, ranks=4, steps=steps) as (job, _):
                pids = [job.pid(rank) for rank in range(4)]
                if act is not None:
                    act(job)
                rc = job.wait()
                seconds = time.time() - job.end()["t"]
                left = [pid for pid in pids if psutil.pid_exists(pid)]
                found.note("" if rc == status and not left else f"status {rc}, {len(left)} left", seconds)
        yield found


CASES: dict[str, Callable[[Path, Options], Iterator[Found]]] = {
    "requests": requests,
    "stops": stops,
    "kills": kills,
    "launcher": launcher,
    "hangs": hangs,
    "leaves": leaves,
}

ONLY = tuple(CASES)
