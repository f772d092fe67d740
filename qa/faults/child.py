"""One run or one trial in a separate process: `python -m qa.faults.child TASK.json RESULT.json`.

A run is opened and executed as in the product, and diagnosed from its last snapshot before the end. A separate process
leaves nothing behind, and can be killed if it hangs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from benchmarks.common import LoadWatch, say

from ndd_engine.config import read
from ndd_engine.diagnose import diagnose
from ndd_engine.record.events import Event, WindowEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.train.run import Run, RunRequest
from ndd_engine.trial.paired import abba_log_ratio, estimate
from ndd_engine.trial.request import Base, Progress, TrialRequest
from ndd_engine.trial.trial import run_trial

Json = dict[str, Any]
# Time limit for the first step: a compilation on a busy machine.
PATIENCE_S = 300.0
# A run continues until it has so many steps, up to MOST times its usual duration.
FEWEST_STEPS = 40
MOST = 4.0
# ABBA blocks with and without the neighbours: a step alongside them may take a second.
BLOCK_S = 6.0
ABBA_BLOCKS = 3


def main() -> int:
    """Run the task; the result is one JSON document."""
    task: Json = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    result = trial(task) if task["what"] == "trial" else Diagnosed(task).result()
    Path(sys.argv[2]).write_text(json.dumps(result, indent=1, default=str), "utf-8")
    return 0


def trial(task: Json) -> Json:
    """Task: workload, sets, change, budget_s, cause. Result: the trial's event."""

    def tell(progress: Progress) -> None:
        print(f"{progress.elapsed_s:5.1f} s  {progress.stage}  {progress.ratio}", file=sys.stderr, flush=True)

    base = Base(task["workload"], None, task["workload"], tuple(task["sets"]))
    change, budget_s, restarts = tuple(task["change"]), float(task["budget_s"]), task.get("restarts", False)
    request = TrialRequest(base, change, budget_s, task["cause"], restarts)
    return asdict(run_trial(request, tell))


class Diagnosed:
    """Task: workload, sets, folder, seconds (of training before the diagnosis), to_end, neighbours (ids of planted
    processes), alone (whether to measure the run without them).

    Result: the findings, their snapshot, foreign (cores used by other processes that were not planted), and alone: the
    speedup while the neighbours are stopped.
    """

    def __init__(self, task: Json) -> None:
        self.task = task
        self._training = threading.Event()
        self._windows: list[tuple[float, WindowEvent]] = []
        draft = read(sets=task["sets"], workload=task["workload"])
        self.run = Run.open(RunRequest(draft, Path(task["folder"])), self._listen)
        self.snapshot: Snapshot | None = None
        self.foreign = 0.0
        self.alone: Json | None = None

    def result(self) -> Json:
        """Train, diagnose, stop."""
        # On a thread of its own, so that this one can watch it.
        trainer = threading.Thread(target=self.run.execute)
        trainer.start()
        try:
            self._watch()
        finally:
            self.run.control.request("kill", "measured for long enough")
            trainer.join()
            self.run.close()
        end = self.run.end
        assert end is not None
        # A finished run is diagnosed at its end.
        snapshot = self.snapshot or self.run.recorder.snapshot()
        return {
            "status": end.status,
            "reason": end.reason,
            "findings": [finding.to_dict() for finding in diagnose(snapshot)],
            "snapshot": asdict(snapshot),
            "foreign": self.foreign,
            "alone": self.alone,
        }

    def _listen(self, t: float, event: Event) -> None:
        if isinstance(event, WindowEvent) and event.steps:
            self._windows.append((t, event))
            self._training.set()

    def _watch(self) -> None:
        run = self.run
        begin = time.monotonic()
        while not self._training.wait(0.2):
            if run.finished.is_set():
                return
            if time.monotonic() - begin > PATIENCE_S:
                return
        planted = [psutil.Process(pid) for pid in self.task["neighbours"]]
        load, before, begin = LoadWatch(), _cpu_s(planted), time.monotonic()
        while not run.finished.wait(0.1) and not self._enough(time.monotonic() - begin):
            pass
        taken = (_cpu_s(planted) - before) / (time.monotonic() - begin)
        self.foreign = max(load.foreign() - taken, 0.0)
        if run.finished.is_set():
            return
        self.snapshot = run.recorder.snapshot()
        if self.task["alone"]:
            self.alone = self._without_neighbours()

    def _enough(self, elapsed: float) -> bool:
        """Whether to diagnose now; on a busy machine a run may take longer, to have enough steps."""
        if self.task["to_end"]:
            return elapsed > PATIENCE_S
        seconds = float(self.task["seconds"])
        few = sum(event.steps for _, event in list(self._windows)) < FEWEST_STEPS
        return elapsed > (seconds * MOST if few else seconds)

    def _without_neighbours(self) -> Json | None:
        """Speed while they are stopped over speed while they compute; None if a block contains no window."""
        values = []
        for _ in range(ABBA_BLOCKS):
            rates = [self._block(stopped) for stopped in (False, True, True, False)]
            if any(rate is None for rate in rates):
                say("no ratio: a block contains no complete window")
                return None
            values.append(abba_log_ratio(*(rate or 1.0 for rate in rates)))
        found = estimate(values)
        return None if found is None else asdict(found)

    def _block(self, stopped: bool) -> float | None:
        """Items per second, of the windows within the block."""
        for pid in self.task["neighbours"]:
            os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
        begin = time.time()
        time.sleep(BLOCK_S)
        inside = [event for t, event in self._windows if t - event.wall_ns * 1e-9 >= begin]
        wall = sum(event.wall_ns for event in inside)
        return sum(event.items for event in inside) / wall * 1e9 if wall else None


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
