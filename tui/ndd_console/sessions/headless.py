"""A run without a screen, also as one of several ranks; a script whose own output goes through."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import traceback
import tty
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any, NoReturn, TypeVar

import click

from ndd_console.output.run_log import Output, RunLog
from ndd_console.process.terminal import restart, restart_text
from ndd_console.words.finding import urgent_line
from ndd_console.words.run import summary
from ndd_console.words.stopping import RUN_STOPPING
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, INTERRUPTED, TERMINATED, NddError
from ndd_engine.record.events import Event
from ndd_engine.record.file import Listener
from ndd_engine.run.control import StopNow
from ndd_engine.run.run import Run
from ndd_engine.script.script_run import Script, ScriptRequest
from ndd_engine.text import printable
from ndd_engine.train.parallel.rank_place import ENV_STOPPED, OtherRankError, RankPlace, own_launcher
from ndd_engine.train.request import RunRequest
from ndd_engine.train.started_ranks import StartedRanks
from ndd_engine.train.training_run import TrainingRun

# Seconds within which several SIGTERMs count as one.
SAME_TERM_S = 1.0


def run_headless(request: RunRequest, as_json: bool) -> int:
    """Train on this thread and return the exit status. Raises UsageError before anything is written.

    The status is that of the run, whether its output can be written or not. Where only a new process can continue, this
    one is replaced by it.
    """
    training = TrainingRun(request)
    run = trained(partial(Run.open, training), request, as_json, training=training)
    if training.restarts:
        restart(request.root, (*training.goes_on, "--json" if as_json else "--headless"))
    return status_of(run)


def ranks_headless(request: RunRequest, command: Sequence[str], as_json: bool) -> int:
    """Start the ranks, print what rank 0 records, and return the exit status of the run."""
    return status_of(trained(StartedRanks(request, command).open, request, as_json, logged=False))


def observe_headless(request: ScriptRequest) -> int:
    """Run the command and return its exit status. Raises UsageError before anything is written.

    Its input and output go through, and a summary follows. Stalls, deaths and limits are told as they come.
    """
    script = Script(request)

    def tell(_: float, event: Event) -> None:
        if line := urgent_line(event):
            with contextlib.suppress(OSError, ValueError):
                # The terminal may be raw.
                click.echo(f"ndd-console: {printable(line)}" + "\r" * sys.stdin.isatty(), err=True)

    run = Run.open(script, tell)
    Signals().obey(run, lambda _: None, survive_hangup=True)
    with typing_into(script):
        end = run.execute()
    run.close()
    with contextlib.suppress(OSError):
        for line in summary(run.recorder.snapshot(), end, run.directory.path):
            click.echo(line, err=True)
    return end.exit_status


def trained(
    opened: Callable[[Listener], Run],
    request: RunRequest,
    as_json: bool,
    *,
    training: TrainingRun | None = None,
    signals: Signals | None = None,
    quiet: bool = False,
    logged: bool = True,
) -> Run:
    """Open a run, train to its end, and print what is recorded; returns the run.

    training: what it executes in this process. signals: handled already. quiet: write to console.log only. logged:
    write to console.log.
    """
    signals = signals or Signals()
    config = request.draft.resolve()
    words = Output(None if quiet else sys.stderr, "error")
    data = Output(None if quiet else sys.stdout, "output")

    tap = (lambda t, event: data.data(event.to_json(t))) if as_json else None
    run_log = RunLog(opened, config.log.headless_s, words, tap, logged)
    run = run_log.run
    signals.obey(run, run_log.say, config.console.on_hangup == "continue")
    before = sys.stdout, sys.stderr
    # Warnings and prints of the user's workload belong into the record, and not between the events.
    sys.stdout = sys.stderr = words
    try:
        end = run.execute()
    finally:
        sys.stdout, sys.stderr = before
        run.close()
        run_log.finish()
    if training is not None and training.restarts:
        words.say(restart_text(training.goes_on))
    elif not as_json:
        data.data("\n".join(summary(run.recorder.snapshot(), end, run.directory.path)))
    if lost := data.finish():
        words.say(f"warning: {lost}")
    words.finish()
    return run


def status_of(run: Run) -> int:
    assert run.end is not None
    return run.end.exit_status


@contextlib.contextmanager
def typing_into(script: Script) -> Iterator[None]:
    """Pass what is typed on to the script: also Ctrl-C, which its terminal turns into a signal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(0)
    done = threading.Event()

    def forward() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):
                if not select.select([0], [], [], 0.1)[0]:
                    continue
                data = os.read(0, 1024)
                if not data:  # the terminal is lost
                    return
                if script.launched is not None:
                    script.launched.type(data)

    tty.setraw(0)
    thread = threading.Thread(target=forward, name="ndd-typing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(1)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def reason_of(number: int) -> tuple[str, str]:
    if number == signal.SIGTERM:
        return TERMINATED, "terminated"
    return INTERRUPTED, "interrupted"


def pass_signals_on(run: Run) -> None:
    """Signals of batch systems before a time limit, and of users, go to a script; those that are ignored stay so."""
    executor = run.executor
    if isinstance(executor, Script):
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda received, _frame: executor.pass_on(received))


