"""Textual's terminal driver, for a program that job control has put into the background."""

from __future__ import annotations

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
    _started = False

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

    def _sigcont_application(self, *_: object) -> None:
        if getattr(self._app, "closing", False):
            return
        if self._auto_restart and self._stopped() and in_background(self.fileno):
            os.kill(os.getpid(), signal.SIGSTOP)  # `bg`: a screen needs the foreground
        elif self._stopped():
            super()._sigcont_application()

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
