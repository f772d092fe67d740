"""Reads source, without running it: lines that keep a loss with its graph, collect garbage, or add to a container."""

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


def keeping_line(path: str) -> int:
    """The first line of a file that keeps a loss, see `keeping_lines`; 0 if there is none, or it cannot be read."""
    return next(iter(_found(path, keeping_lines)), 0)


def collecting_line(path: str, function_line: int) -> int:
    """The first line that collects garbage in the function that begins there; 0 if there is none, or unreadable."""
    return next(iter(_found(path, lambda source: _collecting(source, function_line))), 0)


def growing_line(path: str, name: str, attribute: bool = False, function_line: int = 0) -> int:
    """The first line of a file that adds to a variable, or to an attribute, of this name; 0 as above.

    function_line: search in the function that begins there; 0 for the whole file.
    """
    wanted = f".{name}" if attribute else name
    return next(iter(_found(path, lambda source: _growing(source, wanted, function_line))), 0)


def _found(path: str, lines: Callable[[str], list[int]]) -> list[int]:
    try:
        with os.fdopen(open_regular(Path(path), os.O_RDONLY), "rb") as file:
            return lines(file.read(_MOST_BYTES).decode())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _collecting(source: str, function_line: int) -> list[int]:
    tree = ast.parse(source)
    scope = _functions(tree).get(function_line, tree if function_line <= 1 else None)
    calls = (node for node in (_inside(scope) if scope else ()) if isinstance(node, ast.Call))
    return sorted(
        line
        for line, called in ((node.lineno, node.func) for node in calls)
        if (isinstance(called, ast.Attribute) and called.attr == "collect")
        or (isinstance(called, ast.Name) and called.id == "collect")
    )


def _functions(tree: ast.Module) -> dict[int, ast.AST]:
    """The functions of a module by their first line. Python counts the decorators as a part of the function."""
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {min([node.lineno, *(one.lineno for one in node.decorator_list)]): node for node in functions}


# Methods that add an element to what they are called on, and calls that make a longer one of it.
_ADDS = frozenset(
    {"append", "appendleft", "extend", "extendleft", "add", "insert", "update", "setdefault", "put", "push"}
)
_JOINS = frozenset({"cat", "concat", "concatenate", "append", "stack", "vstack", "hstack", "row_stack"})
# Containers of libraries, by the name of the attribute, and what a script calls that adds to them.
_BY_CALL = {
    "_forward_hooks": ("register_forward_hook", "register_module_forward_hook"),
    "_forward_pre_hooks": ("register_forward_pre_hook",),
    "_backward_hooks": ("register_hook", "register_full_backward_hook", "register_backward_hook"),
    "_backward_pre_hooks": ("register_full_backward_pre_hook",),
    "_post_accumulate_grad_hooks": ("register_post_accumulate_grad_hook",),
    "param_groups": ("add_param_group",),
    "figs": ("figure", "subplots", "subplot_mosaic"),
}


def _growing(source: str, name: str, function_line: int) -> list[int]:
    tree = ast.parse(source)
    scope = _functions(tree).get(function_line, tree)
    return sorted(
        node.lineno
        for node in ast.walk(scope)
        if isinstance(node, (ast.stmt, ast.Call)) and _adds(node, name)
    )


def _adds(node: ast.AST, name: str) -> bool:
    """Whether a statement or call adds to what has this name."""
    match node:
        case ast.Call(func=ast.Attribute(attr=method) | ast.Name(id=method)) if method in _BY_CALL.get(
            name[1:], ()
        ):
            return True
        case ast.Call(func=ast.Attribute(attr=method, value=value)) if method in _ADDS:
            return _base(value) == name
        case ast.AugAssign(target=target, op=ast.Add() | ast.BitOr()):
            return _base(target) == name
        case ast.Assign(targets=[ast.Subscript(value=value)]):
            return _base(value) == name
        case ast.Assign(targets=[target], value=ast.Call(func=ast.Attribute(attr=method)) as value):
            return method in _JOINS and _base(target) == name and _mentions(value, name)
        case ast.Assign(targets=[target], value=ast.BinOp(op=ast.Add()) as value):
            return _base(target) == name and _mentions(value, name)
    return False


def _base(node: ast.AST) -> str:
    """The variable or attribute of an expression: ".state" of `optimizer.state[p].setdefault("old", [])`."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(attr=name):
            return f".{name}"
        case ast.Subscript(value=value) | ast.Call(func=ast.Attribute(value=value)):
            return _base(value)
    return ""


def _mentions(node: ast.AST, name: str) -> bool:
    return any(_base(one) == name for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute)))


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
