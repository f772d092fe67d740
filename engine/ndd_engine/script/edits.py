"""The edit of the user's file that makes a measured change: by file and line, as a diff, applied on request.

Only edits that leave no doubt are made; text is changed at the places of its syntax nodes. They concern arguments of a
call at a known place, settings of torch after its import, statements about the model after its optimizer is made, and
the lines of the training loop, which is found by its only backward pass. Everything else is described in words.

An edit is tried before it is shown: an edited scratch copy trains. Its first losses have to be those of the script
with the change made from outside, and the change has to be in effect.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ndd_engine.child import ChildError, Tick
from ndd_engine.errors import UsageError
from ndd_engine.files import write_text
from ndd_engine.text import printable
from ndd_engine.trial.outcome import LOSSES, SideFacts, compare_losses, not_in_effect, same_steps
from ndd_watch.changes import TABLE, Argument, Items, OfLoop, OfModel, Statement
from ndd_watch.switches import Persistent, PinMemory, Workers


def parsed(text: str) -> ast.Module | None:
    """The syntax tree; None if it cannot be parsed."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def import_of(tree: ast.Module, name: str) -> tuple[ast.Import, str] | None:
    """(the first import of a module at the top level, its name there)."""
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.Import) else ():
            if alias.name == name and isinstance(node, ast.Import):
                return node, alias.asname or name
    return None


def indentation(text: str, statement: ast.stmt) -> str | None:
    """What stands before a statement; None if it does not stand alone, but for a comment behind it."""
    lines = text.splitlines()
    begin = lines[statement.lineno - 1].encode()[: statement.col_offset].decode()
    last = lines[(statement.end_lineno or statement.lineno) - 1]
    rest = last.encode()[statement.end_col_offset or 0 :].decode().strip()
    return None if begin.strip() or (rest and not rest.startswith("#")) else begin


def with_lines(text: str, after: ast.stmt, added: Sequence[str]) -> str:
    """The text with more lines after a statement."""
    lines = text.splitlines(keepends=True)
    at = after.end_lineno or after.lineno
    if not lines[at - 1].endswith("\n"):
        lines[at - 1] += "\n"
    lines[at:at] = [f"{line}\n" for line in added]
    return "".join(lines)


class PlacedText:
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

    def of(self, node: ast.expr) -> str:
        """The text of a node."""
        return self.text[self._index(node.lineno, node.col_offset) : self.end(node)]

    def replace(self, node: ast.expr, new: str) -> None:
        """Replace a node; call it from the last node to the first one."""
        begin, end = self._index(node.lineno, node.col_offset), self.end(node)
        self.text = self.text[:begin] + new + self.text[end:]

    def _index(self, line: int, column: int) -> int:
        # Columns of syntax nodes count bytes.
        return len(self._data[: self._starts[line - 1] + column].decode())


_COPIES = ("to", "cuda")


@dataclass(frozen=True, slots=True)
class _Loop:
    """The block of statements with the backward pass. at: its index; loop: the innermost `for` around it, or None."""

    block: list[ast.stmt]
    at: int
    loop: ast.For | None


def with_context(text: str, model: str, context: str) -> str | None:
    """The text with the statements from the call of a model to the backward pass within a context.

    model: its name in the text. context: an expression with {torch} for the name of torch.
    """
    tree = parsed(text)
    found = None if tree is None else _loop(tree)
    imported = None if tree is None else import_of(tree, "torch")
    if found is None or imported is None or context.partition("(")[0].rpartition(".")[2] in text:
        return None
    calls = [index for index in range(found.at) if _calls(found.block[index], model)]
    if not calls:
        return None
    inside = found.block[calls[0] : found.at]
    first, last = inside[0].lineno, inside[-1].end_lineno or inside[-1].lineno
    lines = text.splitlines(keepends=True)
    strings = (ast.Constant, ast.JoinedStr)
    whole = all(
        node.lineno == node.end_lineno
        for statement in inside
        for node in ast.walk(statement)
        if isinstance(node, strings)
    )
    begin, end = (indentation(text, statement) for statement in (inside[0], inside[-1]))
    if not whole or begin is None or end is None or any(map(_steps, inside)):
        return None
    more = "\t" if begin.endswith("\t") else "    "
    lines[first - 1 : last] = [more + line if line.strip() else line for line in lines[first - 1 : last]]
    lines.insert(first - 1, f"{begin}with {context.format(torch=imported[1])}:\n")
    return "".join(lines)


