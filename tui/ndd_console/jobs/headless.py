"""A run without a screen: text on standard error, events on standard output."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from ndd_console.output.run_log import Output, RunLog
from ndd_console.process.restart import restart, told
from ndd_console.words.run import summary
from ndd_engine.errors import EXIT_INTERRUPTED
from ndd_engine.record.events import Event
from ndd_engine.record.file import Listener
from ndd_engine.train.control import StopNow
from ndd_engine.train.run import Run, RunRequest

if TYPE_CHECKING:
    from ndd_engine.script.run import ScriptRun
    from ndd_engine.train.ranks_run import RanksRun

STOPPING = "stopping after a checkpoint; press Ctrl-C again to stop immediately"
# Seconds within which several SIGTERMs count as one.
SAME_TERM_S = 1.0


def run_headless(request: RunRequest, as_json: bool) -> int:
    """Train on this thread and return the exit status. Raises UsageError before anything is written.

    The status is that of the run, whether its output can be written or not. Where only a new process can train on, this
    one is replaced by it.
    """
    run = trained(request, as_json)
    if run.restarts:
        restart(request.root, (*run.goes_on, "--json" if as_json else "--headless"))
    assert run.end is not None
    return run.end.exit_status


def trained(
    request: RunRequest,
    as_json: bool,
    opened: Callable[[RunRequest, Listener], Run] = Run.open,
    signals: Signals | None = None,
    quiet: bool = False,
) -> Run:
    """As `run_headless`; returns the run after its end.

    opened: opens the run. signals: handled already. quiet: write to console.log only.
    """
    signals = signals or Signals()
    words = Output(None if quiet else sys.stderr, "error")
    data = Output(None if quiet else sys.stdout, "output")

    def as_line(t: float, event: Event) -> None:
        data.data(event.to_json(t))

    run_log = RunLog(request, words, as_line if as_json else None, opened)
    run = run_log.run
    signals.obey(run_log, request.draft.resolve().console.on_hangup == "continue")
    before = sys.stdout, sys.stderr
    # Warnings and prints of the user's workload belong into the record, and not between the events.
    sys.stdout = sys.stderr = words
    try:
        end = run.execute()
    finally:
        sys.stdout, sys.stderr = before
        run.close()
        run_log.finish()
    if run.restarts:
        words.say(told(run.goes_on))
    elif not as_json:
        data.data("\n".join(summary(run.recorder.snapshot(), end, str(run.directory.path))))
    finish(words, data)
    return run


def finish(words: Output, data: Output) -> None:
    """Write what is left, and say what could not be written."""
    if lost := data.finish():
        words.say(f"warning: {lost}")
    words.finish()


def stop_on_signals(
    run: RanksRun | ScriptRun, say: Callable[[str], None] = lambda _: None, *, hangup: bool = False
) -> None:
    """SIGINT and SIGTERM stop the run, the second one immediately. SIGHUP does so, too, if `hangup` says so."""

    def stop(number: int, _frame: FrameType | None) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number
        again = run.control.stopping
        run.control.request("kill" if again else "stop", *reason_of(number))
        if not again:
            say(STOPPING)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    signal.signal(signal.SIGHUP, stop if hangup else signal.SIG_IGN)


def reason_of(number: int) -> tuple[str, str]:
    """Reason and status of a run that a signal ends."""
    if number == signal.SIGTERM:
        return "terminated (SIGTERM)", "terminated"
    return "interrupted (Ctrl-C)", "interrupted"


@dataclass(frozen=True)
class Unheard:
    """A run whose progress nobody reads, in place of a RunLog."""

    run: Run

    def say(self, line: str) -> None:
        """Write nothing."""


class Signals:
    """SIGINT and SIGTERM stop after a checkpoint; a second one immediately; a third one ends the process.

    Before there is a run, the first one is kept for it, and a second one ends the process. SIGTERMs in quick succession
    are one: a service manager sends it to all processes of a service, and some of them pass it on.
    """

    def __init__(self) -> None:
        self._log: RunLog | Unheard | None = None
        self._survive_hangup = True
        self._requests: list[int] = []
        self._last_term_s = -SAME_TERM_S
        # Whether the first signal ends the process: nothing has begun that could be kept.
        self.impatient = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._hangup)

    def obey(self, log: RunLog | Unheard, survive_hangup: bool) -> None:
        """Stop this run from now on."""
        self._log, self._survive_hangup = log, survive_hangup
        report = sys.unraisablehook

        def unraisable(unraisable_error: Any) -> None:
            # An immediate stop interrupts destructors and half-started workers, too.
            if not log.run.control.kill:
                report(unraisable_error)

        sys.unraisablehook = unraisable
        if self._requests:
            self._request(self._requests[0])

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            before, self._last_term_s = self._last_term_s, time.monotonic()
            if self._last_term_s - before < SAME_TERM_S:
                return
        self._requests.append(number)
        if self.impatient or len(self._requests) > (2 if self._log is not None else 1):
            os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number)
        if self._log is not None:
            self._request(number)

    def _request(self, number: int) -> None:
        assert self._log is not None
        control = self._log.run.control
        if len(self._requests) == 1:
            control.request("stop", *reason_of(number))
            self._log.say(STOPPING)
            return
        control.request("kill", *reason_of(number))
        if self._log.run.interruptible:
            raise StopNow

    def _hangup(self, _number: int, frame: FrameType | None) -> None:
        if not self._survive_hangup:
            self._stop(signal.SIGTERM, frame)
        elif self._log is not None:
            self._log.say("lost the terminal (SIGHUP); the run continues")
