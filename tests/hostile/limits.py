"""Commands under limits: few descriptors, threads or bytes, full disks, closed streams, odd environments."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ndd_engine.record.reader import RunReader
from ndd_engine.record.rundir import RunDir
from tests.hostile.attempts import Attempt, Kind

SETS = (
    "workload.name=ndd", "workload.samples=400", "workload.channels=2", "workload.hidden=[8]", "batch.sequence=8",
    "batch.micro=16", "run.threads=1", "run.max_steps=12", "checkpoint.every_steps=4", "log.window_s=0",
)  # fmt: skip
TRAIN = ("train", "--headless", "--run", "one", *(part for each in SETS for part in ("--set", each)))
WORKER = (*TRAIN, "--set", "loader.workers=1")
RUNS = ("runs",)
# Sets limits that a parent cannot set without code between fork and exec, then becomes the program.
LAUNCH = """
import json, os, resource, sys
given = json.loads(sys.argv[1])
if given["cwd"]:
    os.mkdir(given["cwd"]); os.chdir(given["cwd"]); os.rmdir(given["cwd"])
if given["umask"] is not None:
    os.umask(given["umask"])
for number in given["closed"]:
    os.close(number)
for name, value in given["limits"].items():
    number = getattr(resource, name)
    hard = resource.getrlimit(number)[1] if name == "RLIMIT_CPU" else value
    resource.setrlimit(number, (value, hard))
os.execve(sys.executable, [sys.executable, *given["program"]], dict(os.environ))
"""
# Threads cannot be started after the n-th, as root is not limited by RLIMIT_NPROC.
FEW_THREADS = """
import sys, threading
left, start = [int(sys.argv.pop(1))], threading.Thread.start
def few(thread):
    if left[0] <= 0:
        raise RuntimeError("can't start new thread")
    left[0] -= 1
    start(thread)
threading.Thread.start = few
from ndd_console.__main__ import main
main()
"""
# The n-th write to a regular file and all later ones fail.
FAILING_WRITES = """
import os, stat, sys
number, left, write = int(sys.argv.pop(1)), [int(sys.argv.pop(1))], os.write
def failing(handle, data):
    if stat.S_ISREG(os.fstat(handle).st_mode):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
    return write(handle, data)
