"""The module of a user's own workload: found and looked through without importing it, and imported. No torch here."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ndd_engine
from ndd_engine.config.workload_sections import OwnSection
from ndd_engine.errors import ConfigError, NddError, Problem
from ndd_engine.text import printable

from .windows import Complaints

KEY = "workload.name"
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()
_ENGINE = Path(ndd_engine.__file__).resolve().parent
# A loader's worker sends its traceback as text.
_OF_A_WORKER = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)


def check(section: OwnSection, complaints: Complaints) -> None:
    """Complains when the module is not there, is not Python or does not define the factory.

    Nothing is imported: a mistake in a name is told at once, and before anything is written.
    """
    module, _, factory = section.name.partition(":")
    found, missing = _find(module, folders(section))
    if found is None:
        complaints.add(
            KEY, _not_found(module, missing, section), section.name, None, _alike(missing, section)
        )
        return
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        message = f"{top} is the name of a module of Python itself"
        complaints.add(KEY, message, section.name, suggestion="rename your file")
    elif found.origin is None or not found.has_location:
        complaints.add(KEY, f"{module} is a folder, not a module", section.name)
    elif found.origin.endswith(".py"):
        _look_through(Path(found.origin), factory, section.name, complaints)


def folders(section: OwnSection) -> list[str]:
    """Where the module is looked for before Python's own places: `workload.path`, then the current folder."""
    return list(dict.fromkeys((*section.path, str(Path.cwd()))))


