"""A screen for work in a thread. Signals and a lost terminal close it; prints are discarded."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ndd_console.app import CanvasApp
from ndd_engine.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED

from .terminal import Captured, HangupWatch, follow_terminal


def hosted(app: CanvasApp, stop: Callable[[], object]) -> int:
    """Run the app until it is closed. Returns the exit status so far: 0, 130 or 143 after a signal, 1 after an error.

    stop: asks the work to end; the caller waits for it.
    """
    status = EXIT_DONE
    follow_terminal()

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal status
        status = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED
        stop()
        app.leave()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
    # Output of child processes would damage the screen, and there is no log for it.
    with Captured(Path("/dev/null")) as captured:
        app._capture_stdout = app._capture_stderr = captured.stream  # type: ignore[assignment]
        hangup = HangupWatch(0, app.leave)
        hangup.start()
        app.run(mouse=False)
        hangup.stop()
    return status or app.return_code or EXIT_DONE
