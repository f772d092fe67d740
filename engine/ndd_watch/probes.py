"""Has our functions called where another one begins and ends: inside it, so that it stays the same object.

The code of the function is replaced by the same code with an operation at its begin and at its ends:

    PROBE + 0

where PROBE is a constant with an `__add__` of ours. So identity, pickling by name, attributes, signature, flags, source
lines, stack depth and `stacklevel` stay as they are. Pickled by value, for example by cloudpickle, a probe becomes 0.
Compilers of torch, which read the code, add constants while they trace: nothing of it is left in a graph.
"""

from __future__ import annotations

import ast
import inspect
import sys
import tokenize
import types
import weakref
from collections.abc import Iterator
from typing import Any, Callable

from .listening import profiled

Hook = Callable[[Any, int], int]
_BEGIN, _END = "ndd: begins", "ndd: ends"
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_FUTURES = 0x1FF0000  # flags of "from __future__ import"


class Probe:
    """A constant of a function's code; a subclass has an `__add__`."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return int, (0,)


class Probes:
    """The probes of this process."""

    def __init__(self) -> None:
        # Those that are out in steps that are timed as a whole: see `rest`.
        self._resting: list[tuple[weakref.ref[Any], Any, Any]] = []
        # Functions, their code before, and ours.
        self._changed: list[tuple[weakref.ref[Any], Any, Any]] = []
        # Ids of our code. While a compiler traces a function, a probe is called from the compiler's own code instead.
        self.codes: set[int] = set()
        self._kinds: list[type] = []

    def put(
        self, function: Any, begins: Hook | None, ends: Hook | None, always: bool, rests: bool = False
    ) -> bool:
        """Have begins and ends called in a function. Returns False if its source is not there, or is another one.

        always: ends is called also when the function raises an exception. A compiler of torch cannot trace all of such
        code, so that this is for functions that it does not trace. rests: see `rest`.
        """
        before = getattr(function, "__code__", None)
        if not isinstance(function, types.FunctionType) or before is None or before.co_flags & _GENERATORS:
            return False
        imported = _imported(function, before.co_names)
        qualified = getattr(before, "co_qualname", function.__qualname__)
        made = _with_probes(before, qualified, imported, self._probe(begins), self._probe(ends), always)
        if made is None:
            return False
        known = weakref.ref(function), before, made
        self._changed.append(known)
        if rests:
            self._resting.append(known)
        self.codes.add(id(made))
        function.__code__ = made
        return True

    def has(self, function: Any) -> bool:
        """Whether a function has probes."""
        return any(one() is function for one, _, _ in self._changed)

    def remove(self) -> None:
        """Give all functions their code back, except those that somebody else has changed since."""
        self._resting = []
        while self._changed:
            known, before, ours = self._changed.pop()
            function = known()
            if function is not None and function.__code__ is ours:
                function.__code__ = before

    def rest(self, on: bool) -> None:
        """Take the probes out that steps do not need that are timed as a whole, or put them back.

        A profiler of the script would count the two forms of a function apart, so nothing changes under one.
        """
        if on and profiled():
            return
        for known, before, ours in self._resting:
            now, then = (ours, before) if on else (before, ours)
            function = known()
            if function is not None and function.__code__ is now:
                function.__code__ = then

    def switch(self, function: Any) -> Callable[[bool], None]:
        """Returns what takes the probes of this function out, or puts them back."""
        before, ours = next(codes for one, *codes in self._changed if one() is function)

        def put(on: bool) -> None:
            if not on and profiled():
                return
            if function.__code__ is (before if on else ours):
                function.__code__ = ours if on else before

        return put

    def _probe(self, hook: Hook | None) -> Probe | None:
        if hook is None:
            return None
        kind = type("Probe", (Probe,), {"__slots__": (), "__add__": hook})
        self._kinds.append(kind)
        self._known(kind)
        found: Probe = kind()
        return found

    def known_to_compilers(self) -> None:
        """Have torch's compiler take probes for constants. Called again once it has been imported."""
        for kind in self._kinds:
            self._known(kind)

    @staticmethod
    def _known(kind: type) -> None:
        utilities: Any = sys.modules.get("torch._dynamo.utils")
        types_of_constants = getattr(utilities, "common_constant_types", None)
        if isinstance(types_of_constants, set):
            types_of_constants.add(kind)


