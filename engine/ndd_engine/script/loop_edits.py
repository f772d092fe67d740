"""Edits of the statements of a training loop: around its forward pass and loss, of its copies, and after its step.

The loop is found by its only backward pass. Each function returns None where anything is in doubt.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .source_text import PlacedText, import_of, indentation, parsed, with_lines

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
