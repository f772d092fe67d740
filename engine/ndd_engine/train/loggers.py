"""The loggers that a configuration asks for: TensorBoard, Weights & Biases, MLflow. All are extras."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ndd_engine.config import Config
from ndd_engine.record.events import Event, RunEvent

from .logger_process import PATIENCE_S, ProcessSink
from .scalars import Aside, Scalars, Sink

# Folders of TensorBoard's files and of what the other loggers keep, in the folder of the run.
TENSORBOARD = "tensorboard"
LOGGERS = "loggers"
# Seconds until a scalar is flushed to TensorBoard's file.
FLUSH_S = 15
# Seconds that the end of a run waits for TensorBoard's files.
FILES_S = 5.0
# Key of [log] -> (packages that it needs, value that switches it off).
_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "tensorboard": (("tensorboard",), "false"),
    "wandb": (("wandb",), '"off"'),
    "mlflow": (("mlflow",), '"none"'),
}
# What MLflow needs to write a database file itself, without a server.
_DATABASE = ("sqlalchemy", "alembic")

# Creates a torch.utils.tensorboard.SummaryWriter from (folder, first step that is repeated, or None).
Open = Callable[[Path, int | None], Any]


def enabled(config: Config) -> tuple[str, ...]:
    """The keys of [log] whose loggers are switched on."""
    log = config.log
    on = {"tensorboard": log.tensorboard, "wandb": log.wandb != "off", "mlflow": log.mlflow is not None}
    return tuple(key for key, value in on.items() if value)


def missing(config: Config) -> Iterator[tuple[str, object, str]]:
    """(key of [log], its value, what to install) for each enabled logger that is not installed. Imports nothing."""
    for key in enabled(config):
        packages, off = _NEEDS[key]
        if key == "mlflow" and database(config.log.mlflow or ""):
            packages += _DATABASE
        if lacking := [package for package in packages if not installed(package)]:
            text = f"needs the package {' and '.join(lacking)}: pip install 'ndd-console[{key}]', or set it to {off}"
            yield key, getattr(config.log, key), text


def installed(package: str) -> bool:
    """Whether a package is installed; does not import it. A folder of that name, as W&B makes one, does not count."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None


def database(uri: str) -> bool:
    """Whether MLflow writes to a database by itself: a path of a file, or a URI such as sqlite:///mlflow.db."""
    return not uri.startswith(("http:", "https:", "file:", "databricks", "uc:"))


class TensorBoard:
    """A sink that writes TensorBoard's event files."""

    name = "TensorBoard"

    def __init__(self, folder: Path, opener: Open | None = None) -> None:
        self._folder = folder
        self._opener = opener
        self._writer: Any = None

    def prepare(self) -> None:
        if self._opener is None:
            importlib.import_module("torch.utils.tensorboard")
            self._opener = summary_writer

    def open(self, run: RunEvent) -> None:
        assert self._opener is not None
        # Viewers drop what an earlier process wrote for the steps that are repeated.
        again = None if run.resumed_step is None else run.resumed_step + 1
        self._writer = self._opener(self._folder, again)

    def add(self, t: float, step: int, values: dict[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step, t)

    def close(self, status: str | None) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.flush()
            writer.close()

    def abandon(self) -> None:
        pass  # nothing can interrupt a file system that hangs; the thread is a daemon


def summary_writer(folder: Path, purge_step: int | None) -> Any:
    """Create torch's writer. Raises whatever a broken installation or a full disk raises."""
    module = importlib.import_module("torch.utils.tensorboard")
    return module.SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_S)


def sinks(config: Config, folder: Path) -> list[tuple[Sink, float]]:
    """The sinks of the enabled loggers, each with the seconds that the end of a run waits for it."""
    log, found = config.log, list[tuple[Sink, float]]()
    project = log.project or config.workload.name.partition(":")[0]
    if log.tensorboard:
        found.append((TensorBoard(folder / TENSORBOARD), FILES_S))
    if log.wandb != "off":
        settings = {"mode": log.wandb, "project": log.project, "default_project": project}
        found.append((ProcessSink("wandb", "Weights & Biases", folder / LOGGERS, settings), PATIENCE_S))
    if log.mlflow is not None:
        settings = {"uri": log.mlflow, "project": project}
        found.append((ProcessSink("mlflow", "MLflow", folder / LOGGERS, settings), PATIENCE_S))
    return found


class Loggers:
    """The enabled loggers of a run, as one listener. `prepare` before training, `close` at the end."""

    def __init__(self, config: Config, folder: Path, put: Callable[[Event], None]) -> None:
        self._scalars: list[Scalars] = []
        self._asides: list[tuple[Aside, float]] = []
        for sink, patience_s in sinks(config, folder):
            scalars = Scalars(sink, put)
            self._scalars.append(scalars)
            self._asides.append((Aside(scalars), patience_s))

    def __call__(self, t: float, event: Event) -> None:
        for aside, _ in self._asides:
            with contextlib.suppress(Exception):
                aside(t, event)

    @property
    def names(self) -> str:
        """For display: "TensorBoard, MLflow"."""
        return ", ".join(scalars.sink.name for scalars in self._scalars)

    def prepare(self) -> None:
        """Import what the loggers need; call it after torch is imported. Never raises an Exception."""
        for scalars in self._scalars:
            scalars.prepare()

    def close(self) -> None:
        """Finish all loggers, at the same time; gives up on those that take too long. Safe to call twice."""
        begin = time.monotonic()
        for aside, _ in self._asides:
            aside.finish()
        for aside, patience_s in self._asides:
            aside.close(max(begin + patience_s - time.monotonic(), 0.1))
