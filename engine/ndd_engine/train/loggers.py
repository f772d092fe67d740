"""The loggers that a configuration asks for: TensorBoard, Weights & Biases, MLflow. All are extras.

Each is a process that follows the record, see `logger_process`: training neither waits for one nor hands it anything.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ndd_engine.config.schema import LogSection
from ndd_engine.errors import said, shortened
from ndd_engine.record.events import MarkEvent
from ndd_engine.record.file import Recorder
from ndd_engine.record.rundir import RunDir

# Folder of what loggers print and keep, in the folder of the run.
LOGGERS = "loggers"
# Seconds that the end of a run waits for its loggers, for example until everything is uploaded.
PATIENCE_S = 30.0
# Seconds after which a logger that takes no more values is given up.
HANG_S = 120.0
NAMES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "mlflow": "MLflow"}
_MOST_ANSWER = 65536  # bytes
# What MLflow needs to write a database file itself, without a server.
_DATABASE = ("sqlalchemy", "alembic")


def enabled(log: LogSection) -> list[str]:
    """The keys of [log] whose loggers are switched on."""
    on = {"tensorboard": log.tensorboard, "wandb": log.wandb != "off", "mlflow": log.mlflow is not None}
    return [key for key, value in on.items() if value]


def missing(log: LogSection) -> Iterator[tuple[str, object, str]]:
    """(key of [log], its value, what to install) for each enabled logger that is not installed. Imports nothing."""
    for key in enabled(log):
        off = {"tensorboard": "false", "wandb": '"off"', "mlflow": '"none"'}[key]
        packages = (key, *_DATABASE) if key == "mlflow" and database(log.mlflow or "") else (key,)
        if lacking := [package for package in packages if not installed(package)]:
            text = f"needs the package {' and '.join(lacking)}: pip install 'ndd-console[{key}]', or set it to {off}"
            yield key, getattr(log, key), text


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


class Loggers:
    """The processes of the enabled loggers of a run. Start them when its record is open, `close` them at the end."""

    def __init__(self, log: LogSection, run: RunDir, project: str, recorder: Recorder) -> None:
        """project: of Weights & Biases and MLflow, unless the configuration names one."""
        self._loggers: list[Logger] = []
        settings = {
            "mode": log.wandb, "uri": log.mlflow, "project": log.project, "default_project": log.project or project,
        }  # fmt: skip
        for kind in enabled(log):
            try:
                self._loggers.append(Logger(kind, run, settings, recorder))
            except OSError as error:
                _warn(recorder, kind, said(error))

    def close(self) -> None:
        """Wait until all loggers have written what is recorded; gives up after PATIENCE_S. Safe to call twice."""
        deadline = time.monotonic() + PATIENCE_S
        for logger in self._loggers:
            logger.finish()
        for logger in self._loggers:
            logger.wait(max(deadline - time.monotonic(), 0.1))


class Logger:
    """One process. The first failure is a warning in the record, and ends it.

    The process gets its settings on standard input, which is closed at the end. It answers with an empty line while it
    takes values, and at last with {"error": text} or {"done": true}.
    """

    def __init__(self, kind: str, run: RunDir, settings: dict[str, Any], recorder: Recorder) -> None:
        self._kind, self._recorder = kind, recorder
        self._given_up: str | None = None
        folder = run.path / LOGGERS
        folder.mkdir(exist_ok=True)
        self._answers, target = os.pipe()
        try:
            with (folder / f"{kind}.log").open("ab") as log:
                package = str(Path(__file__).parents[2])
                paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
                self._process = subprocess.Popen(
                    # -P: a file of the working folder must not shadow a module of the logger.
                    [sys.executable, "-P", "-m", "ndd_engine.train.logger_process", kind, str(target)],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(target,),
                    env={**os.environ, "PYTHONPATH": paths},
                    start_new_session=True,  # Ctrl-C and a lost terminal are for the run
                )  # fmt: skip
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(target)
        # What an earlier process of the run recorded, it has also logged.
        events, offset = str(run.events.absolute()), run.events.stat().st_size
        given = {"events": events, "offset": offset, "folder": str(folder.absolute()), "settings": settings}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            self._process.stdin.write(json.dumps(given).encode() + b"\n")
            self._process.stdin.flush()
        self._thread = threading.Thread(target=self._watch, name=f"ndd-{kind}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Let the process end when it has read the record to its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the process, and kill it after the timeout."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._kill(f"it has not finished within {PATIENCE_S:.0f} s after the run")
            self._thread.join(1.0)

    def _kill(self, why: str) -> None:
        self._given_up = why
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        """Wait for the end of the process, and report it unless it is as it should be."""
        text, poll = b"", select.poll()
        poll.register(self._answers, select.POLLIN)
        while True:
            if not poll.poll(HANG_S * 1000):
                self._kill(f"it has taken no values for {HANG_S:.0f} s")
            part = os.read(self._answers, 4096)
            if not part:
                break
            text = (text + part).lstrip()[:_MOST_ANSWER]
        os.close(self._answers)
        status = self._process.wait()
        try:
            answer = json.loads(text or b"{}")
        except ValueError:
            answer = {}
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        ended = f"its process ended early ({how}; see {LOGGERS}/{self._kind}.log)"
        if self._given_up is not None or "done" not in answer:
            _warn(self._recorder, self._kind, self._given_up or shortened(str(answer.get("error", ended))))


def _warn(recorder: Recorder, kind: str, why: str) -> None:
    text = f"writing to {NAMES[kind]} failed and stops: {why}; training continues"
    recorder.put(MarkEvent("warning", recorder.snapshot().step, text))
