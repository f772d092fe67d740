"""Profiler captures of real runs on the CPU: the planted cause is found, the training is not disturbed."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_run import close
from tests.waiting import until
from train_help import EVERY_STEP, Result, Trainer

from ndd_engine.errors import UsageError
from ndd_engine.measure import capture_schedule as bursts
from ndd_engine.measure.capture import ProfilerCapture
from ndd_engine.record.channel import send
from ndd_engine.record.events import Event, KernelsEvent, WindowEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.train.run import Run
from ndd_engine.workloads.eeg import Eeg, SampleWindows

QUIET = (
    "evaluate.every_epochs=0",
    "checkpoint.every_epochs=0",
    "checkpoint.every_minutes=0",
    "evaluate.at_end=false",
)
LONG = (*QUIET, "run.epochs=100000", "log.every_steps=1", "log.window_s=0.02")


def steps(count: int) -> tuple[str, ...]:
    return (*QUIET, "run.epochs=100000", f"run.max_steps={count}")


def kernels(result: Result) -> list[KernelsEvent]:
    found = [event for event in result.events if isinstance(event, KernelsEvent)]
    for event in found:
        assert event.busy_ns + sum(event.idle_ns.values()) == event.wall_ns
    return found


def shares(event: KernelsEvent) -> dict[str, float]:
    return {cause: ns / event.wall_ns for cause, ns in event.idle_ns.items()}


def slow(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
    plain = getattr(owner, name)

    def sleeping(self: Any, *args: Any) -> Any:
        time.sleep(seconds)
        return plain(self, *args)

    monkeypatch.setattr(owner, name, sleeping)


def test_a_burst_every_so_many_steps(trainer: Trainer) -> None:
    result = trainer.train(*trainer.ndd, *steps(30), "log.kernels_every=10")
    assert result.end is not None
    assert result.end.status == "done"
    found = kernels(result)
    # One step is left out at the beginning of each; the last one would begin at the end.
    assert [(event.step, event.steps, event.method) for event in found] == [
        (14, 3, "operators"),
        (24, 3, "operators"),
    ]
    for event in found:
        assert event.launches >= event.steps
        assert event.copy_ns == 0
        assert event.top
        names, spent, counts = zip(*event.top, strict=True)
        assert all("::" in name for name in names)
        assert list(spent) == sorted(spent, reverse=True)
        assert sum(spent) <= event.busy_ns * 1.001 + 1000
        assert min(counts) >= 1
    notes = [mark.text for mark in result.marks("note") if "operators" in mark.text]
    assert len(notes) == 2
    assert result.marks("warning") == []
    close(result)


def test_the_burst_is_a_window_of_its_own_that_spoils_no_rate(trainer: Trainer) -> None:
    result = trainer.train(*trainer.ndd, *steps(30), "log.kernels_every=10", "log.window_s=60")
    (first, second) = [window for window in result.windows if window.profiled]
    assert [(first.step, first.steps), (second.step, second.steps)] == [(14, 4), (24, 4)]
    assert [window.step for window in result.windows if not window.profiled and window.steps] == [10, 20, 30]
    assert result.snapshot.totals.steps == 30 - 8
    assert sum(window.steps for window in result.windows) == 30
    close(result)


def test_training_is_the_same_with_bursts(trainer: Trainer) -> None:
    plain = trainer.train(*trainer.ndd, *steps(20), *EVERY_STEP)
    capture = trainer.train(*trainer.ndd, *steps(20), *EVERY_STEP, "log.kernels_every=5")
    assert len(kernels(capture)) == 3
    assert capture.losses == plain.losses


def test_sleep_between_operators_shows_as_launch_gaps(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, Eeg, "loss", 0.1)
    (event,) = kernels(trainer.train(*trainer.ndd, *steps(10), "log.kernels_every=5"))
    found = shares(event)
    assert event.wall_ns >= 3 * 100_000_000
    assert event.idle_ns["launch gaps"] >= 3 * 100_000_000
    assert found["launch gaps"] > 0.5
    assert found.get("waiting for data", 0) < 0.3


def test_a_slow_data_set_shows_as_waiting_for_data(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, SampleWindows, "batch", 0.1)
    (event,) = kernels(trainer.train(*trainer.ndd, *steps(10), "log.kernels_every=5"))
    assert event.idle_ns["waiting for data"] >= 3 * 100_000_000
    assert shares(event)["waiting for data"] > 0.5
    assert shares(event).get("launch gaps", 0) < 0.3


@pytest.mark.long
def test_operators_that_make_the_batch_are_not_the_models_work(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, big = SampleWindows.batch, torch.randn(700, 700)

    def heavy(self: SampleWindows, indices: torch.Tensor) -> Any:
        for _ in range(8):
            big @ big
        return plain(self, indices)

    monkeypatch.setattr(SampleWindows, "batch", heavy)
    (event,) = kernels(trainer.train(*trainer.ndd, *steps(10), "log.kernels_every=5"))
    assert shares(event)["waiting for data"] > 0.4
    assert "aten::matmul" not in [name for name, _, _ in event.top]


def test_the_snapshot_takes_the_burst_instead_of_the_clock(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, Eeg, "loss", 0.05)
    seen: list[Snapshot] = []
    result = trainer.train(
        *trainer.ndd, *steps(16), "log.kernels_every=8", "log.window_s=0.1",
        steer=lambda run, _: seen.append(run.recorder.snapshot()),
    )  # fmt: skip
    before = next(shot for shot in seen if shot.step == 8)
    # The host clock counts the whole loss as work; the capture does not.
    assert before.idle.method == "host"
    assert before.idle.share is not None
    after = result.snapshot.idle
    assert (after.method, after.step) == ("operators", 12)
    assert after.share is not None
    assert after.share > before.idle.share + 0.2
    assert after.share == pytest.approx(sum(share for _, share in after.causes))


def test_evaluations_and_checkpoints_stay_out_of_a_burst(trainer: Trainer) -> None:
    result = trainer.train(
        *trainer.ndd, *steps(14), "evaluate.every_steps=3", "checkpoint.every_steps=4", "log.kernels_every=1",
        "log.kernels_steps=20",
    )  # fmt: skip
    found = kernels(result)
    # Due after 3, 4, 6, 8, 9, 12: each capture ends there, with the steps it has.
    assert {event.step for event in found} <= {3, 4, 6, 8, 9, 12, 14}
    assert len(found) >= 4
    assert all("evaluation or checkpoint" not in event.idle_ns for event in found)
    assert not any("evaluate" in window.phases for window in result.windows if window.profiled)
    assert len(result.marks("evaluation")) == 4
    close(result)


def test_a_burst_where_something_is_due_after_every_step(trainer: Trainer) -> None:
    result = trainer.train(*trainer.ndd, *steps(6), "checkpoint.every_steps=1", "log.kernels_every=2")
    assert [event.steps for event in kernels(result)][:1] == [1]


def test_a_burst_that_was_asked_for_through_the_socket(trainer: Trainer) -> None:
    with trainer.beside(*trainer.ndd, *LONG) as run:
        result = Result(run.directory)
        until(lambda: run.recorder.snapshot().step > 10)
        assert kernels(result) == []
        send(run.directory.control_socket, "kernels")
        until(lambda: kernels(result))
        at = kernels(result)[0].step
        until(lambda: run.recorder.snapshot().step > at + 10)
        assert len(kernels(result)) == 1


def test_a_paused_run_takes_the_burst_when_it_goes_on(trainer: Trainer) -> None:
    with trainer.beside(*trainer.ndd, *LONG) as run:
        result = Result(run.directory)
        until(lambda: run.recorder.snapshot().step > 10)
        run.control.request("pause")
        until(lambda: run.recorder.snapshot().status == "paused")
        at = run.recorder.snapshot().step
        run.control.request("kernels")
        time.sleep(0.3)
        assert kernels(result) == []
        run.control.request("resume")
        until(lambda: kernels(result))
        (event,) = kernels(result)
        assert event.step > at
        # The pause is in no window and in no capture.
        assert event.steps == 3


def test_a_stop_in_the_middle_of_a_burst(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Run] = []
    plain = ProfilerCapture.begin

    def begin(self: ProfilerCapture) -> None:
        plain(self)
        made[0].control.request("stop", "enough")

    monkeypatch.setattr(ProfilerCapture, "begin", begin)
    result = trainer.train(
        *trainer.ndd, *steps(50), "log.kernels_every=5", steer=lambda run, _: made.append(run)
    )
    assert result.end is not None
    assert result.end.status == "stopped"
    assert result.checkpoints[-1] == result.end.step
    # The profiler is free again.
    assert len(kernels(trainer.train(*trainer.ndd, *steps(10), "log.kernels_every=5"))) == 1


def test_a_crash_in_the_middle_of_a_burst_frees_the_profiler(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plain = ProfilerCapture.begin

        def begin(self: ProfilerCapture) -> None:
            plain(self)
            patch.setattr(Eeg, "loss", lambda *_: 1 / 0)

        patch.setattr(ProfilerCapture, "begin", begin)
        result = trainer.train(*trainer.ndd, *steps(50), "log.kernels_every=5")
        assert result.end is not None
        assert result.end.status == "failed"
        assert "ZeroDivisionError" in result.end.reason
    assert len(kernels(trainer.train(*trainer.ndd, *steps(10), "log.kernels_every=5"))) == 1


@pytest.mark.parametrize("where", ["__init__", "start", "end"])
def test_a_profiler_that_fails_is_a_warning(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no tracing \x1b[2J here")

    monkeypatch.setattr(ProfilerCapture, where, fail)
    result = trainer.train(*trainer.ndd, *steps(30), "log.kernels_every=5")
    assert result.end is not None
    assert (result.end.status, result.end.step) == ("done", 30)
    assert kernels(result) == []
    # Once: it would fail the same way every time.
    (warning,) = result.marks("warning")
    assert warning.text == "the profiler capture failed: no tracing \\x1b[2J here"
    assert result.windows[-1].profiled is False
    close(result)


def trace_events(text: str) -> list[str]:
    return [event.get("name", "") for event in json.loads(text)["traceEvents"]]


def test_the_newest_burst_is_written_as_a_trace(trainer: Trainer, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    result = trainer.train(*trainer.ndd, *steps(16), "log.kernels_every=8", f"log.trace={path}")
    (event,) = kernels(result)
    assert event.trace == str(path)
    names = trace_events(path.read_text())
    assert "aten::mm" in names or "aten::linear" in names
    # Phases are shown above the operators.
    assert {"ndd: data_wait", "ndd: forward", "ndd: backward", "ndd: optimizer"} <= set(names)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".trace")] == []


@pytest.mark.long
def test_a_trace_alone_takes_one_burst(trainer: Trainer, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    for count, expected in ((60, bursts.FIRST_TRACE + 4), (6, 6), (2, 2)):
        result = trainer.train(*trainer.ndd, *steps(count), f"log.trace={path}")
        assert [event.step for event in kernels(result)] == [expected]
        assert "ndd: forward" in trace_events(gzip.decompress(path.read_bytes()).decode())
        path.unlink()


def test_a_trace_that_cannot_be_written_is_refused_before_training(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path, why in (
        (tmp_path / "no" / "trace.json", "does not exist"),
        (tmp_path / "folder", "is a folder"),
    ):
        with pytest.raises(UsageError, match=r"log\.trace") as caught:
            trainer.open(*trainer.ndd, f"log.trace={path}")
        assert str(path)[:40] in str(caught.value)  # a long one is cut
        assert why in str(caught.value)
    assert not trainer.root.exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_trace_that_fails_later_is_a_warning(trainer: Trainer, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()

    def steer(_: Run, event: Event) -> None:
        if isinstance(event, WindowEvent) and folder.exists():
            folder.rmdir()

    result = trainer.train(
        *trainer.ndd,
        *steps(300),  # the folder is removed in another thread, at the latest some steps after the first one
        *EVERY_STEP,
        "log.kernels_every=200",
        f"log.trace={folder}/t.json",
        steer=steer,
    )
    assert result.end is not None
    assert result.end.status == "done"
    (event,) = kernels(result)
    assert event.trace is None
    (warning,) = result.marks("warning")
    assert str(folder) in warning.text
