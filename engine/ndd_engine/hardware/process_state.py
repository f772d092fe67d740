"""What the system tells of a process from outside, through /proc: its state, what it waits for, its open files.

Linux only; elsewhere, and of a process that is gone or not readable, functions return None or nothing. None raises.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# System calls that wait, by number.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 7: "poll", 17: "read", 18: "write", 19: "read", 20: "write", 23: "select",
        35: "sleep", 42: "connect", 43: "accept", 44: "send", 45: "receive", 46: "send", 47: "receive", 61: "wait",
        72: "lock", 73: "lock", 74: "sync", 75: "sync", 202: "futex", 230: "sleep", 232: "poll", 247: "wait",
        257: "open", 262: "stat", 270: "select", 271: "poll", 281: "poll", 288: "accept", 332: "stat",
    },
    "aarch64": {
        22: "poll", 25: "lock", 32: "lock", 56: "open", 63: "read", 64: "write", 65: "read", 66: "write", 67: "read",
        68: "write", 72: "select", 73: "poll", 79: "stat", 82: "sync", 83: "sync", 95: "wait", 98: "futex",
        101: "sleep", 115: "sleep", 202: "accept", 203: "connect", 206: "send", 207: "receive", 211: "send",
        212: "receive", 242: "accept", 260: "wait", 291: "stat",
    },
}  # fmt: skip
# Those whose first argument is a descriptor, and that of a path (its place among the arguments).
_OF_FILES = ("read", "write", "send", "receive", "lock", "sync", "accept", "connect")
_PATH_AT = {"open": 1, "stat": 1}
_PRIVATE = 128  # FUTEX_PRIVATE_FLAG
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Process times are known to this.
TICK_NS = round(1e9 * _TICK_S)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LONGEST_PATH = 4096
_KIND = re.compile(r"^(/memfd:|/dev/shm/)|^(socket|pipe|anon_inode):")


@dataclass(frozen=True)
class ProcessState:
    """letter: as in /proc (R, S, D, T, t, Z). exit_code: as of waitpid, of a zombie. began: clock ticks since boot.

    core: the last one it ran on. terminal: device number, 0 without one.
    """

    pid: int
    name: str
    letter: str
    parent: int
    cpu_s: float
    threads: int
    began: int
    resident_bytes: int
    exit_code: int | None
    core: int = 0
    session: int = 0
    terminal: int = 0

    @property
    def began_ns(self) -> int:
        """When it began, on the clock of time.perf_counter_ns."""
        asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        return self.began * TICK_NS - asleep_ns


@dataclass(frozen=True)
class Waiting:
    """What a thread waits for in the kernel.

    call: "futex", "read", …, "" if it is not known. kernel: the function of the kernel that sleeps. target: path or
    kind of the file. library: file of the code that called. shared: of a futex, whether other processes share it.
    """

    call: str
    kernel: str = ""
    target: str = ""
    library: str = ""
    shared: bool = False


def state_of(pid: int, proc: Path = Path("/proc")) -> ProcessState | None:
    """The state of a process, see proc_pid_stat(5); None if it is gone."""
    with suppress(OSError, ValueError, IndexError):
        text = (proc / str(pid) / "stat").read_bytes().decode(errors="replace")
        name, _, rest = text.partition("(")[2].rpartition(")")
        words = rest.split()
        code = int(words[49]) if len(words) > 49 else None
        return ProcessState(
            pid, name, words[0], int(words[1]), (int(words[11]) + int(words[12])) * _TICK_S, int(words[17]),
            int(words[19]), int(words[21]) * _PAGE, code if words[0] in "ZX" else None, int(words[36]),
            int(words[3]), int(words[4]),
        )  # fmt: skip
    return None


def threads_cpu_s(pid: int, without: frozenset[int]) -> float:
    """Processor time of the threads of a process besides some of them, in seconds."""
    spent = 0.0
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/task"):
            if int(entry.name) not in without:
                with suppress(OSError, ValueError, IndexError):
                    words = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                    spent += (int(words[11]) + int(words[12])) * _TICK_S
    return spent


def children_of(pid: int) -> Iterator[int]:
    """Ids of all descendants of a process, parents first."""
    with suppress(OSError, ValueError):
        for entry in os.scandir(f"/proc/{pid}/task"):
            with suppress(OSError):
                for child in map(int, Path(entry.path, "children").read_bytes().split()):
                    yield child
                    yield from children_of(child)


def command_of(pid: int) -> tuple[str, ...]:
    """The words of its command; () if it is gone."""
    with suppress(OSError):
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
        return tuple(word.decode(errors="replace") for word in data.split(b"\0")[:-1])
    return ()


def moved_bytes(pid: int) -> int:
    """Bytes that it has read and written so far, through files and pipes."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines[:2])
    return 0


