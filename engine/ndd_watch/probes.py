"""Hears functions: inside them by probes, or all of a thread for a while.

All functions of a thread are heard by `sys.monitoring`; before Python 3.12 by a profile function, for a while.
`Learning` learns from a single step where its batches come from, and `watch` times code that cannot be replaced. A
profiler of the script has precedence: where there is one, nothing is heard; where one begins, ours ends before it.

A probe is inside a function, so that it stays the same object: its code is replaced by the same code with an operation
at its begin and at its ends:

    PROBE + 0

where PROBE is a constant with an `__add__` of ours. Where a hook looks at variables of the function, it is

    PROBE + 0 and LOOK + (variable,)

so that a compiler, for which PROBE + 0 is 0, never meets the second part.

Identity, pickling by name, attributes, signature, flags, source lines, stack depth and `stacklevel` stay as they are.
Pickled by value, for example by cloudpickle, a probe becomes 0. Compilers of torch, which read the code, add constants
while they trace: nothing of it is left in a graph.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import tokenize
import types
import weakref
from collections.abc import Iterable, Iterator
from threading import get_ident
from typing import Any, Callable, Literal, NamedTuple

from .apart import Dropped, ours, signal
from .clock import CURRENT, DATA_WAIT, TIMED, S, enter, now
from .looks import Looks, listed_numbers, own, own_frame

# Signals whose handlers raise exceptions again and again, as time limits do.
ALARMS = signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF
# Tool ids of sys.monitoring that nobody has reserved, and that of profilers.
_IDS = (4, 3)
_PROFILERS = 2
# Events that ours listen to.
_EVENTS = (
    "PY_START", "PY_RESUME", "PY_THROW", "PY_RETURN", "PY_YIELD", "PY_UNWIND", "CALL", "C_RETURN", "C_RAISE",
)  # fmt: skip

# Calls within each other after which a profile function is taken out, and how many more have to be possible. Where the
# recursion limit leaves no room for a profile function, Python 3.11 crashes.
MOST_DEPTH, SPARE_DEPTH = 100, 400

# Functions around a step that may call the one that makes batches.
MOST_CALLERS = 4

# To look closely at a step ends after so many usual ones, and nanoseconds.
LONGER, SPARE_NS = 10, 20_000_000

# Everything that listens in this process, at most one at a time.
_active: list[Listening] = []


class Listening:
    """returns: called with the frame of each function that returns, and what it returns."""

    def __init__(self, returns: Callable[[Any, Any], None]) -> None:
        self._returns = returns
        self._tool: int | None = None
        self._thread = self._depth = 0
        self._profiled_by: Any = None

    def begin(self) -> bool:
        """Begin on this thread; returns whether that is possible."""
        if _active or profiled() or depth() + SPARE_DEPTH > sys.getrecursionlimit():
            return False
        self._depth = 0
        self._thread = get_ident()
        if hasattr(sys, "monitoring"):
            if not self._begin_monitoring():
                return False
            _active.append(self)
            return True
        profile = self._profile
        _active.append(self)
        sys.setprofile(profile)
        self._profiled_by = profile  # from now on it makes way
        return True

    @property
    def ended(self) -> bool:
        """Whether it does not listen, perhaps since a profiler of the script has begun."""
        return self not in _active

    def end(self) -> None:
        """End; safe to call twice, also by two threads at once."""
        try:
            _active.remove(self)
        except ValueError:
            return
        if self._tool is not None:
            tool, self._tool = self._tool, None
            free_tool(tool)
        elif sys.getprofile() is self._profiled_by:
            sys.setprofile(None)
        self._profiled_by = None

    def _profile(self, frame: Any, event: str, value: Any) -> None:
        if self not in _active:  # somebody has put it back
            sys.setprofile(None)
        elif event == "return":
            self._depth -= 1
            self._returns(frame, value)
        elif event == "call":
            self._depth += 1
            if self._depth > MOST_DEPTH:
                self.end()

    def _begin_monitoring(self) -> bool:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        tool = tool_id()
        if tool is None:
            return False
        monitoring.use_tool_id(tool, "ndd-console")
        self._tool = tool
        returns, thread = self._returns, self._thread

        def returned(_code: Any, _offset: int, value: Any) -> None:
            if get_ident() == thread:
                returns(sys._getframe(1), value)

        wanted = (monitoring.events.PY_RETURN, monitoring.events.PY_YIELD)
        for event in wanted:
            monitoring.register_callback(tool, event, returned)
        monitoring.set_events(tool, wanted[0] | wanted[1])
        return True


def depth() -> int:
    """Frames of Python on this thread."""
    frame: Any = sys._getframe()
    count = 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


def _callers(loop: Any) -> list[Any]:
    """Code of a function that runs on this thread, and of the script's own functions that have called it."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not loop:
        frame = frame.f_back
    found = [loop]
    while frame is not None and len(found) < MOST_CALLERS:
        frame = own_frame(frame.f_back, own)
        if frame is not None:
            found.append(frame.f_code)
    return found


