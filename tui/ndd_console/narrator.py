"""A run in lines, for logs, pipes and screen readers: progress every few seconds, what happens as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable

from ndd_engine.record.events import EndEvent, RunEvent
from ndd_engine.record.snapshot import Snapshot, TimedMark
from ndd_engine.text import MISSING, duration, number, printable, rate

# Kinds of marks worth a line of their own.
TOLD = frozenset({"epoch", "evaluation", "checkpoint", "pause", "resume", "warning", "choice", "note"})


class Narrator:
    """Looks at snapshots and says what is new through `say` (one line without its newline).

    known: the identity that a resumed run had before; the new one is introduced when it comes. since: unix
    seconds from which on marks are told (default: now).
    """

    def __init__(
        self,
        say: Callable[[str], None],
        every_s: float = 5.0,
        known: RunEvent | None = None,
        since: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._clock = clock
        self._next = 0.0
        self._stage = ""
        self._since = time.time() if since is None else since  # what happened before is in the log already
        self._told: TimedMark | None = None
        self._introduced = known
        self._step = -1

    def look(self, snapshot: Snapshot) -> None:
        """Say what came since the last look."""
        if snapshot.stage and snapshot.stage != self._stage and snapshot.status == "preparing":
            self._say(snapshot.stage)
        self._stage = snapshot.stage
        if snapshot.run is not None and snapshot.run is not self._introduced:
            self._introduced = snapshot.run
            for line in introduction(snapshot):
                self._say(line)
        for timed in self._new_marks(snapshot.marks):
            if timed.t >= self._since and timed.mark.kind in TOLD:
                text = printable(timed.mark.text)
                self._say(f"warning: {text}" if timed.mark.kind == "warning" else text)
        now = self._clock()
        if (
            snapshot.steps_per_s is not None
            and snapshot.step != self._step
            and now >= self._next
            and not snapshot.final
        ):
            self._next = now + self._every_s
            self._step = snapshot.step
            self._say(progress_line(snapshot))

    def _new_marks(self, marks: tuple[TimedMark, ...]) -> tuple[TimedMark, ...]:
        # By identity: several may carry the same time.
        seen = next((index for index in range(len(marks) - 1, -1, -1) if marks[index] is self._told), -1)
        if marks:
            self._told = marks[-1]
        return marks[seen + 1 :]


def introduction(snapshot: Snapshot) -> list[str]:
    """What runs, on what."""
    run = snapshot.run
    assert run is not None
    threads = f", {run.threads} threads" if run.device == "cpu" else ""
    lines = [
        f"run {run.name}: {run.workload}, {number(run.parameters)} parameters ({printable(run.model)})",
        f"on {printable(run.device_name)}{threads}, {run.precision}; {printable(run.data)}",
        f"{number(run.total_steps)} optimizer steps of {number(run.items_per_step)} {run.item}s"
        f" ({number(run.steps_per_epoch)} steps an epoch)",
    ]
    if run.resumed_step is not None:
        lines.append(f"goes on from step {number(run.resumed_step)} ({run.resumed_from})")
    return lines


def progress_line(snapshot: Snapshot) -> str:
    """step 1,200/43,050  epoch 3/25  loss 1.482  18.3 step/s  2,343 window/s  idle 12 % (host)  1 h 12 m left"""
    run = snapshot.run
    total = f"/{number(run.total_steps)}" if run else ""
    epochs = f"  epoch {min(snapshot.epoch + 1, run.epochs)}/{run.epochs}" if run else ""
    item = run.item if run else "item"
    idle = f"{snapshot.idle.share:.0%}" if snapshot.idle.share is not None else MISSING
    return (
        f"step {number(snapshot.step)}{total}{epochs}  loss {number(snapshot.loss, 4)}"
        f"  {rate(snapshot.steps_per_s, 'step')}"
        f"  {rate(snapshot.items_per_s, item)}  idle {idle} ({snapshot.idle.method})  {duration(snapshot.eta_s)} left"
    )


def summary(snapshot: Snapshot, end: EndEvent | None, folder: str) -> list[str]:
    """The last words about a run."""
    status = end.status if end else snapshot.status
    lines = [f"{status}: {printable(end.reason) if end else 'the run goes on'}"]
    run = snapshot.run
    if run is not None and snapshot.step:
        lines.append(
            f"{number(snapshot.step)} optimizer steps, {number(snapshot.items)} {run.item}s"
            f" in {duration(snapshot.elapsed_s)};"
            f" last loss {number(snapshot.loss, 4)}"
        )
        top = sorted(snapshot.phases, key=lambda share: -share.share)[:4]
        if top:
            lines.append("lately " + ", ".join(f"{share.name} {share.share:.0%}" for share in top))
    if snapshot.best is not None:
        figures = ", ".join(f"{name} {number(value, 4)}" for name, value in snapshot.best.metrics.items())
        lines.append(f"best evaluation at step {number(snapshot.best.step)}: {figures}")
    lines.append(f"record and checkpoints: {printable(folder)}")
    return lines
