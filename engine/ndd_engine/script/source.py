"""Reads the source of a script, without running it: lines that keep a loss with its graph, or collect garbage."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ndd_engine.files import open_regular

# Bytes of the largest file that is read.
_MOST_BYTES = 1 << 20

# Calls and attributes whose result has no graph.
_FREES = frozenset(
    {"float", "int", "bool", "str", "repr", "round", "print", "isnan", "isinf", "isfinite", "len"}
)
_FREES_METHODS = frozenset(
    {"item", "detach", "tolist", "numpy", "data", "backward", "shape", "size", "format"}
)
# Methods whose result shares the memory of the tensor.
_VIEWS = frozenset({
    "view", "reshape", "squeeze", "unsqueeze", "flatten", "detach", "numpy", "t", "transpose", "permute", "contiguous",
    "cpu", "expand", "narrow", "values", "items",
})  # fmt: skip


def keeping_line(path: str) -> int:
    """The first line of a file that keeps a loss, see `keeping_lines`; 0 if there is none, or it cannot be read."""
    return next(iter(_found(path, keeping_lines)), 0)


def collecting_line(path: str, function_line: int) -> int:
    """The first line that collects garbage in the function that begins there; 0 if there is none, or unreadable."""
    return next(iter(_found(path, lambda source: _collecting(source, function_line))), 0)


def kept_tensors_line(path: str) -> int:
    """The first line that keeps a part of a batch as it came from a loop; 0 if there is none, or unreadable."""
    return next(iter(_found(path, _keeping_batches)), 0)


def kept_files_line(path: str) -> int:
    """The first line that opens a file and does not close it; 0 if there is none, or unreadable."""
    return next(iter(_found(path, _opening)), 0)


def _keeping_batches(source: str) -> list[int]:
    """Lines that append, without a copy, what a loop yields, also as an argument of a function."""
    tree = ast.parse(source)
    yielded = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.For)
        for name in _names(node.target)
        if isinstance(node.iter, (ast.Name, ast.Attribute, ast.Call))
    }
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    passed = set(yielded)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (called := functions.get(_called(node))) is not None:
            names = [one.arg for one in called.args.args]
            names = names[1:] if names[:1] == ["self"] else names
            given = zip(names, node.args, strict=False)
            passed |= {name for name, value in given if not yielded.isdisjoint(_with_storage(value))}
    return sorted(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, (ast.Call, ast.Assign)) and _keeps_storage(node, passed)
    )


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _keeps_storage(node: ast.AST, names: set[str]) -> bool:
    match node:
        case ast.Call(
            func=ast.Attribute(attr="append" | "extend" | "add" | "put" | "appendleft"), args=arguments
        ):
            return any(not names.isdisjoint(_with_storage(one)) for one in arguments)
        case ast.Assign(targets=[ast.Subscript()], value=value):
            return not names.isdisjoint(_with_storage(value))
    return False


def _with_storage(node: ast.AST) -> Iterator[str]:
    """Names in an expression whose memory is part of its value: a view or a container, no result of a computation."""
    match node:
        case ast.Name(id=name):
            yield name
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _with_storage(part)
        case ast.Dict(values=parts):
            for part in parts:
                yield from _with_storage(part)
        case ast.Subscript(value=value) | ast.Starred(value=value):
            yield from _with_storage(value)
        case ast.IfExp(body=body, orelse=other):
            yield from _with_storage(body)
            yield from _with_storage(other)
        case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in _VIEWS:
            yield from _with_storage(value)


def _opening(source: str) -> list[int]:
    tree = ast.parse(source)
    closed = {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "close"
        if isinstance(node.func.value, ast.Name)
    }
    ends: set[int] = set()  # calls whose file is closed
    for node in ast.walk(tree):
        match node:
            case ast.With(items=items) | ast.AsyncWith(items=items):
                ends |= {id(inner) for item in items for inner in ast.walk(item.context_expr)}
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in closed:
                ends.add(id(value))
            case ast.Attribute(
                value=ast.Call() as value
            ):  # open(path).read(): nothing refers to it afterwards
                ends.add(id(value))
    return sorted(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called(node) == "open" and id(node) not in ends
    )


def _found(path: str, lines: Callable[[str], list[int]]) -> list[int]:
    try:
        with os.fdopen(open_regular(Path(path), os.O_RDONLY), "rb") as file:
            return lines(file.read(_MOST_BYTES).decode())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _collecting(source: str, function_line: int) -> list[int]:
    tree = ast.parse(source)
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    # Python counts the decorators as a part of the function.
    begins = {min([node.lineno, *(one.lineno for one in node.decorator_list)]): node for node in functions}
    scope = begins.get(function_line, tree if function_line <= 1 else None)
    calls = (node for node in (_inside(scope) if scope else ()) if isinstance(node, ast.Call))
    return sorted(
        line
        for line, called in ((node.lineno, node.func) for node in calls)
        if (isinstance(called, ast.Attribute) and called.attr == "collect")
        or (isinstance(called, ast.Name) and called.id == "collect")
    )


def keeping_lines(source: str) -> list[int]:
    """The lines that add a loss to something that outlives the step. Raises SyntaxError, ValueError.

    source: the text of a module. A loss is what `backward` is called on, or what `backward` and `scale` get.
    """
    tree = ast.parse(source)
    found: set[int] = set()
    for scope in [
        tree,
        *(node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))),
    ]:
        nodes = list(_inside(scope))
        losses = {name for node in nodes for name in _backward_of(node)}
        found |= {
            node.lineno for node in nodes if isinstance(node, (ast.stmt, ast.Call)) and _keeps(node, losses)
        }
    return sorted(found)


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of the functions inside."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _inside(child)


def _backward_of(node: ast.AST) -> Iterator[str]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return
    if node.func.attr == "backward":
        yield from _with_graph(node.func.value)
    if node.func.attr in ("backward", "scale"):
        for argument in node.args[:1]:
            yield from _with_graph(argument)


def _keeps(node: ast.AST, losses: set[str]) -> bool:
    """Whether a statement or call adds a loss, with its graph, to something."""
    match node:
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub(), value=value):
            return not losses.isdisjoint(_with_graph(value)) and losses.isdisjoint(_names(target))
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add()) as value):
            same = ast.dump(target).replace("Store()", "Load()") == ast.dump(left)
            return (
                same and not losses.isdisjoint(_with_graph(value.right)) and losses.isdisjoint(_names(target))
            )
        case ast.Assign(targets=[ast.Subscript()], value=value):
            return not losses.isdisjoint(_with_graph(value))
        case ast.Call(
            func=ast.Attribute(attr="append" | "extend" | "update" | "add" | "put"), args=arguments
        ):
            return any(not losses.isdisjoint(_with_graph(one)) for one in arguments)
    return False


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _with_graph(node: ast.AST) -> Iterator[str]:
    """Names in an expression whose graph is part of its value."""
    match node:
        case ast.Name(id=name):
            yield name
        case ast.Attribute(attr=attr) if attr in _FREES_METHODS:
            return
        case ast.Call(func=ast.Attribute(attr=attr)) if attr in _FREES_METHODS | _FREES:
            return
        case ast.Call(func=ast.Name(id=name)) if name in _FREES:
            return
        case ast.JoinedStr() | ast.Compare():
            return
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _with_graph(child)
