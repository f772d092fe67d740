"""Builds a validated configuration from TOML, its `extends` and --set, and reports all mistakes at once."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import tomli
from pydantic import BaseModel, ValidationError

import ndd_profiles
from ndd_engine.errors import ConfigError, Problem
from ndd_engine.files import expanded
from ndd_engine.text import printable

from .schema import Config
from .workload_sections import DEFAULT_WORKLOAD, OWN, SECTIONS, WORKLOADS, SizeTables, TuningSection, kind


def suggest(path: Sequence[str | int], merged: dict[str, Any]) -> tuple[str, str | None]:
    """(the keys allowed in the section of an unknown key, a suggestion or None)."""
    names = _neighbours(path, merged)
    key = str(path[-1])
    if key == "extends":
        return ", ".join(sorted(names)), "extends belongs above the first section of a file"
    suggestion = meant(key, [*names, "extends"] if len(path) == 1 else names)
    if suggestion is None and (elsewhere := _sections_with(key)):
        suggestion = f"it is a key of {' or '.join(f'[{name}]' for name in elsewhere)}"
    return ", ".join(sorted(names)), suggestion


def meant(word: str, words: Sequence[str]) -> str | None:
    """ "did you mean micro?", or None without a close match."""
    close = difflib.get_close_matches(word[:64], words, n=1)
    return f"did you mean {close[0]}?" if close else None


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not None or isinstance(annotation, UnionType):
        for part in get_args(annotation):
            yield from _models(part)


def _neighbours(path: Sequence[str | int], merged: dict[str, Any]) -> list[str]:
    """The keys allowed in the section of `path`."""
    if len(path) == 1:
        return list(Config.model_fields)
    section = Config.model_fields.get(str(path[0]))
    models = list(_models(section.annotation)) if section is not None else []
    if path[0] == "workload":
        wanted = SECTIONS.get(kind(merged.get("workload", {})) or "")
        models = [model for model in models if model is wanted]
    return [name for model in models for name in model.model_fields]


def _sections_with(key: str) -> list[str]:
    return [
        section
        for section, info in Config.model_fields.items()
        if any(key in model.model_fields for model in _models(info.annotation))
    ]


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": 'a string ("…")',
    "list_type": "a list ([…])",
    "model_type": "a table of keys",
    "model_attributes_type": "a table of keys",
    "dict_type": "a table of keys",
}
_SAID = {
    "extra_forbidden": "unknown key",
    "missing": "is required",
    "literal_error": "is not a valid choice",
    "finite_number": "is not a finite number",
}
# Error -> (sign, name of the limit in the error's context).
_LIMITS = {
    "greater_than_equal": ("≥", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("≤", "le"),
    "less_than": ("<", "lt"),
}


# Part of a pattern -> what it allows.
_PATTERNS = {
    "cuda": "auto, cpu, cuda or cuda:N",
    "GiB": 'a size such as "8GB" or "512MiB", or auto',
    "offload": '"module path=level" with the level all, cheap or offload',
}


def explain(item: Any) -> tuple[str, str | None]:
    """(message, allowed values or None) for one pydantic error."""
    kind, context = item["type"], item.get("ctx", {})
    if kind in _EXPECTED:
        return "has the wrong type", _EXPECTED[kind]
    if kind in _SAID:
        return _SAID[kind], context.get("expected")
    if kind in _LIMITS:
        sign, name = _LIMITS[kind]
        limit = context[name]
        return "is out of range", f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"
    if kind == "string_pattern_mismatch":
        pattern = context.get("pattern", "")
        of_name = "up to 64 letters, digits, '.', '_' and '-'"
        allowed = next((text for part, text in _PATTERNS.items() if part in pattern), of_name)
        return "is not a valid value", allowed
    if kind == "value_error":
        return str(context.get("error", item["msg"])), None
    return in_short(item["msg"][:1].lower() + item["msg"][1:]), None


def shown(value: object) -> str:
    """A value as TOML shows it, in at most 80 characters."""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return in_short(printable(text.lower() if isinstance(value, bool) else text), 80)


def in_short(text: str, limit: int = 160) -> str:
    """The text, cut to at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


