"""The console application: opens the screens and returns how it was closed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from textual.app import SystemCommand
from textual.binding import Binding
from textual.command import CommandPalette
from textual.filter import NoColor
from textual.screen import Screen

from ndd_console.jobs.folder import StartRow
from ndd_console.jobs.run_sources import HomeFolder, RunRow, RunSource
from ndd_console.jobs.trials import TuningJob
from ndd_console.jobs.wizard import WizardJob
from ndd_console.screens.base import CurrentScreen, KeyScreen, Result, WizardOpener
from ndd_console.screens.home import HomeScreen
from ndd_console.screens.live import LiveScreen
from ndd_console.screens.tuning import TuningScreen
from ndd_console.screens.wizard import WizardScreen
from ndd_console.view.keys import APP_KEYS
from ndd_console.view.rows import MARGIN_FROM
from ndd_console.view.style import PLAIN, Look
from ndd_console.widgets.foreground import follow_terminal
from ndd_console.widgets.lines import AsciiFilter, bindings
from ndd_console.widgets.textual_private import BackgroundDriver, PrivateApp
from ndd_console.words.finding import Diagnosis, Rules
from ndd_engine.diagnose import diagnose

# The colours of the terminal: the name of the theme depends on Textual's version.
THEMES = ("ansi-dark", "textual-ansi")
Opener = Callable[[str], RunSource]
Starter = Callable[[StartRow], RunSource]


class Palette(CommandPalette, CurrentScreen[None]):
    """The command palette. Ctrl-C closes it, and does what it does on the screen below."""

    BINDINGS = [Binding("ctrl+c", "interrupt", show=False, priority=True)]  # noqa: RUF012

    def action_interrupt(self) -> None:
        self.dismiss()
        if isinstance(self.app.screen, KeyScreen):
            self.app.screen.use_key("ctrl+c")


class ScreenApp(PrivateApp, inherit_bindings=False):
    """Base of the apps: uses the colours of the terminal, and can be closed from any thread."""

    TITLE = "ndd-console"
    CSS_PATH = "console.tcss"
    BINDINGS = bindings(APP_KEYS)
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (MARGIN_FROM, "-wide")]  # noqa: RUF012
    ALLOW_SELECT = False

    def __init__(self, look: Look) -> None:
        follow_terminal()
        super().__init__(driver_class=BackgroundDriver, ansi_color=True)
        self.failures = []
        self.animation_level = "none"
        self.theme = next(name for name in THEMES if name in self.available_themes)
        self._look = replace(look, monochrome=look.monochrome or self.no_color)
        if look.monochrome and not self.no_color:
            self.no_color = True
            self.add_filter(NoColor())
        if look.ascii_only:
            self.add_filter(AsciiFilter())
        self._gone = False
        self._console_loop: asyncio.AbstractEventLoop | None = None
        self._leaving = ""

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The command palette: the keys of the screen that work now."""
        if isinstance(screen, KeyScreen):
            for key in screen.usable():
                if key.help:
                    use = partial(screen.use, key)
                    yield SystemCommand(f"{screen.word(key)} ({key.shown})", key.help, use)

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(Palette(id="--command-palette"))

    def action_suspend_process(self) -> None:
        """Stop as a terminal's Ctrl-Z does: with the whole process group, so that the shell's prompt returns."""
        if not self.is_headless:
            os.kill(0, signal.SIGTSTP)

    @property
    def closing(self) -> bool:
        """Whether the app ends soon."""
        return self._gone or bool(self._leaving)

    def on_key_screen_failed(self, message: KeyScreen.Failed) -> None:
        self.note(message.error)

    def on_mount(self) -> None:
        self._console_loop = asyncio.get_running_loop()
        # After Ctrl-Z and fg the terminal is empty.
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        if self._leaving:
            self._finish(self._leaving)

    def leave(self) -> None:
        """Make `run()` return "quit". Safe in a signal handler and in any thread."""
        self._leave_soon("quit")

    def hang_up(self) -> None:
        """The terminal is lost: close the screen. Safe in a signal handler and in any thread."""
        self.leave()

    def _leave_soon(self, result: str) -> None:
        self._leaving = self._leaving or result
        self._soon(lambda: self._finish(result))

    def _soon(self, callback: Callable[[], None]) -> None:
        loop = self._console_loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(callback)
            except RuntimeError:
                return  # the app has just ended

    def _finish(self, result: str) -> None:
        if not self._gone:
            self._gone = True
            self.exit(result)


class TuningApp(ScreenApp):
    """The tuning screen. `run()` returns "quit"."""

    def __init__(
        self, source: TuningJob, look: Look = PLAIN, on_first_paint: Callable[[], None] | None = None
    ) -> None:
        super().__init__(look)
        self._source = source
        self._on_first_paint = on_first_paint

    def get_default_screen(self) -> Screen[None]:
        return TuningScreen(self._look, self._source, lambda: self._finish("quit"), self._on_first_paint)


