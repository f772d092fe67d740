"""Opens a run as one of several ranks: rank 0 creates or resumes the folder, others write records beside its own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ndd_engine.errors import EXIT_FAILED, NddError, UsageError
from ndd_engine.record.events import EndEvent
from ndd_engine.record.file import Listener, Recorder
from ndd_engine.record.rundir import RunDir, RunLock, bare
from ndd_engine.run.run import EXIT_OF, Run
from ndd_engine.text import printable

from .checkpoint import CheckpointStore
from .parallel.rank_place import (
    Cause,
    HostRanks,
    OtherRanks,
    RankPlace,
    first_over,
    introduce,
    notes_of,
    own_launcher,
    record_end,
)
from .parallel.world import connect, from_first, from_others
from .request import RunRequest
from .training_run import TrainingRun

# How often a rank looks for its launcher and for failures of other ranks, and how long it may take to end then.
LOOK_S = 0.5
LEAVE_S = 3.0
# Seconds until every node sees a folder that another one has created on a shared file system.
SEEN_S = 60.0


def met(make: Callable[[], RunRequest | None], here: RankPlace) -> TrainingRun | None:
    """Reach the other ranks with a request; None if there is nothing to run, which rank 0 decides.

    Rank 0 raises what `make` raises, the others OtherRankError. Rank 0 returns when all ranks have made their requests,
    which may read the folder of the run, before it opens the run. It raises UsageError if one of them failed.
    """
    store, here = connect(here)
    made: list[RunRequest | None] = []

    def first() -> bool:
        made.append(make())
        return made[0] is not None

    if not from_first(store, here, "request", first):
        return None
    others = from_others(store, here, "requests", make)
    request = made[0] if here.first else others
    assert request is not None
    return TrainingRun(request, OtherRanks(here, store, notes_of(store, here)))


def open_rank(training: TrainingRun, listener: Listener | None = None) -> Run:
    """Open a run as one of its ranks. Rank 0 raises what Run.open raises, the others OtherRankError.

    UsageError if another rank cannot write its record.
    """
    ranks = training.ranks
    assert ranks is not None
    here, store = ranks.place, ranks.store

    def first() -> dict[str, object]:
        training.request = _launched(training.request, here)
        directory = Run.open(training, listener).directory
        return {"folder": str(directory.path.absolute()), "resume": training.request.resume is not None}

    def other() -> None:
        resume = directory if told["resume"] else None
        training.request = replace(training.request, resume=resume, restart=None)
        _open_other(training, directory, here)

    told = from_first(store, here, "run", first)
    directory = RunDir(Path(told["folder"]))
    try:
        from_others(store, here, "opened", other)
    except UsageError as error:
        if here.first:
            training.run.put(EndEvent("failed", str(error), 0, error.exit_status))
            training.run.recorder.flush()
            training.run.close()
        raise
    introduce(ranks)
    threading.Thread(target=_watch, args=(training,), name="ndd-ranks", daemon=True).start()
    return training.run


def _launched(request: RunRequest, here: RankPlace) -> RunRequest:
    """What rank 0 opens: the folder that the launcher made, or what an earlier attempt of these ranks left."""
    folder = own_launcher()
    if folder is None:
        if here.restart and request.resume is None:
            name = request.draft.run_name
            if name is None:
                text = "restarts of the ranks need a name for the run"
                raise UsageError(f"{text}: torchrun --max-restarts N -m -- ndd_console train ... --run NAME")
            return _continued(request, RunDir(request.root / name), here)
        if here.restart and request.resume is not None:
            again = _continued(request, request.resume, here)
            return request if again.resume is None else again
        return request
    directory = RunDir(folder)
    if request.resume is not None and not here.restart:
        return request
    return _continued(request, directory, here)


def _continued(request: RunRequest, directory: RunDir, here: RankPlace) -> RunRequest:
    """Continue from the last checkpoint, or begin again if there is none.

    A checkpoint that was asked for counts as long as the ranks have written none since they first started.
    """
    every = [] if bare(directory) else CheckpointStore(directory.checkpoints, 1).all()
    if not every:
        return replace(request, resume=None, from_step=None, restart=directory)
    new = every[-1].t >= here.begun_t
    return replace(request, resume=directory, from_step=None if new else request.from_step, restart=None)


def _open_other(training: TrainingRun, directory: RunDir, here: RankPlace) -> None:
    """Open the run as a rank other than 0: the same folder, a record of its own, and no control socket."""
    own = RunDir(directory.ranks / str(here.rank))
    deadline = time.monotonic() + SEEN_S
    while not directory.lock.exists():
        if time.monotonic() > deadline:
            where = printable(str(directory.path))
            raise UsageError(
                f"does not see {where}: the nodes of a run must share the file system of its folder"
            )
        time.sleep(0.2)
    try:
        own.path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(own)
        lock.acquire()
        recorder = Recorder(own.events)
        recorder.start()
    except OSError as error:
        where = printable(str(error.filename or own.path))
        raise UsageError(f"cannot write to {where}: {error.strerror}") from None
    Run(training, directory, recorder, lock, listens=False)


def _watch(training: TrainingRun) -> None:
    """End this rank soon after its launcher or a rank of this host was killed, or after another rank ended early."""
    assert training.ranks is not None
    run, parent, ranks, neighbours = training.run, os.getppid(), training.ranks, HostRanks(training.ranks)
    cause = None
    while cause is None:
        if run.finished.wait(LOOK_S):
            return
        if os.getppid() != parent:
            text = f"the launcher of the ranks (process {parent}) was killed"
            cause = Cause("failed", text, of_this_rank=True, curable=False)
            run.control.request("kill", text, "failed")
        else:
            cause = first_over(ranks) or neighbours.gone()
    if run.finished.wait(LEAVE_S):
        return
    # It hangs in a collective, or in a call that does not return.
    training.cause = cause
    if ranks.place.first:
        status = cause.exit_status or EXIT_OF.get(cause.status, EXIT_FAILED)
        run.conclude(EndEvent(cause.status, cause.text, run.recorder.snapshot().step, status))
    run.recorder.flush(1.0)
    ranks.notes.put(f"left/{ranks.place.rank}", "")
    os._exit(_status(cause, EXIT_FAILED))


def refused(error: NddError) -> None:
    """Record that rank 0 could not open the run, for the console that started the ranks."""
    if (folder := own_launcher()) is not None:
        text = "; ".join(str(error).splitlines())
        record_end(RunDir(folder), EndEvent("failed", text, 0, error.exit_status))


def leave(training: TrainingRun | None, status: int, broken: bool = False) -> NoReturn:
    """End the process of a rank without joining torch's threads, which may wait for the interpreter lock.

    broken: whether this rank failed before it had a run, and nobody else reports it.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    cause = None if training is None else training.cause
    if training is not None and training.ranks is not None:
        training.ranks.notes.put(f"left/{training.ranks.place.rank}", "")
        if cause is None:
            # Rank 0 may hold the store of all ranks: it leaves last.
            ranks = training.ranks
            deadline = time.monotonic() + LEAVE_S
            for rank in range(ranks.place.size if ranks.place.first else 0):
                while ranks.notes.get(f"left/{rank}") is None and time.monotonic() < deadline:
                    time.sleep(0.02)
    os._exit(status if broken else _status(cause, status))


def _status(cause: Cause | None, status: int) -> int:
    """The exit status of a rank. `ndd-console train --ranks` reads the outcome from the record, not from this.

    Its launcher restarts the ranks after any status but 0, so only the rank that failed has one, and only if a restart
    may help: a loss of NaN or a mistake in the configuration would occur again.
    """
    if own_launcher() is None:
        return status
    return (status or EXIT_FAILED) if cause is not None and cause.of_this_rank and cause.curable else 0
