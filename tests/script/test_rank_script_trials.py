"""Trials of scripts with several ranks under torchrun: all ranks train the same steps, and none is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from script_help import CONSOLE, environment, start
from test_torchrun import SCRIPT
from tests.tiers import few
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.long
NAME = f"ranks{os.getpid()}.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", NAME)
MORE = {"OMP_NUM_THREADS": "1", "STEPS": "1000000"}


def processes() -> list[psutil.Process]:
    """What runs of the script."""
    return [one for one in psutil.process_iter(["cmdline"]) if NAME in (one.info["cmdline"] or ())]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script and a run of it."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / NAME).write_text(SCRIPT)
    more = environment(**{**MORE, "STEPS": "40"})
    words = [*CONSOLE, "run", "--run", "base", "--", *TORCHRUN]
    subprocess.run(words, cwd=folder, env=more, capture_output=True, timeout=150, check=False)
    for left in folder.glob("loss-*"):
        left.unlink()
    return folder


def tried(folder: Path, *words: str, **more: str) -> dict[str, Any]:
    """The result of a trial, which leaves no process and no file behind."""
    before = sorted(path.name for path in folder.iterdir())
    done = subprocess.run(
        [*CONSOLE, "try", "base", *words, "--json"], cwd=folder, env=environment(**MORE, **more), text=True,
        capture_output=True, timeout=250, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stdout, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == before
    until(lambda: not processes(), "a rank was left behind")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.budget(60)
def test_all_ranks_are_switched_together(recorded: Path) -> None:
    event = tried(recorded, "--set", "optimizer.implementation=foreach", "--budget", "40")
    assert event["method"] == "one process" and event["in_effect"] is True, event["text"]
    for side in (event["base"], event["change"]):
        # Four items on each of two ranks.
        assert (side["ranks"], len(side["rank_peaks"]), side["items_per_step"]) == (2, 2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_pairs_of_launchers_compare_losses_and_what_a_step_consists_of(recorded: Path, mode: str) -> None:
    event = tried(recorded, "--set", "loader.workers=1", "--budget", "60", MODE=mode)
    assert event["pairs"] >= 1 and event["in_effect"] is True, event["text"]
    assert event["loss"] == "same" and len(event["base"]["losses"]) == 10
    for side in (event["base"], event["change"]):
        assert side["ranks"] == 2 and side["parts_ns"]["exchange"] > 0


@pytest.mark.parametrize(
    ("fault", "verdict", "named"),
    few(
        [
            ("raise ValueError('planted')", "failed", "rank 1: ValueError: planted"),
            (
                "os.kill(os.getpid(), signal.SIGKILL)",
                "out of memory",
                "rank 1: its process was killed by signal 9",
            ),
        ],
        1,
    ),
)
@pytest.mark.budget(60)
def test_the_rank_that_dies_is_named_and_the_others_end(
    recorded: Path, fault: str, verdict: str, named: str
) -> None:
    each = f"if step == 4 and rank == 1 and os.environ.get('FAULTY'): {fault}"
    event = tried(recorded, "--env", "FAULTY=1", "--budget", "40", EACH=each)
    assert event["verdict"] == verdict and named in event["text"], event["text"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_leave_no_rank(recorded: Path, tmp_path: Path, number: signal.Signals) -> None:
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    process = start(tmp_path, "try", "base", "--set", "run.gc_every_steps=10", "--budget", "200", **MORE)
    assert process.stderr is not None
    next(line for line in process.stderr if "measuring" in line)
    assert len(processes()) >= 3
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    if number == signal.SIGINT:
        assert process.returncode == 130
    until(lambda: not processes(), "a rank was left behind")
