"""Screen and engine in one process: start both, and decide what happens to the run when the screen closes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import FrameType

import click

from ndd_console.app import ConsoleApp
from ndd_console.jobs.folder import StartRow
from ndd_console.jobs.run_sources import AttachedSource, EngineSource, HomeFolder, RunSource
from ndd_console.jobs.wizard import WizardJob, live_run_notes
from ndd_console.output.run_log import Output, RunLog
from ndd_console.process.terminal import (
    Leash,
    capabilities,
    redirect,
    restart,
    restart_text,
    silence,
    supervised,
)
from ndd_console.sessions.hosting import captured_for, report_failure
from ndd_console.words.run import summary
from ndd_engine.config import read
from ndd_engine.errors import EXIT_DONE, EXIT_INTERRUPTED, INTERRUPTED
from ndd_engine.record.events import EndEvent
from ndd_engine.record.rundir import RunDir, find_run, runs_root
from ndd_engine.run.run import Run
from ndd_engine.script.script_run import Script, ScriptRequest
from ndd_engine.train.request import RunRequest
from ndd_engine.train.started_ranks import StartedRanks
from ndd_engine.train.training_run import TrainingRun
from ndd_engine.wizard.proposals import BUDGET_S, Answers

from .headless import pass_signals_on, rank_command, reason_of

# Time limit of an immediate stop, after which the process is terminated. Several ranks are killed before that, first by
# their launcher, and then with it.
KILL_PATIENCE_S = 5.0
RANKS_KILL_PATIENCE_S = 20.0
_TWICE_S = 0.5


def run_console(request: RunRequest, ascii_only: bool, command: Sequence[str]) -> int:
    """Train with the live screen. command: what each rank runs, if there are several. Returns the exit status."""
    return supervised(lambda leash: Console(leash, request.root, ascii_only).train(request, command))


def observe_console(request: ScriptRequest, ascii_only: bool) -> int:
    """Run a script with the live screen. Returns the exit status of the script."""
    return supervised(lambda leash: Console(leash, request.root, ascii_only).observe(request))


def home(runs_folder: Path | None, ascii_only: bool) -> int:
    """Show the home screen. Returns the exit status of the run if one was started."""
    root = runs_root(runs_folder)
    return supervised(lambda leash: Console(leash, root, ascii_only).show(None, HomeFolder(root)))


def watch(directory: RunDir, ascii_only: bool) -> int:
    """Show the live screen of a run of another process. Closing it does not affect the run."""
    root = directory.path.parent
    return supervised(lambda leash: Console(leash, root, ascii_only).show(AttachedSource(directory)))


class Console:
    """One session of the screen, with at most one run of this process."""

    def __init__(self, leash: Leash, root: Path, ascii_only: bool) -> None:
        self.leash = leash
        self.root = root
        self.can, self._ascii_only = capabilities(ascii_only), ascii_only
        self.run: Run | None = None
        self._training: TrainingRun | None = None
        self.engine: threading.Thread | None = None
        self.refresh_hz = 4.0
        self.on_hangup = "continue"
        self._app: ConsoleApp | None = None
        self._shown = False  # whether a screen is
        self._run_log: RunLog | None = None
        self._terms = 0
        self._last_term = -_TWICE_S
        self._deadline: float | None = None

    def train(self, request: RunRequest, command: Sequence[str]) -> int:
        """Open the run. The engine starts after the first paint, since importing torch blocks the screen."""
        return self.show(self._open(request, command))

    def observe(self, request: ScriptRequest) -> int:
        self.run = run = Run.open(Script(request))
        self.engine = threading.Thread(target=run.execute, name="ndd-script")
        return self.show(EngineSource(run))

    # The run of this process.

    def _open(self, request: RunRequest, command: Sequence[str]) -> EngineSource:
        """command: what each rank runs, if there are several."""
        config = request.draft.resolve()
        if config.parallel.ranks > 1:
            run = StartedRanks(request, command).open()  # its ranks write the log
        else:
            self._training = TrainingRun(request)
            self._run_log = RunLog(partial(Run.open, self._training), config.log.headless_s, Output())
            run = self._run_log.run
        self.run = run
        self.refresh_hz, self.on_hangup = config.console.refresh_hz, config.console.on_hangup
        self.leash.tell(run.directory.name)
        if self._shown:
            redirect(run.directory.console_log)
        self.engine = threading.Thread(target=self._execute, args=(run,), name="ndd-engine")
        return EngineSource(run)

    def _execute(self, run: Run) -> None:
        run.execute()
        if self._goes_on and self._app is not None:
            self._app.leave_when_final()

    @property
    def _goes_on(self) -> tuple[str, ...]:
        """Arguments of `train` with which a new process continues the run, if one does."""
        training = self._training
        return training.goes_on if training is not None and training.restarts else ()

    def _start(self, row: StartRow) -> RunSource:
        """Train an entry of the home screen. Raises ConfigError."""
        sets = () if row.epochs is None else (f"run.epochs={row.epochs}",)
        file = row.kind == "file"
        draft = read(Path(row.name), sets) if file else read(None, sets, row.name)
        words = ([] if file else ["--workload"], [row.name], *(["--set", one] for one in sets))
        command = rank_command("--runs", str(self.root), "train", *chain(*words))
        source = self._open(RunRequest(draft, self.root), command)
        self._begin()
        return source

    def _wizard(self, run: RunSource | None, row: StartRow | None = None) -> WizardJob:
        """Start from a copy of the configuration of the run on the screen, else from an entry of the home screen."""
        ended = run.name if run is not None and run.snapshot().final else ""
        notes = live_run_notes(self.root, ended)
        if run is not None:
            return WizardJob(Answers(config=find_run(self.root, run.name).config), None, BUDGET_S, notes)
        first = None if row is None or row.kind == "file" else row.name
        return WizardJob(Answers(workload=first), None, BUDGET_S, notes, first=row)

    def _begin(self) -> None:
        if self.engine is not None and self.engine.ident is None:
            self.engine.start()

    def _first_paint(self) -> None:
        # The widgets live until the end: exclude them from garbage collection during training.
        gc.collect()
        gc.freeze()
        if self.engine is not None:
            self._begin()
        elif self._app is not None and self._app.home is not None:
            # Import torch early for the next run; it blocks the screen.
            threading.Thread(target=import_module, args=("torch",), name="ndd-import", daemon=True).start()

    # The screen.

    def show(self, source: RunSource | None, home_source: HomeFolder | None = None) -> int:
        """Show the screen until it is closed. Returns the exit status."""
        app = self._app = ConsoleApp(
            source,
            home_source,
            look=self.can,
            refresh_hz=self.refresh_hz,
            start=self._start,
            attach=lambda name: AttachedSource(find_run(self.root, name)),
            start_file=lambda path: self._start(StartRow(path, "", "", kind="file")),
            wizard=self._wizard,
            on_first_paint=self._first_paint,
        )
        log = self.run.directory.console_log if self.run is not None else Path(os.devnull)
        with captured_for(app, log, self.leash) as terminal:
            self._shown = True
            self._handle_signals(app)
            result = app.run()
            if app.source is not None:
                app.source.close()  # a running trial keeps the run paused
            if app.wizard is not None:
                app.wizard.stop()
        self._shown = False
        # An error of the screen does not stop training.
        failed = report_failure(app, self.run.directory.console_log if self.run is not None else None)
        return self._leave("hangup" if terminal.lost else result) or failed

    def _handle_signals(self, app: ConsoleApp) -> None:
        def stop(number: int, _frame: FrameType | None) -> None:
            # A signal to the process group arrives twice: also from the parent, which forwards it.
            last, self._last_term = self._last_term, time.monotonic()
            if number == signal.SIGTERM and self._last_term - last < _TWICE_S:
                return
            self._terms += 1
            if self._terms > 1:
                # Without the screen, nothing else could end a call that does not return.
                self._deadline = time.monotonic() + self._patience_s
            if self.run is None:
                app.leave()
                return
            self.run.control.request("stop" if self._terms == 1 else "kill", *reason_of(number))
            app.leave_when_final()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGHUP, lambda *_: app.hang_up())
        if self.run is not None:
            pass_signals_on(self.run)

    # Leaving.

    @property
    def _patience_s(self) -> float:
        several = self.run is not None and isinstance(self.run.executor, StartedRanks)
        return RANKS_KILL_PATIENCE_S if several else KILL_PATIENCE_S

    def _leave(self, result: str | None) -> int:
        run = self.run
        if run is None:
            return EXIT_DONE
        if run.finished.is_set() and result != "hangup":
            return self._finish(run)
        if result in ("kill", "quit"):  # "quit": a run that was being started
            run.control.request("kill", INTERRUPTED, "interrupted")
            self._begin()  # a run that has not started ends immediately and records that
            return self._finish(run, self._patience_s)
        self._begin()
        name = run.directory.name
        if result == "hangup":
            if self.on_hangup == "stop":
                run.control.request("stop", "lost the terminal", "terminated")
            self._continue_detached(run, "")
        elif result == "detach":
            where = f"run {name} continues in the background (process {os.getpid()})"
            self._continue_detached(run, f"{where}; attach with: ndd-console attach {name}")
        elif result is None:
            click.echo(f"run {name} continues without the screen; press Ctrl-C to stop it", err=True)
        return self._finish(run)

    def _continue_detached(self, run: Run, farewell: str) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.leash.detach(farewell)
        silence(run.directory.console_log)

    def _finish(self, run: Run, patience_s: float | None = None) -> int:
        """Wait for the engine, which signals can still stop, close the record and print the summary."""
        assert self.engine is not None
        if patience_s is not None:
            self._deadline = time.monotonic() + patience_s
        while self.engine.ident is not None and self.engine.is_alive():
            self.engine.join(0.2)  # short, so that signal handlers run
            if self._deadline is not None and time.monotonic() > self._deadline:
                _abandon(run)
        run.close()
        if self._run_log is not None:
            self._run_log.finish()
        if goes_on := self._goes_on:
            click.echo(restart_text(goes_on), err=True)
            restart(self.root, (*goes_on, *["--ascii"] * self._ascii_only))
        for line in summary(run.recorder.snapshot(), run.end, run.directory.path):
            click.echo(line)
        return run.end.exit_status if run.end is not None else EXIT_DONE


def _abandon(run: Run) -> None:
    """The engine hangs in native code: close the record and terminate the process."""
    step = run.recorder.snapshot().step
    reason = f"{INTERRUPTED} while a call did not return"
    run.put(EndEvent("interrupted", reason, step, EXIT_INTERRUPTED))
    run.close()
    click.echo(f"run {run.directory.name}: a call did not return; terminated at step {step:,}", err=True)
    os._exit(EXIT_INTERRUPTED)
