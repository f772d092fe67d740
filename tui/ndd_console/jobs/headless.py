"""A run without a screen: the engine on the main thread, lines to standard error, events to standard output."""

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
    """Train on this thread to the end. Returns the exit status. Raises UsageError before anything is written."""
    words, data = Output(sys.stderr), Output(sys.stdout)

    def as_line(t: float, event: Event) -> None:
        data.data(event.to_json(t))

    run_log = RunLog(request, words, as_line if as_json else None)
    run = run_log.run
    handle_signals(run, run_log.say, request.draft.resolve().console.on_hangup == "continue")
    before = sys.stdout, sys.stderr
    # Warnings, and what a user's own workload prints, belong to the record too, and not between lines of data.
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


def handle_signals(run: Run, say: Callable[[str], None], survive_hangup: bool) -> None:
    """SIGINT and SIGTERM stop after a checkpoint, a second one at once, a third without a word."""
    counts = {"asked": 0}

    def stop(number: int, _frame: FrameType | None) -> None:
        counts["asked"] += 1
        interrupted = number == signal.SIGINT
        reason = "interrupted (Ctrl-C)" if interrupted else "terminated (SIGTERM)"
        if counts["asked"] == 1:
            run.control.request("stop", reason, "interrupted" if interrupted else "terminated")
            say("stopping after a checkpoint; press Ctrl-C again to stop at once")
        elif counts["asked"] == 2:
            run.control.request("kill", reason, "interrupted" if interrupted else "terminated")
            if run.end is None:
                raise StopNow
        else:
            os._exit(EXIT_INTERRUPTED)

    def hangup(_number: int, _frame: FrameType | None) -> None:
        if survive_hangup:
            say("the terminal is gone (SIGHUP); the run goes on")
        else:
            stop(signal.SIGTERM, None)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, hangup)
