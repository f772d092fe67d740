"""Records docs/walkthroughs.md again: `python -m benchmarks.walkthroughs [NAME ...]`, about 5 minutes for each script.

Every block of the page between `<!-- recorded: NAME PART -->` and `<!-- end -->` is what a terminal shows: 80x24 for
screens, the output for commands, wrapped between words. The scripts run in a temporary folder; the page is written at
the end of each script. Nothing else should run meanwhile.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from .terminal import Screen

ROOT = Path(__file__).parents[1]
PAGE, SCRIPTS = ROOT / "docs" / "walkthroughs.md", ROOT / "docs" / "walkthroughs"
# Longest run of a command, and how long a script trains before its screen is taken.
LIMIT_S, TRAINS_S = 900.0, 30.0
# Lines of output are wrapped at this width.
WIDTH = 96
_PROGRAM = [sys.executable, "-m", "ndd_console"]


@dataclass(frozen=True)
class Story:
    """A script. command: how it is trained. tries, after: what follows it, as lines of a shell."""

    command: str
    tries: tuple[str, ...]
    after: tuple[str, ...]


def _fixed(name: str, change: str, command: str) -> tuple[str, ...]:
    return (
        f"ndd-console try {name}-001 {change} --apply",
        f"ndd-console run --headless --run {name}-fixed -- {command}",
        f"ndd-console compare {name}-001 {name}-fixed",
    )


STORIES = {
    "mnist": Story(
        "python mnist.py --epochs 5",
        ("ndd-console try last --set loader.workers=1 --budget 120",),
        (),
    ),
    "lstm": Story(
        "python lstm.py --epochs 3",
        ("ndd-console try last --set run.threads=2",),
        _fixed("lstm", "--set run.threads=2", "python lstm.py --epochs 3"),
    ),
    "dcgan": Story(
        "python dcgan.py --niter 6",
        (
            "ndd-console try last --set loader.workers=0 --budget 120",
            "ndd-console try last --set optimizer.implementation=fused",
        ),
        _fixed("dcgan", "--set loader.workers=0", "python dcgan.py --niter 6"),
    ),
    "gpt": Story(
        "python gpt.py max_iters=2000",
        ("ndd-console try last --arg eval_iters=20",),
        (
            "ndd-console run --headless --run gpt-fixed -- python gpt.py max_iters=2000 eval_iters=20",
            "ndd-console compare gpt-001 gpt-fixed",
        ),
    ),
    "imagenet": Story(
        "python imagenet.py --epochs 2",
        (
            "ndd-console try last --set speed.channels_last=true --budget 120",
            "ndd-console try last --set precision.amp=bf16 --budget 120",
        ),
        _fixed("imagenet", "--set speed.channels_last=true", "python imagenet.py --epochs 2"),
    ),
}


class Shown(Screen):
    """A program in a terminal."""

    def __init__(self, words: list[str], folder: Path, rows: int, columns: int = 80) -> None:
        # The scripts and the console run in this Python; its warnings are not part of the page.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        super().__init__(words, columns, rows, folder, PATH=path, PYTHONWARNINGS="ignore")

    def look(self, seconds: float) -> bool:
        """Show what comes for some seconds; whether the program continues."""
        self.drain(seconds)
        return not self.ended

    def type(self, text: str, seconds: float = 2.0) -> bool:
        self.press(text.encode())
        return self.look(seconds)

    @property
    def lines(self) -> list[str]:
        """What is shown, without empty lines at the end."""
        found = [line.rstrip() for line in self.screen.display]
        while found and not found[-1]:
            found.pop()
        return found


def screens(story: Story, folder: Path) -> dict[str, list[str]]:
    """The live screen and the diagnosis while the script trains; then it trains to its end."""
    terminal = Shown([*_PROGRAM, "run", "--", *story.command.split()], folder, 24)
    begun = time.monotonic()
    while terminal.look(1) and "backward" not in "".join(terminal.lines):
        if time.monotonic() - begun > LIMIT_S:
            raise SystemExit(f"{story.command} did not train")
    terminal.look(TRAINS_S)
    found = {"live": terminal.lines}
    terminal.type("d")
    found["diagnosis"] = terminal.lines
    terminal.type("\x1b")
    terminal.type("t")
    found["change"] = terminal.lines
    terminal.type("\x1b")
    while time.monotonic() - begun < LIMIT_S:
        if not terminal.look(2) or "done" in terminal.lines[0]:
            break
    terminal.type("q", 5)
    return found


def shown(line: str, folder: Path) -> list[str]:
    """What a terminal shows after a command; questions are answered with yes."""
    words = line.split()
    program = _PROGRAM if words[0] == "ndd-console" else [words[0]]
    terminal = Shown([*program, *words[1:]], folder, 120, 500)
    begun = time.monotonic()
    while terminal.look(1) and time.monotonic() - begun < LIMIT_S:
        if "[y/N]" in "".join(terminal.lines[-1:]):
            terminal.type("y\r")
    output = terminal.lines
    if " run " in line:  # the output of the script, then the summary
        start = next((at for at, text in enumerate(output) if text.startswith("done:")), 0)
        output = output[start:]
    found = [f"$ {line}"]
    for text in output:
        text = text.replace(f"{folder}/", "").replace(str(folder), ".")
        found += textwrap.wrap(text, WIDTH, subsequent_indent="    ") if len(text) > WIDTH else [text]
    return found


def replaced(page: str, name: str, lines: list[str]) -> str:
    """The page with a recorded block replaced. Raises SystemExit if it has none of this name."""
    pattern = re.compile(
        rf"(<!-- recorded: {re.escape(name)} -->\n\n```text\n).*?(```\n\n<!-- end -->)", re.DOTALL
    )
    if not pattern.search(page):
        raise SystemExit(f"{PAGE.name} has no block <!-- recorded: {name} -->")
    text = "".join(f"{line}\n" for line in lines)
    return pattern.sub(lambda found: found[1] + text + found[2], page)


def record(name: str, story: Story) -> None:
    """Record one script and write the page."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as made:
        folder = Path(made)
        shutil.copy(SCRIPTS / f"{name}.py", folder)
        found = screens(story, folder)
        for number, line in enumerate((*story.tries, *story.after), 1):
            print(f"{name}: {line}", file=sys.stderr, flush=True)
            found[str(number)] = shown(line, folder)
    page = PAGE.read_text(encoding="utf-8")
    for part, lines in found.items():
        if f"<!-- recorded: {name} {part} -->" in page:
            page = replaced(page, f"{name} {part}", lines)
        else:
            print(f"\n{name} {part}, which the page does not show:\n" + "\n".join(lines), file=sys.stderr)
    PAGE.write_text(page, encoding="utf-8")


def main() -> int:
    names = sys.argv[1:] or list(STORIES)
    if unknown := [name for name in names if name not in STORIES]:
        raise SystemExit(f"{', '.join(unknown)}: there is no such script; allowed: {', '.join(STORIES)}")
    for name in names:
        record(name, STORIES[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
