"""What others can read of an observed process: its memory, the phases in it, and what Linux knows.

The memory has counters, rows of steps, and a ring of lines. A process maps a file of fixed size. What it stores there
is outside of it at once, whatever becomes of it: after `kill -9`, `os._exit` or a crash everything up to the last
instruction is in the file. A store cannot fail or wait, and the process needs no thread, no open descriptor and no
exit handler for it.

Before a process trains, and in the children that it forks, the memory is its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import struct
import sys
from collections.abc import Iterator
from typing import Any

from .apart import Dropped, dumps, os, time

_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)
# Looked up once: Python reports that to audit hooks.
_open, _rename, _prctl = _libc.open, _libc.rename, getattr(_libc, "prctl", None)
_getrusage = _libc.getrusage
_mallinfo = getattr(_libc, "mallinfo2", None)  # of glibc, from 2.33 on
# Reading the heap may take this part of the time, and is not done again if it took longer than this.
_HEAP_SHARE, _LONGEST_NS = 2e-3, 200_000_000


def opened(path: str, flags: int) -> int:
    """An open descriptor, as that of `os.open`, which Python would report to audit hooks. Raises OSError."""
    if sys.platform != "linux":
        return int(os.open(path, flags))
    return _checked(_open(os.fsencode(path), flags | os.O_CLOEXEC))


def renamed(old: str, new: str) -> None:
    """The same of `os.rename`. Raises OSError."""
    _checked(_rename(os.fsencode(old), os.fsencode(new)))


def _checked(found: int) -> int:
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def _text(path: str) -> str:
    """A small file. Raises OSError."""
    handle = opened(path, os.O_RDONLY)
    try:
        return str(os.read(handle, 4096).decode("ascii"))
    finally:
        os.close(handle)


def let_read(tracer: str) -> None:
    """Let a process and what it starts read the stack of this one from outside, where Yama allows only ancestors to.

    It is set where the console has found py-spy. It replaces another choice of the script, which cannot be read.
    """
    with Dropped():
        if (
            tracer.isdigit()
            and _prctl is not None
            and _text("/proc/sys/kernel/yama/ptrace_scope").strip() == "1"
        ):
            _prctl(_PR_SET_PTRACER, int(tracer), 0, 0, 0)


def resident() -> int | None:
    """The memory of this process in bytes; None if that is not known."""
    with Dropped(OSError, ValueError, IndexError):
        return int(_text("/proc/self/statm").split()[1]) * int(os.sysconf("SC_PAGE_SIZE"))
    return None


def pss_bytes(pid: int) -> int | None:
    """Memory of a process in bytes, with its part of the pages that it shares with others; None if not known."""
    with Dropped(OSError, ValueError, IndexError):
        words = _text(f"/proc/{pid}/smaps_rollup").split()
        return int(words[words.index("Pss:") + 1]) << 10
    return None


def used_by_thread() -> tuple[int, int]:
    """Nanoseconds that the system has worked for this thread, and pages of memory that it has touched first."""
    found = (ctypes.c_long * 18)()  # struct rusage of getrusage(2), longer than it is
    _getrusage(1, found)  # RUSAGE_THREAD
    return found[2] * 10**9 + found[3] * 1000, found[8]


def in_use(device: Any) -> int | None:
    """Bytes that this process uses of a GPU, or of the host for any other device; None if that is not known."""
    if device is not None and device.type == "cuda":
        with Dropped():
            return int(sys.modules["torch"].cuda.memory_stats(device).get("allocated_bytes.all.current", 0))
    return resident()


def moved() -> tuple[int, int] | None:
    """Bytes that this process has read and written so far, through files and pipes; None if that is not known."""
    with Dropped(OSError, ValueError, IndexError):
        read, written = (int(line.split()[1]) for line in _text("/proc/self/io").splitlines()[:2])
        return read, written
    return None


def allocator(device: Any) -> dict[str, Any]:
    """The fields of the record's memory event: counters of torch's allocator of a GPU. None of them is reset.

    Raises what an allocator of somebody else raises.
    """
    cuda: Any = sys.modules["torch"].cuda
    counters = cuda.memory_stats(device)
    free, total = cuda.mem_get_info(device)
    found = {
        name: int(counters.get(key, 0))
        for name, key in (
            ("allocated_bytes", "allocated_bytes.all.current"), ("reserved_bytes", "reserved_bytes.all.current"),
            ("peak_allocated_bytes", "allocated_bytes.all.peak"), ("peak_reserved_bytes", "reserved_bytes.all.peak"),
            ("retries", "num_alloc_retries"), ("ooms", "num_ooms"),
        )
    }  # fmt: skip
    growth = found["peak_allocated_bytes"] - found["allocated_bytes"]
    return {**found, "growth_bytes": growth, "free_bytes": free, "total_bytes": total, "others_bytes": None}


class _Mallinfo(ctypes.Structure):
    """See mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


