"""A run without a screen: the engine on the main thread, lines to standard error, events to standard output."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TextIO

from ndd_engine.errors import EXIT_INTERRUPTED
from ndd_engine.record.events import Event
from ndd_engine.train.control import StopNow
from ndd_engine.train.run import Run, RunRequest

from .narrator import Narrator, summary


class Output:
    """Writes lines to a stream and to the run's console.log. A stream that breaks is left; the run is not."""

    def __init__(self, stream: TextIO) -> None:
        self.stream: TextIO | None = stream
        self._log: TextIO | None = None

    def log_to(self, path: Path) -> None:
        """From now on also into this file."""
        try:
            self._log = path.open("a", encoding="utf-8", buffering=1)
        except OSError:
            self._log = None

    def say(self, line: str) -> None:
        """One line for people."""
        self._write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def data(self, line: str) -> None:
        """One line for programs; not in the log."""
        if self.stream is not None:
            try:
                self.stream.write(line + "\n")
                self.stream.flush()
            except (OSError, ValueError):
                self.stream = None

    def write(self, text: str) -> int:
        """Python's own warnings, when this stands in for standard error."""
        self._write(text)
        return len(text)

    def flush(self) -> None:
        """Lines are flushed as they are written."""

    def _write(self, text: str) -> None:
        for name in ("stream", "_log"):
            target: TextIO | None = self.stream if name == "stream" else self._log
            if target is None:
                continue
            try:
                target.write(text)
                target.flush()
            except (OSError, ValueError):
                setattr(self, name, None)


def run_headless(request: RunRequest, as_json: bool) -> int:
    """Train on this thread to the end. Returns the exit status. Raises UsageError before anything is written."""
    words, events = Output(sys.stderr), Output(sys.stdout)
    run: Run | None = None
    narrator: Narrator | None = None

    def listen(t: float, event: Event) -> None:
        if as_json:
            events.data(event.to_json(t))
        if run is not None and narrator is not None:
            narrator.look(run.recorder.snapshot())

    run = Run.open(request, listen)
    words.log_to(run.directory.console_log)
    config = request.draft.resolve()
    narrator = Narrator(words.say, config.log.headless_s, run.recorder.snapshot().run)
    handle_signals(run, words, config.console.on_hangup == "continue")
    sys.stderr = words  # warnings belong to the record too
    try:
        end = run.execute()
    finally:
        sys.stderr = sys.__stderr__
    run.close()
    snapshot = run.recorder.snapshot()
    narrator.look(snapshot)
    if not as_json:
        for line in summary(snapshot, end, str(run.directory.path)):
            events.data(line)
    return end.exit_status


def handle_signals(run: Run, words: Output, survive_hangup: bool) -> None:
    """SIGINT and SIGTERM stop after a checkpoint, a second one at once, a third without a word."""
    counts = {"asked": 0}

    def stop(number: int, _frame: FrameType | None) -> None:
        counts["asked"] += 1
        interrupted = number == signal.SIGINT
        reason = "interrupted (Ctrl-C)" if interrupted else "terminated (SIGTERM)"
        if counts["asked"] == 1:
            run.control.request("stop", reason, "interrupted" if interrupted else "terminated")
            words.say("stopping after a checkpoint; press Ctrl-C again to stop at once")
        elif counts["asked"] == 2:
            run.control.request("kill", reason, "interrupted" if interrupted else "terminated")
            raise StopNow
        else:
            os._exit(EXIT_INTERRUPTED)

    def hangup(_number: int, _frame: FrameType | None) -> None:
        if survive_hangup:
            words.say("the terminal is gone (SIGHUP); the run goes on")
        else:
            stop(signal.SIGTERM, None)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, hangup)
