"""Runs in this process: training, trials and predictions, and the records of runs.

A recorded run, live or finished, offers its events, state, configuration and checkpoints. `--resume-or-start` is here
as well: what the same command does with a run that may exist already, for jobs that are requeued.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ndd_engine.config import Config, Draft, anywhere, read
from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.errors import INTERRUPTED, ConfigError, RunLockedError, UsageError
from ndd_engine.record.events import Event, TrialEvent
from ndd_engine.record.file import EventLog, RunReader, load_state
from ndd_engine.record.rundir import RunDir, bare, find_run
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import RunState
from ndd_engine.run.control import StopNow
from ndd_engine.run.run import Run
from ndd_engine.text import number, printable
from ndd_engine.train.request import RunRequest
from ndd_engine.train.training_run import TrainingRun
from ndd_engine.trial.outcome import Progress, TrialRequest, check_once, differences
from ndd_watch.changes import GLOBALS

from .sources import PathLike, Sets, Source, baseline_of, configured_run, draft_of, root_of, strings

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
        run.control.request("kill" if again else "stop", INTERRUPTED, "interrupted")
        if again and run.executor.interruptible:
            raise StopNow

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted memory and time of a training run.

    With several ranks (parallel.ranks), all bytes are those of one rank, and the time is without their exchange.

    peak_bytes: peak memory of the process on the GPU, or on the host without one. parts: what it consists of, in bytes
    by name. reliable: whether the prediction can be trusted; reason: why not, "" if it can. device: "cuda:0", "cpu".
    free_bytes, total_bytes: memory of the device when the prediction started, None if unknown. fits: whether the peak
    fits into the free memory, None if unknown. retries: if it fits only because the GPU's allocator releases cached
    memory and retries, which costs time, how often in the first steps; otherwise 0. nearest: (micro-batch,
    accumulation) of the largest micro-batch that fits without retries at the same effective batch; None if the
    configuration itself does or nothing does. step_s: seconds of an optimizer step; step_measured: whether it was
    measured at this micro-batch rather than extrapolated. parameters: trainable.
    """

    peak_bytes: int
    parts: Mapping[str, int]
    reliable: bool
    reason: str
    device: str
    free_bytes: int | None
    total_bytes: int | None
    fits: bool | None
    nearest: tuple[int, int] | None
    step_s: float
    step_measured: bool
    parameters: int
    retries: int = 0


def run_trial(
    baseline: Source = None,
    sets: Sets = (),
    budget: float = 60.0,
    *,
    workload: str | None = None,
    runs: PathLike | None = "runs",
    pause: bool = False,
    separate_processes: bool = False,
    outside: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> TrialEvent:
    """Measure a change against a baseline in a paired A/B trial, whose sides take turns in ABBA blocks.

    Args:
        baseline: path of a TOML file, a mapping, a Record or the name of a run, also of a script; None for the
            workload's defaults. If it is a live run, the run is paused during the trial. The result is added to the
            record of the run.
        sets: the change, as in `run_training`.
        budget: maximum duration in seconds, setup included; the trial ends early once the result is clear.
        workload: name of a workload, for a baseline that is no run.
        runs: folder of the runs; None for $NDD_RUNS, otherwise ./runs.
        pause: pause other live runs on the same device during the trial.
        separate_processes: measure in pairs of processes, even if one process could switch between both sides.
        outside: let the processes of an observed script write outside its folder and use the network, as it does.
        on_progress: called a few times per second in this thread.

    Returns:
        The event. verdict: "faster", "slower", "no difference", "inconclusive", "out of memory" or "failed";
        ratio: throughput of the candidate divided by that of the baseline, with its 95 % CI low to high.

    Raises:
        ConfigError: the baseline or the candidate is invalid.
        UsageError: no setting is changed, a key has two values, or another live run on the device would disturb the
            measurement.

    Example:
        >>> event = run_trial("run.toml", {"loader.workers": 4}, budget=30)
        >>> event.verdict, event.ratio, event.low, event.high
        ('faster', 1.42, 1.35, 1.49)
    """
    from ndd_engine.trial.trial import check, held, record_trial, to_pause
    from ndd_engine.trial.trial import run_trial as measure

    root = root_of(runs)
    base = baseline_of(baseline, workload, root)
    check_once(given := strings(sets, "sets"))
    request = TrialRequest(base, given, budget, restarts=separate_processes, outside=outside)
    tell = on_progress or (lambda progress: None)
    if base.run is not None and base.run.command.exists():
        from ndd_engine.script.trials import check_script, run_script_trial, tried_run

        run = tried_run(request).run
        assert run is not None
        check_script(request, run.config)
        event = run_script_trial(request, run.config, run.device, tell)
    else:
        check(request)  # mistakes, before anything is paused
        with held(to_pause(request.base, root, pause)):
            event = measure(request, tell)
    if base.run is not None:
        record_trial(base.run, event)
    return event


def predict_memory(
    config: Source = None,
    *,
    sets: Sets = (),
    workload: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> MemoryPrediction:
    """Predict peak memory and step time of a configuration, from a few small training steps in this process.

    Takes seconds to a minute. Nothing is written. Seeds the random number generators of torch and Python.

    Args:
        config, sets, workload: as in `run_training`.
        on_progress: called with a short text at each stage.

    Raises:
        ConfigError: the configuration or its data is invalid, or the device does not exist.
        MachineError: even a small step runs out of memory.
        TrainingError: a step of your own workload raised an exception, which is the `__cause__`.

    Example:
        >>> found = predict_memory({"batch": {"micro": 256}}, workload="chartext")
        >>> found.peak_bytes / 2**30, found.fits, found.reliable
        (1.7, True, True)
    """
    draft = draft_of(config, sets, workload)
    from ndd_engine.train.request import preflight

    preflight(draft)
    with restored():
        from ndd_engine.predict.outlook import predict

        found, machine, *_ = predict(draft, on_progress or (lambda text: None))
    gpu = machine.chosen
    return MemoryPrediction(
        peak_bytes=found.total_bytes,
        parts={name: count for name, count in found.parts.items() if name != "total"},
        reliable=found.memory.reliable,
        reason=found.memory.why_not,
        device=machine.device,
        free_bytes=machine.free_bytes,
        total_bytes=machine.host.memory_total_bytes if gpu is None else gpu.memory_total_bytes,
        fits=found.fits,
        nearest=found.nearest,
        step_s=found.step_s,
        step_measured=found.step_measured,
        parameters=found.parameters,
        retries=found.retries,
    )


# Keys that a resumed run keeps from its record, whatever the command names.
_FROM_RECORD = frozenset({"run.name", "workload.path"})


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
    return {key: values for key, values in found.items() if key not in _FROM_RECORD}


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
