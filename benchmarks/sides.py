"""Runs of the engine in processes of their own, which train block by block: the sides of a trial, driven by hand."""

from __future__ import annotations

from ndd_engine.trial.sides import SideProcess
from ndd_engine.wizard.session import PATIENCE_S, WARM_UP

from .common import ignore

BLOCK_S = 1.5
ENDLESS = 1 << 40


def warm_up(side: SideProcess, block_s: float = BLOCK_S) -> None:
    """Prepare the run, and train the slower first steps. Raises ChildError."""
    side.prepare(PATIENCE_S, ignore)
    side.train(WARM_UP, PATIENCE_S, ignore, lead=0, until_s=block_s, least=2)


def step_s(side: SideProcess, block_s: float = BLOCK_S) -> float:
    """Seconds of a step in a block of this length. Raises ChildError."""
    seconds, steps = side.train(ENDLESS, PATIENCE_S, ignore, until_s=block_s, least=2)
    return seconds / steps