class Signals:
    """SIGINT and SIGTERM stop a run, after a checkpoint; a second one immediately.

    A third one ends the process, if it trains itself. Before there is a run, the first one is kept for it, and a second
    one ends the process. SIGTERMs in quick succession are one: a service manager sends it to all processes of a
    service, and some of them pass it on.
    """

    def __init__(self) -> None:
        self._run: Run | None = None
        self._say: Callable[[str], object] = lambda _: None
        self._survive_hangup = True
        self._requests: list[int] = []
        self._last_term_s = -SAME_TERM_S
        # Whether the first signal ends the process: nothing has begun that could be kept.
        self.impatient = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._hangup)

    def obey(self, run: Run, say: Callable[[str], object], survive_hangup: bool) -> None:
        """Stop this run from now on. say: writes a line."""
        self._run, self._say, self._survive_hangup = run, say, survive_hangup
        pass_signals_on(run)
        report = sys.unraisablehook

        def unraisable(unraisable_error: Any) -> None:
            # An immediate stop interrupts destructors and half-started workers, too.
            if not run.control.kill:
                report(unraisable_error)

        sys.unraisablehook = unraisable
        if self._requests:
            self._request(run, self._requests[0])

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            before, self._last_term_s = self._last_term_s, time.monotonic()
            if self._last_term_s - before < SAME_TERM_S:
                return
        self._requests.append(number)
        run = self._run
        # What others execute is ended by them.
        most = 1 if run is None else 2 if isinstance(run.executor, TrainingRun) else sys.maxsize
        if self.impatient or len(self._requests) > most:
            os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number)
        if run is not None:
            self._request(run, number)

    def _request(self, run: Run, number: int) -> None:
        if len(self._requests) == 1:
            run.control.request("stop", *reason_of(number))
            self._say(RUN_STOPPING)
            return
        run.control.request("kill", *reason_of(number))
        if run.executor.interruptible:
            raise StopNow

    def _hangup(self, _number: int, frame: FrameType | None) -> None:
        if not self._survive_hangup:
            self._stop(signal.SIGTERM, frame)
        elif self._run is not None:
            self._say("lost the terminal (SIGHUP); the run continues")


T = TypeVar("T")


def rank_command(*words: str) -> list[str]:
    """What each rank runs: these words of a command line, or this one again."""
    return [sys.executable, "-m", "ndd_console", *(words or sys.argv[1:])]


def _while_listening(work: Callable[[], T]) -> T:
    """What `work` returns or raises, in a thread: torch waits for a store without listening to signals."""
    result = ThreadPoolExecutor(1, "ndd-meeting").submit(work)
    while not result.done():
        time.sleep(0.05)
    return result.result()


def run_rank(make: Callable[[], RunRequest | None], here: RankPlace, as_json: bool) -> NoReturn:
    """Train as a rank and end the process. make: the request; only rank 0 reports what is wrong with it."""
    if ENV_STOPPED in os.environ:
        os._exit(EXIT_DONE)
    from ndd_engine.train.rank_run import leave, met, open_rank, refused

    training = None
    status, broken = EXIT_FAILED, False
    try:
        signals = Signals()
        # It may wait for a rank that does not start, or that failed: the launcher then sends SIGTERM to the others.
        signals.impatient = True
        training = _while_listening(partial(met, make, here))
        signals.impatient = False
        if training is None:
            leave(None, EXIT_DONE)
        opened, quiet = partial(open_rank, training), own_launcher() is not None
        if here.first:
            # The console that started the ranks prints what rank 0 records.
            run = trained(opened, training.request, as_json, training=training, signals=signals, quiet=quiet)
        else:
            run = opened()
            signals.obey(run, lambda _: None, survive_hangup=True)
            run.execute()
            run.close()
        status = status_of(run)
    except OtherRankError as error:
        status = error.exit_status
    except NddError as error:
        status, broken = error.exit_status, not here.first
        if here.first:
            refused(error)
        with contextlib.suppress(OSError):
            for line in str(error).splitlines() or ["failed"]:
                print(f"ndd-console: {printable(line)}", file=sys.stderr, flush=True)  # noqa: T201
    except BaseException:  # noqa: BLE001  the interpreter would wait for torch's threads at its end
        traceback.print_exc()
        broken = True
    leave(training, status, broken)
