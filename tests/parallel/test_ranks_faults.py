"""Runs of two ranks are asked to stop, and ranks fail: all ranks act alike, and the reason names the rank.

The last ones have two launchers with a rank each, as on two nodes, on this host.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.common import Options
from qa.ranks import faults
from qa.ranks.job import RanksJob
from tests.states import equal
from tests.tiers import few
from tests.waiting import LIMIT_S, until

from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.run.channel import send

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
# No evaluations and few checkpoints.
QUIET = ("--set", "evaluate.every_epochs=0", "--set", "checkpoint.every_epochs=0")
UNSAVED = (*QUIET, "--set", "checkpoint.every_steps=0")
RESTARTS = "restart 1 of 1"


def reason(job: RanksJob) -> str:
    return str(job.end()["reason"])


def of_type(job: RanksJob, rank: int, kind: str) -> list[dict[str, Any]]:
    return [event for event in job.events(rank) if event["type"] == kind]


# Cases of qa/ranks/faults.py; of some, `make test-all` runs one kind of their table.
CASES = [
    ("kills", "", ""), ("requests", "", ""), ("launcher", "", ""), ("hangs", "HANG_KINDS", "sleep"),
    ("stops", "STOP_WAYS", "SIGTERM to rank 1"), *((name, "", "") for name in ("hangs", "stops", "leaves")),
]  # fmt: skip


@pytest.mark.parametrize(("case", "table", "kind"), few(CASES, 5))
@pytest.mark.budget(60)
def test_ranks_act_alike_after_requests_signals_kills_and_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, table: str, kind: str
) -> None:
    """What qa/ranks/faults.py does many times, here once or a few times, and however long it takes."""
    for repeats in ("REQUESTS", "KILLS"):
        monkeypatch.setattr(faults, repeats, (1, 1))
    if table:
        monkeypatch.setattr(faults, table, {kind: getattr(faults, table)[kind]})
    random.seed(7)
    for found in faults.CASES[case](tmp_path, Options("quick")):
        wrong = [text for text in found.wrong if not text.startswith("took ")]
        assert found.tries and not wrong, found.name


@pytest.mark.budget(30)
def test_all_ranks_are_captured_by_themselves_after_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is captured alone would hold up the others."""
    monkeypatch.setenv("NDD_WATCH_CAPTURE_S", "1")
    with RanksJob(tmp_path, *UNSAVED) as job:
        ranks = (0, 1)
        first = [job.until(lambda rank=rank: of_type(job, rank, "kernels"))[0] for rank in ranks]
        job.console.send_signal(signal.SIGTERM)
        job.wait()
        assert first[0]["step"] == first[1]["step"]
        assert all(event["modules"] for event in first)
        windows = [of_type(job, rank, "window") for rank in ranks]
        begun = [
            {event["step"] for event in found if event["profiled"]} & {first[0]["step"]} for found in windows
        ]
        assert begun[0] == begun[1] != set()  # it is no part of the usual steps of any rank


@pytest.mark.slow
def test_a_restart_before_the_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    with RanksJob(tmp_path, "--restarts", "1", *UNSAVED, steps=60) as job:
        job.plant(1, "kill 20")
        assert job.wait() == 0, job.said()
        assert RESTARTS in job.said()
        kept = {path.name for path in (job.run.path / "attempt-1").iterdir()}
        assert {"events.jsonl", "ranks"} <= kept
        assert job.end()["step"] == 60


@pytest.mark.budget(30)
def test_a_killed_rank_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    with RanksJob(tmp_path, *QUIET) as job:
        job.trains()
        job.until(lambda: job.marks(0, "checkpoint"))
        pid = job.pid(1)
        os.kill(pid, signal.SIGKILL)
        assert job.wait() == 1
        assert reason(job).startswith("rank 1 (") and f"{pid})" in reason(job)
        assert "--resume it" in reason(job)


@pytest.mark.parametrize("rank", few([0, 1], 1))
@pytest.mark.budget(30)
def test_an_error_of_one_rank_is_named_with_its_line(tmp_path: Path, rank: int) -> None:
    with RanksJob(tmp_path, *QUIET) as job:
        job.trains()
        job.plant(rank, "raise")
        assert job.wait() == 1
        assert reason(job).startswith(f"rank {rank}: ") and "rank_faults.py:" in reason(job)
        assert "Traceback" not in job.said() and "Traceback" in job.log()


@pytest.mark.slow
def test_a_loss_of_nan_on_one_rank_ends_all_of_them_without_a_restart(tmp_path: Path) -> None:
    with RanksJob(tmp_path, "--restarts", "3", *QUIET) as job:
        job.plant(1, "nan 45")
        assert job.wait() == 1
        assert reason(job).startswith("rank 1: ") and "step 40" in reason(job)  # the last good checkpoint
        assert job.end()["step"] == job.end(1)["step"]
        assert "restart " not in job.said()


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.slow
def test_a_rank_that_is_killed_in_preparation_is_named(tmp_path: Path, restarts: int) -> None:
    words = ("--set", "workload.options.killed=1", "--set", "workload.options.slow_s=20.0")
    with RanksJob(tmp_path, "--restarts", str(restarts), *words) as job:
        assert job.wait() == 1
        assert reason(job).startswith("rank 1 (")
        assert (RESTARTS in job.said()) == bool(restarts)


