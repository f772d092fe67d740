"""A run that tells its story: lines into its console.log, and to a stream where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ndd_engine.record.events import Event
from ndd_engine.train.run import Run, RunRequest

from .narrator import Narrator


class Output:
    """Writes lines to a stream and to the run's console.log. A stream that breaks is left; the run is not."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream
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


def open_narrated(
    request: RunRequest, words: Output, tap: Callable[[float, Event], None] | None = None
) -> Run:
    """Open a run whose progress goes to `words` as lines. tap: also gets every event, in the recorder's thread.

    Raises UsageError before anything is written.
    """
    run: Run | None = None
    narrator: Narrator | None = None

    def listen(t: float, event: Event) -> None:
        if tap is not None:
            tap(t, event)
        if run is not None and narrator is not None:
            narrator.look(run.recorder.snapshot())

    run = Run.open(request, listen)
    words.log_to(run.directory.console_log)
    narrator = Narrator(words.say, request.draft.resolve().log.headless_s, run.recorder.snapshot().run)
    return run
