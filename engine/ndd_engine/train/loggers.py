"""The loggers that a configuration asks for: TensorBoard, Weights & Biases, MLflow. All are extras.

Each is a process that follows the record: training neither waits for one nor hands it anything. What it imports,
prints, uploads or breaks stays outside of training. It imports no torch. It ends with the run: when it has read the
end, or when its standard input is closed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ndd_engine.errors import said, shortened
from ndd_engine.files import expanded, replacing
from ndd_engine.record.events import (
    EndEvent,
    Event,
    MarkEvent,
    MemoryEvent,
    RunEvent,
    SampleEvent,
    ScalarsEvent,
    WindowEvent,
)
from ndd_engine.record.figures import idle, memory_bytes, phase_shares
from ndd_engine.record.file import EventLog, Recorder
from ndd_engine.record.rundir import RunDir

if TYPE_CHECKING:
    from ndd_engine.config.schema import LogSection

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
                    [sys.executable, "-P", "-m", "ndd_engine.train.loggers", kind, str(target)],
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


# Seconds between two looks at the record, and until a scalar is flushed to TensorBoard's file.
LOOK_S = 1.0
FLUSH_S = 15
# Seconds that a logger may still need when its run has ended or is gone.
ORPHAN_S = 60
_ALLOCATOR = ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "free_bytes")
# What MLflow accepts in a name, and its limits.
_NO_NAME = re.compile(r"[^A-Za-z0-9_\-. /:]")
_MOST_NAME = 250
_MOST_VALUE = 6000
_MOST_PARAMS = 100


def main(kind: str, target: int) -> NoReturn:
    """Follow a record; see Logger, which is at the other end of standard input and of `target`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run decides when it ends; its end closes the pipe
    os.set_inheritable(target, False)

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):  # nobody waits any more
            os.write(target, line.encode() + b"\n")

    answer: dict[str, object] = {"done": True}
    try:
        _follow(kind, json.loads(sys.stdin.buffer.readline()), lambda: tell(""))
    except BaseException as error:  # noqa: BLE001  also what a package does with sys.exit
        import traceback

        traceback.print_exc()
        answer = {"error": said(error)}
    tell(json.dumps(answer))
    sys.stderr.flush()
    os._exit(0)  # without the exit handlers of a package, which may wait for a server


def _follow(kind: str, given: dict[str, Any], alive: Callable[[], None]) -> None:
    """Write the figures of all events after an offset of the record. alive: called while the logger takes them."""
    log = EventLog(Path(given["events"]), given["offset"])
    figures = Figures(SINKS[kind](Path(given["folder"]), given["settings"]))
    try:
        closed = False
        while figures.status is None and not closed:
            closed = bool(select.select([sys.stdin], [], [], LOOK_S)[0])
            events: list[tuple[float, Event]] = []
            with contextlib.suppress(OSError):  # the file system has trouble, or the folder was moved
                events += log.new()
            for t, event in events:
                figures.take(t, event)
                alive()
            alive()
    finally:
        signal.alarm(ORPHAN_S)  # ends the process, if a package hangs and nobody waits any more
        figures.close()