@pytest.mark.slow
def test_a_rank_that_is_killed_as_it_starts_ends_the_others_at_once(tmp_path: Path) -> None:
    with RanksJob(tmp_path) as job:
        ranks = job.until(lambda: len(found := psutil.Process(job.launcher()).children()) == 2 and found)
        time.sleep(0.5)
        ranks[1].kill()
        assert job.wait() == 1  # torch's launcher would wait 30 s for them
        assert f"{ranks[1].pid})" in reason(job)


@pytest.mark.slow
def test_no_rank_uses_compiled_code_if_one_of_them_cannot_compile(tmp_path: Path) -> None:
    with RanksJob(tmp_path / "plain", *QUIET, steps=40) as job:
        assert job.wait() == 0
        expected = job.weights()
    words = ("--set", "speed.compile=default", "--set", "workload.options.uncompiled=1")
    with RanksJob(tmp_path / "compiled", *QUIET, *words, steps=40) as job:
        assert job.wait() == 0, job.said()
        assert equal(job.weights(), expected)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--set", "batch.micro=0"), "batch.micro"),
        (("--workload", "rank_faults:nothing"), "nothing"),
        (("--set", "workload.options.refused=1"), "refused"),
        (
            ("--set", "workload.options.refuse=1"),
            "factory",
        ),  # on one rank only: the other does not wait for it
        (("--set", "run.device=cuda"), "cuda"),
    ],
)
@pytest.mark.slow
def test_a_mistake_is_said_once_without_a_traceback(
    tmp_path: Path, words: tuple[str, ...], named: str
) -> None:
    with RanksJob(tmp_path, "--restarts", "2", *words) as job:
        assert job.wait() == 2
        (line,) = [line for line in job.said().splitlines() if line.startswith(("ndd-console: ", "failed: "))]
        assert named in line
        assert "Traceback" not in job.said() and "restart " not in job.said()


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "it")
    with RanksJob(tmp_path, *QUIET, steps=90) as job:
        job.until(lambda: run.checkpoints.exists() and job.marks(0, "checkpoint"))
        run.checkpoints.rename(run.path / "away")
        run.checkpoints.touch()
        assert job.wait() == 1  # also the last one
        assert job.marks(0, "warning")
        assert job.end()["step"] == 90 and "checkpoint" in reason(job)


@pytest.mark.slow
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
        job.until(lambda: job.run.live_owner() is None)


# Two launchers.

STEPS = 150


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_ranks_of_two_launchers_continue_after_one_is_killed(tmp_path: Path, rendezvous: str) -> None:
    port = str(29_000 + os.getpid() % 900 + (rendezvous == "static"))
    run = RunDir(tmp_path / "big")
    launchers = [_launcher(tmp_path, node, port, rendezvous) for node in range(2)]
    try:
        until(lambda: any(run.checkpoints.glob("step-*")))
        (rank,) = [each for each in _ranks(launchers) if each.environ()["RANK"] == "1"]
        rank.kill()
        logs = [launcher.communicate(timeout=200)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()
            launcher.communicate(timeout=LIMIT_S)
    assert [launcher.returncode for launcher in launchers] == [0, 0], logs
    assert any(f"process {rank.pid})" in log for log in logs)
    state = load_state(run)
    assert state.status == "done"
    assert state.step == STEPS


def test_a_rank_whose_others_do_not_start_says_so_and_ends_on_sigterm(tmp_path: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    store = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(28_000 + os.getpid() % 900)}
    process = subprocess.Popen(
        [sys.executable, "-m", "ndd_console", "--runs", str(tmp_path / "runs"), "train", "--workload", "chartext"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **place, **store},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.startswith("ndd-console: "))
        assert "rank 0" in line and f"localhost:{store['MASTER_PORT']}" in line
        process.terminate()
        assert process.wait(LIMIT_S) == 143
    finally:
        process.kill()
        process.communicate()
    assert not (tmp_path / "runs").exists()


def _launcher(root: Path, node: int, port: str, rendezvous: str) -> subprocess.Popen[str]:
    meet = ["--node-rank", str(node), "--master-addr", "localhost", "--master-port", port]
    if rendezvous == "c10d":
        meet = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"localhost:{port}"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet,
        "--max-restarts", "2", "-m", "--", "ndd_console", "--runs", str(root), "train", "--workload", "chartext",
        "--set", "workload.size=tiny", "--set", "run.threads=1", "--set", "checkpoint.every_steps=20",
        "--max-steps", str(STEPS), "--run", "big", "--resume-or-start",
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )  # fmt: skip


def _ranks(launchers: list[subprocess.Popen[str]]) -> list[psutil.Process]:
    children = [child for each in launchers for child in psutil.Process(each.pid).children()]
    return [child for child in children if "RANK" in child.environ()]