Table = dict[str, Any]
COMMAND_LINE = "--set"
MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_KEY = 200
INT64 = range(-(2**63), 2**63)


def text_of(path: Path) -> str:
    """The contents of a configuration file. Raises ConfigError."""
    name = printable(str(path))
    try:
        if path.is_char_device() or path.is_block_device():  # reading may never end
            raise ConfigError([Problem(name, "", "is a device, not a TOML file")])
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            text = f"is longer than {MAX_BYTES:,} bytes; is this a TOML file?"
            raise ConfigError([Problem(name, "", text)])
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        text = f"is not UTF-8 text (byte {error.start}); is this a TOML file?"
        raise ConfigError([Problem(name, "", text)]) from None
    except OSError as error:
        raise ConfigError([Problem(name, "", f"cannot be read: {error.strerror}")]) from None
    except ValueError:  # a path with a NUL
        raise ConfigError([Problem(name, "", "is not a valid path")]) from None


def parsed(name: str, text: str) -> Table:
    """The tables of a TOML text. name: of its file. Raises ConfigError."""
    try:
        table = _loaded(text)
        problem = next(_refused(table), None)
    except (tomli.TOMLDecodeError, _UnreadableError) as error:
        problem = ("", f"is not valid TOML: {in_short(printable(str(error)))}")
    if problem is not None:
        raise ConfigError([Problem(printable(name), *problem)])
    return table


def put(target: Table, item: str) -> Problem | None:
    """Set "section.key=value" in a table. Returns what is wrong with it, or None."""
    key, equals, value = item.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path) or not 2 <= len(path) <= MAX_DEPTH:
        text, allowed = f"cannot parse {shown(item)}", "section.key=value, such as batch.micro=64"
        return Problem(COMMAND_LINE, "", text, allowed=allowed)
    found: object
    try:
        found = _loaded(f"value = {value}")["value"]
    except tomli.TOMLDecodeError:
        word = value.strip()
        found = None if word == "none" else word  # a bare word is a string; "none" unsets a key
    except _UnreadableError as error:
        return Problem(COMMAND_LINE, in_short(printable(key)), str(error))
    table = target
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return Problem(COMMAND_LINE, in_short(printable(key)), "is set both as a value and as a section")
    problem = next(_refused({key: found}, len(path) - 1), None)
    if problem is not None:
        return Problem(COMMAND_LINE, *problem)
    table[path[-1]] = found
    return None


class _UnreadableError(ValueError):
    """Valid TOML that Python's parser cannot read."""


def _loaded(text: str) -> Table:
    try:
        return tomli.loads(text)
    except RecursionError:
        raise _UnreadableError(f"tables and lists are nested deeper than {MAX_DEPTH} levels") from None
    except tomli.TOMLDecodeError:
        raise
    except ValueError:  # more digits than Python converts
        raise _UnreadableError("an integer does not have 64 bits") from None


def _refused(table: Table, depth: int = 0) -> Iterator[tuple[str, str]]:
    """(key, message) of each part that no configuration contains. Not recursive: the table may be deep."""
    parts: list[tuple[str, Any, int]] = [("", table, depth)]
    while parts:
        key, value, depth = parts.pop()
        if depth > MAX_DEPTH:
            yield key, f"is nested deeper than {MAX_DEPTH} levels"
        elif isinstance(value, dict):
            for name, part in value.items():
                if len(name) > MAX_KEY:
                    yield in_short(printable(name)), f"is longer than {MAX_KEY} characters"
                else:
                    parts.append((f"{key}.{printable(name)}".lstrip("."), part, depth + 1))
        elif isinstance(value, list):
            parts += ((key, part, depth + 1) for part in value)
        elif isinstance(value, int) and value not in INT64:
            yield key, "is not a 64-bit integer"
        elif isinstance(value, str) and (why := _no_text(value)) is not None:
            yield key, why


