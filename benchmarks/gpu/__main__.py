"""`python -m benchmarks.gpu [--quick]`: measure this machine's GPU and write one Markdown file.

`make gpu` installs what this needs first (see setup). Each part is a process of its own with a time limit, so a crash,
a hang or missing memory costs only that part. The file is rewritten whenever there is a new figure.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from . import page as pages
from .figures import one_line, read
from .page import Entry, Page
from .parts import FULL_S, MACHINE, QUICK_S, ROOT, Part, parts
from .pytest_figures import VARIABLE
from .running import adopt, carry_out, last_lines
from .setup import BEGAN, EXIT_INTERRUPTED, EXIT_NO_GPU, HOW, options, unusable

# What is left of the whole time for a part to start at all.
LEAST_S = 10.0
EXIT_USAGE = 2


class Session:
    """Runs the parts and keeps the file up to date. end: of time.monotonic()."""

    def __init__(
        self, wanted: tuple[Part, ...], device: str, effort: str, end: float, limit_s: float, path: Path
    ) -> None:
        self.device, self.effort, self.end, self.path = device, effort, end, path
        self.page = Page([Entry(part) for part in wanted], effort, limit_s, setup=os.environ.get(HOW, ""))
        self.folder = Path(tempfile.mkdtemp(prefix="ndd-gpu-"))
        self.stopped = ""
        self._began = end - limit_s
        self._seen = -1

    def run(self) -> int:
        """Returns the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        try:
            self.page.write(self.path)  # not only after an hour
        except OSError as error:
            say(f"cannot write {self.path}: {error.strerror}")
            return EXIT_USAGE
        count = len(self.page.entries)
        for index, entry in enumerate(self.page.entries, start=1):
            if not self._allowed(entry):
                continue
            limit_s = min(entry.part.limit_s(self.effort), self.end - time.monotonic())
            say(f"{index:2} of {count}  {entry.part.section}: {entry.part.name} (up to {limit_s:.0f} s)")
            self._carry_out(entry, limit_s)
            say(
                f"          {entry.state}{f': {entry.why}' if entry.why else ''}; {len(entry.figures)} figures"
            )
        self.page.state = f"stopped by {self.stopped}" if self.stopped else "complete"
        self._write()
        say(self.page.summary())
        if self.page.failed:
            say(f"output of all parts: {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        say(f"wrote {self.path}")
        if self.stopped:
            return EXIT_INTERRUPTED
        return 1 if self.page.failed else 0

    def _allowed(self, entry: Entry) -> bool:
        entry.state = pages.LEFT_OUT
        if self.stopped:
            entry.why = f"stopped by {self.stopped}"
        elif not entry.part.limit_s(self.effort):
            entry.why = "not part of --quick"
        elif self.end - time.monotonic() < LEAST_S:
            entry.why = "no time left"
        else:
            return True
        return False

    def _carry_out(self, entry: Entry, limit_s: float) -> None:
        entry.state, self._seen = pages.RUNNING, -1
        slug = f"{self.page.entries.index(entry):02}-{entry.part.name}"
        out, log = self.folder / f"{slug}.jsonl", self.folder / f"{slug}.log"

        def look() -> None:
            size = out.stat().st_size if out.exists() else 0
            if size != self._seen:
                self._seen, entry.figures = size, read(out)
                self._write()

        environment = {**os.environ, VARIABLE: str(out), "PYTHONUNBUFFERED": "1"}
        places = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(places)
        # A part stops by itself before its limit, and writes what it has.
        command = entry.part.command(sys.executable, out, self.device, self.effort, max(limit_s - 5, 5))
        begin = time.monotonic()
        why = carry_out(command, log, limit_s, ROOT, environment, look, lambda: bool(self.stopped))
        entry.seconds = time.monotonic() - begin
        if entry.part.module == "pytest" and why.startswith("exit status 1:"):
            why = ""  # some tests failed, and are figures
        if not why and not entry.figures:
            why = "no figures"
        entry.state, entry.why = ("failed", why) if why else (pages.DONE, "")
        entry.log = [one_line(line, 200) for line in last_lines(log)] if why else []
        self._write()

    def _write(self) -> None:
        self.page.seconds = time.monotonic() - self._began
        try:
            self.page.write(self.path)
        except OSError as error:
            say(f"cannot write {self.path}: {error.strerror}")

    def _stop(self, number: int, _frame: object) -> None:
        self.stopped = signal.Signals(number).name
        os.write(2, b"stopping; what was measured is kept\n")  # print may be what was interrupted


def main() -> int:
    """Returns 0 if every part ran to its end, whatever its figures; 1 if not; 3 without a GPU; 130 if interrupted.

    2 for a wrong option, or a file that cannot be written.
    """
    given = options(__doc__)
    effort = "smoke" if given.cpu else "quick" if given.quick else "full"
    if not given.cpu and (why := unusable(sys.executable)):
        say(f"make gpu needs an NVIDIA GPU: {why}")
        return EXIT_NO_GPU
    wanted = tuple(part for part in parts() if not given.only or part.words & {*given.only, MACHINE})
    known = set().union(*(part.words for part in parts()))
    if unknown := [name for name in given.only if name not in known]:
        say(f"unknown part {', '.join(unknown)}; allowed: {', '.join(sorted(known))}")
        return EXIT_USAGE
    limit_s = given.minutes * 60 if given.minutes else (QUICK_S if effort == "quick" else FULL_S)
    # Installing counts in a full run, which has to end within the hour.
    waited = time.time() - float(os.environ.get(BEGAN, "inf")) if effort == "full" else 0.0
    end = time.monotonic() + limit_s - max(waited, 0.0)
    path = given.output or Path(time.strftime("gpu-%Y-%m-%d-%H%M%S.md"))
    session = Session(wanted, "cpu" if given.cpu else "cuda", effort, end, limit_s, path.absolute())
    say(f"writing {path}; Ctrl-C stops and keeps it")
    adopt()
    return session.run()


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
