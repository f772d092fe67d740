"""How long a hang lasts until a headless run tells it, and until a screen of 80 x 24 shows it, with default settings.

The script writes the time when it begins to hang into the file `hangs-since`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from benchmarks.common import Options, Table, say
from benchmarks.terminal import Screen

from ndd_engine.diagnose import CAUSES
from qa.console import python_words

from .script_cases import FAULTS, HANGS, Fault

SCRIPT = Path(__file__).parents[1] / "scripts" / HANGS
KINDS = tuple(fault for fault in FAULTS if fault.causes == ("hang",))
NAME = CAUSES["hang"]
# The target, from the beginning of the hang on; and when to stop waiting.
TARGET_S, PATIENCE_S = 15.0, 28.0
START_S = 120.0


@dataclass(frozen=True)
class Told:
    """seconds: from the hang on, None if it was not told. placed: whether the place was told as well."""

    seconds: float | None
    placed: bool = False
    text: str = ""

    @property
    def right(self) -> bool:
        return self.seconds is not None and self.seconds <= TARGET_S

    def cell(self) -> str:
        if self.seconds is None:
            return "not told"
        return f"{self.seconds:.1f}" + ("" if self.placed else ", without the place")


def table(options: Options) -> Table:
    """Each kind headless and on a screen, at both levels; with --quick at the first one."""
    found = Table(
        f"seconds from a hang until it is named, at most {TARGET_S:.0f}",
        ("hang", "headless", "on a screen of 80 x 24", ""), markdown=True,
    )  # fmt: skip
    right = done = 0
    for fault in options.cases(KINDS):
        for level in fault.levels[: 1 if options.quick else 2]:
            told = []
            for way in (headless, on_screen):
                say(f"script_faults: {fault.name} {level:g} {way.__name__}")
                with TemporaryDirectory(prefix="ndd-hangs-") as folder:
                    told.append(way(Path(folder), fault, level))
            done, right = done + 2, right + sum(one.right for one in told)
            wrong = "" if all(one.right for one in told) else "WRONG"
            found.add(f"{fault.name} {level:g}", *(one.cell() for one in told), wrong)
    found.note(f"named in time: {right} of {done}; the cause ({NAME!r}), in the default settings")
    return found


def headless(folder: Path, fault: Fault, level: float) -> Told:
    """The first line that names it."""
    folder.mkdir(exist_ok=True)
    command = [*_command(fault, level, "--headless")]
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    lines: list[tuple[float, str]] = []

    def listen() -> None:
        lines.extend((time.time(), line) for line in process.stdout or ())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()

    def told() -> tuple[float, str] | None:
        return next(((t, line) for t, line in list(lines) if NAME in line), None)

    with _ended(process.pid):
        deadline = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < deadline and not told():
            if (since := _since(folder)) is not None and time.time() > since + PATIENCE_S:
                break
            time.sleep(0.05)
    process.wait()
    listener.join()
    return _told(folder, fault, told())


def on_screen(folder: Path, fault: Fault, level: float) -> Told:
    """The first screen that has its name."""
    folder.mkdir(exist_ok=True)
    with Screen(_command(fault, level), 80, 24, folder) as terminal, _ended(int(terminal.child.pid)):
        deadline = time.monotonic() + START_S
        while not terminal.ended and time.monotonic() < deadline:
            if (since := _since(folder)) is not None and time.time() > since + PATIENCE_S:
                break
            chunk = terminal.read(0.2)
            if chunk is None:
                continue
            shown = terminal.screen.display
            if any(NAME in row for row in shown):
                return _told(folder, fault, (chunk.t, " ".join(row.strip() for row in shown)))
    return Told(None, text="\n".join(terminal.screen.display))


def _told(folder: Path, fault: Fault, found: tuple[float, str] | None) -> Told:
    since = _since(folder)
    if found is None or since is None:
        return Told(None)
    t, text = found
    return Told(t - since, fault.function in text, text)


def _command(fault: Fault, level: float, *more: str) -> list[str]:
    words = python_words(str(SCRIPT), fault.name, f"{level:g}", ranks=fault.ranks)
    return [sys.executable, "-m", "ndd_console", "run", *more, "--run", "it", "--", *words]


def _since(folder: Path) -> float | None:
    """When it began to hang."""
    try:
        return float((folder / "hangs-since").read_text("utf-8"))
    except (OSError, ValueError):
        return None


@contextmanager
def _ended(pid: int) -> Iterator[None]:
    """Kill it and all that it has started, whatever their state: they hang."""
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
