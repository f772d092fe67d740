"""Records tour.svg, the moving picture of the README: a script is observed, its finding is tried, the edit is applied.

    python screenshots/tour.py [KEY=VALUE]

Types into a real shell, in a folder of its own, and keeps what the terminal shows. All figures are those of this run on
this machine. Only waiting is shortened. KEY=VALUE is tried instead of the proposed change, which a busy machine may not
have. If the loader is not the first finding, or the change is not measured as faster, nothing is written.
"""

from __future__ import annotations

import copy
import os
import re
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import ptyprocess
import pyte
from moving import Frame, animated, rows_of

FOLDER = Path(__file__).parent
TOUR = FOLDER / "tour.svg"
COLUMNS, ROWS = 90, 27
PROMPT = "$ "
READY = r"(?m)^\$\Z"  # the shell waits for a command
KEY_S, HOLD_S = 0.04, 3.2
# Real seconds: how long the run is watched, and how long a step of the tour may take.
WATCHED_S, PATIENCE_S = 45.0, 300.0


class TourError(Exception):
    """The tour did not go as it should."""


class Shell:
    """A shell in a terminal, whose screens are recorded. frames: in playing time, which passes only when told to."""

    def __init__(self, folder: Path) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {
            "PATH": path, "HOME": str(folder), "TERM": "xterm-256color", "LANG": "C.UTF-8", "PS1": PROMPT,
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = ["bash", "--norc", "--noprofile"]
        self.process = ptyprocess.PtyProcess.spawn(
            command, cwd=str(folder), env=environment, dimensions=(ROWS, COLUMNS)
        )
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.frames: list[Frame] = []
        self._t = 0.0

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def read(self, seconds: float) -> None:
        """Show what arrives within this time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self.process.fd], [], [], left)[0]:
                data = os.read(self.process.fd, 65536)
                # The emulator knows no kitty keyboard protocol and prints its sequences.
                data = data.replace(b"\x1b[>", b"\x1b[?").replace(b"\x1b[<u", b"")
                for part in re.split(rb"(\x1b\[\?1049[hl])", data):
                    self._feed(part)

    def _feed(self, data: bytes) -> None:
        """Show output. The emulator has no second screen, so the first one is kept and restored here."""
        screen = self._screen
        if data == b"\x1b[?1049h":
            self._first = copy.deepcopy(screen.buffer), screen.cursor.x, screen.cursor.y
            screen.erase_in_display(2)
        elif data == b"\x1b[?1049l":
            screen.buffer, screen.cursor.x, screen.cursor.y = self._first
            screen.cursor.hidden = False
        else:
            self._stream.feed(data)

    def keep(self, seconds: float) -> None:
        """Record the screen, if it differs from the frame before, and let this much playing time pass."""
        rows = rows_of(self._screen)
        if not self.frames or self.frames[-1].rows != rows:
            self.frames.append(Frame(self._t, rows))
        self._t += seconds

    def type(self, line: str) -> None:
        """Type a line into the shell."""
        for key in line:
            self.press(key)
            self.keep(KEY_S)
        self.press("\r")

    def press(self, key: str) -> None:
        os.write(self.process.fd, key.encode())
        self.read(0.05)

    def until(self, pattern: str, playing_s: float, at_least_s: float = 0.0) -> re.Match[str]:
        """Wait until the screen shows the pattern, for this much playing time. Returns the match."""
        begin, seen = time.monotonic(), []
        while not (found := re.search(pattern, self.text)) or time.monotonic() - begin < at_least_s:
            if time.monotonic() - begin > PATIENCE_S:
                raise TourError(f"not on the screen: {pattern}\n{self.text}")
            self.read(0.25)
            seen.append(rows_of(self._screen))
        distinct = [rows for place, rows in enumerate(seen) if place == 0 or rows != seen[place - 1]]
        count = min(len(distinct), int(playing_s / 0.2))
        for place in range(count):
            self.frames.append(Frame(self._t, distinct[place * len(distinct) // count]))
            self._t += playing_s / count
        self.keep(0.0)
        return found


def take(change: str | None) -> list[Frame]:
    """The frames of the whole tour. change: tried instead of the proposed one. Raises TourError."""
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(FOLDER / "tour" / "train.py", name)
        shell = Shell(Path(name))
        try:
            shell.until(READY, 0.3)
            shell.type("ndd-console run -- python train.py")
            proposed = r".*?press t to try (loader\.workers=\d+)" if change is None else "()"
            shown = shell.until(rf"(?s)── input-bound{proposed}", 5.0, WATCHED_S)
            shell.keep(2.5)
            shell.press("q")
            shell.until("stop the script", 0.4)
            shell.press("s")
            shell.until(READY, 0.6)
            shell.type(f"ndd-console try last --set {change or shown[1]} --apply")
            shell.until(r"Write \S*train\.py\? \[y/N\]:", 2.8)
            shell.keep(1.2)
            shell.press("y")
            shell.keep(0.3)
            shell.press("\r")
            shell.until(r"wrote \S*train\.py", 0.3)
            return shell.frames
        finally:
            shell.press("\x03")  # ends the script of a tour that failed
            shell.read(5.0)
            shell.process.terminate(force=True)


def main(arguments: Sequence[str]) -> int:
    """Record the tour and write it. Returns the exit status."""
    try:
        frames = take(arguments[0] if arguments else None)
    except TourError as error:
        sys.stderr.write(f"tour.svg was not written: {error}\n")
        return 1
    title = "ndd-console observes a training script, measures a change and applies it"
    TOUR.write_text(animated(frames, HOLD_S, title), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
