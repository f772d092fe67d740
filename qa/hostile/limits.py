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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ndd_engine.record.file import RunReader
from ndd_engine.record.rundir import RunDir
from qa.hostile._ended import left_over, processes
from qa.hostile.attempts import Attempt, Kind

SETS = (
    "workload.name=eeg", "workload.samples=400", "workload.channels=2", "workload.hidden=[8]", "batch.sequence=8",
    "batch.micro=16", "run.threads=1", "run.max_steps=12", "checkpoint.every_steps=4", "log.window_s=0",
)  # fmt: skip
TRAIN = ("train", "--headless", "--run", "one", *(part for each in SETS for part in ("--set", each)))
WORKER = (*TRAIN, "--set", "loader.workers=1")
RUNS = ("runs",)
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
# The n-th write into the folder of the runs and all later ones fail.
FAILING_WRITES = """
import os, sys
number, left, write = int(sys.argv.pop(1)), [int(sys.argv.pop(1))], os.write
folder = sys.argv[2]
def failing(handle, data):
    if os.readlink(f"/proc/self/fd/{handle}").startswith(folder):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
    return write(handle, data)
os.write = os.pwrite = lambda handle, data, *_: failing(handle, data)
from ndd_console.__main__ import main
main()
"""
FULL = "/dev/full"


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
    return [*quick(), *streams(), *resources(), *disks(), *environments()]


def quick() -> Iterator[Case]:
    """Those that end before torch is imported."""
    nothing = ("-c", FEW_THREADS, "0")
    full, large = "No space left on device", "cannot write to .*: File too large"
    yield Case("runs, all streams closed", RUNS, closed=(0, 1, 2))
    yield Case(
        "help into a full disk",
        ("train", "--help"),
        (1,),
        f"{full}: standard output",
        streams={"stdout": FULL},
    )
    yield Case("a file-size limit of 0", TRAIN, (2,), large, {"RLIMIT_FSIZE": 0}, empty=True)
    yield Case("a read-only disk", TRAIN, (2,), "Read-only file system", read_only=True, disk_kb=64)
    yield Case(
        "no thread at all", TRAIN, (3,), "can't start new thread: too many", program=nothing, empty=True
    )
    yield Case("a full disk at the start", TRAIN, (1, 2), full, disk_kb=0, empty=True)


def streams() -> Iterator[Case]:
    """Standard streams that are closed, full, or blocked by a reader that does not read."""
    for number in range(8):
        closed = tuple(each for each in (0, 1, 2) if number >> each & 1)
        yield Case(f"closed streams: {closed or 'none'}", closed=closed)
    yield Case("closed streams with a worker", WORKER, closed=(0, 1, 2))
    yield Case("a full disk as standard output", streams={"stdout": FULL})
    yield Case("a full disk as standard error", streams={"stderr": FULL})
    yield Case("a full disk as both", streams={"stdout": FULL, "stderr": FULL})
    yield Case("a full pipe as standard output", streams={"stdout": "pipe"})
    yield Case("a full pipe as standard error", streams={"stderr": "pipe"})
    yield Case("a full pipe for the events", (*TRAIN, "--json"), streams={"stdout": "pipe"})


def descriptors(count: int, arguments: Sequence[str] = TRAIN) -> Case:
    """Few file descriptors; the libraries report it in several ways."""
    words = "Too many open files|too many open files|descriptors"
    name = f"{count} descriptors{' with a worker' if arguments is WORKER else ''}"
    return Case(name, arguments, (0, 1, 2, 3), words, {"RLIMIT_NOFILE": count})


def resources() -> Iterator[Case]:
    """Limits of the process."""
    yield from map(descriptors, (15, 16, 18, 20, 24, 28, 32, 40, 48, 64))
    yield from (descriptors(count, WORKER) for count in (20, 28, 36, 48))
    for count in (1, 2, 3, 4, 5):
        program = ("-c", FEW_THREADS, str(count))
        yield Case(
            f"{count} threads", TRAIN, (0, 1, 3), "(can't|cannot) start (new|another) thread", program=program
        )
    for size in (60, 1_000, 8_000, 60_000, 1_000_000):
        limits = {"RLIMIT_FSIZE": size}
        yield Case(f"files of at most {size:,} bytes", TRAIN, (0, 1, 2), "File too large", limits)
    words = "File too large|loader worker"
    yield Case("files of 20,000 bytes with a worker", WORKER, (0, 1, 2), words, {"RLIMIT_FSIZE": 20_000})
    words = "MemoryError|[Cc]annot allocate|out of memory|bad_alloc|failed to map|allocat|ulimit -v"
    for size in (150, 300, 600, 1200, 3000):
        # Native code may also abort when memory runs out.
        limits = {"RLIMIT_AS": size << 20}
        yield Case(f"{size} MB of address space", TRAIN, (0, 1, 3, -6, -11, 127), words, limits)
    endless = (*TRAIN, "--max-steps", "100000")
    for seconds in (1, 3):
        yield Case(f"{seconds} s of CPU time", endless, (-24, -9, 1, 143), "", {"RLIMIT_CPU": seconds})