def tool_id() -> int | None:
    """An id of sys.monitoring that nobody uses; None without one, before Python 3.12, and where signals are handled."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None or handles_signals():
        return None
    return next((one for one in _IDS if monitoring.get_tool(one) is None), None)


def free_tool(tool: int) -> None:
    """Give an id of sys.monitoring back, and forget its callbacks: Python keeps them, and all that they refer to."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    monitoring.set_events(tool, 0)
    for name in _EVENTS:
        monitoring.register_callback(tool, getattr(monitoring.events, name), None)
    monitoring.free_tool_id(tool)


def handles_alarms() -> bool:
    """Whether functions of the script handle alarms."""
    return handles_signals(ALARMS)


def handles_signals(numbers: Iterable[int] | None = None) -> bool:
    """Whether functions of the script handle any of these signals (default: all); the usual one for Ctrl-C is none.

    An exception that such a function raises while Python calls ours is lost in some calls, and crashes others: a
    profile function, a callback of the garbage collector, and one of sys.monitoring in Python 3.13.
    """
    usual = signal.Handlers, type(signal.default_int_handler), type(None)
    numbers = signal.valid_signals() if numbers is None else numbers
    return any(not isinstance(signal.getsignal(number), usual) for number in numbers)


def profiled() -> bool:
    """Whether a profiler of somebody else is active on this thread."""
    if sys.getprofile() is not None:
        return True
    # Profilers use sys.monitoring from 3.12 on.
    monitoring: Any = getattr(sys, "monitoring", None)
    return monitoring is not None and monitoring.get_tool(_PROFILERS) is not None


def make_way() -> None:
    """A profile function is about to be set by the script: ours ends before."""
    for listening in _active:
        if listening._profiled_by is not None and listening._thread == get_ident():
            listening.end()


# Lists whose first numbers are remembered; and functions that return what a model acts on, not what it trains on.
MOST_LISTS, _OF_ENVIRONMENTS = 64, ("step", "reset")


class Learning:
    """Learns which function returned the first tensor of the model's input, from every call in a step.

    Also one that returned lists of the same sizes that begin with the same numbers. It keeps nothing of the script's:
    tensors are remembered weakly. source: code of the function, and its globals by `names`; None before it is known.
    """

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self.source: Any = None
        self.names: dict[str, Any] = {}
        self.reported: set[Any] = set()
        self._loops: list[Any] = []
        self._until = 0
        self._returned: dict[int, tuple[weakref.ref[Any], Any, dict[str, Any]]] = {}
        # (sizes, first numbers) of lists -> the function that returned them first.
        self._lists: dict[Any, tuple[Any, dict[str, Any]]] = {}
        self._listening = Listening(self._returns)

    def listen(self, loop: Any, usual_ns: int) -> bool:
        """Learn until `deaf`, or for much longer than a step usually takes: the training may be over.

        loop: code of the function that trains; its callers may make the batches. False under another profiler, and
        where the script handles alarms.
        """
        if handles_alarms():
            return False
        self._loops, self._returned, self._lists = _callers(loop), {}, {}
        self._until = now() + LONGER * usual_ns + SPARE_NS
        return self._listening.begin()

    def deaf(self) -> None:
        """End `listen`."""
        self._listening.end()
        self._returned, self._lists = {}, {}

    def received(self, tensor: Any, grad: bool) -> None:
        """A model receives this tensor first. grad: to train on it; what it acts on is no batch."""
        if self.source is not None:
            return
        found = self._returned.get(id(tensor))
        if found is not None and found[0]() is tensor:
            self.source, self.names = found[1:]
        elif grad and self._lists and (listed := self._lists.get(self._looks.first_numbers(tensor))):
            self.source, self.names = listed

    def _returns(self, frame: Any, value: Any) -> None:
        """A function returns this value."""
        try:
            if now() > self._until:
                self.deaf()
                return
            if value is None or frame.f_back is None:
                return
            caller = frame.f_back.f_code
            if not any(one is caller for one in self._loops):
                return
            if not self._looks.allowed():
                return
            for tensor in self._looks.tensors(value):
                known = self._returned.get(id(tensor))
                if known is None or known[0]() is not tensor:
                    # Its first returner made it; later ones pass it on.
                    self._returned[id(tensor)] = weakref.ref(tensor), frame.f_code, frame.f_globals
            if frame.f_code.co_name not in _OF_ENVIRONMENTS and len(self._lists) < MOST_LISTS:
                for numbers in listed_numbers(value):
                    self._lists.setdefault(numbers, (frame.f_code, frame.f_globals))
        except Exception as error:
            with Dropped():
                self.deaf()
            if not ours(error):
                raise


