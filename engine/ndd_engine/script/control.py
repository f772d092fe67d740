"""Requests to a running script: it can be stopped, and its process asked for a profiler capture."""

from __future__ import annotations

import threading

from ndd_engine.errors import UsageError


class ScriptControl:
    """What was asked of a script. sent, pressed: when Ctrl-C was sent, and whether SIGTERM followed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may interrupt the thread that holds it
        self.stop_status: str | None = None
        self.stop_reason = ""
        self.kill = False
        self._capture = False
        self.sent: float | None = None
        self.pressed = False

    @property
    def stopping(self) -> bool:
        return self.stop_status is not None

    def request(
        self, action: str, reason: str = "on request", status: str = "stopped", holder: int | None = None
    ) -> None:
        """Request stop, kill or kernels. Raises UsageError for anything else: the script does not know of it."""
        if action == "ping":
            return
        if action not in ("stop", "kill", "kernels"):
            raise UsageError(
                f"this run is a script of its own: it can be stopped and profiled, but not asked to {action}"
            )
        with self._lock:
            if action == "kernels":
                self._capture = True
                return
            if self.stop_status is None:
                self.stop_status, self.stop_reason = status, reason
            self.kill = self.kill or action == "kill"

    def take_capture(self) -> bool:
        """Whether a profiler capture was requested since the last call."""
        with self._lock:
            taken, self._capture = self._capture, False
            return taken
