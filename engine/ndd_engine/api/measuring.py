"""Measure a change in an A/B trial, and predict memory and step time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ndd_engine.record.events import TrialEvent
from ndd_engine.trial.trial_request import Progress, TrialRequest

from .sources import PathLike, Sets, Source, baseline_of, draft_of, root_of, strings
from .training_api import restored


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
        UsageError: no setting is changed, or another live run on the device would disturb the measurement.

    Example:
        >>> event = run_trial("run.toml", {"loader.workers": 4}, budget=30)
        >>> event.verdict, event.ratio, event.low, event.high
        ('faster', 1.42, 1.35, 1.49)
    """
    from ndd_engine.trial.pausing import held, to_pause
    from ndd_engine.trial.store import record_trial
    from ndd_engine.trial.trial import check
    from ndd_engine.trial.trial import run_trial as measure

    root = root_of(runs)
    base = baseline_of(baseline, workload, root)
    request = TrialRequest(base, strings(sets, "sets"), budget, restarts=separate_processes, outside=outside)
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
