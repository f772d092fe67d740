"""`--resume-or-start`: one command that starts, resumes, starts again or has nothing to do, for requeued jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ndd_engine.api.requeue import resume_or_start
from ndd_engine.config import read
from ndd_engine.errors import UsageError
from ndd_engine.record.events import RunEvent, WindowEvent, parse
from ndd_engine.record.rundir import RunDir, RunLock
from ndd_engine.train.request import RunRequest

from ..terminal.screen import START_S, Terminal
from .program import run, start

pytestmark = pytest.mark.timeout(170)
TINY = (
    "--set", "workload.name=eeg", "--set", "workload.samples=400", "--set", "workload.channels=2",
    "--set", "workload.hidden=[8]", "--set", "batch.sequence=8", "--set", "batch.micro=16", "--set", "run.threads=1",
    "--set", "log.every_steps=1", "--set", "log.window_s=0", "--set", "run.epochs=100000",
)  # fmt: skip


def command(steps: int, *more: str, name: str = "job") -> tuple[str, ...]:
    """The command of a job script."""
    return (
        "train",
        "--headless",
        "--run",
        name,
        "--resume-or-start",
        "--max-steps",
        str(steps),
        *TINY,
        *more,
    )


def losses(directory: RunDir) -> dict[int, float]:
    """Loss by step. A step that was done twice must have the same loss."""
    found: dict[int, float] = {}
    for item in map(parse, directory.events.read_bytes().splitlines()):
        if item is not None and isinstance(item[1], WindowEvent) and item[1].last_loss is not None:
            step, loss = item[1].last_loss
            assert found.setdefault(step, loss) == loss
    return found


def resumed_at(directory: RunDir) -> list[int | None]:
    found = [item[1] for item in map(parse, directory.events.read_bytes().splitlines()) if item]
    return [event.resumed_step for event in found if isinstance(event, RunEvent)]


def until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def end(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    return process.returncode, text


@pytest.mark.slow
def test_preempted_twice_it_equals_a_run_without_interruption(tmp_path: Path) -> None:
    """SIGTERM, as SLURM sends it, then SIGKILL; the same command each time."""
    job, whole = RunDir(tmp_path / "runs" / "job"), RunDir(tmp_path / "runs" / "whole")
    saved = ("--set", "checkpoint.every_steps=200", "--set", "evaluate.every_epochs=0")
    steps = 3000
    process = start(*command(steps, *saved), folder=tmp_path)
    until(process, lambda: job.events.exists() and len(losses(job)) > 120)
    status, text = end(process, signal.SIGTERM)
    assert status == 143 and "run job does not exist: it starts" in text
    stopped = max(losses(job))
    assert (job.checkpoints / f"step-{stopped:08d}.pt").exists()  # written after the signal
    process = start(*command(steps, *saved), folder=tmp_path)
    until(process, lambda: max(losses(job)) > stopped + 120)
    status, text = end(process, signal.SIGKILL)
    assert "run job resumes from its latest checkpoint\n" in text
    last = run(*command(steps, *saved), folder=tmp_path)
    assert last.returncode == 0, last.stderr
    started = resumed_at(job)
    assert started[:2] == [None, stopped] and started[2] is not None and started[2] > stopped
    assert run(*command(steps, *saved, name="whole"), folder=tmp_path).returncode == 0
    assert losses(job) == losses(whole) and len(losses(job)) == steps
    before = job.events.read_bytes()
    again = run(*command(steps, *saved), folder=tmp_path)
    assert (
        again.returncode == 0 and "run job has finished at step 3,000: there is nothing to do" in again.stderr
    )
    assert again.stdout == "" and job.events.read_bytes() == before
    longer = run(*command(steps + 5, *saved), folder=tmp_path)
    assert longer.returncode == 0 and "run.max_steps 3000 -> 3005" in longer.stderr
    assert max(losses(job)) == steps + 5


@pytest.mark.long
@pytest.mark.promise
def test_a_run_that_died_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    job = RunDir(tmp_path / "runs" / "job")
    process = start(*command(100_000, "--set", "checkpoint.every_epochs=0"), folder=tmp_path)
    until(process, lambda: job.events.exists() and len(losses(job)) > 5)
    end(process, signal.SIGKILL)
    again = run(*command(8), folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "before its first checkpoint: it starts again" in again.stderr
    assert resumed_at(job) == [None] and max(losses(job)) == 8
    kept = RunDir(job.path / "attempt-1")
    assert len(losses(kept)) > 5 and kept.config.exists()
    assert [each["name"] for each in json.loads(run("runs", "--json", folder=tmp_path).stdout)["runs"]] == [
        "job"
    ]


def request(root: Path, *sets: str, name: str | None = "job") -> RunRequest:
    named = () if name is None else (f"run.name={name}",)
    return RunRequest(read(None, ("workload.name=eeg", "run.max_steps=5", *named, *sets)), root)


def test_what_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not a run"):
        resume_or_start(request(tmp_path))
    with pytest.raises(UsageError, match="add --run NAME"):
        resume_or_start(request(tmp_path, name=None))
    with pytest.raises(UsageError, match=r"run\.name"):
        resume_or_start(request(tmp_path, name="../job"))


def test_a_folder_that_was_just_made_is_taken_over(tmp_path: Path) -> None:
    """The process was killed between making the folder and its first line."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "lock").touch()
    decision = resume_or_start(request(tmp_path))
    assert decision.request is not None and decision.request.restart == RunDir(tmp_path / "job")