os.write = os.pwrite = lambda handle, data, *_: failing(handle, data)
from ndd_console.__main__ import main
main()
"""
LIMIT_S = 90.0
F_SETPIPE_SZ = 1031


@dataclass
class Case:
    """A command under a limit. message: what the output has to say unless the status is 0."""

    name: str
    arguments: Sequence[str] = TRAIN
    statuses: tuple[int, ...] = (0,)
    message: str = ""
    limits: dict[str, int] = field(default_factory=dict)
    closed: tuple[int, ...] = ()
    environment: dict[str, str | None] = field(default_factory=dict)
    umask: int | None = None
    no_folder: bool = False
    program: tuple[str, ...] = ("-m", "ndd_console")
    streams: dict[str, str] = field(default_factory=dict)
    disk_kb: int | None = None
    read_only: bool = False
    empty: bool = False  # no run may be left


def cases() -> list[Case]:
    """All of them; the first ones need no torch."""
    found = [
        Case("runs, all streams closed", RUNS, closed=(0, 1, 2)),
        Case("help into a full disk", ("train", "--help"), (1,), "No space left on device: standard output", streams={"stdout": "/dev/full"}),
        Case("a file-size limit of 0", TRAIN, (2,), "cannot write to .*: File too large", {"RLIMIT_FSIZE": 0}, empty=True),
        Case("a read-only disk", TRAIN, (2,), "cannot write runs: Read-only file system", read_only=True, disk_kb=64),
        Case("no thread at all", TRAIN, (3,), "can't start new thread: too many processes", program=("-c", FEW_THREADS, "0"), empty=True),
        Case("a full disk at the start", TRAIN, (1, 2), "No space left on device", disk_kb=0, empty=True),
    ]  # fmt: skip
    for number in range(8):
        closed = tuple(each for each in (0, 1, 2) if number >> each & 1)
        found.append(Case(f"closed streams: {closed or 'none'}", closed=closed))
    found.append(Case("closed streams with a worker", WORKER, closed=(0, 1, 2)))
    for name, streams in (
        ("output", {"stdout": "/dev/full"}), ("error", {"stderr": "/dev/full"}),
        ("both", {"stdout": "/dev/full", "stderr": "/dev/full"}),
    ):  # fmt: skip
        found.append(Case(f"a full disk as standard {name}", streams=streams))
    for name in ("stdout", "stderr"):
        found.append(Case(f"a full pipe as {name}", streams={name: "pipe"}))
    found.append(Case("a full pipe as stdout, as JSON", (*TRAIN, "--json"), streams={"stdout": "pipe"}))
    few = "Too many open files|too many open files|descriptors"
    for count in (15, 16, 18, 20, 24, 28, 32, 40, 48, 64):
        found.append(Case(f"{count} descriptors", TRAIN, (0, 1, 2, 3), few, {"RLIMIT_NOFILE": count}))
    for count in (20, 28, 36, 48):
        found.append(
            Case(f"{count} descriptors with a worker", WORKER, (0, 1, 2, 3), few, {"RLIMIT_NOFILE": count})
        )
    for count in (1, 2, 3, 4, 5):
        program = ("-c", FEW_THREADS, str(count))
        found.append(Case(f"{count} threads", TRAIN, (0, 1, 3), "can't start new thread", program=program))
    for size in (60, 1_000, 8_000, 60_000, 1_000_000):
        found.append(
            Case(
                f"files of at most {size:,} bytes", TRAIN, (0, 1, 2), "File too large", {"RLIMIT_FSIZE": size}
            )
        )
    found.append(
        Case(
            "files of at most 20,000 bytes with a worker",
            WORKER,
            (0, 1, 2),
            "File too large|loader worker",
            {"RLIMIT_FSIZE": 20_000},
        )
    )
    memory = "MemoryError|Cannot allocate|cannot allocate|out of memory|bad_alloc|failed to map|allocat"
    for size in (150, 300, 600, 1200, 3000):
        # Native code may also abort when memory runs out.
        found.append(
            Case(
                f"{size} MB of address space",
                TRAIN,
                (0, 1, 3, -6, -11, 127),
                memory,
                {"RLIMIT_AS": size << 20},
            )
        )
    for seconds in (1, 3):
        found.append(
            Case(
                f"{seconds} s of CPU time",
                (*TRAIN, "--max-steps", "100000"),
                (-24, -9, 1, 143),
                "",
                {"RLIMIT_CPU": seconds},
            )
        )
    for size in (12, 40, 120, 1000):
        found.append(Case(f"a disk of {size} KB", TRAIN, (0, 1, 2), "No space left on device", disk_kb=size))
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        for count in (0, 3):
            program = ("-c", FAILING_WRITES, str(number), str(count))
            found.append(
                Case(
                    f"{errno.errorcode[number]} from write {count}",
                    TRAIN,
                    (0, 2),
                    os.strerror(number),
                    program=program,
                )
            )
    found += [
        Case("HOME that does not exist", environment={"HOME": "/nonexistent"}),
        Case("no HOME and no PATH", environment={"HOME": None, "PATH": None}),
        Case("TMPDIR that does not exist, with a worker", WORKER, environment={"TMPDIR": "/nonexistent"}),
        Case("TMPDIR that is a file", environment={"TMPDIR": "/dev/null"}),
        Case("an environment of 1 MB", environment={f"HUGE_{number}": "x" * 10_000 for number in range(100)}),
        Case("ASCII only", environment={"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii"}),
        Case("POSIX without UTF-8 mode", environment={"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        Case("runs in ASCII", RUNS, environment={"PYTHONIOENCODING": "ascii"}),
        Case("no TERM", environment={"TERM": None}),
        Case("an unknown TERM", environment={"TERM": "\x1b[31m"}),
        Case("a size of nonsense", environment={"COLUMNS": "-5", "LINES": "many"}),
        Case("a size of zero", RUNS, environment={"COLUMNS": "0", "LINES": "0"}),
        Case("help at a size of nonsense", ("train", "--help"), environment={"COLUMNS": "x", "LINES": "99999999999999999999"}),
        Case("umask 777", umask=0o777),
        Case("umask 777 with a worker", WORKER, umask=0o777),
        Case("a working folder that was deleted", no_folder=True),
        Case("a working folder that was deleted, with a worker", WORKER, no_folder=True),
        Case("runs in a working folder that was deleted", RUNS, no_folder=True),
    ]  # fmt: skip
    return found


class Disk:
    """A small file system; without the permission to mount one, its checks pass unmade."""

    def __init__(self, path: Path, kilobytes: int) -> None:
        path.mkdir(parents=True)
        self.path, self._libc = path, ctypes.CDLL(None, use_errno=True)
        options = f"size={max(kilobytes, 4)}k".encode()
        mount = getattr(self._libc, "mount", None)
        self.mounted = mount is not None and mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, options) == 0

    def fill(self) -> None:
        """Use all space."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                return

    def protect(self) -> None:
        """Make it read-only."""
        self._libc.mount(b"tmpfs", os.fsencode(self.path), b"tmpfs", 1 | 32, b"")  # MS_RDONLY, MS_REMOUNT

    def close(self) -> None:
        if self.mounted:
            self._libc.umount2(os.fsencode(self.path), 2)  # MNT_DETACH