def watch(code: Any) -> Callable[[], None] | None:
    """Count a function's time, up to each yield, as waiting for data: also that of a generator which exists already.

    Returns how to end that; None if not possible.
    """
    tool = tool_id()
    if tool is None:
        return None
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    outer = -1

    def entered(_code: Any, _offset: int) -> None:
        nonlocal outer
        # If it ended with an exception, that was not heard.
        if S[TIMED] == get_ident() and (outer < 0 or S[CURRENT] != DATA_WAIT):
            outer = S[CURRENT]
            enter(DATA_WAIT)

    def left(_code: Any, _offset: int, _value: Any) -> None:
        nonlocal outer
        if outer >= 0 and S[TIMED] == get_ident():
            if S[CURRENT] == DATA_WAIT:
                enter(outer)
            outer = -1

    events = monitoring.events
    monitoring.use_tool_id(tool, "ndd-console")
    for event, heard in (
        (events.PY_START, entered), (events.PY_RESUME, entered), (events.PY_YIELD, left), (events.PY_RETURN, left),
    ):  # fmt: skip
        monitoring.register_callback(tool, event, heard)
    wanted = events.PY_START | events.PY_RESUME | events.PY_YIELD | events.PY_RETURN
    monitoring.set_local_events(tool, code, wanted)

    def undo() -> None:
        monitoring.set_local_events(tool, code, 0)
        free_tool(tool)

    return undo


Hook = Callable[[Any, int], int]
_BEGIN, _END, _BEGIN_LOOK, _END_LOOK = "ndd: begins", "ndd: ends", "ndd: looks at begin", "ndd: looks at end"
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_FUTURES = 0x1FF0000  # flags of "from __future__ import"


