"""Trains in this process without a screen, and reads recorded runs: events, state, configuration and checkpoints."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ndd_engine.config import Config, Draft, anywhere, read
from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.errors import ConfigError, RunLockedError, UsageError
from ndd_engine.record.events import Event
from ndd_engine.record.file import EventLog, RunReader, load_state
from ndd_engine.record.rundir import RunDir, bare, find_run
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import RunState
from ndd_engine.run.control import StopNow
from ndd_engine.run.run import Run
from ndd_engine.text import number, printable
from ndd_engine.train.request import RunRequest
from ndd_engine.train.training_run import Training
from ndd_engine.trial.outcome import differences
from ndd_watch.changes import GLOBALS

from .observing import PathLike, Sets, Source
from .sources import configured_run, draft_of, root_of

E = TypeVar("E", bound=Event)
# Seconds between two reads of the record of a live run.
POLL_S = 0.1


class Record:
    """A recorded run, live or finished. Iterating yields every event as (unix seconds, event), the oldest first.

    Functions that take the name or folder of a run also take a Record.

    >>> record = open_run("chartext-001")
    >>> losses = [(event.step, event.loss) for _, event in record.events(WindowEvent)]
    """

    def __init__(self, path: PathLike) -> None:
        self._run = RunDir(Path(path))
        self._reader: RunReader | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Record({str(self.path)!r})"

    def __iter__(self) -> Iterator[tuple[float, Event]]:
        return self.events(Event)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._run.name

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self._run.path

    @property
    def config(self) -> Config:
        """The configuration with all defaults filled in. Raises ConfigError if the run ended before it was written."""
        return read(self._run.config).resolve()

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the complete checkpoints, in the order in which they were written."""
        from ndd_engine.train.checkpoint import CheckpointStore

        return [saved.path for saved in CheckpointStore(self._run.checkpoints, keep=0).all()]

    @property
    def live(self) -> bool:
        """Whether a process is training this run."""
        return self._run.live_owner() is not None

    def events(self, kind: type[E]) -> Iterator[tuple[float, E]]:
        """The events of one type as (unix seconds, event), the oldest first."""
        for t, event in EventLog(self._run.events).new():
            if isinstance(event, kind):
                yield t, event

    def snapshot(self) -> Snapshot:
        """The current state: status, step, loss, throughput, phases, memory, evaluations."""
        self._reader = self._reader or RunReader(self._run)
        self._reader.poll()
        return self._reader.snapshot()

    def follow(self, timeout: float | None = None) -> Iterator[tuple[float, Event]]:
        """New events of a live run as (unix seconds, event), until the run ends or for up to `timeout` seconds.

        Starts with the first event recorded after iteration begins; yields nothing for a finished run.

        >>> for t, event in open_run("chartext-001").follow(timeout=60):
        ...     print(event)
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        new: list[tuple[float, Event]] = []
        reader = RunReader(self._run, lambda t, event: new.append((t, event)))
        reader.poll()
        new.clear()  # the past
        while not reader.snapshot().final and (deadline is None or time.monotonic() < deadline):
            time.sleep(POLL_S)
            reader.poll()
            yield from new
            new.clear()


def open_run(run: PathLike | None = None, runs: PathLike | None = "runs") -> Record:
    """Open a recorded run, live or finished.

    Args:
        run: name of the run or path of its folder; None for the newest live run, otherwise the newest run.
        runs: folder of the runs; None for $NDD_RUNS, otherwise ./runs.

    Raises:
        UsageError: there is no such run; the message lists the runs that exist.

    Example:
        >>> open_run("chartext-001").snapshot().loss
        1.482
    """
    return Record(find_run(root_of(runs), None if run is None else os.fspath(run)).path)


def find_bottlenecks(snapshot: Snapshot) -> tuple[Finding, ...]:
    """The findings of a run, the most important one first; never empty.

    Example:
        >>> [finding.title for finding in find_bottlenecks(open_run().snapshot())]
    """
    return diagnose(snapshot)


# Keys that a resumed run keeps from its record, whatever the command names.
_KEPT = frozenset({"run.name", "workload.path"})


@dataclass(frozen=True)
class Decision:
    """What to do: a request, or None if the run has finished. text: the same in a line."""

    request: RunRequest | None
    text: str


def resume_or_start(request: RunRequest) -> Decision:
    """Start the run that the request names, resume it, or prepare it again; nothing if it has finished.

    A run that exists resumes with its recorded configuration and what the request changes in it. Raises UsageError
    (RunLockedError if another process writes the run).
    """
    draft = request.draft
    name = draft.run_name
    if name is None:
        raise UsageError("--resume-or-start needs the name of the run: add --run NAME")
    draft.resolve()  # also checks the name
    run = RunDir(request.root / name)
    if not os.path.lexists(run.path):
        return Decision(request, f"run {name} does not exist: it starts")
    if (owner := run.live_owner()) is not None:
        raise RunLockedError(
            f"run {name} is being written by process {owner['pid']} on {owner['host']}; "
            f"watch it with: ndd-console attach {name}"
        )
    if not (run.exists or bare(run)):
        raise UsageError(f"{printable(str(run.path))} exists and is not a run; choose another name")
    state = load_state(run)
    if not list(_steps(run)) or not run.config.exists():
        lost = f" at step {number(state.step)}" if state.step else ""
        text = f"run {name} ended{lost} before its first checkpoint: it starts again"
        return Decision(replace(request, restart=run), text)
    recorded = read(run.config)
    before = recorded.resolve()
    changed = _changed(before, draft)
    merged = replace(recorded, layers=(*recorded.layers, ("--resume-or-start", _table(changed))))
    if _finished(run, state, merged.resolve()):
        text = f"run {name} has finished at step {number(state.step)}: there is nothing to do"
        if changed:
            text += f"; ignored changes of the configuration: {_listed(changed)}"
        return Decision(None, text)
    text = f"run {name} resumes from its latest checkpoint"
    if changed:
        text += f", with a changed configuration: {_listed(changed)}"
    return Decision(replace(request, draft=merged, resume=run), text)


def changes_text(run: RunDir, draft: Draft) -> str:
    """What a resume changes in the configuration of its run: "optimizer.lr 0.001 -> 0.01".

    "" for nothing, and for a configuration that is not valid: preflight says why.
    """
    try:
        return _listed(_changed(read(run.config).resolve(), draft))
    except ConfigError:
        return ""


def _listed(changed: dict[str, tuple[Any, Any]]) -> str:
    return printable(
        ", ".join(f"{key} {_shown(old)} -> {_shown(new)}" for key, (old, new) in changed.items())
    )


def _changed(before: Config, draft: Draft) -> dict[str, tuple[Any, Any]]:
    """What the command changes in the recorded configuration. Size "auto" stays what it was resolved to."""
    if draft.size == "auto" and draft.auto:
        memories = (None, *(float(tier["min_gb"]) for tier in draft.profile.get("gpus", ())))
        size = getattr(before.workload, "size", None)
        found = min((_apart(before, draft.resolve(size, memory)) for memory in memories), key=len)
        if draft.resolve(size).run.threads is None:
            found.pop("run.threads", None)  # chosen with the size
        return found
    return _apart(before, draft.resolve())


def _apart(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    found = differences(before, anywhere(now))
    return {key: values for key, values in found.items() if key not in _KEPT}


def _table(changed: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The new values as a layer of a configuration."""
    table: dict[str, Any] = {}
    for key, (_, new) in changed.items():
        *sections, last = key.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = new
    if (table.get("batch") or {}).get("effective") is not None:
        table["batch"].pop("accumulation", None)  # follows from effective
    return table


def _finished(run: RunDir, state: RunState, config: Config) -> bool:
    if state.run is None:
        return False
    limits = (config.run.max_steps, (config.run.epochs or 0) * (state.run.steps_per_epoch or 0))
    limit = min(filter(None, limits), default=None)
    if state.status == "done" and (limit is None or limit == state.run.total_steps):
        return True  # also a run that stopped early by itself
    return limit is not None and max(_steps(run), default=0) >= limit


def _steps(run: RunDir) -> Iterable[int]:
    """Steps of the checkpoints, without importing torch."""
    for path in run.checkpoints.glob("step-*/manifest.json"):
        digits = path.parent.stem.removeprefix("step-")
        if digits.isdecimal():
            yield int(digits)


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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
        opened = Run.open(Training(RunRequest(draft, root, directory)), on_event)
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
