"""Weights & Biases and MLflow, as the process of a logger uses them. Each imports its package when it is opened."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ndd_engine.files import expanded, replacing

# What MLflow accepts in a name, and its limits.
_NO_NAME = re.compile(r"[^A-Za-z0-9_\-. /:]")
_MOST_NAME = 250
_MOST_VALUE = 6000
_MOST_PARAMS = 100


class Wandb:
    """A run of Weights & Biases. settings: mode ("offline" or "online"), project or None, default_project.

    Offline it uses no network and writes to the folder; `wandb sync` uploads that. The environment variables of wandb
    apply, except that "offline" stays offline.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder, settings
        self._run: Any = None

    def open(self, about: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would use the network
        wandb: Any = importlib.import_module("wandb")
        mode = self._settings["mode"]
        if mode == "online" and os.environ.get("WANDB_MODE") in ("offline", "disabled"):
            mode = os.environ["WANDB_MODE"]
        project = (
            self._settings["project"] or os.environ.get("WANDB_PROJECT") or self._settings["default_project"]
        )
        kept = _kept(self._folder / "wandb.json")
        name = kept.get("id") or secrets.token_hex(4)
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
            project=project, id=name, name=about["name"], dir=str(self._folder), mode=mode, resume="allow",
            settings=wandb.Settings(**{key: value for key, value in wanted.items() if key in known}),
        )  # fmt: skip
        _keep(self._folder / "wandb.json", {"id": name, "project": project})
        self._run.config.update({**about["config"], "ndd_console": _described(about)}, allow_val_change=True)
        # Steps of its own would have to increase; a resumed run repeats those after its checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, t: float, step: int, values: dict[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self, status: str | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if status in ("done", "stopped") else 1)


class Mlflow:
    """A run of MLflow. settings: uri (a URI, or the path of an SQLite file), project (name of the experiment)."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._uri, self._project = tracking_uri(settings["uri"]), settings["project"]
        self._client: Any = None
        self._id = ""

    def open(self, about: Mapping[str, Any]) -> None:
        tracking: Any = importlib.import_module("mlflow.tracking")
        remote = not self._uri.startswith("sqlite:")
        # Without the parts of MLflow that no logger needs, it has no model registry for a database.
        registry = None if remote else (self._folder / "registry").absolute().as_uri()
        self._client = tracking.MlflowClient(tracking_uri=self._uri, registry_uri=registry)
        kept = _kept(self._folder / "mlflow.json")
        if kept.get("uri") == self._uri and self._continued(str(kept.get("id"))):
            self._id = str(kept["id"])
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
        self._id = self._client.create_run(number, run_name=about["name"]).info.run_id
        _keep(self._folder / "mlflow.json", {"id": self._id, "uri": self._uri, "experiment": self._project})
        entities: Any = importlib.import_module("mlflow.entities")
        params = [
            entities.Param(_name(key), str(value)[:_MOST_VALUE])
            for key, value in _flat({**about["config"], "ndd_console": _described(about)})
        ]
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + _MOST_PARAMS])

    def _continued(self, name: str) -> bool:
        """Whether the run of an earlier process is still there, and open again."""
        try:
            if self._client.get_run(name).info.lifecycle_stage != "active":
                return False
        except Exception as error:
            if _absent(error):
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

    def close(self, status: str | None) -> None:
        if self._id:
            words = {
                "done": "FINISHED",
                "stopped": "FINISHED",
                "interrupted": "KILLED",
                "terminated": "KILLED",
            }
            self._client.set_terminated(self._id, words.get(status or "", "FAILED"))


SINKS = {"wandb": Wandb, "mlflow": Mlflow}


def tracking_uri(text: str) -> str:
    """A URI as it is; a path as the SQLite file that it names."""
    if "://" in text or text.startswith(("databricks", "file:", "uc:")):
        return text
    return f"sqlite:///{expanded(text).absolute()}"


def _absent(error: Exception) -> bool:
    return getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST"


def _kept(path: Path) -> dict[str, Any]:
    """What an earlier process of this run kept; {} if there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
            return found
    return {}


def _keep(path: Path, body: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(body).encode())


def _described(about: Mapping[str, Any]) -> dict[str, Any]:
    return {key: about[key] for key in ("device", "host", "versions", "parameters", "model", "data")}


def _name(text: str) -> str:
    return _NO_NAME.sub("_", text)[:_MOST_NAME]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
