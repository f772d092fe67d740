"""Keeps the device free while a trial measures: one trial at a time, and live runs paused and always resumed.

A pause carries the id of this process: the paused run watches it and resumes by itself if this process dies.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ndd_engine.config import read
from ndd_engine.errors import UsageError
from ndd_engine.files import open_regular
from ndd_engine.hardware.detect import detect, equal_gpus
from ndd_engine.hardware.gpus import Gpu
from ndd_engine.record.channel import send
from ndd_engine.record.file import RunReader
from ndd_engine.record.rundir import RunDir, all_runs, flocked
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import duration, printable

from .trial_request import Base

# A run pauses after the current step or evaluation.
PATIENCE_S = 60.0
_POLL_S = 0.1
_LONGEST = 200  # characters of what is measured


def to_pause(base: Base, root: Path, others: bool, ranks: int | None = None) -> tuple[RunDir, ...]:
    """The live runs to pause while `base` is measured: its own, and those on the same device.

    others: whether runs other than its own may be paused; if not, raises a UsageError that names them. ranks: the most
    that are measured, each on a device of its own; None for those of `base`.
    """
    own = base.run
    config = read(base.config, base.sets, base.workload).resolve()
    device = detect(config.run.device, use_torch=False).device
    devices = _devices(device, ranks or config.parallel.ranks)
    found = [own] if own is not None and own.live_owner() is not None else []
    alongside = [run for run in all_runs(root) if not _same(run, own) and _trains_on(run, devices)]
    if alongside and not others:
        names = ", ".join(printable(run.name) for run in alongside)
        verb = "is" if len(alongside) == 1 else "are"
        raise UsageError(
            f"{names} {verb} training on {device} and would disturb the measurement: add --pause, or wait for the end"
        )
    return (*found, *alongside)


@contextmanager
def held(
    runs: Iterable[RunDir],
    tell: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
    patience_s: float = PATIENCE_S,
) -> Iterator[None]:
    """Pauses these runs inside the context, and resumes them afterwards; runs paused by a person stay paused.

    tell: receives messages for the user. stop: set it to stop waiting. Raises UsageError if a run does not pause.
    """
    asked: list[RunDir] = []
    try:
        for run in runs:
            try:
                send(run.control_socket, "pause", holder=os.getpid())
                asked.append(run)
            except UsageError as error:
                if run.live_owner() is not None:  # else it has just ended
                    raise UsageError(
                        f"run {printable(run.name)} cannot be paused and would disturb the measurement: {error}"
                    ) from None
        for run in asked:
            _wait(run, tell, stop, patience_s)
        yield
        for run in asked if tell is not None else ():
            snapshot = _snapshot(run)
            if tell is not None and not snapshot.final and snapshot.status != "paused":
                tell(
                    f"run {printable(run.name)} was resumed during the measurement and disturbed it: measure again"
                )
    finally:
        for run in asked:
            with suppress(UsageError):  # it has ended
                send(run.control_socket, "resume", holder=os.getpid())


@contextmanager
def alone(
    device: str,
    tell: Callable[[str], None],
    stop: threading.Event | None = None,
    folder: Path | None = None,
    ranks: int = 1,
    what: str = "",
) -> Iterator[None]:
    """Inside the context, no other trial of this user on this machine measures on the same device.

    Waits for the others, until `stop` is set. device: as in the configuration; its UUID names a GPU. tell: receives
    whom it waits for. folder: of the lock (default: the system's temporary folder). ranks: number of GPUs that are
    used. what: is measured, as those are told that wait. The kernel releases the lock of a process that is killed.
    Without a folder for the lock, does nothing.
    """
    machine = detect(device, use_torch=False)
    gpus = equal_gpus(machine)[:ranks] if ranks > 1 else []
    # In the order of the GPUs: two trials cannot wait for each other.
    names = [_named(gpu, f"cuda:{index}") for index, gpu in enumerate(gpus)]
    with ExitStack() as stack:
        for name in names or [_named(machine.chosen, machine.device)]:
            stack.enter_context(_alone_on(name, machine.device, what, tell, stop, folder))
        yield


def _named(gpu: Gpu | None, device: str) -> str:
    """The name of a device in that of its lock."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", gpu.uuid if gpu is not None and gpu.uuid is not None else device)


@contextmanager
def _alone_on(
    name: str, device: str, what: str, tell: Callable[[str], None], stop: threading.Event | None,
    folder: Path | None,
) -> Iterator[None]:  # fmt: skip
    path = (folder or Path(tempfile.gettempdir())) / f"ndd-console-{os.getuid()}-{name}.lock"
    try:
        handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        while os.fstat(handle).st_uid == os.getuid() and (holder := _locked(handle, what)) is not None:
            tell(f"waiting for {holder} on {device}")
            if (stop or threading.Event()).wait(_POLL_S):
                break
        yield
    finally:
        os.close(handle)


def _locked(handle: int, what: str) -> str | None:
    """Take the lock. Returns who holds it and for how long; None if it was taken, or files cannot be locked."""
    with suppress(OSError):
        if not flocked(handle):
            return _holder(os.pread(handle, 4 * _LONGEST, 0).decode("utf-8", "replace"))
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} {time.time():.0f} {what[:_LONGEST]}".encode(), 0)
    return None


def _holder(text: str) -> str:
    """What a lock says of its holder, in words: "the trial of … (process 7, for 12 s)"."""
    pid, _, rest = text.partition(" ")
    since, _, what = rest.partition(" ")
    known = f", for {duration(max(time.time() - float(since), 0))}" if since.isdecimal() else ""
    return f"{printable(what) or 'another measurement'} (process {printable(pid) or '?'}{known})"


def _snapshot(run: RunDir) -> Snapshot:
    reader = RunReader(run)
    reader.poll()
    return reader.snapshot()


def _wait(
    run: RunDir, tell: Callable[[str], None] | None, stop: threading.Event | None, patience_s: float
) -> None:
    reader = RunReader(run)
    deadline = time.monotonic() + patience_s
    announced = False
    while True:
        reader.poll()
        snapshot = reader.snapshot()
        if snapshot.final or snapshot.status == "paused" or (stop is not None and stop.is_set()):
            return
        if time.monotonic() > deadline:
            raise UsageError(
                f"run {printable(run.name)} did not pause within {duration(patience_s)}: it is {snapshot.status}"
            )
        if tell is not None and not announced:
            tell(f"waiting for run {printable(run.name)} to pause")
            announced = True
        time.sleep(_POLL_S)


def _same(run: RunDir, other: RunDir | None) -> bool:
    return other is not None and run.path.resolve() == other.path.resolve()


def _trains_on(run: RunDir, devices: set[str]) -> bool:
    """Whether it is live, not paused, and on one of these devices or not yet on a known one."""
    if run.live_owner() is None:
        return False
    snapshot = _snapshot(run)
    if snapshot.status == "paused" or snapshot.run is None:
        return snapshot.status != "paused"
    ranks = snapshot.ranks.newest.world if snapshot.ranks is not None else 1
    return not devices.isdisjoint(_devices(snapshot.run.device, ranks))


def _devices(first: str, ranks: int) -> set[str]:
    """The devices of so many ranks, of which rank 0 has this one."""
    kind, _, index = first.partition(":")
    return {f"{kind}:{int(index) + rank}" for rank in range(ranks)} if index.isdecimal() else {first}
