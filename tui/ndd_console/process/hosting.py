"""A screen for work in a thread. Signals and a lost terminal close it; prints are discarded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ndd_console.app import CanvasApp
from ndd_engine.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED

from .terminal import Captured, follow_terminal, hangup_watch
from .thread import ThreadJob


@contextmanager
def captured_for(app: CanvasApp, log: Path) -> Iterator[Captured]:
    """Redirect all output to the log. Textual discards prints while it runs; they belong into the log as well."""
    with Captured(log) as captured:
        app._capture_stdout = app._capture_stderr = captured.stream  # type: ignore[assignment]
        with hangup_watch(0, app.hang_up):
            yield captured


def hosted(app: CanvasApp, work: ThreadJob) -> int:
    """Run the app until it is closed, then end the work. Returns the exit status so far: 0, 130 or 143 after a signal,
    1 after an error.
    """
    status = EXIT_DONE
    follow_terminal()

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal status
        status = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED
        work.stop()
        app.leave()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
    # Output of child processes would damage the screen, and there is no log for it.
    with captured_for(app, Path(os.devnull)):
        app.run(mouse=False)
    work.stop()
    work.join()
    return status or app.return_code or EXIT_DONE
