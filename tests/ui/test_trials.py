"""Trials with a real run: it is paused during a trial and always resumes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ndd_console.jobs.run_sources import AttachedSource, EngineSource
from ndd_console.jobs.trials import RunTrials
from ndd_engine.config import read
from ndd_engine.record.events import TrialEvent
from ndd_engine.run.run import Run
from ndd_engine.trial.outcome import Progress, TrialRequest
from tests.trial.trial_help import live_run
from tests.waiting import LIMIT_S, until

from .fakes import trial_event

SETS = ("loader.workers=1",)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run that trains during the test."""
    with live_run(tmp_path) as live:
        yield live


class Measuring:
    """A fake measurement: records the status of the run, and ends when a test says so."""

    def __init__(self, run: Run, error: Exception | None = None) -> None:
        self._run = run
        self._error = error
        self.statuses: list[str] = []
        self.let = threading.Event()

    def __call__(
        self, request: TrialRequest, tell: Callable[[Progress], None], stop: threading.Event
    ) -> TrialEvent:
        tell(Progress("measuring", 1.0, request.budget_s))
        first = self._run.recorder.snapshot()
        while not (self.let.wait(0.05) or stop.is_set()):
            pass
        last = self._run.recorder.snapshot()
        self.statuses = [first.status, last.status]
        assert first.step == last.step
        if self._error is not None:
            raise self._error
        verdict = "stopped" if stop.is_set() else "faster"
        return trial_event(verdict, sets=list(request.sets), against=request.base.name, cause=request.cause)


def trials_of(source: EngineSource | AttachedSource, measure: Measuring) -> RunTrials:
    trials = source.trials()
    trials._measure = measure
    return trials


def resumes(run: Run) -> None:
    at = run.recorder.snapshot().step
    until(lambda: run.recorder.snapshot().step > at + 5)
    assert run.recorder.snapshot().status == "training"


@pytest.mark.parametrize("attached", [False, True])
def test_the_run_is_paused_and_resumes_however_the_trial_ends(run: Run, attached: bool) -> None:
    # A record that is read rarely still says "paused" when the run has resumed.
    source = AttachedSource(run.directory, 0.3) if attached else EngineSource(run)
    measuring = Measuring(run)
    trials = trials_of(source, measuring)
    assert (trials.base, trials.pauses(), trials.refusal()) == ("run live", "live", "")
    job = trials.start(SETS, "few-workers", 60.0)
    until(lambda: job.progress is not None and job.progress.stage == "measuring")
    assert trials.refusal() and not job.done
    measuring.let.set()
    until(lambda: job.done)
    assert measuring.statuses == ["paused", "paused"] and job.failed() == "" and trials.refusal() == ""
    assert job.result is not None and job.result.cause == "few-workers"
    # It is in the record, and training continues.
    until(lambda: source.snapshot().trials != ())
    assert source.snapshot().trials[-1].sets == list(SETS)
    resumes(run)
    failing = Measuring(run, RuntimeError("planted"))
    failing.let.set()
    failed = trials_of(source, failing).start(SETS, None, 60.0)
    until(lambda: failed.done)
    assert failed.result is None and "planted" in failed.failed()
    resumes(run)
    measuring = Measuring(run)
    last = trials_of(source, measuring).start(SETS, None, 60.0)
    until(lambda: last.progress is not None and last.progress.stage == "measuring")
    # The screen is left, by whichever way: what it shows is closed.
    source.close()
    assert measuring.statuses == ["paused", "paused"], last.failed()
    assert last.done and last.result is not None and last.result.verdict == "stopped"
    resumes(run)


def test_edits_are_checked_and_the_result_is_written_as_a_configuration(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = EngineSource(run).trials()
    assert trials.check(SETS) == ""
    problem = trials.check(("loader.wrokers=1", "batch.micro=0"))
    assert "workers?" in problem and "batch.micro = 0" in problem
    assert trials.check(("batch.micro=16",))  # as it is
    monkeypatch.chdir(tmp_path)
    path = trials.write(trial_event(sets=list(SETS), against="run live"))
    again = trials.write(trial_event(sets=list(SETS), against="run live"))
    assert (path.name, again.name) == ("live-changed.toml", "live-changed-2.toml")
    text = path.read_text()
    assert "1.42x (1.35 to" in text
    config = read(path).resolve()
    assert config.loader.workers == 1 and config.batch.micro == 16 and config.run.name is None


def test_an_ended_run_is_tried_without_pausing_anything(run: Run) -> None:
    run.control.request("kill")
    assert run.finished.wait(LIMIT_S)
    source = EngineSource(run)
    measuring = Measuring(run)
    measuring.let.set()
    trials = trials_of(source, measuring)
    assert trials.pauses() == ""
    job = trials.start(SETS, None, 60.0)
    until(lambda: job.done)
    assert job.failed() == "" and measuring.statuses == [run.recorder.snapshot().status] * 2
