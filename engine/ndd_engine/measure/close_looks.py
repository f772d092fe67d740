"""What a run of one's own does without need: gradients of whole tables, graphs that are kept, anomaly detection.

Looked at in a profiled step, and graphs that are kept in a few steps after it. Meanwhile, calls of `backward` and of
embeddings are heard. Nothing here raises into the training, and nothing is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from ndd_watch.looks import Looks, own, own_frame, short
from ndd_watch.probes import Probes, VariableHook
from ndd_watch.slowing import Retained, Tables

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_BACKWARD: Any = torch.autograd.backward


class CloseLooks:
    """model: that trains. optimizers: those that update it. step: the number of the present step.

    keeps: whether the user's own code calls `backward`, and may keep graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Callable[[], Iterable[Any]],
        step: Callable[[], int],
        keeps: bool,
    ) -> None:
        self._model, self._optimizers, self._step, self._keeps = model, optimizers, step, keeps
        self._looks = Looks(torch)
        self._tables: Tables | None = None
        self._retained = Retained()
        self._handles: list[Any] = []
        # The code of `backward` as it is, and the one that is heard: made once, since each probe is a class that stays.
        self._codes: tuple[Any, Any] | None = None
        self._thread = self._seen = 0
        # Nanoseconds that looking at graphs has taken in the present step.
        self.spent_ns = 0
        # Whether graphs were found to be kept, which no event has told yet.
        self.news = False

    def begin(self) -> None:
        """A profiled step begins."""
        self._thread, self._tables = get_ident(), Tables(torch, self._looks)
        self._retained.end()
        self.spent_ns = 0
        if not _compiled():
            self._tables.enters(self._model, 1, None)
            self._handles = [
                module.register_forward_pre_hook(self._reads)
                for module in self._model.modules()
                if isinstance(module, _EMBEDDINGS)
            ]
        if self._handles or self._keeps:
            self._hear()

    def end(self) -> dict[str, Any]:
        """It has ended: fields of its event."""
        self._forget()
        tables, self._tables = self._tables, None
        found: dict[str, Any] = {"anomaly": torch.is_anomaly_enabled()}
        if tables is not None:
            found["tables"] = [tuple(row) for row in tables.found(self._optimizers())]
        if self._retained.where is not None:
            file, line = self._retained.where
            found["retains"], self.news = (short(file), line), False
        elif self._keeps:
            self._retained.begin()
            self._seen = self._step()
            if self._retained.active:
                self._hear()
        return found

    def drop(self) -> None:
        """Look at nothing more. Safe to call twice."""
        with suppress(Exception):
            self._tables = None
            self._retained.end()
            self._forget()

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._codes is not None and _BACKWARD.__code__ is self._codes[1]:
            _BACKWARD.__code__ = self._codes[0]

    def _reads(self, module: nn.Module, given: Any) -> None:
        """An embedding is called."""
        with suppress(Exception):
            if self._tables is not None and get_ident() == self._thread:
                self._tables.enters(module, 2, given)

    def _hear(self) -> None:
        """Hear calls of `backward`: `Tensor.backward` calls this function."""
        if self._codes is not None:
            if _BACKWARD.__code__ is self._codes[0]:
                _BACKWARD.__code__ = self._codes[1]
            return

        def due(_probe: Any, zero: int) -> int:
            return int(get_ident() == self._thread)

        def begins(_probe: Any, given: tuple[Any, Any, Any]) -> int:
            begin = perf_counter_ns()
            with suppress(Exception):
                self._begins(*given)
            self.spent_ns += perf_counter_ns() - begin
            return 0

        look = VariableHook(due, begins, ("tensors", "retain_graph", "create_graph"))
        before = _BACKWARD.__code__
        if Probes().put(_BACKWARD, look, None, always=False):
            self._codes = before, _BACKWARD.__code__

    def _begins(self, tensors: Any, retains: Any, creates: Any) -> None:
        """A backward pass begins."""
        loss = self._looks.first_tensor((tensors,), 2) if self._looks.allowed() else None
        if loss is None:
            return
        if self._tables is not None:
            with self._looks.silent():
                self._tables.loss(loss)
        if not self._retained.active:
            return
        step = self._step()
        if step != self._seen:
            if self._seen and not self._retained.step_ended():
                self.news = self._retained.where is not None
                self._forget()
                return
            self._seen = step
        frame = own_frame(sys._getframe(1), own)
        line = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        with self._looks.silent():
            self._retained.hear(loss, retains is True and not creates, line)
        if not self._retained.active:
            self._forget()


def _compiled() -> bool:
    """Whether code was compiled, which a hook would have compiled again."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return bool(getattr(dynamo, "counters", {}).get("frames")) if dynamo is not None else False
