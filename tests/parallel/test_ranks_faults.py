"""Runs of two ranks are asked to stop, and ranks fail: all ranks act alike, and the reason names the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from qa.ranks.job import RanksJob
from tests.states import equal

from ndd_engine.record.channel import send
from ndd_engine.record.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
# No evaluations and few checkpoints.
QUIET = ("--set", "evaluate.every_epochs=0", "--set", "checkpoint.every_epochs=0")


def reason(job: RanksJob) -> str:
    return str(job.end()["reason"])


def test_requests_reach_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    with RanksJob(tmp_path, *QUIET, "--set", "checkpoint.every_steps=0") as job:
        job.trains()
        for action, mark in (
            ("checkpoint", "checkpoint"), ("evaluate", "evaluation"), ("pause", "pause"), ("resume", "resume"),
        ):  # fmt: skip
            send(job.run.control_socket, action)
            first, second = (job.until(lambda r=rank, m=mark: job.marks(r, m))[0] for rank in (0, 1))
            assert first["step"] == second["step"], action
        os.kill(job.pid(1), signal.SIGTERM)
        assert job.wait() == 143
        assert job.end()["step"] == job.end(1)["step"]
        assert reason(job).startswith("terminated at rank 1; checkpoint at step ")
        assert job.marks(0, "checkpoint")[-1]["step"] == job.end()["step"]


def test_two_signals_to_the_console_stop_at_once(tmp_path: Path) -> None:
    with RanksJob(tmp_path, *QUIET) as job:
        job.trains()
        job.plant(1, "sleep")  # a step that does not end
        time.sleep(0.5)
        for _ in range(2):
            job.console.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert job.wait() == 130
        assert reason(job).startswith("interrupted (Ctrl-C)") and reason(job).endswith(", immediately")


def test_restarted_ranks_end_with_the_weights_of_an_uninterrupted_run(tmp_path: Path) -> None:
    with RanksJob(tmp_path / "plain", *QUIET, steps=120) as job:
        assert job.wait() == 0
        expected = job.weights()
    with RanksJob(tmp_path / "killed", "--restarts", "2", *QUIET, steps=120) as job:
        job.plant(0, "kill 50")
        job.until(lambda: job.run.events.exists())
        attached = subprocess.Popen(
            [sys.executable, "-m", "ndd_console", "attach", str(job.run.path), "--headless"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        job.until(lambda: job.marks(0, "checkpoint")[-1]["step"] >= 40)
        assert job.wait() == 0, job.said()
        assert "resume with" not in job.said()
        assert equal(job.weights(), expected)
        out, err = attached.communicate(timeout=60)
        assert "done: finished all 120 steps" in out, err  # it watched on during the restart
        assert not list(job.run.path.glob("attempt-*"))


def test_a_restart_before_the_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    with RanksJob(tmp_path, "--restarts", "1", *QUIET, "--set", "checkpoint.every_steps=0", steps=60) as job:
        job.plant(1, "kill 20")
        assert job.wait() == 0, job.said()
        assert "was killed" in job.said()
        assert "restart 1 of 1 follows" in job.said()
        kept = {path.name for path in (job.run.path / "attempt-1").iterdir()}
        assert {"events.jsonl", "ranks"} <= kept
        assert job.end()["step"] == 60
        assert "importing torch" in job.log()


def test_a_killed_rank_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    with RanksJob(tmp_path, *QUIET) as job:
        job.trains()
        job.until(lambda: job.marks(0, "checkpoint"))
        pid = job.pid(1)
        os.kill(pid, signal.SIGKILL)
        assert job.wait(15) == 1
        assert f"process {pid}) was killed" in reason(job)
        assert reason(job).startswith("rank 1 (")
        assert "resume with: ndd-console train --resume it" in reason(job)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_named_with_its_line(tmp_path: Path, rank: int) -> None:
    with RanksJob(tmp_path, *QUIET) as job:
        job.trains()
        job.plant(rank, "raise")
        assert job.wait() == 1
        assert reason(job).startswith(f"rank {rank}: ValueError at step ")
        assert "the planted error (rank_faults.py:" in reason(job)
        assert "Traceback" not in job.said()
        assert "ValueError: the planted error" in job.log()


def test_a_loss_of_nan_on_one_rank_ends_all_of_them_without_a_restart(tmp_path: Path) -> None:
    with RanksJob(tmp_path, "--restarts", "3", *QUIET) as job:
        job.plant(1, "nan 45")
        assert job.wait() == 1
        assert reason(job).startswith("rank 1: the loss is nan at step ")
        assert "the last good checkpoint is step 40" in reason(job)
        assert job.end()["step"] == job.end(1)["step"]
        assert "restart " not in job.said()


def test_an_error_of_one_rank_in_preparation_does_not_leave_the_other_waiting(tmp_path: Path) -> None:
    with RanksJob(tmp_path, "--set", "workload.options.refuse=1") as job:
        assert job.wait() == 2
        assert "the planted error of a factory" in reason(job)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_is_killed_in_preparation_is_named(tmp_path: Path, restarts: int) -> None:
    words = ("--set", "workload.options.killed=1", "--set", "workload.options.slow_s=20.0")
    with RanksJob(tmp_path, "--restarts", str(restarts), *words) as job:
        assert job.wait(30) == 1
        assert reason(job).startswith("rank 1 (") and "was killed or ended" in reason(job)
        assert ("restart 1 of 1 follows" in job.said()) == bool(restarts)


def test_a_rank_that_is_killed_as_it_starts_ends_the_others_at_once(tmp_path: Path) -> None:
    with RanksJob(tmp_path) as job:
        ranks = job.until(lambda: len(found := psutil.Process(job.launcher()).children()) == 2 and found)
        time.sleep(0.5)
        ranks[1].kill()
        assert job.wait(25) == 1  # torch's launcher would wait 30 s for them
        assert f"(process {ranks[1].pid}) was killed by SIGKILL" in reason(job)


def test_no_rank_uses_compiled_code_if_one_of_them_cannot_compile(tmp_path: Path) -> None:
    with RanksJob(tmp_path / "plain", *QUIET, steps=40) as job:
        assert job.wait() == 0
        expected = job.weights()
    words = ("--set", "speed.compile=default", "--set", "workload.options.uncompiled=1")
    with RanksJob(tmp_path / "compiled", *QUIET, *words, steps=40) as job:
        assert job.wait() == 0, job.said()
        assert "not in effect: torch.compile failed on another rank" in job.said()
        assert equal(job.weights(), expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "batch.micro=0"), "batch.micro"),
        (("--workload", "rank_faults:nothing"), "nothing"),
        (("--set", "workload.options.refused=1"), "refused"),
        (("--set", "run.device=cuda"), "cuda"),
    ],
)
def test_a_mistake_is_said_once_without_a_traceback(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    with RanksJob(tmp_path, "--restarts", "2", *words) as job:
        assert job.wait() == 2
        said = job.said()
        assert message in said
        assert "Traceback" not in said
        assert "restart " not in said
        (line,) = [line for line in said.splitlines() if line.startswith(("ndd-console: ", "failed: "))]
        assert message in line


def test_a_checkpoint_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "it")
    with RanksJob(tmp_path, *QUIET, steps=90) as job:
        job.until(lambda: run.checkpoints.exists() and job.marks(0, "checkpoint"))
        run.checkpoints.rename(run.path / "away")
        run.checkpoints.touch()
        assert job.wait() == 1  # also the last one
        assert "warning: cannot write the checkpoint of step" in job.said()
        assert reason(job).startswith("finished all 90 steps, but cannot write the checkpoint")
        assert job.end()["step"] == 90


def test_ranks_without_their_launcher_end(tmp_path: Path) -> None:
    with RanksJob(tmp_path, *QUIET) as job:
        job.trains()
        ranks = [psutil.Process(job.pid(rank)) for rank in (0, 1)]
        os.kill(job.launcher(), signal.SIGKILL)
        assert not psutil.wait_procs(ranks, timeout=8)[1]
        assert job.wait() == 1
        assert "the launcher of the ranks" in reason(job)


def test_ranks_go_on_without_the_console_and_can_be_stopped(tmp_path: Path) -> None:
    with RanksJob(tmp_path, *QUIET) as job:
        job.trains()
        job.console.kill()
        job.console.wait()
        step = job.events(0)[-1].get("step", 0)
        job.until(lambda: job.marks(0, "checkpoint")[-1]["step"] > step + 20)
        send(job.run.control_socket, "stop")
        job.until(job.end)
        assert job.end()["status"] == "stopped"
        job.until(lambda: job.run.live_owner() is None, 20)


@pytest.mark.parametrize(
    ("rank", "kind", "words"),
    [
        (
            1,
            "sleep",
            ("rank 1 (", "is in data_wait, at ", "rank_faults.py:", "1 of 2 ranks wait in all_reduce of "),
        ),
        (0, "stop", ("rank 0 (", "is stopped (process ")),
        (
            1,
            "lock",
            (
                "rank 1 (",
                "holds the interpreter lock (process ",
                "), at ",
                "rank_faults.py:",
                " loss; 1 of 2",
            ),
        ),
        (1, "extra", ("different collectives", "broadcast of [[3]], at ")),
    ],
)
def test_a_hang_is_named_by_the_console(tmp_path: Path, rank: int, kind: str, words: tuple[str, ...]) -> None:
    with RanksJob(tmp_path, *QUIET, "--set", "parallel.hang_s=2") as job:
        job.trains()
        job.plant(rank, kind)
        job.until(lambda: "has not ended for" in job.said(), 30)
        (line,) = [line for line in job.said().splitlines() if "has not ended for" in line]
        assert all(word in line for word in words), line
        if kind in ("sleep", "lock"):
            assert f"stack of rank {rank}, innermost call first:" in job.log()
        if kind == "stop":  # rank 0, which writes the record
            assert job.run.hang.exists()
            os.kill(job.pid(0), signal.SIGCONT)
            job.until(lambda: not job.run.hang.exists(), 30)
        for _ in range(2):
            job.console.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert job.wait() == 130
