"""The module of a user's own workload: checked without importing it, then imported. Imports no torch."""

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
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ndd_engine.config.workload_sections import OwnSection
from ndd_engine.errors import ConfigError, NddError, Problem, said, shortened, text_of
from ndd_engine.processes import limit_of
from ndd_engine.text import printable

from .problems import Problems

KEY = "workload.name"
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()
_ENGINE = Path(__file__).resolve().parents[1]
# Loader workers send their tracebacks as text.
_WORKER_FRAME = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)


def check(section: Any, where: str) -> None:
    """Raises ConfigError if the module does not exist, is not Python or does not define the factory.

    Nothing is imported, so that a wrong name is reported at once, before anything is written.
    """
    module, _, factory = section.name.partition(":")
    problems = Problems(where, section.name, KEY)
    found, missing = _find(module, folders(section))
    if found is None:
        problems.stop(_not_found(module, missing, section), suggestion=_suggest_module(missing, section))
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        problems.stop(f"{top} is the name of a standard library module", suggestion="rename your file")
    if found.origin is None or not found.has_location:
        advice = f"name a module in it: {module}.MODULE:{factory}"
        problems.stop(f"{module} is a folder, not a module", suggestion=advice)
    if found.origin.endswith(".py"):
        _check_source(Path(found.origin), factory, problems)


def folders(section: OwnSection) -> list[str]:
    """Folders that are searched before sys.path: `workload.path`, then the current folder."""
    return list(dict.fromkeys((*section.path, str(Path.cwd()))))


