"""Awkward models, data, losses and metrics of a user's own workload, in runs of a few steps."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from ndd_console.__main__ import status_of
from ndd_engine.record.rundir import RunDir, RunLock
from ndd_engine.train.checkpoint import CheckpointStore
from qa.hostile._faults import FAULTS, IN_PROCESSES
from qa.hostile._faulty_code import CODE, START, Fault
from qa.hostile.attempts import Attempt, Kind

STEPS, HALF = 6, 3
# A process of its own: every this many attempts, after the first.
EVERY, FIRST = 6, 23
PROBES = ("BASELINE_NS", "SLOW_NS")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    output: str


def make(rng: random.Random, folder: Path) -> Iterator[Attempt]:
    """Every fault once, then again in other surroundings."""
    number = 0
    while True:
        inside, outside = list(FAULTS), list(IN_PROCESSES)
        rng.shuffle(inside)
        rng.shuffle(outside)
        while inside:
            process = outside and number >= FIRST and (number - FIRST) % EVERY == 0
            fault = (outside if process else inside).pop()
            settings = _surroundings(rng, fault)
            attempt = Try(
                fault, settings, folder / f"{number:04d}", f"awkward_{number:04d}_{rng.randrange(10**9)}"
            )
            yield Attempt(
                f"{fault.name} ({' '.join(settings)})", attempt.in_process if process else attempt.in_this
            )
            number += 1


def _surroundings(rng: random.Random, fault: Fault) -> list[str]:
    """Settings that do not matter for the outcome."""
    micro, accumulation = rng.choice(((2, 1), (4, 1), (2, 2), (1, 3)))
    settings = {
        "batch.micro": micro, "batch.accumulation": accumulation,
        "optimizer.name": rng.choice(("sgd", "adam", "adamw")), "clip.max_norm": rng.choice((0, 1)),
        "optimizer.implementation": rng.choice(("auto", "foreach", "loop")),
        "optimizer.set_to_none": rng.choice(("true", "false")),
        "evaluate.every_steps": 2 if re.search("eval|metric", fault.name) else rng.choice((0, 2)),
        "loader.fetch": rng.choice(("auto", "item")),
        "evaluate.inference_mode": rng.choice(("true", "false")), "log.every_steps": rng.choice((1, 4)),
    }  # fmt: skip
    return [f"{key}={value}" for key, value in {**settings, **dict(fault.settings)}.items()]


@dataclass(frozen=True)
class Try:
    """One fault in a run of its own. name: of the module with the user's code."""

    fault: Fault
    settings: list[str]
    folder: Path
    name: str

    def in_this(self) -> None:
        """Train in this process."""
        with _restored():
            self._check(self._here)

    def in_process(self) -> None:
        """Train in a process of its own, which must leave no other process behind."""
        self._check(self._there)

    def _check(self, run: Callable[..., Ended]) -> None:
        self.folder.mkdir(parents=True)
        source = START + CODE.get(self.fault.part, "") + self.fault.source
        if "def factory" not in self.fault.source and "factory =" not in self.fault.source:
            source += CODE["factory"]
        (self.folder / f"{self.name}.py").write_text(source, "utf-8", errors="surrogatepass")
        whole = run("whole", f"run.max_steps={STEPS}")
        self._judge("whole", whole)
        if whole.status == 0:
            assert self.fault.words is None, (
                f"trained, but should say {self.fault.words!r}: {whole.output[-800:]}"
            )
            half = run("half", f"run.max_steps={HALF}")
            assert half.status == 0, half.output[-2000:]
            rest = run("half", f"run.max_steps={STEPS}", resume=True)
            assert rest.status == 0, f"cannot resume: {rest.output[-2000:]}"
            self._judge("half", rest)
            if self.fault.repeats:
                _same(_state(self._directory("whole")), _state(self._directory("half")), "")
        else:
            assert self.fault.words is not None, f"should train: {whole.output[-2000:]}"
            assert re.search(self.fault.words, whole.output), (
                f"no {self.fault.words!r} in: {whole.output[-2000:]}"
            )

    def _directory(self, run: str) -> RunDir:
        return RunDir(self.folder / "runs" / run)

    def _judge(self, run: str, ended: Ended) -> None:
        output = ended.output
        assert ended.status in (0, 1, 2, 3), f"status {ended.status}: {output[-2000:]}"
        assert "Traceback" not in output, output[-4000:]
        lines = output.splitlines()
        assert all(line.isprintable() for line in lines), [line for line in lines if not line.isprintable()]
        assert all(len(line) < 1300 for line in lines), max(map(len, lines))
        assert len(output) < 8000, f"{len(output)} characters"
        directory = self._directory(run)
        if not directory.path.exists():
            return
        lock = RunLock(directory)
        lock.acquire()  # raises if it is still held
        lock.release()
        store = CheckpointStore(directory.checkpoints, 3)
        for saved in store.all():
            store.load(saved)
        if ended.status and (found := re.search(r"the last (?:good )?checkpoint is step (\d+)", output)):
            assert int(found[1]) in [saved.step for saved in store.all()]
        if ended.status == 0 or (self.fault.saves and ended.status == 1):
            assert store.all(), f"no checkpoint: {output[-1000:]}"

    def _command(self, run: str, *more: str, resume: bool = False) -> list[str]:
        sets = [*more]
        if not resume:
            sets += [
                *self.settings, f'workload.path=["{self.folder}"]', "run.device=cpu", "run.threads=1",
                "checkpoint.every_steps=1", "evaluate.every_epochs=0", "evaluate.at_end=false", "batch.sequence=4",
            ]  # fmt: skip
        which = ["--resume", run] if resume else ["--run", run, "--workload", f"{self.name}:factory"]
        options = [part for each in sets for part in ("--set", each)]
        return ["--runs", str(self.folder / "runs"), "train", "--headless", *which, *options]

    def _here(self, run: str, *more: str, resume: bool = False) -> Ended:
        sys.modules.pop(self.name, None)  # as in a new process
        with (self.folder / "output").open("w+", encoding="utf-8", errors="backslashreplace") as file:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                status = status_of(self._command(run, *more, resume=resume))
            file.seek(0)
            return Ended(status, file.read())

    def _there(self, run: str, *more: str, resume: bool = False) -> Ended:
        marker = f"{self.name}-{run}"

        def limit() -> None:
            for kind, most in self.fault.limits:
                resource.setrlimit(kind, (most, most))

        with (self.folder / "output").open("w+", encoding="utf-8", errors="replace") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "ndd_console", *self._command(run, *more, resume=resume)],
                stdout=file, stderr=file, stdin=subprocess.DEVNULL, preexec_fn=limit, start_new_session=True,
                env={**os.environ, "NDD_HOSTILE": marker, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
            try:
                if self.fault.stop_when is not None:
                    _stop(process, self.folder / "runs" / run / "events.jsonl", self.fault.stop_when)
                status = process.wait(90)
            finally:
                left = _marked(marker)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            file.seek(0)
            output = file.read().replace(
                "\0", ""
            )  # torch's signal handler in a worker writes its C string with the 0
        if self.fault.stop_when is not None and status in (130, 143):
            status = 1
        assert not left, f"left behind: {left}; {output[-1500:]}"
        return Ended(status, output)


def _stop(process: subprocess.Popen[bytes], events: Path, words: str) -> None:
    """Two signals (stop, then stop at once) when the record contains the words."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if events.exists() and words in events.read_text("utf-8", "replace"):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            return
        time.sleep(0.01)


def _marked(marker: str) -> list[str]:
    """Processes that still carry the marker some seconds after the end."""
    deadline = time.monotonic() + 10
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.status() != psutil.STATUS_ZOMBIE
                    and process.environ().get("NDD_HOSTILE") == marker
                ):
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Undo what a run in this process leaves: signal handlers, threads, paths, frozen objects."""
    from ndd_engine.train.probes import baseline

    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    threads, path, probes = (
        torch.get_num_threads(),
        list(sys.path),
        {name: getattr(baseline, name) for name in PROBES},
    )
    for name in PROBES:
        setattr(baseline, name, 0)
    try:
        yield
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
        for name, value in probes.items():
            setattr(baseline, name, value)
        torch.set_num_threads(threads)
        sys.path[:] = path
        gc.unfreeze()


def _state(directory: RunDir) -> dict[str, Any]:
    """The training state of the last step's checkpoint."""
    path = next(directory.checkpoints.glob(f"step-{STEPS:08d}*.pt"))
    state = torch.load(path, weights_only=True)
    return {key: state[key] for key in ("step", "model", "optimizer", "scaler", "random")}


def _same(one: Any, other: Any, path: str) -> None:
    """Assert that two states are equal bit for bit."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            _same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, values in enumerate(zip(one, other, strict=True)):
            _same(*values, f"{path}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), path
        assert _bits(one) == _bits(other), f"{path} differs after a resume"
    else:
        assert one == other or one != one, f"{path}: {one!r:.100} and {other!r:.100}"


def _bits(tensor: torch.Tensor) -> list[int]:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    found: list[int] = dense.contiguous().view(-1).view(torch.uint8).tolist()
    return found


KIND = Kind(
    name="awkward models, data and losses",
    holds="it trains and resumes bit for bit, or one message names what is wrong; nothing is lost or left behind",
    full=298,
    short=10,
    attempts=make,
)
