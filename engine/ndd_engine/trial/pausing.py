"""Live runs stand still while a trial measures, and always go on afterwards.

A pause carries the number of this process: the run that is paused watches it, and goes on by itself should this
process die before it can say so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ndd_engine.config import read
from ndd_engine.errors import UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.record.channel import send
from ndd_engine.record.reader import RunReader
from ndd_engine.record.rundir import RunDir, all_runs
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import duration, printable

from .request import Base

# A run pauses after its step, or after the evaluation that it is in.
PATIENCE_S = 60.0
_LOOK_S = 0.1


def to_pause(base: Base, root: Path, others: bool) -> tuple[RunDir, ...]:
    """The live runs that have to stand still while `base` is measured: its own, and those on the same device.

    others: runs other than its own may be paused. Raises UsageError that names them where they may not.
    """
    own = base.run
    device = detect(read(base.config, base.sets, base.workload).resolve().run.device, use_torch=False).device
    found = [own] if own is not None and own.live_owner() is not None else []
    beside = [run for run in all_runs(root) if not _same(run, own) and _trains_on(run, device)]
    if beside and not others:
        names = ", ".join(printable(run.name) for run in beside)
        verb = "trains" if len(beside) == 1 else "train"
        raise UsageError(
            f"{names} {verb} on {device} and would disturb the measurement: pause with --pause, or wait for the end"
        )
    return (*found, *beside)


@contextmanager
def held(
    runs: Iterable[RunDir],
    tell: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
    patience_s: float = PATIENCE_S,
) -> Iterator[None]:
    """These runs are paused inside, and go on afterwards; one that a person paused before stays so.

    tell: what is waited for, for people. stop: set it to wait no longer. Raises UsageError when a run does not pause.
    """
    asked: list[RunDir] = []
    try:
        for run in runs:
            try:
                send(run.control_socket, "pause", holder=os.getpid())
                asked.append(run)
            except UsageError as error:
                if run.live_owner() is not None:  # else it has ended in this moment
                    raise UsageError(
                        f"run {printable(run.name)} cannot be paused, and would disturb the measurement: {error}"
                    ) from None
        for run in asked:
            _wait(run, tell, stop, patience_s)
        yield
        for run in asked:
            if tell is not None and _went_on(run):
                tell(
                    f"run {printable(run.name)} went on before the trial was over and disturbed it: measure again"
                )
    finally:
        _release(asked)


def _release(runs: Sequence[RunDir]) -> None:
    for run in runs:
        with suppress(UsageError):  # it has ended meanwhile
            send(run.control_socket, "resume", holder=os.getpid())


def _went_on(run: RunDir) -> bool:
    """Whether somebody resumed it meanwhile."""
    reader = RunReader(run)
    reader.poll()
    snapshot = reader.snapshot()
    return not snapshot.final and snapshot.status != "paused"


def _wait(
    run: RunDir, tell: Callable[[str], None] | None, stop: threading.Event | None, patience_s: float
) -> None:
    reader = RunReader(run)
    deadline = time.monotonic() + patience_s
    told = False
    while True:
        reader.poll()
        snapshot = reader.snapshot()
        if snapshot.final or snapshot.status == "paused" or (stop is not None and stop.is_set()):
            return
        if time.monotonic() > deadline:
            raise UsageError(
                f"run {printable(run.name)} did not pause within {duration(patience_s)}: it is {snapshot.status}"
            )
        if tell is not None and not told:
            tell(f"waiting for run {printable(run.name)} to pause")
            told = True
        time.sleep(_LOOK_S)


def _same(run: RunDir, other: RunDir | None) -> bool:
    return other is not None and run.path.resolve() == other.path.resolve()


def _trains_on(run: RunDir, device: str) -> bool:
    """Whether it is live on this device, as far as it says already, and not standing still anyway."""
    if run.live_owner() is None:
        return False
    reader = RunReader(run)
    reader.poll()
    snapshot: Snapshot = reader.snapshot()
    return snapshot.status != "paused" and (snapshot.run is None or snapshot.run.device == device)
