"""The factory of a workload: the module where it is, and what it receives.

The module of a user's own workload is checked without importing it, then imported. `Settings` also checks the size of
the configured data. Imports no torch, so that data can be read and refused before torch is imported.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, overload

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import OwnSection, Section
from ndd_engine.errors import ConfigError, NddError, Problem, said, shortened, text_of
from ndd_engine.processes import limit_of
from ndd_engine.text import printable

from .problems import Problems, Progress

NAME_KEY = "workload.name"
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()
_ENGINE = Path(__file__).resolve().parents[1]
# Loader workers send their tracebacks as text.
_WORKER_FRAME = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)


def check(section: Any, where: str) -> None:
    """Raises ConfigError if the module does not exist, is not Python or does not define the factory.

    Nothing is imported, so that a wrong name is reported at once, before anything is written.
    """
    module, _, factory = section.name.partition(":")
    problems = Problems(where, section.name, NAME_KEY)
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
    problems = Problems("workload", section.name, NAME_KEY)
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


T = TypeVar("T")
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
    str: ((str,), "a string"),
    list: ((list,), "a list"),
    tuple: ((list,), "a list"),
    dict: ((dict,), "a table"),
}
# Keys of [workload] that have an attribute of their own.
_NAMED = frozenset({"name", "data", "size", "path", "options"})


class Options(Mapping[str, Any]):
    """The options of a workload: a read-only mapping that records which of them are read.

    They are the table `[workload.options]`; a built-in workload has its other keys of `[workload]` instead. read: names
    of the options read so far. wrong: options of a wrong type, with what is allowed.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self.read: set[str] = set()
        self.wrong: dict[str, str] = {}

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        self.read.update(self._values)
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def option(self, name: str, default: Any) -> Any:
        """The value, or the default if the option is not set or has another type, which is recorded in `wrong`."""
        value: Any = self.get(name)
        if value is None:
            return default
        kinds, allowed = _KINDS.get(type(default), ((type(value),), ""))
        if type(value) not in kinds:  # not isinstance: true is no number for a user
            self.wrong[name] = allowed
            return default
        return type(default)(value) if isinstance(default, (float, tuple)) else value

    def unused(self, problems: Problems) -> None:
        """Adds a problem for each option that is set but was not read."""
        read = ", ".join(sorted(self.read))
        tail = f", which reads {printable(read)}" if read else ", which reads no options"
        for name, value in self._values.items():
            if name not in self.read:
                close = difflib.get_close_matches(name, self.read, n=1)
                advice = (
                    f"did you mean {printable(close[0])}?"
                    if close
                    else "remove it, or read it in the factory"
                )
                message = f"is not used by the factory{tail}"
                problems.add(f"workload.options.{name}", message, value, suggestion=advice)


