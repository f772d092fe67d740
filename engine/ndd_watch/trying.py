"""A process of a trial: the script trains in runs when it is told to, with changes applied to it.

NDD_WATCH_TRY holds {"socket": path, "sides": [{key: value}, …], "original": folder, "outside": bool}: the changes of
each side of this process (none for the baseline), the folder whose copy it runs in, and whether it may write elsewhere.
A run begins and ends at the end of a step, where the script waits for the next command and the workers of its loaders
stand still. The process ends without running the rest of the script, which could write where it should not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from typing import Any, Callable, NoReturn

from . import clock
from .clock import CHECKPOINT, EVALUATE, S
from .exceptions import Dropped
from .mapped import MICRO
from .outside import Outside

LOSSES = 10
# Steps that are always trained before the first run: they include what the observer learns.
SETTLE = 12
# Seconds of steps before the first run, at most.
SETTLE_S = 4.0


# Changes that were made when torch had been imported, by key.
started: dict[str, Any] = {}


class Trying:
    """Takes the place of `Steps.gate`."""

    def __init__(self, observer: Any, spec: dict[str, Any]) -> None:
        from .changes import make  # no other process needs the table

        self._observer = observer
        self._sides: list[dict[str, Any]] = [
            {key: started.get(key) or make(key, value, observer) for key, value in side.items()}
            for side in spec["sides"]
        ]
        self._socket = socket.socket(socket.AF_UNIX)
        self._folder = os.path.dirname(spec["socket"])
        try:
            self._socket.connect(spec["socket"])
        except OSError:  # the trial has been killed
            self._leave()
        self._commands = self._socket.makefile("r")
        self._ready = 0.0
        self._losses: list[float] = []
        self._items = 0
        self._current = 0
        self._first = self._last = self._least = 0
        self._begin = self._aside = 0
        self._until: float | None = None
        # Micro-steps of the last step, and of all.
        self._micro = self._all_micro = 0
        self._applied: dict[str, tuple[str, bool | None, str]] = {}
        self._on(0)
        # A worker of a loader must not keep the connection open.
        os.register_at_fork(after_in_child=self._socket.close)

    def __call__(self, done: int) -> None:
        """At the end of each step."""
        steps = self._observer.steps
        if steps.shape is not None:
            self._items = int(steps.shape[0]) if steps.shape else 0
            steps.shape = None
        self._micro, self._all_micro = S[MICRO] - self._all_micro or self._micro, S[MICRO]
        if not self._ready:
            self._settle(done)
            return
        if done == self._first:
            self._begin, self._aside = self._now(), _aside()
        over = (
            self._until is not None
            and done - self._first >= self._least
            and time.perf_counter() >= self._until
        )
        if done < self._last and not over:
            return
        spent = self._now() - self._begin - (_aside() - self._aside)
        self._read_back()
        self._answer({"seconds": spent / 1e9, "steps": done - self._first})
        self._wait(done)

    def _settle(self, done: int) -> None:
        """The first steps: their losses are compared, and the observer learns what the script calls."""
        self._keep_losses()
        if done == 1:
            self._first_step = time.perf_counter()
            # Of the process: its imports and its preparation.
            self._started_s = max(time.time() - spawned(), 0.0)
        if done < SETTLE and time.perf_counter() - self._first_step < SETTLE_S:
            return
        self._now()
        self._keep_losses()
        self._ready = time.perf_counter()
        self._warmed = done
        self._read_back()
        self._answer({"ready": self._facts()})
        self._wait(done)

    def _now(self) -> int:
        """Nanoseconds, when the GPU has done what was queued: a run is as long as its work, not as its launches."""
        cuda: Any = sys.modules["torch"].cuda
        device = self._observer.steps.device
        if cuda.is_initialized():
            cuda.synchronize(device if device is not None and device.type == "cuda" else None)
        return time.perf_counter_ns()

    def _keep_losses(self) -> None:
        """Those of the first steps; from a GPU they arrive some steps late."""
        steps = self._observer.steps
        found = [] if steps.loss is None else [steps.loss]
        steps.loss = None
        if steps.values is not None:
            steps.values.read()
            found += steps.late
            steps.late.clear()
        self._losses += [value for _, value in found][: LOSSES - len(self._losses)]

    def _facts(self) -> dict[str, Any]:
        """The fields of SideFacts that this process knows, for each of its sides."""
        torch = sys.modules["torch"]
        steps = self._observer.steps
        device = str(steps.device) if steps.device is not None else "cpu"
        sides = []
        for changes in self._sides:
            unknown = "", None, ""
            settings = {
                key: [change.requested, *self._applied.get(key, unknown)] for key, change in changes.items()
            }
            losses = self._losses if len(self._sides) == 1 else []
            sides.append({
                "device": device, "threads": torch.get_num_threads(),
                "items_per_step": max(self._items, 1) * max(self._micro, 1),
                "prepare_s": self._started_s, "warmup_s": self._ready - self._first_step,
                "warmup_steps": self._warmed, "losses": losses, "settings": settings,
                "peak_bytes": _peak(torch, device),
            })  # fmt: skip
        return {"sides": sides}

    def _read_back(self) -> None:
        """Note whether the changes of the current side are in effect, while they are."""
        for key, change in self._sides[self._current].items():
            self._applied[key] = change.applied()

    def _wait(self, done: int) -> None:
        """Until the next run begins."""
        _workers(signal.SIGSTOP)
        while (command := self._command())["do"] != "train":
            self._answer(self._facts())
        self._on(int(command["side"]) if len(self._sides) > 1 else 0)
        _workers(signal.SIGCONT)
        self._first = done + int(command["lead"])
        self._last = self._first + int(command["steps"])
        self._least = int(command["least"])
        seconds = command["until_s"]
        self._until = None if seconds is None else time.perf_counter() + seconds
        if not command["lead"]:
            self._begin, self._aside = self._now(), _aside()
        clock.clear()

    def _on(self, index: int) -> None:
        """Switch to a side."""
        for other, changes in enumerate(self._sides):
            if other != index:
                _switch(changes, False)
        _switch(self._sides[index], True)
        self._current = index

    def _command(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            if line := self._commands.readline():
                found: dict[str, Any] = json.loads(line)
                return found
        return self._leave()

    def _leave(self) -> NoReturn:
        """The trial has ended. If it was killed, nobody else removes the scratch copy."""
        _workers(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def _answer(self, body: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(body).encode() + b"\n")


def spawned() -> float:
    """Unix time at which this process began."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="ascii") as file:
            age_s = float(file.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age_s
    return time.time()


def _aside() -> int:
    """Nanoseconds of evaluations and checkpoints so far: they are not what is tried."""
    return int(sum(part[phase] for part in (clock.rest, clock.row) for phase in (EVALUATE, CHECKPOINT)))


def _peak(torch: Any, device: str) -> int | None:
    if device.startswith("cuda"):
        with Dropped():  # an allocator of somebody else may count nothing
            return int(torch.cuda.max_memory_allocated(device))
        return None
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        open("/proc/self/status", errors="replace") as file,
    ):
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return None


