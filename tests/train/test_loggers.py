"""Weights & Biases and MLflow: what their processes do to a run (nothing), and what the real packages contain."""

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
from tests.waiting import until
from train_help import EVERY_STEP, Result, Trainer

from ndd_engine.config import read
from ndd_engine.errors import UsageError
from ndd_engine.train import logger_process, loggers
from ndd_engine.train.logger_sinks import tracking_uri

# A package `wandb` that writes what it is told to a file, and fails as a test wants it.
FAKE = """
import json, os, signal, time
from pathlib import Path

class Settings:
    model_fields = {"console": 0, "silent": 0}
    def __init__(self, **more):
        assert set(more) <= set(self.model_fields)

def told(**what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(what) + chr(10))

class Run:
    class config:
        update = staticmethod(lambda values, allow_val_change: told(config=values))
    def define_metric(self, name, step_metric=None):
        pass
    def log(self, values):
        fail = os.environ.get("FAIL", "")
        if values["step"] >= 3:
            if fail == "raise":
                raise OSError(28, "No space left on device")
            if fail == "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            if fail == "hang":
                told(pid=os.getpid())
                time.sleep(1000)
        told(log=values)
    def finish(self, exit_code):
        print("noise", flush=True)
        if os.environ.get("FAIL") == "slow":
            told(pid=os.getpid())
            time.sleep(1000)
        told(finish=exit_code)

def init(**more):
    if os.environ.get("FAIL") == "init":
        raise ValueError("no key")
    told(init={key: value for key, value in more.items() if key != "settings"}, pid=os.getpid())
    return Run()
"""
ON = ("log.wandb=offline", *EVERY_STEP)


class Told:
    """What the fake package was told."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self, key: str) -> list[Any]:
        import json

        if not self.path.exists():
            return []
        every = map(json.loads, self.path.read_text().splitlines())
        return [each[key] for each in every if key in each]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(package.parent), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    monkeypatch.setattr(loggers, "installed", lambda name: True)
    return Told(tmp_path / "told")


def warnings(result: Result) -> list[str]:
    return [mark.text for mark in result.marks("warning") if "writing to" in mark.text]


@pytest.mark.long
def test_a_resume_continues_the_same_run_of_the_logger(trainer: Trainer, told: Told) -> None:
    first = trainer.train(
        *trainer.ndd, *ON, "run.max_steps=6", "log.project=thesis", "evaluate.every_steps=3"
    )
    second = trainer.train("run.max_steps=9", resume=first)
    assert warnings(second) == [] and second.end.status == "done"
    one, other = told.all("init")
    assert (
        one == other and one["mode"] == "offline" and one["project"] == "thesis" and one["resume"] == "allow"
    )
    assert one["name"] == first.directory.name and one["dir"] == str(first.directory.path / "loggers")
    values = told.all("log")
    losses = {each["step"]: each["train/loss"] for each in values if "train/loss" in each}
    assert losses == pytest.approx(second.losses) and sorted(losses) == list(range(1, 10))
    assert [each["step"] for each in values if "evaluation/rmse" in each] == [3, 6, 9]
    assert told.all("finish") == [0, 0]
    assert told.all("config")[1]["run"]["max_steps"] == 9
    assert "noise" in (first.directory.path / "loggers" / "wandb.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fail", "why"),
    [("init", "ValueError: no key"), ("raise", "No space left on device"), ("die", "SIGSEGV")],
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
@pytest.mark.parametrize("fail", ["hang", "slow"])
def test_a_logger_that_hangs_is_killed_at_the_end(
    trainer: Trainer, told: Told, monkeypatch: pytest.MonkeyPatch, fail: str
) -> None:
    monkeypatch.setenv("FAIL", fail)
    monkeypatch.setattr(logger_process, "PATIENCE_S", 1.0)
    monkeypatch.setattr(loggers, "PATIENCE_S", 3.0)
    result = trainer.train(*trainer.ndd, *ON, "run.max_steps=12")
    assert result.end.status == "done"
    assert len(warnings(result)) == 1
    until(lambda: not any(psutil.pid_exists(pid) for pid in told.all("pid")))


@pytest.mark.long
def test_a_logger_that_reads_nothing_more_is_given_up(
    trainer: Trainer, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger_process, "HANG_S", 0.3)
    monkeypatch.setattr(logger_process, "PATIENCE_S", 0.3)
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
        process.wait(30)
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
    assert list(loggers.missing(read(None, ("log.mlflow=http://localhost:5000",)).resolve())) == []


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


def test_the_real_mlflow_on_a_full_disk_costs_one_warning(
    trainer: Trainer, small_disk: Callable[[int], Path], connections: Callable[[], int]
) -> None:
    pytest.importorskip("sqlalchemy", reason="mlflow is not installed: make test-extras")
    pytest.importorskip("mlflow.tracking", reason="mlflow is not installed: make test-extras")
    disk = small_disk(64)
    result = trainer.train(*trainer.ndd, f"log.mlflow={disk}/results.db", *EVERY_STEP, "run.max_steps=6")
    assert (result.end.status, result.end.step) == ("done", 6)
    assert len(warnings(result)) == 1 and "MLflow" in warnings(result)[0]