def with_argument_of_copies(text: str, argument: str) -> str | None:
    """The text with a keyword argument given to the calls that copy what the loop reads to the device."""
    tree = parsed(text)
    found = None if tree is None else _loop(tree)
    if found is None or found.loop is None:
        return None
    read = _names(found.loop.target)
    copies: list[ast.Call] = []
    for statement in found.block[: found.at]:
        for node in ast.walk(statement):
            if isinstance(node, ast.comprehension) and _root(node.iter) in read:
                read |= _names(node.target)
        copies += [
            node for node in ast.walk(statement)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _COPIES
            and _root(node.func.value) in read
        ]  # fmt: skip
    name = argument.partition("=")[0]
    if not copies or any(len(copy.args) > 1 or _given(copy, name) for copy in copies):
        return None
    source = PlacedText(text)
    for copy in sorted(copies, key=lambda node: (node.end_lineno, node.end_col_offset), reverse=True):
        inner = source.of(copy)
        comma = ", " if copy.args or copy.keywords else ""
        source.replace(copy, f"{inner[:-1].rstrip().rstrip(',')}{comma}{argument})")
    return source.text


def with_collections(text: str, every: int) -> str | None:
    """The text with automatic garbage collection switched off, and a collection every so many optimizer steps."""
    tree = parsed(text)
    found = None if tree is None else _loop(tree)
    if tree is None or found is None or found.loop is None or import_of(tree, "gc") or "gc." in text:
        return None
    steps = [statement for statement in found.block[found.at + 1 :] if _steps(statement)]
    imported = import_of(tree, "torch")
    begin = indentation(text, steps[0]) if len(steps) == 1 else None
    if imported is None or begin is None:
        return None
    more = "\t" if begin.endswith("\t") else "    "
    text = with_lines(
        text, steps[0], [f"{begin}if next(gc_steps) % {every} == 0:", f"{begin}{more}gc.collect()"]
    )
    made = ["import gc", "import itertools", "gc.disable()", "gc_steps = itertools.count(1)"]
    return with_lines(text, imported[0], made)


def _loop(tree: ast.Module) -> _Loop | None:
    found = list(_backwards(tree, None))
    return found[0] if len(found) == 1 else None


def _backwards(node: ast.AST, loop: ast.For | None) -> Iterator[_Loop]:
    """The blocks with a statement that is a call of `backward`."""
    loop = node if isinstance(node, ast.For) else None if isinstance(node, ast.FunctionDef) else loop
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        for index, statement in enumerate(block if isinstance(block, list) else ()):
            call = statement.value if isinstance(statement, ast.Expr) else None
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr == "backward"
            ):
                yield _Loop(block, index, loop)  # type: ignore[arg-type]  # a list: enumerated
            yield from _backwards(statement, loop)
    for handler in getattr(node, "handlers", ()):
        yield from _backwards(handler, loop)


def _calls(statement: ast.stmt, model: str) -> bool:
    """Whether a statement calls a model, or a method of it."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            called = node.func
            if ast.unparse(called) == model:
                return True
            if (
                isinstance(called, ast.Attribute)
                and called.attr not in _NO_FORWARD
                and ast.unparse(called.value) == model
            ):
                return True
    return False


_NO_FORWARD = (
    "train",
    "eval",
    "zero_grad",
    "parameters",
    "named_parameters",
    "to",
    "requires_grad_",
    "state_dict",
)


def _steps(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
        and not node.args
        for node in ast.walk(statement)
    )


def _names(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _root(node: ast.expr) -> str:
    """The name that an expression begins with: `batch` of `batch["x"].items()`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _given(call: ast.Call, name: str) -> bool:
    return any(keyword.arg in (name, None) for keyword in call.keywords)


# Arguments of a DataLoader that may be given by their place.
_PLACES = {kind.name: kind.place for kind in (Workers, PinMemory)}
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


@dataclass(frozen=True)
class Edit:
    """A changed file. before, after: its text. advice: changes that are only described. made: keys of the others."""

    path: Path | None
    before: str
    after: str
    advice: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    @property
    def diff(self) -> list[str]:
        """Lines of the unified diff; [] if no file changes."""
        name = str(self.path)
        # From the current folder if it is below it, so that `patch -p1` finds it there.
        name = os.path.relpath(name) if name.startswith(str(Path.cwd()) + os.sep) else name.lstrip("/")
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


