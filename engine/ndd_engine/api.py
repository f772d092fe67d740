"""The Python API: train, open recorded runs, run A/B trials and predict memory from a script or a notebook.

Import from the package: `from ndd_engine import train, open_run, trial, predict_memory`. See docs/python-api.md.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import tomlkit
from tomlkit.exceptions import ConvertError

from ndd_engine.config import Config, Draft, read
from ndd_engine.config.loading import COMMAND_LINE
from ndd_engine.errors import ConfigError, MachineError, NddError, Problem, TrainingError, UsageError
from ndd_engine.record.events import Event, FoldEvent, TrialEvent, parse
from ndd_engine.record.reader import RunReader
from ndd_engine.record.rundir import RunDir, find_run, runs_root
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import printable
from ndd_engine.train.control import StopNow
from ndd_engine.train.request import RunRequest
from ndd_engine.train.run import Run
from ndd_engine.trial.request import Base, Progress, TrialRequest

if TYPE_CHECKING:
    import torch

Source: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | None"
Sets: TypeAlias = "str | Sequence[str] | Mapping[str, Any]"
E = TypeVar("E", bound=Event)
# Seconds between two looks at the record of a live run.
POLL_S = 0.1


@dataclass(frozen=True)
class Result:
    """The end of a run that `train` executed.

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


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted memory and time of a training run.

    peak_bytes: peak memory of the process on the GPU, or on the host without one. parts: what it consists of, in bytes
    by name. reliable: whether the prediction can be trusted; reason: why not, "" if it can. device: "cuda:0", "cpu".
    free_bytes, total_bytes: memory of the device when the prediction started, None if unknown. fits: whether the peak
    fits into the free memory, None if unknown. nearest: (micro-batch, accumulation) of the largest micro-batch that
    fits at the same effective batch; None if the configuration fits or nothing does. step_s: seconds of an optimizer
    step; step_measured: whether it was measured at this micro-batch rather than extrapolated. parameters: trainable.
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


class Record:
    """A recorded run, live or finished. Iterating yields every event as (unix seconds, event), the oldest first.

    >>> record = open_run("chartext-001")
    >>> losses = [(event.step, event.loss) for _, event in record.events(WindowEvent)]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._run = RunDir(Path(path))
        self._reader: RunReader | None = None

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
        """The complete checkpoints, in the order in which they were written. Load one with `torch.load`."""
        from ndd_engine.train.checkpoint import CheckpointStore

        return [saved.path for saved in CheckpointStore(self._run.checkpoints, keep=0).all()]

    @property
    def live(self) -> bool:
        """Whether a process is training this run."""
        return self._run.live_owner() is not None

    def events(self, kind: type[E]) -> Iterator[tuple[float, E]]:
        """The events of one type as (unix seconds, event), the oldest first."""
        with self._run.events.open("rb") as file:
            for line in file:
                item = parse(line)
                if item is not None and isinstance(item[1], kind) and not isinstance(item[1], FoldEvent):
                    yield item[0], item[1]

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


def train(
    config: Source = None,
    *,
    sets: Sets = (),
    workload: str | None = None,
    run: str | None = None,
    runs: str | os.PathLike[str] | None = "runs",
    resume: str | os.PathLike[str] | None = None,
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
        ConfigError: the configuration is wrong; the message names each key, what was found and what is allowed.
        UsageError: the name is taken, the run to resume does not exist, or the folder cannot be written.
        KeyboardInterrupt: Ctrl-C, after a checkpoint was saved; press it again to stop without one.

    Example:
        >>> result = train({"run": {"max_steps": 200}}, workload="chartext")
        >>> result.status, result.step
        ('done', 200)
    """
    root = _root(runs)
    directory = None
    if resume is not None:
        if config is not None or workload is not None or run is not None:
            raise UsageError("resume uses the configuration of its run: omit config, workload and run")
        directory = _configured(root, resume)
        config = directory.config
    draft = _draft(config, sets, workload, {} if run is None else {"run": {"name": run}})
    with _restored():
        opened = Run.open(RunRequest(draft, root, directory), on_event)
        try:
            with _interruptible(opened):
                end = opened.execute()
        finally:
            opened.close()
    if end.status == "interrupted":
        raise KeyboardInterrupt(f"run {opened.directory.name}: {end.reason}")
    return Result(end.status, end.reason, end.step, opened.directory.path, opened.recorder.snapshot())


