"""Trains in this process, without a screen."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ndd_engine.errors import UsageError
from ndd_engine.record.events import Event
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.run.control import StopNow
from ndd_engine.run.run import Run
from ndd_engine.train.request import RunRequest
from ndd_engine.train.training_run import TrainingRun
from ndd_watch.changes import GLOBALS

from .record_api import Record
from .sources import PathLike, Sets, Source, configured_run, draft_of, root_of


@dataclass(frozen=True)
class Result:
    """The end of a run that `run_training` executed.

    status: "done" (all steps), "stopped" (from another terminal) or "failed"; reason: the same in a sentence. step:
    optimizer steps done. path: folder of the run. snapshot: the final state, with the losses and the evaluations.
    """

    status: str
    reason: str
    step: int
    path: Path
    snapshot: Snapshot

    @property
    def record(self) -> Record:
        """The recorded run: events, configuration and checkpoints."""
        return Record(self.path)


def run_training(
    config: Source = None,
    *,
    sets: Sets = (),
    workload: str | None = None,
    run: str | None = None,
    runs: PathLike | None = "runs",
    resume: PathLike | None = None,
    on_event: Callable[[float, Event], None] | None = None,
) -> Result:
    """Train in this process and thread, without a screen, until the end of the run.

    Args:
        config: path of a TOML file, or a mapping such as `{"batch": {"micro": 64}}`; None for the workload's defaults.
        sets: values on top of it, as "batch.micro=64" strings or as a mapping `{"batch.micro": 64}`.
        workload: name of a workload, or your own as "package.module:factory".
        run: name of the new run (default: the workload and a number).
        runs: folder of the runs; None for $NDD_RUNS, otherwise ./runs.
        resume: name or folder of a run to resume from its latest checkpoint, with its own configuration; `sets` apply.
        on_event: called with (unix seconds, event) for each recorded event, in a background thread.

    Returns:
        The result. A run that fails returns status "failed" with the reason and does not raise.

    Raises:
        ConfigError: the configuration is invalid; the message names each key, what was found and what is allowed.
        UsageError: the name is taken, the run to resume does not exist, or the folder cannot be written.
        KeyboardInterrupt: Ctrl-C, after a checkpoint was saved; press it again to stop without one.

    Example:
        >>> result = run_training({"run": {"max_steps": 200}}, workload="chartext")
        >>> result.status, result.step
        ('done', 200)
    """
    root = root_of(runs)
    directory = None
    if resume is not None:
        if config is not None or workload is not None or run is not None:
            raise UsageError("resume uses the configuration of its run: omit config, workload and run")
        directory = configured_run(root, resume)
        config = directory.config
    draft = draft_of(config, sets, workload, {} if run is None else {"run": {"name": run}})
    with restored():
        opened = Run.open(TrainingRun(RunRequest(draft, root, directory)), on_event)
        try:
            with _interruptible(opened):
                end = opened.execute()
        finally:
            opened.close()
    if end.status == "interrupted":
        raise KeyboardInterrupt(f"run {opened.directory.name}: {end.reason}")
    return Result(end.status, end.reason, end.step, opened.directory.path, opened.recorder.snapshot())


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Undo what a run changes for the whole process: torch's switches and determinism, frozen garbage collection."""
    import torch

    switches = [(switch, switch.get()) for switch in (kind(None, None) for kind in GLOBALS.values())]
    deterministic, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    try:
        yield
    finally:
        for switch, before in switches:
            switch.set(before)
        torch.backends.cudnn.deterministic = cudnn
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)
        gc.unfreeze()
        gc.collect()


@contextlib.contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """Ctrl-C stops the run after a checkpoint, a second one at once. Main thread only (Python's rule)."""
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        again = run.control.stopping
        run.control.request("kill" if again else "stop", "interrupted (Ctrl-C)", "interrupted")
        if again and run.executor.interruptible:
            raise StopNow

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
