"""The edit of the user's file that makes a measured change: by file and line, as a diff, applied on request.

Only edits that leave no doubt are made: arguments of a call at a known place, and settings of torch after its import.
Everything else is described in words.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndd_engine.errors import UsageError
from ndd_engine.files import write_text
from ndd_engine.text import printable

# Key -> argument of the call that makes a loader.
_LOADER = {
    "loader.workers": "num_workers", "loader.pin_memory": "pin_memory", "loader.prefetch": "prefetch_factor",
    "loader.persistent": "persistent_workers",
}  # fmt: skip
# Key -> statement after the import of torch; {torch} is its name in the file, {value} the new value.
_STATEMENTS = {
    "run.threads": "{torch}.set_num_threads({value})",
    "precision.tf32": '{torch}.set_float32_matmul_precision("{precision}")',
    "speed.cudnn_benchmark": "{torch}.backends.cudnn.benchmark = {value}",
}
# Key -> what to do where no edit is made.
_WORDS = {
    "precision.amp": 'run the forward pass and the loss under torch.autocast("{device}", dtype={dtype})',
    "speed.compile": "compile the model once before training: model.compile()",
    "loader.cache": "read all items once before training: DataLoader([data[i] for i in range(len(data))], ...)",
    "loader.non_blocking": "copy batches from pinned memory with .to(device, non_blocking=True)",
    "speed.channels_last": "convert the model and the images with .to(memory_format=torch.channels_last)",
    "speed.attention": "run attention under torch.nn.attention.sdpa_kernel with the {value} backend",
    "run.gc_every_steps": "call gc.disable() before the loop, and gc.collect() every {value} steps",
}
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


@dataclass(frozen=True)
class Edit:
    """A changed file. before, after: its text. advice: changes that are only described."""

    path: Path | None
    before: str
    after: str
    advice: tuple[str, ...] = ()

    @property
    def diff(self) -> list[str]:
        """Lines of the unified diff; [] if no file changes."""
        name = _shown(self.path)
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), f"a/{name}", f"b/{name}", lineterm="", n=2
        )
        return [printable(line) for line in lines]

    def apply(self) -> None:
        """Write the file. Raises UsageError if it has changed since it was read, or cannot be written."""
        if self.path is None:
            return
        if _read(self.path) != self.before:
            raise UsageError(
                f"{printable(str(self.path))} has changed since it was read: nothing was written"
            )
        write_text(self.path, self.after)


def edit_of(seen: Mapping[str, Any], changes: Mapping[str, Any], device: str, main: Path | None) -> Edit:
    """The edit that makes some changes. seen: the recorded configuration; main: the script's file, if it is known.

    A change whose place cannot be found is described. Raises UsageError if a file cannot be read.
    """
    script = seen.get("script")
    places = script if isinstance(script, Mapping) else {}
    advice: list[str] = []
    path: Path | None = None
    before = after = ""
    arguments = {_LOADER[key]: value for key, value in changes.items() if key in _LOADER}
    place = _place(places.get("loader"))
    if arguments and place is not None:
        path, line = place
        before = _read(path)
        after = with_arguments(before, line, ("DataLoader",), arguments) or before
    if arguments and before == after:
        text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        advice.append(f"make the DataLoader with {text}")
    for key, value in changes.items():
        if key in _LOADER:
            continue
        if key == "loader.cache" and place is not None and path in (None, place[0]):
            text = after or _read(place[0])
            if (cached := with_cached_items(text, place[1])) is not None:
                path, before, after = place[0], before or text, cached
                continue
        if key == "optimizer.implementation":
            made = [_place(one) for one in places.get("optimizers") or [places.get("optimizer")]]
            wanted = {"fused": value == "fused", "foreach": value == "foreach"}
            wanted = {name: on for name, on in wanted.items() if on} or {"foreach": False}
            file = path or (made[0][0] if made[0] is not None else None)
            lines = [one[1] for one in made if one is not None and one[0] == file]
            if file is not None and len(lines) == len(made):
                path = file
                before = before or _read(path)
                for line in lines:  # arguments are added within a line: the others keep their places
                    after = with_arguments(after or before, line, None, wanted) or after or before
            else:
                advice.append(
                    f"make the optimizer with {', '.join(f'{name}={on}' for name, on in wanted.items())}"
                )
        elif key in _STATEMENTS and main is not None and (path is None or path == main):
            path = main
            before = before or _read(path)
            changed = with_statement(after or before, _STATEMENTS[key], value)
            after = changed or after or before
            if changed is None:
                advice.append(_statement("torch", _STATEMENTS[key], value))
        elif key in _STATEMENTS:
            advice.append(_statement("torch", _STATEMENTS[key], value))
        else:
            text = _WORDS.get(key, f"set {key} to {value}")
            kind = "cuda" if device.startswith("cuda") else "cpu"
            advice.append(text.format(value=value, device=kind, dtype=_DTYPES.get(str(value), value)))
    return Edit(path if before != after else None, before, after, tuple(advice))


def with_arguments(
    text: str, line: int, names: Sequence[str] | None, arguments: Mapping[str, Any]
) -> str | None:
    """The text with keyword arguments of the call at a line set; None if there is no single such call.

    names: what the called function may be called; None for any call that starts there.
    """
    tree = _parsed(text)
    call = _call(tree, line, names) if tree is not None else None
    if call is None:
        return None
    changed = [
        (keyword, arguments[keyword.arg])
        for keyword in call.keywords
        if keyword.arg and keyword.arg in arguments
    ]
    # None is the default of an argument that is not there.
    given = {name: value for name, value in arguments.items() if value is not None}
    new = [name for name in given if all(keyword.arg != name for keyword, _ in changed)]
    source = _Source(text)
    for keyword, value in sorted(changed, key=lambda item: -source.end(item[0].value)):
        source.replace(keyword.value, repr(value))
    if new:
        added = ", ".join(f"{name}={arguments[name]!r}" for name in new)
        # Keywords that were replaced lie before this place, or end at it.
        fresh = _Source(source.text)
        again = _same_call(fresh.text, call)
        if again is None:
            return None
        last = max([*again.args, *(keyword.value for keyword in again.keywords)], key=fresh.end, default=None)
        at = fresh.end(last) if last is not None else fresh.end(again) - 1
        return fresh.text[:at] + (", " if last is not None else "") + added + fresh.text[at:]
    return source.text


def with_cached_items(text: str, line: int) -> str | None:
    """The text with a list of all items in place of the dataset of the DataLoader at a line.

    None if the dataset is not a plain name, or if the loader is made in a loop, where the list would be made again.
    """
    tree = _parsed(text)
    call = _call(tree, line, ("DataLoader",)) if tree is not None else None
    if tree is None or call is None:
        return None
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While, ast.AsyncFor))]
    given = call.args[0] if call.args else None
    if not isinstance(given, (ast.Name, ast.Attribute)) or any(call in ast.walk(loop) for loop in loops):
        return None
    source, name = _Source(text), ast.unparse(given)
    source.replace(given, f"[{name}[i] for i in range(len({name}))]")
    return source.text


def _shown(path: Path | None) -> str:
    """The path as the diff names it: from the current folder if it is below it, so that `patch -p1` finds it there."""
    name = str(path)
    return os.path.relpath(name) if name.startswith(str(Path.cwd()) + os.sep) else name.lstrip("/")


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _call(tree: ast.Module, line: int, names: Sequence[str] | None) -> ast.Call | None:
    """The only call of one of the names at a line; without names the outermost call that starts there."""
    found = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno)
        and (names is None or _name(node.func) in names)
    ]  # fmt: skip
    if names is None:
        found = [node for node in found if node.lineno == line][:1]
    return found[0] if len(found) == 1 else None


def with_statement(text: str, statement: str, value: Any) -> str | None:
    """The text with a statement after the first import of torch, or with the value of the one that is there replaced.

    None if torch is not imported at the top level, or if the setting is made in several places.
    """
    tree = _parsed(text)
    if tree is None:
        return None
    if there := _values(tree, statement):
        source, new = _Source(text), _parsed(_statement("torch", statement, value))
        assert new is not None
        (wanted,) = _values(new, statement)
        source.replace(there[0], ast.unparse(wanted))
        return source.text if len(there) == 1 else None
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch":
                    lines = text.splitlines(keepends=True)
                    at = node.end_lineno or node.lineno
                    if not lines[at - 1].endswith("\n"):
                        lines[at - 1] += "\n"
                    lines.insert(at, _statement(alias.asname or "torch", statement, value) + "\n")
                    return "".join(lines)
    return None


def _values(tree: ast.Module, statement: str) -> list[ast.expr]:
    """The values that a program gives to the setting which a statement makes, wherever it does."""
    name = statement.partition("(")[0].partition(" ")[0].removeprefix("{torch}.")
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) == 1 and _ends(node.func, name):
            found.append(node.args[0])
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Attribute) and _ends(target, name) for target in node.targets
        ):
            found.append(node.value)
    return found


def _ends(node: ast.expr, name: str) -> bool:
    """Whether a node is this dotted name of torch, or the end of it."""
    if not isinstance(node, (ast.Attribute, ast.Name)):
        return False
    text = f".{ast.unparse(node)}"
    return text.endswith(f".{name}") or f".{name}".endswith(text)


def _statement(torch: str, statement: str, value: Any) -> str:
    return statement.format(torch=torch, value=value, precision="high" if value else "highest")


class _Source:
    """Text with the places of syntax nodes in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line.encode()))
        self._data = text.encode()

    def end(self, node: ast.expr) -> int:
        """Index of the character after a node."""
        return self._index(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def replace(self, node: ast.expr, new: str) -> None:
        """Replace a node; call it from the last node to the first one."""
        begin, end = self._index(node.lineno, node.col_offset), self.end(node)
        self.text = self.text[:begin] + new + self.text[end:]

    def _index(self, line: int, column: int) -> int:
        # Columns of syntax nodes count bytes.
        return len(self._data[: self._starts[line - 1] + column].decode())


def _same_call(text: str, call: ast.Call) -> ast.Call | None:
    """The call at the same place, after arguments of it were replaced."""
    return next(
        (
            node for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (call.lineno, call.col_offset)
            and _name(node.func) == _name(call.func)
        ),
        None,
    )  # fmt: skip


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _place(found: Any) -> tuple[Path, int] | None:
    known = isinstance(found, (list, tuple)) and len(found) == 2 and isinstance(found[1], int)
    return (Path(str(found[0])), found[1]) if known else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{printable(str(path))} cannot be read: {error}") from None
