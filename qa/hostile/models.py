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

import psutil
import torch
from tests.states import equal

from ndd_engine.record.rundir import RunDir
from qa.console import sets_of
from qa.hostile._ended import Said, left_over, processes, said, sound, state_of
from qa.hostile._faults import CODE, FAULTS, IN_PROCESSES, START, Fault
from qa.hostile.attempts import Attempt, Kind

STEPS, HALF = 6, 3
# A process of its own: every this many attempts, after the first.
EVERY, FIRST = 6, 23
PROBES = ("BASELINE_NS", "SLOW_NS")


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

    def _check(self, run: Callable[..., Said]) -> None:
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
                one, other = (state_of(self._directory(run)) for run in ("whole", "half"))
                assert one["step"] == other["step"] == STEPS
                assert equal(one, other), "the state differs after a resume"
        else:
            assert self.fault.words is not None, f"should train: {whole.output[-2000:]}"
            assert re.search(self.fault.words, whole.output), (
                f"no {self.fault.words!r} in: {whole.output[-2000:]}"
            )

    def _directory(self, run: str) -> RunDir:
        return RunDir(self.folder / "runs" / run)

    def _judge(self, run: str, ended: Said) -> None:
        output = ended.output
        ended.check(0, 1, 2, 3)
        assert all(len(line) < 1300 for line in output.splitlines())
        assert len(output) < 8000, f"{len(output)} characters"
        directory = self._directory(run)
        if not directory.path.exists():
            return
        saved = sound(directory)
        if ended.status and (found := re.search(r"the last (?:good )?checkpoint is step ([\d,]+)", output)):
            assert int(found[1].replace(",", "")) in saved
        if ended.status == 0 or (self.fault.saves and ended.status == 1):
            assert saved, f"no checkpoint: {output[-1000:]}"

    def _command(self, run: str, *more: str, resume: bool = False) -> list[str]:
        sets = [*more]
        if not resume:
            sets += [
                *self.settings, f'workload.path=["{self.folder}"]', "run.device=cpu", "run.threads=1",
                "checkpoint.every_steps=1", "evaluate.every_epochs=0", "evaluate.at_end=false", "batch.sequence=4",
            ]  # fmt: skip
        which = ["--resume", run] if resume else ["--run", run, "--workload", f"{self.name}:factory"]
        return ["--runs", str(self.folder / "runs"), "train", "--headless", *which, *sets_of(*sets)]

    def _here(self, run: str, *more: str, resume: bool = False) -> Said:
        sys.modules.pop(self.name, None)  # as in a new process
        ended = said(*self._command(run, *more, resume=resume))
        return Said(ended.status, ended.output + ended.errors)

    def _there(self, run: str, *more: str, resume: bool = False) -> Said:
        marker = f"{self.name}-{run}"

        def marked(one: psutil.Process) -> bool:
            return bool(one.environ().get("NDD_HOSTILE") == marker)

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
                left = left_over(lambda: processes(marked), 10)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            file.seek(0)
            # Torch's signal handler in a worker writes its C string with the 0.
            output = file.read().replace("\0", "")
        if self.fault.stop_when is not None and status in (130, 143):
            status = 1
        assert not left, f"left behind: {left}; {output[-1500:]}"
        return Said(status, output)


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


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Undo what a run in this process leaves: signal handlers, threads, paths, frozen objects."""
    from ndd_engine.train import rehearsal

    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    threads, path = torch.get_num_threads(), list(sys.path)
    probes = {name: getattr(rehearsal, name) for name in PROBES}
    for name in PROBES:
        setattr(rehearsal, name, 0)
    try:
        yield
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
        for name, value in probes.items():
            setattr(rehearsal, name, value)
        torch.set_num_threads(threads)
        sys.path[:] = path
        gc.unfreeze()


KIND = Kind(
    name="awkward models, data and losses",
    holds="it trains and resumes bit for bit, or one message names what is wrong; nothing is lost or left behind",
    full=269,
    short=10,
    attempts=make,
)
