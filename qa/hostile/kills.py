"""A run is killed at chosen points and random moments, and resumes as if it had not been."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from tests.states import equal
from torch.distributed.checkpoint import filesystem

from ndd_engine.record.events import WindowEvent, parse
from ndd_engine.record.file import RunReader
from ndd_engine.record.rundir import RunDir
from qa.console import sets_of
from qa.hostile._ended import left_over, said, sound, state_of
from qa.hostile.attempts import Attempt, Kind

# With dropout and accumulation, so that the random state and the position in the data count.
SETS = (
    "workload.name=chartext", "workload.size=tiny", "workload.width=16", "workload.dropout=0.2",
    "batch.sequence=16", "batch.micro=8", "batch.accumulation=2", "run.threads=1", "run.max_steps=20",
    "schedule.kind=cosine", "schedule.warmup_steps=4", "log.every_steps=1", "log.window_s=0",
    "checkpoint.every_steps=4", "checkpoint.keep=2", "evaluate.every_steps=10",
)  # fmt: skip
# Calls at which a run is killed, by how often they are chosen.
CALLS = {
    "write": 8, "fsync": 6, "replace": 6, "rename": 5, "unlink": 5, "save": 5, "open": 3, "mkdir": 2, "flock": 1,
    "pwrite": 1, "close": 3, "ftruncate": 1,
}  # fmt: skip
# Where they are, unless they are functions of os.
PLACES: dict[str, tuple[Any, str]] = {"flock": (fcntl, "flock"), "save": (filesystem, "_write_item")}
STATUS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 0}


class Runs:
    """Runs by way of a process that has imported everything, and the undisturbed one that all are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        draw = random.Random(7)
        words = ("the cat", "a dog", "nobody", "sees", "paints", "a boat", "his hat")
        text = "".join(" ".join(draw.choices(words, k=3)) + ".\n" for _ in range(140))
        (folder / "text.txt").write_text(text)
        self._process: subprocess.Popen[str] | None = None
        self.counts: dict[str, int] = {}
        self.ended = self.resumed = 0
        self.seconds = 0.0
        self.losses: dict[int, float] = {}
        self.state: dict[str, Any] = {}

    def begin(self) -> None:
        """Start the process and make the undisturbed run, once."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "qa.hostile.kills", str(self.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        found = self.order(self.new("whole"))
        assert found["status"] == 0, found["output"]
        whole = RunDir(self.root / "whole")
        self.losses, self.state = losses(whole), state_of(whole)
        whole.path.rename(self.folder / "whole")
        # The later ones import nothing.
        self.counts, self.seconds = found["counts"], min(found["seconds"], 1.5)
        assert sorted(self.losses) == list(range(1, 21))

    def order(self, arguments: list[str], **more: Any) -> dict[str, Any]:
        assert (
            self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        )
        order = {"arguments": ["--runs", str(self.root), *arguments], "counts": self.counts, **more}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        self.ended += answer["status"] not in (0, 1, 2)
        assert answer["left"] == [], f"left behind: {answer['left']}"
        assert answer["status"] != 999, f"it did not end: {answer['output']}"
        assert "Traceback" not in answer["output"], answer["output"]
        return answer

    def new(self, name: str, *more: str) -> list[str]:
        """The command line of a new run."""
        sets = (*SETS, f"workload.data={self.folder / 'text.txt'}", *more)
        return ["train", "--headless", "--run", name, *sets_of(*sets)]

    def end(self) -> None:
        """Stop the process."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(30)
            print(
                f"  {self.ended} runs ended early, {self.resumed} resumed to an identical end",
                file=sys.stderr,
            )


def losses(run: RunDir) -> dict[int, float]:
    """Loss by step. Steps that were done twice have to agree bit for bit."""
    found: dict[int, float] = {}
    for item in map(parse, run.events.read_bytes().splitlines()):
        if item is not None and isinstance(item[1], WindowEvent) and item[1].last_loss is not None:
            step, loss = item[1].last_loss
            assert found.setdefault(step, loss) == loss, f"step {step} was done twice with different losses"
    return found


def check_killed(runs: Runs, run: RunDir, statuses: tuple[str, ...]) -> bool:
    """What has to be true of a run after its process ended. Returns whether it can be resumed."""
    if not run.path.exists():
        return False
    saved = sound(run)
    if not run.exists:
        return False
    reader = RunReader(run)
    reader.poll()
    assert reader.snapshot().status in statuses, reader.snapshot().status
    listed = said("--runs", str(runs.root), "runs", "--json")
    row = next(row for row in json.loads(listed.output)["runs"] if row["name"] == run.name)
    assert listed.status == 0 and row["status"] in statuses and not row["live"], row
    return bool(saved)


def check_resumed(runs: Runs, run: RunDir, resumable: bool) -> None:
    """Resume to the end: the same losses and the same state as the undisturbed run."""
    if not resumable:
        if run.path.exists():
            found = runs.order(["train", "--headless", "--resume", run.name])
            assert found["status"] in (1, 2), found
            # Each stage of the preparation has a line.
            assert len(found["output"].strip().splitlines()) < 16 and "Traceback" not in found["output"]
        return
    found = runs.order(["train", "--headless", "--resume", run.name])
    if found["status"] == 2:
        assert "has finished all 20 steps" in found["output"], found["output"]
    else:
        assert found["status"] == 0, found["output"]
    assert losses(run) == runs.losses, "the losses differ from those of the undisturbed run"
    assert equal(state_of(run), runs.state), "the state differs from that of the undisturbed run"
    assert not list(run.checkpoints.glob("*.tmp")), "temporary files remain"
    runs.resumed += found["status"] == 0


