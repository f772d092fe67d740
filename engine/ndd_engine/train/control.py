"""What a running loop is asked to do, from any thread; the loop looks once a step."""

from __future__ import annotations

import threading

import psutil

from ndd_engine.errors import UsageError


class StopNow(BaseException):
    """Leave the loop at once, without a checkpoint. Not an Exception: nothing may swallow it on the way."""


class Control:
    """Requests to the loop. `pending` is a plain attribute so that looking costs nothing."""

    def __init__(self) -> None:
        self.pending = False
        self._changed = threading.Condition()
        self._paused = False
        self._holders: dict[int, psutil.Process] = {}
        self._once: set[str] = set()
        self.stop_status: str | None = None
        self.stop_reason = ""
        self.kill = False

    def request(
        self, action: str, reason: str = "asked to", status: str = "stopped", holder: int | None = None
    ) -> None:
        """One of pause, resume, checkpoint, evaluate, kernels, stop, kill.

        status: how the run ends after a stop. holder: the process that a pause is for, which ends when that process
        takes it back with a resume of its own, or ends; a resume without a holder ends every pause. Raises UsageError
        for a holder that is no process here.
        """
        process = _process(holder) if holder is not None and action == "pause" else None
        with self._changed:
            if action == "pause":
                if process is None:
                    self._paused = True
                else:
                    self._holders[process.pid] = process
            elif action == "resume":
                if holder is None:
                    self._paused = False
                    self._holders.clear()
                else:
                    self._holders.pop(holder, None)
            elif action in ("checkpoint", "evaluate", "kernels"):
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
            self.pending = self.paused or self.stop_status is not None
            return once

    @property
    def paused(self) -> bool:
        return self._paused or bool(self._holders)

    @property
    def holders(self) -> tuple[int, ...]:
        """Numbers of the processes that this is paused for."""
        return tuple(self._holders)

    @property
    def stopping(self) -> bool:
        return self.stop_status is not None

    def check_kill(self) -> None:
        """Raise StopNow when a stop at once was asked for."""
        if self.kill:
            raise StopNow

    def wait(self, timeout_s: float) -> None:
        """While paused: sleep until something is asked or the time is over, and look whether the holders live."""
        with self._changed:
            if self.paused and not self._once and self.stop_status is None:
                self._changed.wait(timeout_s)
            for process in [held for held in self._holders.values() if not _lives(held)]:
                del self._holders[process.pid]


def _process(pid: int) -> psutil.Process:
    try:
        return psutil.Process(pid)
    except (psutil.Error, ValueError, OverflowError):
        raise UsageError(f"there is no process {pid} here that it could be paused for") from None


def _lives(process: psutil.Process) -> bool:
    """Whether it is still the same process; one that nobody has waited for yet does nothing any more."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
