"""`--resume-or-start`: one command that starts, resumes, starts again or has nothing to do, for requeued jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ndd_engine.api.training_api import resume_or_start
from ndd_engine.config import read, to_toml
from ndd_engine.errors import UsageError
from ndd_engine.record.events import RunEvent
from ndd_engine.record.rundir import RunDir, RunLock
from ndd_engine.run.run import Run
from ndd_engine.train.request import RunRequest
from tests.records import events_of, losses_of
from tests.trial.written_runs import steady, windows, write_run
from tests.waiting import LIMIT_S, until

from .program import call, run, start

TINY = (
    "workload.name=eeg", "workload.samples=400", "workload.channels=2", "workload.hidden=[8]", "batch.sequence=8",
    "batch.micro=16", "run.threads=1", "log.every_steps=1", "log.window_s=0", "checkpoint.every_steps=200",
    "evaluate.every_epochs=0", "run.epochs=100000",
)  # fmt: skip


def command(steps: int, *sets: str) -> tuple[str, ...]:
    """The command of a job script."""
    options = (word for each in (*TINY, *sets) for word in ("--set", each))
    return "train", "--headless", "--run", "job", "--resume-or-start", "--max-steps", str(steps), *options


def resumed_at(directory: RunDir) -> list[int | None]:
    return [event.resumed_step for event in events_of(directory) if isinstance(event, RunEvent)]


def ended(process: subprocess.Popen[str], condition: Callable[[], bool], number: int) -> int:
    """The exit status of a job that gets a signal once it is so far."""
    until(condition)
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    return process.returncode


@pytest.mark.long
def test_one_command_starts_resumes_and_ends_a_job_that_is_preempted_twice(tmp_path: Path) -> None:
    """SIGTERM, as SLURM sends it, then SIGKILL; the same command each time."""
    job, steps = RunDir(tmp_path / "runs" / "job"), 1500
    process = start(*command(steps), folder=tmp_path)
    ended(process, lambda: job.events.exists() and len(losses_of(job)) > 120, signal.SIGTERM)
    stopped = max(losses_of(job))
    assert process.returncode == 143
    assert (job.checkpoints / f"step-{stopped:08d}").exists()  # written after the signal
    ended(
        start(*command(steps), folder=tmp_path), lambda: max(losses_of(job)) > stopped + 120, signal.SIGKILL
    )
    last = run(*command(steps), folder=tmp_path)
    assert last.returncode == 0, last.stderr
    first, second, third = resumed_at(job)
    assert (first, second) == (None, stopped) and third is not None and third >= stopped
    assert sorted(losses_of(job)) == list(range(1, steps + 1))
    before = job.events.read_bytes()
    again = call(*command(steps), folder=tmp_path)
    assert (again.returncode, again.stdout, job.events.read_bytes()) == (0, "", before)
    assert "1,500" in again.stderr
    changed = call(*command(steps + 5, "run.seed=5"), folder=tmp_path)
    assert changed.returncode == 2 and "run.seed" in changed.stderr


@pytest.mark.long
def test_a_run_that_died_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    job = write_run(tmp_path / "runs" / "job", windows(steady(9, 0.1)))
    died = job.events.read_bytes().splitlines(keepends=True)[:-1]
    job.events.write_bytes(b"".join(died))
    job.config.write_text("")
    again = run(*command(8), folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert resumed_at(job) == [None] and max(losses_of(job)) == 8
    kept = RunDir(job.path / "attempt-1")
    assert kept.events.read_bytes() == b"".join(died) and kept.config.exists()
    (row,) = json.loads(call("runs", "--json", folder=tmp_path).stdout)["runs"]
    assert row["name"] == "job"


def request(root: Path, *sets: str, name: str | None = "job") -> RunRequest:
    named = () if name is None else (f"run.name={name}",)
    return RunRequest(read(None, ("workload.name=eeg", "run.max_steps=5", *named, *sets)), root)


def test_what_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="not a run"):
        resume_or_start(request(tmp_path))
    with pytest.raises(UsageError, match="--run NAME"):
        resume_or_start(request(tmp_path, name=None))
    with pytest.raises(UsageError, match=r"run\.name"):
        resume_or_start(request(tmp_path, name="../job"))


def test_a_folder_that_was_just_made_is_taken_over(tmp_path: Path) -> None:
    """The process was killed between making the folder and its first line."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "lock").touch()
    decision = resume_or_start(request(tmp_path))
    assert decision.request is not None and decision.request.restart == RunDir(tmp_path / "job")


def test_size_auto_stays_what_it_was(tmp_path: Path) -> None:
    job = write_run(tmp_path / "job", windows(steady(9, 0.1)))
    (job.checkpoints / "step-00000090").mkdir(parents=True)
    (job.checkpoints / "step-00000090" / "manifest.json").touch()
    job.config.write_text(to_toml(read(None, ("run.max_steps=100", "run.name=job")).resolve("mini")))
    again = RunRequest(read(None, ("workload.size=auto", "run.max_steps=200", "run.name=job")), tmp_path)
    decision = resume_or_start(again)
    assert decision.request is not None and decision.request.resume == job
    config = decision.request.draft.resolve()
    assert (config.workload.size, config.run.max_steps) == ("mini", 200)
    assert config == read(job.config, ("run.max_steps=200",)).resolve()


def test_whoever_loses_the_race_for_a_new_folder_leaves_it_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ndd_engine.train import training_run as run_module

    real = run_module.new_run_dir
    held: list[RunLock] = []

    def taken(*arguments: object) -> RunDir:
        made = real(*arguments)  # type: ignore[arg-type]
        held.append(RunLock(made))
        held[0].acquire()
        return made

    monkeypatch.setattr(run_module, "new_run_dir", taken)
    with pytest.raises(UsageError, match=str(os.getpid())):
        Run.open(run_module.TrainingRun(request(tmp_path)))
    assert os.path.samestat(os.fstat(held[0]._handle or -1), (tmp_path / "job" / "lock").stat())
    held[0].release()
