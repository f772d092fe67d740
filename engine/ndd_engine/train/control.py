"""What a running loop is asked to do, from any thread; the loop looks once a step."""

from __future__ import annotations

import threading


class StopNow(BaseException):
    """Leave the loop at once, without a checkpoint. Not an Exception: nothing may swallow it on the way."""


class Control:
    """Requests to the loop. `pending` is a plain attribute so that looking costs nothing."""

    def __init__(self) -> None:
        self.pending = False
        self._changed = threading.Condition()
        self._paused = False
        self._once: set[str] = set()
        self.stop_status: str | None = None
        self.stop_reason = ""
        self.kill = False

    def request(self, action: str, reason: str = "asked to", status: str = "stopped") -> None:
        """One of pause, resume, checkpoint, evaluate, stop, kill. `status` is how the run ends after a stop."""
        with self._changed:
            if action == "pause":
                self._paused = True
            elif action == "resume":
                self._paused = False
            elif action in ("checkpoint", "evaluate"):
                self._once.add(action)
            elif action in ("stop", "kill"):
                # The first reason holds; a second request only makes it faster.
                if self.stop_status is None:
                    self.stop_status, self.stop_reason = status, reason
                self.kill = self.kill or action == "kill"
            else:
                raise ValueError(f"unknown action {action!r}")
            self.pending = True
            self._changed.notify_all()

    def take_once(self) -> set[str]:
        """The one-time requests since the last look; clears `pending` unless a state remains to be acted on."""
        with self._changed:
            once, self._once = self._once, set()
            self.pending = self._paused or self.stop_status is not None
            return once

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def stopping(self) -> bool:
        return self.stop_status is not None

    def check_kill(self) -> None:
        """Raise StopNow when a stop at once was asked for."""
        if self.kill:
            raise StopNow

    def wait(self, timeout_s: float) -> None:
        """While paused: sleep until something is asked or the time is over."""
        with self._changed:
            if self._paused and not self._once and self.stop_status is None:
                self._changed.wait(timeout_s)
