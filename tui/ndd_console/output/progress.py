"""A run as lines of text for logs and pipes: progress every few seconds, and events as they happen."""

from __future__ import annotations

import time
from collections.abc import Callable

from ndd_console.words.finding import event_line
from ndd_console.words.run import introduction, progress_line
from ndd_engine.record.events import Event, FindingEvent, RunEvent, SettingEvent, TrialEvent
from ndd_engine.record.figures import setting_text
from ndd_engine.record.snapshot import Snapshot, TimedMark
from ndd_engine.text import printable

# Kinds of marks that are reported.
_REPORTED = frozenset({
    "epoch", "evaluation", "checkpoint", "compile", "recompile", "pause", "resume", "warning", "choice", "note",
})  # fmt: skip


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
                advice = (finding.sets, bool(finding.leave), finding.from_steps is None)
                self._findings[event.cause] = advice
            if before != self._findings.get(event.cause) and (line := event_line(event)):
                self._say(line)
        elif isinstance(event, TrialEvent):
            self._say(f"trial of {', '.join(event.sets)} vs. {event.against}: {event.text}")

    def look(self, snapshot: Snapshot) -> None:
        """Report what is new since the last call."""
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
