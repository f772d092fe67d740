"""Ranks as other processes: a run whose ranks, launcher and console get signals, and a module under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Self

import psutil
import torch
import torch.distributed as dist

from ndd_engine.record.rundir import RunDir
from ndd_engine.train.checkpoint import CheckpointStore, newest_good

WORKLOAD = Path(__file__).parents[1] / "scripts" / "rank_faults.py"
LIMIT_S = 120.0
NAME = "it"


class RanksJob:
    """`ndd-console train --ranks N` of the workload with faults, in a folder. Use with `with`: it leaves no process."""

    def __init__(
        self, folder: Path, *words: str, ranks: int = 2, steps: int = 1_000_000, resume: bool = False
    ) -> None:
        """words: more of the command, such as --set parallel.hang_s=2. resume: the run that is in the folder."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(WORKLOAD, folder)
        self.run = RunDir(folder / "runs" / NAME)
        what = ["--resume", NAME] if resume else ["--run", NAME, "--workload", "rank_faults:factory"]
        self.command = [
            sys.executable, "-m", "ndd_console", "train", "--headless", *what, "--ranks", str(ranks),
            "--max-steps", str(steps), "--set", "run.device=cpu", "--set", "batch.micro=8",
            "--set", "checkpoint.every_steps=20", "--set", "checkpoint.keep=2", "--set", "evaluate.at_end=false",
            *words,
        ]  # fmt: skip
        self.begun_t = 0.0
        self._seen: set[int] = set()

    def __enter__(self) -> Self:
        self.begun_t = time.time()
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            self.console = subprocess.Popen(
                self.command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        left = [self.console.pid, *self._seen, *self._of_run()]
        for pid in left:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() > self.begun_t - 1:  # not another one that got its id
                    process.kill()
        self.console.wait()

    def _of_run(self) -> list[int]:
        with contextlib.suppress(LookupError, psutil.Error):
            return [self.pid(0), self.pid(1), self.launcher()]
        return []

    # Processes.

    def pid(self, rank: int) -> int:
        """The process of a rank, as it recorded it last. Raises LookupError before."""
        pid = int([event["pid"] for event in self.events(rank) if event["type"] == "run"][-1])
        self._seen.add(pid)
        return pid

    def launcher(self) -> int:
        """The process that starts the ranks."""
        pid = int(json.loads(self.run.launcher.read_text())["pid"])
        self._seen.add(pid)
        return pid

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit status of the console. Raises TimeoutExpired."""
        return self.console.wait(limit_s)

    def until(self, found: Callable[[], Any]) -> Any:
        """What `found` returns when that is true. Raises TimeoutError."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(LookupError, psutil.Error, OSError):
                if value := found():
                    return value
            time.sleep(0.02)
        raise TimeoutError(f"{self.said()[-2000:]}\n{self.log()[-2000:]}")

    def trains(self, steps: int = 5, since_t: float = 0.0) -> float:
        """Wait until so many steps were recorded after a time; returns when (Unix time in seconds)."""

        def found() -> float:
            events = [event for event in self.events(0) if event["t"] >= since_t]
            begin = max((at for at, event in enumerate(events) if event["type"] == "run"), default=None)
            if begin is None and since_t:
                return 0.0
            windows = [event for event in events[begin or 0 :] if event["type"] == "window"]
            return float(windows[0]["t"]) if sum(event["steps"] for event in windows) >= steps else 0.0

        self.until(lambda: self.pid(0) and self.pid(1) and self.launcher())
        return float(self.until(found))

    # What it says.

    def events(self, rank: int) -> list[dict[str, Any]]:
        """The record of a rank."""
        path = self.run.events if rank == 0 else self.run.ranks / str(rank) / "events.jsonl"
        try:
            return [json.loads(line) for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")]
        except OSError:
            return []

    def marks(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """The marks of a kind in the record of a rank."""
        return [event for event in self.events(rank) if event["type"] == "mark" and event["kind"] == kind]

    def end(self, rank: int = 0) -> dict[str, Any]:
        """The last end in the record of a rank; {} without one."""
        ends = [event for event in self.events(rank) if event["type"] == "end"]
        return ends[-1] if ends else {}

    def said(self) -> str:
        """What the console printed."""
        return "".join((self.folder / name).read_text(errors="replace") for name in ("err", "out"))

    def log(self) -> str:
        """console.log, which has the output of launcher and ranks."""
        return self.run.console_log.read_text(errors="replace") if self.run.console_log.exists() else ""

    def weights(self) -> dict[str, torch.Tensor]:
        """Those of the last checkpoint."""
        found: dict[str, torch.Tensor] = newest_good(CheckpointStore(self.run.checkpoints, 2))[1]["model"]
        return found

    def plant(self, rank: int, fault: str) -> None:
        """Plant a fault, see the workload."""
        path = self.folder / f"new-fault-{rank}"
        path.write_text(fault)
        path.replace(self.folder / f"fault-{rank}")


GRACE_S = 40.0  # torchrun gives ranks 30 s to end


def launch(ranks: int, module: str, *words: object, limit_s: float) -> list[Any]:
    """Run the module with a folder and these arguments; what its ranks wrote into FOLDER/RANK.json, in their order.

    Raises RuntimeError if a rank fails or takes too long.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory(prefix="ndd-ranks-") as folder, tempfile.TemporaryFile() as log:
        launcher = subprocess.Popen(
            [*command, "-m", module, folder, *map(str, words)], stdout=log, stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            launcher.wait(limit_s)
        except subprocess.TimeoutExpired:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(GRACE_S)
            launcher.kill()
            launcher.wait()
        if launcher.returncode:
            log.seek(0)
            text = log.read().decode("utf-8", "replace")
            raise RuntimeError(f"{ranks} ranks failed ({launcher.returncode}): {text[-2000:]}")
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def finish(folder: str, found: object) -> NoReturn:
    """Of a rank: write what it found, and end its process, whose end gloo's threads may hold up."""
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
