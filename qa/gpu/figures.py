"""Figures: what a part measures, one JSON object per line, so that a part that crashes keeps what it had."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from qa import console as kit
from qa.console import console, read_lines

EFFORTS = ("full", "quick", "smoke")
PASS, FAIL, SKIPPED, INFO, FACT, UNCLEAR = "pass", "fail", "skipped", "info", "fact", "inconclusive"
NO_GPU = "needs a CUDA GPU"


@dataclass(frozen=True)
class Figure:
    """One row of the result. value, target: as text. verdict: pass, fail, skipped, inconclusive, info or fact (of the
    machine), or the verdict of a claim. why: the reason for it, or a note.
    """

    name: str
    value: str = ""
    target: str = ""
    verdict: str = INFO
    why: str = ""

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Raises ValueError or TypeError for any other line."""
        body = json.loads(line)
        if not isinstance(body, dict) or not all(isinstance(text, str) for text in body.values()):
            raise ValueError("not a figure")
        return cls(**body)


@dataclass(frozen=True)
class Task:
    """What the process of a part is asked for.

    out: the file for figures. device: "cuda" or "cpu". effort: "full", "quick", or "smoke" for the least that shows
    that the part works. deadline: of time.monotonic(); a part that has more to measure stops before. args: its own.
    """

    out: Path
    device: str
    effort: str
    deadline: float
    args: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return self.deadline - time.monotonic()

    def of(self, full: float, quick: float, smoke: float) -> float:
        """The value for this effort."""
        return (full, quick, smoke)[EFFORTS.index(self.effort)]

    def put(self, name: str, value: str = "", target: str = "", verdict: str = INFO, why: str = "") -> None:
        """Record a figure at once."""
        append(self.out, Figure(name, value, target, verdict, why))

    def check(self, name: str, value: str, target: str, reached: bool, why: str = "") -> None:
        """Record a figure that reaches its target or not."""
        self.put(name, value, target, PASS if reached else FAIL, why)

    def skip(self, name: str, why: str = NO_GPU) -> None:
        """Record a figure that is not measured."""
        self.put(name, verdict=SKIPPED, why=why)

    def check_gpu(self, name: str, value: str, target: str, reached: bool, why: str = "") -> None:
        """The same as `check`, of a figure that says nothing without a GPU."""
        if self.on_gpu:
            self.check(name, value, target, reached, why)
        else:
            self.skip(name)

    def console(self, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of ndd-console, which may not take all the time of the part; all it says goes into the log."""
        done = console(folder, *words, limit_s=max(self.left_s * 0.8, 5.0))
        print(done.stdout + done.stderr, flush=True)
        return done


def last(done: subprocess.CompletedProcess[str]) -> str:
    """The last lines of the output of a command."""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return one_line(" / ".join(lines[-6:])) if lines else "no output"


def append(path: Path, figure: Figure) -> None:
    """Add a line."""
    kit.append(path, json.dumps(asdict(figure)))


def read(path: Path) -> list[Figure]:
    """All figures so far; torn and strange lines are ignored."""
    return read_lines(path, Figure.from_json)


def one_line(text: object, most: int = 300) -> str:
    """The text in one line of at most `most` characters, without the names of private folders."""
    words = " ".join(str(text).split())
    for private, shown in ((str(Path.cwd()), "."), (str(Path.home()), "~")):
        if len(private) > 1:
            words = words.replace(private, shown)
    return words if len(words) <= most else words[: most - 1] + "…"