def _workers(number: int) -> None:
    """Send a signal to the child processes, which are workers of loaders, but not to helpers of Python."""
    me = str(os.getpid())
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
                parent = file.read().rpartition(")")[2].split()[1]
            if parent == me:
                with open(f"/proc/{entry}/cmdline", encoding="ascii", errors="replace") as file:
                    if "resource_tracker" in file.read():
                        continue
                os.kill(int(entry), number)


def begin(observer: Any) -> Callable[[int], None] | None:
    """What takes the place of `Steps.gate` in a process of a trial; None in any other."""
    text = os.environ.pop("NDD_WATCH_TRY", "")
    return Trying(observer, json.loads(text)) if text else None


def outside() -> Outside | None:
    """In a process of a trial: ends it before it writes where that is not allowed. None in any other process."""
    text = os.environ.get("NDD_WATCH_TRY", "")
    if not text:
        return None
    spec = json.loads(text)

    def refuse(path: str) -> NoReturn:
        sys.stderr.write(f"the script writes to {path}, outside its folder\n")
        sys.stderr.flush()
        os._exit(1)

    return Outside(None if spec.get("outside") else refuse, spec.get("original"))


def before_start(observer: Any) -> None:
    """Apply the changes that have to be there from the beginning: when torch has been imported."""
    text = os.environ.get("NDD_WATCH_TRY", "")
    if not text:
        return
    from .changes import make

    # A process with such a change is only one side, and what both sides have is in the last one.
    for key, value in json.loads(text)["sides"][-1].items():
        if (change := make(key, value, observer)).at_start:
            started[key] = change
            change.switch(True)


def _switch(changes: dict[str, Any], on: bool) -> None:
    for change in changes.values():
        if not change.at_start:
            change.switch(on)
