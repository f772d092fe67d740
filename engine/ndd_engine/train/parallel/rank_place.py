"""The place of this process among the ranks, and short texts that they leave for each other outside of collectives.

The place comes from the environment that torchrun and other launchers set. Ranks that `ndd-console train --ranks`
started are processes of one host and leave files: these outlive the rank that holds the store, and can be read while it
is stopped. Under another launcher texts are keys of the store.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil

from ndd_engine.errors import NddError, UsageError
from ndd_engine.text import printable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


# The folder of the run, set by `ndd-console train --ranks`, which reads the outcome from the record there.
ENV_OWN_LAUNCHER = "NDD_RANKS"
# The folder of the notes, set by the launcher of `ndd-console train --ranks`.
ENV_NOTES = "NDD_RANKS_NOTES"
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


@dataclass(frozen=True)
class Member:
    """The process of a rank. space: what its id belongs to, since containers may share the name of a host."""

    rank: int
    host: str
    pid: int
    space: str = ""

    @classmethod
    def mine(cls, rank: int) -> Member:
        """This process."""
        return cls(rank, socket.gethostname(), os.getpid(), _space())

    def __str__(self) -> str:
        return f"rank {self.rank} ({printable(self.host)}, process {self.pid})"

    @property
    def here(self) -> bool:
        """Whether it runs on this host."""
        return self.host == socket.gethostname() and self.space == _space()

    @property
    def ended(self) -> bool:
        """Whether it has ended, seen from its host; also as a zombie."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it. Raises psutil.Error."""
        return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def state(self) -> str:
        """What the system says about a process that does not answer, as far as this host can know."""
        if self.here:
            with contextlib.suppress(psutil.Error):
                if self.stopped:
                    return f"is stopped (process {self.pid}; kill -CONT {self.pid} continues it)"
                return f"does not answer: a call outside of Python holds the interpreter lock (process {self.pid})"
        return f"does not answer: its process ({self.pid}) is stopped or gone, or holds the interpreter lock"


@functools.cache
def _space() -> str:
    """What process ids of this process belong to; "" if it is not known."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


class Notes(Protocol):
    """Texts by name. Neither method raises an Exception: a rank that reports a failure may be the only one left."""

    def put(self, name: str, text: str) -> None:
        """Leave a text, in place of an earlier one with that name."""

    def get(self, name: str) -> str | None:
        """The text with that name, or None."""


class FolderNotes:
    """Notes in a folder of this host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, text: str) -> None:
        """See Notes."""
        path = self._path(name)
        temporary = path.with_name(f".{secrets.token_hex(6)}")
        with contextlib.suppress(OSError):
            # Services that clean the folder of temporary files may have removed it.
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
            temporary.replace(path)

    def get(self, name: str) -> str | None:
        """See Notes."""
        try:
            return self._path(name).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "-")


class StoreNotes:
    """Notes in the store of the ranks."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, name: str, text: str) -> None:
        """See Notes."""
        with contextlib.suppress(Exception):  # the store may be gone
            self._store.set(f"note/{name}", text)

    def get(self, name: str) -> str | None:
        """See Notes."""
        with contextlib.suppress(Exception):
            if self._store.check([f"note/{name}"]):
                return bytes(self._store.get(f"note/{name}")).decode()
        return None


def notes_of(store: Store, here: Place) -> Notes:
    """The notes of the ranks since their last restart."""
    folder = os.environ.get(ENV_NOTES)
    return StoreNotes(store) if folder is None else FolderNotes(Path(folder) / str(here.restart))
