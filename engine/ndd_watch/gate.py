"""Lets a loop train in runs, on command. The loop asks its gate before the first step and after each one.

The process that measures sends one command per line, and gets one answer: to {"do": "train"} when the run has ended, to
any other the facts. Between two runs the loop waits in its gate, and what it has started stands still.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any, Callable


class Trainer:
    """What a gate has to know of the loop."""

    def settle(self) -> Iterator[None]:
        """Each turn is a step that is trained before the first run."""
        return iter(())

    def rest(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the loop waits: nothing of it may disturb what is measured elsewhere."""
        raise NotImplementedError

    def begin(self, command: dict[str, Any]) -> None:
        """Go to the side of the process that the command is for."""

    def stepped(self) -> None:
        """A step of a run has ended."""

    def end(self) -> None:
        """A run has ended."""

    def now(self) -> float:
        """Seconds on a clock, when the device has done what was queued."""
        raise NotImplementedError

    def waited(self) -> float:
        """Seconds that steps have waited for data so far."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What is known of each side of the process."""
        raise NotImplementedError


def gate(
    trainer: Trainer, receive: Callable[[], dict[str, Any]], send: Callable[[dict[str, Any]], object]
) -> Callable[[], None]:
    """The gate: returns when the next step is to be trained.

    A command to train names the `side`, its untimed steps (`lead`), and its timed ones (`steps`). These are timed from
    the end of the step before them to the end of the last one, with everything that happens between steps.
    """
    return _in_runs(trainer, receive, send).__next__


def _in_runs(
    trainer: Trainer, receive: Callable[[], dict[str, Any]], send: Callable[[dict[str, Any]], object]
) -> Iterator[None]:
    yield from trainer.settle()
    answer: dict[str, Any] = {"ready": trainer.facts()}
    while True:
        with trainer.rest():
            send(answer)
            while (command := receive())["do"] != "train":
                send(trainer.facts())
            trainer.begin(command)
        for _ in range(command["lead"]):
            yield
            trainer.stepped()
        begin, waited = trainer.now(), trainer.waited()
        for _ in range(command["steps"]):
            yield
            trainer.stepped()
        answer = {"seconds": trainer.now() - begin, "waited_s": trainer.waited() - waited}
        trainer.end()


def signal_to(processes: Iterable[int], number: int) -> None:
    """Send a signal to those that are still running."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


@contextlib.contextmanager
def still(processes: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Inside, the workers of a loader stand still: they would disturb others, and make batches while nobody counts.

    processes: the workers, asked again at the end.
    """
    signal_to(processes(), signal.SIGSTOP)
    yield
    signal_to(processes(), signal.SIGCONT)
