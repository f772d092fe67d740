"""What a window tells beside the times of its phases, which own training and observed scripts tell by the same code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .apart import Compilations, ours
from .finite import Finite
from .mapped import Heap, allocator
from .receiving import Receiving
from .slowing import Garbage

# What a mark says that is recorded once, by the name of the measurement.
UNMEASURED = {
    "device": "steps are not timed on the GPU",
    "values": "losses and other values on the GPU are not read",
    "memory": "the memory of the GPU is not measured",
}


class WindowFacts:
    """garbage, finite: of the loop. receiving: of its batches."""

    def __init__(self, garbage: Garbage, finite: Finite, receiving: Receiving) -> None:
        self.garbage, self.finite, self.receiving = garbage, finite, receiving
        self._compilations, self._heap = Compilations(), Heap()
        self._failed: dict[str, str] = {}
        self._told: set[str] = set()

    def fields(
        self,
        *,
        step: int,
        epoch: int,
        epoch_step: int,
        steps: int,
        micro_steps: int,
        items: int,
        tokens_per_item: float,
        losses: Sequence[tuple[int, float]],
        lr: float | None,
        loss_scale: float | None,
        grad_norm: float | None,
        profiled: bool,
        kept_steps: int,
        passes: int,
        earlier: int = 0,
    ) -> dict[str, Any]:
        """The fields of a WindowEvent that are no times of phases, see ndd_engine.record.events.

        losses: (step, value) of those that were read in the window. earlier: steps of earlier processes, which steps
        of the record include.
        """
        return {
            "step": step, "epoch": epoch, "epoch_step": epoch_step, "steps": steps, "micro_steps": micro_steps,
            "items": items, "tokens": round(items * tokens_per_item),
            "loss": sum(value for _, value in losses) / len(losses) if losses else None,
            "last_loss": losses[-1] if losses else None, "lr": lr, "loss_scale": loss_scale, "grad_norm": grad_norm,
            "profiled": profiled, "kept_steps": kept_steps, "passes": passes,
            "received": self.receiving.take(), **self._heap.read(), **self.garbage.take(), **self.finite.take(earlier),
        }  # fmt: skip

    def marks(self, **failed: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """What the compiler did since the last call, and what cannot be measured: (kind, text, data) of each.

        failed: reasons by the name of a measurement, see UNMEASURED; "" without one. Each is told once.
        """
        yield from self._compilations.take()
        for name, reason in {**self._failed, **failed}.items():
            if reason and name not in self._told:
                self._told.add(name)
                yield "warning", f"{UNMEASURED[name]}: {reason}", {}

    def memory(self, device: Any) -> dict[str, Any] | None:
        """The fields of a MemoryEvent; None if there is no such GPU, or its allocator counts nothing."""
        if device is None or device.type != "cuda" or "memory" in self._failed:
            return None
        try:
            return allocator(device)
        except Exception as error:  # an allocator of somebody else may count nothing
            if not ours(error):
                raise
            self._failed["memory"] = str(error).partition("\n")[0] or type(error).__name__
            return None
