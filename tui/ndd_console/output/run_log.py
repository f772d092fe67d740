"""A run whose progress is written as text to its console.log and to a stream."""

from __future__ import annotations

import io
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ndd_console.words.finding import event_line
from ndd_console.words.run import introduction, progress_line
from ndd_console.words.trial import trial_line
from ndd_engine.diagnose.finding import advice_of
from ndd_engine.files import open_regular
from ndd_engine.record.events import Event, FindingEvent, MarkEvent, RunEvent, SettingEvent, TrialEvent
from ndd_engine.record.figures import setting_text
from ndd_engine.record.file import Listener
from ndd_engine.record.snapshot import Snapshot, TimedMark
from ndd_engine.run.run import Run
from ndd_engine.text import printable

# Kinds of marks that are reported.
_REPORTED = frozenset({
    "epoch", "evaluation", "checkpoint", "compile", "recompile", "pause", "resume", "warning", "choice", "note",
})  # fmt: skip
# Queued lines while the reader is blocked (a pager, Ctrl-S): about half an hour of a run.
PATIENT_LINES = 5000
# Seconds to wait at the end for a reader that takes nothing.
PATIENCE_S = 10.0


class Output(io.TextIOBase):
    """Writes lines to a stream and to the run's console.log. A broken stream or log is dropped; the run continues.

    The stream is written in a thread of its own, so that a blocked reader blocks nothing else. Text that does not fit
    into the queue is dropped, except for the last one, which may be the end of a run.
    """

    encoding = "utf-8"

    def __init__(self, stream: TextIO | None = None, name: str = "words") -> None:
        super().__init__()
        self._stream, self._name = stream, name
        self._log: TextIO | None = None
        self._dropped, self._written = 0, 0  # numbers of texts
        self._error, self._left = "", False  # why the stream is broken, and whether its reader has left
        # Not a Queue: a signal handler that writes while its thread holds the lock of one would wait for ever.
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._drain, name=f"ndd-{name}", daemon=True)
        self._late: str | None = None
        if stream is not None:
            with suppress(RuntimeError):  # without a thread it is written directly
                self._thread.start()

    def log_to(self, path: Path) -> None:
        try:
            handle = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._log = os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
        except OSError:
            self._log = None

    def say(self, line: str) -> None:
        self.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def write(self, text: str) -> int:
        """Also Python's warnings and prints, when this replaces standard error and standard output."""
        self._put(text)
        if self._log is not None:
            try:
                self._log.write(text)
            except (OSError, ValueError, RuntimeError):
                self._log = None
        return len(text)

    def data(self, line: str) -> None:
        """Write a line for programs, to the stream only."""
        self._put(line + "\n")

    def _put(self, text: str) -> None:
        """Write the text to the stream soon. Never blocks while the thread is running."""
        if self._stream is None:
            return
        if not self._thread.is_alive():
            self._send(self._stream, text)
        elif self._queue.qsize() < PATIENT_LINES:
            self._queue.put(text)
        else:
            self._dropped += self._late is not None
            self._late = text

    def _drain(self) -> None:
        assert self._stream is not None
        while (text := self._queue.get()) is not None:
            self._send(self._stream, text)

    def _send(self, stream: TextIO, text: str) -> None:
        if self._error:
            self._dropped += 1
            return
        encoding = getattr(stream, "encoding", None) or "utf-8"
        data = text.encode(encoding, "backslashreplace")
        try:
            try:
                handle = stream.fileno()
            except (OSError, ValueError):  # not a file, as in a test
                stream.write(data.decode(encoding))
                stream.flush()
                data = b""
            # Not through the stream's buffer: a blocked write would hold its lock, and the interpreter could not exit.
            while data:
                data = data[os.write(handle, data) :]
                self._written += 1
        except (OSError, ValueError, RuntimeError) as error:
            self._error = getattr(error, "strerror", None) or str(error)
            self._left = isinstance(error, BrokenPipeError)
            self._dropped += 1

    def finish(self) -> str:
        """Write the rest. Returns what was lost and why; "" if nothing was, or nobody wants it any more.

        Gives up when the reader takes nothing for PATIENCE_S; the thread then remains blocked until the process exits.
        """
        if self._late is not None:
            self._queue.put(self._late)
        self._queue.put(None)
        blocked = False
        while self._thread.is_alive() and not blocked:
            before = self._written
            self._thread.join(PATIENCE_S)
            blocked = before == self._written and self._thread.is_alive()
        if blocked and self._stream is not None:
            self._dropped += self._queue.qsize()  # and the one that is being written, for the None
            with suppress(OSError, ValueError):
                # Discard what others still write to it: the interpreter flushes at exit.
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self._stream.fileno())
                os.close(nothing)
        if not self._dropped or self._left:
            return ""
        why = self._error or ("its reader stopped reading" if blocked else "its reader was too slow")
        many = "1 line was" if self._dropped == 1 else f"{self._dropped:,} lines were"
        return f"{many} not written to standard {self._name}: {why}"

    def flush(self) -> None:
        """Every write is on its way already."""

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()