def load(section: OwnSection) -> Callable[..., Any]:
    """The factory, its module imported. Raises ConfigError that names the line of the user's code.

    The folders stay importable: the loader's workers get the same ones, and unpickle the dataset by its module.
    """
    module_name, _, factory = section.name.partition(":")
    for folder in reversed(folders(section)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    importlib.invalidate_caches()
    expected, _ = _find(module_name, folders(section))
    with calling(f"importing {module_name}"):
        module = importlib.import_module(module_name)
    file = getattr(module, "__file__", None)
    if expected is not None and file and expected.origin and not _same(file, expected.origin):
        message = f"{module_name} is already the name of another module, {printable(file)}"
        raise ConfigError([_problem(section, message, f"rename {shown(expected.origin)}")])
    found = getattr(module, factory, None)
    if found is None:
        raise ConfigError([_problem(section, f"{module_name} has no {factory}")])
    if not callable(found):
        raise ConfigError([_problem(section, f"{factory} is {kind(found)}, not a function or class")])
    return found  # type: ignore[no-any-return]


def definition(factory: Callable[..., Any]) -> str:
    """Where a factory is written: "my_workload.py:12"; its own name where that is not known."""
    try:
        target = inspect.unwrap(factory)
        file, line = inspect.getsourcefile(target), inspect.getsourcelines(target)[1]
    except (TypeError, OSError):
        file, line = None, 0
    return f"{shown(file)}:{line}" if file else printable(getattr(factory, "__qualname__", "the factory"))


@contextmanager
def calling(what: str, advice: str | None = None, where: str = "workload") -> Iterator[None]:
    """Around a call of the user's code: what it raises becomes a ConfigError of one line, caused by the original.

    The line begins with the innermost place in the user's own files, else with `where`.
    """
    try:
        yield
    except NddError:
        raise
    except SystemExit as error:
        message = f"{what} ended the program (sys.exit)"
        advice = 'put what runs as a script under: if __name__ == "__main__":'
        raise ConfigError([Problem(place(error) or where, "", message, suggestion=advice)]) from error
    except Exception as error:
        raise ConfigError(
            [Problem(place(error) or where, "", f"{what} failed: {said(error)}", None, None, advice)]
        ) from error


def said(error: BaseException) -> str:
    """An exception in one line: its type and the first line of what it says."""
    lines = (error.msg if isinstance(error, SyntaxError) else str(error)).strip().splitlines()
    text = printable(lines[0]) if lines else "no message"
    return f"{type(error).__name__}: {text if len(text) <= 240 else text[:239] + '…'}"


def place(error: BaseException) -> str | None:
    """The innermost place of an error in the user's own files: "my_workload.py:12"; None when it is in none."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    # The user's code is called by the engine; whoever called the engine is not meant.
    first = next((index for index, (file, _) in enumerate(frames) if _is_engines(file)), 0)
    found = [(file, int(line)) for file, line in _OF_A_WORKER.findall(str(error))] or frames[first:]
    if isinstance(error, SyntaxError) and error.filename:
        found.append((error.filename, error.lineno or 0))
    return next((f"{shown(file)}:{line}" for file, line in reversed(found) if _is_users(file)), None)


def shown(file: str | Path) -> str:
    """A file as a user knows it: relative to the current folder when it lies in there."""
    path, here = Path(file), Path.cwd()
    return printable(str(path.relative_to(here) if path.is_relative_to(here) else path))


def kind(value: object) -> str:
    """What a value is: "an int"."""
    name = printable(type(value).__name__)
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not path.is_relative_to(_STANDARD) and not _is_engines(file)


def _is_engines(file: str) -> bool:
    return Path(file).resolve().is_relative_to(_ENGINE)


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _problem(section: OwnSection, message: str, suggestion: str | None = None) -> Problem:
    return Problem("workload", KEY, message, f'"{printable(section.name)}"', None, suggestion)


def _find(module: str, first: Sequence[str]) -> tuple[ModuleSpec | None, str]:
    """(where a dotted module lies, ""), or (None, the part of its name that is not there)."""
    importlib.invalidate_caches()
    places: list[str] = [*first, *sys.path]
    spec: ModuleSpec | None = None
    for index, part in enumerate(names := module.split(".")):
        # By its last name: with the dotted one, namespace packages would ask for an imported parent.
        spec = PathFinder.find_spec(part, places)
        if spec is None and index == 0:
            spec = _found_otherwise(part)
        if spec is None:
            return None, ".".join(names[: index + 1])
        places = list(spec.submodule_search_locations or ())
    return spec, ""


def _found_otherwise(top: str) -> ModuleSpec | None:
    """By the hooks of packages that were installed to be edited. Of a top-level name, nothing is imported."""
    try:
        return find_spec(top)
    except (ImportError, ValueError):
        return None


def _not_found(module: str, missing: str, section: OwnSection) -> str:
    if missing != module or "." in missing:
        return f"there is no module {missing}"
    looked = ", ".join(shown(folder) if folder != str(Path.cwd()) else folder for folder in folders(section))
    return f"there is no module {missing} in {looked}, nor among the installed packages"


def _alike(missing: str, section: OwnSection) -> str | None:
    module, _, factory = section.name.partition(":")
    if module.endswith(".py"):
        return f"write it without .py: {module.removesuffix('.py')}:{factory}"
    parent, _, last = missing.rpartition(".")
    places = folders(section)
    if parent:
        spec, _ = _find(parent, places)
        places = list(spec.submodule_search_locations or ()) if spec else []
    near = [name for folder in places for name in _modules_in(Path(folder))]
    close = difflib.get_close_matches(last, near, n=1)
    if not close:
        return (
            None if parent else "start in the module's folder, or set workload.path to a list that names it"
        )
    return f"did you mean {'.'.join(filter(None, (parent, close[0])))}?"


def _modules_in(folder: Path) -> Iterator[str]:
    try:
        entries = list(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.suffix == ".py" or (entry / "__init__.py").is_file():
            yield entry.stem


def _look_through(file: Path, factory: str, name: str, complaints: Complaints) -> None:
    """Complains when a source file cannot be read, is not Python, or surely defines no such name."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except OSError as error:
        complaints.add(KEY, f"{shown(file)} cannot be read: {error.strerror}", name)
        return
    except SyntaxError as error:
        complaints.add(KEY, f"{shown(file)}:{error.lineno or 1} is not valid Python: {error.msg}", name)
        return
    except ValueError as error:
        complaints.add(KEY, f"{shown(file)} is not valid Python: {error}", name)
        return
    bound = set(_bound(tree.body))
    if factory in bound or "*" in bound or "__getattr__" in bound:
        return
    defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    close = difflib.get_close_matches(factory, sorted(bound), n=1)
    complaints.add(
        KEY,
        f"{shown(file)} has no {factory}",
        name,
        f"what it defines: {', '.join(defined[:8])}" if defined else None,
        f"did you mean {close[0]}?" if close else None,
    )


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements of a module bind; "*" for an import of everything."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id
            elif isinstance(part, (ast.FunctionDef, ast.ClassDef)):
                yield part.name
            elif isinstance(part, (ast.Import, ast.ImportFrom)):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in part.names)