def statuses_after(number: int) -> tuple[str, ...]:
    """How the record may end. A kill after the end, and a signal before the run or after its end, change nothing."""
    if number == signal.SIGKILL:
        return ("lost", "done")
    return ("done", "terminated", "interrupted", "lost")


def at_point(
    runs: Runs, index: int, call: str, share: float, how: str, number: int, again: float | None
) -> None:
    """Send a signal at the n-th call. again: the resumed run is killed, too, at this share of its calls."""
    runs.begin()
    name = f"run-{index}"
    run = RunDir(runs.root / name)
    for attempt in range(4):
        # The number of calls varies a little with the threads.
        found = runs.order(runs.new(name), call=call, share=share * 0.8**attempt, how=how, signal=number)
        if found["status"] != 0 or number == signal.SIGHUP:
            break
        run.path.rename(runs.folder / f"{name}-{attempt}")
    codes = (STATUS[signal.Signals(number)], 0)
    assert found["status"] in codes, found
    assert number == signal.SIGHUP or found["status"] != 0, "the run was never killed"
    resumable = check_killed(runs, run, statuses_after(number))
    if resumable and again is not None:
        found = runs.order(
            ["train", "--headless", "--resume", name], call="write", share=again, signal=signal.SIGKILL
        )
        assert found["status"] in (-9, 0, 2), found
        # Killed after its last checkpoint, it has nothing to resume and says so.
        resumable = check_killed(runs, run, ("lost", "done", *(["failed"] if found["status"] == 2 else [])))
    check_resumed(runs, run, resumable)


def at_moment(runs: Runs, index: int, share: float, number: int, workers: int, victim: str) -> None:
    """Send a signal after a share of the duration of an undisturbed run."""
    runs.begin()
    name = f"run-{index}"
    run = RunDir(runs.root / name)
    more = (f"loader.workers={workers}",) if workers else ()
    longer = 3.5 if workers else 0.0  # the fork server imports torch
    after_s = share * (runs.seconds + longer)
    found = runs.order(runs.new(name, *more), after_s=after_s, signal=number, victim=victim)
    codes = {STATUS[signal.Signals(number)], 0}
    if victim == "worker":
        codes = {0, 1, -9}
    if number in (signal.SIGTERM, signal.SIGINT):
        codes |= {-number, 1}  # before Python handles it
    assert found["status"] in codes, found
    statuses = ("failed", *statuses_after(number)) if victim == "worker" else statuses_after(number)
    check_resumed(runs, run, check_killed(runs, run, statuses))


def real(runs: Runs, index: int, after_s: float, number: int) -> None:
    """The same with a real command line."""
    runs.begin()
    name = f"run-{index}"
    run = RunDir(runs.root / name)
    process = subprocess.Popen(
        [sys.executable, "-m", "ndd_console", "--runs", str(runs.root), *runs.new(name)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    time.sleep(after_s)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode in (STATUS[signal.Signals(number)], 0), (process.returncode, output)
    assert "Traceback" not in output, output
    check_resumed(runs, run, check_killed(runs, run, statuses_after(number)))


def attempts(rng: random.Random, folder: Path) -> Iterator[Attempt]:
    """Chosen points, random moments, runs with workers, and real command lines."""
    runs = Runs(folder)
    try:
        for index in range(1_000_000):
            yield drawn(rng, runs, index)
    finally:
        runs.end()


def drawn(rng: random.Random, runs: Runs, index: int) -> Attempt:
    """The next attempt."""
    # Most of them after the first checkpoint, so that there is something to resume.
    sort, share, how = rng.random(), rng.random() ** 0.7, rng.choice(["before", "before", "after", "torn"])
    call = rng.choices(list(CALLS), list(CALLS.values()))[0]
    again = rng.random() if rng.random() < 0.25 else None
    gentle = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    number = gentle if rng.random() < 0.2 else signal.SIGKILL
    after_s = 0.15 + rng.random() * 6
    if index % 40 == 25:
        victim = rng.choice(["run", "worker"])
        words = f"{signal.SIGKILL.name} to the {victim} with 2 workers at {share:.2f} of the duration"
        return Attempt(words, lambda: at_moment(runs, index, share, signal.SIGKILL, 2, victim))
    if index % 40 == 5:
        words = f"{number.name} to a real command line after {after_s:.2f} s"
        return Attempt(words, lambda: real(runs, index, after_s, number))
    if sort < 0.7:
        words = f"{number.name} {how} call {share:.2f} of {call}" + (
            f", again at {again:.2f}" if again else ""
        )
        return Attempt(words, lambda: at_point(runs, index, call, share, how, number, again))
    words = f"{number.name} at {share:.2f} of the duration"
    return Attempt(words, lambda: at_moment(runs, index, share, number, 0, "run"))


KIND = Kind(
    "runs killed",
    "no process, lock or torn file stays; runs lists it; every checkpoint loads; resumed, it is bit-identical",
    full=240,
    short=4,
    attempts=attempts,
)


# The process of `Runs`, which has imported everything and forks one command line after the other.
#
# It reads one order (a JSON object) per line of standard input, and answers each with one line. Keys of an order:
# - arguments: of ndd-console.
# - signal; for a chosen point call, share (of the calls of an undisturbed run) and how ("before", "after", "torn"); for
#   a random point after_s.
# - victim: "run" or "worker".
# - counts: calls of an undisturbed run.
# The answer: status, output, left (processes that remain), counts (calls of this run), seconds.
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
        for name in CALLS:
            place, what = PLACES.get(name, (os, name))
            setattr(place, what, self._wrapped(name, getattr(place, what)))

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
        from ndd_engine.record import file as record_file
        from ndd_engine.train import rehearsal

        torch.set_num_threads(1)
        record_file.FOLD_EVERY_BYTES = 4000  # so that folds are written, too
        rehearsal.BASELINE_NS = rehearsal.SLOW_NS = 0
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