def edit_of(
    seen: Mapping[str, Any],
    changes: Mapping[str, Any],
    device: str,
    main: Path | None,
    described: bool = False,
) -> Edit:
    """The edit that makes some changes. seen: the recorded configuration; main: the script's file, if it is known.

    A change whose place cannot be found is described; with `described`, all of them are.

    Raises UsageError if a file cannot be read.
    """
    path: Path | None = None
    before = after = ""
    advice: list[str] = []
    made: list[str] = []
    # A statement adds a line: it comes after what is at known lines, and the one that is above them last.
    for key, value in sorted(changes.items(), key=lambda item: _order(TABLE[item[0]].edit)):
        steps, text = _planned(TABLE[key].edit, value, seen, device, main)
        edited: str | None = after
        for place, step in steps:
            if edited is None or place not in (path or place,):
                edited = None
                break
            path, before = place, before or _read(place)
            edited = step(edited or before)
        if steps and edited is not None and not described:
            after = edited
            made.append(key)
        else:
            advice.append(text)
    after = after or before
    return Edit(path if before != after else None, before, after, tuple(advice), tuple(made))


def _order(edit: Any) -> int:
    """What adds lines above known ones comes last."""
    if isinstance(edit, OfLoop):
        return 4 if edit.part == "collections" else 1
    return {OfModel: 2, Statement: 3}.get(type(edit), 0)


# A file and how it is edited: from its text to its new text, None where that is in doubt.
Step = tuple[Path, Callable[[str], str | None]]


def _planned(
    edit: Argument | Statement | Items | OfModel | OfLoop | str,
    value: Any,
    seen: Mapping[str, Any],
    device: str,
    main: Path | None,
) -> tuple[list[Step], str]:
    """(the steps of an edit, [] where a place is unknown; the same in words)."""
    script = seen.get("script")
    places = script if isinstance(script, Mapping) else {}
    if isinstance(edit, str):
        return [], edit
    if isinstance(edit, Statement):
        new = edit.value(value)
        text = edit.text.format(torch="torch", value=new)
        return [] if main is None else [(main, partial(with_statement, statement=edit.text, value=new))], text
    if isinstance(edit, Items):
        place = _place(places.get("loader"))
        where = "" if place is None else f" ({short(place[0])}:{place[1]})"
        steps: list[Step] = [] if place is None else [(place[0], partial(with_cached_items, line=place[1]))]
        return steps, edit.advice + where
    made = places.get("optimizers") or [places.get("optimizer")]
    if isinstance(edit, OfLoop):
        kind = "cuda" if device.startswith("cuda") else "cpu"
        text = edit.advice.format(value=value, device=kind, dtype=_DTYPES.get(str(value), value))
        place, given = _place(made[0]), edit.given(value)
        if place is None or not given or len(made) > 1:
            return [], text
        return [(place[0], partial(_of_loop, line=place[1], part=edit.part, given=given, device=kind))], text
    if isinstance(edit, OfModel):
        place, statement = _place(made[0]), edit.given(value)
        if place is None or not statement or len(made) > 1:
            return [], edit.advice
        return [(place[0], partial(with_model_statement, line=place[1], statement=statement))], edit.advice
    arguments, names = edit.given(value), None
    if edit.call == "DataLoader":
        made, names = [places.get("loader")], ("DataLoader",)
    calls = [found for found in map(_place, made) if found is not None]
    change = partial(with_arguments, names=names, arguments=arguments)
    where = "".join(f" ({short(file)}:{line})" for file, line in calls)
    text = (
        f"make the {edit.call}{where} with {', '.join(f'{name}={new!r}' for name, new in arguments.items())}"
    )
    if len(calls) == 1 and (mapping := _mapping(*calls[0], names, arguments)):
        entries = ", ".join(f'"{name}": {new!r}' for name, new in arguments.items())
        text = f"set {entries} in {mapping}, which the {edit.call}{where} gets"
    return [(file, partial(change, line=line)) for file, line in calls if len(calls) == len(made)], text


def _mapping(file: Path, line: int, names: Sequence[str] | None, arguments: Mapping[str, Any]) -> str:
    """The dictionary that gives a call its keywords with `**`, and where it is made; "" if arguments can be added."""
    tree = parsed(_read(file))
    call = _call(tree, line, names) if tree is not None else None
    given = [] if call is None else [one.value for one in call.keywords if one.arg is None]
    written = set() if call is None else {one.arg for one in call.keywords}
    if tree is None or not given or written & set(arguments):
        return ""
    made = [
        node.lineno for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno <= line
        and ast.unparse(given[0]) in map(ast.unparse, getattr(node, "targets", [getattr(node, "target", node)]))
    ]  # fmt: skip
    return f"{printable(ast.unparse(given[0]))} ({short(file)}:{max(made, default=given[0].lineno)})"