def check(case: Case, folder: Path) -> None:
    """Run the command and look at what it says and what it leaves behind."""
    folder.mkdir(parents=True)
    root = folder / "runs"
    disk = Disk(root, case.disk_kb) if case.disk_kb is not None else None
    try:
        if disk is not None:
            if not disk.mounted:
                return
            if case.disk_kb == 0:
                disk.fill()
            if case.read_only:
                disk.protect()
        _check(case, folder, root)
    finally:
        if disk is not None:
            disk.close()


def _check(case: Case, folder: Path, root: Path) -> None:
    temporary = folder / "tmp"
    temporary.mkdir()
    program = [*case.program, "--runs", str(root), *case.arguments]
    given = {
        "cwd": str(folder / "gone") if case.no_folder else None, "umask": case.umask, "closed": case.closed,
        "limits": case.limits, "program": program,
    }  # fmt: skip
    wanted = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), **case.environment}
    wanted["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment = {name: value for name, value in wanted.items() if value is not None}
    ends: dict[str, int] = {}
    keep: list[int] = []
    read, write = os.pipe()
    output: list[bytes] = []
    for name in ("stdout", "stderr"):
        target = case.streams.get(name)
        ends[name] = (
            full_pipe(keep) if target == "pipe" else os.open(target, os.O_WRONLY) if target else os.dup(write)
        )
        keep.append(ends[name])
    os.close(write)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LAUNCH, json.dumps(given)],
        stdin=subprocess.DEVNULL, env=environment, cwd=folder, start_new_session=True, **ends,
    )  # fmt: skip
    reader = threading.Thread(
        target=lambda: output.extend(iter(lambda: os.read(read, 65536), b"")), daemon=True
    )
    reader.start()
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it did not end within {LIMIT_S:.0f} s: {tail(output)}") from None
    finally:
        left = left_over(process.pid)
        for handle in keep:
            os.close(handle)
    reader.join(10)
    os.close(read)
    text = b"".join(output).decode(errors="replace")
    assert left == [], f"left behind: {left}"
    assert "Traceback" not in text, tail(output)
    assert status in case.statuses, f"status {status}: {tail(output)}"
    if status and case.message:
        assert re.search(case.message, text), tail(output)
    check_folder(case, root, status)
    remains = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")]
    assert remains == [], f"in the temporary folder: {remains}"


def check_folder(case: Case, root: Path, status: int) -> None:
    """What is left of the run: nothing, or a record that can be read and whose lock is free."""
    run = RunDir(root / "one")
    if case.empty:
        assert not run.path.exists(), list(run.path.iterdir())
    if case.arguments[0] != "train" or "--help" in case.arguments or not run.path.exists():
        return
    assert run.live_owner() is None
    assert not list(run.path.rglob("*.tmp"))
    reader = RunReader(run)
    reader.poll()
    if status == 0 and reader.snapshot().run is not None:
        assert reader.snapshot().status in ("done", "lost"), reader.snapshot().status


def full_pipe(keep: list[int]) -> int:
    """The writing end of a full pipe that nobody reads."""
    read, write = os.pipe()
    keep.append(read)
    fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
    os.set_blocking(write, False)
    try:
        while os.write(write, b"x" * 64):
            pass
    except BlockingIOError:
        os.set_blocking(write, True)
    return write


def tail(output: list[bytes]) -> str:
    """The end of the output."""
    return b"".join(output).decode(errors="replace")[-1500:]


def left_over(session: int) -> list[str]:
    """The processes of a session that stay, after some seconds in which they may end; ends them."""
    deadline = time.monotonic() + 15
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.pid != os.getpid()
                    and os.getsid(process.pid) == session
                    and process.status() != "zombie"
                ):
                    found.append(process)
            except (psutil.Error, ProcessLookupError):
                continue
        if not found or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    names = [f"{process.pid} {process.name()}" for process in found]
    for process in found:
        process.kill()
    return names


def attempts(rng: random.Random, folder: Path) -> Iterator[Attempt]:
    """Every case once; then those with a number again with another one."""
    for index, case in enumerate(cases()):
        yield Attempt(case.name, checker(case, folder / str(index)))
    while True:
        index += 1
        count = rng.randrange(15, 64)
        case = Case(
            f"{count} descriptors", TRAIN, (0, 1, 2, 3), "Too many open files|too many open files|descriptors",
            {"RLIMIT_NOFILE": count},
        )  # fmt: skip
        yield Attempt(case.name, checker(case, folder / str(index)))


def checker(case: Case, folder: Path) -> Callable[[], None]:
    def made() -> None:
        check(case, folder)
        shutil.rmtree(folder, ignore_errors=True)

    return made


KIND = Kind(
    "limits",
    "one message without a traceback, a documented status, and no process, lock or temporary file stays",
    full=len(cases()),
    short=6,
    attempts=attempts,
)
