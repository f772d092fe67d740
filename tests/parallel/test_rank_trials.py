"""Trials of configurations with several ranks: both sides are real, and a rank that fails is named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.tiers import few
from tests.trial.trial_help import measured, planted
from tests.waiting import LIMIT_S

from ndd_engine.trial.outcome import Base

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def shared(folder: Path, fault: str = "", ranks: int = 2, micro: int = 8) -> Base:
    base = planted(folder, count=4096, fault=fault)
    return replace(base, sets=(*base.sets, f"parallel.ranks={ranks}", f"batch.micro={micro}"))


@pytest.mark.slow
def test_a_setting_of_the_exchange_is_measured_with_all_ranks(tmp_path: Path) -> None:
    event = measured(shared(tmp_path), "parallel.bucket_mb=100")
    assert event.ratio is not None and event.pairs >= 1, event.text
    for side in (event.base, event.change):
        assert side["ranks"] == 2 and len(side["rank_peaks"]) == 2
        assert side["items_per_step"] == 16 and len(side["losses"]) == 10
        assert side["parts_ns"]["exchange"] > 0 and side["parts_ns"]["forward"] > 0
    assert event.loss in ("same", "close"), event.loss_text
    assert event.in_effect is not False


@pytest.mark.slow
def test_one_rank_is_compared_with_two_on_the_same_items(tmp_path: Path) -> None:
    base = shared(tmp_path, "late", ranks=1, micro=16)
    event = measured(base, "parallel.ranks=2", "batch.micro=8")
    # The planted sleep is on the second rank only.
    assert event.verdict == "slower", event.text
    assert event.base["ranks"] == 1 and event.change["ranks"] == 2
    assert event.base["parts_ns"].keys().isdisjoint({"exchange", "skew"})
    # Of 20 ms each rank waits half on average.
    assert event.change["parts_ns"]["skew"] > 5e6


@pytest.mark.parametrize(
    ("fault", "verdict"),
    few([("huge", "out of memory"), ("broken", "failed"), ("killed", "out of memory")], 1),
)
@pytest.mark.budget(40)
def test_the_rank_that_fails_is_named(tmp_path: Path, fault: str, verdict: str) -> None:
    event = measured(shared(tmp_path), f'workload.options.fault="{fault}"')
    assert (event.verdict, "rank 1: " in event.text) == (verdict, True), event.text


def scaling(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    planted(folder)
    words = ("--runs", str(folder / "runs"), "scaling", "planted.toml", "--ranks", "1,2", *arguments)
    return subprocess.Popen(
        [sys.executable, "-m", "ndd_console", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_two_ranks_against_one_on_the_command_line(tmp_path: Path) -> None:
    process = scaling(tmp_path, "--budget", "120", "--json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = json.loads(out)
    first, second = found["rows"]
    assert found["scaling"] == "weak" and first["effective_batch"] * 2 == second["effective_batch"] == 8
    assert 0 < second["efficiency_low"] <= second["efficiency"] <= second["efficiency_high"]
    assert second["exchange_s"] > 0 and len(second["rank_peak_bytes"]) == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_ctrl_c_and_kill_leave_no_rank(tmp_path: Path, number: signal.Signals) -> None:
    process = scaling(tmp_path, "--budget", "300")
    assert process.stderr is not None
    next(line for line in process.stderr if "measuring" in line and "ABBA" in line)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 3
    process.send_signal(number)
    out, _ = process.communicate(timeout=LIMIT_S)
    if number == signal.SIGINT:  # what is known is printed
        assert process.returncode == 130 and "1 rank" in out and "2 ranks" in out
    assert not psutil.wait_procs(ranks, 10)[1]