def open_run(
    run: str | os.PathLike[str] | None = None, runs: str | os.PathLike[str] | None = "runs"
) -> Record:
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
    return Record(find_run(_root(runs), None if run is None else os.fspath(run)).path)


def trial(
    baseline: Source | Record = None,
    sets: Sets = (),
    budget: float = 60.0,
    *,
    workload: str | None = None,
    runs: str | os.PathLike[str] | None = "runs",
    pause: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> TrialEvent:
    """Measure a change against a baseline in a paired A/B trial, in two processes that take turns in ABBA blocks.

    Args:
        baseline: path of a TOML file, a mapping, a Record or the name of a run; None for the workload's defaults. If
            it is a live run, the run is paused during the trial. The result is added to the record of the run.
        sets: the change, as in `train`.
        budget: maximum duration in seconds, setup included; the trial ends early once the result is clear.
        workload: name of a workload, for a baseline that is no run.
        runs: folder of the runs; None for $NDD_RUNS, otherwise ./runs.
        pause: pause other live runs on the same device during the trial.
        on_progress: called a few times per second in this thread.

    Returns:
        The event. verdict: "gain", "no gain" (no significant gain), "loss", "inconclusive", "out of memory" or
        "failed"; ratio: throughput of the candidate divided by that of the baseline, with its 95 % CI low to high.

    Raises:
        ConfigError: the baseline or the candidate is a wrong configuration.
        UsageError: nothing is changed, or another live run on the device would disturb the measurement.

    Example:
        >>> event = trial("run.toml", {"loader.workers": 4}, budget=30)
        >>> event.verdict, event.ratio, event.low, event.high
        ('gain', 1.42, 1.35, 1.49)
    """
    from ndd_engine.trial.drafts import check
    from ndd_engine.trial.pausing import held, to_pause
    from ndd_engine.trial.store import record_trial
    from ndd_engine.trial.trial import run_trial

    root = _root(runs)
    base = _baseline(baseline, workload, root)
    request = TrialRequest(base, _strings(sets, "sets"), budget)
    check(request)  # mistakes, before anything is paused
    with held(to_pause(base, root, pause)):
        event = run_trial(request, on_progress or (lambda progress: None))
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
        config, sets, workload: as in `train`.
        on_progress: called with a short text at each stage.

    Raises:
        ConfigError: the configuration or its data is wrong.
        MachineError: the device does not exist, or even a small step runs out of memory.
        TrainingError: a step of your own workload raised an exception, which is the `__cause__`.

    Example:
        >>> found = predict_memory({"batch": {"micro": 256}}, workload="chartext")
        >>> found.peak_bytes / 2**30, found.fits, found.reliable
        (1.7, True, True)
    """
    tell = on_progress or (lambda text: None)
    draft = _draft(config, sets, workload)
    from ndd_engine.train.preflight import preflight

    preflight(draft)
    with _restored():
        import torch

        from ndd_engine.hardware.detect import detect
        from ndd_engine.predict.outlook import outlook
        from ndd_engine.train.prepare import seed
        from ndd_engine.train.probes.autosize import decide
        from ndd_engine.workloads.registry import prepare

        machine = detect(draft.resolve().run.device)
        resolved, _ = decide(draft, machine, tell)
        seed(resolved.run.seed)
        prepared = prepare(resolved, tell)
        device = torch.device(machine.device)
        try:
            found = outlook(resolved, prepared, device, machine.free_bytes, tell)
        except NddError:
            raise
        except Exception as error:
            raise _step_error(error, resolved, device) from error
    gpu = machine.chosen
    return MemoryPrediction(
        peak_bytes=found.total_bytes,
        parts={name: count for name, count in found.parts.items() if name != "total"},
        reliable=found.memory.promised,
        reason=found.memory.why_not,
        device=machine.device,
        free_bytes=machine.free_bytes,
        total_bytes=machine.host.memory_total_bytes if gpu is None else gpu.memory_total_bytes,
        fits=found.fits,
        nearest=found.nearest if found.fits is False else None,
        step_s=found.step_s,
        step_measured=found.step_measured,
        parameters=found.parameters,
    )


def _step_error(error: Exception, config: Config, device: torch.device) -> Exception:
    """The error to raise for one in a training step: out of memory, or a mistake in the user's own workload."""
    from ndd_engine.config.workload_sections import OwnSection
    from ndd_engine.measure.memory import is_out_of_memory
    from ndd_engine.train.failures import smaller_batch
    from ndd_engine.workloads.own_module import place, said

    if is_out_of_memory(error):
        return MachineError(f"out of memory in a training step on {device}; {smaller_batch(config)}")
    if isinstance(config.workload, OwnSection):
        return TrainingError(f"{place(error) or config.workload.name}: a step failed: {said(error)}")
    return error


def _root(runs: str | os.PathLike[str] | None) -> Path:
    return runs_root(None if runs is None else Path(runs))


def _configured(root: Path, name: str | os.PathLike[str]) -> RunDir:
    """The run, if it got as far as a configuration. Raises UsageError."""
    found = find_run(root, os.fspath(name))
    if not found.config.exists():
        raise UsageError(f"run {found.name} has no config.toml: it ended before training began")
    return found


def _baseline(baseline: Source | Record, workload: str | None, root: Path) -> Base:
    """A file that exists is a configuration, everything else the name of a run. Raises UsageError."""
    if baseline is None or isinstance(baseline, Mapping):
        name = f"the workload {workload}" if workload else "the defaults"
        return Base(
            name if baseline is None else "the configuration", None, workload, _strings(baseline or {})
        )
    if not isinstance(baseline, Record):
        path = Path(baseline)
        if path.is_file():
            return Base(str(path), path, workload)
        if path.suffix == ".toml":
            raise UsageError(f"{printable(str(path))}: no such file")
    if workload is not None:
        raise UsageError("a run already has a workload: omit workload")
    return Base.of_run(_configured(root, baseline.path if isinstance(baseline, Record) else baseline))


def _draft(
    config: Source, sets: Sets, workload: str | None, overrides: dict[str, Any] | None = None
) -> Draft:
    """The configuration, with mistakes in mappings and `sets` reported as "config". Raises ConfigError."""
    path, values = (None, config) if config is None or isinstance(config, Mapping) else (Path(config), {})
    try:
        draft = read(path, (*_strings(values or {}), *_strings(sets, "sets")), workload, overrides)
    except ConfigError as error:
        raise ConfigError(
            [replace(problem, where=_place(problem.where)) for problem in error.problems]
        ) from None
    return replace(draft, layers=tuple((_place(where), layer) for where, layer in draft.layers))


def _place(where: str) -> str:
    return "config" if where == COMMAND_LINE else where


def _strings(values: Sets, where: str = "config") -> tuple[str, ...]:
    """As "section.key=value" with the value in TOML; nested mappings are flattened. Raises ConfigError."""
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, Mapping):
        return tuple(values)
    found: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _strings({f"{key}.{name}": item for name, item in value.items()}, where)
        else:
            try:
                plain = os.fspath(value) if isinstance(value, os.PathLike) else value
                found.append(f"{key}={'none' if plain is None else tomlkit.item(plain).as_string()}")
            except (ConvertError, TypeError, ValueError):
                kind = f"{value!r} ({type(value).__name__})"
                allowed = "a boolean, a number, a string or a list of them"
                raise ConfigError(
                    [Problem(where, str(key), "has no form in TOML", printable(kind), allowed)]
                ) from None
    return tuple(found)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Undo what a run changes for the whole process: torch's threads and determinism, frozen garbage collection."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
        gc.unfreeze()
        gc.collect()


@contextlib.contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """Ctrl-C stops the run after a checkpoint, a second one at once. Only in the main thread, by Python's rules."""
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        again = run.control.stopping
        run.control.request("kill" if again else "stop", "interrupted (Ctrl-C)", "interrupted")
        if again and run.end is None:
            raise StopNow

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