if _mallinfo is not None:
    _mallinfo.restype = _Mallinfo


class Heap:
    """The bytes in use of this process's heap, which has the tensors of the CPU, and those that are free in it.

    Unlike the resident memory, what is in use falls when something is freed: the C library may keep the pages. It goes
    through all pieces that are free: 200,000 of them took 49 ms. Where that takes long, it is asked less often, or not
    again.
    """

    def __init__(self) -> None:
        self._due = 0

    def read(self) -> dict[str, int | None]:
        """Fields of a window. They are None if it is too early to ask again, or where the C library does not tell."""
        now, begin = time.perf_counter_ns(), time.thread_time_ns()
        if _mallinfo is None or now < self._due:
            return {"heap_bytes": None, "heap_free_bytes": None}
        found = _mallinfo()
        spent = time.thread_time_ns() - begin
        self._due = now + int(spent / _HEAP_SHARE) if spent < _LONGEST_NS else 1 << 63
        return {"heap_bytes": found.uordblks + found.hblkhd, "heap_free_bytes": found.fordblks}


VERSION = 2
_MAGIC = 0x6864646E6F6331 << 8 | VERSION
SUFFIX = ".map"
# Files that the reader made beforehand: a process takes one by renaming it.
SPARE, SPARES = "spare-", 2