class Probe:
    """A constant of a function's code; a subclass has an `__add__`."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return int, (0,)


class VariableHook(NamedTuple):
    """A hook that looks at arguments of its function: `look` gets their values where `due` returns 1."""

    due: Hook
    look: Callable[[Any, Any], int]
    names: tuple[str, ...]


class _Operation(NamedTuple):
    """A hook as constants of a code."""

    probe: Probe
    look: Probe | None = None
    names: tuple[str, ...] = ()


Rests = Literal["", "all", "end"]


class _Changed(NamedTuple):
    """A function with probes: its code before, with all probes, and in steps that are timed as a whole."""

    function: weakref.ref[Any]
    before: Any
    ours: Any
    resting: Any


def arguments(code: Any) -> tuple[str, ...]:
    """The names of the arguments of a function."""
    several = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + several]
    return names


class Probes:
    """The probes of this process."""

    def __init__(self) -> None:
        self._changed: list[_Changed] = []
        # Ids of our code.
        self.codes: set[int] = set()
        self._kinds: list[type] = []

    def put(
        self,
        function: Any,
        begins: Hook | VariableHook | None,
        ends: Hook | VariableHook | None,
        always: bool,
        rests: Rests = "",
    ) -> bool:
        """Have begins and ends called in a function. Returns False if its source is not there, or is another one.

        always: ends is called also when the function raises an exception. A compiler of torch cannot trace all of such
        code, so that this is for functions that it does not trace. rests: which probes are out in steps that are timed
        as a whole, see `rest`.
        """
        before = getattr(function, "__code__", None)
        if not isinstance(function, types.FunctionType) or before is None or before.co_flags & _GENERATORS:
            return False
        looked = [name for one in (begins, ends) if isinstance(one, VariableHook) for name in one.names]
        # Other variables may have no value yet.
        if not set(looked) <= set(arguments(before)):
            return False
        codes = before, *_inside(before)  # a comprehension has a code of its own before Python 3.12
        imported = _imported(function, tuple(dict.fromkeys(name for code in codes for name in code.co_names)))
        qualified = getattr(before, "co_qualname", function.__qualname__)
        first, last = self._operation(begins), self._operation(ends)
        made = _with_probes(before, qualified, imported, first, last, always)
        if made is None:
            return False
        resting = made
        if rests == "all":
            resting = before
        elif rests == "end":
            resting = _with_probes(before, qualified, imported, first, None, always)
        self._changed.append(_Changed(weakref.ref(function), before, made, resting))
        self.codes.update((id(made), id(resting)))
        function.__code__ = made
        return True

    def has(self, function: Any) -> bool:
        """Whether a function has probes."""
        return any(one.function() is function for one in self._changed)

    def whole(self, code: Any) -> bool:
        """Whether a code has all of its probes."""
        return any(one.ours is code for one in self._changed)

    def remove(self) -> None:
        """Give all functions their code back, except those that somebody else has changed since."""
        while self._changed:
            one = self._changed.pop()
            function = one.function()
            if function is not None and function.__code__ in (one.ours, one.resting):
                function.__code__ = one.before

    def stay(self, function: Any) -> None:
        """Keep the probes of a function also in steps that are timed as a whole."""
        self._changed = [
            one._replace(resting=one.ours) if one.function() is function else one for one in self._changed
        ]

    def rest(self, on: bool) -> None:
        """Take the probes out that steps do not need that are timed as a whole, or put them back.

        A profiler of the script would count the two forms of a function apart, so nothing changes under one.
        """
        if on and profiled():
            return
        for one in self._changed:
            if one.resting is one.ours:
                continue
            now, then = (one.ours, one.resting) if on else (one.resting, one.ours)
            function = one.function()
            if function is not None and function.__code__ is now:
                function.__code__ = then

    def switch(self, function: Any) -> Callable[[bool], None]:
        """Returns what takes the probes of this function out, or puts them back."""
        known = next(one for one in self._changed if one.function() is function)
        before, ours, out = known.before, known.ours, False

        def put(on: bool) -> None:
            # Python reports each look at the code and each change to audit hooks.
            nonlocal out
            if on and out:
                function.__code__, out = ours, False
            elif not on and function.__code__ is ours and not profiled():
                function.__code__, out = before, True

        return put

    def _operation(self, hook: Hook | VariableHook | None) -> _Operation | None:
        if hook is None:
            return None
        if isinstance(hook, VariableHook):
            return _Operation(self._probe(hook.due), self._probe(hook.look), hook.names)
        return _Operation(self._probe(hook))

    def _probe(self, hook: Hook) -> Probe:
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


def _with_probes(
    code: Any,
    qualified: str,
    imported: list[str],
    begins: _Operation | None,
    ends: _Operation | None,
    always: bool,
) -> Any:
    """The code with probes; None if it cannot be made."""
    expressions = _expression(_BEGIN, _BEGIN_LOOK, begins), _expression(_END, _END_LOOK, ends)
    try:
        with _Unwarned():
            plain = _compiled(code, qualified, imported, None, None, False)
            if plain is None or not _same(plain, code):
                return None
            made = _compiled(code, qualified, imported, *expressions, always)
    except (OSError, SyntaxError, ValueError, LookupError, UnicodeError) as error:
        if not ours(error) and not isinstance(error, SyntaxError):
            raise
        return None
    constants: dict[str, Any] = {}
    for one, probe, look in ((begins, _BEGIN, _BEGIN_LOOK), (ends, _END, _END_LOOK)):
        if one is not None:
            constants |= {probe: one.probe, look: one.look}
    return made.replace(
        co_consts=tuple(
            constants.get(item, item) if isinstance(item, str) else item for item in made.co_consts
        )
    )


class _Unwarned:
    """A context without the warnings of the compiler: the script had them when its file was compiled.

    `warnings.catch_warnings` would have all other warnings told again.
    """

    _ignored = "ignore", None, Warning, None, 0

    def __enter__(self) -> None:
        self._filters: Any = getattr(sys.modules.get("warnings"), "filters", None)
        if type(self._filters) is list:
            self._filters.insert(0, self._ignored)

    def __exit__(self, *_: object) -> None:
        if type(self._filters) is list:
            with Dropped(ValueError):
                self._filters.remove(self._ignored)


_SAME = (
    "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount", "co_firstlineno",
)  # fmt: skip


def _same(plain: Any, code: Any) -> bool:
    """Whether a code compiled from the source is the one that runs: the file may have changed since."""
    if any(getattr(plain, name) != getattr(code, name) for name in _SAME):
        return False
    if _lines(plain) != _lines(code) or len(plain.co_consts) != len(code.co_consts):
        return False
    return all(
        _same(one, other) if isinstance(one, types.CodeType) and isinstance(other, types.CodeType)
        else type(one) is type(other) and one == other
        for one, other in zip(plain.co_consts, code.co_consts)
    )  # fmt: skip


def _lines(code: Any) -> Any:
    """Which line each instruction is of. Python 3.9 has its table only."""
    return list(code.co_lines()) if hasattr(code, "co_lines") else code.co_lnotab


def _compiled(code: Any, qualified: str, imported: list[str], begins: Any, ends: Any, always: bool) -> Any:
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
    _locate(tree, (1, 0, 1, 0))
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    flags = code.co_flags & _FUTURES
    whole = compile(tree, code.co_filename, "exec", flags, dont_inherit=True)
    made = next((one for one in _inside(whole) if one.co_name == code.co_name), None)
    if made is None:
        return None
    more = {"co_qualname": code.co_qualname} if hasattr(code, "co_qualname") else {}
    return made.replace(co_firstlineno=code.co_firstlineno, co_flags=code.co_flags, **more)


_LOCATION = ("lineno", "col_offset", "end_lineno", "end_col_offset")


def _locate(node: Any, around: tuple[int, ...]) -> None:
    """As `ast.fix_missing_locations`, which leaves a reference cycle for the garbage collector of the script."""
    if "lineno" in node._attributes:
        for name, value in zip(_LOCATION, around):
            if getattr(node, name, None) is None:
                setattr(node, name, value)
        around = tuple(getattr(node, name) for name in _LOCATION)
    for child in ast.iter_child_nodes(node):
        _locate(child, around)


def _change(function: Any, begins: Any, ends: Any, always: bool) -> None:
    """Put these expressions at the beginning and the ends of the function."""
    body: list[Any] = function.body
    first = body[0]
    documented = isinstance(first, ast.Expr) and isinstance(getattr(first, "value", None), ast.Constant)
    head, rest = body[:documented], body[documented:] or [ast.copy_location(ast.Pass(), first)]
    if ends and always:
        rest = [ast.copy_location(ast.Try(rest, [], [], [ast.Expr(ends)]), rest[0])]
    elif ends:
        end = ast.copy_location(ast.Expr(ends), rest[-1])
        rest = [*(_Returns(ends).visit(one) for one in rest), end]
    if begins:
        rest = [ast.copy_location(ast.Expr(begins), rest[0]), *rest]
    function.body = [*head, *rest]


def _expression(probe: str, look: str, operation: _Operation | None) -> Any:
    """An operation, with strings in the place of its constants; None without one."""
    if operation is None:
        return None
    first = ast.BinOp(ast.Constant(probe), ast.Add(), ast.Constant(0))
    if operation.look is None:
        return first
    values = ast.Tuple([ast.Name(name, ast.Load()) for name in operation.names], ast.Load())
    return ast.BoolOp(ast.And(), [first, ast.BinOp(ast.Constant(look), ast.Add(), values)])


class _Returns(ast.NodeTransformer):
    """`return x` becomes `return (x, PROBE + 0)[0]`. ends: the expression in the place of the probe."""

    def __init__(self, ends: Any) -> None:
        self._ends = ends

    def visit_Return(self, node: Any) -> Any:
        values = ast.Tuple([node.value or ast.Constant(None), copy.deepcopy(self._ends)], ast.Load())
        return ast.copy_location(ast.Return(ast.Subscript(values, ast.Constant(0), ast.Load())), node)

    def _leave(self, node: Any) -> Any:
        return node  # another function

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _leave  # noqa: N815


def _inside(code: Any) -> Iterator[Any]:
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield item
            yield from _inside(item)