def waiting_of(pid: int, thread: int) -> Waiting:
    """What a thread waits for, as far as the system tells."""
    kernel = ""
    with suppress(OSError):
        kernel = Path(f"/proc/{pid}/task/{thread}/wchan").read_text(encoding="ascii").strip("0\n")
    with suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{pid}/task/{thread}/syscall").read_text(encoding="ascii").split()
        if len(words) == 9:  # not running
            call = _CALLS.get(platform.machine(), {}).get(int(words[0]), "")
            arguments = [int(word, 16) for word in words[1:7]]
            target = ""
            if call in _OF_FILES:
                target = _link(f"/proc/{pid}/fd/{arguments[0]}")
            elif call in _PATH_AT:
                target = _text_at(pid, arguments[_PATH_AT[call] if int(words[0]) != 2 else 0])
            shared = call == "futex" and not arguments[1] & _PRIVATE
            return Waiting(call, kernel, target, _library(pid, int(words[8], 16)), shared)
    return Waiting("", kernel)


def open_files(pid: int) -> int | None:
    """Number of its open descriptors; None if it cannot be read."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  a few times a second
    return None


def open_files_limit(pid: int) -> int | None:
    """The limit of its open descriptors."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/limits").read_text(encoding="ascii").splitlines():
            if line.startswith("Max open files"):
                return int(line.split()[3])
    return None


def newest_files(pid: int, most: int) -> list[str]:
    """What its highest descriptors refer to: paths, "socket", "pipe" or "shared memory"."""
    with suppress(OSError):
        numbers = sorted(map(int, os.listdir(f"/proc/{pid}/fd")))[-most:]  # noqa: PTH208
        return [_kind(_link(f"/proc/{pid}/fd/{number}")) for number in numbers]
    return []


def free_shared_memory() -> int | None:
    """Free bytes of /dev/shm."""
    with suppress(OSError):
        found = os.statvfs("/dev/shm")
        return found.f_bavail * found.f_frsize
    return None


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115  what it names need not be a path
    except OSError:
        return ""


def _kind(target: str) -> str:
    found = _KIND.match(target)
    if found is None:
        return target
    return "shared memory" if found[1] else found[2]


def _text_at(pid: int, address: int) -> str:
    """A path in the memory of a process."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as file:
        file.seek(address)
        return (
            file.read(min(_LONGEST_PATH, 4096 - address % 4096)).partition(b"\0")[0].decode(errors="replace")
        )


def _library(pid: int, address: int) -> str:
    """Name of the file that is mapped at an address."""
    with (
        suppress(OSError, ValueError),
        Path(f"/proc/{pid}/maps").open(encoding="ascii", errors="replace") as file,
    ):
        for line in file:
            span, *words = line.split(maxsplit=5)
            begin, _, end = span.partition("-")
            if int(begin, 16) <= address < int(end, 16):
                return Path(words[4].strip()).name if len(words) > 4 else ""
    return ""


def own_memory(pid: int, proc: Path = Path("/proc")) -> tuple[int, int] | None:
    """(private, shared) bytes of a process; None if the system does not tell.

    shared: pages that were written, as Python's objects, without those of files. Linux goes through all pages for it.
    """
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()
        sizes = {
            name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines[1:])
        }
        return sizes["Private_Dirty"] + sizes["Private_Clean"], sizes["Shared_Dirty"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
