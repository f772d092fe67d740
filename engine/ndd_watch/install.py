"""Starts the observation of a process that has imported torch. It is watched from its first backward pass on."""

from __future__ import annotations

import contextlib
import os
import sys
from threading import get_ident
from typing import Any, Callable

from . import clock, frameworks, trying
from .census import Census
from .clock import DATA_WAIT, FORWARD, OTHER, PHASES, TIMED, TRAINER, WAITING, S
from .hooks import Hooks
from .modules import Modules
from .outside import Outside
from .own import own
from .profiler import StepProfiler
from .record import Recorder
from .steps import PROFILE_NS, Steps
from .waits import place

# Steps that may be observed to learn what they call.
MOST_LEARNED = 8


class Observer:
    """Everything that observes this process."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        compiling = getattr(torch.compiler, "is_dynamo_compiling", None) or torch._dynamo.is_compiling
        self.steps = Steps()
        self.modules = Modules(torch.nn.Module, self.steps, compiling, torch.is_grad_enabled)
        self.outside = trying.outside() or Outside()
        self.hooks = Hooks(self.steps, self.modules, compiling, self._arm, own, self.outside.writes)
        self.census = Census(torch.nn.Module.__call__.__code__, torch.is_grad_enabled)
        self.profiler = StepProfiler(own)
        self.recorder: Recorder | None = None
        self.early: list[tuple[str, dict[str, Any]]] = []
        self._learned = 0
        self._loader: dict[str, Any] = {}
        # What the current step is observed for: "", "learn" or "profile"; the steps before one of "learn".
        self._study, self._heard_at = "", 0
        self._wire()

    def _wire(self) -> None:
        steps = self.steps
        steps.study, steps.give_up = self.study, self.give_up
        self.hooks.loader_read = self._loader_read
        steps.window = lambda *taken: self.recorder.window(*taken) if self.recorder is not None else None

    def start(self, when_imported: Callable[[str, Callable[[Any], Any]], None]) -> None:
        """Hook torch. when_imported: see `install`."""
        self.hooks.install(self._torch)
        self.hooks.waits.install(self._torch, self.hooks.patch, when_imported)

    def give_up(self, error: BaseException) -> None:
        """End the observation after an error of ours. Never raises."""
        try:
            recorder = self.recorder
            self.stop()
            text = f"{type(error).__name__}: {error}"
            if recorder is not None:
                recorder.put("unobserved", step=self.steps.done, reason=text)
        except Exception as another:  # noqa: BLE001
            sys.stderr.write(f"ndd-console: the observation ended: {another!r}\n")

    def stop(self) -> None:
        """Take everything out. The record stays open for its end."""
        S[TIMED] = S[TRAINER] = 0
        study, self._study = self._study, ""
        self.steps.studying, self.steps.skip = False, 0
        self.hooks.remove()
        if study == "learn":
            Census.deaf()
        elif study == "profile":
            with contextlib.suppress(Exception):
                self.profiler.end()
        if self.recorder is not None:
            self.recorder.pause()

    def _arm(self) -> bool:
        """This process trains on this thread. Returns False if its record cannot be written."""
        if self.recorder is None:
            recorder = Recorder(self.steps, own, self.hooks.places, self.outside)
            try:
                here = place(self._torch)
                self.steps.ranks = here["exchanges"]
                recorder.replicated = lambda: self.hooks.waits.replicated
                recorder.open(self.early, here)
            except Exception as error:  # noqa: BLE001
                self.stop()
                sys.stderr.write(f"ndd-console: this process is not observed: {error}\n")
                return False
            self.recorder = recorder
        self.recorder.resume()
        self._try()
        me = get_ident()
        S[:] = [clock.now(), OTHER, me, OTHER, me]
        clock.clear()
        return True

    def _try(self) -> None:
        """In a process of a trial: train in runs, on command. An error ends the process: it is one of the trial."""
        if self.steps.gate is None:
            try:
                self.steps.gate = trying.begin(self)
            except Exception as error:  # noqa: BLE001
                sys.stderr.write(f"ndd-console: the change cannot be made: {error}\n")
                sys.stderr.flush()
                os._exit(1)

    def put(self, kind: str, /, **body: Any) -> None:
        """Record something; kept until the process trains."""
        if self.recorder is None:
            self.early.append((kind, body))
        else:
            self.recorder.put(kind, **body)

    def told(self, kind: str, /, **body: Any) -> None:
        """Record what a framework says at the current step."""
        self.put(kind, done=self.steps.done, **body)

    def _loader_read(self, settings: dict[str, Any], place: Any) -> None:
        """The training begins to read a loader: record its settings if they are new."""
        if (found := {**settings, "place": place}) != self._loader:
            self._loader = found
            self.put("loader", **found)

    def study(self, t: int) -> None:
        """Between two steps: end to look closely at the last one, or begin with the next one."""
        steps, census = self.steps, self.census
        # The first step may have another optimizer to come, and a batch may be made in the step before its own.
        whole = 0 if steps.last_row[DATA_WAIT] or census.source is not None else 1
        if self._study == "learn" and steps.done <= self._heard_at + whole:
            return  # wait for a whole one
        if self._study == "learn":
            census.deaf()
            for kind, time_first in census.roots.items():
                self.modules.hook(kind, time_first)
            source = census.source
            # A loader's batches are timed already.
            if own(source) and not steps.last_row[DATA_WAIT] and source not in census.reported:
                census.reported.add(source)
                timed = self.hooks.promote(source, census.names)
                self.put(
                    "source",
                    file=source.co_filename,
                    line=source.co_firstlineno,
                    function=source.co_name,
                    timed=timed,
                )
            self._study = "profile" if PROFILE_NS and self.modules.hooked else ""
            if self._study:
                self.profiler.begin()
        elif self._study == "profile":
            took = zip(PHASES, steps.last_row, steps.last_row[WAITING:])
            lengths = {name: own + wait for name, own, wait in took if own + wait}
            self.put("profile", step=steps.done, **self.profiler.end(self.modules.roots, lengths))
            self._study = ""
        elif self._learned < MOST_LEARNED and not (self.modules.hooked and steps.last_row[FORWARD]):
            # Nothing is known yet, or what is known is not called any more.
            self._learned += 1
            self._study, self._heard_at = "learn", steps.done
            census.listen(steps.caller)
        elif PROFILE_NS:
            self._study = "profile"
            self.profiler.begin()
        steps.studying = bool(self._study)
        if not self._study:
            learned = self.modules.hooked or self._learned >= MOST_LEARNED
            steps.next_study = (t + PROFILE_NS if PROFILE_NS else 1 << 62) if learned else 0

    def forked(self) -> None:
        """In a child process: most likely a worker of a loader. It is observed anew if it trains."""
        S[TIMED] = S[TRAINER] = 0
        if self.recorder is not None:
            self.recorder.forget()
        self.recorder = None
        self._study = ""
        fresh = Steps()
        fresh.has_optimizer = self.steps.has_optimizer
        vars(self.steps).update(vars(fresh))
        self._wire()


observer: Observer | None = None


def install(when_imported: Callable[[str, Callable[[Any], Any]], None]) -> None:
    """Observe this process. when_imported(name, then): calls then(module) once a module has been imported."""
    global observer
    observer = Observer(sys.modules["torch"])
    trying.before_start(observer)
    observer.start(when_imported)
    observer.outside.listen()
    frameworks.attach(observer.told, when_imported)
    os.register_at_fork(after_in_child=observer.forked)
