"""A process of a trial: it trains in runs on command, changes nothing outside, and has changes applied to it.

NDD_WATCH_TRY holds {"socket": path, "sides": [{key: value}, …], "given": {key: value}, "seeded": bool}. These are the
changes of each side of this process (none for the baseline), arguments and variables that it was started with, and
whether a script that sets no seed gets one.

Each rank connects and says which one it is. The loop asks its gate before the first step and after each one. The
process that measures sends one command per line, and gets one answer: to {"do": "train"} when the run has ended, to
any other the facts. A run begins and ends at the end of a step. Between two runs the loop waits in its gate, and what
it has started stands still. The process ends without running the rest of the script, which could write where it should
not.
"""

from __future__ import annotations

import contextlib
import json
import os as _os
import random
import re
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Callable, NoReturn

from . import clock
from .apart import Dropped
from .clock import CURRENT, S
from .fitting import RefusedError
from .holders import OF_GPU, OF_HOST
from .mapped import MICRO, pss_bytes
from .waits import place


class Trainer:
    """What a gate has to know of the loop."""

    def settle(self) -> Iterator[None]:
        """Each turn is a step that is trained before the first run."""
        return iter(())

    def rest(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the loop waits: nothing of it may disturb what is measured elsewhere."""
        raise NotImplementedError

    def begin(self, command: dict[str, Any]) -> None:
        """Go to the side of the process that the command is for."""

    def stepped(self) -> None:
        """A step of a run has ended."""

    def end(self) -> None:
        """A run has ended."""

    def now(self) -> float:
        """Seconds on a clock, when the device has done what was queued."""
        raise NotImplementedError

    def waited(self) -> float:
        """Seconds that steps have waited for data so far."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What is known of each side of the process."""
        raise NotImplementedError


def gate(
    trainer: Trainer, receive: Callable[[], dict[str, Any]], send: Callable[[dict[str, Any]], object]
) -> Callable[[], None]:
    """The gate: returns when the next step is to be trained.

    A command to train names the `side`, its untimed steps (`lead`), and its timed ones (`steps`). These are timed from
    the end of the step before them to the end of the last one, with everything that happens between steps.
    """
    return _in_runs(trainer, receive, send).__next__


def _in_runs(
    trainer: Trainer, receive: Callable[[], dict[str, Any]], send: Callable[[dict[str, Any]], object]
) -> Iterator[None]:
    yield from trainer.settle()
    answer: dict[str, Any] = {"ready": trainer.facts()}
    while True:
        with trainer.rest():
            send(answer)
            while (command := receive())["do"] != "train":
                send(trainer.facts())
            trainer.begin(command)
        for _ in range(command["lead"]):
            yield
            trainer.stepped()
        begin, waited = trainer.now(), trainer.waited()
        for _ in range(command["steps"]):
            yield
            trainer.stepped()
        answer = {"seconds": trainer.now() - begin, "waited_s": trainer.waited() - waited}
        trainer.end()


def signal_to(processes: Iterable[int], number: int) -> None:
    """Send a signal to those that are still running."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            _os.kill(process, number)


@contextlib.contextmanager
def still(processes: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Inside, the workers of a loader stand still: they would disturb others, and make batches while nobody counts.

    processes: the workers, asked again at the end.
    """
    signal_to(processes(), signal.SIGSTOP)
    yield
    signal_to(processes(), signal.SIGCONT)


LOSSES = 10
# Lengths of steps that are kept.
MOST_LENGTHS = 2048
# An error of memory, by its text.
_OF_MEMORY = re.compile(f"{OF_GPU}|{OF_HOST}", re.IGNORECASE)

# Changes that were made when torch had been imported, by key.
started: dict[str, Any] = {}


class ScriptTrainer(Trainer):
    """The loop of a script, as its gate sees it."""

    def __init__(self, observer: Any, spec: dict[str, Any]) -> None:
        from .changes import make  # no other process needs the table

        self._observer, self._steps = observer, observer.steps
        self._torch: Any = sys.modules["torch"]
        self._sides: list[dict[str, Any]] = [
            {key: started.get(key) or make(key, value, observer) for key, value in side.items()}
            for side in spec["sides"]
        ]
        # What an edited script has to do by itself.
        self._expected = {key: make(key, value, observer) for key, value in spec.get("expected", {}).items()}
        self._given: dict[str, str] = spec.get("given", {})
        self._socket = socket.socket(socket.AF_UNIX)
        self._folder = _os.path.dirname(spec["socket"])
        here = place(self._torch)
        try:
            self._socket.connect(spec["socket"])
        except OSError:  # the trial has been killed
            self._leave()
        self._commands = self._socket.makefile("r")
        self._ranks = here["ranks"] or 1
        self.send({"rank": here["rank"] or 0, "ranks": self._ranks, "here": here["here"]})
        self._started_s = 0.0
        # By the number of the step, which is the same in every process of the script.
        self._losses: dict[int, float] = {}
        # Of the steps so far, in microseconds; when the last one ended. Item shapes that were seen.
        self._lengths: deque[int] = deque(maxlen=MOST_LENGTHS)
        self._ended_s = 0.0
        self._items: set[tuple[int, ...]] = set()
        self._current = 0
        # Micro-steps of a step, and the most memory of workers that was seen.
        self._micro, self._workers_bytes = 1, 0
        self._applied: dict[str, tuple[str, bool | None, str]] = {}
        self._on(0)
        # A worker of a loader must not keep the connection open.
        _os.register_at_fork(after_in_child=self._socket.close)

    def settle(self) -> Iterator[None]:
        """The step in which the script was met has ended; the second one is whole. All ranks train as many."""
        # Of the process: its imports and its preparation.
        self._started_s = max(time.time() - spawned(), 0.0)
        self.stepped()
        micro = S[MICRO]
        yield
        self.stepped()
        self._micro = max(S[MICRO] - micro, 1)
        for change in [change for side in self._sides for change in side.values()]:
            turns = change.most_probes
            for _ in change.probes():
                yield
                self.stepped()
                turns -= 1
            for _ in range(turns if self._ranks > 1 else 0):  # others may need more
                yield
                self.stepped()
            self._lengths.clear()  # those of other steps
        self._on(0)

    def rest(self) -> contextlib.AbstractContextManager[None]:
        return still(_workers)

    def begin(self, command: dict[str, Any]) -> None:
        self._on(command["side"] if len(self._sides) > 1 else 0)
        # The wait for the command belongs to no step.
        self._ended_s = self._host_s()
        clock.enter(S[CURRENT])
        clock.clear()

    def end(self) -> None:
        self._read_back()

    def _host_s(self) -> float:
        return float(time.perf_counter_ns() - self._steps.aside_ns) / 1e9

    def now(self) -> float:
        """Without evaluations and checkpoints, which are not what is tried."""
        cuda, device = self._torch.cuda, self._steps.device
        if cuda.is_initialized():
            cuda.synchronize(device if device is not None and device.type == "cuda" else None)
        return self._host_s()

    def waited(self) -> float:
        return clock.waited_ns() / 1e9

    def stepped(self) -> None:
        """Keep the length of the step, and the losses of the first ones; from a GPU they arrive some steps late."""
        steps, ended_s = self._steps, self._host_s()
        if self._ended_s:
            self._lengths.append(round((ended_s - self._ended_s) * 1e6))
        self._ended_s = ended_s
        if steps.shape and len(self._items) < 2:
            self._items.add(steps.shape[1:])
        if len(self._losses) == LOSSES:
            return
        found = [] if steps.loss is None else [steps.loss]
        steps.loss = None
        if steps.values is not None:
            steps.values.read()
            found += steps.late
            steps.late.clear()
        for step, value in found:
            if step in self._losses or len(self._losses) < LOSSES:
                self._losses[step] = value

    def facts(self) -> dict[str, Any]:
        """The fields of SideFacts that this process knows."""
        self.now()
        self.stepped()
        self._read_back()
        device = str(self._steps.device) if self._steps.device is not None else "cpu"
        items = (self._steps.shape or (1,))[0]
        loader, passes = self._observer.loader, self._observer.hooks.passes
        sides = []
        # Where items are padded to the longest one of a batch, there is no single shape.
        item = list(next(iter(self._items))) if len(self._items) == 1 else None
        from .changes import PREFETCH

        peak = _peak(self._torch, device)
        if peak is not None and device == "cpu":
            self._workers_bytes = max(sum(filter(None, map(pss_bytes, _workers()))), self._workers_bytes)
            peak += self._workers_bytes
        for changes in self._sides:
            unknown = "", None, ""
            settings = {
                key: [change.requested, *self._applied.get(key, unknown)] for key, change in changes.items()
            }
            settings.update({key: [one.requested, *one.found()] for key, one in self._expected.items()})
            settings.update({key: [value, *given(key, value)] for key, value in self._given.items()})
            losses = self._losses if len(self._sides) == 1 else {}
            every = (one for side in self._sides for one in side.values())
            peaks = (one.peak_bytes(one in changes.values()) for one in every)
            changed = next((one for one in peaks if one), None)
            sides.append({
                "device": device, "threads": self._torch.get_num_threads(),
                "items_per_step": max(int(items), 1) * self._micro * self._ranks, "prepare_s": self._started_s,
                "steps_per_epoch": passes.per_pass, "settings": settings,
                "losses": list(losses.values()), "loss_steps": list(losses), "lengths_us": list(self._lengths),
                "item": item, "of_tokens": self._steps.whole_numbers, "peak_bytes": changed or peak,
                "stock": -(-(loader.get("workers") or 0) * (loader.get("prefetch") or PREFETCH) // self._micro),
            })  # fmt: skip
        return {"sides": sides}

    def _read_back(self) -> None:
        """Note whether the changes of the current side are in effect, while they are."""
        for key, change in self._sides[self._current].items():
            self._applied[key] = change.applied()

    def _on(self, index: int) -> None:
        """Switch to a side."""
        for other, changes in enumerate(self._sides):
            if other != index:
                _switch(changes, False)
        _switch(self._sides[index], True)
        self._current = index

    def receive(self) -> dict[str, Any]:
        """The next command."""
        with contextlib.suppress(OSError, ValueError):
            if line := self._commands.readline():
                found: dict[str, Any] = json.loads(line)
                return found
        return self._leave()

    def _leave(self) -> NoReturn:
        """The trial has ended. If it was killed, nobody else removes the scratch copy."""
        signal_to(_workers(), signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        _os._exit(0)

    def send(self, body: dict[str, Any]) -> None:
        """Answer."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(body).encode() + b"\n")

    def failed(self, error: Any, reason: str) -> None:
        """The script ends with an error, whose first line is this reason."""
        kind = "oom" if isinstance(error, MemoryError) or _OF_MEMORY.search(reason) else "failed"
        self.send({"error": reason, "kind": kind})


def given(key: str, value: str) -> tuple[str, bool | None, str]:
    """(value, in effect, how that is known) of an argument or a variable that this process should have."""
    kind, _, name = key.partition(".")
    if kind == "env":
        found = _os.environ.get(name, "not set")
        return found, found == value, "read from the environment of the process that trains"
    # A process that multiprocessing starts has its arguments from the one that started it.
    words = [word for word in (*getattr(sys, "orig_argv", ()), "", *sys.argv) if type(word) is str]
    values = []
    for word, after in zip(words, [*words[1:], ""]):
        option, joined, text = word.partition("=")
        if option.lstrip("-").replace("_", "-") == name.replace("_", "-") and (
            joined or option.startswith("-")
        ):
            values.append(text if joined else after)
    # Of an option that is given twice, usually the last one counts.
    found = values[-1] if values else "not given"
    return found, found == value, "read from the arguments of the process that trains"


def spawned() -> float:
    """Unix time at which this process began."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="ascii") as file:
            age_s = float(file.read().split()[0]) - ticks / _os.sysconf("SC_CLK_TCK")
        return time.time() - age_s
    return time.time()


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


def _workers() -> list[int]:
    """The child processes, which are workers of loaders, without helpers of Python."""
    me, found = str(_os.getpid()), []
    for entry in _os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
                parent = file.read().rpartition(")")[2].split()[1]
            if parent == me:
                with open(f"/proc/{entry}/cmdline", encoding="ascii", errors="replace") as file:
                    if "multiprocessing.resource_tracker" not in file.read():
                        found.append(int(entry))
    return found


def begin(observer: Any) -> tuple[ScriptTrainer, Callable[[], None]] | None:
    """In a process of a trial: the script, and what takes the place of `Steps.gate`. None in any other."""
    text = _os.environ.pop("NDD_WATCH_TRY", "")
    if not text:
        return None
    script = ScriptTrainer(observer, json.loads(text))
    ask = gate(script, script.receive, script.send)

    def asked() -> None:
        try:
            ask()
        except Exception as error:  # noqa: BLE001  the script would continue to train
            if isinstance(error, RefusedError):
                script.send({"error": str(error), "kind": "refused"})
            give_up(error)

    return script, asked


def give_up(error: Exception) -> NoReturn:
    """An error of ours ends a process of a trial."""
    sys.stderr.write(f"ndd-console: the change cannot be made: {error}\n")
    sys.stderr.flush()
    _os._exit(1)


def before_start(observer: Any) -> None:
    """Apply the changes that have to be there from the beginning: when torch has been imported."""
    text = _os.environ.get("NDD_WATCH_TRY", "")
    if not text:
        return
    from .changes import make

    spec = json.loads(text)
    if spec.get("seeded"):
        random.seed(0)
        sys.modules["torch"].manual_seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
    # A process with such a change is only one side, and what both sides have is in the last one.
    for key, value in spec["sides"][-1].items():
        if (change := make(key, value, observer)).at_start:
            started[key] = change
            change.switch(True)


def _switch(changes: dict[str, Any], on: bool) -> None:
    for change in changes.values():
        if not change.at_start:
            change.switch(on)
