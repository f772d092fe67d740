"""A run without a screen: text on standard error, events on standard output."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from ndd_console.output.progress import summary
from ndd_console.output.run_log import Output, RunLog
from ndd_engine.errors import EXIT_INTERRUPTED
from ndd_engine.record.events import Event
from ndd_engine.train.control import StopNow
from ndd_engine.train.run import Run, RunRequest


def run_headless(request: RunRequest, as_json: bool) -> int:
    """Train on this thread and return the exit status. Raises UsageError before anything is written."""
    words, data = Output(sys.stderr), Output(sys.stdout)

    def as_line(t: float, event: Event) -> None:
        data.data(event.to_json(t))

    run_log = RunLog(request, words, as_line if as_json else None)
    run = run_log.run
    handle_signals(run, run_log.say, request.draft.resolve().console.on_hangup == "continue")
    before = sys.stdout, sys.stderr
    # Warnings and prints of the user's workload belong into the record, and not between the events.
    sys.stdout = sys.stderr = words
    try:
        end = run.execute()
    finally:
        sys.stdout, sys.stderr = before
        run.close()
        run_log.finish()
    if not as_json:
        for line in summary(run.recorder.snapshot(), end, str(run.directory.path)):
            data.data(line)
    return end.exit_status


def reason_of(number: int) -> tuple[str, str]:
    """Reason and status of a run that a signal ends."""
    if number == signal.SIGTERM:
        return "terminated (SIGTERM)", "terminated"
    return "interrupted (Ctrl-C)", "interrupted"


def handle_signals(run: Run, say: Callable[[str], None], survive_hangup: bool) -> None:
    """SIGINT and SIGTERM stop after a checkpoint; a second one immediately; a third one ends the process."""
    requests = 0

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal requests
        requests += 1
        if requests == 1:
            run.control.request("stop", *reason_of(number))
            say("stopping after a checkpoint; press Ctrl-C again to stop immediately")
        elif requests == 2:
            run.control.request("kill", *reason_of(number))
            if run.end is None:
                raise StopNow
        else:
            os._exit(EXIT_INTERRUPTED)

    def hangup(_number: int, _frame: FrameType | None) -> None:
        if survive_hangup:
            say("lost the terminal (SIGHUP); the run continues")
        else:
            stop(signal.SIGTERM, None)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, hangup)
