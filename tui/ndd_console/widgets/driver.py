"""Textual's terminal driver, for a program that job control has put into the background."""

from __future__ import annotations

import asyncio
import os
import signal
import termios
from typing import Any

from textual.drivers.linux_driver import LinuxDriver

_WAIT_S = 0.2


def in_background(terminal: int) -> bool:
    """Whether another process group, such as the shell, has the terminal."""
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:
        return False


def terminal_mode(terminal: int) -> list[Any] | None:
    """The terminal's settings; None if it has none."""
    try:
        return termios.tcgetattr(terminal)
    except (termios.error, OSError):
        return None


def allow_background() -> None:
    """Let this process use the terminal from the background; by default the kernel stops it (SIGTTOU, SIGTTIN)."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)


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
        if self._auto_restart:
            self.suspend_application_mode()
            self._must_signal_resume = True
        if self._continued:  # it came while the screen was being closed
            self._sigcont_application()
        elif not self._closing():
            os.kill(os.getpid(), signal.SIGSTOP)

    def _sigcont_application(self, *_: object) -> None:
        self._continued = True
        if not self._stopped():
            return
        if self._auto_restart and in_background(self.fileno):
            # `bg`: a screen needs the foreground. SIGTERM, which `kill` sends with SIGCONT, is handled first.
            loop = asyncio.get_running_loop()
            loop.call_soon_threadsafe(loop.call_later, _WAIT_S, self._stop_again)
        elif not self._closing():
            super()._sigcont_application()

    def _stop_again(self) -> None:
        if self._stopped() and not self._closing() and in_background(self.fileno):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _closing(self) -> bool:
        return bool(getattr(self._app, "closing", False))

    def run_input_thread(self) -> None:
        while True:
            try:
                super().run_input_thread()
                return
            except OSError:
                if not in_background(self.fileno):
                    raise
            if self.exit_event.wait(_WAIT_S):
                return
