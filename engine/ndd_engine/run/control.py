"""Requests to a run, from any thread: a pause, what is done once, a stop. Of several ranks, all agree on them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil

from ndd_engine.errors import UsageError
from ndd_engine.record.events import MarkEvent
from ndd_engine.text import duration


class StopNow(BaseException):
    """Stops the loop immediately, without a checkpoint. Not an Exception, so that nothing swallows it."""


# What is done once after a request, and the statuses of a run that stops.
ONCE = ("checkpoint", "evaluate", "kernels", "holders")
STOPS = ("stopped", "interrupted", "terminated", "failed")


@dataclass
class Requests:
    """once: of `ONCE`. stop: the status of a run that is to stop. kill: without a checkpoint."""

    paused: bool = False
    once: set[str] = field(default_factory=set)
    stop: str | None = None
    kill: bool = False


class Control:
    """Requests to a run. Those to one of several ranks act on it once all ranks have agreed on them, see `share`.

    pending: whether a request acts on a loop; a plain attribute, so that it can check that in each step at no cost.

    refusal: returns why an action is impossible, "" if it is not. passed_on: of a run that other processes execute,
    (action, holder) of the requests that are passed on to them; they know whether they are paused.
    """

    def __init__(self, refusal: Callable[[str], str] = lambda _: "") -> None:
        self._refusal = refusal
        self.passed_on: deque[tuple[str, int | None]] | None = None
        self.pending = False
        self.stop_reason = ""
        self._changed = threading.Condition()
        self._wanted = self._acting = Requests()
        self._meet: Callable[[], None] | None = None
        self._paused = False  # without a holder
        self._holders: dict[int, psutil.Process] = {}

    def request(
        self, action: str, reason: str = "on request", status: str = "stopped", holder: int | None = None
    ) -> None:
        """Request one of pause, resume, checkpoint, evaluate, kernels, holders, stop, kill.

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
            wanted = self._wanted
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
            elif action in ONCE:
                wanted.once.add(action)
            elif action in ("stop", "kill"):
                # The first reason is kept; a second request only stops faster.
                if wanted.stop is None:
                    wanted.stop, self.stop_reason = status, reason
                wanted.kill = wanted.kill or action == "kill"
            else:
                raise ValueError(f"unknown action {action!r}")
            wanted.paused = self._paused or bool(self._holders)
            self.pending = self.pending or wanted is self._acting
            self._changed.notify_all()

    # What was requested.

    @property
    def stop_status(self) -> str | None:
        """The status of a run that is to stop; None without such a request."""
        return self._wanted.stop

    @property
    def stopping(self) -> bool:
        return self._wanted.stop is not None

    @property
    def kill(self) -> bool:
        """Whether an immediate stop was requested."""
        return self._wanted.kill

    @property
    def holders(self) -> tuple[int, ...]:
        """Ids of the processes that hold a pause."""
        return tuple(self._holders)

    # What acts on the loop.

    @property
    def paused(self) -> bool:
        return self._acting.paused

    @property
    def stops(self) -> str | None:
        """The status with which the loop has to end, or None."""
        return self._acting.stop

    def take_once(self) -> set[str]:
        """Return the one-time requests since the last call; clears `pending` unless the run is paused or stopping."""
        with self._changed:
            acting = self._acting
            once, acting.once = acting.once, set()
            self.pending = acting.paused or acting.stop is not None
            return once

    def check_kill(self, alone: bool = False) -> None:
        """Raise StopNow for an immediate stop. alone: also for one that other ranks have not agreed on."""
        if self._wanted.kill if alone else self._acting.kill:
            raise StopNow

    def wait(self, timeout_s: float) -> None:
        """While paused: sleep until a request or the timeout, drop holders that have exited, and meet other ranks."""
        with self._changed:
            wanted = self._wanted
            if wanted.paused and not wanted.once and wanted.stop is None:
                self._changed.wait(timeout_s)
            for process in [held for held in self._holders.values() if not _lives(held)]:
                del self._holders[process.pid]
            wanted.paused = self._paused or bool(self._holders)
        if self._meet is not None:
            self._meet()

    # With other ranks.

    def share(self, meet: Callable[[], None]) -> None:
        """From now on only `obey` lets requests act. meet: called again and again while all ranks pause, to agree."""
        self._acting, self._meet, self.pending = Requests(), meet, False

    def asks(self) -> set[str]:
        """What this rank wants of all of them: what is done once only once, a pause and a stop as long as they last."""
        with self._changed:
            wanted = self._wanted
            asked, wanted.once = wanted.once, set()
            lasting = {
                "pause": wanted.paused,
                "kill": wanted.kill,
                wanted.stop or "": wanted.stop is not None,
            }
            return asked | {name for name, on in lasting.items() if on}

    def obey(self, asked: Mapping[str, int]) -> None:
        """Let requests act on this rank. asked: of all ranks, with one that asks."""
        with self._changed:
            wanted, acting = self._wanted, self._acting
            acting.once |= asked.keys() & set(ONCE)
            acting.paused, acting.kill = "pause" in asked, "kill" in asked
            wanted.kill = wanted.kill or acting.kill
            for status in STOPS:
                if status in asked and acting.stop is None:
                    acting.stop = status
                    if wanted.stop is None:
                        wanted.stop, self.stop_reason = status, f"{status} at rank {asked[status]}"
            self.pending = bool(acting.once) or acting.paused or acting.stop is not None


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
        return MarkEvent("pause", step, f"paused at step {step:,}")
    who = f"process{'' if len(holders) == 1 else 'es'} {', '.join(map(str, holders))}"
    return MarkEvent("pause", step, f"paused for a trial by {who}", {"holders": holders})


def resume_mark(step: int, seconds: float) -> MarkEvent:
    """The end of a pause of so many seconds."""
    return MarkEvent("resume", step, f"resumed after {duration(seconds)}", {"seconds": seconds})
