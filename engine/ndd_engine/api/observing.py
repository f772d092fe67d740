"""`observe()`: a script observes itself, and says what hooks on torch cannot know."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import tomlkit
from tomlkit.exceptions import ConvertError

from ndd_engine.config import Draft, read
from ndd_engine.config.parsing import COMMAND_LINE
from ndd_engine.errors import ConfigError, Problem, UsageError
from ndd_engine.files import write_text
from ndd_engine.record.rundir import RunDir, find_run, new_run_dir, runs_root
from ndd_engine.script.command import Command
from ndd_engine.script.progress import readable_by
from ndd_engine.script.script_run import CLOSED
from ndd_engine.text import printable
from ndd_engine.trial.request import Base
from ndd_watch import CAPTURES

PathLike: TypeAlias = "str | os.PathLike[str]"
Source: TypeAlias = "PathLike | Mapping[str, Any] | None"
Sets: TypeAlias = "str | Sequence[str] | Mapping[str, Any]"


def root_of(runs: PathLike | None) -> Path:
    """The folder of the runs; None for $NDD_RUNS, otherwise ./runs."""
    return runs_root(None if runs is None else Path(runs))


def configured_run(root: Path, name: PathLike) -> RunDir:
    """The run with this name or path. Raises UsageError when there is none, or when it has no configuration yet."""
    found = find_run(root, os.fspath(name))
    if found.command.exists():
        raise UsageError(
            f"run {found.name} is one of a script, which is only observed: start it again with ndd-console run"
        )
    if not found.config.exists():
        raise UsageError(f"run {found.name} has no config.toml: it ended before training began")
    return found


def baseline_of(baseline: Source, workload: str | None, root: Path) -> Base:
    """The baseline of a trial: a mapping, a TOML file that exists, otherwise a run. Raises UsageError."""
    if baseline is None or isinstance(baseline, Mapping):
        name = f"the workload {workload}" if workload else "the defaults"
        return Base(
            name if baseline is None else "the configuration", None, workload, strings(baseline or {})
        )
    path = Path(baseline)
    if path.is_file():
        return Base(str(path), path, workload)
    if path.suffix == ".toml":
        raise UsageError(f"{printable(str(path))}: no such file")
    if workload is not None:
        raise UsageError(f"run {printable(path.name)} already has a workload, which cannot be changed")
    run = find_run(root, os.fspath(baseline))
    if run.command.exists():
        return Base(f"run {run.name}", run=run)  # of a script
    return Base.of_run(configured_run(root, baseline))


def draft_of(
    config: Source, sets: Sets, workload: str | None, overrides: dict[str, Any] | None = None
) -> Draft:
    """The configuration, with mistakes in mappings and `sets` reported as "config". Raises ConfigError."""
    path, values = (None, config) if config is None or isinstance(config, Mapping) else (Path(config), {})
    names = {COMMAND_LINE: "config"}
    try:
        draft = read(path, (*strings(values or {}), *strings(sets, "sets")), workload, overrides)
    except ConfigError as error:
        found = (
            replace(problem, where=names.get(problem.where, problem.where)) for problem in error.problems
        )
        raise ConfigError(list(found)) from None
    return replace(draft, layers=tuple((names.get(where, where), layer) for where, layer in draft.layers))


def strings(values: Sets, where: str = "config") -> tuple[str, ...]:
    """As "section.key=value" with the value in TOML; nested mappings are flattened. Raises ConfigError."""
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, Mapping):
        return tuple(values)
    found: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += strings({f"{key}.{name}": item for name, item in value.items()}, where)
        else:
            try:
                plain = os.fspath(value) if isinstance(value, os.PathLike) else value
                found.append(f"{key}={'none' if plain is None else tomlkit.item(plain).as_string()}")
            except (ConvertError, TypeError, ValueError):
                kind = f"{value!r} ({type(value).__name__})"
                allowed = "a boolean, a number, a string or a list of them"
                raise ConfigError(
                    [Problem(where, str(key), "has no form in TOML", printable(kind), allowed)]
                ) from None
    return tuple(found)


# As the observer is called where `ndd-console run` has loaded it.
_LOADED = "_ndd_watch.install"
# The observers of observations of this process that have not been closed: at most one.
_running: list[Any] = []


class Observation:
    """A running observation; a context manager. path: the folder of the run, None under `ndd-console run`.

    Its methods never raise, so that an error of the observation does not end the training.
    """

    def __init__(self, observer: Any, path: Path | None, follower: subprocess.Popen[bytes] | None) -> None:
        self._observer, self.path, self._follower = observer, path, follower

    def log(self, step: int, **values: float) -> None:
        """Record scalars, which the screen and the report show."""
        self._say("scalars", step=step, values=values)

    def evaluation(self, step: int, **metrics: float) -> None:
        """Record the metrics of an evaluation; the first one decides which is the best."""
        self._say("evaluation", step=step, metrics=metrics)

    def epoch(self, step: int, epoch: int) -> None:
        """An epoch begins, counted from 0."""
        self._say("epoch", step=step, epoch=epoch)

    def totals(self, total_steps: int = 0, epochs: int = 0) -> None:
        """The optimizer steps and epochs at which the training ends; 0 if unknown."""
        self._say("totals", total_steps=total_steps, epochs=epochs)

    def close(self) -> None:
        """End the observation; safe to call twice."""
        with contextlib.suppress(Exception):
            if self._follower is not None and self.path is not None:
                _running.clear()
                if self._observer.emitter.opened:
                    self._observer.emitter.close()
                self._observer.stop()
                write_text(RunDir(self.path).ranks / CLOSED, "")
                self._follower.wait(10)
                self._follower = None

    def _say(self, kind: str, **body: Any) -> None:
        with contextlib.suppress(Exception):
            self._observer.emitter.say(kind, **body)

    def told(self, kind: str, **body: Any) -> None:
        """Record what a framework says at the current step."""
        with contextlib.suppress(Exception):
            self._observer.told(kind, **body)

    def known(self, found: dict[str, Any], then: Callable[[dict[str, float]], None]) -> None:
        """Call back with the numbers among these values, later where some are on a GPU."""
        with contextlib.suppress(Exception):
            self._observer.known(found, then)

    @property
    def wishes(self) -> Any:
        """What the console asks of a framework, see `ndd_watch.frameworks.Wishes`."""
        return self._observer.wishes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):
            if kind is not None:
                self._observer.emitter.fail(f"{kind.__name__}: {error}")
        self.close()


def observe(name: str | None = None, runs: PathLike | None = None) -> Observation:
    """Observe the training in this process from now on: with `with observe():`, or with a call at the top of a script.

    name: of the run; by default that of the script and a number. runs: folder of the runs; None for $NDD_RUNS,
    otherwise ./runs. Under `ndd-console run` or within another observation, the one that is running is used. Of several
    ranks, only rank 0 is observed; `ndd-console run -- torchrun …` observes all. If nothing can be observed, a warning
    says why, and the training goes on.
    """
    return started(name, runs)


def started(name: str | None, runs: PathLike | None, frameworks: bool = True) -> Observation:
    """As `observe`. frameworks: whether to connect to Hugging Face's Trainer and Lightning."""
    if (module := sys.modules.get(_LOADED)) is not None and getattr(module, "observer", None) is not None:
        return Observation(module.observer, None, None)
    if _running:
        return Observation(_running[0], None, None)
    if os.environ.get("RANK", "0") != "0" or os.environ.get("LOCAL_RANK", "0") != "0":
        return Observation(None, None, None)  # rank 0 is observed
    try:
        return _started(name, runs, frameworks)
    except Exception as error:  # noqa: BLE001  the training must go on
        warnings.warn(f"ndd_engine.observe: nothing is observed: {error}", stacklevel=3)
        return Observation(None, None, None)


def _started(name: str | None, runs: PathLike | None, frameworks: bool) -> Observation:
    words = tuple(sys.orig_argv) if Path(sys.argv[0] or "-").name not in ("", "-") else ("python", "notebook")
    command = Command(words, Path.cwd())
    directory = new_run_dir(
        root_of(runs).absolute(), name, re.sub(r"[^A-Za-z0-9._]+", "-", command.run_name) or "script"
    )
    write_text(directory.command, json.dumps(command.to_dict(), indent=2) + "\n")
    directory.ranks.mkdir()
    os.environ["NDD_WATCH"], os.environ[CAPTURES] = str(directory.ranks), str(directory.path)
    import torch  # noqa: F401  the observer hooks it

    install = import_module("ndd_watch.install")
    observer = install.install(frameworks)
    follower = subprocess.Popen(
        [sys.executable, "-m", "ndd_engine.script.script_run", str(directory.path), str(os.getpid())],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={key: value for key, value in os.environ.items() if key not in ("NDD_WATCH", CAPTURES)},
    )  # fmt: skip
    os.environ.update(readable_by(follower.pid))
    _running.append(observer)
    return Observation(observer, directory.path, follower)
