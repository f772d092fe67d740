"""The console application: opens the screens, and says how it was left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from textual.app import App
from textual.filter import NoColor
from textual.message import Message
from textual.screen import Screen
from textual.timer import Timer, TimerCallback

from ndd_console.screens.base import Look, post_from_thread
from ndd_console.screens.diagnosis import Diagnosis, Rules
from ndd_console.screens.home import HomeScreen
from ndd_console.screens.interfaces import HomeSource, RunRow, RunSource, StartRow
from ndd_console.screens.live import LiveScreen, Result
from ndd_console.screens.tuning import TuningScreen, TuningSource
from ndd_console.screens.wizard import WizardScreen, WizardSource
from ndd_engine.diagnose import diagnose
from ndd_engine.errors import NddError

Opener = Callable[[str], RunSource]
# For the run that is on the screen, None for none.
WizardOpener = Callable[[RunSource | None], WizardSource]


class CanvasApp(App[str], inherit_bindings=False):
    """What every app of canvases shares: no colours but the terminal's own, and ways out from any thread."""

    TITLE = "ndd-console"
    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: ansi_default; color: ansi_default; }"

    def __init__(self, *, ascii_only: bool, monochrome: bool) -> None:
        super().__init__(ansi_color=True)
        self.animation_level = "none"
        self._look = Look(ascii_only, monochrome or self.no_color)
        if monochrome and not self.no_color:
            self.no_color = True
            self._filters.append(NoColor())
        self._gone = False
        self._console_loop: asyncio.AbstractEventLoop | None = None
        self._leaving = ""

    def on_mount(self) -> None:
        self._console_loop = asyncio.get_running_loop()
        if self._leaving:
            self._finish(self._leaving)

    def set_timer(
        self,
        delay: float,
        callback: TimerCallback | None = None,
        *,
        name: str | None = None,
        pause: bool = False,
    ) -> Timer:
        """As Textual's, but one that is late still fires.

        Textual 8.2 drops a timer whose thread was held up past its time, as by a training thread that has the
        interpreter's lock. Its resize of 1/120 s was lost so, and with it every later one.
        """
        timer = super().set_timer(delay, callback, name=name, pause=pause)
        timer._skip = False  # read when the timer's task first runs, which is after this
        return timer

    def leave(self) -> None:
        """Make `run()` return "quit". From a signal handler or any thread, at any time."""
        self._leave_soon("quit")

    def _leave_soon(self, result: str) -> None:
        self._leaving = self._leaving or result
        self._soon(lambda: self._finish(result))

    def _soon(self, callback: Callable[[], None]) -> None:
        loop = self._console_loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(callback)
            except RuntimeError:
                return  # the loop was closed in this moment: the app has ended

    def _finish(self, result: str) -> None:
        if not self._gone:
            self._gone = True
            self.exit(result)


