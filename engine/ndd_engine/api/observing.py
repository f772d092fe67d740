"""`observe()`: a script observes itself, and says what hooks on torch cannot know.

The callbacks of frameworks observe from the beginning of each training to its end, and never raise.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ndd_engine.files import write_text
from ndd_engine.record.rundir import RunDir, new_run_dir
from ndd_engine.script.command import Command
from ndd_engine.script.script_run import CLOSED
from ndd_engine.script.stack_samples import readable_by
from ndd_watch import CAPTURES
from ndd_watch.apart import Contained, of_script
from ndd_watch.frameworks import Known, Put, Wishes

from .sources import PathLike, root_of

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
        with Contained():
            if self._follower is not None and self.path is not None:
                _running.clear()
                if self._observer.emitter.opened:
                    self._observer.emitter.close()
                self._observer.stop()
                write_text(RunDir(self.path).ranks / CLOSED, "")
                self._follower.wait(10)
                self._follower = None

    def _say(self, kind: str, **body: Any) -> None:
        with Contained():
            self._observer.emitter.say(kind, **body)

    def note(self, kind: str, **body: Any) -> None:
        """Record what a framework says at the current step."""
        with Contained():
            self._observer.note(kind, **body)

    def known(self, found: dict[str, Any], then: Callable[[dict[str, float]], None]) -> None:
        """Call back with the numbers among these values, later where some are on a GPU."""
        with Contained():
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
        with Contained():
            if kind is not None:
                self._observer.emitter.fail(f"{kind.__name__}: {error}")
        self.close()


def observe(name: str | None = None, runs: PathLike | None = None) -> Observation:
    """Observe the training in this process from now on: with `with observe():`, or with a call at the top of a script.

    name: of the run; by default that of the script and a number. runs: folder of the runs; None for $NDD_RUNS,
    otherwise ./runs. Under `ndd-console run` or within another observation, the one that is running is used. Of several
    ranks, only rank 0 is observed; `ndd-console run -- torchrun …` observes all. If nothing can be observed, a warning
    says why, and the training continues.
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
    except Exception as error:
        if of_script(error):  # as a timeout of it
            raise
        warnings.warn(f"ndd_engine.observe: nothing is observed: {error}", stacklevel=3)
        return Observation(None, None, None)


def _started(name: str | None, runs: PathLike | None, frameworks: bool) -> Observation:
    words = tuple(sys.orig_argv) if Path(sys.argv[0] or "-").name not in ("", "-") else ("python", "notebook")
    command = Command(words, Path.cwd())
    directory = new_run_dir(
        root_of(runs).absolute(), name, re.sub(r"[^A-Za-z0-9._]+", "-", command.run_name) or "script"
    )
    command.keep(directory)
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


class ObservedCallback:
    """base: the framework's class of callbacks. make: returns the class of one that records with given functions.

    callback: the one that records; outside an observation one that does nothing. A second training gets the name with
    a number. A copy in another process observes on its own.
    """

    def __init__(
        self,
        base: type,
        make: Callable[[type, Put, Known, Wishes], type],
        name: str | None,
        runs: PathLike | None,
    ) -> None:
        self._base, self._make, self._name, self._runs = base, make, name, runs
        self._observation: Observation | None = None
        self._trainings = 0
        self.callback: Any = base()
        self.wishes = Wishes()

    def begin(self, leads: bool) -> None:
        """A training begins. leads: whether this is the process of rank 0."""
        self.end()  # of a training that raised an error
        if not leads:
            return
        with Contained():
            self._trainings += 1
            later = self._name is not None and self._trainings > 1
            name = f"{self._name}-{self._trainings}" if later else self._name
            self._observation = observation = started(name, self._runs, frameworks=False)
            if observation.path is not None:  # else `ndd-console run` records the same
                self.wishes = observation.wishes
                self.callback = self._make(self._base, observation.note, observation.known, self.wishes)()

    def end(self, error: BaseException | None = None) -> None:
        """The training has ended. error: that has ended it."""
        observation, self._observation = self._observation, None
        with Contained():
            self.callback = self._base()
            if observation is not None:
                observation.__exit__(type(error) if error is not None else None, error, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_observation": None, "told": self._base()}
