"""Requests to a run, from any thread; what is executed obeys them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import psutil

from ndd_engine.errors import UsageError
from ndd_engine.record.events import MarkEvent
from ndd_engine.text import duration


class StopNow(BaseException):
    """Stops the loop immediately, without a checkpoint. Not an Exception, so that nothing swallows it."""


class Control:
    """Requests to a run. `pending` is a plain attribute, so that a loop can check it in each step at no cost.

    refusal: returns why an action is impossible, "" if it is not. passed_on: of a run that other processes execute,
    (action, holder) of the requests that are passed on to them; they know whether they are paused.
    """

    def __init__(self, refusal: Callable[[str], str] = lambda _: "") -> None:
        self._refusal = refusal
        self.passed_on: deque[tuple[str, int | None]] | None = None
        self.pending = False
        self._changed = threading.Condition()
        self._paused = False
        self._holders: dict[int, psutil.Process] = {}
        self._once: set[str] = set()
        self.stop_status: str | None = None
        self.stop_reason = ""
        self.kill = False

    def request(
        self, action: str, reason: str = "on request", status: str = "stopped", holder: int | None = None
    ) -> None:
        """Request one of pause, resume, checkpoint, evaluate, kernels, stop, kill.

        status: the run's status after a stop. holder: process id that holds a pause; the pause ends when that process
        sends resume or exits. A resume without a holder ends every pause. Raises UsageError if the holder is not a
        running process on this host, and for what the run cannot do.
        """
        if why := self._refusal(action):
            raise UsageError(why)
        if self.passed_on is not None and action not in ("stop", "kill"):
            self.passed_on.append((action, holder))
            return
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
                # The first reason is kept; a second request only stops faster.
                if self.stop_status is None:
                    self.stop_status, self.stop_reason = status, reason
                self.kill = self.kill or action == "kill"
            else:
                raise ValueError(f"unknown action {action!r}")
            self.pending = True
            self._changed.notify_all()

    @property
    def has_once(self) -> bool:
        """Whether there are one-time requests."""
        return bool(self._once)

    def take_once(self) -> set[str]:
        """Return the one-time requests since the last call; clears `pending` unless the run is paused or stopping."""
        with self._changed:
            once, self._once = self._once, set()
            self.pending = self.paused or self.stop_status is not None
            return once

    @property
    def paused(self) -> bool:
        return self._paused or bool(self._holders)

    @property
    def holders(self) -> tuple[int, ...]:
        """Ids of the processes that hold a pause."""
        return tuple(self._holders)

    @property
    def stopping(self) -> bool:
        return self.stop_status is not None

    def check_kill(self) -> None:
        """Raise StopNow if an immediate stop was requested."""
        if self.kill:
            raise StopNow

    def wait(self, timeout_s: float) -> None:
        """While paused: sleep until a request or the timeout, and drop holders that have exited."""
        with self._changed:
            if self.paused and not self._once and self.stop_status is None:
                self._changed.wait(timeout_s)
            for process in [held for held in self._holders.values() if not _lives(held)]:
                del self._holders[process.pid]


def _process(pid: int) -> psutil.Process:
    try:
        return psutil.Process(pid)
    except (psutil.Error, ValueError, OverflowError):
        raise UsageError(f"cannot pause for process {pid}: there is no such process on this host") from None


def _lives(process: psutil.Process) -> bool:
    """Whether it is still the same running process; a zombie does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def pause_mark(step: int, holders: list[int]) -> MarkEvent:
    """holders: ids of the processes that hold the pause."""
    if not holders:
        return MarkEvent("pause", step, f"paused at step {step}")
    who = f"process{'' if len(holders) == 1 else 'es'} {', '.join(map(str, holders))}"
    return MarkEvent("pause", step, f"paused for a trial by {who}", {"holders": holders})


def resume_mark(step: int, seconds: float) -> MarkEvent:
    """The end of a pause of so many seconds."""
    return MarkEvent("resume", step, f"resumed after {duration(seconds)}", {"seconds": seconds})