def test_whoever_loses_the_race_for_a_new_folder_leaves_it_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ndd_engine.train import run as run_module

    real = run_module.new_run_dir
    held: list[RunLock] = []

    def taken(*arguments: object) -> RunDir:
        made = real(*arguments)  # type: ignore[arg-type]
        held.append(RunLock(made))
        held[0].acquire()
        return made

    monkeypatch.setattr(run_module, "new_run_dir", taken)
    with pytest.raises(UsageError, match="is being written by process"):
        run_module.Run.open(request(tmp_path))
    assert os.path.samestat(os.fstat(held[0]._handle or -1), (tmp_path / "job" / "lock").stat())
    held[0].release()


@pytest.mark.long
@pytest.mark.parametrize("option", [("--resume", "job"), ("--resume", "job", "--from-step", "3")])
def test_it_excludes_resume(tmp_path: Path, option: tuple[str, ...]) -> None:
    done = run("train", "--headless", "--resume-or-start", *option, folder=tmp_path)
    assert done.returncode == 2 and "--resume-or-start excludes --resume and --from-step" in done.stderr


@pytest.mark.long
def test_a_change_that_a_resume_does_not_allow_is_refused(tmp_path: Path) -> None:
    assert run(*command(4), folder=tmp_path).returncode == 0
    done = run(*command(9, "--set", "run.seed=4"), folder=tmp_path)
    assert done.returncode == 2 and "run.seed was 1337, now 4" in done.stderr


@pytest.mark.slow
def test_size_auto_stays_what_it_was(tmp_path: Path) -> None:
    arguments = (
        "train",
        "--headless",
        "--run",
        "job",
        "--resume-or-start",
        "--set",
        "checkpoint.every_steps=1",
    )
    quick = ("--set", "workload.size=auto", "--set", "batch.micro=2", "--set", "evaluate.at_end=false")
    first = run(*arguments, *quick, "--max-steps", "2", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    second = run(*arguments, *quick, "--max-steps", "3", folder=tmp_path)
    assert second.returncode == 0, second.stderr
    assert (
        "run job resumes from its latest checkpoint, with a changed configuration: run.max_steps 2 -> 3\n"
        in second.stderr
    )


@pytest.mark.slow
def test_it_works_with_the_screen(tmp_path: Path) -> None:
    """Stopped with ^C on the screen, then resumed by the same command, and finished without a screen."""
    job = RunDir(tmp_path / "job")
    arguments = [part for part in command(100_000) if part != "--headless"]
    before = 0
    for _ in range(2):
        with Terminal(*arguments, runs=tmp_path) as terminal:
            terminal.until("● training", START_S)
            terminal.until(lambda _, before=before: max(losses(job), default=0) > before + 5)
            terminal.press("\x03")
            assert terminal.wait() == 130
        before = max(losses(job))
    assert resumed_at(job)[0] is None and resumed_at(job)[1]
