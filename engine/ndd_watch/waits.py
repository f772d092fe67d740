"""Marks where a rank waits for the others: in collectives, and in DDP's backward pass after its last gradient.

DDP exchanges gradients while others are computed, and waits for the end of that in a callback of the autograd engine,
which it asks for when its last gradient is ready. A callback that was asked for earlier runs before it: ours, from a
hook of the loss, for some microseconds a step. FSDP and the script itself call collectives of torch.distributed. On a
GPU these only queue their work, and the host does not wait.
"""

from __future__ import annotations

import os
import sys
import weakref
from functools import wraps
from threading import get_ident
from typing import Any, Callable

from .clock import BACKWARD, CURRENT, LAST, TIMED, WAITING, S, now, row
from .steps import Steps

Function = Callable[..., Any]
# Functions of torch.distributed that return when the others have taken part, unless they are asynchronous. Not every
# version has all of them.
COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "recv", "recv_object_list", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list",
)  # fmt: skip
_FUNCTIONAL = "torch.distributed._functional_collectives"


class Waits:
    """compiling: whether torch compiles at present.

    Each wait is part of the phase in which it happens, see clock.WAITING.
    """

    def __init__(self, compiling: Callable[[], bool], steps: Steps) -> None:
        self._compiling, self._steps = compiling, steps
        self._replicas: list[weakref.ref[Any]] = []
        self._engine: Any = None
        self._hook: Any = None

    @property
    def replicated(self) -> bool:
        """Whether the script has made a DistributedDataParallel."""
        return bool(self._replicas)

    def install(self, torch: Any, patch: Callable[..., None], when_imported: Callable[..., None]) -> None:
        """Hook torch. patch(owner, name, make): replaces an attribute by make(it)."""
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is None or not torch.distributed.is_available():
            return
        for name in COLLECTIVES:
            original = getattr(c10d, name, None)
            if original is not None:
                ours = self.waiting(original)
                for owner in (torch.distributed, c10d):
                    patch(owner, name, lambda _, ours=ours: ours)
        patch(c10d.Work, "wait", self.waiting)
        replica = torch.nn.parallel.DistributedDataParallel
        patch(replica, "__init__", self._made)
        patch(replica, "_sync_buffers", self.waiting)
        if (module := sys.modules.get(_FUNCTIONAL)) is not None:
            patch(module, "wait_tensor", self.waiting)
        else:
            when_imported(_FUNCTIONAL, lambda module: patch(module, "wait_tensor", self.waiting))
        self._engine = torch.autograd.Variable._execution_engine

    def waiting(self, original: Function) -> Function:
        """The function, whose time counts as waiting for other ranks."""
        compiling = self._compiling

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if compiling() or S[TIMED] != get_ident() or S[CURRENT] >= WAITING:
                return original(*args, **kwargs)
            t = now()
            outer = S[CURRENT]
            row[outer] += t - S[LAST]
            S[LAST] = t
            S[CURRENT] = outer + WAITING
            try:
                return original(*args, **kwargs)
            finally:
                t = now()
                row[S[CURRENT]] += t - S[LAST]
                S[LAST] = t
                S[CURRENT] = outer

        return call

    def _made(self, original: Function) -> Function:
        @wraps(original)
        def __init__(replica: Any, *args: Any, **kwargs: Any) -> None:
            original(replica, *args, **kwargs)
            self._replicas = [one for one in self._replicas if one() is not None] + [weakref.ref(replica)]

        return __init__

    # A backward pass.

    def before_backward(self, loss: Any) -> None:
        """A timed backward pass begins: mark where its gradients are ready, if DDP exchanges them in it."""
        if not any(getattr(one(), "require_backward_grad_sync", False) for one in self._replicas):
            return
        if isinstance(loss, (list, tuple)):
            loss = loss[0] if loss else None
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(loss, "requires_grad", False) and not getattr(
            compiled, "compiled_autograd_enabled", False
        ):
            self._hook = loss.register_hook(self._began)

    def after_backward(self) -> None:
        """It has ended."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def _began(self, _gradients: Any) -> None:
        try:
            self._engine.queue_callback(self._computed)
        except Exception as error:  # noqa: BLE001  it would reach the script
            self._steps.give_up(error)

    @staticmethod
    def _computed() -> None:
        """All gradients are computed; on a GPU, in a thread of autograd, while the training thread waits for it."""
        if S[CURRENT] == BACKWARD and S[TIMED] > 0:
            t = now()
            row[BACKWARD] += t - S[LAST]
            S[LAST] = t
            S[CURRENT] = BACKWARD + WAITING


def place(torch: Any) -> dict[str, Any]:
    """What is known of the place of this process among the ranks.

    rank and ranks: None if it trains alone. exchanges: a process group connects them. here: the first rank of this host
    and the number of ranks on it, as the launcher says; None if it does not.
    """
    rank, ranks = _number("RANK"), _number("WORLD_SIZE")
    local, local_ranks = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    here = None
    if rank is not None and local is not None and local_ranks is not None:
        here = [rank - local, local_ranks]
    exchanges = False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        exchanges = torch.distributed.get_world_size() > 1
    return {
        "rank": rank, "ranks": ranks, "local_rank": local, "here": here, "exchanges": exchanges,
        "restart": _number("TORCHELASTIC_RESTART_COUNT"),
        "launch": "/".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")),
    }  # fmt: skip


def of_rank(
    rows: list[list[int]], wall_ns: int, numbers: list[int], begin: int, cpu_ns: int
) -> dict[str, Any]:
    """What a rank tells of the timed steps of a window, so that it can be compared with others.

    begin: steps before the window; numbers: steps before each row. Waiting for others is no part of phases_ns and
    own_ns; cpu_ns, processor time, is scaled to these steps. Evaluations and checkpoints are no part of a step.
    """
    owns = [sum(each[:WAITING]) for each in rows]
    waits = [sum(each[WAITING:]) for each in rows]
    phases = [sum(column) for column in zip(*rows)][:WAITING]
    part = (sum(owns) + sum(waits)) / max(wall_ns, 1)
    return {
        "begin": begin, "numbers": [number - begin for number in numbers], "own_ns": owns, "wait_ns": waits,
        "phases_ns": phases, "cpu_ns": round(cpu_ns * part),
    }  # fmt: skip


def strategy_of(parameters: Any, replicated: bool) -> str:
    """ "ddp", "fsdp2", or "" for anything else. parameters: that are trained."""
    if replicated:
        return "ddp"
    sharded = "torch.distributed.fsdp._fully_shard" in sys.modules
    return "fsdp2" if sharded and any(type(item).__name__ == "DTensor" for item in parameters) else ""


def _number(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None
