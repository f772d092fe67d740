"""All private names of Textual that the console uses: the driver, the app and the compositor of the live screen.

tests/ui/test_textual_range.py checks each of them with the lowest and the highest version that is supported.
"""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from codecs import getincrementaldecoder
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from textual._compositor import ChopsUpdate, Compositor, CompositorUpdate
from textual.app import App
from textual.drivers import linux_driver
from textual.drivers.linux_driver import LinuxDriver
from textual.filter import LineFilter
from textual.screen import Screen
from textual.timer import Timer, TimerCallback
from textual.widget import Widget

from .foreground import allow_background, in_background, terminal_mode

_WAIT_S = 0.2


class InputDecoder(getincrementaldecoder("utf-8")):  # type: ignore[misc]
    """Decodes what a terminal sends.

    These may be bytes that are not UTF-8: those of another encoding, or a part of a character. Textual's driver would
    end the app. And a terminal that is gone sends nothing, which the driver would read again at once, for ever.
    """

    def __init__(self) -> None:
        super().__init__("replace")

    def decode(self, data: bytes, final: bool = False) -> str:
        if not data and not final:
            raise EOFError
        return str(super().decode(data, final))


vars(linux_driver)["getincrementaldecoder"] = lambda _encoding: InputDecoder


class Patched(Widget):
    """A widget that fills its screen and writes its changed cells itself."""

    def patch(self, spans: Iterable[tuple[int, int, int]]) -> str:
        """Escape sequences that paint cells x1..x2 of row y, for each (y, x1, x2)."""
        raise NotImplementedError


class PatchUpdate(CompositorUpdate):
    """A partial update of a screen with one canvas."""

    def __init__(self, canvas: Patched, spans: list[tuple[int, int, int]]) -> None:
        self._canvas = canvas
        self._spans = spans

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from ()

    def render_segments(self, console: Console) -> str:
        return self._canvas.patch(self._spans)


class PatchCompositor(Compositor):
    """A compositor for a screen with one canvas. Textual's partial update starts at the left edge of a widget."""

    def __init__(self, canvas: Patched) -> None:
        super().__init__()
        self._canvas = canvas

    def render_partial_update(self) -> ChopsUpdate | None:
        # Other widgets, such as Textual's notifications, need the general update.
        if any(widget is not self._canvas and widget is not self.root for widget in self.visible_widgets):
            return super().render_partial_update()
        regions = self._dirty_regions.copy()
        self._dirty_regions.clear()
        if not regions:
            return None
        return PatchUpdate(self._canvas, list(self._regions_to_spans(regions)))  # type: ignore[return-value]


def paint_changes(screen: Screen[Any], canvas: Patched) -> None:
    """Let the canvas, the only widget of the screen, write its changed cells itself."""
    screen._compositor = PatchCompositor(canvas)


class PrivateApp(App[str], inherit_bindings=False):
    """The part of the app that uses private names of Textual. failures: tracebacks of errors of the screens."""

    failures: list[str]

    def hang_up(self) -> None:
        """The terminal is lost. Called in the thread that reads it."""
        raise NotImplementedError

    def add_filter(self, line_filter: LineFilter) -> None:
        self._filters.append(line_filter)

    def capture(self, stream: TextIO) -> None:
        """Write prints, which Textual discards while it runs, to this stream."""
        self._capture_stdout = self._capture_stderr = stream  # type: ignore[assignment]

    def note(self, error: Exception) -> None:
        self.failures.append("".join(traceback.format_exception(error)))

    def _handle_exception(self, error: Exception) -> None:
        self.note(error)
        super()._handle_exception(error)

    def set_timer(
        self,
        delay: float,
        callback: TimerCallback | None = None,
        *,
        name: str | None = None,
        pause: bool = False,
    ) -> Timer:
        """Like Textual's, but a late timer still fires.

        Textual 8.2 drops a timer that is late when its task starts, for example because a training thread holds the
        GIL. That loses Textual's resize timer (1/120 s), and with it every later resize.
        """
        timer = super().set_timer(delay, callback, name=name, pause=pause)
        timer._skip = False  # read later, when the timer's task starts
        return timer


class BackgroundDriver(LinuxDriver):
    """Ends in the background instead of stopping there for ever.

    Restoring the terminal from the background raises SIGTTOU, which stops the process.
    """

    _mode: list[Any] | None = None
    _started = _continued = False

    def start_application_mode(self) -> None:
        # In the background this stops the process until `fg`.
        super().start_application_mode()  # type: ignore[no-untyped-call]
        self._started = self._writer_thread is not None and self._writer_thread.is_alive()
        self._mode = terminal_mode(self.fileno)
        allow_background()

    def stop_application_mode(self) -> None:
        if not self._started:
            return
        if terminal_mode(self.fileno) != self._mode:
            self.attrs_before = None  # the shell has set its own
        allow_background()
        super().stop_application_mode()
        self._started = False

    def write(self, data: str) -> None:
        if self._started or not self._stopped():
            super().write(data)

    def _stopped(self) -> bool:
        return self._writer_thread is None or not self._writer_thread.is_alive()

    def _sigtstp_application(self, *_: object) -> None:
        self._continued = False
        # Not in the handler: it may have interrupted a write, whose queue stays locked until it returns.
        try:
            asyncio.get_running_loop().call_soon_threadsafe(self._suspend)
        except RuntimeError:  # the app has ended
            self._suspend()

    def _suspend(self) -> None:
        if self._continued or self._app_closes():
            return
        if self._auto_restart:
            self.suspend_application_mode()
            self._must_signal_resume = True
        if self._continued:  # it came while the screen was being closed
            self._sigcont_application()
        elif not self._app_closes():
            os.kill(os.getpid(), signal.SIGSTOP)

    def _sigcont_application(self, *_: object) -> None:
        self._continued = True
        if not self._stopped():
            return
        if self._auto_restart and in_background(self.fileno):
            # `bg`: a screen needs the foreground. SIGTERM, which `kill` sends with SIGCONT, is handled first.
            with suppress(RuntimeError):  # the app has ended
                loop = asyncio.get_running_loop()
                loop.call_soon_threadsafe(loop.call_later, _WAIT_S, self._stop_again)
        elif not self._app_closes():
            super()._sigcont_application()

    def _stop_again(self) -> None:
        if self._stopped() and not self._app_closes() and in_background(self.fileno):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _app_closes(self) -> bool:
        return bool(getattr(self._app, "closing", False))

    def run_input_thread(self) -> None:
        while True:
            try:
                super().run_input_thread()
                return
            except (EOFError, OSError):
                if not in_background(self.fileno):
                    # Also where no SIGHUP tells it.
                    if isinstance(self._app, PrivateApp):
                        self._app.hang_up()
                    return
            if self.exit_event.wait(_WAIT_S):
                return