def with_arguments(
    text: str, line: int, names: Sequence[str] | None, arguments: Mapping[str, Any]
) -> str | None:
    """The text with keyword arguments of the call at a line set; None if there is no single such call.

    names: what the called function may be called; None for any call that starts there.
    """
    tree = parsed(text)
    call = _call(tree, line, names) if tree is not None else None
    if call is None or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    known = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    if names is not None:
        known |= {name: call.args[place] for name, place in _PLACES.items() if place < len(call.args)}
    mappings = [keyword.value for keyword in call.keywords if keyword.arg is None]
    new = [name for name in arguments if name not in known and (mappings or not _default(name, arguments))]
    source = PlacedText(text)
    changed = [(known[name], repr(value)) for name, value in arguments.items() if name in known]
    if new and mappings:
        if len(mappings) > 1:
            return None  # it is not known which of them has it
        # The mapping may have it, and it must be given once.
        more = ", ".join(f'"{name}": {arguments[name]!r}' for name in new)
        before = source.of(mappings[0])
        if not isinstance(mappings[0], (ast.Name, ast.Attribute, ast.Call, ast.Dict)):
            before = f"({before})"
        changed.append((mappings[0], f"{{**{before}, {more}}}"))
        new = []
    for node, words in sorted(changed, key=lambda item: -source.end(item[0])):
        source.replace(node, words)
    if new:
        added = ", ".join(f"{name}={arguments[name]!r}" for name in new)
        # Keywords that were replaced lie before this place, or end at it.
        fresh = PlacedText(source.text)
        again = _same_call(fresh.text, call)
        if again is None:
            return None
        last = max([*again.args, *(keyword.value for keyword in again.keywords)], key=fresh.end, default=None)
        at = fresh.end(last) if last is not None else fresh.end(again) - 1
        return fresh.text[:at] + (", " if last is not None else "") + added + fresh.text[at:]
    return source.text


def _default(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an argument that is not there has this value."""
    return arguments[name] is None or (name == Persistent.name and not arguments[name])


# Where a list of items would be made again, and where a call may not happen.
_REPEATS = (ast.For, ast.While, ast.AsyncFor, ast.comprehension, ast.ListComp, ast.GeneratorExp, ast.DictComp)
_MAY_NOT = (ast.Lambda, ast.IfExp, ast.BoolOp)


def with_cached_items(text: str, line: int) -> str | None:
    """The text with a list of all items in place of the dataset of the DataLoader at a line.

    A dataset that is made there gets a name in the line before. None if it is neither a name nor a call, or if the
    loader is made in a loop, or in a function that a loop calls, where the list would be made again.
    """
    tree = parsed(text)
    call = _call(tree, line, ("DataLoader",)) if tree is not None else None
    if tree is None or call is None or not call.args:
        return None
    given, source = call.args[0], PlacedText(text)
    around = [node for node in ast.walk(tree) if node is not call and call in ast.walk(node)]
    if any(isinstance(node, _REPEATS) for node in around) or _called_again(tree, around):
        return None
    if isinstance(given, (ast.Name, ast.Attribute)):
        name, before, place = ast.unparse(given), "", 0
    else:
        kinds = ast.Assign, ast.Return, ast.Expr
        statement = next((node for node in around if isinstance(node, kinds)), None)
        lines = text.splitlines(keepends=True)
        hidden = any(isinstance(node, _MAY_NOT) for node in around)
        if not isinstance(given, ast.Call) or statement is None or hidden:
            return None
        place = statement.lineno - 1
        indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        used = set(re.findall(r"\w+", text))
        name = next(one for one in map("dataset{}".format, ("", *range(2, len(used) + 3))) if one not in used)
        if len(indent.encode()) != statement.col_offset:
            return None  # another statement is before it in this line
        before = f"{indent}{name} = {source.of(given)}\n"
    source.replace(given, f"[{name}[i] for i in range(len({name}))]")
    lines = source.text.splitlines(keepends=True)
    return "".join((*lines[:place], before, *lines[place:]))


def _called_again(tree: ast.Module, around: Sequence[ast.AST]) -> bool:
    """Whether the body of a loop calls one of the functions around a call, directly or through others."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = {node.name for node in functions if node in around}
    for _ in functions:
        names |= {node.name for node in functions if names & _called(node)}
    loops = (node for node in ast.walk(tree) if isinstance(node, _REPEATS))
    return any(names & _called(part) for loop in loops for part in getattr(loop, "body", (loop,)))


def _called(part: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(part) if isinstance(node, ast.Call))
    return {getattr(called, "attr", getattr(called, "id", "")) for called in calls}


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
    tree = parsed(text)
    if tree is None:
        return None
    if there := _values(tree, statement):
        source, new = PlacedText(text), parsed(statement.format(torch="torch", value=value))
        assert new is not None
        (wanted,) = _values(new, statement)
        source.replace(there[0], ast.unparse(wanted))
        return source.text if len(there) == 1 else None
    imported = import_of(tree, "torch")
    if imported is None:
        return None
    return with_lines(text, imported[0], [statement.format(torch=imported[1], value=value)])


def with_model_statement(text: str, line: int, statement: str) -> str | None:
    """The text with a statement about a model, after the statement that makes the optimizer at a line.

    None if its parameters are not those of a single model with a name, or if no such statement stands alone there.
    """
    tree = parsed(text)
    call = _call(tree, line, None) if tree is not None else None
    if tree is None or call is None:
        return None
    model = _model_of(call)
    makes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is call
    ]
    imported = import_of(tree, "torch")
    if not model or len(makes) != 1 or ("{torch}" in statement and imported is None):
        return None
    made = makes[0]
    begin = indentation(text, made)
    if begin is None:
        return None
    names = {"model": model, "torch": imported[1] if imported is not None else ""}
    return with_lines(text, made, [begin + statement.format(**names)])


