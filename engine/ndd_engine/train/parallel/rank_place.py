"""The place of this process among the ranks, texts that they leave for each other, and the process that starts them.

The place comes from the environment that torchrun and other launchers set. Ranks that `ndd-console train --ranks`
started are processes of one host and leave files: these outlive the rank that holds the store, and can be read while
it is stopped. Under another launcher texts are keys of the store.

    python -m ndd_engine.train.parallel.rank_place RANKS RESTARTS FOLDER COMMAND...

starts the ranks of `ndd-console train --ranks` by torch's elastic launcher, and restarts them. It does not depend on
the console, and holds a lock on the run while ranks restart. SIGINT and SIGTERM are passed on to the ranks, which save
a checkpoint and stop; further ones stop them immediately, and kill those that do not. If the ranks end without
recording why, it records which of them failed first.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from ndd_engine.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    INTERRUPTED,
    TERMINATED,
    NddError,
    RunLockedError,
    UsageError,
    message_of,
    shortened,
)
from ndd_engine.record.events import EndEvent, Event
from ndd_engine.record.file import Recorder, RunReader
from ndd_engine.record.rundir import RunDir, RunLock, resume_text
from ndd_engine.text import counted, printable

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
class RankPlace:
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


def place() -> RankPlace | None:
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
    return RankPlace(rank, size, local_rank, local_size, restart, restarts)


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


class FolderNotes:
    """Texts by name, in a folder of this host.

    Neither method raises an Exception: a rank that reports a failure may be the only one left.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, text: str) -> None:
        """Leave a text, in place of an earlier one with that name."""
        path = self._path(name)
        temporary = path.with_name(f".{secrets.token_hex(6)}")
        with contextlib.suppress(OSError):
            # Services that clean the folder of temporary files may have removed it.
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
            temporary.replace(path)

    def get(self, name: str) -> str | None:
        """The text with that name, or None."""
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
        """Leave a text, in place of an earlier one with that name."""
        with contextlib.suppress(Exception):  # the store may be gone
            self._store.set(f"note/{name}", text)

    def get(self, name: str) -> str | None:
        """The text with that name, or None."""
        with contextlib.suppress(Exception):
            if self._store.check([f"note/{name}"]):
                return bytes(self._store.get(f"note/{name}")).decode()
        return None


Notes = FolderNotes | StoreNotes


@dataclass(frozen=True)
class OtherRanks:
    """The other ranks of a run, before they meet: this rank's place, and the store and notes that all of them share."""

    place: RankPlace
    store: Store
    notes: Notes


def notes_of(store: Store, here: RankPlace) -> Notes:
    """The notes of the ranks since their last restart."""
    folder = os.environ.get(ENV_NOTES)
    return StoreNotes(store) if folder is None else FolderNotes(Path(folder) / str(here.restart))


# Time for the other ranks to leave their notes, and for the system to notice a lost connection.
PATIENCE_S = 2.0
LONGEST = 1500
UNKNOWN = ", and it is not known which one"
# Where errors of a collective arise: these parts of torch, and this package, which waits for some.
_COLLECTIVES = ("distributed", "autograd", "nn/parallel", "_ops.py")
_HERE = str(Path(__file__).parent)
# What torch's process groups say when another rank is gone.
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|peer|remote process|socket|timed? ?out|ncclRemoteError|heartbeat",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cause:
    """Why a rank ends before training does.

    status, exit_status: as in the end event. of_this_rank: whether the reason lies in this rank, not in another one.
    curable: whether nobody could foresee it, so that the same ranks may succeed another time.
    """

    status: str
    text: str
    of_this_rank: bool
    curable: bool
    exit_status: int | None = None


def introduce(ranks: OtherRanks) -> None:
    """Tell the other ranks which process this is."""
    ranks.notes.put(f"here/{ranks.place.rank}", json.dumps(asdict(Member.mine(ranks.place.rank))))


def leave_cause(ranks: OtherRanks, cause: Cause, rank: int | None = None) -> Cause:
    """Tell the other ranks why a rank ends, by default this one; returns the cause."""
    rank = ranks.place.rank if rank is None else rank
    body = asdict(cause) | {"text": shortened(cause.text, LONGEST)}
    ranks.notes.put(f"over/{rank}", json.dumps(body))
    ranks.notes.put("over", str(rank))
    return cause


def first_over(ranks: OtherRanks) -> Cause | None:
    """Why another rank ended early, if one said so."""
    rank = ranks.notes.get("over")
    return None if rank is None or int(rank) == ranks.place.rank else _cause_of(ranks.notes, int(rank))


def other_over(ranks: OtherRanks) -> Cause | None:
    """Why another rank ended early: what one of them said, or that the process of one of this host is gone."""
    return first_over(ranks) or HostRanks(ranks).gone()


