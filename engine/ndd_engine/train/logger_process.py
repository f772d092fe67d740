"""A logger in a process of its own, which follows the record of a run and writes its figures for other viewers.

What it imports, prints, uploads or breaks stays outside of training. It imports no torch. It ends with the run: when it
has read the end, or when its standard input is closed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import secrets
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ndd_engine.errors import said
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
from ndd_engine.record.file import EventLog

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
    """Follow a record; see loggers.Logger, which is at the other end of standard input and of `target`."""
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