class RunLog:
    """Opens a run and writes its progress to `words`, in a thread.

    opened: opens the run. tap: called with every event, in that thread. Raises UsageError before anything is written.
    """

    def __init__(
        self,
        opened: Callable[[Listener], Run],
        every_s: float,
        words: Output,
        tap: Callable[[float, Event], None] | None = None,
        logged: bool = True,
    ) -> None:
        """every_s: from one line of progress to the next. logged: also into console.log."""
        self._queue: queue.SimpleQueue[tuple[float, Event] | str | None] = queue.SimpleQueue()
        self._words = words
        self._tap = tap
        since = time.time()
        self.run = opened(lambda t, event: self._offer((t, event)))
        if logged:
            words.log_to(self.run.directory.console_log)
        self._progress = RunProgress(words.say, every_s, self.run.recorder.snapshot().run, since)
        self._thread = threading.Thread(target=self._report, name="ndd-progress", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.run.put(MarkEvent("warning", 0, f"progress is not printed: {error}"))

    def say(self, line: str) -> None:
        """Write a line. Never blocks, so it is safe in a signal handler."""
        self._offer(line)

    def finish(self, timeout_s: float = PATIENCE_S) -> None:
        """Report the remaining events, for up to `timeout_s`."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)
        self._progress.look(self.run.recorder.snapshot())

    def _offer(self, item: tuple[float, Event] | str) -> None:
        if self._queue.qsize() < PATIENT_LINES:  # else console.log is on a disk that hangs
            self._queue.put(item)

    def _report(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, str):
                self._words.say(item)
                continue
            if self._tap is not None:
                self._tap(*item)
            self._progress.hear(*item)
            self._progress.look(self.run.recorder.snapshot())


class RunProgress:
    """Reports what is new in a snapshot through `say` (one line without a newline).

    known: the run event before a resume, which is not reported again. since: unix seconds; earlier events are not
    reported (default: now).
    """

    def __init__(
        self,
        say: Callable[[str], None],
        every_s: float = 5.0,
        known: RunEvent | None = None,
        since: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say: Callable[[str], None] = lambda line: say(printable(line))
        self._every_s = every_s
        self._clock = clock
        self._next = 0.0
        self._stage = ""
        self._next_stage = 0.0
        self._since = time.time() if since is None else since  # earlier events are in the log already
        self._latest: TimedMark | None = None
        self._introduced = known
        self._settings: dict[str, SettingEvent] = {}
        self._findings: dict[str, object] = {}  # cause -> the reported advice
        self._step = -1

    def hear(self, t: float, event: Event) -> None:
        """Report events that are not in a snapshot: findings and the results of trials."""
        if t < self._since:
            return
        if isinstance(event, FindingEvent):
            before = self._findings.pop(event.cause, None)
            finding = event.finding
            if finding is not None and not event.gone:  # a ceiling that moves is not reported again
                self._findings[event.cause] = advice_of(finding)
            if before != self._findings.get(event.cause) and (line := event_line(event)):
                self._say(line)
        elif isinstance(event, TrialEvent):
            self._say(trial_line(event))

    def look(self, snapshot: Snapshot) -> None:
        now, stage = self._clock(), snapshot.stage
        new = stage and stage != self._stage and snapshot.status == "preparing"
        # A stage that counts its progress is reported every few seconds only.
        if new and (_words(stage) != _words(self._stage) or now >= self._next_stage):
            self._next_stage = now + self._every_s
            self._say(stage)
        self._stage = stage
        if snapshot.run is not None and snapshot.run is not self._introduced:
            self._introduced = snapshot.run
            for line in introduction(snapshot):
                self._say(line)
        for setting in snapshot.settings:
            before, self._settings[setting.name] = self._settings.get(setting.name), setting
            told = None if before is None else (before.in_effect, before.applied)
            if setting.in_effect is not None and told != (setting.in_effect, setting.applied):
                word = "setting" if setting.in_effect else "warning:"
                self._say(f"{word} {setting_text(setting)}")
        marks = snapshot.marks
        # Compared by identity: several marks may have the same time.
        seen = next((index for index in range(len(marks) - 1, -1, -1) if marks[index] is self._latest), -1)
        self._latest = marks[-1] if marks else self._latest
        for timed in marks[seen + 1 :]:
            # A setting that is not in effect is also a mark; it was just reported.
            if timed.t >= self._since and timed.mark.kind in _REPORTED and "setting" not in timed.mark.data:
                self._say(f"{'warning: ' * (timed.mark.kind == 'warning')}{timed.mark.text}")
        progressed = snapshot.steps_per_s is not None and snapshot.step != self._step
        if progressed and now >= self._next and not snapshot.final:
            self._next = now + self._every_s
            self._step = snapshot.step
            self._say(progress_line(snapshot))


def _words(stage: str) -> str:
    """A stage without its numbers."""
    return "".join(char for char in stage if not char.isdigit() and char != ",")
