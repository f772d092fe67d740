"""What can be trained from a folder: its configuration files and own workloads, found without importing anything."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli
import tomlkit

import ndd_profiles
from ndd_engine.config import Config, read
from ndd_engine.errors import NddError
from ndd_engine.text import printable

# Files to look at, and the bytes of the largest one: the home screen must not search a disk.
MOST_FILES = 200
LARGEST_BYTES = 1 << 20
# Keys of a configuration file besides its sections.
_BESIDES = frozenset({"extends"})
# Parts that every factory returns.
_PARTS = frozenset({"model", "train_data"})


@dataclass(frozen=True, slots=True)
class StartRow:
    """Something that can be trained: a built-in workload, or a configuration file or own workload of the folder.

    epochs: how long to train; None as configured, which an own workload is not.
    """

    name: str
    title: str
    text: str
    kind: Literal["workload", "file", "own"] = "workload"
    epochs: int | None = None


def folder_rows() -> list[StartRow]:
    """The configuration files of the working directory, then its own workloads; by name."""
    factories = [
        StartRow(f"{path.stem}:{factory.name}", "your own workload", "", kind="own")
        for path in _files("*.py")
        if path.stem.isidentifier()
        for factory in _functions(path)
    ]
    return [*_configurations(), *factories]


def details(row: StartRow) -> tuple[str, ...]:
    """A page about what would be trained: how to start it from a shell, and its text."""
    if row.kind == "file":
        return (f"ndd-console train {row.name}", *_problems(Path(row.name)), "", *_text(Path(row.name)))
    lines = [f"ndd-console train --workload {row.name}", row.title, *filter(None, [row.text]), ""]
    if row.kind == "own":
        module, _, name = row.name.partition(":")
        path = Path(f"{module}.py")
        factory = next((one for one in _functions(path) if one.name == name), None)
        if factory is not None:
            lines += [f"{path} line {factory.lineno}", *(ast.get_docstring(factory) or "").splitlines()]
        return tuple(map(printable, lines))
    defaults = ndd_profiles.read("workloads", row.name).get("defaults", {})
    about = "its defaults, where they differ from those of `ndd-console config`:"
    return (*lines, about, *tomlkit.dumps(defaults).splitlines())


def _configurations() -> Iterator[StartRow]:
    known = frozenset(Config.model_fields) | _BESIDES
    for path in _files("*.toml"):
        try:
            table = tomli.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if table and known.issuperset(table):
            yield StartRow(path.name, _about(path, table), "", kind="file")


def _about(path: Path, table: dict[str, Any]) -> str:
    """The workload and the size that a configuration or a file that it extends names."""
    workload = table.get("workload")
    values = dict(workload) if isinstance(workload, dict) else {}
    if "extends" in table:
        with contextlib.suppress(NddError):  # the page about it says what is wrong
            draft = read(path)
            values = {"name": draft.workload, "size": draft.size}
    parts = [str(values[key]) for key in ("name", "size") if isinstance(values.get(key), str)]
    return " ".join(["configuration:", *parts]) if parts else "configuration"


def _functions(path: Path) -> list[ast.FunctionDef]:
    """The factories of a file: functions of one argument that return a model and its data."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [one for one in tree.body if isinstance(one, ast.FunctionDef) and _is_factory(one)]


def _is_factory(function: ast.FunctionDef) -> bool:
    takes = function.args
    needed = len(takes.posonlyargs) + len(takes.args) - len(takes.defaults)
    if function.name.startswith("_") or needed > 1 or not (takes.posonlyargs or takes.args or takes.vararg):
        return False
    for node in ast.walk(function):
        names: set[Any] = set()
        if isinstance(node, ast.Dict):
            names = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords}
        if names >= _PARTS:
            return True
    return False


def _files(pattern: str) -> list[Path]:
    try:
        paths = sorted(itertools.islice(Path().glob(pattern), MOST_FILES))
        return [path for path in paths if path.is_file() and path.stat().st_size <= LARGEST_BYTES]
    except OSError:
        return []


def _problems(path: Path) -> tuple[str, ...]:
    try:
        read(path).resolve()
    except NddError as error:
        return tuple(printable(line) for line in str(error).splitlines())
    return ()


def _text(path: Path) -> list[str]:
    try:
        return [printable(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError as error:
        return [f"{printable(str(path))} cannot be read: {error.strerror or error}"]