class Values:
    """A section of the configuration, read-only; remembers in `read` which keys were read."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in type(self._section).model_fields:
            table = type(self._section).__name__.removesuffix("Section").lower()
            raise AttributeError(f"{name} is not a key of [{table}]")
        self.read.add(name)
        return getattr(self._section, name)

    def unread(self, but: frozenset[str] = frozenset()) -> list[str]:
        """Keys that differ from their default and were not read."""
        fields = type(self._section).model_fields
        return [
            name
            for name, entry in fields.items()
            if name not in self.read | but and getattr(self._section, name) != entry.default
        ]


@dataclass(frozen=True)
class Settings:
    """The settings of a run: the only argument of a factory.

    Attributes:
        sequence: `batch.sequence`, the length of an item in tokens (samples, characters, words, …).
        micro, accumulation: `batch.micro` and `batch.accumulation`, items of a micro-batch and micro-batches of a step.
        ranks: `parallel.ranks`, the number of processes that train together.
        seed: `run.seed`. The generators of torch, random and NumPy are seeded with it before the factory is called; use
            it to seed generators of your own.
        data: `workload.data`, a string with a meaning of your choice, such as a path; "builtin" if it is not set.
        size: `workload.size`, a string with a meaning of your choice, such as "small"; None if it is not set.
        options: `[workload.options]`, a read-only mapping of your own options; `option` reads one with a default.
        problems: collects the mistakes that you find in the settings or in the data; see Problems.
        progress: `progress("reading the data")` shows what a long preparation does.
        max_steps, epochs, eval_batches: `run.max_steps`, `run.epochs` and `evaluate.batches`; None if not set.
        optimizer, schedule: the sections `[optimizer]` and `[schedule]`, as in `settings.optimizer.lr`, for a factory
            that returns its own optimizer. Values that are set and neither used nor read are an error.

    Example::

        def factory(settings: Settings) -> SimpleNamespace:
            width = settings.option("width", 64)  # --set workload.options.width=128
            return SimpleNamespace(
                model=Net(width),
                train_data=Lines(settings.data, settings.sequence),
                loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
            )
    """

    sequence: int
    micro: int
    seed: int
    data: str
    size: str | None
    options: Options
    problems: Problems
    optimizer: Values
    schedule: Values
    accumulation: int = 1
    ranks: int = 1
    max_steps: int | None = None
    epochs: int | None = None
    eval_batches: int | None = None
    progress: Progress = field(default=lambda _: None)

    @classmethod
    def of(cls, config: Config, progress: Progress = lambda _: None, where: str = "workload") -> Settings:
        """where: the file or option that the configuration came from, for problems."""
        batch, run, section = config.batch, config.run, config.workload
        written = getattr(section, "options", None)
        if written is None:
            written = {name: value for name, value in section if name not in _NAMED}
        return cls(
            batch.sequence, batch.micro, run.seed, section.data, section.size, Options(written),
            Problems(where, section.data), Values(config.optimizer), Values(config.schedule), batch.accumulation,
            config.parallel.ranks, run.max_steps, run.epochs, config.evaluate.batches, progress,
        )  # fmt: skip

    @overload
    def option(self, name: str) -> Any: ...
    @overload
    def option(self, name: str, default: T) -> T: ...
    def option(self, name: str, default: Any = None) -> Any:
        """The option `workload.options.<name>`, or `default` if it is not set.

        A value whose type differs from the default's is an error (an int is allowed for a float, a list for a tuple).
        """
        return self.options.option(name, default)

    def check_items(self, items: int, unit: str, suggestion: str | None = None) -> None:
        """Adds a problem if `items` training items are fewer than a step of all ranks takes. unit: "segments"."""
        needed = self.micro * self.accumulation * self.ranks
        if items >= needed:
            return
        product, limited = f"micro {self.micro} x accumulation {self.accumulation}", "micro x accumulation"
        if self.ranks > 1:
            product, limited = f"{product} x {self.ranks} ranks", f"{limited} x ranks"
        key, found = "parallel.ranks", self.ranks
        if self.micro > items:
            key, found = "batch.micro", self.micro
        elif self.micro * self.accumulation > items:
            key, found = "batch.accumulation", self.accumulation
        message = f"one optimizer step takes {needed:,} {unit} ({product}), but the training data has only {items:,}"
        self.problems.add(key, message, found, f"{limited} of at most {items:,}", suggestion)


@dataclass(frozen=True)
class DataFacts:
    """What is known of data before torch is imported. tokens_per_item: the mean if lengths vary. text: one line."""

    train_items: int
    eval_items: int
    tokens_per_item: float
    item: str
    token: str
    text: str


def facts(config: Config, where: str = "workload") -> DataFacts | None:
    """The facts of the configured data; None if only the factory knows them. Raises ConfigError with every error."""
    section = config.workload
    if ":" in section.name:
        check(section, where)
        return None
    found: DataFacts = (
        importlib.import_module(f"{__package__}.{section.name}_data")
        .read(Settings.of(config, where=where))
        .facts
    )
    return found


def problems(config: Config, where: str) -> list[Problem]:
    """Every error in the configured data, each with `where` as its origin; [] if it can be trained on."""
    try:
        facts(config, where)
    except ConfigError as error:
        return list(error.problems)
    return []
