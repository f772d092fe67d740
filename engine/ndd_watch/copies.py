"""Times copies to the GPU in the script's own loop: `x.to(device)`, `x.cuda()`.

They are methods in C, in which no probe has a place. So once a script trains on a GPU, the class torch.Tensor gets
functions of these names, which call the methods. A cast is no copy: it ends on the device where it began. A call within
a forward pass, a dataset or an optimizer is part of that.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, Callable

from .blocking import like, overridden, watched
from .clock import CURRENT, LAST, OTHER, TIMED, TO_DEVICE, S, gpu, mark, marks, now, row
from .looks import Looks

_NAMES = ("to", "cuda")


class Copies:
    """failed: called with an error of ours. unseen: called with the names of what is not timed, and why."""

    def __init__(
        self,
        torch: Any,
        looks: Looks,
        failed: Callable[[BaseException], None],
        unseen: Callable[[list[str], str], None],
    ) -> None:
        self._torch, self._kind = torch, torch.Tensor
        self._looks, self._failed, self._unseen = looks, failed, unseen
        self._put: dict[str, Any] = {}

    def put(self) -> None:
        """Put the functions in place, if nobody sees them. Raises AttributeError if torch has no such method."""
        if overridden(self._torch) or watched(self._torch._C):
            self._tell()
            return
        for name in _NAMES:
            if name not in self._kind.__dict__:
                self._put[name] = self._timed(getattr(self._kind, name))
                setattr(self._kind, name, self._put[name])

    def remove(self) -> None:
        """Take them out, except where somebody has put others in their place."""
        while self._put:
            name, function = self._put.popitem()
            if self._kind.__dict__.get(name) is function:
                delattr(self._kind, name)

    def _tell(self) -> None:
        self._unseen([f"torch.Tensor.{name}" for name in _NAMES], "a class or a mode of the script sees them")

    def _timed(self, method: Callable[..., Any]) -> Any:
        traced, looks, failed = self._looks.traced, self._looks, self._failed
        modes, core = self._torch._C._len_torch_function_stack, self._torch._C
        remove, tell = self.remove, self._tell

        def copy(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if modes() and watched(core):
                try:
                    remove()  # the mode is given what torch.Tensor has under this name
                    tell()
                except Exception as error:  # noqa: BLE001
                    failed(error)
                return method(self, *args, **kwargs)
            if S[TIMED] != get_ident() or S[CURRENT] != OTHER or traced() or not looks.is_tensor(self):
                return method(self, *args, **kwargs)
            marked = bool(marks)
            if marked:
                mark(TO_DEVICE)
            begin = now()
            found = method(self, *args, **kwargs)
            end = now()
            try:
                if S[CURRENT] == OTHER and looks.copied(self, found):
                    row[OTHER] += begin - S[LAST]
                    row[TO_DEVICE] += end - begin
                    S[LAST] = end
                elif marked:
                    gpu.take_back(OTHER)
                if marked and marks:
                    mark(OTHER)
            except Exception as error:  # noqa: BLE001
                failed(error)
            return found

        return like(copy, method.__name__, method)
