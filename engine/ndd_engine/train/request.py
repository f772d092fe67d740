"""The request for a run, and the part of a run that preparation uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_engine.config import Draft
from ndd_engine.record.events import Event, StageEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.run.control import Control, StopNow

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


@dataclass(frozen=True)
class OpenRun:
    """The part of an open run that preparation and the loop use. ranks: None for a run of one process."""

    request: RunRequest
    ranks: Ranks | None
    directory: RunDir
    control: Control
    put: Callable[[Event], None]

    def stage(self, text: str, name: str = "prepare") -> None:
        """Report what is being prepared. Raises StopNow once the run was asked to stop."""
        self.put(StageEvent(name, text))
        if self.control.stopping:
            raise StopNow
