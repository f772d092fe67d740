"""A run of a case, as users have it: `ndd-console train --headless`, watched from outside, diagnosed as it trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import say

from ndd_engine.diagnose import diagnose
from ndd_engine.diagnose.finding import Finding
from ndd_engine.errors import NddError
from ndd_engine.hardware.load import LoadWatch
from ndd_engine.record.events import Event, WindowEvent
from ndd_engine.record.file import RunReader
from ndd_engine.record.rundir import RunDir
from ndd_engine.run.channel import send
from ndd_engine.trial.estimates import Estimate, abba_log_ratio, estimate

from .cases import Case
from .quota import memory_group

NAME = "it"
# Time limit for the first step, a compilation on a busy machine, and for the end of a run.
PATIENCE_S, END_S, FAILED_S = 300.0, 60.0, 5.0
POLL_S = 0.1
# A run continues until it has so many steps, up to MOST times its usual duration.
FEWEST_STEPS = 40
MOST = 4.0
# ABBA blocks with and without the neighbours: a step alongside them may take a second.
BLOCK_S = 6.0
ABBA_BLOCKS = 3
# Each exits when the suite is gone, so that no process outlives a killed suite.
_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(200_000))\n"
_ASLEEP = "import os, sys, time\nwhile os.getppid() == int(sys.argv[1]):\n    time.sleep(0.2)\n"


class CaseError(Exception):
    """A run failed; the message says where its output is."""


@dataclass(frozen=True)
class Found:
    """What was found. foreign: cores used by other processes that were not planted.

    alone: the speedup while the neighbours are stopped; None if there are none, or it was not measured.
    """

    findings: tuple[Finding, ...]
    foreign: float
    alone: Estimate | None


def observed(case: Case, folder: Path, neighbours: Sequence[int], alone: bool) -> Found:
    """Train the case, diagnose it, and end it. alone: whether to stop its neighbours for some time, too.

    Raises CaseError.
    """
    command = [sys.executable, "-m", "ndd_console", "--runs", "runs", "train", "--headless", "--run", NAME]
    command += ["--workload", case.workload_name]
    command += [word for item in case.all_sets for word in ("--set", item)]
    log = folder / "run.log"
    # A compiler cache of its own, so that compiling costs as much as the first time.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder.absolute() / "compiled")}
    limited = memory_group(case.memory_bytes) if case.memory_bytes else nullcontext()
    with log.open("wb") as output, limited as group:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd=folder,
            env=environment,
        )  # fmt: skip
        if group is not None:
            (group / "cgroup.procs").write_text(str(process.pid))
        watched = _Watched(case, RunDir(folder / "runs" / NAME), process)
        try:
            found = watched.found(neighbours, alone)
        finally:
            watched.end()
    end = watched.reader.snapshot()
    if (end.status == "failed" and not case.fails) or not found.findings:
        lines = log.read_text("utf-8", "replace").strip().splitlines() or ["no output"]
        raise CaseError(f"the run ended with status {process.returncode}: {lines[-1][:200]}; see {log}")
    return found


class _Watched:
    """A run in another process."""

    def __init__(self, case: Case, run: RunDir, process: subprocess.Popen[bytes]) -> None:
        self.case, self.run, self.process = case, run, process
        self._windows: list[tuple[float, WindowEvent]] = []
        self.reader = RunReader(run, self._listen)

    def _listen(self, t: float, event: Event) -> None:
        if isinstance(event, WindowEvent) and event.steps:
            self._windows.append((t, event))

    def found(self, neighbours: Sequence[int], alone: bool) -> Found:
        """Wait until it has trained for long enough, and diagnose it then, or at its end."""
        self._wait(lambda: bool(self._windows), PATIENCE_S)
        load, begin = LoadWatch(), time.monotonic()
        self._wait(lambda: self._enough(time.monotonic() - begin), PATIENCE_S)
        foreign, snapshot = load.foreign(), self.reader.snapshot()
        trains = self.process.poll() is None
        return Found(
            diagnose(snapshot) if self._windows else (),
            foreign,
            self._without(neighbours) if alone and trains else None,
        )

    def _wait(self, done: Callable[[], bool], limit_s: float) -> None:
        """Wait for something, or for the end of the run."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.reader.poll()
            if done():
                return
        self.reader.poll()

    def _enough(self, elapsed: float) -> bool:
        """Whether to diagnose now; on a busy machine a run may take longer, to have enough steps."""
        if self.case.to_end:
            return False
        few = sum(event.steps for _, event in self._windows) < FEWEST_STEPS
        return elapsed > (self.case.seconds * MOST if few else self.case.seconds)

    def _without(self, neighbours: Sequence[int]) -> Estimate | None:
        """Speed while they are stopped over speed while they compute; None if a block contains no window."""
        values = []
        for _ in range(ABBA_BLOCKS):
            rates = [self._block(neighbours, stopped) for stopped in (False, True, True, False)]
            if None in rates:
                say("no ratio: a block contains no complete window")
                return None
            values.append(abba_log_ratio(*(rate or 1.0 for rate in rates)))
        return estimate(values)

    def _block(self, neighbours: Sequence[int], stopped: bool) -> float | None:
        """Items per second, of the windows within the block."""
        for pid in neighbours:
            os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
        begin = time.time()
        time.sleep(BLOCK_S)
        self.reader.poll()
        inside = [event for t, event in self._windows if t - event.wall_ns * 1e-9 >= begin]
        wall = sum(event.wall_ns for event in inside)
        return sum(event.items for event in inside) / wall * 1e9 if wall else None

    def end(self) -> None:
        """End the run, and whatever it leaves behind."""
        try:
            if self.process.poll() is None:
                send(self.run.control_socket, "kill")
                # A thread that hangs hears nothing of it.
                self.process.wait(FAILED_S if self.case.fails else END_S)
        except (NddError, subprocess.TimeoutExpired):
            if not self.case.fails:
                say(f"{self.case.name}: the run did not end by itself")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.reader.poll()


@contextmanager
def neighbours(busy: int, asleep: int = 0) -> Iterator[tuple[int, ...]]:
    """Other processes alongside a run: `busy` of them compute, `asleep` of them sleep.

    Yields the process ids of the busy ones.
    """
    # One thread each, regardless of the environment.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for program in (_BUSY,) * busy + (_ASLEEP,) * asleep:
            command = [sys.executable, "-c", program, str(os.getpid())]
            started.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment
                )
            )
        yield tuple(process.pid for process in started[:busy])
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
