"""Starts test programs under torchrun, and runs of several ranks, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.records import events_of

from ndd_engine.record.events import Event, MarkEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.train.checkpoint import CheckpointStore, rank_entry
from ndd_engine.train.checkpoint_tensors import EntryReader

WORKER = Path(__file__).with_name("sharded_worker.py")


def launch(
    ranks: int, *arguments: object, check: bool = True, worker: Path = WORKER
) -> subprocess.CompletedProcess[str]:
    """Run a worker, by default that of the checkpoint tests, with so many ranks. check: fail the test if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(worker), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0 or not check, done.stdout[-4000:]
    return done


@dataclass(frozen=True)
class Trained:
    """A run that `train` made. output: what it printed. status: its exit status."""

    folder: Path
    status: int
    output: str

    @property
    def events(self) -> list[Event]:
        """What rank 0 recorded."""
        return events_of(RunDir(self.folder))

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """The evaluations by step."""
        marks = [
            event for event in self.events if isinstance(event, MarkEvent) and event.kind == "evaluation"
        ]
        return {mark.step: mark.data["metrics"] for mark in marks}

    def state(self, step: int) -> dict[str, Any]:
        """What a single process loads from the checkpoint of a step."""
        store = CheckpointStore(self.folder / "checkpoints", 9)
        return store.load(next(saved for saved in store.all() if saved.step == step))

    def random(self, step: int, rank: int) -> Any:
        """The random generators that a rank has saved."""
        (folder,) = self.folder.glob(f"checkpoints/step-{step:08d}*")
        reader = EntryReader(folder, frozenset(path.name for path in folder.iterdir()))
        return reader.values(rank_entry(rank))[0]["random"]


def train(root: Path, name: str, *sets: str, ranks: int, resume: bool = False) -> Trained:
    """Train as a user does: `ndd-console train --ranks N`, with as many ranks as given."""
    options = [word for each in (*sets, f'workload.path=["{WORKER.parent}"]') for word in ("--set", each)]
    command = [sys.executable, "-m", "ndd_console", "--runs", str(root), "train", "--headless"]
    done = subprocess.run(
        [*command, "--ranks", str(ranks), "--resume" if resume else "--run", name, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=170,
        check=False,
    )
    return Trained(root / name, done.returncode, done.stdout)