def disks() -> Iterator[Case]:
    """Disks that are full, or fail from the n-th write on."""
    for size in (12, 40, 120, 1000):
        yield Case(f"a disk of {size} KB", TRAIN, (0, 1, 2), "No space left on device", disk_kb=size)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        for count in (0, 3):
            program = ("-c", FAILING_WRITES, str(number), str(count))
            name = f"{errno.errorcode[number]} from write {count}"
            yield Case(name, TRAIN, (0, 2), os.strerror(number), program=program)


def environments() -> Iterator[Case]:
    """Odd environment variables, masks and working folders."""
    ascii_only = {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii"}
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    huge = {"COLUMNS": "x", "LINES": "9" * 20}
    yield Case("HOME that does not exist", environment={"HOME": "/nonexistent"})
    yield Case("no HOME and no PATH", environment={"HOME": None, "PATH": None})
    yield Case("TMPDIR that does not exist, with a worker", WORKER, environment={"TMPDIR": "/nonexistent"})
    yield Case("TMPDIR that is a file", environment={"TMPDIR": "/dev/null"})
    yield Case(
        "an environment of 1 MB", environment={f"HUGE_{number}": "x" * 10_000 for number in range(100)}
    )
    yield Case("ASCII only", environment=ascii_only)
    yield Case("POSIX without UTF-8 mode", environment=posix)
    yield Case("runs in ASCII", RUNS, environment={"PYTHONIOENCODING": "ascii"})
    yield Case("no TERM", environment={"TERM": None})
    yield Case("an unknown TERM", environment={"TERM": "\x1b[31m"})
    yield Case("a size of nonsense", environment={"COLUMNS": "-5", "LINES": "many"})
    yield Case("a size of zero", RUNS, environment={"COLUMNS": "0", "LINES": "0"})
    yield Case("help at a size of nonsense", ("train", "--help"), environment=huge)
    yield Case("umask 777", umask=0o777)
    yield Case("umask 777 with a worker", WORKER, umask=0o777)
    words = "the working folder was deleted: change to another one"
    yield Case("a deleted working folder", TRAIN, (2,), words, no_folder=True, empty=True)
    yield Case("runs in a deleted working folder", RUNS, (2,), words, no_folder=True)


# Carrying them out.

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
LIMIT_S = 90.0
F_SETPIPE_SZ = 1031


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
    shutil.rmtree(folder, ignore_errors=True)


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
        if target == "pipe":
            ends[name] = full_pipe(keep)
        else:
            ends[name] = os.open(target, os.O_WRONLY) if target else os.dup(write)
        keep.append(ends[name])
    os.close(write)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LAUNCH, json.dumps(given)],
        stdin=subprocess.DEVNULL, env=environment, cwd=folder, start_new_session=True, **ends,
    )  # fmt: skip
    parts = iter(lambda: os.read(read, 65536), b"")
    reader = threading.Thread(target=output.extend, args=(parts,), daemon=True)
    reader.start()
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it did not end within {LIMIT_S:.0f} s: {tail(output)}") from None
    finally:
        left = left_over(lambda: processes(lambda one: os.getsid(one.pid) == process.pid), 15)
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


def attempts(rng: random.Random, folder: Path) -> Iterator[Attempt]:
    """Every case once; then those with a number again with another one."""
    for index, case in enumerate(cases()):
        yield Attempt(case.name, partial(check, case, folder / str(index)))
    while True:
        index += 1
        count = rng.randrange(15, 64)
        case = descriptors(count)
        yield Attempt(case.name, partial(check, case, folder / str(index)))


KIND = Kind(
    "limits",
    "one message without a traceback, a documented status, and no process, lock or temporary file stays",
    full=len(cases()),
    short=6,
    attempts=attempts,
)
