"""The directory of a run: its files, its lock, opening it for writing, the list of runs, and the source of its script.

    runs/<name>/  config.toml  events.jsonl  console.log  checkpoints/  control.sock  lock

A run of somebody else's script has command.json and ranks/ instead of config.toml and checkpoints/. The source of a
script is kept as it was when its run began: the commit of its repository, and its files, for a diff.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndd_engine.errors import RunLockedError, UsageError
from ndd_engine.files import NOT_REGULAR, open_regular
from ndd_engine.text import printable

from .event import other_version

ENV_RUNS = "NDD_RUNS"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Stands for the newest run where a command takes the name of one.
LAST = "last"


def runs_root(given: Path | None = None) -> Path:
    """The folder of all runs: the given one, else $NDD_RUNS, else ./runs."""
    return given if given is not None else Path(os.environ.get(ENV_RUNS) or "runs")


class _Inside:
    """The path of a file in a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, _: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """Paths of a run. Creating the object does not access the file system."""

    path: Path

    config = _Inside("config.toml")
    # The command of a script; only its runs have this file.
    command = _Inside("command.json")
    # Its source at the start.
    sources = _Inside("sources.json")
    # The records of the script's processes, one file each.
    ranks = _Inside("ranks")
    events = _Inside("events.jsonl")
    console_log = _Inside("console.log")
    report = _Inside("report.html")
    checkpoints = _Inside("checkpoints")
    control_socket = _Inside("control.sock")
    # The newest profiler capture of a script, as a Chrome trace.
    trace = _Inside("capture.json")
    lock = _Inside("lock")
    # The lock of the process that starts and restarts the ranks of a run.
    launcher = _Inside("launcher.lock")
    # What other ranks found out while rank 0, which writes the record, does not answer.
    hang = _Inside("hang.json")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def exists(self) -> bool:
        return _is_there(self.events) or _is_there(self.config)

    def live_owner(self) -> dict[str, Any] | None:
        """The process that writes this run ({"pid", "host"}), or None.

        While ranks restart, it is the one that starts them; for these ranks themselves it does not count.
        """
        starts = _holder(self.launcher)
        return _holder(self.lock) or (None if starts is None or starts["pid"] == os.getppid() else starts)


