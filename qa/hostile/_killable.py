"""A process that has imported everything and forks one command line after the other, to be killed at chosen points.

Reads one order (a JSON object) per line of standard input, and answers each with one line. Keys of an order:
- arguments: of ndd-console.
- signal; for a chosen point call, share (of the calls of an undisturbed run) and how ("before", "after", "torn"); for a
  random point after_s.
- victim: "run" or "worker".
- counts: calls of an undisturbed run.
The answer: status, output, left (processes that remain), counts (calls of this run), seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from qa.hostile._ended import left_over

CALLS = {
    "write": os, "pwrite": os, "fsync": os, "replace": os, "unlink": os, "mkdir": os, "open": os, "ftruncate": os,
    "close": os, "flock": fcntl,
}  # fmt: skip
PATIENCE_S = 20.0


class Tripwire:
    """Counts the calls of the engine, and sends a signal to this process at a chosen one."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.seen: Counter[str] = Counter()
        self._name, self._how = order.get("call"), order.get("how", "before")
        self._number = order.get("signal")
        known = order.get("counts", {}).get(self._name, 0)
        self._at = max(1, round(known * order.get("share", 0.0)))

    def install(self) -> None:
        from ndd_engine.train import checkpoint

        for name, module in CALLS.items():
            setattr(module, name, self._wrapped(name, getattr(module, name)))
        vars(checkpoint)["_Digest"].write = self._wrapped("save", vars(checkpoint)["_Digest"].write)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            self.seen[name] += 1
            if name != self._name or self.seen[name] != self._at:
                return real(*given, **more)
            if self._how == "after":
                try:
                    return real(*given, **more)
                finally:
                    self._fire()
            if self._how == "torn" and name == "write":
                real(given[0], bytes(given[1])[: len(given[1]) // 2])
            self._fire()
            return real(*given, **more)

        return call

    def _fire(self) -> None:
        os.kill(os.getpid(), int(self._number))  # type: ignore[arg-type]


def obey(order: dict[str, Any], out: int, counts: Path) -> None:
    """In the forked process: run the command line, as a real process does. Never returns."""
    status = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(out, number)
        import torch

        from ndd_console.__main__ import status_of
        from ndd_engine.record import recorder
        from ndd_engine.train.probes import baseline

        torch.set_num_threads(1)
        recorder.FOLD_EVERY_BYTES = 4000  # so that folds are written, too
        baseline.BASELINE_NS = baseline.SLOW_NS = 0
        wire = Tripwire(order)
        wire.install()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = status_of(order["arguments"])
        with counts.open("w") as file:
            json.dump([wire.seen, sorted(sys.modules)], file)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(status)


def answer(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fork the command line, disturb it, wait for its end and for that of everything it started."""
    begin = time.monotonic()
    path, counts = folder / "output", folder / "counts"
    counts.unlink(missing_ok=True)
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    gc.collect()
    gc.freeze()  # a run collects garbage before its first step
    child = os.fork()
    if child == 0:
        obey(order, out, counts)
    os.close(out)
    if order.get("after_s") is not None:
        time.sleep(order["after_s"])
        victim = child
        if order.get("victim") == "worker":
            victim = worker_of(child)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, order["signal"])
    status = waited(child, order.get("limit_s", 120.0))
    seconds = time.monotonic() - begin
    found: dict[str, int] = {}
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError):  # killed before or while it was written
        found, names = json.loads(counts.read_text())
    for name in names:  # for the next ones
        if name.partition(".")[0] in ("torch", "ndd_engine", "ndd_console", "click", "pydantic"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    output = path.read_text(errors="replace")
    return {
        "status": status,
        "output": output,
        "left": left_over(inherited, PATIENCE_S),
        "counts": found,
        "seconds": seconds,
    }


def worker_of(child: int) -> int:
    """A loader worker of the run, once there is one: a grandchild by way of the fork server."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(child).children(recursive=True):
                if process.ppid() != child:
                    time.sleep(0.2)
                    return process.pid
        time.sleep(0.02)
    return child


def waited(child: int, limit_s: float) -> int:
    """The exit status, negative for a signal; one that does not end is killed and counts as 999."""
    deadline = time.monotonic() + limit_s
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 999
        time.sleep(0.003)


def inherited() -> list[psutil.Process]:
    """What the run started and left behind: as subreaper, this process inherits it."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return psutil.Process().children(recursive=True)


def main() -> None:
    """Answer orders until standard input ends."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    folder = Path(sys.argv[1])
    import torch

    torch.set_num_threads(1)
    import ndd_engine.train.prepare  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), folder)), flush=True)


if __name__ == "__main__":
    main()
