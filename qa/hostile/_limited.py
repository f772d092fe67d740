"""The commands under a limit: what is limited, how they may end, and what they have to say."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
    words = "MemoryError|[Cc]annot allocate|out of memory|bad_alloc|failed to map|allocat"
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