# Phases, and each of them again for its waiting for other ranks.
COLUMNS = 24
# Indices of 64-bit integers. LAST: time of the last phase change. CURRENT: the current phase. TIMED: id of the thread
# whose phases are timed; 0 in steps that are timed as a whole, -1 during an evaluation. BASE: the phase outside all
# hooks. TRAINER: id of the thread that trains, and NATIVE its id in the system; 0 before the first backward pass.
# DONE: steps that have ended; CORRECTION: to be added to them, as it may become clear later where a step ends;
# ELSEWHERE: of other threads. MICRO: micro-steps; SKIPPED: updates that a gradient scaler skipped. BEGUN: when the
# window began. ROWS: rows so far; LINES: bytes of lines so far; DROPPED: lines that were too long. INPUT: the first
# size of a model's input; 0 before. PENDING: further steps, if nothing else becomes known to end them. FIRST_NS:
# spent on first batches, of passes over the data that began after the first step; STARTS: these passes. PASSES,
# OPEN: backward passes since the last step ended, those whose gradients were zeroed again and those after them;
# published where they are more than usual. LEFT: batches since then that went through the model with gradients, and
# without a backward pass; only where phases are timed. PAUSED: 1 during a pause. AT and what follows is written by the
# console: the step after which the process obeys, and the id of the process that holds a pause or 0. Then come counts
# of requests: captures, checkpoints, evaluations, and looks at what the process keeps. SEEDS: iterators of a loader
# that the training has read.
(
    MAGIC, PID, NATIVE, LAST, CURRENT, TIMED, BASE, TRAINER, DONE, CORRECTION, ELSEWHERE, MICRO, SKIPPED, BEGUN, ROWS,
    LINES, DROPPED, PAUSED, INPUT, PENDING, FIRST_NS, STARTS,
    PASSES, OPEN, LEFT,
    AT, HOLDER, CAPTURES, CHECKPOINTS, EVALUATIONS, KEPT, SEEDS,
) = range(32)  # fmt: skip
REQUEST = KEPT + 1 - AT
# The current step by phase, and the time of the window outside steps, in nanoseconds.
ROW, REST = 32, 32 + COLUMNS
# Steps of each of the first optimizers that exist at a time.
STEPPED, MOST_OPTIMIZERS = REST + COLUMNS, 8
# Seeds of the newest of those iterators, by which their workers are known.
SEEDS_AT, MOST_SEEDS = STEPPED + MOST_OPTIMIZERS, 8
# Rows of steps that were timed by phase: the steps before it, and its nanoseconds by phase.
ROWS_AT, MOST_ROWS, ROW_WIDTH = 96, 2048, COLUMNS + 1
# Of every step: twice its nanoseconds, plus 1 if it has a row; 0 if it is left out.
LENGTHS_AT, MOST_LENGTHS = ROWS_AT + MOST_ROWS * ROW_WIDTH, 8192
# The ring of lines, in bytes: JSON, each with its end of line.
LINES_AT, MOST_LINE_BYTES = 8 * (LENGTHS_AT + MOST_LENGTHS), 1 << 18
SIZE = -(-(LINES_AT + MOST_LINE_BYTES) // 4096) * 4096

# What the notes of a capture tell of a call of a module: it ends, it begins, or it begins with the same input as one
# before it in the step. And of the user's code: a line begins, a function begins or ends, or nothing more is known.
CALL_ENDS, CALL_BEGINS, CALL_AGAIN = range(3)
LINE_BEGINS, FUNCTION_BEGINS, FUNCTION_ENDS, LINES_LOST = range(4)

_FIXED = 0x10
_WRITE = 0x200  # PyBUF_WRITE
# Attempts to find a name for a file that does not exist.
_NAMES = 1000


class MappedMemory:
    """values: 64-bit integers, see the indices above. data: the same memory as bytes."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        )  # fmt: skip
        self._address = self._map(None, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        view = ctypes.pythonapi.PyMemoryView_FromMemory
        view.restype, view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
        self.data: memoryview = view(self._address, SIZE, _WRITE)
        self.values = self.data.cast("q")
        # A thread or a signal handler that meets another one writing leaves its line to that one.
        self._writing = False
        self._waiting: list[bytes] = []

    def _map(self, address: int | None, flags: int, handle: int) -> int:
        found = self._libc.mmap(address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, handle, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return int(found)

    def attach(self, folder: str, name: str) -> None:
        """Share this memory through a file: a spare one, or else a new one. Raises OSError.

        It begins empty. A name that exists gets a number: after a restart, or after `exec`.
        """
        handle = _claimed(folder, name)
        try:
            self._map(self._address, mmap.MAP_SHARED | _FIXED, handle)
        finally:
            os.close(handle)
        self.values[PID] = os.getpid()
        self.values[MAGIC] = _MAGIC

    def detach(self) -> None:
        """In a child after fork: the file belongs to the parent. The memory is empty again."""
        self._map(self._address, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1)
        self._writing, self._waiting = False, []

    def put(self, kind: str, body: dict[str, Any]) -> None:
        """Append a line."""
        line = {"v": VERSION, "type": kind, "t": round(time.time(), 4), **body}
        self._waiting.append(dumps(line).encode() + b"\n")
        while self._waiting and not self._writing:
            self._writing = True
            try:
                with Dropped(IndexError):
                    self._append(self._waiting.pop(0))
            finally:
                self._writing = False

    def _append(self, text: bytes) -> None:
        if len(text) > MOST_LINE_BYTES // 4:
            self.values[DROPPED] += 1
            return
        begin = self.values[LINES] % MOST_LINE_BYTES
        first = min(MOST_LINE_BYTES - begin, len(text))
        data = self.data
        data[LINES_AT + begin : LINES_AT + begin + first] = text[:first]
        data[LINES_AT : LINES_AT + len(text) - first] = text[first:]
        self.values[LINES] += len(text)


def _claimed(folder: str, name: str) -> int:
    """An open file of the right size under a name that nobody has. The reader makes the folder, and removes it."""
    for number in range(_NAMES):
        path = os.path.join(folder, f"{name}~{number}{SUFFIX}" if number else name + SUFFIX)
        try:
            os.lstat(path)
        except FileNotFoundError:
            break
    for number in range(SPARES):
        with Dropped(OSError):  # another process was faster
            renamed(os.path.join(folder, f"{SPARE}{number}"), path)
            return opened(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    return make(path)


def make(path: str) -> int:
    """Create a file with all of its space; the open descriptor. Raises OSError."""
    handle: int = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, SIZE)
        else:
            os.write(handle, bytes(SIZE))
    except BaseException:
        os.close(handle)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return handle


def ask(path: str, request: list[int]) -> None:
    """Ask the process with this memory for something: the values from AT on. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.pwrite(handle, struct.pack(f"{REQUEST}q", *request), 8 * AT)
    finally:
        os.close(handle)


class MappedReader:
    """Reads the memory of another process. Raises OSError or ValueError if the file is none.

    lost: bytes of lines and rows that were overwritten before they were read.
    """

    def __init__(self, handle: int) -> None:
        if os.fstat(handle).st_size != SIZE:
            raise ValueError("not the memory of an observed process")
        self._memory = mmap.mmap(handle, SIZE, access=mmap.ACCESS_READ)
        self._position = self._rows = 0
        self._rest = b""
        self.lost = 0

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()

    @property
    def begun(self) -> bool:
        """Whether a process uses the file."""
        return self.value(MAGIC) == _MAGIC

    def value(self, index: int) -> int:
        """One of the integers."""
        found: int = struct.unpack_from("q", self._memory, 8 * index)[0]
        return found

    def values(self, index: int, count: int) -> list[int]:
        """Some of the integers."""
        return list(struct.unpack_from(f"{count}q", self._memory, 8 * index))

    def lines(self) -> Iterator[bytes]:
        """The lines since the last call."""
        end = self.value(LINES)
        begin = max(self._position, end - MOST_LINE_BYTES)
        if begin > self._position:
            self.lost += begin - self._position
            self._rest = b""
        at = begin % MOST_LINE_BYTES
        first = min(end - begin, MOST_LINE_BYTES - at)
        data = self._memory[LINES_AT + at : LINES_AT + at + first]
        data += self._memory[LINES_AT : LINES_AT + end - begin - first]
        torn = begin > self._position
        self._position = end
        if self.value(LINES) - begin > MOST_LINE_BYTES:  # overwritten meanwhile
            self.lost += len(data)
            self._rest = b""
            return
        *whole, self._rest = (self._rest + data).split(b"\n")
        yield from whole[1:] if torn else whole

    def rows(self, limit: int) -> list[list[int]]:
        """Rows of steps below a limit since the last call: the number of steps before each, then nanoseconds."""
        end, found = self.value(ROWS), []
        if end - self._rows > MOST_ROWS:
            self.lost += end - MOST_ROWS - self._rows
            self._rows = end - MOST_ROWS
        while self._rows < end:
            row = self.values(ROWS_AT + self._rows % MOST_ROWS * ROW_WIDTH, ROW_WIDTH)
            if row[0] >= limit:
                break
            self._rows += 1
            found.append(row)
        return found

    def lengths(self, begin: int, end: int) -> list[int]:
        """The lengths of these steps, see LENGTHS_AT; without those that are not known any more."""
        begin = max(begin, self.value(DONE) - MOST_LENGTHS)
        return [self.value(LENGTHS_AT + step % MOST_LENGTHS) for step in range(begin, end)]


# In the order in which they are shown; `other` is the wall time outside the other phases.
PHASES = (
    "data_wait", "to_device", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "log", "evaluate",
    "checkpoint", "other",
)  # fmt: skip
(
    DATA_WAIT, TO_DEVICE, FORWARD, LOSS, BACKWARD, CLIP, OPTIMIZER, ZERO_GRAD, LOG, EVALUATE, CHECKPOINT, OTHER,
) = range(12)  # fmt: skip

# A range of torch's profiler that begins at a time which is known on our clock.
ANCHOR = "ndd: anchor"
# Key of what is added to a trace.
NOTED = "ndd"
# Added to a phase while it waits for other ranks.
WAITING = len(PHASES)
# By index: the phases, and their waiting for other ranks.
NAMES = (*PHASES, *(f"{name}/exchange" for name in PHASES))
assert len(NAMES) == COLUMNS
# The part of waiting for data that was for the first batch of a pass, in later passes: workers may start anew for it.
FIRST_BATCH = "data_wait/first_batch"
