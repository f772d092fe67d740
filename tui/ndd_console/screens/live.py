"""The live screen: polls the latest snapshot, sends commands, and asks before leaving a run of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from typing import TYPE_CHECKING, NamedTuple

from textual import events
from textual.app import ComposeResult

from ndd_console.jobs.run_sources import code_folder
from ndd_console.view.keys import LIVE_KEYS, Key
from ndd_console.view.live import LiveState, live_rows
from ndd_console.view.rows import Keys, key_at
from ndd_console.view.style import Look, Row
from ndd_console.widgets.canvas import Canvas
from ndd_console.widgets.textual_private import paint_changes
from ndd_console.words.finding import Diagnosis, first_command
from ndd_console.words.stopping import RUN_STOPPING, SCRIPT_STOPPING, still_stopping
from ndd_console.words.workers import are_known
from ndd_engine.record.figures import obeyed
from ndd_engine.record.snapshot import Snapshot

from .base import CANCEL, INTERRUPT, MESSAGE_S, KeyScreen, Question, Result
from .pages import (
    DiagnosisScreen,
    LogScreen,
    OwnValuesScreen,
    RanksScreen,
    RunPage,
    SettingsScreen,
    WorkersScreen,
)
from .trial import TrialScreen, proposed_changes

if TYPE_CHECKING:
    from ndd_console.jobs.run_sources import Action, RunSource

_WORKING = frozenset({"training", "evaluating", "checkpointing", "paused"})
_MESSAGES: dict[Action, str] = {
    "pause": "pausing after this step…",
    "resume": "resuming…",
    "checkpoint": "saving a checkpoint after this step…",
    "evaluate": "evaluating after this step…",
    "kernels": "profiling a few steps…",
}
# Share of one core that the screen may use, and the longest time between two updates.
SHARE = 0.0075
SLOWEST_S = 1.0
# Accept a tick that is this much too early instead of waiting for the next one.
EARLY = 0.9
_BLURRED_TICKS = 4  # over SSH, refresh this much slower while the terminal has no focus

# A longer wait is not shown: the clock or the record is wrong.
LONGEST_S = 1e9


class LiveScreen(KeyScreen):
    """Shows a run on a canvas."""

    keys = LIVE_KEYS

    def __init__(
        self,
        source: RunSource,
        look: Look,
        *,
        refresh_hz: float,
        clock: Callable[[], float],
        diagnosis: Diagnosis,
        on_painted: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(look, on_painted)
        self.canvas = Canvas(look)
        paint_changes(self, self.canvas)
        self.source = source
        self.diagnosis = diagnosis
        self._trials = source.trials()
        self._refresh_hz = min(refresh_hz, 4.0) if look.ssh else refresh_hz
        self._clock = clock
        self._opened_t = clock()
        self._snapshot = source.snapshot()
        self._drawn: tuple[Snapshot, LiveState] | None = None  # nothing is drawn while it is unchanged
        self._message: _Message | None = None
        self._skipped = 0
        self._left = False
        self.stopping = False

    def compose(self) -> ComposeResult:
        yield self.canvas

    def on_canvas_resized(self) -> None:
        self.paint()

    def on_mount(self) -> None:
        self._pace = DrawPace()  # of the thread that draws
        self.set_interval(1 / self._refresh_hz, self.on_time)

    def on_screen_resume(self) -> None:
        self._drawn = None

    def on_time(self) -> None:
        if self._pace.due():
            self.tick()

    def tick(self) -> None:
        """Poll the run and draw if something has changed."""
        if self.look.ssh and not self.app.app_focus:
            self._skipped = (self._skipped + 1) % _BLURRED_TICKS
            if self._skipped:
                return
        self._snapshot = self.source.snapshot()
        if self._snapshot.final:
            self._withdraw()  # nothing is left to stop
        if self.stopping and self._snapshot.final:
            self._go("stop")
        else:
            self._repaint()

    def draw(self, width: int, height: int) -> None:
        self._drawn = (self._snapshot, self._state())
        self.show_rows(live_rows(*self._drawn, width, height))

    def show_rows(self, rows: list[Row]) -> None:
        self.canvas.show(rows, code_folder(self._snapshot.run) if self.look.links else None)

    def _state(self) -> LiveState:
        snapshot = self._snapshot
        if self._message is not None and self._message.over(snapshot, self._clock()):
            self._message = None
        stopping = SCRIPT_STOPPING if self.source.script else RUN_STOPPING
        message = stopping if self.stopping else self._message.text if self._message else None
        waited = None
        if snapshot.status == "preparing":
            since = snapshot.preparing_t or self._opened_t
            waited = int(min(max(0.0, self._clock() - since), LONGEST_S))
        return LiveState(
            self.source.name,
            "stopping" if self.stopping and not snapshot.final else snapshot.status,
            self.key_words(),
            self.source.notice() or message,
            waited,
            self.diagnosis.of(snapshot),
            self._can(self._trials),
            self.early_words(),
        )

    def _repaint(self) -> None:
        if self._left or not self.is_current:
            return
        drawn = self._drawn
        if drawn is None or drawn[0] is not self._snapshot or drawn[1] != self._state():
            self.paint()

    # Keys.

    def _can(self, tool: object) -> bool:
        """Whether the trials or the wizard can start from the configuration of this run."""
        return tool is not None and self._snapshot.run is not None and not self.stopping

    def has(self, need: str) -> bool:
        snapshot, source = self._snapshot, self.source
        match need:
            case "change":
                return self._can(self._trials)
            case "wizard":
                return self._can(self.console.new_wizard) and not source.script
            case "commands":
                return source.live and not snapshot.final and not self.stopping
            case "training":
                return snapshot.status in _WORKING
            case "checkpoints" | "evaluations":
                action = "checkpoint" if need == "checkpoints" else "evaluate"
                return not source.script or action in obeyed(snapshot.run)
            case "own settings":
                return not source.script
            case "attached":
                return not source.owned
            case "ranks":
                return snapshot.ranks is not None
            case "workers":
                return are_known(snapshot)
            case "values":
                return bool(snapshot.scalars) or snapshot.texts is not None
            case _:
                return bool(first_command(source.name, self.diagnosis.of(snapshot).findings))

    def word(self, key: Key) -> str:
        if key.action == "pause":
            return "resume" if self._snapshot.status == "paused" else "pause"
        if key.action == "quit" and not self.source.owned:
            return "close"
        return key.word

    def help_keys(self) -> tuple[Key, ...]:
        """The keys that work now, and what they do to this run."""
        closes = ""
        if self._snapshot.final or not self.source.owned:
            closes = f"close the screen; the run {'has ended' if self._snapshot.final else 'continues'}"

        def help_of(key: Key) -> str:
            ending = closes if key.action in ("quit", "interrupt") else ""
            return ending or (key.of_script if self.source.script else "") or key.help

        return tuple(replace(key, help=help_of(key)) for key in self.usable())

    def say(self, text: str) -> None:
        self._message = _Message(text, _progress_of(self._snapshot), self._clock() + MESSAGE_S)
        self._repaint()

    def on_click(self, event: events.Click) -> None:
        # The footer is the last row of the canvas.
        rows = self.canvas.rows
        label = key_at(rows[-1], event.x) if rows and event.y == len(rows) - 1 else None
        if label is not None:
            self.use_key(label)

    def action_try(self) -> None:
        assert self._trials is not None
        offered = proposed_changes(self.diagnosis.of(self._snapshot).findings)
        screen = TrialScreen(self.look, self._trials, offered, lambda: self.source.snapshot().trials)
        screen.set_folder(code_folder(self._snapshot.run))
        self.app.push_screen(screen)

    def action_wizard(self) -> None:
        self.console.open_wizard(self.source)

    def _open(self, page: type[RunPage] | type[LogScreen]) -> None:
        self.app.push_screen(page(self.look, self.source))

    action_diagnosis = partialmethod(_open, DiagnosisScreen)
    action_ranks = partialmethod(_open, RanksScreen)
    action_workers = partialmethod(_open, WorkersScreen)
    action_values = partialmethod(_open, OwnValuesScreen)
    action_settings = partialmethod(_open, SettingsScreen)
    action_log = partialmethod(_open, LogScreen)

    def action_copy(self) -> None:
        command = first_command(self.source.name, self.diagnosis.of(self._snapshot).findings)
        self.app.copy_to_clipboard(command)
        self.say(f"copied: {command}")

    def _send(self, action: Action) -> None:
        self.source.command(action)
        self.say(_MESSAGES[action])

    def action_pause(self) -> None:
        self._send("resume" if self._snapshot.status == "paused" else "pause")

    action_checkpoint = partialmethod(_send, "checkpoint")
    action_evaluate = partialmethod(_send, "evaluate")
    action_kernels = partialmethod(_send, "kernels")

    # Leaving.

    def action_stop(self) -> None:
        self._ask(f"Stop {self.source.name}?", self._stop_words())

    def action_quit(self) -> None:
        name = self.source.name
        if not self.source.owned or self.source.snapshot().final:
            self._go("quit")
        elif self.stopping:
            close = ("d", "close the screen now; the run stops in the background")
            self._ask(still_stopping(name, self.source.script), (close, (CANCEL, "wait")))
        else:
            stay = ("d", f"keep it running (reattach with: ndd-console attach {name})")
            self._ask(f"{name} is still running.", (*self._stop_words(), stay))

    def _stop_words(self) -> Keys:
        return (("s", "stop the script with Ctrl-C" if self.source.script else "save a checkpoint and stop"),)

    def _ask(self, title: str, choices: Keys) -> None:
        self.app.push_screen(Question(self.look, title, choices), self._answered)

    def _withdraw(self) -> None:
        if isinstance(self.app.screen, Question):
            self.app.screen.answer(CANCEL)

    def _answered(self, answer: str | None) -> None:
        if answer == "s":
            self.stopping = self.source.owned
            self.source.command("stop")
            self.say("stop requested")
        elif answer == "d":
            self._go("detach")
        elif answer == INTERRUPT:
            self.action_interrupt()

    def action_interrupt(self) -> None:
        """Ctrl-C: stop a run of this process; close the screen of any other run."""
        if not self.source.owned or self.source.snapshot().final:
            self._go("quit")
        elif not self.stopping:
            self.stopping = True
            self.source.command("interrupt")
            self._repaint()
        else:
            self.source.command("kill")
            self._go("kill")

    def leave_when_final(self) -> None:
        """The run is stopping for another reason, such as a signal: show that, and leave when it has ended."""
        self.stopping = True
        self._withdraw()
        self.tick()

    def _go(self, result: Result) -> None:
        if not self._left:
            self._left = True
            self.console.leave_live(result)


class DrawPace:
    """Decides at every tick of a timer whether to draw. cpu: CPU seconds of the screen's thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock, self._cpu = clock, cpu
        self._drawn_s = clock()
        self._spent_s = cpu()

    def due(self) -> bool:
        """Whether to draw now: the CPU time since the last update is below `SHARE` of the time that has passed."""
        now, spent = self._clock(), self._cpu()
        wait_s = min((spent - self._spent_s) / SHARE, SLOWEST_S)
        if now - self._drawn_s < EARLY * wait_s:
            return False
        self._drawn_s, self._spent_s = now, spent
        return True


class _Message(NamedTuple):
    """What was said to the user. progress: of the run then. until_t: when it has been read."""

    text: str
    progress: tuple[object, ...]
    until_t: float

    def over(self, snapshot: Snapshot, t: float) -> bool:
        """Whether a request has taken effect, or what was said is old."""
        waits = self.text in _MESSAGES.values()  # for its effect, however long that takes
        return self.progress != _progress_of(snapshot) or (not waits and t > self.until_t)


def _progress_of(snapshot: Snapshot) -> tuple[object, ...]:
    """State that changes when a command takes effect."""
    return (snapshot.status, snapshot.marks[-1] if snapshot.marks else None)
