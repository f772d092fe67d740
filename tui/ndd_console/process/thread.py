"""Work in a thread beside a screen."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ndd_engine.errors import error_text
from ndd_engine.processes import SignalEvent


class ThreadJob:
    """Work in a thread that stops on request; its error is kept for the screen. stopping: set when it shall stop.

    Not a daemon thread: the program must not end before processes have ended and runs have resumed.
    """

    def __init__(self, thread_name: str) -> None:
        self.error: BaseException | None = None
        self._name = thread_name
        self.stopping = SignalEvent()
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Start the work. Earlier work is stopped first."""
        if self._thread is not None:
            self.stop()
            self.join()
            self.stopping, self.error = SignalEvent(), None

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  without a message the screen would wait forever
                self.error = error

        self._thread = threading.Thread(target=run, name=self._name)
        self._thread.start()

    def working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def failed(self) -> str:
        return "" if self.error is None or self.working() else error_text(self.error)

    def stop(self) -> None:
        """Stop soon. Returns immediately."""
        self.stopping.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the work and of its processes. Returns False after the timeout."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.working()