def _no_text(value: str) -> str | None:
    if "\x00" in value:
        return "contains a NUL character"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "contains bytes that are not UTF-8"
    return None


EXTENDS = "extends"
ALLOWED = "a string: the path of one TOML file, relative to this file"
# Maximum length of a chain of files.
MOST_FILES = 20


@dataclass(frozen=True)
class Written:
    """A configuration file as written, without `extends`. name: its path, for display."""

    name: str
    text: str
    table: Table


def chain(path: Path, text: str | None = None) -> list[Written]:
    """The file and the files that it extends, the last base first. text: the contents of `path`, if already read.

    Raises ConfigError that names file and line for a missing base and for a cycle.
    """
    found: list[Written] = []
    seen: list[Path] = []
    where = ""
    while True:
        name = str(path)
        try:
            text = text_of(path) if text is None else text
        except ConfigError as error:
            if not found:
                raise
            message = error.problems[0].message
            raise ConfigError([Problem(where, EXTENDS, f"{in_short(printable(name))} {message}")]) from None
        seen.append(_identity(path))
        table = parsed(name, text)
        base = table.pop(EXTENDS, None)
        found.append(Written(name, text, table))
        if base is None:
            return found[::-1]
        where = f"{printable(name)} line {_line_of(text, (EXTENDS,)) or 1}"
        if not isinstance(base, str) or not base:
            raise ConfigError([Problem(where, EXTENDS, "has the wrong type", shown(base), ALLOWED)])
        path = _beside(path, base)
        if _identity(path) in seen:
            names = " -> ".join(
                in_short(printable(each)) for each in (*(item.name for item in found), str(path))
            )
            raise ConfigError([Problem(where, EXTENDS, f"the files extend each other: {names}", shown(base))])
        if len(found) == MOST_FILES:
            raise ConfigError(
                [Problem(where, EXTENDS, f"more than {MOST_FILES} files extend each other", shown(base))]
            )
        text = None


def _beside(path: Path, base: str) -> Path:
    """The path of a base, relative to the file that names it, without needless `..`."""
    joined = path.parent / expanded(base)
    plain = Path(os.path.normpath(joined))
    return plain if _identity(plain) == _identity(joined) else joined


def _identity(path: Path) -> Path:
    return Path(os.path.realpath(path))


# Maximum number of invalid keys in one error.
MOST_PROBLEMS = 40
# The part of a line in which a key is searched.
KEY_CHARACTERS = 400
OWN_ALLOWED = 'or "package.module:factory" for your own model'