def _imported(function: Any, names: tuple[str, ...]) -> list[str]:
    """The names that the module of a function has imported: attributes of those are compiled in another way."""
    values = function.__globals__
    own, found = values.get("__name__"), []
    for name in names:
        value = values.get(name)
        kind = type(value)
        if kind is types.ModuleType or (kind in (types.FunctionType, type) and value.__module__ != own):
            found.append(name)
    return found


def _with_probes(code: Any, qualified: str, imported: list[str], begins: Any, ends: Any, always: bool) -> Any:
    """The code with probes; None if it cannot be made."""
    try:
        plain = _compiled(code, qualified, imported, False, False, False)
        if plain is None or any(getattr(plain, name) != getattr(code, name) for name in _SAME):
            return None
        made = _compiled(code, qualified, imported, begins is not None, ends is not None, always)
    except (OSError, SyntaxError, ValueError, LookupError, UnicodeError):
        return None
    constants = {_BEGIN: begins, _END: ends}
    return made.replace(
        co_consts=tuple(
            constants.get(item, item) if isinstance(item, str) else item for item in made.co_consts
        )
    )


_SAME = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount")


def _compiled(code: Any, qualified: str, imported: list[str], begins: bool, ends: bool, always: bool) -> Any:
    """The code compiled anew from its source. Raises OSError, SyntaxError, ValueError or LookupError."""
    with tokenize.open(code.co_filename) as file:
        lines = file.readlines()[code.co_firstlineno - 1 :]
    block = inspect.getblock(lines)
    # Inside another block, so that columns stay: tracebacks show them.
    inside = block[0][:1].isspace()
    tree: Any = ast.parse("".join([*["if 1:\n"] * inside, *block]))
    if inside:
        ast.increment_lineno(tree, -1)
        tree = ast.Module(tree.body[0].body, [])
    function: Any = tree.body[0]
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or len(tree.body) != 1:
        return None
    function.decorator_list = []
    _change(function, begins, ends, always)
    body: Any = function
    owner = qualified.rpartition(".")[0].rpartition(".")[2]
    if owner and owner != "<locals>":  # private names carry that of their class
        inner: Any = ast.parse("class Owner: pass").body[0]
        inner.name, inner.body = owner, [body]
        body = inner
    if code.co_freevars:
        names = [ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)) for name in code.co_freevars]
        outer: Any = ast.parse("def outer(): pass").body[0]
        outer.body = [*names, body]
        body = outer
    tree.body = [*(ast.Import([ast.alias(name)]) for name in imported), body]
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    flags = code.co_flags & _FUTURES
    whole = compile(tree, code.co_filename, "exec", flags, dont_inherit=True)
    made = next((one for one in _inside(whole) if one.co_name == code.co_name), None)
    if made is None:
        return None
    more = {"co_qualname": code.co_qualname} if hasattr(code, "co_qualname") else {}
    return made.replace(co_firstlineno=code.co_firstlineno, co_flags=code.co_flags, **more)


def _change(function: Any, begins: bool, ends: bool, always: bool) -> None:
    """Put probes into the function."""
    body: list[Any] = function.body
    first = body[0]
    documented = isinstance(first, ast.Expr) and isinstance(getattr(first, "value", None), ast.Constant)
    head, rest = body[:documented], body[documented:] or [ast.copy_location(ast.Pass(), first)]
    if ends and always:
        rest = [ast.copy_location(ast.Try(rest, [], [], [ast.Expr(_operation(_END))]), rest[0])]
    elif ends:
        rest = [_Returns().visit(one) for one in rest] + [ast.Expr(_operation(_END))]
    if begins:
        rest = [ast.copy_location(ast.Expr(_operation(_BEGIN)), rest[0]), *rest]
    function.body = [*head, *rest]


def _operation(name: str) -> Any:
    return ast.BinOp(ast.Constant(name), ast.Add(), ast.Constant(0))


class _Returns(ast.NodeTransformer):
    """`return x` becomes `return (x, PROBE + 0)[0]`."""

    def visit_Return(self, node: Any) -> Any:
        values = ast.Tuple([node.value or ast.Constant(None), _operation(_END)], ast.Load())
        return ast.copy_location(ast.Return(ast.Subscript(values, ast.Constant(0), ast.Load())), node)

    def _leave(self, node: Any) -> Any:
        return node  # another function

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _leave  # noqa: N815


def _inside(code: Any) -> Iterator[Any]:
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield item
            yield from _inside(item)
