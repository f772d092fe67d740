"""Reads source, without running it: lines that keep a loss with its graph, carry a graph from step to step, add hooks
and the like, add to a container, keep batches or open files, collect garbage, or draw random numbers."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ndd_engine.files import open_regular

# Bytes of the largest file that is read.
_MOST_BYTES = 1 << 20

# Functions of `random`, numpy.random and torch that draw random numbers, and what seeds a generator.
_DRAWS = frozenset({
    "random", "uniform", "randint", "randrange", "gauss", "choice", "choices", "sample", "shuffle", "rand", "randn",
    "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial", "standard_normal",
    "permutation", "random_sample", "normalvariate",
})  # fmt: skip
_SEEDS = frozenset({"manual_seed", "seed", "default_rng", "Random", "RandomState", "fork_rng"})
_RANDOM_MODULES = frozenset({"random", "np.random", "numpy.random", "torch"})
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


def carrying_line(path: str) -> int:
    """The first line of a file that carries a graph to the next step; 0 if there is none, or it cannot be read."""
    return next(iter(_found(path, carrying_lines)), 0)


def adding_line(path: str, method: str) -> int:
    """The first line of a file that calls a method in a loop or a function; 0 if there is none, or unreadable.

    method: a regular expression of its name.
    """
    return next(iter(_found(path, lambda source: _calling(source, method))), 0)


def collecting_line(path: str, function_line: int) -> int:
    """The first line that collects garbage in the function that begins there; 0 if there is none, or unreadable."""
    return next(iter(_found(path, lambda source: _collecting(source, function_line))), 0)


def drawing_line(path: str, function_line: int) -> int:
    """The first line that draws random numbers in the function that begins there, or in one that it calls; 0 if none.

    Functions that seed a generator are taken to give the same numbers again.
    """
    return next(iter(_found(path, lambda source: _drawing(source, function_line))), 0)


def growing_line(path: str, name: str, attribute: bool = False, function_line: int = 0) -> int:
    """The first line of a file that adds to a variable, or to an attribute, of this name; 0 as above.

    function_line: search in the function that begins there; 0 for the whole file.
    """
    wanted = f".{name}" if attribute else name
    return next(iter(_found(path, lambda source: _growing(source, wanted, function_line))), 0)


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
        if isinstance(node, ast.Call) and (called := functions.get(_last_name(node))) is not None:
            names = [one.arg for one in called.args.args]
            names = names[1:] if names[:1] == ["self"] else names
            given = zip(names, node.args, strict=False)
            passed |= {name for name, value in given if not yielded.isdisjoint(_with_storage(value))}
    return sorted(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, (ast.Call, ast.Assign)) and _keeps_storage(node, passed)
    )


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
        if isinstance(node, ast.Call) and _last_name(node) == "open" and id(node) not in ends
    )


def _found(path: str, lines: Callable[[str], list[int]]) -> list[int]:
    try:
        with os.fdopen(open_regular(Path(path), os.O_RDONLY), "rb") as file:
            return lines(file.read(_MOST_BYTES).decode())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _drawing(source: str, function_line: int) -> list[int]:
    tree = ast.parse(source)
    first = _begins(tree).get(function_line)
    if first is None:
        return []
    by_name = {node.name: node for node in _begins(tree).values()}
    called = [
        by_name[name] for name in map(_last_name, _calls(first)) if name in by_name and name != first.name
    ]
    found = []
    for scope in (first, *called):
        calls = list(_calls(scope))
        if any(_last_name(call) in _SEEDS and (call.args or call.keywords) for call in calls):
            return []
        found += sorted(call.lineno for call in calls if _draws(call))
    return found


def _calls(scope: ast.AST) -> Iterator[ast.Call]:
    return (node for node in _inside(scope) if isinstance(node, ast.Call))


def _last_name(call: ast.Call) -> str:
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _draws(call: ast.Call) -> bool:
    """Whether a call draws from a generator that nobody seeds for the item."""
    name, func = _last_name(call), call.func
    if name not in _DRAWS or any(keyword.arg == "generator" for keyword in call.keywords):
        return False
    return not isinstance(func, ast.Attribute) or ast.unparse(func.value) in _RANDOM_MODULES


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _begins(tree: ast.Module) -> dict[int, Function]:
    """The functions of a module by their first line. Python counts the decorators as a part of the function."""
    functions = (node for node in ast.walk(tree) if isinstance(node, Function))
    return {min([node.lineno, *(one.lineno for one in node.decorator_list)]): node for node in functions}


def _collecting(source: str, function_line: int) -> list[int]:
    tree = ast.parse(source)
    scope = _begins(tree).get(function_line, tree if function_line <= 1 else None)
    calls = (node for node in (_inside(scope) if scope else ()) if isinstance(node, ast.Call))
    return sorted(
        line
        for line, called in ((node.lineno, node.func) for node in calls)
        if (isinstance(called, ast.Attribute) and called.attr == "collect")
        or (isinstance(called, ast.Name) and called.id == "collect")
    )


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
    scope = _begins(tree).get(function_line, tree)
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


def _calling(source: str, method: str) -> list[int]:
    scopes = (ast.For, ast.While, ast.FunctionDef)
    return sorted(
        node.lineno
        for scope in ast.walk(ast.parse(source)) if isinstance(scope, scopes)
        for node in ast.walk(scope)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and re.fullmatch(method, node.func.attr)
    )  # fmt: skip


def carrying_lines(source: str) -> list[int]:
    """The lines that compute a value from that of the step before. Raises SyntaxError, ValueError.

    source: the text of a module. Lines that pass a value to a function which returns its next one, or that add up
    losses, come first, then backward passes that retain the graph.
    """
    tree = ast.parse(source)
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While)) and _goes_back(node)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    carried = {line for loop in loops for line in _carried(loop)}
    # A function may keep a value for its next call in an attribute.
    carried |= {line for function in functions for line in _carried(function, ".")}
    retained = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and _retains(node)}
    return [*sorted(carried), *sorted(retained)]


def _goes_back(loop: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(loop))


def _carried(scope: ast.For | ast.While | ast.FunctionDef, only: str = "") -> Iterator[int]:
    """The lines of a scope which compute a value from the one that it had before. only: a part of its name."""
    nodes = [node for statement in scope.body for node in (statement, *_inside(statement))]
    losses = {name for node in nodes for name in _backward_of(node)}
    # What is computed anew in each step, from a batch or from nothing of the step before, is not carried.
    anew = _places(scope.target) if isinstance(scope, ast.For) else set[str]()
    for node in nodes:
        if not isinstance(node, (ast.Assign, ast.AugAssign)):
            continue
        targets = set[str]().union(
            *map(_places, node.targets if isinstance(node, ast.Assign) else [node.target])
        )
        from_itself = targets & _places_with_graph(node.value)
        if isinstance(node, ast.AugAssign):
            from_itself = targets if not losses.isdisjoint({*_with_graph(node.value), *targets}) else set()
        elif not any(isinstance(one, ast.Call) for one in ast.walk(node.value)) and losses.isdisjoint(
            targets
        ):
            from_itself = set()
        if any(only in name for name in from_itself - anew):
            yield node.lineno
        elif node in scope.body and not from_itself:
            anew |= targets


def _places(node: ast.AST) -> set[str]:
    """Names and attributes, such as `state` and `self.state`, of a target."""
    match node:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return set[str]().union(*map(_places, parts))
        case ast.Starred(value=value):
            return _places(value)
        case ast.Name() | ast.Attribute():
            return {ast.unparse(node)}
    return set()


def _places_with_graph(node: ast.AST) -> set[str]:
    """The same of those in an expression whose graph is part of its value."""
    match node:
        case ast.Attribute(attr=attr) if attr in _FREES_METHODS:
            return set()
        case ast.Name() | ast.Attribute():
            return {ast.unparse(node)}
        case ast.Call(func=ast.Attribute(attr=attr)) if attr in _FREES_METHODS | _FREES:
            return set()
        case ast.Call(func=ast.Name(id=name)) if name in _FREES:
            return set()
        case ast.GeneratorExp(elt=item, generators=[loop]) | ast.ListComp(elt=item, generators=[loop]):
            return _places_with_graph(loop.iter) if _places(loop.target) & _places_with_graph(item) else set()
        case ast.Call(args=arguments, keywords=keywords):
            parts: list[ast.AST] = [*arguments, *keywords]
        case _:
            parts = list(ast.iter_child_nodes(node))
    return set[str]().union(*map(_places_with_graph, parts))


def _retains(call: ast.Call) -> bool:
    """Whether this is a backward pass that retains the graph."""
    retains = (
        one.arg == "retain_graph" and getattr(one.value, "value", True) is not False for one in call.keywords
    )
    return isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and any(retains)


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
