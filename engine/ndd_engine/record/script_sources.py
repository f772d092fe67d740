"""The text of an observed script and the commit of its repository, kept with a run, so that `compare` shows changes."""

from __future__ import annotations

import ast
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
    """commit: of the repository, "" without one. files: path -> text, of the script and then of what it imports."""

    commit: str = ""
    files: dict[str, str] = field(default_factory=dict)

    def keep(self, run: RunDir) -> None:
        """Write them into the folder of a run; without them only `compare` says less."""
        with suppress(OSError, UsageError):
            write_text(run.sources, json.dumps(asdict(self)) + "\n")

    def diff(self, later: Sources) -> list[str]:
        """The unified diff of the files that both have or that one has, with control characters escaped.

        The scripts themselves, which are the first files, are compared even if they have different names.
        """
        if not (self.files and later.files):
            return []
        scripts = next(iter(self.files)), next(iter(later.files))
        others = sorted((self.files.keys() | later.files.keys()) - {*scripts})
        lines: list[str] = []
        for mine, other in (scripts, *zip(others, others, strict=True)):
            before, after = self.files.get(mine, "").splitlines(), later.files.get(other, "").splitlines()
            lines += difflib.unified_diff(before, after, f"A/{mine}", f"B/{other}", n=1, lineterm="")
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
    """Those of a script, read now. main: its file, if it is known; folder: where it runs.

    Beside the script itself, those that it imports, or that are imported by these, as far as they lie beside it.
    """
    if main is None:
        return Sources(_commit(folder))
    root = main.parent
    while (root / "__init__.py").exists() and root != root.parent:  # of a module that is run by `python -m`
        root = root.parent
    files, left, reached = dict[str, str](), _MOST, [main]
    for path in reached:  # which grows meanwhile
        with suppress(OSError, ValueError):
            text = _text(path, min(_MOST_OF_ONE, left))
            files[path.relative_to(root).as_posix()], left = text, left - len(text.encode())
            reached += [one for one in _imported(text, path, root) if one not in reached]
        if len(files) == _MOST_FILES:
            break
    return Sources(_commit(main.parent), files)


def _imported(text: str, path: Path, root: Path) -> Iterator[Path]:
    """The files below this folder that a file imports, by its text alone."""
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in nodes:
        names: list[str] = []
        place = root
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                place = path.parents[min(node.level, len(path.parents)) - 1]
            # What is imported from a package may be a module of it.
            names = [module, *(f"{module}.{one.name}".lstrip(".") for one in node.names)]
        for name in filter(None, names):
            found = place.joinpath(*name.split("."))
            for file in (found.with_name(f"{found.name}.py"), found / "__init__.py"):
                if file.is_relative_to(root) and file.is_file():
                    yield file


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