def _model_of(call: ast.Call) -> str:
    """The name of the only model whose parameters an optimizer gets; "" where it has none."""
    models = {
        ast.unparse(node.func.value) for node in ast.walk(call)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("parameters", "named_parameters")
        and isinstance(node.func.value, (ast.Name, ast.Attribute))
    }  # fmt: skip
    return models.pop() if len(models) == 1 else ""


def _of_loop(text: str, line: int, part: str, given: str, device: str) -> str | None:
    """An edit of `OfLoop`. line: where the optimizer is made. device: "cuda" or "cpu"."""
    if part == "copies":
        return with_argument_of_copies(text, given)
    if part == "collections":
        return with_collections(text, int(given))
    tree = parsed(text)
    call = _call(tree, line, None) if tree is not None else None
    model = "" if call is None else _model_of(call)
    return with_context(text, model, given.replace("{device}", device)) if model else None


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


def short(path: Path) -> str:
    """A file as it is called from the current folder, printable."""
    try:
        return printable(str(path.relative_to(Path.cwd())))
    except ValueError:
        return printable(str(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{printable(str(path))} cannot be read: {error}") from None


# Seconds until the first step, besides those that it took in the trial.
FIRST_S = 60.0
# Starts a process with an edited file and what has to be in effect, or with a change that is made from outside.
Started = Callable[[Mapping[Path, str], Mapping[str, Any], Mapping[str, Any]], Any]


def digest(edit: Edit) -> str:
    """Identifies the text of an edited file; "" without one."""
    return "" if edit.path is None else hashlib.sha256(edit.after.encode()).hexdigest()


def refusal(edit: Edit, changes: Mapping[str, Any], start: Started, prepare_s: float, tick: Tick) -> str:
    """Why an edit is not shown; "" if it trained and did what was measured. changes: those that the edit makes."""
    if edit.path is None:
        return ""

    def trained(*how: Mapping[Any, Any]) -> SideFacts:
        return first_steps(start(*how), prepare_s, tick)

    try:
        edited = trained({edit.path: edit.after}, changes, {})
        if missing := not_in_effect(edited.settings):
            return f"with it, {'; '.join(missing)}"
        measured = trained({}, {}, changes)
        if _differ(edited, measured) and not _differ(measured, trained({}, {}, changes)):
            return "with it, the first losses are others than those of the change that was measured"
    except ChildError as error:
        return f"a scratch copy with it does not train: {printable(str(error))}"
    return ""


def first_steps(started: Any, prepare_s: float, tick: Tick) -> SideFacts:
    """What is known of a process after its first steps. Raises ChildError."""
    with started as process:
        process.prepare(FIRST_S + 2 * prepare_s, tick)
        process.train(LOSSES, FIRST_S, tick, lead=0)
        process.learn(tick)
        facts: SideFacts = process.facts
        return facts


def _differ(one: SideFacts, other: SideFacts) -> bool:
    losses = same_steps(one, other)
    return (
        compare_losses(losses[0], losses[1], (), (one.items_per_step, other.items_per_step))[0] == "differs"
    )
