"""Writes what is observed as JSON lines, from a thread of its own: one file per process, written by it alone.

A full disk costs lines, never a step. Lines before and after stay readable.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import queue
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from operator import add
from typing import Any, Callable

from . import clock
from .clock import CURRENT, LAST, NAMES, PHASES, TIMED, TRAINER, WAITING, S
from .outside import Outside
from .own import innermost
from .places import Places
from .process import let_read, resident
from .profiler import INLINE
from .steps import Steps
from .waits import of_rank, strategy_of

VERSION = 1
WRITE_S = 0.5
STACKS_HZ = float(os.environ.get("NDD_WATCH_STACKS_HZ", "10"))
STACKS_EVERY_S, STACKS_FIRST_S = 5.0, 2.0
# Without a phase change for so long, the process counts as stalled.
STALLED_NS = int(float(os.environ.get("NDD_WATCH_STALLED_S", "10")) * 1e9)
# Lines that wait to be written, at most: a file system that hangs must not fill the memory.
MOST_LINES = 10_000
TOP = 12
# Lines of code whose phase is remembered.
MOST_PLACES = 1000
# The phase of a stack sample that is not known.
UNKNOWN = "?"


class Recorder:
    """The file of this process; methods never raise. own: whether a code object is the script's."""

    def __init__(self, steps: Steps, own: Callable[[Any], bool], places: Places, outside: Outside) -> None:
        self._steps, self._own, self._places, self._outside = steps, own, places, outside
        self._lines: queue.SimpleQueue[tuple[float, str, dict[str, Any]]] = queue.SimpleQueue()
        self._dropped = 0
        self._handle = -1
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._looks = 0
        # By place, the phase in which it was seen last.
        self._phases: dict[tuple[Any, ...], str] = {}
        self._phase = UNKNOWN  # of the last stack sample
        self._pauses = [0, 0, 0]
        self._gc_began = 0
        self._stalls = 0
        # Steps and processor time before the present window.
        self._told, self._cpu = 0, time.process_time_ns()
        self._status = ("done", "")
        self._closed = False
        self._described = False
        # Python forgets it before a short script's model is described at its exit.
        self._main = getattr(sys.modules.get("__main__"), "__file__", None)
        # Index of the GPU that the loss is on; None on the CPU.
        self._gpu: int | None = None
        self.paused = False
        # Set by `install`: whether there is a DistributedDataParallel.
        self.replicated: Callable[[], bool] = lambda: False

    def open(self, early: list[tuple[str, dict[str, Any]]], place: dict[str, Any]) -> None:
        """Create the file and start the thread. early: what was observed before. place: see `waits.place`.

        Raises OSError.
        """
        folder, rank = os.environ["NDD_WATCH"], os.environ.get("RANK")
        os.makedirs(folder, exist_ok=True)
        name = f"rank-{rank}" if rank is not None and rank.isdigit() else f"pid-{os.getpid()}"
        path = os.path.join(folder, name + ".jsonl")
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        atexit.register(self.close)
        hook = sys.excepthook

        def failed(kind: Any, error: Any, trace: Any) -> None:
            with contextlib.suppress(Exception):
                self._status = "failed", f"{kind.__name__}: {error}"
            hook(kind, error, trace)

        sys.excepthook = failed
        torch: Any = sys.modules["torch"]
        self.put(
            "process", argv=sys.argv, pid=os.getpid(), host=socket.gethostname(), **place,
            python=sys.version.split()[0], torch=str(torch.__version__), cuda=torch.version.cuda or torch.version.hip,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        for kind, body in early:
            self.put(kind, **body)
        threading.Thread(target=self._work, name="ndd-watch", daemon=True).start()
        if not place["exchanges"]:  # what ranks share on GPUs may need another choice
            let_read(os.environ.get("NDD_WATCH_TRACER", ""))

    def put(self, kind: str, /, **body: Any) -> None:
        """Record a line."""
        if self._lines.qsize() < MOST_LINES:
            self._lines.put((time.time(), kind, body))
        else:
            self._dropped += 1

    def resume(self) -> None:
        """Observe garbage collections and stacks."""
        self.paused = False
        if self._collected not in gc.callbacks:
            gc.callbacks.append(self._collected)

    def pause(self) -> None:
        """Observe nothing more."""
        self.paused = True
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)

    def window(
        self, wall: int, rows: list[list[int]], wholes: list[int], rest: list[int], numbers: list[int]
    ) -> None:
        """Record a window. Reads on the training thread what only it may read; the figures are made on ours."""
        steps = self._steps
        loss, steps.loss = steps.loss, None
        groups = getattr(steps.optimizer, "param_groups", None)
        (gc_ns, gc_count, gc_max_ns), self._pauses = self._pauses, [0, 0, 0]
        micro, steps.micro = steps.micro, 0
        shape, steps.shape = steps.shape, None
        if not self._described and loss is not None:
            self._described = True
            self._describe(loss, steps.optimizer)
        begin, self._told, self._stalls = self._told, steps.done, 0
        more: dict[str, Any] = {}
        if steps.ranks:
            cpu = time.process_time_ns()
            more, self._cpu = {"ranks": (numbers, begin, cpu - self._cpu)}, cpu
        self.put(
            "window", step=steps.done, steps=steps.done - begin, timed_steps=len(rows), micro_steps=micro,
            wall_ns=wall, rows=rows, wholes=wholes, rest=rest, loss=_on_host(loss),
            lr=_float(groups[0].get("lr")) if groups else None,
            shape=shape, gc_ns=gc_ns, gc_count=gc_count, gc_max_ns=gc_max_ns, skipped_updates=steps.skipped_updates,
            **more,
        )  # fmt: skip

    def _describe(self, loss: Any, optimizer: Any) -> None:
        """Record what is trained, and where; on the training thread, once."""
        device = loss.device
        self._gpu = device.index if device.type == "cuda" else None
        optimizers = self._steps.optimizers() or [optimizer]
        groups = [group for one in optimizers for group in getattr(one, "param_groups", None) or ()]
        parameters = {id(item): item for group in groups for item in group["params"]}
        self.put(
            "model", device=str(device), optimizer=type(optimizer).__name__ if optimizer is not None else "",
            implementation=_implementation(groups[0], device.type) if groups else None,
            parameters=sum(item.numel() for item in parameters.values() if item.requires_grad),
            places=[place for one in optimizers if (place := self._places.of(one))],
            main=self._main,
            anomaly=bool(sys.modules["torch"].is_anomaly_enabled()),
            strategy=strategy_of(parameters.values(), self.replicated()) if self._steps.ranks else "",
        )  # fmt: skip

    def close(self) -> None:
        """Write the last window and the end; called at the exit of the process."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            if not self.paused and S[TRAINER] == threading.get_ident():
                self._steps.finish()
                self.window(*clock.take())
            self.put("end", step=self._steps.done, status=self._status[0], reason=self._status[1])
            self._write()

    def fail(self, reason: str) -> None:
        """The training has failed with this error."""
        self._status = "failed", reason

    def forget(self) -> None:
        """In a child after fork: the file belongs to the parent."""
        self._closed = self.paused = True
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = -1

    # On our own thread.

    def _work(self) -> None:
        period_s = 1 / STACKS_HZ if STACKS_HZ > 0 else WRITE_S
        wrote = time.monotonic()
        told = wrote - STACKS_EVERY_S + STACKS_FIRST_S
        with contextlib.suppress(Exception):
            self._write()  # at once: the script may hang soon
        while not self._closed:
            time.sleep(period_s)
            with contextlib.suppress(Exception):
                if not self.paused and STACKS_HZ > 0:
                    self._look()
                t = time.monotonic()
                if t - told >= STACKS_EVERY_S:
                    told = t
                    self._tell()
                if t - wrote >= WRITE_S:
                    wrote = t
                    self._stalled()
                    if self._gpu is not None and not self.paused:
                        self._memory()
                    self._write()

    def _look(self) -> None:
        """Take a sample of the stack of the training thread."""
        frame = sys._current_frames().get(S[TRAINER])
        timed, phase = S[TIMED], NAMES[S[CURRENT]]
        caller, place, below = self._steps.caller, None, None
        while frame is not None:
            code = frame.f_code
            if place is None and self._own(code):
                place = code.co_filename, frame.f_lineno, code.co_name
            elif place is not None and place[2] in INLINE and self._own(code):
                place = *place[:2], code.co_name
            if code is caller:
                break
            below = code.co_name
            frame = frame.f_back
        self._looks += 1
        line = (*(place or ("?", 0, "?")), below if frame is not None else None)
        if not timed:
            # In a step that is timed as a whole, a line belongs to the same phase as in the others.
            phase = self._phases.get(line, UNKNOWN)
        elif line in self._phases or len(self._phases) < MOST_PLACES:
            self._phases[line] = phase
        self._phase = phase
        self._seen[(phase, *line)] += 1

    def _tell(self) -> None:
        seen, self._seen = self._seen, Counter()
        looks, self._looks = self._looks, 0
        if seen:
            frames = [[*place, count] for place, count in seen.most_common(TOP)]
            self.put("stacks", step=self._steps.done, looks=looks, frames=frames)

    def _memory(self) -> None:
        """Record the counters of the CUDA allocator, which any thread may read."""
        cuda = sys.modules["torch"].cuda
        found = cuda.memory_stats(self._gpu)
        self.put(
            "memory", allocated_bytes=found.get("allocated_bytes.all.current", 0),
            reserved_bytes=found.get("reserved_bytes.all.current", 0),
            peak_allocated_bytes=found.get("allocated_bytes.all.peak", 0),
            peak_reserved_bytes=found.get("reserved_bytes.all.peak", 0), growth_bytes=None,
            retries=found.get("num_alloc_retries", 0), ooms=found.get("num_ooms", 0), free_bytes=None, total_bytes=None,
            others_bytes=None,
        )  # fmt: skip

    def _stalled(self) -> None:
        still_ns = time.perf_counter_ns() - S[LAST]
        if self.paused or still_ns <= STALLED_NS * (self._stalls + 1):
            return
        self._stalls += 1
        self._tell()
        self.put(
            "stalled", step=self._steps.done, seconds=still_ns / 1e9,
            phase=NAMES[S[CURRENT]] if S[TIMED] else self._phase, place=innermost(S[TRAINER], self._own),
        )  # fmt: skip

    def _collected(self, moment: str, _info: Any) -> None:
        if moment == "start":
            self._gc_began = time.perf_counter_ns()
        elif self._gc_began:
            spent, self._gc_began = time.perf_counter_ns() - self._gc_began, 0
            total, count, longest = self._pauses
            self._pauses = [total + spent, count + 1, max(longest, spent)]

    def _write(self) -> None:
        data = b""
        outside = self._outside
        if outside.seen > outside.told:
            outside.told = outside.seen
            self.put("outside", places=list(outside.places), hosts=list(outside.hosts))
        while not self._lines.empty():
            t, kind, body = self._lines.get()
            if kind == "window":
                if "ranks" in body:
                    told = of_rank(body["rows"], body["wall_ns"], *body["ranks"])
                    body["ranks"] = {**told, "rss_bytes": resident()}
                body.update(figures(body.pop("rows"), body.pop("wholes"), body.pop("rest")))
                if self._dropped:
                    body["dropped_lines"] = self._dropped
            line = {"v": VERSION, "type": kind, "t": round(t, 4), **body}
            data += json.dumps(line, default=str).encode() + b"\n"
        if data and self._handle >= 0:
            with contextlib.suppress(OSError):
                written = os.write(self._handle, data)
                if written < len(data):  # the disk is full: end the torn line
                    os.write(self._handle, b"\n")


def figures(rows: list[list[int]], wholes: list[int], rest: list[int]) -> dict[str, Any]:
    """The phases of a window and the quantiles of its steps, in nanoseconds. Phases add up to the wall time.

    The time of steps that were timed as a whole is shared out like that of the others; `other` takes the rounding.
    """
    phases: dict[str, Any] = {}
    columns = list(zip(*rows)) or [()] * len(NAMES)
    lengths, whole_ns = [*map(sum, rows)], sum(wholes)
    timed, left = sum(lengths), whole_ns
    for index, name in enumerate(PHASES):
        values, waits = columns[index], sum(columns[index + WAITING])
        if waits:
            values = tuple(map(add, values, columns[index + WAITING]))
        inside = sum(values)
        if inside:
            values = tuple(sorted(values))
        total = inside + rest[index] + rest[index + WAITING]
        if name == PHASES[-1]:
            total += left
        elif wholes and timed:
            share = round(whole_ns * inside / timed)
            left -= share
            total += share
        if total:
            phases[name] = {
                "host_ns": total, "p50_ns": _at(values, 0.5), "p95_ns": _at(values, 0.95),
                "max_ns": values[-1] if values else None, "device_ns": None,
            }  # fmt: skip
        if wholes and timed:
            waits += round(whole_ns * waits / timed)
        if waits := waits + rest[index + WAITING]:
            phases[NAMES[index + WAITING]] = {"host_ns": waits, "device_ns": None}
    whole = sorted([*lengths, *wholes])
    last = whole[-1] if whole else None
    return {
        "phases": phases,
        "step_p50_ns": _at(whole, 0.5),
        "step_p95_ns": _at(whole, 0.95),
        "step_max_ns": last,
    }


def _implementation(group: dict[str, Any], device: str) -> str | None:
    """ "fused", "foreach" or "loop" for an optimizer of torch that has a choice; by default foreach on a GPU."""
    if "foreach" not in group:
        return None
    if group.get("fused"):
        return "fused"
    chosen = group["foreach"]
    return "foreach" if chosen or (chosen is None and device == "cuda") else "loop"


def _at(ordered: Sequence[int], share: float) -> int | None:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None


def _on_host(loss: Any) -> float | None:
    """The value of a loss on the CPU; on a GPU, reading it would wait for the device."""
    if loss is None or loss.device.type != "cpu" or loss.numel() != 1:
        return None
    value = float(loss.item())
    return value if value == value and abs(value) != float("inf") else None


def _float(value: Any) -> float | None:
    """A number, or a tensor on the CPU with one element."""
    if hasattr(value, "device") and value.device.type != "cpu":
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