class Figures:
    """Gives what events say to a sink, by name. status: that of the run, None before its end."""

    def __init__(self, sink: Any) -> None:
        self.status: str | None = None
        self._sink = sink
        self._run: RunEvent | None = None
        self._sample: SampleEvent | None = None
        self._step = 0

    def take(self, t: float, event: Event) -> None:
        """Handle one recorded event. Raises what the sink raises."""
        if isinstance(event, RunEvent):
            if self._run is None:
                self._step = event.resumed_step or 0
                self._sink.open(event)
            self._run = event
        elif isinstance(event, SampleEvent):
            self._sample = event
            self._add(t, self._step, _sampled(self._run, event))
        elif isinstance(event, WindowEvent):
            self._step = event.step
            if not event.profiled:
                self._add(t, event.step, _window(self._run, event, self._sample))
        elif isinstance(event, ScalarsEvent):
            self._add(t, event.step, ((f"own/{name}", value) for name, value in event.values.items()))
        elif isinstance(event, MemoryEvent):
            self._add(t, self._step, ((f"memory/{name}", getattr(event, name)) for name in _ALLOCATOR))
        elif isinstance(event, MarkEvent) and event.kind == "evaluation":
            metrics = event.data.get("metrics") or {}
            self._add(t, event.step, ((f"evaluation/{name}", value) for name, value in metrics.items()))
        elif isinstance(event, EndEvent):
            self.status = event.status

    def _add(self, t: float, step: int, values: Iterator[tuple[str, float | None]]) -> None:
        if self._run is None:
            return
        found = {tag: float(value) for tag, value in values if value is not None and math.isfinite(value)}
        if found:
            self._sink.add(t, step, found)

    def close(self) -> None:
        """Finish the sink, if it was opened."""
        if self._run is not None:
            self._sink.close(self.status or "lost")


def _window(
    run: RunEvent | None, event: WindowEvent, sample: SampleEvent | None
) -> Iterator[tuple[str, float | None]]:
    for name in ("loss", "lr", "grad_norm", "loss_scale"):
        yield f"train/{name}", getattr(event, name)
    if not event.steps or not event.wall_ns:
        return
    outside_ns = sum(event.phases.get(name, {}).get("host_ns", 0) for name in ("evaluate", "checkpoint"))
    if event.wall_ns > outside_ns:
        yield "speed/items_per_s", event.items / ((event.wall_ns - outside_ns) * 1e-9)
        yield "speed/step_ms", (event.wall_ns - outside_ns) * 1e-6 / event.steps
    for name, figures in event.phases.items():
        yield f"phase_ms/{name}", figures["host_ns"] * 1e-6 / event.steps
    yield "idle/share", idle(run, [event], phase_shares([event]), sample).share


def _sampled(run: RunEvent | None, event: SampleEvent) -> Iterator[tuple[str, float | None]]:
    yield "memory/resident_bytes", memory_bytes(run, event)
    gpu = event.gpu or {}
    for key in ("util_percent", "memory_free_bytes", "temperature_c", "power_w"):
        yield f"gpu/{key}", gpu.get(key)