def _holder(lock: Path) -> dict[str, Any] | None:
    """The process that holds a lock."""
    try:
        handle = open_regular(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        # A shared lock, so that viewers do not block each other.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _owner(lock)
    finally:
        os.close(handle)
    return None


def new_run_dir(root: Path, name: str | None, workload: str) -> RunDir:
    """Create the directory of a new run; default name: the workload and the next free number.

    Raises UsageError if the name exists or the folder is not writable.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        names = iter([name]) if name is not None else _free_names(root, workload)
        for candidate in names:
            try:
                (root / candidate).mkdir()
            except FileExistsError:
                continue  # another process just created it: try the next number
            return RunDir(root / candidate)
    except OSError as error:
        raise UsageError(
            f"{printable(str(root))}: cannot write runs: {error.strerror}; choose another folder with --runs"
        ) from None
    raise UsageError(
        f"run.name: {printable(str(root / (name or '')))} already exists; choose another name, "
        f"or {resume_text(str(name))}"
    )


def resume_text(name: str, *options: str) -> str:
    """ "resume with: ndd-console train --resume baseline". options: further ones of that command."""
    return f"resume with: {' '.join(('ndd-console train --resume', name, *options))}"


def discard(run: RunDir) -> None:
    """Remove the folder of a new run that could not be recorded; what others put into it stays."""
    with contextlib.suppress(OSError):
        written = (run.events, run.console_log)
        if any(path.exists() and path.stat().st_size for path in written):
            return
        for path in (*written, run.command, run.sources, run.control_socket, run.lock, run.launcher):
            path.unlink(missing_ok=True)
        run.path.rmdir()


def bare(run: RunDir) -> bool:
    """Whether the folder contains at most what a run leaves that was killed before it recorded anything."""
    try:
        return {entry.name for entry in run.path.iterdir()} <= {
            "lock",
            "launcher.lock",
            "control.sock",
            "console.log",
            "checkpoints",
        }
    except OSError:  # not a folder, or no permission
        return False


def set_aside(run: RunDir) -> None:
    """Move what an earlier attempt wrote into the folder `attempt-N` of the run. Needs the lock. Raises OSError.

    console.log stays where the launcher of several ranks keeps writing it.
    """
    stay = {run.lock.name, run.launcher.name, run.control_socket.name, run.checkpoints.name}
    if _holder(run.launcher) is not None:
        stay.add(run.console_log.name)
    written = [
        entry
        for entry in run.path.iterdir()
        if entry.name not in stay and not entry.name.startswith("attempt-")
    ]
    if not written:
        return
    folders = (run.path / f"attempt-{index}" for index in itertools.count(1))
    folder = next(path for path in folders if not os.path.lexists(path))
    folder.mkdir()
    for entry in written:
        entry.rename(folder / entry.name)


def _free_names(root: Path, workload: str) -> Iterator[str]:
    base = _base_name(workload)
    pattern = re.compile(rf"{re.escape(base)}-(\d+)")
    taken = [int(match[1]) for entry in root.iterdir() if (match := pattern.fullmatch(entry.name))]
    for number in itertools.count(max(taken, default=0) + 1):
        yield f"{base}-{number:03d}"


def _base_name(workload: str) -> str:
    """A workload name for a file name; the module name for "package.module:factory"."""
    module = workload.partition(":")[0].rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", module).strip("._-")[:56] or "run"


def find_run(root: Path, name: str | None) -> RunDir:
    """The run with this name or path; without a name, or as `last`, the newest one, live runs first.

    Raises UsageError that lists existing runs, or if the record of the run cannot be read.
    """
    runs = sorted(all_runs(root), key=_changed_t)
    for path in (root / name, Path(name)) if name is not None else ():
        if RunDir(path).exists:
            return _readable(RunDir(path.resolve() if path.name in ("", ".", "..") else path))
    if name is None or name == LAST:
        if not runs:
            raise UsageError(
                f"there are no runs in {printable(str(root.absolute()))}; name another folder with --runs FOLDER"
            )
        live = [run for run in runs if run.live_owner()]
        return _readable((live or runs)[-1])
    known = ", ".join(printable(run.name) for run in reversed(runs[-8:]))
    raise UsageError(
        f"there is no run {printable(name)} in {printable(str(root.absolute()))}"
        + (f"; existing runs: {known}" if known else "; name another folder with --runs FOLDER")
    )


def _readable(run: RunDir) -> RunDir:
    try:
        with os.fdopen(open_regular(run.events), "rb") as file:
            why = other_version(file.readline(99))
    except FileNotFoundError:
        return run  # the run ended before it recorded anything
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise UsageError(f"{printable(str(run.events))} cannot be read: {why}")
    return run


def _is_there(path: Path) -> bool:
    """Whether it exists, as far as this user may know."""
    try:
        return path.exists()
    except (OSError, ValueError):  # no permission; a name that no file can have
        return False


def _changed_t(run: RunDir) -> float:
    try:
        return run.path.stat().st_mtime
    except OSError:  # just deleted
        return 0.0


def all_runs(root: Path) -> Iterator[RunDir]:
    """All runs in the folder, sorted by name; not those in folders that this user may not search."""
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return
    for entry in entries:
        run = RunDir(entry)
        if run.exists:
            yield run


class RunLock:
    """Held by the process that writes a run; the kernel releases it when the process ends.

    file: another lock of the run.
    """

    def __init__(self, run: RunDir, file: Path | None = None) -> None:
        self.run, self._file = run, file or run.lock
        self._handle: int | None = None

    def acquire(self, patience_s: float = 0.5) -> None:
        """Take the lock. Raises RunLockedError that names the holder."""
        handle = open_regular(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        deadline = time.monotonic() + patience_s
        try:
            while not flocked(handle):
                if time.monotonic() >= deadline:
                    owner = _owner(self._file)
                    raise RunLockedError(
                        f"run {printable(self.run.name)} is being written by process {owner['pid']} "
                        f"on {owner['host']}; watch it with: ndd-console attach {self.run.name}"
                    )
                time.sleep(0.05)  # a viewer may hold it briefly
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle

    def release(self) -> None:
        """Release the lock; safe to call twice."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def flocked(handle: int) -> bool:
    """Take the lock of a file unless another descriptor holds it. Raises OSError where files cannot be locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_regular(*paths: Path) -> None:
    """Raises OSError for a path that exists and is not a regular file: opening it could block forever."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.stat().st_mode):
                raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def _owner(lock: Path) -> dict[str, Any]:
    """{"pid", "host"} as a lock file names them; "?" for what it does not name."""
    body: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        handle = open_regular(lock, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            body = json.loads(os.read(handle, 4096))
        finally:
            os.close(handle)
    pid, host = (body.get(key) if isinstance(body, dict) else None for key in ("pid", "host"))
    return {
        "pid": pid if type(pid) is int and 0 < pid < 1 << 32 else "?",
        "host": printable(host)[:255] if isinstance(host, str) else "?",
    }