def others(ranks: OtherRanks, error: BaseException, text: str, place: str) -> Cause:
    """The cause of an error: text, unless the error says that another rank is gone. Waits for its reason then.

    place: where this rank noticed, such as "at step 20 in backward".
    """
    rank = ranks.place.rank
    if not _lost(error):
        return leave_cause(ranks, Cause("failed", f"rank {rank}: {text}", of_this_rank=True, curable=True))
    ranks.notes.put(f"noticed/{rank}", "")
    noticed = f"rank {rank} noticed {place}"
    deadline = time.monotonic() + PATIENCE_S
    neighbours = HostRanks(ranks)
    while time.monotonic() < deadline:
        neighbours.gone()
        told = [cause for other in _others(ranks) if (cause := _cause_of(ranks.notes, other)) is not None]
        if stopped := next((cause for cause in told if cause.status != "failed"), None):
            return stopped
        if told:
            words = "; ".join(dict.fromkeys(cause.text for cause in told))
            curable, status = any(cause.curable for cause in told), told[0].exit_status
            return Cause(
                "failed", f"{words} ({noticed})", of_this_rank=False, curable=curable, exit_status=status
            )
        time.sleep(0.1)
    lost = f"rank {rank} lost the connection to another rank {place}{_silent(ranks)}: {text}"
    return leave_cause(ranks, Cause("failed", lost, of_this_rank=True, curable=True))


def _lost(error: BaseException) -> bool:
    """Whether an error says that another rank is gone: one of a collective, not of a connection of the user's own."""
    import torch  # the console reads this module before torch is loaded

    torch_folder = Path(torch.__file__).parent
    places = (*(str(torch_folder / part) for part in _COLLECTIVES), _HERE)
    seen: BaseException | None = error
    while seen is not None:
        if _LOST.search(message_of(seen)) and "Error" in type(seen).__name__:
            frames = [frame.f_code.co_filename for frame, _line in traceback.walk_tb(seen.__traceback__)]
            if frames and frames[-1].startswith(places):
                return True
        seen = seen.__cause__
    return False


def _silent(ranks: OtherRanks) -> str:
    """Which ranks have said nothing since this one noticed; those that live have noticed it as well by now."""
    notes = ranks.notes
    if notes.get(f"noticed/{ranks.place.rank}") is None:
        return UNKNOWN
    silent = [rank for rank in _others(ranks) if notes.get(f"noticed/{rank}") is None]
    named = []
    for rank in silent[:4]:
        member = _member(notes, rank)
        named.append(f"rank {rank}" if member is None else str(member))
    if not named or len(silent) > ranks.place.size // 2 + 1:
        return UNKNOWN
    more = f" and {len(silent) - 4} more" if len(silent) > 4 else ""
    return f"; no response since from {', '.join(named)}{more}"


def _others(ranks: OtherRanks) -> Iterable[int]:
    here = ranks.place
    return (rank for rank in range(here.size) if rank != here.rank)


def _cause_of(notes: Notes, rank: int) -> Cause | None:
    """Why a rank ended, in its own words."""
    found = notes.get(f"over/{rank}")
    if found is None:
        return None
    body = json.loads(found)
    text, status = str(body["text"]), str(body["status"])
    if status == "failed" and not text.startswith("rank "):
        text = f"rank {rank}: {text}"
    elif status != "failed":
        text = f"{text} at rank {rank}, immediately"
    return Cause(status, printable(text), False, bool(body["curable"]), body["exit_status"])


class HostRanks:
    """The other ranks of this host. One that was killed cannot say so."""

    def __init__(self, ranks: OtherRanks) -> None:
        self._ranks = ranks
        # Whose host is not known yet: launchers may deal out ranks to hosts in any order.
        self._unknown = set(_others(ranks))
        # Those of this host: looking at them does not ask the store.
        self._known: list[Member] = []

    def gone(self) -> Cause | None:
        """That the process of one of them has ended without leaving. Tells all ranks."""
        notes = self._ranks.notes
        if len(self._known) < self._ranks.place.local_size - 1:
            for rank in sorted(self._unknown):
                if (member := _member(notes, rank)) is not None:
                    self._unknown.discard(rank)
                    self._known += [member] if member.here else []
        for member in self._known:
            if member.ended and notes.get(f"left/{member.rank}") is None:
                cause = Cause("failed", f"{member} was killed or ended", of_this_rank=False, curable=True)
                return leave_cause(self._ranks, cause, member.rank)
        return None


def _member(notes: Notes, rank: int) -> Member | None:
    """What a rank said of itself; None before it did."""
    text = notes.get(f"here/{rank}")
    return None if text is None else Member(**json.loads(text))


def ended_since(run: RunDir, begun: float) -> EndEvent | None:
    """The end that was recorded since then (Unix time in seconds), or None."""
    ended_t = 0.0

    def hear(t: float, event: Event) -> None:
        nonlocal ended_t
        ended_t = t if isinstance(event, EndEvent) else ended_t

    reader = RunReader(run, hear)
    reader.poll()
    return reader.snapshot().end if ended_t >= begun else None