@dataclass(frozen=True)
class Draft:
    """A configuration as written, before the model size is resolved.

    layers: (file or option, its values), the lowest first. source: the file, "" without one. texts: contents by file.
    """

    layers: tuple[tuple[str, Table], ...]
    source: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    profile: Table = field(default_factory=dict)

    @property
    def workload(self) -> str:
        """The name of the workload."""
        return str(self._text("workload", "name", DEFAULT_WORKLOAD))

    @property
    def run_name(self) -> str | None:
        """The run's name as written, or None."""
        return self._text("run", "name")

    @property
    def size(self) -> str | None:
        """The size as written: a name, "auto" or None."""
        return self._text("workload", "size")

    @property
    def auto(self) -> Table:
        """How size "auto" is resolved: gpu_size, candidates, min_steps_per_second; {} if it is not supported."""
        return dict(self.profile.get("auto", {}))

    @property
    def sizes(self) -> tuple[str, ...]:
        """The named sizes of this workload."""
        return tuple(self.profile.get("sizes", {}))

    @property
    def model(self) -> frozenset[str]:
        """What is known of the model and the data, see TuningSection."""
        return frozenset(TuningSection.model_validate(self.profile.get("tuning", {})).model)

    def resolve(
        self,
        size: str | None = None,
        memory_gb: float | None = None,
        few: bool = False,
        shapes: bool = False,
    ) -> Config:
        """The validated configuration with the given size (default: the size as written).

        memory_gb: GPU memory for which the size was chosen; the profile may define a batch size for it. few: with the
        little data that measuring a size takes. shapes: with the least data whose batches have the same shapes. Raises
        ConfigError with all problems.
        """
        merged, problems = self._merged(size, memory_gb)
        if few:
            _merge(merged, {"workload": self.auto.get("probe", {})})
        if shapes:
            _merge(merged, self.profile.get("shapes", {}))
        try:
            config = Config.model_validate(merged)
        except ValidationError as error:
            problems.extend(self._problems(error, merged))
            problems.extend(self._among_sections(error, merged))
            raise ConfigError(problems) from None
        if problems:
            raise ConfigError(problems)
        return config

    def salvage(self) -> Config | None:
        """The configuration with invalid keys reset to their defaults; None if that is not possible.

        For further checks (such as of the data), so that all problems are reported at once.
        """
        merged, _ = self._merged(None)
        for _ in range(3):
            try:
                return Config.model_validate(merged)
            except ValidationError as error:
                for item in error.errors():
                    _drop(merged, _path(item["loc"]))
                merged.setdefault("run", {}).setdefault("epochs", 1)
        return None

    def _merged(self, size: str | None, memory_gb: float | None = None) -> tuple[Table, list[Problem]]:
        """All layers in one table, with size and preset expanded, and the problems of size and preset."""
        size = size if size is not None else self.size
        if size == "auto" and self.auto:
            size = self.auto["candidates"][0]
        problems: list[Problem] = []
        sizes = self.profile.get("sizes", {})
        tier = sizes.get(size, {}) if size is not None else {}
        if size is not None and size not in sizes and (sizes or size == "auto"):
            allowed = ", ".join((*self.sizes, "auto") if self.auto else self.sizes)
            message = (
                "there is no such size" if sizes else "has no sizes to choose from: [sizes.NAME] and [auto]"
            )
            problems.append(self.problem(("workload", "size"), message, size, allowed or "none"))
        preset = self._text("run", "preset")
        known = preset in tuple(ndd_profiles.names("presets"))
        # Each expands in the layer that names it: a size below a preset below explicit keys.
        stands_for = (
            (self._layer_of(("workload", "size")), tier),
            (self._layer_of(("workload", "size")), self._gpu_tier(memory_gb)),
            (self._layer_of(("run", "preset")), ndd_profiles.read("presets", str(preset)) if known else {}),
        )
        merged: Table = {}
        for index, (_, layer) in enumerate(self.layers):
            values = [value for owner, value in stands_for if owner == index]
            # Defaults have the lowest priority.
            for table in (layer, *values) if index == 0 else (*values, layer):
                _put_on_top(merged, table)
        if size is not None and isinstance(merged.get("workload"), dict):
            merged["workload"]["size"] = size
        if ":" in self.workload:
            for name in SizeTables.model_fields:
                merged.pop(name, None)
        return merged, problems

    def _gpu_tier(self, memory_gb: float | None) -> Table:
        """The profile's settings for a GPU with this much memory."""
        tiers: list[Table] = self.profile.get("gpus", [])
        fitting = [tier for tier in tiers if memory_gb is not None and memory_gb >= tier["min_gb"]]
        best = max(fitting, key=lambda tier: float(tier["min_gb"]), default={})
        return {key: value for key, value in best.items() if key != "min_gb"}

    def _layer_of(self, path: Sequence[str | int]) -> int:
        """Index of the highest layer that contains a key; 0 if none does."""
        return max((index for index, (_, layer) in enumerate(self.layers) if _has(layer, path)), default=0)

    def problem(
        self, path: Sequence[str | int], message: str, found: object = None, allowed: str | None = None
    ) -> Problem:
        """A Problem of the key at `path`, with its location."""
        key = ".".join(str(part) for part in path)
        return Problem(self.where(path), key, message, None if found is None else shown(found), allowed)

    def where(self, path: Sequence[str | int]) -> str:
        """Where a key was set: "--set", "run.toml line 12" or "defaults"."""
        for where, layer in reversed(self.layers):
            if path and _has(layer, path):
                if where in self.texts and (line := _line_of(self.texts[where], path)):
                    return f"{printable(where)} line {line}"
                return printable(where)
        return printable(self.source) or "command line"

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Adds file and line to the problems that a workload reports for a key of its section."""
        try:
            yield
        except ConfigError as error:
            found = [
                replace(problem, where=self.where(problem.key.split(".")))
                if problem.where == "workload" and problem.key
                else problem
                for problem in error.problems
            ]
            raise ConfigError(found) from error.__cause__

    def _text(self, section: str, key: str, default: str | None = None) -> str | None:
        """The value in the highest layer that has the key, as text; None if it is unset."""
        for _, layer in reversed(self.layers):
            table = layer.get(section)
            if isinstance(table, dict) and key in table:
                return None if table[key] is None else str(table[key])
        return default

    def _among_sections(self, error: ValidationError, merged: Table) -> Iterator[Problem]:
        """Problems between settings of several sections, which are only checked where each setting is valid."""
        wrong = [_path(item["loc"]) for item in error.errors()]
        if any(not path for path in wrong):
            return  # they were checked
        rest = deepcopy(merged)
        for path in wrong:
            _drop(rest, path)
        try:
            Config.model_validate(rest)
        except ValidationError as left:
            names = [".".join(map(str, path)) for path in wrong]
            for problem in self._problems(left, rest):
                if not problem.key and not any(name in problem.message for name in names):
                    yield problem

    def _problems(self, error: ValidationError, merged: Table) -> Iterator[Problem]:
        every = error.errors(include_url=False)
        for item in every[:MOST_PROBLEMS]:
            path = _path(item["loc"])
            found = None if item["type"] in ("missing", "value_error") else shown(item.get("input"))
            message, allowed = explain(item)
            suggestion = None
            if item["type"] == "extra_forbidden":
                allowed, suggestion = suggest(path, merged)
            key = in_short(printable(".".join(map(str, path))))
            yield Problem(self.where(path), key, message, found, allowed, suggestion)
        if (more := len(every) - MOST_PROBLEMS) > 0:
            yield Problem(printable(self.source) or "command line", "", f"{more} more problems")


def read(
    path: Path | None = None,
    sets: Sequence[str] = (),
    workload: str | None = None,
    overrides: Table | None = None,
    text: str | None = None,
) -> Draft:
    """A draft from an optional TOML file, `--set key=value` strings and a workload name.

    overrides: further command-line values ({"run": {"max_steps": 100}}). text: contents of the file; if given, the
    file is not read, but those that it extends are. Raises ConfigError.
    """
    problems: list[Problem] = []
    files = [Written("", "", {})] if path is None else chain(path, text)
    texts = {file.name: file.text for file in files if file.name}
    layers = tuple((file.name, file.table) for file in files)
    command_line: Table = {}
    problems.extend(problem for item in sets if (problem := put(command_line, item)) is not None)
    _merge(command_line, overrides or {})
    if workload is not None:
        _merge(command_line, {"workload": {"name": workload}})
    source = files[-1].name
    draft = Draft((*layers, (COMMAND_LINE, command_line)), source, texts)
    name = draft.workload
    if name not in WORKLOADS and ":" not in name:
        where = "--workload" if workload is not None else draft.where(("workload", "name"))
        message, allowed = "there is no such workload", ", ".join((*WORKLOADS, OWN_ALLOWED))
        problems.append(
            Problem(where, "workload.name", message, shown(name), allowed, meant(name, WORKLOADS))
        )
        name = DEFAULT_WORKLOAD
        draft = Draft((*draft.layers, ("", {"workload": {"name": name}})), source, texts)
    profile: Table = {}
    if name in WORKLOADS:
        profile = ndd_profiles.read("workloads", name)
    else:
        for _, layer in draft.layers:
            _merge(profile, {key: layer[key] for key in SizeTables.model_fields if key in layer})
        try:
            SizeTables.model_validate(profile)
        except ValidationError as error:
            problems.extend(draft._problems(error, profile))
            profile = {}
    defaults: Table = {"workload": {"name": name}}
    if name not in WORKLOADS:
        # Search path of the user's module, stored so that the run can resume from another folder.
        parents = [Path(file.name).parent for file in reversed(files) if file.name]
        folders = [str(folder.absolute()) for folder in (*parents, Path())]
        defaults["workload"]["path"] = list(dict.fromkeys(folders))
    _merge(defaults, profile.get("defaults", {}))
    draft = Draft((("defaults", defaults), *draft.layers), source, texts, profile)
    if problems:
        # Report all other problems in the same error.
        try:
            draft.resolve()
        except ConfigError as error:
            problems.extend(error.problems)
        raise ConfigError(problems)
    return draft


def _put_on_top(merged: Table, layer: Table) -> None:
    """Merge a layer. accumulation and effective determine each other: the one in the higher layer wins."""
    below, above = merged.get("batch"), layer.get("batch")
    if isinstance(below, dict) and isinstance(above, dict):
        for key, other in (("effective", "accumulation"), ("accumulation", "effective")):
            if key in above and other not in above:
                below.pop(other, None)
    _merge(merged, layer)


def _merge(target: Table, layer: Table) -> None:
    for key, value in layer.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = deepcopy(value)


def _path(loc: Sequence[str | int]) -> list[str | int]:
    """The key path of a validation error, without the tag of the workload section."""
    tagged = loc[:1] == ("workload",) and loc[1:2] and loc[1] in (*WORKLOADS, OWN)
    return [loc[0], *loc[2:]] if tagged else list(loc)


def _drop(table: Any, path: Sequence[str | int]) -> None:
    # Drop the whole list for a list element, and the whole section for a mistake between keys.
    names = [part for part in path if isinstance(part, str)]
    for part in names[:-1]:
        table = table.get(part, {})
    if names:
        table.pop(names[-1], None)


def _has(layer: Any, path: Sequence[str | int]) -> bool:
    for part in path:
        if isinstance(layer, list):
            found = isinstance(part, int) and part < len(layer)
        else:
            found = isinstance(layer, dict) and part in layer
        if not found:
            return False
        layer = layer[part]
    return True


def _line_of(text: str, path: Sequence[str | int]) -> int | None:
    """Line number of a key in TOML text; None if not found."""
    names = [str(part) for part in path if isinstance(part, str)]
    section: list[str] = []
    for index, whole in enumerate(text.splitlines(), start=1):
        line = whole[:KEY_CHARACTERS]
        if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line):
            section = [part.strip().strip("\"'") for part in header[1].split(".")]
            if section == names:
                return index
        elif key := re.match(r"\s*([A-Za-z0-9_.\-\"']+)\s*=", line):
            found = section + [part.strip("\"'") for part in key[1].split(".")]
            # The rest of the path is in an inline table on the same line.
            if found == names[: len(found)] and len(found) > len(section):
                return index
    return None


def anywhere(config: Config) -> Config:
    """The configuration with absolute paths, so that it is valid in any working directory."""
    moved = {key: str(expanded(path).absolute()) for key, path in _paths_of_log(config)}
    if moved:
        config = config.changed(log=moved)
    path = Path(config.workload.data)
    if path.is_absolute() or not os.path.exists(path):  # noqa: PTH110  Path.exists raises without permission
        return config
    return config.changed(workload={"data": str(path.absolute())})


def _paths_of_log(config: Config) -> Iterator[tuple[str, str]]:
    if config.log.trace is not None:
        yield "trace", config.log.trace
    uri = config.log.mlflow
    if uri is not None and not re.match(r"[a-z+]+:|databricks", uri):  # a path, not a URI
        yield "mlflow", uri