def load(section: Any) -> tuple[Callable[..., Any], str]:
    """Imports the module. Returns its factory, and the file and line of it.

    The folders stay in sys.path: loader workers need them to unpickle the dataset. Raises ConfigError that names the
    line of the user's code.
    """
    if ":" not in section.name:  # one of those in this package
        found = importlib.import_module(f"{__package__}.{section.name}").factory
        return found, definition(found)
    module_name, _, factory = section.name.partition(":")
    for folder in reversed(folders(section)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    importlib.invalidate_caches()
    problems = Problems("workload", section.name, KEY)
    expected, _ = _find(module_name, folders(section))
    with calling(f"importing {module_name}"):
        module = importlib.import_module(module_name)
    file, origin = getattr(module, "__file__", None), None if expected is None else expected.origin
    if file and origin and Path(file).resolve() != Path(origin).resolve():
        message = f"{module_name} is already imported from another file, {file}"
        problems.stop(message, suggestion=f"rename {shown(origin)}")
    found = getattr(module, factory, None)
    if found is None:
        problems.stop(f"{module_name} has no {factory}")
    if not callable(found):
        problems.stop(f"{factory} is {kind(found)}, not a function or class")
    return found, definition(found)


def definition(factory: Callable[..., Any]) -> str:
    """File and line of a factory: "my_workload.py:12"; its name if they are not known."""
    try:
        target = inspect.unwrap(factory)
        file, line = inspect.getsourcefile(target), inspect.getsourcelines(target)[1]
    except (TypeError, OSError):
        file, line = None, 0
    return f"{shown(file)}:{line}" if file else printable(getattr(factory, "__qualname__", "the factory"))


@contextmanager
def calling(what: str, advice: str | None = None, where: str = "workload") -> Iterator[None]:
    """Context for a call of the user's code: turns an exception into a one-line ConfigError caused by it.

    The line starts with the innermost file and line in the user's own code, else with `where`. what: the call, for the
    message.
    """
    try:
        yield
    except NddError:
        raise
    except SystemExit as error:
        message = f"{what} exited the program (SystemExit)"
        advice = 'put code that runs as a script under: if __name__ == "__main__":'
        raise ConfigError([Problem(place(error) or where, "", message, suggestion=advice)]) from error
    except Exception as error:
        raise ConfigError(
            [
                Problem(
                    place(error) or where,
                    "",
                    f"{what} failed: {limit_of(error) or said(error)}",
                    None,
                    None,
                    advice,
                )
            ]
        ) from error


def place(error: BaseException) -> str | None:
    """The innermost file and line of an error in the user's own files: "my_workload.py:12"; None if there is none."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    # Frames before the first of the engine belong to its caller, not to the user's workload.
    first = next((index for index, (file, _) in enumerate(frames) if _is_engines(file)), 0)
    found = [(file, int(line)) for file, line in _WORKER_FRAME.findall(text_of(error))] or frames[first:]
    if isinstance(error, SyntaxError) and error.filename:
        found.append((error.filename, error.lineno or 0))
    return next((f"{shown(file)}:{line}" for file, line in reversed(found) if _is_users(file)), None)


def shown(file: str | Path) -> str:
    """A file relative to the current folder if it is in it, else unchanged."""
    path, here = Path(file), Path.cwd()
    return printable(str(path.relative_to(here) if path.is_relative_to(here) else path))


def kind(value: object) -> str:
    """The type of a value with its article: "an int"."""
    name = shortened(type(value).__name__, 80)
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


def _find(module: str, first: Sequence[str]) -> tuple[ModuleSpec | None, str]:
    """(the spec of a dotted module, ""), or (None, the part of its name that does not exist)."""
    importlib.invalidate_caches()
    search: list[str] = [*first, *sys.path]
    spec: ModuleSpec | None = None
    for index, part in enumerate(names := module.split(".")):
        # By the last part: a dotted name in a namespace package would need an imported parent.
        spec = PathFinder.find_spec(part, search)
        if spec is None and index == 0:  # perhaps installed in editable mode
            with suppress(ImportError, ValueError):
                spec = find_spec(part)
        if spec is None:
            return None, ".".join(names[: index + 1])
        search = list(spec.submodule_search_locations or ())
    return spec, ""


def _not_found(module: str, missing: str, section: OwnSection) -> str:
    if missing != module or "." in missing:
        return f"there is no module {missing}"
    looked = ", ".join(shown(folder) if folder != str(Path.cwd()) else folder for folder in folders(section))
    return f"there is no module {missing} in {looked} or among the installed packages"


def _suggest_module(missing: str, section: OwnSection) -> str | None:
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
        return None if parent else "run in the folder of the module, or add the folder to workload.path"
    return f"did you mean {'.'.join(filter(None, (parent, close[0])))}?"


def _modules_in(folder: Path) -> Iterator[str]:
    with suppress(OSError):
        for entry in folder.iterdir():
            if entry.suffix == ".py" or (entry / "__init__.py").is_file():
                yield entry.stem


def _check_source(file: Path, factory: str, problems: Problems) -> None:
    """Raises ConfigError if a source file cannot be read, is not Python, or cannot define the factory."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except OSError as error:
        problems.stop(f"{shown(file)} cannot be read: {error.strerror}")
    except SyntaxError as error:
        problems.stop(f"{shown(file)}:{error.lineno or 1} is not valid Python: {error.msg}")
    except ValueError as error:
        problems.stop(f"{shown(file)} is not valid Python: {error}")
    except (RecursionError, MemoryError):
        problems.stop(f"{shown(file)} is not valid Python: it is nested too deeply")
    bound = set(_bound(tree.body))
    if factory in bound or "*" in bound or "__getattr__" in bound:
        return
    defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    close = difflib.get_close_matches(factory, sorted(bound), n=1)
    allowed = f"a function or class in it, such as {', '.join(defined[:8])}" if defined else None
    problems.stop(f"{shown(file)} has no {factory}", allowed, f"did you mean {close[0]}?" if close else None)


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that the statements of a module bind; "*" for a star import."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in body:
        for part in [node] if isinstance(node, definitions) else ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id
            elif isinstance(part, definitions):
                yield part.name
            elif isinstance(part, (ast.Import, ast.ImportFrom)):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in part.names)