def record_end(run: RunDir, end: EndEvent) -> None:
    """Record the end of a run that no process writes; its step is the last one of the record. Never raises OSError."""
    lock = RunLock(run)
    try:
        lock.acquire(patience_s=2.0)
    except (RunLockedError, OSError):
        return
    try:
        reader = RunReader(run)
        reader.poll()
        snapshot = reader.snapshot()
        how = ""
        if end.status == "failed" and (saved := snapshot.checkpoint) is not None:
            how = f"; the last checkpoint is step {saved.mark.step:,}; {resume_text(run.name)}"
        recorder = Recorder(run.events, reader.state)
        recorder.start()
        recorder.put(replace(end, reason=end.reason + how, step=snapshot.step))
        recorder.flush()
        recorder.close()
    except OSError:
        return
    finally:
        lock.release()


# A restart shares the store of the launcher, which still has addresses of the ranks before (PyTorch issue 135712).
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
MONITOR_S = 0.1
# SIGTERMs within this time are one: a service manager sends it to all processes, and some of them pass it on.
SAME_TERM_S = 1.0
# From the second signal to SIGKILL.
KILL_S = 3.0


class RankSignals:
    """Passes SIGINT and SIGTERM on to the ranks. first: the first one that arrived, None before."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._last_term_s = -SAME_TERM_S
        self._kill_at: float | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def look(self) -> None:
        """Kill ranks that have not stopped in time."""
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            _send(signal.SIGKILL)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM:
            before, self._last_term_s = self._last_term_s, now
            if now - before < SAME_TERM_S:
                return
        if self.first is None:
            self.first = number
            # For ranks that this ends before they listen, and that would be started again.
            os.environ[ENV_STOPPED] = "1"
            _send(number)
            return
        self._kill_at = self._kill_at or now + KILL_S
        _send(signal.SIGINT)


def _send(number: int) -> None:
    with contextlib.suppress(psutil.Error):
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                rank.send_signal(number)


def launch(ranks: int, restarts: int, folder: Path, command: Sequence[str]) -> int:
    """Run the ranks to their end. Returns 0 if they recorded how the run ended, otherwise 1."""
    signals, run, begun = RankSignals(), RunDir(folder), time.time()
    lock = RunLock(run, run.launcher)
    try:
        lock.acquire()
    except (NddError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    notes = tempfile.mkdtemp(prefix="ndd-ranks-")
    os.environ |= {ENV_OWN_LAUNCHER: str(folder), ENV_NOTES: notes, OWN_STORE: "1"}
    # torch's threads are set by each rank; this is for libraries that read it when they are loaded.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
    failures: list[str] = []
    try:
        # In a thread, torch's launcher leaves the signals alone: it would kill ranks that write a checkpoint.
        thread = threading.Thread(
            target=_elastic, args=(ranks, restarts, command, failures.append), daemon=True
        )
        thread.start()
        while thread.is_alive():
            thread.join(MONITOR_S)
            signals.look()
        end = ended_since(run, begun)
        if end is None:
            record_end(run, _end(signals.first, failures, restarts))
        return EXIT_DONE if end is not None else EXIT_FAILED
    finally:
        shutil.rmtree(notes, ignore_errors=True)
        lock.release()


def _elastic(ranks: int, restarts: int, command: Sequence[str], failed: Callable[[str], object]) -> None:
    """Run the ranks under torch's launcher. failed: called with what it reports as the failure."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # That signals are left alone is intended.
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(lambda record: "signal handlers" not in record.getMessage())
    known = inspect.signature(LaunchConfig).parameters
    more: dict[str, Any] = {"shutdown_timeout": int(KILL_S)} if "shutdown_timeout" in known else {}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=MONITOR_S,
        local_addr="localhost",  # the name of the host may have no address
        logs_specs=DefaultLogsSpecs(),
        **more,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda item: item[1].timestamp)
        failed(_words(rank, first.pid, first.exitcode))
    except Exception as error:  # noqa: BLE001  torch's launcher itself
        failed(f"the launcher of the ranks failed: {type(error).__name__}: {printable(str(error))}")


def _words(rank: int, pid: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} (process {pid}) ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    usual = ", usually by the kernel's OOM killer or by hand" if name == "SIGKILL" else ""
    return f"rank {rank} (process {pid}) was killed by {name}{usual}"


def _end(stopped: int | None, failures: Sequence[str], restarts: int) -> EndEvent:
    """The end of a run whose ranks recorded none."""
    if stopped == signal.SIGTERM:
        return EndEvent("terminated", f"{TERMINATED}, immediately", 0, EXIT_TERMINATED)
    if stopped is not None:
        return EndEvent("interrupted", f"{INTERRUPTED}, immediately", 0, EXIT_INTERRUPTED)
    again = f" after {counted(restarts, 'restart')}" if restarts and failures else ""
    text = failures[0] if failures else "the ranks ended without saying why"
    return EndEvent("failed", f"{text}{again}; see console.log", 0, EXIT_FAILED)


if __name__ == "__main__":
    status = launch(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # ending the interpreter with torch takes a second
