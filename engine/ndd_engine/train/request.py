"""The request for a run, and the part of a run that preparation uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ndd_engine.config import Draft
from ndd_engine.record.events import Event
from ndd_engine.record.rundir import RunDir

from .control import Control

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .parallel.rank_place import Notes, Place


@dataclass(frozen=True)
class RunRequest:
    """What to run.

    root: the folder of all runs. resume: continue this run; from_step: from that checkpoint instead of the newest one.
    restart: begin anew in the folder of this run, which ended before its first checkpoint.
    probes: measure the cost of a micro-batch before training and look for findings. Processes whose findings nobody
    reads leave this out.
    """

    draft: Draft
    root: Path
    resume: RunDir | None = None
    from_step: int | None = None
    probes: bool = True
    restart: RunDir | None = None


@dataclass(frozen=True)
class Ranks:
    """The other ranks of a run, before they meet: this rank's place, and the store and notes that all of them share."""

    place: Place
    store: Store
    notes: Notes


class OpenRun(Protocol):
    """The part of an open `run.Run` that preparation uses. ranks: None for a run of one process."""

    request: RunRequest
    ranks: Ranks | None
    directory: RunDir
    control: Control

    def put(self, event: Event) -> None:
        """Record an event."""

    def stage(self, text: str) -> None:
        """Report what is being prepared. Raises StopNow once the run was asked to stop."""
