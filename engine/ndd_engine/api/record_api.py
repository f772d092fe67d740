"""Recorded runs: events, state, configuration and checkpoints of a run, live or finished."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from ndd_engine.config import Config, read
from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.record.events import Event
from ndd_engine.record.file import EventLog, RunReader
from ndd_engine.record.rundir import RunDir, find_run
from ndd_engine.record.snapshot import Snapshot

from .sources import PathLike, root_of

E = TypeVar("E", bound=Event)


# Seconds between two reads of the record of a live run.
POLL_S = 0.1


class Record:
    """A recorded run, live or finished. Iterating yields every event as (unix seconds, event), the oldest first.

    Functions that take the name or folder of a run also take a Record.

    >>> record = open_run("chartext-001")
    >>> losses = [(event.step, event.loss) for _, event in record.events(WindowEvent)]
    """

    def __init__(self, path: PathLike) -> None:
        self._run = RunDir(Path(path))
        self._reader: RunReader | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Record({str(self.path)!r})"

    def __iter__(self) -> Iterator[tuple[float, Event]]:
        return self.events(Event)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._run.name

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self._run.path

    @property
    def config(self) -> Config:
        """The configuration with all defaults filled in. Raises ConfigError if the run ended before it was written."""
        return read(self._run.config).resolve()

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the complete checkpoints, in the order in which they were written."""
        from ndd_engine.train.checkpoint import CheckpointStore

        return [saved.path for saved in CheckpointStore(self._run.checkpoints, keep=0).all()]

    @property
    def live(self) -> bool:
        """Whether a process is training this run."""
        return self._run.live_owner() is not None

    def events(self, kind: type[E]) -> Iterator[tuple[float, E]]:
        """The events of one type as (unix seconds, event), the oldest first."""
        for t, event in EventLog(self._run.events).new():
            if isinstance(event, kind):
                yield t, event

    def snapshot(self) -> Snapshot:
        """The current state: status, step, loss, throughput, phases, memory, evaluations."""
        self._reader = self._reader or RunReader(self._run)
        self._reader.poll()
        return self._reader.snapshot()

    def follow(self, timeout: float | None = None) -> Iterator[tuple[float, Event]]:
        """New events of a live run as (unix seconds, event), until the run ends or for up to `timeout` seconds.

        Starts with the first event recorded after iteration begins; yields nothing for a finished run.

        >>> for t, event in open_run("chartext-001").follow(timeout=60):
        ...     print(event)
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        new: list[tuple[float, Event]] = []
        reader = RunReader(self._run, lambda t, event: new.append((t, event)))
        reader.poll()
        new.clear()  # the past
        while not reader.snapshot().final and (deadline is None or time.monotonic() < deadline):
            time.sleep(POLL_S)
            reader.poll()
            yield from new
            new.clear()


def open_run(run: PathLike | None = None, runs: PathLike | None = "runs") -> Record:
    """Open a recorded run, live or finished.

    Args:
        run: name of the run or path of its folder; None for the newest live run, otherwise the newest run.
        runs: folder of the runs; None for $NDD_RUNS, otherwise ./runs.

    Raises:
        UsageError: there is no such run; the message lists the runs that exist.

    Example:
        >>> open_run("chartext-001").snapshot().loss
        1.482
    """
    return Record(find_run(root_of(runs), None if run is None else os.fspath(run)).path)


def find_bottlenecks(snapshot: Snapshot) -> tuple[Finding, ...]:
    """The findings of a run, the most important one first; never empty.

    Example:
        >>> [finding.title for finding in find_bottlenecks(open_run().snapshot())]
    """
    return diagnose(snapshot)
