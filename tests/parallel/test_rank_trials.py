"""Trials of configurations with several ranks: both sides are real, and a rank that fails is named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.waiting import children, until

from ndd_engine.record.events import TrialEvent
from ndd_engine.trial.request import Base, TrialRequest
from ndd_engine.trial.trial import run_trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SOURCE = """
import os, signal, time
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Sequential):
    fault = ""
    calls = 0
    def forward(self, x):
        self.calls += 1
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if rank == 1 and self.fault == "huge":
            torch.empty(1 << 46)
        if rank == 1 and self.fault == "broken":
            raise ValueError("this rank is broken")
        if rank == 1 and self.fault == "killed" and self.calls > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and self.fault == "late":
            time.sleep(0.02)
        return super().forward(x)

def factory(settings):
    net = Net(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    net.fault = settings.option("fault", "")
    x = torch.rand(4096, 8)
    return dict(model=net, train_data=TensorDataset(x, x.sum(1, keepdim=True)),
                loss=lambda out, batch: (out - batch[1]).square().mean())
"""
BASE = """
[run]
epochs = 1
device = "cpu"
threads = 1

[workload]
name = "shared:factory"

[batch]
micro = 8

[parallel]
ranks = 2
"""


def shared(folder: Path, *sets: str) -> Base:
    (folder / "shared.py").write_text(SOURCE, encoding="utf-8")
    config = folder / "shared.toml"
    config.write_text(BASE, encoding="utf-8")
    return Base("shared.toml", config, None, sets)


def measured(base: Base, *sets: str, budget_s: float = 120.0) -> TrialEvent:
    """The result of a trial, which leaves no process behind."""
    before = children()
    event = run_trial(TrialRequest(base, sets, budget_s), lambda _: None)
    until(lambda: children() <= before, 10, "a process was left behind")
    return event


def test_a_setting_of_the_exchange_is_measured_with_all_ranks(tmp_path: Path) -> None:
    event = measured(shared(tmp_path), "parallel.bucket_mb=100")
    assert event.ratio is not None and event.pairs >= 1, event.text
    for side in (event.base, event.change):
        assert side["ranks"] == 2 and len(side["rank_peaks"]) == 2
        assert side["items_per_step"] == 16 and len(side["losses"]) == 10
        assert side["parts_ns"]["exchange"] > 0 and side["parts_ns"]["forward"] > 0
    assert event.loss in ("same", "close"), event.loss_text
    assert event.in_effect is not False


def test_one_rank_is_compared_with_two_on_the_same_items(tmp_path: Path) -> None:
    base = shared(tmp_path, "parallel.ranks=1", "batch.micro=16", "workload.options.fault='late'")
    event = measured(base, "parallel.ranks=2", "batch.micro=8")
    # The planted sleep is on the second rank only.
    assert event.verdict == "slower", event.text
    assert event.base["ranks"] == 1 and event.change["ranks"] == 2
    assert event.base["parts_ns"].keys().isdisjoint({"exchange", "skew"})
    # Of 20 ms each rank waits half on average.
    assert event.change["parts_ns"]["skew"] > 5e6


@pytest.mark.parametrize(
    ("fault", "verdict"), [("huge", "out of memory"), ("broken", "failed"), ("killed", "out of memory")]
)
def test_the_rank_that_fails_is_named(tmp_path: Path, fault: str, verdict: str) -> None:
    event = measured(shared(tmp_path), f"workload.options.fault={fault!r}")
    assert (event.verdict, "rank 1: " in event.text) == (verdict, True), event.text


def scaling(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    shared(folder)
    words = ("--runs", str(folder / "runs"), "scaling", "shared.toml", "--ranks", "1,2", *arguments)
    return subprocess.Popen(
        [sys.executable, "-m", "ndd_console", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


def test_two_ranks_against_one_on_the_command_line(tmp_path: Path) -> None:
    process = scaling(tmp_path, "--budget", "120", "--json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = json.loads(out)
    first, second = found["rows"]
    assert found["scaling"] == "weak" and first["effective_batch"] * 2 == second["effective_batch"] == 16
    assert 0 < second["efficiency_low"] <= second["efficiency"] <= second["efficiency_high"]
    assert second["exchange_s"] > 0 and len(second["rank_peak_bytes"]) == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_leave_no_rank(tmp_path: Path, number: signal.Signals) -> None:
    process = scaling(tmp_path, "--budget", "300")
    assert process.stderr is not None
    next(line for line in process.stderr if "measuring" in line and "ABBA" in line)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 3
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    if number == signal.SIGINT:  # what is known is printed
        assert process.returncode == 130 and "1 rank" in out and "2 ranks" in out
    assert not psutil.wait_procs(ranks, 10)[1]
