"""Two launchers with a rank each, as on two nodes, on this host: a rank is killed, and both ranks start again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.waiting import LIMIT_S, until

from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir

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


@pytest.mark.long
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
