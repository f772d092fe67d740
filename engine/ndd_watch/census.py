"""Looks closely at single steps: which modules are called, where batches come from, which functions take long.

A thread that reads the stack of another one sees the script only where it releases the interpreter lock. Python's own
profiler hooks see every call, and slow down the one step for which they are on.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable

from .clock import now

# Functions of the script, and waits for the device, that a profiled step names.
MOST_FUNCTIONS = 12
# Code inside a function, which is called by that function's name.
INLINE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"})
# Measurements of what the profiler adds to a call, and calls of each.
TRIALS, TRIAL_CALLS = 5, 100
_RECURRENT = "torch.nn.modules.rnn"
_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
# Methods of a tensor that wait for its device.
_WAITING = frozenset(
    f"<method '{name}' of 'torch._C.TensorBase' objects>"
    for name in ("item", "tolist", "cpu", "numpy", "nonzero")
)


class Census:
    """own: whether a code object is the script's own. call: code of nn.Module.__call__.

    roots: classes of modules that are called outermost, and whether their input is (time, batch, ...). source: code of
    the function that returned the tensors which the model received; names: its globals.
    """

    def __init__(self, own: Callable[[Any], bool], call: Any, grad_enabled: Callable[[], bool]) -> None:
        self._own, self._call, self._grad_enabled = own, call, grad_enabled
        self._profiler: Any = None
        self._begun = 0
        # Nanoseconds that the profiler adds to a call; measured once.
        self._added: float | None = None
        self.roots: dict[type, bool] = {}
        self.source: Any = None
        self.names: dict[str, Any] = {}
        self.reported: set[Any] = set()

    def listen(self, loop: Any) -> None:
        """Learn until `deaf`. loop: code of the function with the training loop. No effect under another profiler."""
        if sys.getprofile() is not None:
            return
        returned: dict[int, tuple[Any, dict[str, Any]]] = {}
        kept: list[Any] = []
        depth = 0
        root: type = object
        length: int | None = None

        def called(frame: Any) -> None:
            nonlocal depth, root, length
            depth += 1
            given = frame.f_locals
            module = given["self"]
            kind = type(module)
            if depth > 1:
                # As many steps of time as the first dimension of what the model received.
                if getattr(module, "batch_first", True) is False and kind.__module__ == _RECURRENT:
                    self.roots[root] = length is not None and length == _length(given.get("args", ()))
                return
            root, length = kind, _length(given.get("args", ()))
            if not (module.training or self._grad_enabled()):
                sys.setprofile(None)  # an evaluation may be long
                return
            self.roots.setdefault(kind, False)
            if self.source is not None or "modules.loss" in kind.__module__:
                return
            for item in _flat((*given.get("args", ()), *given.get("kwargs", {}).values())):
                if id(item) in returned:
                    self.source, self.names = returned[id(item)]
                    return

        def heard(frame: Any, event: str, value: Any) -> None:
            nonlocal depth
            try:
                if event == "call":
                    if frame.f_code is self._call:
                        called(frame)
                elif event == "return":
                    if frame.f_code is self._call:
                        depth -= 1
                    if value is not None and frame.f_back is not None and frame.f_back.f_code is loop:
                        kept.append(value)  # so that nothing else gets its id
                        for item in _flat((value,)):
                            # Its first returner made it; later ones pass it on.
                            returned.setdefault(id(item), (frame.f_code, frame.f_globals))
            except Exception:  # noqa: BLE001  an error here would reach the script
                sys.setprofile(None)

        sys.setprofile(heard)

    @staticmethod
    def deaf() -> None:
        """End `listen`."""
        sys.setprofile(None)

    def begin(self) -> None:
        """Begin to profile. Does nothing if the script profiles itself."""
        from _lsprof import Profiler

        if self._added is None and sys.getprofile() is None:
            self._added = _added_ns(Profiler)
        self._begun = now()
        profiler = Profiler(builtins=True, subcalls=True)
        try:
            profiler.enable()
        except ValueError:
            self._profiler = None
        else:
            self._profiler = profiler

    def end(self) -> dict[str, Any]:
        """End to profile: {"ns": of the step, "functions": […], "waits": […]}, longest first.

        functions: [file, line, name, calls, ns, own ns, caller]; ns with everything that the function calls,
        own ns without other functions of the script and without torch. waits: [file, line, name, method, calls, ns] of
        methods that wait for the device. What the profiler adds to every call is subtracted.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return {"ns": 0, "functions": [], "waits": []}
        profiler.disable()
        step_ns, added = now() - self._begun, self._added or 0.0
        stats = profiler.getstats()
        entries = [entry for entry in stats if self._own(entry.code)]
        own = {entry.code for entry in entries}
        functions, waits = [], []
        # Function -> the one that calls it for most of its time.
        callers: dict[Any, tuple[float, str]] = {}
        for entry in entries:
            for call in entry.calls or ():
                if call.code is not entry.code and call.totaltime > callers.get(call.code, (0.0, ""))[0]:
                    callers[call.code] = call.totaltime, entry.code.co_name
        for entry in entries:
            code, inner, calls = entry.code, 0.0, 0
            caller = callers.get(code, (0.0, ""))[1]
            inline = code.co_name in INLINE and caller
            place = [code.co_filename, code.co_firstlineno, caller if inline else code.co_name]
            for call in entry.calls or ():
                if call.code is not code and (call.code in own or _of_torch(call.code)):
                    inner += call.totaltime
                calls += call.callcount
                if call.code in _WAITING:
                    method = call.code.split("'")[1]
                    waits.append([*place, method, call.callcount, round(call.totaltime * 1e9)])
            own_ns = max((entry.totaltime - inner) * 1e9 - calls * added, 0.0)
            spent = round(entry.totaltime * 1e9)
            functions.append([*place, entry.callcount, spent, round(own_ns), "" if inline else caller])
        functions.sort(key=lambda item: -item[5])
        waits.sort(key=lambda item: -item[5])
        step_ns -= round(added * sum(entry.callcount for entry in stats))
        return {
            "ns": max(step_ns, 1), "functions": functions[:MOST_FUNCTIONS], "waits": waits[:MOST_FUNCTIONS],
        }  # fmt: skip


def _added_ns(profiler: Any) -> float:
    """Nanoseconds that the profiler adds to a call of a built-in function."""
    call, given, least = len, (), [float("inf")] * 2
    for number in range(2 * TRIALS):
        watching = profiler(builtins=True, subcalls=True)
        if number % 2:
            watching.enable()
        t = now()
        for _ in range(TRIAL_CALLS):
            call(given)
        t = now() - t
        watching.disable()
        least[number % 2] = min(least[number % 2], t)
    return max((least[1] - least[0]) / TRIAL_CALLS, 0.0)


def _of_torch(code: Any) -> bool:
    """Whether a function belongs to torch, or is one of our hooks on it; that of a built-in is its description."""
    if isinstance(code, str):
        return "torch" in code
    return os.sep + "torch" + os.sep in code.co_filename or code.co_filename.startswith(_OURS)


def _flat(values: Any, depth: int = 3) -> Any:
    """The tensors in nested containers."""
    for value in values:
        if hasattr(value, "data_ptr"):
            yield value
        elif depth and isinstance(value, dict):
            yield from _flat(value.values(), depth - 1)
        elif depth and isinstance(value, (list, tuple)):
            yield from _flat(value, depth - 1)


def _length(values: Any) -> int | None:
    """The first dimension of the first tensor."""
    for item in _flat(values):
        return int(item.shape[0]) if item.dim() else None
    return None