class WizardApp(ScreenApp):
    """The wizard's screen. to_train: the file to train after the screen is closed, or ""."""

    def __init__(self, source: WizardJob, look: Look = PLAIN, *, can_train: bool = True) -> None:
        super().__init__(look)
        self._source, self._can_train = source, can_train
        self.to_train = ""

    def get_default_screen(self) -> Screen[None]:
        return WizardScreen(self._look, self._source, self._close, can_train=self._can_train)

    def _close(self, to_train: str) -> None:
        self.to_train = to_train
        self._finish("quit")


class ConsoleApp(ScreenApp):
    """The live screen if there is a source, else the home screen.

    `run()` returns "quit" (no run of this process, or a viewer was closed), "stop" (the run has stopped on request),
    "detach" (the run continues), "kill" (second Ctrl-C) or "hangup". The caller closes `source`, the last run on the
    screen, and `wizard`, if it is open.

    start: trains an entry of the home screen. attach, start_file: open a run by its name or by configuration file.
    """

    def __init__(
        self,
        source: RunSource | None,
        home: HomeFolder | None,
        *,
        look: Look = PLAIN,
        refresh_hz: float = 4.0,
        start: Starter | None = None,
        attach: Opener | None = None,
        start_file: Opener | None = None,
        wizard: WizardOpener | None = None,
        on_first_paint: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.time,
        rules: Rules = diagnose,
    ) -> None:
        if source is None and home is None:
            raise ValueError("ConsoleApp needs a source or a home")
        super().__init__(look)
        self.source = source
        self.home = home
        self._start_run = start
        self._attach_run = attach
        self._start_file = start_file
        self.new_wizard = wizard
        self.wizard: WizardJob | None = None
        self._refresh_hz = refresh_hz
        self._clock = clock
        self._rules = rules
        self._on_first_paint = on_first_paint
        self._ending = False
        # A run that is being opened must not be left without a screen.
        self.opening = False

    def get_default_screen(self) -> Screen[None]:
        if self.source is not None:
            return self._live_screen(self.source, self._on_first_paint)
        assert self.home is not None
        return HomeScreen(self.home, self._look, self._on_first_paint)

    @property
    def closing(self) -> bool:
        return super().closing or self._ending

    def on_mount(self) -> None:
        # Textual calls the handler of the base class as well.
        if self._ending:
            self._end_live()

    def hang_up(self) -> None:
        """Make `run()` return "hangup". Safe in a signal handler and in any thread."""
        self._leave_soon("hangup")

    def leave_when_final(self) -> None:
        """Make `run()` return "stop" when the run has ended. Safe in a signal handler and in any thread."""
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
            refresh_hz=self._refresh_hz,
            clock=self._clock,
            diagnosis=Diagnosis(self._rules),
            on_painted=on_painted,
        )

    def leave_live(self, result: Result) -> None:
        """Return to the home screen if the run was opened from there for viewing; else end the app."""
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

    def open_run(self, run: RunRow) -> None:
        if self._attach_run is not None:
            self._begin(partial(self._attach_run, run.name), run.name, "opening")

    def train(self, row: StartRow) -> None:
        if self._start_run is not None:
            self._begin(partial(self._start_run, row), row.name, "starting")

    def _begin(self, open_: Callable[[], RunSource], name: str, word: str) -> None:
        """Start or attach in a thread, since that may take seconds."""
        if self.opening:
            return
        self.opening = True
        self._home_screen.say(f"{word} {name}…")
        self._home_screen.beside(open_, self._opened, self._not_opened)

    def open_wizard(self, run: RunSource | None, row: StartRow | None = None) -> None:
        """Open the wizard. If there is a run on the screen, the new file cannot be trained from here.

        row: the entry of the home screen to begin with.
        """
        if self.new_wizard is None or self.wizard is not None or self.opening:
            return
        self.wizard = self.new_wizard(run, row)
        can_train = run is None and self._start_file is not None
        self.push_screen(WizardScreen(self._look, self.wizard, self._leave_wizard, can_train=can_train))

    def _leave_wizard(self, to_train: str) -> None:
        if self.wizard is None:
            return
        self.wizard.stop()
        self.wizard = None
        self.pop_screen()
        if to_train and self._start_file is not None:
            self._begin(partial(self._start_file, to_train), to_train, "starting")

    @property
    def _home_screen(self) -> HomeScreen:
        """Runs are opened from there, and from the wizard above it."""
        return next(screen for screen in self.screen_stack if isinstance(screen, HomeScreen))

    def _opened(self, source: RunSource) -> None:
        if self._gone:
            source.close()
            return
        self.opening = False
        self._home_screen.say("")
        self.source = source
        self.push_screen(self._live_screen(source))

    def _not_opened(self, text: str) -> None:
        self.opening = False
        self._home_screen.say(text, "bad")
