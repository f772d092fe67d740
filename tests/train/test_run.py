"""A run from its opening to its end: its record adds up, events come at their steps, and it can be steered."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S, until
from train_help import ENDLESS, EVERY_STEP, OWN, QUIET, Result, Trainer, Written, in_step, spoiled

from ndd_engine.config import read
from ndd_engine.errors import ConfigError, MachineError, UsageError
from ndd_engine.hardware.detect import Nvml
from ndd_engine.record import file as record_file
from ndd_engine.record.events import EndEvent, Event, MarkEvent, WindowEvent, parse
from ndd_engine.record.rundir import RunLock
from ndd_engine.run.channel import send
from ndd_engine.run.run import Run
from ndd_engine.train import request as request_module
from ndd_engine.train.checkpoint import CheckpointStore
from ndd_engine.train.loop import EPOCHS_EVERY_S, FIRST_EPOCHS
from ndd_engine.train.request import RunRequest
from ndd_engine.train.training_run import TrainingRun
from ndd_engine.workloads.base import Workload

STEPS_PER_EPOCH = 22  # of Trainer.ndd


def test_a_run_is_done_and_everything_it_did_is_in_its_record(trainer: Trainer) -> None:
    sets = (*trainer.ndd, *EVERY_STEP, "run.epochs=2")
    result = trainer.train(*sets)
    end = result.end
    figures = end.data["figures"]
    assert end == EndEvent(
        "done", end.reason, 44, 0, "step-00000044",
        {"run": "eeg-001", "dropped_events": 0, "figures": figures},
    )  # fmt: skip
    assert figures["items_per_s"] == pytest.approx(16 * figures["steps_per_s"])
    assert figures["flops_per_s"] > 0 and figures["evaluation_s"] > 0 and figures["checkpoint_s"] > 0
    assert figures["mfu"] is None and "CPU" in figures["reason"]
    assert result.events[-1] == end
    total = result.closed_ns()
    snapshot = result.snapshot
    assert (snapshot.status, snapshot.step, snapshot.progress) == ("done", 44, 1.0)
    assert (snapshot.items, snapshot.tokens) == (44 * 16, 44 * 16 * 8)
    assert snapshot.elapsed_s == pytest.approx(total * 1e-9)
    assert [window.step for window in result.windows if window.steps] == list(range(1, 45))
    assert set(result.losses) == set(range(1, 45))
    assert [mark.step for mark in result.marks("epoch")] == [22, 44]
    steps = {window.step: (window.epoch, window.epoch_step) for window in result.windows if window.steps}
    assert (steps[1], steps[21], steps[22], steps[23]) == ((0, 1), (0, 21), (1, 0), (1, 1))
    # The configuration is kept as resolved, and with it who runs what.
    assert read(result.directory.config).resolve() == read(None, sets).resolve()
    identity = result.identity
    assert identity.config == read(None, sets).resolve().model_dump(mode="json")
    assert (identity.workload, identity.item, identity.tokens_per_item) == ("eeg", "segment", 8)
    assert (identity.items_per_step, identity.device, identity.gpu, identity.threads) == (16, "cpu", None, 1)
    assert identity.versions.keys() >= {"ndd", "python", "torch", "system"}
    assert (identity.resumed_step, identity.resumed_from) == (None, None)
    # The socket is gone, and the lock is free.
    assert not result.directory.control_socket.exists()
    assert result.directory.live_owner() is None


def test_the_ends_of_many_short_epochs_do_not_displace_all_other_marks(trainer: Trainer) -> None:
    result = trainer.train(*trainer.ndd, *QUIET, "batch.micro=300", "run.epochs=60")
    lines = filter(None, map(parse, result.directory.events.read_bytes().splitlines()))
    told = [(t, event.text) for t, event in lines if isinstance(event, MarkEvent) and event.kind == "epoch"]
    assert [text for _, text in told[:FIRST_EPOCHS]] == [
        f"epoch {done} of 60 done" for done in range(1, FIRST_EPOCHS + 1)
    ]
    assert told[-1][1] == "epoch 60 of 60 done"
    later = [t for t, _ in told[FIRST_EPOCHS - 1 : -1]]
    assert all(after - before > 0.9 * EPOCHS_EVERY_S for before, after in itertools.pairwise(later))


def test_windows_follow_one_another_without_a_gap(trainer: Trainer) -> None:
    often = ("run.epochs=100000", "log.every_steps=1", "log.window_s=0.02", "evaluate.every_steps=50")
    result = trainer.train(*trainer.ndd, *often, "run.max_steps=300")
    result.closed_ns()
    windows = result.windows
    assert sum(window.steps for window in windows) == 300
    assert sum(window.items for window in windows) == 300 * 16
    assert 2 < len([window for window in windows if window.steps]) < 300
    lines = [item for item in map(parse, result.directory.events.read_bytes().splitlines()) if item]
    ends = [t for t, event in lines if isinstance(event, WindowEvent)]
    # From the end of the first window to the end of the last, by the calendar's clock.
    assert sum(window.wall_ns for window in windows[1:]) * 1e-9 == pytest.approx(ends[-1] - ends[0], abs=0.2)
    names = {name for window in windows for name in window.phases}
    assert names >= {"data_wait", "forward", "loss", "backward", "optimizer", "zero_grad"}
    assert names >= {"log", "evaluate", "checkpoint"}


def test_evaluations_and_checkpoints_come_at_their_steps(trainer: Trainer) -> None:
    result = trainer.train(
        *trainer.ndd, "run.max_steps=50", "evaluate.every_steps=10", "evaluate.every_epochs=1",
        "checkpoint.every_steps=15", "checkpoint.every_epochs=2", "checkpoint.keep=20", "checkpoint.every_minutes=0",
    )  # fmt: skip
    assert [mark.step for mark in result.marks("evaluation")] == [10, 20, 22, 30, 40, 44, 50]
    assert [mark.step for mark in result.marks("checkpoint")] == [15, 30, 44, 45, 50]
    assert result.checkpoints == [15, 30, 44, 45, 50]
    newest = CheckpointStore(result.directory.checkpoints, 99).all()[-1]
    assert (newest.step, newest.metric) == (50, result.snapshot.evaluations[-1].metrics["rmse"])
    snapshot = result.snapshot
    assert [evaluation.step for evaluation in snapshot.evaluations] == [10, 20, 22, 30, 40, 44, 50]
    best = min(snapshot.evaluations, key=lambda each: each.metrics["rmse"])
    assert snapshot.best == best
    statuses = [mark.data["status"] for mark in result.marks("status")]
    assert statuses[:4] == ["evaluating", "training", "checkpointing", "training"]


def test_a_checkpoint_that_is_due_at_the_end_carries_the_metric_of_the_end(trainer: Trainer) -> None:
    result = trainer.train(*trainer.ndd, "run.max_steps=10", "checkpoint.every_steps=5")
    (evaluation,) = result.snapshot.evaluations
    newest = CheckpointStore(result.directory.checkpoints, 9).all()[-1]
    assert (newest.step, newest.metric) == (10, evaluation.metrics["rmse"])


def test_what_is_switched_off_does_not_happen(trainer: Trainer) -> None:
    off = (*QUIET, "checkpoint.at_end=false", "checkpoint.every_minutes=0")
    result = trainer.train(*trainer.ndd, *off, "run.max_steps=25")
    assert (result.end.status, result.end.checkpoint) == ("done", None)
    assert result.marks("evaluation") == result.marks("checkpoint") == []
    assert result.checkpoints == []


def test_a_checkpoint_is_written_when_the_last_one_is_long_ago(trainer: Trainer) -> None:
    written: list[int] = []

    def steer(run: Run, event: Event) -> None:
        if isinstance(event, MarkEvent) and event.kind == "checkpoint":
            written.append(event.step)
            if len(written) == 2:
                run.control.request("stop", "far enough")

    often = ("checkpoint.at_end=false", "checkpoint.every_minutes=0.0005", "log.window_s=0.01")
    result = trainer.train(*trainer.ndd, *ENDLESS, *often, steer=steer)
    assert len(result.marks("checkpoint")) >= 2
    assert len(result.checkpoints) <= 3


def test_another_seed_gives_another_run(trainer: Trainer) -> None:
    common = (*trainer.ndd, *EVERY_STEP, "run.max_steps=3")
    first, other = (trainer.train(*common, f"run.seed={seed}") for seed in (1, 2))
    assert not set(first.losses.values()) & set(other.losses.values())


@pytest.mark.parametrize(
    ("sets", "steps", "epochs", "per_epoch"),
    [
        (("run.epochs=3", "run.max_steps=10"), 10, 1, STEPS_PER_EPOCH),
        (("run.epochs=1", "run.max_steps=100"), STEPS_PER_EPOCH, 1, STEPS_PER_EPOCH),
        (("run.epochs=5", "run.max_steps=30"), 30, 2, STEPS_PER_EPOCH),
        # 352 segments are 35 micro-batches and 8 whole steps: an epoch leaves out the items that fill no step.
        (("batch.micro=10", "batch.accumulation=4", "run.epochs=2"), 16, 2, 8),
    ],
)
def test_a_run_ends_at_whichever_comes_first(
    trainer: Trainer, sets: tuple[str, ...], steps: int, epochs: int, per_epoch: int
) -> None:
    result = trainer.train(*trainer.ndd, *sets)
    assert (result.end.status, result.end.step) == ("done", steps)
    identity = result.identity
    assert (identity.total_steps, identity.epochs, identity.steps_per_epoch) == (steps, epochs, per_epoch)


def test_an_error_in_the_model_is_told_with_step_and_phase(trainer: Trainer, written: Written) -> None:
    error = r'raise RuntimeError("shapes \x1b[31mdo not match\nsecond line")'
    sets = (*written(spoiled(loss=f"if step == 7: {error}")), *OWN)
    result = trainer.train(*sets, "checkpoint.every_steps=4", "evaluate.every_epochs=0")
    end = result.end
    assert (end.status, end.exit_status, end.step) == ("failed", 1, 6)
    assert "RuntimeError at step 7 in loss" in end.reason and r"\x1b[31m" in end.reason
    for part in ("written_", "console.log", f"--resume {result.directory.name}"):
        assert part in end.reason
    assert "second line" in result.directory.console_log.read_text()
    # In the middle of a step nothing is saved: half of it may be done.
    assert result.checkpoints == [4]


def test_a_model_that_leaves_the_program_fails_the_run(trainer: Trainer, written: Written) -> None:
    end = trainer.train(*written(spoiled(loss="exit(3)")), *OWN).end
    assert (end.status, end.exit_status) == ("failed", 1)
    assert "SystemExit" in end.reason


def test_an_error_in_an_evaluation_names_the_step_before_it(trainer: Trainer, written: Written) -> None:
    body = "if step == 8 and not output.requires_grad: raise KeyError"
    result = trainer.train(*written(spoiled(loss=body)), *OWN, "evaluate.every_steps=7")
    assert "KeyError" in result.end.reason and "step 7" in result.end.reason
    # Between two steps the state is whole: nothing is lost.
    assert result.checkpoints == [7]


def test_a_run_whose_record_cannot_be_written_for_ever_trains_to_its_end(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    monkeypatch.setattr(record_file, "write_whole", lambda *_: back.wait(LIMIT_S))
    monkeypatch.setattr(record_file, "STUCK_S", 0.0)
    heard: list[Event] = []
    run = trainer.open(
        *trainer.ndd, *EVERY_STEP, "run.max_steps=30", listener=lambda _, event: heard.append(event)
    )
    try:
        end = run.execute()
        assert (end.status, end.step) == ("done", 30)
        assert run.recorder.settle() and heard[-1] == end
        assert run.recorder.snapshot().step == 30
        assert run.recorder.trouble is not None
    finally:
        back.set()
        run.close()


# Opening it


def test_a_run_that_cannot_be_opened_leaves_no_folder(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_threads(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def no_space(_lock: RunLock, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_threads)
        with pytest.raises(MachineError, match="can't start new"):
            trainer.open(*trainer.ndd, "run.name=one")
    with monkeypatch.context() as patched:
        patched.setattr(RunLock, "acquire", no_space)
        with pytest.raises(UsageError, match="No space left"):
            trainer.open(*trainer.ndd, "run.name=one")
    assert list(trainer.root.iterdir()) == []


def test_a_full_disk_at_the_start_leaves_no_folder_whose_name_is_taken(
    trainer: Trainer, small_disk: Callable[[int], Path]
) -> None:
    trainer.root = small_disk(16)
    (trainer.root / "filler").write_bytes(b"x" * 8192)
    with contextlib.suppress(OSError):
        (trainer.root / "more").write_bytes(b"x" * 65536)
    with contextlib.suppress(UsageError):
        trainer.train(*trainer.ndd, "run.name=one", "run.max_steps=1")
    assert not (trainer.root / "one").exists()


@pytest.mark.parametrize("name", ["lock", "events.jsonl", "console.log", "config.toml"])
def test_a_fifo_among_the_files_of_a_run_is_one_error(trainer: Trainer, name: str) -> None:
    result = trainer.train(*trainer.ndd, "run.max_steps=1")
    path = result.directory.path / name
    draft = read(result.directory.config)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(UsageError, match=name):
        Run.open(TrainingRun(RunRequest(draft, trainer.root, result.directory)))


@pytest.mark.parametrize("driver", [True, False])
def test_without_nvml_a_gpu_is_refused_only_if_there_is_no_driver(
    monkeypatch: pytest.MonkeyPatch, driver: bool
) -> None:
    """Virtual GPUs and WSL2 may have CUDA without NVML: only torch knows."""

    class Missing:
        @staticmethod
        def nvmlInit() -> None:  # noqa: N802
            raise OSError("NVML library not found")

    monkeypatch.setattr(request_module, "Nvml", lambda: Nvml(Missing))
    monkeypatch.setattr(
        request_module, "CUDA_DRIVER", None if driver else "libnothing.so"
    )  # None: this process
    draft = read(sets=("run.device=cuda:63",))
    if driver:
        assert request_module.preflight(draft, use_torch=False).run.device == "cuda:63"
    with pytest.raises(ConfigError, match="cuda:63"):
        request_module.preflight(draft, use_torch=driver)


# Steering it


def test_pause_checkpoint_evaluate_resume_and_stop_through_the_socket(trainer: Trainer) -> None:
    with trainer.beside(*trainer.ndd, *ENDLESS, "log.every_steps=1", "log.window_s=0.02") as run:
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
    assert [mark.step for kind in ("pause", "resume") for mark in result.marks(kind)] == [at, at]
    assert [mark.step for mark in result.marks("checkpoint")][:2] == [at, at]
    assert result.checkpoints[-1] == run.end.step == result.snapshot.step
    # The pause is in no window, what was done in it is.
    total = result.closed_ns()
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

    result = trainer.train(*trainer.ndd, *EVERY_STEP, *ENDLESS, steer=steer)
    assert (result.end.status, result.end.exit_status) == ("interrupted", 130)
    assert result.checkpoints == [result.end.step]
    result.closed_ns()


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
        *trainer.ndd, *ENDLESS, "evaluate.every_steps=10", steer=lambda run, _: runs.append(run)
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

    result = trainer.train(*trainer.ndd, *EVERY_STEP, *ENDLESS, steer=steer)
    assert (result.end.status, result.end.exit_status) == (status, exit_status)
    assert "enough" in result.end.reason and "later" not in result.end.reason
    assert result.end.checkpoint == f"step-{result.end.step:08d}"


@pytest.mark.parametrize("status", ["training", "evaluating"])
def test_a_stop_at_once_leaves_no_checkpoint_also_in_the_middle_of_an_evaluation(
    trainer: Trainer, status: str
) -> None:
    def steer(run: Run, event: Event) -> None:
        snapshot = run.recorder.snapshot()
        if snapshot.status == status and snapshot.step >= 2:
            run.control.request("kill", "enough")

    # One item a batch, 3000 of them: long enough to be asked in the middle of it.
    long = (
        "workload.samples=12000",
        "workload.eval_fraction=0.45",
        "batch.micro=2",
        "evaluate.every_steps=4",
    )
    result = trainer.train(*trainer.ndd, *ENDLESS, *EVERY_STEP, *long, steer=steer)
    assert (result.end.status, result.end.checkpoint, result.checkpoints) == ("stopped", None, [])
    assert result.marks("evaluation") == []


def test_a_stop_is_heard_while_it_still_prepares(trainer: Trainer) -> None:
    run = trainer.open(*trainer.ndd, *ENDLESS)
    run.control.request("stop", "changed my mind")
    end = run.execute()
    run.close()
    assert (end.status, end.step, end.exit_status) == ("stopped", 0, 0)
    assert Result(run.directory).windows == []
