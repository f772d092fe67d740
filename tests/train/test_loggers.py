"""Loggers: what they write, what they do to a run (nothing), and what the real packages contain."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fake_wandb import Told
from tests.records import run_event, window
from tests.tiers import few
from tests.waiting import LIMIT_S, until
from train_help import EVERY_STEP, Result, Trainer

from ndd_engine.config import read
from ndd_engine.errors import UsageError
from ndd_engine.record.events import EndEvent, MarkEvent, MemoryEvent
from ndd_engine.train import loggers
from ndd_engine.train.loggers import Figures, tracking_uri

ON = ("log.wandb=offline", *EVERY_STEP)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told(tmp_path)
    for name, value in told.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(loggers, "installed", lambda name: True)
    return told


def warnings(result: Result) -> list[str]:
    return [mark.text for mark in result.marks("warning") if "writing to" in mark.text]


class Sink:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def open(self, run: Any) -> None:
        self.calls.append("open")

    def add(self, t: float, step: int, values: dict[str, float]) -> None:
        self.calls.append((step, values))

    def close(self, status: str) -> None:
        self.calls.append(status)


def test_what_is_missing_is_not_written() -> None:
    figures = Figures(sink := Sink())
    figures.take(1.0, window(2, loss=1.0))  # of no run
    figures.take(1.0, run_event(device="cuda:0"))
    figures.take(2.0, window(3, loss=float("nan")))
    figures.take(2.0, MemoryEvent(10, 20, 30, 40, None, 0, 0, None, None, None))
    figures.take(2.0, MarkEvent("evaluation", 3, "", {"metrics": {"loss": 2.5, "lost": None}}))
    figures.take(3.0, EndEvent("done", "", 3, 0))
    figures.close()
    assert (sink.calls[0], sink.calls[-1], figures.status) == ("open", "done", "done")
    tags = {tag for step, values in sink.calls[1:-1] for tag in values if step == 3}
    assert {"memory/allocated_bytes", "evaluation/loss", "phase_ms/forward"} <= tags
    assert not tags & {"train/loss", "train/lr", "memory/free_bytes", "evaluation/lost", "idle/share"}


@pytest.mark.long
def test_a_run_and_its_resume_write_their_figures_by_step_into_one_run(trainer: Trainer, told: Told) -> None:
    sets = (*trainer.ndd, *ON, "log.project=thesis", "evaluate.every_steps=3", "clip.max_norm=1.0")
    first = trainer.train(*sets, "run.max_steps=6")
    second = trainer.train("run.max_steps=9", resume=first)
    assert warnings(second) == [] and second.end.status == "done"
    one, other = told.all("init")
    assert one == other and (one["mode"], one["project"], one["resume"]) == ("offline", "thesis", "allow")
    assert one["name"] == first.directory.name and one["dir"] == str(first.directory.path / "loggers")
    values = told.all("log")
    losses = {each["step"]: each["train/loss"] for each in values if "train/loss" in each}
    assert losses == pytest.approx(second.losses) and sorted(losses) == list(range(1, 10))
    assert [each["step"] for each in values if "evaluation/rmse" in each] == [3, 6, 9]
    tags = {tag for each in values for tag in each}
    assert {"train/lr", "train/grad_norm", "speed/items_per_s", "phase_ms/backward", "idle/share"} <= tags
    last = next(event for event in reversed(second.windows) if event.steps)
    (backward,) = {each.get("phase_ms/backward") for each in values if each["step"] == last.step} - {None}
    assert backward == pytest.approx(last.phases["backward"]["host_ns"] * 1e-6 / last.steps)
    assert told.all("finish") == [0, 0]
    assert told.all("config")[1]["run"]["max_steps"] == 9
    assert "noise" in (first.directory.path / "loggers" / "wandb.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fail", "why"),
    few([("init", "ValueError: no key"), ("raise", "No space left on device"), ("die", "SIGSEGV")], 1),
)
def test_a_logger_that_fails_costs_one_warning_and_changes_no_step(
    trainer: Trainer, told: Told, monkeypatch: pytest.MonkeyPatch, fail: str, why: str
) -> None:
    sets = (*trainer.ndd, *EVERY_STEP, "run.max_steps=12")
    plain = trainer.train(*sets)
    monkeypatch.setenv("FAIL", fail)
    result = trainer.train(*sets, "log.wandb=offline")
    assert (result.end.status, result.end.step) == ("done", 12)
    (text,) = warnings(result)
    assert why in text and "\n" not in text
    assert result.losses == plain.losses


@pytest.mark.long
@pytest.mark.parametrize("fail", few(["hang", "slow"], 1))
def test_a_logger_that_hangs_is_killed_at_the_end(
    trainer: Trainer, told: Told, monkeypatch: pytest.MonkeyPatch, fail: str
) -> None:
    monkeypatch.setenv("FAIL", fail)
    monkeypatch.setattr(loggers, "PATIENCE_S", 3.0)
    result = trainer.train(*trainer.ndd, *ON, "run.max_steps=12")
    assert result.end.status == "done"
    assert len(warnings(result)) == 1
    until(lambda: not any(psutil.pid_exists(pid) for pid in told.all("pid")))


@pytest.mark.slow
@pytest.mark.long
def test_a_logger_that_reads_nothing_more_is_given_up(
    trainer: Trainer, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "HANG_S", 4.0)
    with trainer.beside(*trainer.ndd, *ON, "run.max_steps=100000", "run.epochs=1000000") as run:
        until(lambda: told.all("log"))
        (pid,) = told.all("pid")
        os.kill(pid, signal.SIGSTOP)
        result = Result(run.directory)
        until(lambda: warnings(result))
        reached = result.snapshot.step
        until(lambda: result.snapshot.step > reached)  # training continues
    until(lambda: not psutil.pid_exists(pid))


@pytest.mark.long
def test_when_the_run_is_killed_its_logger_ends_the_run(trainer: Trainer, told: Told) -> None:
    process = trainer.process(*trainer.ndd, *ON, "run.epochs=1000000", name="killed")
    try:
        until(lambda: told.all("log") or process.poll() is not None)
        # The signals of a terminal or of a job go to everything that it started.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(told.all("pid")[0], number)
        before = len(told.all("log"))
        until(lambda: len(told.all("log")) > before or process.poll() is not None)
    finally:
        process.kill()
        process.wait(LIMIT_S)
    until(lambda: told.all("finish"))
    assert told.all("finish") == [1]


def test_without_the_package_the_run_is_refused(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "installed", lambda name: name == "mlflow")
    with pytest.raises(UsageError) as caught:
        trainer.open(*trainer.ndd, "log.wandb=online", "log.mlflow=mlflow.db", "log.tensorboard=true")
    text = str(caught.value)
    for package in ("wandb", "mlflow", "tensorboard"):
        assert f"log.{package}" in text and f"'ndd-console[{package}]'" in text
    assert "sqlalchemy and" in text  # without it MLflow has no database
    assert not trainer.root.exists() or list(trainer.root.iterdir()) == []
    assert list(loggers.missing(read(None, ("log.mlflow=http://localhost:5000",)).resolve().log)) == []


@pytest.mark.slow
@pytest.mark.long
def test_an_installation_that_is_broken_costs_one_warning(
    trainer: Trainer, told: Told, tmp_path: Path
) -> None:
    package = tmp_path / "packages" / "tensorboard"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('numpy is of another world')")
    result = trainer.train(*trainer.ndd, *EVERY_STEP, "log.tensorboard=true", "run.max_steps=3")
    assert (result.end.status, result.end.step) == ("done", 3)
    (text,) = warnings(result)
    assert "TensorBoard" in text and "another world" in text


def test_a_folder_named_like_a_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb_of_a_test" / "run-1").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not loggers.installed("wandb_of_a_test") and loggers.installed("pytest")


def test_nothing_is_started_without_the_setting(trainer: Trainer, told: Told) -> None:
    result = trainer.train(*trainer.ndd, *EVERY_STEP, "run.max_steps=3")
    assert told.all("init") == []
    assert not any((result.directory.path / name).exists() for name in ("loggers", "tensorboard"))


def test_a_path_is_a_database_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tracking_uri("mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    for uri in ("http://localhost:5000", "sqlite:///x.db", "databricks"):
        assert tracking_uri(uri) == uri


# The real packages: `make test-extras`.


@pytest.mark.long
def test_the_real_tensorboard_reads_back_what_was_written(trainer: Trainer) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: make test-extras")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on = ("log.tensorboard=true", *EVERY_STEP)
    first = trainer.train(*trainer.ndd, *on, "run.max_steps=6", "checkpoint.every_steps=4")
    result = trainer.train("run.max_steps=9", resume=first, from_step=4)
    assert warnings(result) == []
    read_back = EventAccumulator(str(result.directory.path / "tensorboard"))
    read_back.Reload()
    assert [item.step for item in read_back.Scalars("train/loss")] == list(range(1, 10))
    assert read_back.Scalars("speed/items_per_s")[-1].value > 0


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Every connection of a child that is meant for another host arrives here."""
    server = socket.create_server(("127.0.0.1", 0))
    seen: list[object] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            seen.append(connection)
            connection.close()

    threading.Thread(target=accept, daemon=True).start()
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
    for name in ("NO_PROXY", "no_proxy", "WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return lambda: len(seen)


@pytest.mark.long
def test_the_real_wandb_writes_offline_and_a_resume_continues(
    trainer: Trainer, connections: Callable[[], int]
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: make test-extras")
    first = trainer.train(*trainer.ndd, *ON, "run.max_steps=4", "log.project=thesis")
    result = trainer.train("run.max_steps=7", resume=first)
    assert warnings(result) == [] and connections() == 0
    folder = result.directory.path / "loggers" / "wandb"
    files = sorted(folder.glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1  # one run, in two parts to sync
    content = b"".join(path.read_bytes() for path in files)
    for name in (b"train/loss", b"phase_ms/backward", b"speed/items_per_s", b"thesis", b"evaluation/rmse"):
        assert name in content


@pytest.mark.long
def test_the_real_mlflow_reads_back_what_was_written(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: Callable[[], int]
) -> None:
    reason = "mlflow is not installed: make test-extras"
    tracking = pytest.importorskip("mlflow.tracking", reason=reason)
    pytest.importorskip("sqlalchemy", reason=reason)
    monkeypatch.chdir(tmp_path)
    on = ("log.mlflow=results.db", "log.project=thesis", *EVERY_STEP)
    first = trainer.train(*trainer.ndd, *on, "run.max_steps=4", "optimizer.lr=0.0125")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = trainer.train("run.max_steps=7", resume=first)
    assert warnings(result) == [] and connections() == 0
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/results.db", f"file://{tmp_path}/registry")
    (run,) = client.search_runs([client.get_experiment_by_name("thesis").experiment_id])
    assert run.info.run_name == first.directory.name and run.info.status == "FINISHED"
    assert run.data.params["optimizer.lr"] == "0.0125" and run.data.params["workload.name"] == "eeg"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {item.step: item.value for item in history} == pytest.approx(result.losses)
    assert sorted({item.step for item in history}) == list(range(1, 8))
    assert {"phase_ms/backward", "evaluation/rmse"} <= set(run.data.metrics)


@pytest.mark.long
def test_the_real_mlflow_on_a_full_disk_costs_one_warning(
    trainer: Trainer, small_disk: Callable[[int], Path], connections: Callable[[], int]
) -> None:
    pytest.importorskip("sqlalchemy", reason="mlflow is not installed: make test-extras")
    pytest.importorskip("mlflow.tracking", reason="mlflow is not installed: make test-extras")
    disk = small_disk(64)
    result = trainer.train(*trainer.ndd, f"log.mlflow={disk}/results.db", *EVERY_STEP, "run.max_steps=6")
    assert (result.end.status, result.end.step) == ("done", 6)
    assert len(warnings(result)) == 1 and "MLflow" in warnings(result)[0]
