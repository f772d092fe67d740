"""Profiler captures of real runs on the CPU: the planted cause is found, the training is not disturbed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until
from train_help import ENDLESS, EVERY_STEP, OWN, Result, Trainer, Written, spoiled

from ndd_engine.errors import UsageError
from ndd_engine.measure import capture as bursts
from ndd_engine.measure.capture import ProfilerCapture
from ndd_engine.record.events import Event, KernelsEvent, WindowEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.run.channel import send
from ndd_engine.run.run import Run


def steps(count: int) -> tuple[str, ...]:
    return (*ENDLESS, "checkpoint.every_minutes=0", f"run.max_steps={count}")


def kernels(result: Result) -> list[KernelsEvent]:
    found = [event for event in result.events if isinstance(event, KernelsEvent)]
    for event in found:
        assert event.busy_ns + sum(event.idle_ns.values()) == event.wall_ns
    return found


def test_a_burst_every_so_many_steps_is_a_window_of_its_own(trainer: Trainer) -> None:
    result = trainer.train(*trainer.ndd, *steps(30), "log.kernels_every=10", "log.window_s=60")
    assert result.end.status == "done"
    found = kernels(result)
    # One step is left out at the beginning of each; the last one would begin at the end.
    shown = [(event.step, event.steps, event.method) for event in found]
    assert shown == [(14, 3, "operators"), (24, 3, "operators")]
    for event in found:
        assert event.launches >= event.steps
        assert event.copy_ns == 0
        assert event.top
        names, spent, counts = zip(*event.top, strict=True)
        assert all("::" in name for name in names)
        assert list(spent) == sorted(spent, reverse=True)
        assert sum(spent) <= event.busy_ns * 1.001 + 1000
        assert min(counts) >= 1
    assert len([mark for mark in result.marks("note") if "operators" in mark.text]) == 2
    assert result.marks("warning") == []
    # It spoils no rate.
    assert [(each.step, each.steps) for each in result.windows if each.profiled] == [(14, 4), (24, 4)]
    assert [each.step for each in result.windows if not each.profiled and each.steps] == [10, 20, 30]
    assert result.snapshot.totals.steps == 30 - 8
    result.closed_ns()


@pytest.mark.parametrize("every_s", [1, 0])
def test_a_run_is_captured_by_itself_unless_nothing_is_profiled(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, every_s: int
) -> None:
    monkeypatch.setattr(bursts, "EVERY_NS", 1)
    result = trainer.train(*trainer.ndd, *steps(30), *EVERY_STEP, f"log.profile_every_s={every_s}")
    found = kernels(result)
    assert bool(found) is bool(every_s)
    assert all(event.modules and event.trace is None for event in found)
    assert result.marks("warning") == []
    result.closed_ns()


def test_training_is_the_same_with_bursts(trainer: Trainer) -> None:
    plain = trainer.train(*trainer.ndd, *steps(20), *EVERY_STEP)
    capture = trainer.train(*trainer.ndd, *steps(20), *EVERY_STEP, "log.kernels_every=5")
    assert len(kernels(capture)) == 3
    assert capture.losses == plain.losses


@pytest.mark.parametrize(
    ("source", "cause"),
    [(spoiled(loss="time.sleep(0.1)"), "launch gaps"), (spoiled(data="time.sleep(0.1)"), "waiting for data")],
    ids=["gaps", "data"],
)
def test_a_sleep_shows_as_the_cause_of_idle_time(
    trainer: Trainer, written: Written, source: str, cause: str
) -> None:
    (event,) = kernels(trainer.train(*written(source), *OWN, *steps(10), "log.kernels_every=5"))
    assert event.idle_ns[cause] >= 3 * 100_000_000


def test_the_snapshot_takes_the_burst_instead_of_the_clock(trainer: Trainer, written: Written) -> None:
    seen: list[Snapshot] = []
    sets = (
        *written(spoiled(loss="time.sleep(0.05)")),
        *OWN,
        *steps(16),
        "log.kernels_every=8",
        "log.window_s=0.1",
    )
    result = trainer.train(*sets, steer=lambda run, _: seen.append(run.recorder.snapshot()))
    before = next(shot for shot in seen if shot.step == 8)
    # The host clock counts the whole loss as work; the capture does not.
    assert before.idle.method == "host" and before.idle.share is not None
    after = result.snapshot.idle
    assert (after.method, after.step) == ("operators", 12)
    assert after.share == pytest.approx(sum(share for _, share in after.causes))


def test_evaluations_and_checkpoints_stay_out_of_a_burst(trainer: Trainer) -> None:
    due = ("evaluate.every_steps=3", "checkpoint.every_steps=4")
    result = trainer.train(*trainer.ndd, *steps(14), *due, "log.kernels_every=1", "log.kernels_steps=20")
    found = kernels(result)
    # Due after 3, 4, 6, 8, 9, 12: each capture ends there, with the steps it has.
    assert {event.step for event in found} <= {3, 4, 6, 8, 9, 12, 14}
    assert len(found) >= 4
    assert not any("evaluate" in window.phases for window in result.windows if window.profiled)
    assert len(result.marks("evaluation")) == 4
    result.closed_ns()


def test_a_burst_that_was_asked_for_through_the_socket(trainer: Trainer) -> None:
    with trainer.beside(*trainer.ndd, *ENDLESS, *EVERY_STEP) as run:
        result = Result(run.directory)
        until(lambda: run.recorder.snapshot().step > 10)
        assert kernels(result) == []
        send(run.directory.control_socket, "kernels")
        until(lambda: kernels(result))
        at = kernels(result)[0].step
        until(lambda: run.recorder.snapshot().step > at + 10)
        assert len(kernels(result)) == 1


# The first burst is that of steps 7 to 9.
@pytest.mark.parametrize(
    ("source", "status"),
    [
        (spoiled(after="if step == 8: train.stop('enough')"), "done"),
        (spoiled(loss="if step == 8: 1 / 0"), "failed"),
    ],
    ids=["done", "failed"],
)
def test_an_end_in_the_middle_of_a_burst_frees_the_profiler(
    trainer: Trainer, written: Written, source: str, status: str
) -> None:
    result = trainer.train(*written(source), *OWN, *steps(50), "log.kernels_every=5")
    assert result.end.status == status and result.end.step <= 8
    assert len(kernels(trainer.train(*trainer.ndd, *steps(10), "log.kernels_every=5"))) == 1


@pytest.mark.parametrize("where", ["__init__", "start", "end"])
def test_a_profiler_that_fails_is_a_warning(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no tracing \x1b[2J here")

    monkeypatch.setattr(ProfilerCapture, where, fail)
    result = trainer.train(*trainer.ndd, *steps(30), "log.kernels_every=5")
    assert (result.end.status, result.end.step) == ("done", 30)
    assert kernels(result) == []
    # Once: it would fail the same way every time.
    (warning,) = result.marks("warning")
    assert "\\x1b[2J" in warning.text and warning.text.isprintable()
    assert result.windows[-1].profiled is False
    result.closed_ns()


@pytest.mark.parametrize(("count", "expected"), [(60, bursts.FIRST_TRACE + 4), (2, 2)])
def test_a_trace_alone_takes_one_burst(trainer: Trainer, tmp_path: Path, count: int, expected: int) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_text("old")
    result = trainer.train(*trainer.ndd, *steps(count), f"log.trace={path}")
    assert [(event.step, event.trace) for event in kernels(result)] == [(expected, str(path))]
    # Phases are shown above the operators.
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"ndd: data_wait", "ndd: forward", "ndd: backward", "ndd: optimizer", "aten::linear"} <= names
    assert {each.name for each in tmp_path.iterdir()} <= {path.name, "runs"}


def test_a_trace_that_cannot_be_written_is_refused_before_training(trainer: Trainer, tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "trace.json", tmp_path):
        with pytest.raises(UsageError, match=r"log\.trace"):
            trainer.open(*trainer.ndd, f"log.trace={path}")
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_fails_later_is_a_warning(trainer: Trainer, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()

    def steer(_: Run, event: Event) -> None:
        if isinstance(event, WindowEvent) and folder.exists():
            folder.rmdir()

    # The folder is removed in another thread, at the latest some steps after the first one.
    sets = (*steps(150), *EVERY_STEP, "log.kernels_every=100", f"log.trace={folder}/t.json")
    result = trainer.train(*trainer.ndd, *sets, steer=steer)
    assert result.end.status == "done"
    (event,) = kernels(result)
    assert event.trace is None
    (warning,) = result.marks("warning")
    assert str(folder) in warning.text