class TuningApp(CanvasApp):
    """The ladder screen. `run()` returns "quit" once it is over and closed, or when the app was made to leave."""

    def __init__(
        self,
        climb: TuningSource,
        *,
        ascii_only: bool = False,
        monochrome: bool = False,
        on_first_paint: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(ascii_only=ascii_only, monochrome=monochrome)
        self._climb = climb
        self._on_first_paint = on_first_paint

    def get_default_screen(self) -> Screen[None]:
        return TuningScreen(self._look, self._climb, lambda: self._finish("quit"), self._on_first_paint)


class WizardApp(CanvasApp):
    """The wizard's screen. to_train: the file that is to be trained once it is closed, "" for none."""

    def __init__(
        self,
        source: WizardSource,
        *,
        can_train: bool = True,
        ascii_only: bool = False,
        monochrome: bool = False,
    ) -> None:
        super().__init__(ascii_only=ascii_only, monochrome=monochrome)
        self._source, self._can_train = source, can_train
        self.to_train = ""

    def get_default_screen(self) -> Screen[None]:
        return WizardScreen(self._look, self._source, self._close, can_train=self._can_train)

    def _close(self, to_train: str) -> None:
        self.to_train = to_train
        self._finish("quit")


class ConsoleApp(CanvasApp):
    """With a source the live screen, without one the home screen.

    `run()` returns "quit" (nothing is running here, or a viewer was closed), "stop" (it was asked to
    stop and has ended), "detach" (leave the run going), "kill" (second Ctrl-C) or "hangup". `source` is the
    run that was on the screen last, `wizard` one that is open; closing them is left to the caller.

    start, attach, start_file: open a run by the name of its workload, by its own, by a configuration file.
    """

    class Opened(Message):
        """A run was started or attached in a thread."""

        def __init__(self, source: RunSource) -> None:
            self.source = source
            super().__init__()

    class Refused(Message):
        """A run could not be started or attached."""

        def __init__(self, text: str) -> None:
            self.text = text
            super().__init__()

    def __init__(
        self,
        source: RunSource | None,
        home: HomeSource | None,
        *,
        refresh_hz: float = 4.0,
        ascii_only: bool = False,
        monochrome: bool = False,
        ssh: bool = False,
        start: Opener | None = None,
        attach: Opener | None = None,
        start_file: Opener | None = None,
        wizard: WizardOpener | None = None,
        on_first_paint: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.time,
        rules: Rules = diagnose,
    ) -> None:
        if source is None and home is None:
            raise ValueError("ConsoleApp needs a source or a home")
        super().__init__(ascii_only=ascii_only, monochrome=monochrome)
        self.source = source
        self.home = home
        self._start_run = start
        self._attach_run = attach
        self._start_file = start_file
        self._new_wizard = wizard
        self.wizard: WizardSource | None = None
        self._refresh_hz = refresh_hz
        self._ssh = ssh
        self._clock = clock
        self._rules = rules
        self._on_first_paint = on_first_paint
        self._opening = self._ending = False

    def get_default_screen(self) -> Screen[None]:
        if self.source is not None:
            return self._live_screen(self.source, self._on_first_paint)
        assert self.home is not None
        wizard = None if self._new_wizard is None else lambda: self._open_wizard(None)
        return HomeScreen(self.home, self._look, self._choose, self._quit, self._on_first_paint, wizard)

    def on_mount(self) -> None:
        # The base class's handler runs as well.
        if self._ending:
            self._end_live()

    def hang_up(self) -> None:
        """Make `run()` return "hangup". From a signal handler or any thread, at any time."""
        self._leave_soon("hangup")

    def leave_when_final(self) -> None:
        """Leave with "stop" once the run has ended. From a signal handler or any thread."""
        self._ending = True
        self._soon(self._end_live)

    def _end_live(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, LiveScreen):
                screen.leave_when_final()

    def _live_screen(self, source: RunSource, on_painted: Callable[[], None] | None = None) -> LiveScreen:
        return LiveScreen(
            source,
            self._look,
            self._leave_live,
            refresh_hz=self._refresh_hz,
            ssh=self._ssh,
            clock=self._clock,
            diagnosis=Diagnosis(self._rules),
            on_painted=on_painted,
            wizard=None if self._new_wizard is None else lambda: self._open_wizard(source),
        )

    def _leave_live(self, result: Result) -> None:
        """Back to the list when a viewer that was opened from there is closed; else the app ends."""
        source = self.source
        if result == "quit" and source is not None and not source.owned and len(self.screen_stack) > 1:
            self.source = None
            source.close()
            self.pop_screen()
            home = self.screen
            if isinstance(home, HomeScreen):
                home.refresh_runs()
        else:
            self._finish(result)

    def _quit(self) -> None:
        # A run that is being opened must not be left behind without a screen; it takes a moment.
        if not self._opening:
            self._finish("quit")

    def _choose(self, entry: StartRow | RunRow) -> None:
        """Start or attach in a thread: it may take seconds, and the screen stays alive meanwhile."""
        if isinstance(entry, StartRow):
            self._begin(self._start_run, entry.name, "starting")
        else:
            self._begin(self._attach_run, entry.name, "opening")

    def _begin(self, opener: Opener | None, name: str, word: str) -> None:
        if opener is None or self._opening:
            return
        self._opening = True
        self._say(f"{word} {name}…")
        threading.Thread(target=self._open, args=(opener, name), name="ndd-open", daemon=True).start()

    def _open_wizard(self, beside: RunSource | None) -> None:
        """beside: the run on the screen; what is written is not trained in its place."""
        if self._new_wizard is None or self.wizard is not None or self._opening:
            return
        self.wizard = self._new_wizard(beside)
        can_train = beside is None and self._start_file is not None
        self.push_screen(WizardScreen(self._look, self.wizard, self._leave_wizard, can_train=can_train))

    def _leave_wizard(self, to_train: str) -> None:
        if self.wizard is None:
            return
        self.wizard.stop()
        self.wizard = None
        self.pop_screen()
        if to_train:
            self._begin(self._start_file, to_train, "starting")

    def _open(self, opener: Opener, name: str) -> None:
        try:
            source = opener(name)
        except (NddError, OSError) as error:
            post_from_thread(self, self.Refused(str(error)))
            return
        except Exception as error:  # noqa: BLE001  a defect must be told, or the screen would wait for ever
            post_from_thread(self, self.Refused(f"{type(error).__name__}: {error}"))
            return
        if self._gone or not post_from_thread(self, self.Opened(source)):
            source.close()

    def on_console_app_opened(self, message: Opened) -> None:
        self._opening = False
        self._say(None)
        self.source = message.source
        self.push_screen(self._live_screen(message.source))

    def on_console_app_refused(self, message: Refused) -> None:
        self._opening = False
        self._say(message.text, bad=True)

    def _say(self, text: str | None, bad: bool = False) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, HomeScreen):
                screen.say(text, bad)