class TensorBoard:
    """TensorBoard's event files, as torch's SummaryWriter writes them, but without torch."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder.parent / "tensorboard"
        self._writer: Any = None
        self._events: Any = None
        self._summaries: Any = None

    def open(self, run: RunEvent) -> None:
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(self._folder), flush_secs=FLUSH_S)
        if run.resumed_step is not None:
            # Viewers drop what an earlier process wrote for the steps that are repeated.
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(step=run.resumed_step + 1, session_log=start))

    def add(self, t: float, step: int, values: dict[str, float]) -> None:
        found = [self._summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        summary = self._summaries.Summary(value=found)
        self._writer.add_event(self._events.Event(wall_time=t, step=step, summary=summary))

    def close(self, status: str) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases. settings: mode ("offline" or "online"), project or None, default_project.

    Offline it uses no network and writes to the folder; `wandb sync` uploads that. The environment variables of wandb
    apply, except that "offline" stays offline.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder, settings
        self._run: Any = None

    def open(self, run: RunEvent) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would use the network
        wandb: Any = importlib.import_module("wandb")
        mode = self._settings["mode"]
        if mode == "online" and os.environ.get("WANDB_MODE") in ("offline", "disabled"):
            mode = os.environ["WANDB_MODE"]
        project = (
            self._settings["project"] or os.environ.get("WANDB_PROJECT") or self._settings["default_project"]
        )
        earlier = _ids(self._folder / "wandb.json")
        name = earlier.get("id") or secrets.token_hex(4)
        known = wandb.Settings.model_fields
        # The run's own record has the output and the counters of the machine.
        wanted = {
            "console": "off",
            "silent": True,
            "save_code": False,
            "disable_git": True,
            "x_disable_stats": True,
        }
        self._run = wandb.init(
            project=project, id=name, name=run.name, dir=str(self._folder), mode=mode, resume="allow",
            settings=wandb.Settings(**{key: value for key, value in wanted.items() if key in known}),
        )  # fmt: skip
        _keep(self._folder / "wandb.json", {"id": name, "project": project})
        self._run.config.update({**run.config, "ndd_console": _described(run)}, allow_val_change=True)
        # Steps of its own would have to increase; a resumed run repeats those after its checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, t: float, step: int, values: dict[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if status in ("done", "stopped") else 1)


class Mlflow:
    """A run of MLflow. settings: uri (a URI, or the path of an SQLite file), default_project (the experiment)."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._uri, self._project = tracking_uri(settings["uri"]), settings["default_project"]
        self._client: Any = None
        self._id = ""

    def open(self, run: RunEvent) -> None:
        tracking: Any = importlib.import_module("mlflow.tracking")
        remote = not self._uri.startswith("sqlite:")
        # Without the parts of MLflow that no logger needs, it has no model registry for a database.
        registry = None if remote else (self._folder / "registry").absolute().as_uri()
        self._client = tracking.MlflowClient(tracking_uri=self._uri, registry_uri=registry)
        earlier = _ids(self._folder / "mlflow.json")
        if earlier.get("uri") == self._uri and self._continued(str(earlier.get("id"))):
            self._id = str(earlier["id"])
            return
        experiment = self._client.get_experiment_by_name(self._project)
        if experiment is None:
            place = None if remote else (self._folder / "artifacts").absolute().as_uri()
            try:
                number = self._client.create_experiment(self._project, artifact_location=place)
            except Exception:  # noqa: BLE001  another run has just created it
                number = self._client.get_experiment_by_name(self._project).experiment_id
        else:
            number = experiment.experiment_id
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        _keep(self._folder / "mlflow.json", {"id": self._id, "uri": self._uri, "experiment": self._project})
        entities: Any = importlib.import_module("mlflow.entities")
        params = [
            entities.Param(_name(key), str(value)[:_MOST_VALUE])
            for key, value in _flat({**run.config, "ndd_console": _described(run)})
        ]
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + _MOST_PARAMS])

    def _continued(self, name: str) -> bool:
        """Whether the run of an earlier process is still there, and open again."""
        try:
            if self._client.get_run(name).info.lifecycle_stage != "active":
                return False
        except Exception as error:
            if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        self._client.update_run(name, status="RUNNING")
        return True

    def add(self, t: float, step: int, values: dict[str, float]) -> None:
        entities: Any = importlib.import_module("mlflow.entities")
        at = int(t * 1000)
        metrics = [entities.Metric(_name(key), value, at, step) for key, value in values.items()]
        for begin in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + 1000])

    def close(self, status: str) -> None:
        if self._id:
            words = {
                "done": "FINISHED",
                "stopped": "FINISHED",
                "interrupted": "KILLED",
                "terminated": "KILLED",
            }
            self._client.set_terminated(self._id, words.get(status, "FAILED"))


SINKS = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}


def tracking_uri(text: str) -> str:
    """A URI as it is; a path as the SQLite file that it names."""
    if "://" in text or text.startswith(("databricks", "file:", "uc:")):
        return text
    return f"sqlite:///{expanded(text).absolute()}"


def _ids(path: Path) -> dict[str, Any]:
    """What `_keep` wrote in an earlier process of this run; {} if there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
            return found
    return {}


def _keep(path: Path, body: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(body).encode())


def _described(run: RunEvent) -> dict[str, Any]:
    return {
        "device": run.device_name, "host": run.host, "versions": run.versions, "parameters": run.parameters,
        "model": run.model, "data": run.data,
    }  # fmt: skip


def _name(text: str) -> str:
    return _NO_NAME.sub("_", text)[:_MOST_NAME]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
