"""A live run is paused, saved, evaluated and stopped from elsewhere; its record still adds up."""

from __future__ import annotations

import time
from typing import Any

import pytest
from test_run import close
from tests.waiting import LIMIT_S, until
from train_help import EVERY_STEP, Result, Trainer, in_step

from ndd_engine.record.channel import send
from ndd_engine.record.events import Event, WindowEvent
from ndd_engine.run import Run
from ndd_engine.workloads.base import Workload

LONG = ("run.epochs=100000", "evaluate.every_epochs=0", "checkpoint.every_epochs=0", "evaluate.at_end=false")


def test_pause_checkpoint_evaluate_resume_and_stop_through_the_socket(trainer: Trainer) -> None:
    with trainer.beside(*trainer.ndd, *LONG, "log.every_steps=1", "log.window_s=0.02") as run:
        result, socket = Result(run.directory), run.directory.control_socket
        until(lambda: run.recorder.snapshot().step > 10)
        send(socket, "pause")
        until(lambda: run.recorder.snapshot().status == "paused")
        at = run.recorder.snapshot().step
        send(socket, "checkpoint")
        send(socket, "evaluate")
        until(lambda: result.marks("checkpoint") and result.marks("evaluation"))
        send(socket, "checkpoint")
        until(lambda: len(result.marks("checkpoint")) == 2)
        time.sleep(0.3)
        assert run.recorder.snapshot().status == "paused"
        assert run.recorder.snapshot().step == at
        send(socket, "resume")
        until(lambda: run.recorder.snapshot().step > at + 10)
        assert run.recorder.snapshot().status == "training"
        send(socket, "evaluate")
        until(lambda: len(result.marks("evaluation")) == 2)
        send(socket, "checkpoint")
        until(lambda: len(result.marks("checkpoint")) == 3)
        send(socket, "stop")
        assert run.finished.wait(LIMIT_S)
    assert run.end is not None
    assert (run.end.status, run.end.exit_status) == ("stopped", 0)
    assert (
        [mark.step for mark in result.marks("pause")]
        == [mark.step for mark in result.marks("resume")]
        == [at]
    )
    assert [mark.step for mark in result.marks("checkpoint")][:2] == [at, at]
    assert result.checkpoints[-1] == run.end.step == result.snapshot.step
    # The pause is in no window, what was done in it is.
    total = close(result)
    assert any("checkpoint" in window.phases and window.step == at for window in result.windows)
    assert result.snapshot.elapsed_s == pytest.approx(total * 1e-9)
    paused = result.marks("resume")[0].data["seconds"]
    assert paused > 0.3


def test_a_paused_run_can_be_stopped_and_keeps_its_checkpoint(trainer: Trainer) -> None:
    def steer(run: Run, event: Event) -> None:
        if isinstance(event, WindowEvent) and event.step == 5:
            run.control.request("pause")
        if run.recorder.snapshot().status == "paused":
            run.control.request("stop", "interrupted (Ctrl-C)", "interrupted")

    result = trainer.train(*trainer.ndd, *EVERY_STEP, *LONG, steer=steer)
    assert (result.end.status, result.end.exit_status) == ("interrupted", 130)
    assert result.checkpoints == [result.end.step]
    close(result)


def test_what_is_due_is_done_before_a_stop_is_obeyed(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls, runs = Workload.loss, [], []

    def loss(self: Workload, output: Any, batch: Any) -> Any:
        calls.append(in_step())
        if calls.count(True) == 10:
            runs[0].control.request("stop", "enough")
        return plain(self, output, batch)

    monkeypatch.setattr(Workload, "loss", loss)
    result = trainer.train(
        *trainer.ndd, *LONG, "evaluate.every_steps=10", steer=lambda run, _: runs.append(run)
    )
    assert (result.end.status, result.end.step) == ("stopped", 10)
    assert [mark.step for mark in result.marks("evaluation")] == [10]


@pytest.mark.parametrize(
    ("status", "exit_status"), [("stopped", 0), ("interrupted", 130), ("terminated", 143)]
)
def test_a_stop_ends_as_it_was_asked_for(trainer: Trainer, status: str, exit_status: int) -> None:
    def steer(run: Run, event: Event) -> None:
        if isinstance(event, WindowEvent) and event.step >= 3:
            run.control.request("stop", "enough", status)
            run.control.request("stop", "a later reason does not count", "stopped")

    result = trainer.train(*trainer.ndd, *EVERY_STEP, *LONG, steer=steer)
    assert (result.end.status, result.end.exit_status) == (status, exit_status)
    assert "enough" in result.end.reason and "later" not in result.end.reason
    assert result.end.checkpoint == f"step-{result.end.step:08d}"


def test_a_stop_at_once_leaves_no_checkpoint(trainer: Trainer) -> None:
    def steer(run: Run, event: Event) -> None:
        if isinstance(event, WindowEvent) and event.step >= 3:
            run.control.request("kill", "enough")

    result = trainer.train(*trainer.ndd, *EVERY_STEP, *LONG, steer=steer)
    assert (result.end.status, result.end.checkpoint) == ("stopped", None)
    assert result.checkpoints == []


def test_a_stop_is_heard_while_it_still_prepares(trainer: Trainer) -> None:
    run = trainer.open(*trainer.ndd, *LONG)
    run.control.request("stop", "changed my mind")
    end = run.execute()
    run.close()
    assert (end.status, end.step, end.exit_status) == ("stopped", 0, 0)
    assert Result(run.directory).windows == []


def test_a_long_evaluation_can_be_left_at_once(trainer: Trainer) -> None:
    def steer(run: Run, event: Event) -> None:
        if run.recorder.snapshot().status == "evaluating":
            run.control.request("kill", "enough")

    # One item a batch, 3000 of them: long enough to be asked in the middle of it.
    result = trainer.train(
        *trainer.ndd, *LONG, "workload.samples=12000", "workload.eval_fraction=0.45", "batch.micro=2",
        "evaluate.every_steps=2", steer=steer,
    )  # fmt: skip
    assert (result.end.status, result.end.checkpoint) == ("stopped", None)
    assert result.marks("evaluation") == []
