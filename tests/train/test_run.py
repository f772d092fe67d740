"""A run from its configuration to its end: its record adds up, and events happen at the right steps."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S
from train_help import EVERY_STEP, OWN, Result, Trainer, Written, spoiled

from ndd_engine.config import read
from ndd_engine.record import file as record_file
from ndd_engine.record.events import EndEvent, Event, MarkEvent, RunEvent, WindowEvent, parse
from ndd_engine.run import Run
from ndd_engine.train.checkpoint import CheckpointStore
from ndd_engine.train.request import RunRequest

STEPS_PER_EPOCH = 22  # of Trainer.ndd
ENDLESS = ("run.epochs=100000",)


def close(result: Result) -> int:
    """Checks that every window of a run closes exactly; returns the nanoseconds of all of them."""
    assert result.windows
    for window in result.windows:
        phases = {name: figures["host_ns"] for name, figures in window.phases.items() if "/" not in name}
        assert sum(phases.values()) == window.wall_ns
        assert all(ns >= 0 for ns in phases.values())
    return sum(window.wall_ns for window in result.windows)


def test_a_run_is_done_and_everything_it_did_is_in_its_record(trainer: Trainer) -> None:
    result = trainer.train(*trainer.ndd, *EVERY_STEP, "run.epochs=2")
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
    total = close(result)
    snapshot = result.snapshot
    assert (snapshot.status, snapshot.step, snapshot.progress) == ("done", 44, 1.0)
    assert (snapshot.items, snapshot.tokens) == (44 * 16, 44 * 16 * 8)
    assert snapshot.elapsed_s == pytest.approx(total * 1e-9)
    assert [window.step for window in result.windows if window.steps] == list(range(1, 45))
    assert set(result.losses) == set(range(1, 45))
    assert [mark.step for mark in result.marks("epoch")] == [22, 44]
    steps = {window.step: (window.epoch, window.epoch_step) for window in result.windows if window.steps}
    assert (steps[1], steps[21], steps[22], steps[23]) == ((0, 1), (0, 21), (1, 0), (1, 1))
    # The socket is gone, and the lock is free.
    assert not result.directory.control_socket.exists()
    assert result.directory.live_owner() is None


def test_the_configuration_is_kept_as_resolved(trainer: Trainer) -> None:
    sets = (*trainer.ndd, "run.max_steps=2")
    result = trainer.train(*sets)
    assert read(result.directory.config).resolve() == read(None, sets).resolve()
    assert result.identity.config == read(None, sets).resolve().model_dump(mode="json")


def test_windows_follow_one_another_without_a_gap(trainer: Trainer) -> None:
    result = trainer.train(
        *trainer.ndd,
        *ENDLESS,
        "run.max_steps=300",
        "log.every_steps=1",
        "log.window_s=0.02",
        "evaluate.every_steps=50",
    )
    close(result)
    windows = result.windows
    assert sum(window.steps for window in windows) == 300
    assert sum(window.items for window in windows) == 300 * 16
    assert 2 < len([window for window in windows if window.steps]) < 300
    lines = [item for item in map(parse, result.directory.events.read_bytes().splitlines()) if item]
    ends = [t for t, event in lines if isinstance(event, WindowEvent)]
    # From the end of the first window to the end of the last, by the calendar's clock.
    assert sum(window.wall_ns for window in windows[1:]) * 1e-9 == pytest.approx(ends[-1] - ends[0], abs=0.2)
    names = {name for window in windows for name in window.phases}
    assert names >= {
        "data_wait",
        "forward",
        "loss",
        "backward",
        "optimizer",
        "zero_grad",
        "log",
        "evaluate",
        "checkpoint",
    }


def test_evaluations_and_checkpoints_come_at_their_steps(trainer: Trainer) -> None:
    result = trainer.train(
        *trainer.ndd, "run.max_steps=50", "evaluate.every_steps=10", "evaluate.every_epochs=1",
        "checkpoint.every_steps=15", "checkpoint.every_epochs=2", "checkpoint.keep=20", "checkpoint.every_minutes=0",
    )  # fmt: skip
    assert [mark.step for mark in result.marks("evaluation")] == [10, 20, 22, 30, 40, 44, 50]
    assert [mark.step for mark in result.marks("checkpoint")] == [15, 30, 44, 45, 50]
    assert result.checkpoints == [15, 30, 44, 45, 50]
    snapshot = result.snapshot
    assert [evaluation.step for evaluation in snapshot.evaluations] == [10, 20, 22, 30, 40, 44, 50]
    best = min(snapshot.evaluations, key=lambda each: each.metrics["rmse"])
    assert snapshot.best == best
    statuses = [mark.data["status"] for mark in result.marks("status")]
    assert statuses[:4] == ["evaluating", "training", "checkpointing", "training"]


@pytest.mark.long
def test_the_checkpoint_at_the_end_carries_the_metric_of_the_end(trainer: Trainer) -> None:
    for more in ((), ("checkpoint.every_steps=5",)):
        result = trainer.train(*trainer.ndd, "run.max_steps=10", *more)
        (evaluation,) = result.snapshot.evaluations
        newest = CheckpointStore(result.directory.checkpoints, 9).all()[-1]
        assert (newest.step, newest.metric) == (10, evaluation.metrics["rmse"])


def test_what_is_switched_off_does_not_happen(trainer: Trainer) -> None:
    result = trainer.train(
        *trainer.ndd, "run.max_steps=25", "evaluate.every_epochs=0", "evaluate.at_end=false",
        "checkpoint.every_epochs=0", "checkpoint.at_end=false", "checkpoint.every_minutes=0",
    )  # fmt: skip
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

    result = trainer.train(
        *trainer.ndd, *ENDLESS, "checkpoint.every_epochs=0", "checkpoint.at_end=false",
        "checkpoint.every_minutes=0.0005", "log.window_s=0.01", "evaluate.every_epochs=0", steer=steer,
    )  # fmt: skip
    assert len(result.marks("checkpoint")) >= 2
    assert len(result.checkpoints) <= 3


def test_another_seed_gives_another_run(trainer: Trainer) -> None:
    common = (*trainer.ndd, *EVERY_STEP, "run.max_steps=3")
    first, other = (trainer.train(*common, f"run.seed={seed}") for seed in (1, 2))
    assert not set(first.losses.values()) & set(other.losses.values())


@pytest.mark.parametrize(
    ("sets", "steps", "epochs"),
    [
        (("run.epochs=3", "run.max_steps=10"), 10, 1),
        (("run.epochs=1", "run.max_steps=100"), STEPS_PER_EPOCH, 1),
        (("run.epochs=5", "run.max_steps=30"), 30, 2),
    ],
)
def test_a_run_ends_at_whichever_comes_first(
    trainer: Trainer, sets: tuple[str, ...], steps: int, epochs: int
) -> None:
    result = trainer.train(*trainer.ndd, *sets)
    assert (result.end.status, result.end.step) == ("done", steps)
    identity = result.identity
    assert (identity.total_steps, identity.epochs, identity.steps_per_epoch) == (
        steps,
        epochs,
        STEPS_PER_EPOCH,
    )


def test_an_epoch_leaves_out_the_items_that_fill_no_step(trainer: Trainer) -> None:
    result = trainer.train(*trainer.ndd, "batch.micro=10", "batch.accumulation=4", "run.epochs=2")
    # 352 windows: 35 micro-batches, 8 whole steps.
    assert result.identity.steps_per_epoch == 8
    assert result.end.step == 16


def test_an_error_in_the_model_is_told_with_step_and_phase(trainer: Trainer, written: Written) -> None:
    error = r'raise RuntimeError("shapes \x1b[31mdo not match\nsecond line")'
    sets = (*written(spoiled(loss=f"if step == 7: {error}")), *OWN)
    result = trainer.train(*sets, "checkpoint.every_steps=4", "evaluate.every_epochs=0")
    end = result.end
    assert (end.status, end.exit_status, end.step) == ("failed", 1, 6)
    assert "RuntimeError at step 7 in loss" in end.reason and r"\x1b[31m" in end.reason
    assert (
        "written_" in end.reason
        and "console.log" in end.reason
        and f"--resume {result.directory.name}" in end.reason
    )
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


def test_a_resume_from_a_socket_path_too_long_to_bind_still_trains(trainer: Trainer, tmp_path: Path) -> None:
    trainer.root = tmp_path / ("long" * 30) / "runs"
    result = trainer.train(*trainer.ndd, "run.max_steps=2")
    assert result.end.status == "done"


def test_the_record_begins_with_who_runs_what(trainer: Trainer) -> None:
    before = time.time()
    result = trainer.train(*trainer.chartext, "run.max_steps=1")
    identity = next(event for event in result.events if isinstance(event, RunEvent))
    assert (identity.workload, identity.item, identity.token, identity.tokens_per_item) == (
        "chartext",
        "window",
        "character",
        16,
    )
    assert (identity.items_per_step, identity.device, identity.gpu, identity.threads) == (8, "cpu", None, 1)
    assert identity.versions.keys() >= {"ndd", "python", "torch", "system"}
    assert (identity.resumed_step, identity.resumed_from) == (None, None)
    first = parse(result.directory.events.read_bytes().splitlines()[0])
    assert first is not None
    assert before - 1 < first[0] < time.time() + 1
    assert RunRequest(read(), trainer.root).resume is None


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
