"""The source of a script as it was when its run began: the commit of its repository, and its files, for a diff."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ndd_engine.errors import UsageError
from ndd_engine.files import open_regular, write_text
from ndd_engine.text import printable

from .rundir import RunDir

# Bytes of the largest file that is kept, and of all together; number of files.
_MOST_OF_ONE, _MOST, _MOST_FILES = 64 << 10, 256 << 10, 32
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Sources:
    """commit: of the repository, "" without one. files: name -> text, of the script and of those beside it."""

    commit: str = ""
    files: dict[str, str] = field(default_factory=dict)

    def keep(self, run: RunDir) -> None:
        """Write them into the folder of a run; without them only `compare` says less."""
        with suppress(OSError, UsageError):
            write_text(run.sources, json.dumps(asdict(self)) + "\n")

    def diff(self, later: Sources) -> list[str]:
        """The unified diff of the files that both have or that one has, with control characters escaped."""
        lines: list[str] = []
        for name in sorted(self.files.keys() | later.files.keys()) if self.files and later.files else ():
            before, after = (side.files.get(name, "").splitlines() for side in (self, later))
            lines += difflib.unified_diff(before, after, f"A/{name}", f"B/{name}", n=1, lineterm="")
        return [printable(line) for line in lines]


def sources_of(run: RunDir) -> Sources:
    """What was kept of a run; empty if that is nothing or damaged."""
    try:
        body = json.loads(_text(run.sources, 4 * _MOST))
        files = {str(name): str(text) for name, text in body["files"].items()}
        return Sources(body["commit"] if _COMMIT.fullmatch(str(body["commit"])) else "", files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Sources()


def sources_beside(main: Path | None, folder: Path) -> Sources:
    """Those of a script, read now. main: its file, if it is known; folder: where it runs."""
    place = folder if main is None else main.parent
    files, left = dict[str, str](), _MOST
    for path in () if main is None else _python_files(main):
        with suppress(OSError, ValueError):
            text = _text(path, min(_MOST_OF_ONE, left))
            files[path.name], left = text, left - len(text.encode())
    return Sources(_commit(place), files)


def _python_files(main: Path) -> Iterator[Path]:
    """The script, then the first few files beside it."""
    yield main
    with suppress(OSError):
        beside = sorted(
            path for path in main.parent.iterdir() if path.suffix == ".py" and path.name != main.name
        )
        yield from beside[: _MOST_FILES - 1]


def _text(path: Path, most: int) -> str:
    """A file. Raises OSError, and ValueError if it is larger or no text."""
    with os.fdopen(open_regular(path), "rb") as file:
        body = file.read(most + 1)
    if len(body) > most:
        raise ValueError("too large")
    return body.decode()


def _commit(place: Path) -> str:
    """The commit that is checked out in the repository of a folder; "" without one. Runs no program."""
    for folder in (place, *place.parents):
        git = folder / ".git"
        with suppress(OSError, ValueError):
            if git.is_file():  # of a work tree, or of a submodule
                git = folder / _text(git, 4096).strip().removeprefix("gitdir: ")
            return _resolved(git)
    return ""


def _resolved(git: Path) -> str:
    """Raises OSError, ValueError."""
    head = _text(git / "HEAD", 4096).strip()
    if not head.startswith("ref: "):
        return head if _COMMIT.fullmatch(head) else ""
    name, shared = head.removeprefix("ref: "), git
    with suppress(OSError):
        shared = git / _text(git / "commondir", 4096).strip()
    for place in (git, shared):
        with suppress(OSError):
            found = _text(place / name, 4096).strip()
            return found if _COMMIT.fullmatch(found) else ""
    packed = (line.split() for line in _text(shared / "packed-refs", 1 << 22).splitlines())
    return next((line[0] for line in packed if line[1:] == [name] and _COMMIT.fullmatch(line[0])), "")
