"""The live screen: polls the latest snapshot, sends commands, and asks before leaving a run of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from textual import events

from ndd_console.screens.interfaces import Action, RunSource
from ndd_console.view.frame import Keys
from ndd_console.view.live import LiveState, live_rows
from ndd_console.view.own_values import has_own_values
from ndd_console.view.question import box, overlay
from ndd_console.view.style import Look, Row
from ndd_console.words.diagnosis import Diagnosis
from ndd_engine.record.snapshot import Snapshot

from .base import CanvasScreen, key_of
from .pace import Pace
from .pages import DiagnosisScreen, HelpScreen, LogScreen, OwnValuesScreen, RanksScreen, SettingsScreen
from .trial import TrialScreen, proposed_changes

Result = Literal["quit", "stop", "detach", "kill", "hangup"]

STOPPING = "stopping after a checkpoint; press Ctrl-C again to stop immediately"
STOPPING_SCRIPT = "the script was sent Ctrl-C; press Ctrl-C again to kill it"
_WORKING = frozenset({"training", "evaluating", "checkpointing", "paused"})
# key: (command, message).
_COMMANDS: dict[str, tuple[Action, str]] = {
    "p": ("pause", "pausing after this step…"),
    "c": ("checkpoint", "saving a checkpoint after this step…"),
    "e": ("evaluate", "evaluating after this step…"),
    "k": ("kernels", "profiling a few steps…"),
}
_BLURRED_TICKS = 4  # over SSH, refresh this much slower while the terminal has no focus

# A longer wait is not shown: the clock or the record is wrong.
LONGEST_S = 1e9


class LiveScreen(CanvasScreen):
    """Shows a run. `leave` is called once, when the screen is closed."""

    def __init__(
        self,
        source: RunSource,
        look: Look,
        leave: Callable[[Result], None],
        *,
        refresh_hz: float,
        clock: Callable[[], float],
        diagnosis: Diagnosis,
        on_painted: Callable[[], None] | None = None,
        wizard: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(look, on_painted)
        self.source = source
        self._wizard = wizard
        self._diagnosis = diagnosis
        self._trials = source.trials()
        self._leave = leave
        self._refresh_hz = min(refresh_hz, 4.0) if look.ssh else refresh_hz
        self._clock = clock
        self._opened_t = clock()
        self._snapshot = source.snapshot()
        self._drawn: tuple[Snapshot, LiveState, str] | None = None  # nothing is drawn while it is unchanged
        self._message: tuple[str, tuple[object, ...]] | None = None
        self._asking: Literal["", "leave", "stop"] = ""
        self._skipped = 0
        self._left = False
        self.stopping = False

    def on_mount(self) -> None:
        self._pace = Pace()  # of the thread that draws
        self.set_interval(1 / self._refresh_hz, self.on_time)

    def on_screen_resume(self) -> None:
        self._drawn = None

    def on_time(self) -> None:
        """Called by the timer."""
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
            self._asking = ""  # nothing is left to stop
        if self.stopping and self._snapshot.final:
            self._go("stop")
        else:
            self._repaint()

    def draw(self, width: int, height: int) -> list[Row]:
        self._drawn = (self._snapshot, self._state(), self._asking)
        rows = live_rows(*self._drawn[:2], width, height)
        if self._asking:
            rows = overlay(rows, box(*self._question(), width), width)
        return rows

    def _state(self) -> LiveState:
        snapshot = self._snapshot
        if self._message is not None and self._message[1] != _progress_of(snapshot):
            self._message = None  # the request has taken effect
        stopping = STOPPING_SCRIPT if self.source.script else STOPPING
        message = stopping if self.stopping else self._message[0] if self._message else None
        waited = None
        if snapshot.status == "preparing":
            since = snapshot.preparing_t or self._opened_t
            waited = int(min(max(0.0, self._clock() - since), LONGEST_S))
        return LiveState(
            self.source.name,
            "stopping" if self.stopping and not snapshot.final else snapshot.status,
            self._keys(snapshot),
            self.source.notice() or message,
            waited,
            self._diagnosis.of(snapshot),
            self._can(self._trials),
        )

    def _steerable(self, snapshot: Snapshot) -> bool:
        return self.source.live and not snapshot.final and not self.stopping

    def _can(self, tool: object) -> bool:
        """Whether the trials or the wizard can start from the configuration of this run."""
        return tool is not None and self._snapshot.run is not None and not self.stopping

    def _keys(self, snapshot: Snapshot) -> Keys:
        keys: list[tuple[str, str]] = [("t", "try")] if self._can(self._trials) else []
        keys.append(("d", "diagnosis"))
        if snapshot.ranks is not None:
            keys.append(("r", "ranks"))
        if self._can(self._wizard) and not self.source.script:
            keys.append(("w", "wizard"))
        if self._steerable(snapshot):
            if snapshot.status in _WORKING:
                if not self.source.script:
                    keys.append(("p", "resume" if snapshot.status == "paused" else "pause"))
                    keys += [("c", "checkpoint"), ("e", "evaluate")]
                keys.append(("k", "profile"))
            if not self.source.owned:
                keys.append(("s", "stop"))
        if has_own_values(snapshot):
            keys.append(("v", "values"))
        leaving = "quit" if self.source.owned else "close"
        return (*keys, ("i", "settings"), ("l", "log"), ("?", "help"), ("q", leaving))

    def _question(self) -> tuple[str, Keys]:
        name, script = self.source.name, self.source.script
        stop = ("s", "stop the script with Ctrl-C" if script else "save a checkpoint and stop")
        if self._asking == "stop":
            return f"Stop {name}?", (stop, ("esc", "cancel"))
        if self.stopping:
            close = ("d", "close the screen now; the run stops in the background")
            return f"{name} is stopping{'' if script else ' after a checkpoint'}.", (close, ("esc", "wait"))
        stay = ("d", f"keep it running (reattach with: ndd-console attach {name})")
        return f"{name} is still running.", (stop, stay, ("esc", "cancel"))

    def on_key(self, event: events.Key) -> None:
        key = key_of(event)
        event.stop()
        if key == "ctrl+c":
            self._interrupt()
        elif self._asking:
            self._answer(key)
        elif key in ("q", "ctrl+q"):
            self._ask_to_leave()
        elif key == "d":
            try_it = self._try if self._can(self._trials) else None
            self.app.push_screen(DiagnosisScreen(self.look, self.source, self._diagnosis, try_it))
        elif key == "t" and self._can(self._trials):
            self._try()
        elif key == "w" and self._wizard is not None and self._can(self._wizard) and not self.source.script:
            self._wizard()
        elif key == "v":
            self.app.push_screen(OwnValuesScreen(self.look, self.source))
        elif key == "r" and self._snapshot.ranks is not None:
            self.app.push_screen(RanksScreen(self.look, self.source))
        elif key == "i":
            self.app.push_screen(SettingsScreen(self.look, self.source))
        elif key == "l":
            self.app.push_screen(LogScreen(self.look, self.source))
        elif key == "?":
            self.app.push_screen(HelpScreen(self.look))
        elif self._steerable(self._snapshot):
            self._steer(key)
        self._repaint()

    def _repaint(self) -> None:
        """Draw if something has changed."""
        if self._left or not self.is_current:
            return
        drawn = self._drawn
        if drawn is None or drawn[0] is not self._snapshot or drawn[1:] != (self._state(), self._asking):
            self.paint()

    def _steer(self, key: str) -> None:
        if key == "s" and not self.source.owned:
            self._asking = "stop"
        status = self._snapshot.status
        if status not in _WORKING or (self.source.script and key != "k"):
            return
        if key in _COMMANDS:
            action, message = _COMMANDS[key]
            if key == "p" and status == "paused":
                action, message = "resume", "resuming…"
            self._message = (message, _progress_of(self._snapshot))
            self.source.command(action)

    def _try(self) -> None:
        """Open the trial screen."""
        assert self._trials is not None
        offered = proposed_changes(self._diagnosis.of(self._snapshot).findings)
        screen = TrialScreen(self.look, self._trials, offered, lambda: self.source.snapshot().trials)
        self.app.push_screen(screen)

    def _ask_to_leave(self) -> None:
        if self.source.owned and not self.source.snapshot().final:
            self._asking = "leave"
        else:
            self._go("quit")

    def _answer(self, key: str) -> None:
        asking, self._asking = self._asking, ""
        if key == "s" and not self.stopping:
            self.source.command("stop")
            if asking == "leave":
                self.stopping = True
            else:
                self._message = ("stop requested", _progress_of(self._snapshot))
        elif key == "d" and asking == "leave":
            self._go("detach")
        elif key not in ("escape", "q", "ctrl+q", "n"):
            self._asking = asking

    def _interrupt(self) -> None:
        """Ctrl-C: stop a run of this process; close the screen of any other run."""
        if not self.source.owned or self.source.snapshot().final:
            self._go("quit")
            return
        self._asking = ""
        if not self.stopping:
            self.stopping = True
            self.source.command("interrupt")
        else:
            self.source.command("kill")
            self._go("kill")

    def leave_when_final(self) -> None:
        """The run is stopping for another reason, such as a signal: show that, and leave when it has ended."""
        self.stopping = True
        self._asking = ""
        self.tick()

    def _go(self, result: Result) -> None:
        if not self._left:
            self._left = True
            self._leave(result)


def _progress_of(snapshot: Snapshot) -> tuple[object, ...]:
    """State that changes when a command takes effect."""
    return (snapshot.status, snapshot.marks[-1] if snapshot.marks else None)
