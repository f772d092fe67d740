"""Loader workers that are killed, hang or raise: one message, and good state is saved."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch
from torch.utils.data import Dataset
from train_help import EVERY_STEP, Trainer

from ndd_engine.config import read
from ndd_engine.record.events import Event, WindowEvent
from ndd_engine.run import Run
from ndd_engine.train.data import loader as workers_module
from ndd_engine.train.data.loader import Batches
from ndd_engine.train.failures import explain

CPU = torch.device("cpu")
LONG = ("run.epochs=100000", "evaluate.every_epochs=0", "checkpoint.every_epochs=0")


def workers_of(before: set[int]) -> list[int]:
    """Loader workers that came since: grandchildren, because the fork server is in between."""
    mine = os.getpid()
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.pid not in before and child.ppid() != mine]


@pytest.mark.parametrize("persistent", ["true", "false"])
def test_a_killed_worker_is_named_and_the_moment_is_saved(trainer: Trainer, persistent: str) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    victims: list[int] = []

    def steer(run: Run, event: Event) -> None:
        if isinstance(event, WindowEvent) and event.step >= 30 and not victims:
            victims.extend(workers_of(before)[:1])
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

    result = trainer.train(
        *trainer.ndd, *EVERY_STEP, *LONG, "workload.samples=40000", "loader.workers=2",
        f"loader.persistent={persistent}", steer=steer,
    )  # fmt: skip
    end = result.end
    assert (end.status, end.exit_status) == ("failed", 1)
    for part in (
        f"worker {victims[0]} ",
        "SIGKILL",
        f"at step {end.step + 1} in data_wait",
        "--resume eeg-001",
    ):
        assert part in end.reason
    assert result.checkpoints == [end.step]
    again = trainer.train(
        "loader.workers=0", "loader.persistent=false", f"run.max_steps={end.step + 5}", resume=result
    )
    assert (again.end.status, again.end.step) == ("done", end.step + 5)
    assert sorted(again.losses) == list(range(1, end.step + 6))
    # The other worker may wait for ever for a lock that the killed one held.
    for pid in workers_of(before):
        os.kill(pid, signal.SIGKILL)


class Slow(Dataset[int]):
    """One item takes longer than the workers are left unwatched."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            time.sleep(1.0)
        return index


def test_a_stuck_worker_is_given_up_and_a_slow_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "CHECK_S", 0.1)
    config = read(None, ["workload.size=tiny", "batch.micro=1", "loader.workers=1"]).resolve()
    assert sorted(int(batch) for batch in Batches(Slow(), config).epoch(0)) == [0, 1, 2, 3]
    hasty = read(
        None, ["workload.size=tiny", "batch.micro=1", "loader.workers=1", "loader.timeout_s=0.3"]
    ).resolve()
    with pytest.raises(RuntimeError) as caught:
        list(Batches(Slow(), hasty).epoch(0))
    failure = explain(caught.value, 3, "data_wait", hasty, CPU, None)
    assert failure.kind == "worker" and "300 ms" in failure.text
