"""Commands under limits: few descriptors, threads or bytes, full disks, closed streams, odd environments."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ndd_engine.record.reader import RunReader
from ndd_engine.record.rundir import RunDir
from qa.hostile._ended import left_over, processes
from qa.hostile._limited import Case, cases, descriptors
from qa.hostile.attempts import Attempt, Kind

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
        yield Attempt(case.name, checker(case, folder / str(index)))
    while True:
        index += 1
        count = rng.randrange(15, 64)
        case = descriptors(count)
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
