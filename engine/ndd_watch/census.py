"""Looks closely at single steps: which modules are called, and where batches come from.

Python's profiler hooks see every call, and slow down the one step for which they are on.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

_RECURRENT = "torch.nn.modules.rnn"


class Census:
    """call: code of nn.Module.__call__.

    roots: classes of modules that are called outermost, and whether their input is (time, batch, ...). source: code of
    the function that returned the first tensor which the model received (others may be its own state); names: its
    globals.
    """

    def __init__(self, call: Any, grad_enabled: Callable[[], bool]) -> None:
        self._call, self._grad_enabled = call, grad_enabled
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
            first = next(_flat((*given.get("args", ()), *given.get("kwargs", {}).values())), None)
            if id(first) in returned:
                self.source, self.names = returned[id(first)]

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
