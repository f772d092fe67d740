"""The place of this process among the ranks, from the environment that torchrun and other launchers set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ndd_engine.errors import NddError, UsageError
from ndd_engine.text import printable

# The folder of the run, set by `ndd-console train --ranks`, which reads the outcome from the record there.
ENV_OWN_LAUNCHER = "NDD_RANKS"
# Set for ranks that it starts after it was told to stop.
ENV_STOPPED = "NDD_RANKS_STOPPED"


class OtherRankError(NddError):
    """Another rank failed and reports why; this one has nothing to add. The message is that of the other rank.

    curable: whether a restart of all ranks may succeed.
    """

    def __init__(self, text: str, exit_status: int | None = None, curable: bool = False) -> None:
        super().__init__(text)
        self.exit_status = NddError.exit_status if exit_status is None else exit_status
        self.curable = curable


@dataclass(frozen=True)
class Place:
    """rank of size ranks, local_rank of local_size on this host.

    restart: restarts of all ranks so far; restarts: how many the launcher allows. begun_t: when they first started, in
    Unix seconds; 0.0 before the ranks met.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    restart: int = 0
    restarts: int = 0
    begun_t: float = 0.0

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the run."""
        return self.rank == 0

    def threads(self, usable: int) -> int:
        """This rank's share of the usable cores."""
        return max(usable // self.local_size, 1)


def place() -> Place | None:
    """The place of this process; None if it trains alone. Raises UsageError for values that make no sense."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if size <= 1:
        return None
    local_rank, local_size = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
    if not 0 <= rank < size or not 0 <= local_rank < local_size:
        raise UsageError(
            f"RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}: "
            "a rank is at least 0 and less than the number of ranks"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UsageError(f"WORLD_SIZE={size}, but {name} is not set: start the ranks with torchrun")
    restart, restarts = _number("TORCHELASTIC_RESTART_COUNT", 0), _number("TORCHELASTIC_MAX_RESTARTS", 0)
    return Place(rank, size, local_rank, local_size, restart, restarts)


def own_launcher() -> Path | None:
    """The folder of the run if `ndd-console train --ranks` started this rank."""
    folder = os.environ.get(ENV_OWN_LAUNCHER)
    return None if folder is None else Path(folder)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{name}={printable(text)}: not a number; the launcher of the ranks sets it"
        ) from None
