"""Marks where a rank waits for the others: in collectives, and in DDP's backward pass after its last gradient.

DDP exchanges gradients while others are computed, and waits for the end of that in a callback of the autograd engine,
which it asks for when its last gradient is ready. A callback that was asked for earlier runs before it: ours, from a
hook of the loss, for some microseconds a step. FSDP and the script itself call collectives of torch.distributed. On a
GPU these only queue their work, and the host does not wait.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from threading import get_ident
from typing import Any, Callable

from .clock import BACKWARD, CURRENT, LAST, TIMED, WAITING, S, mark, marks, now, row
from .modules import Modules
from .probes import Probes
from .steps import Steps

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


class GradientExchange:
    """computed: called in a backward pass when all gradients are computed; then DDP waits for other ranks.

    failed: called with an error of this, which the backward pass would raise.
    """

    def __init__(self, computed: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        self._computed, self._failed = computed, failed
        self._hook: Any = None

    def begin(self, loss: Any) -> None:
        """The backward pass of this loss begins, and DDP exchanges gradients in it."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(loss, "requires_grad", False) and not getattr(
            compiled, "compiled_autograd_enabled", False
        ):
            self._hook = loss.register_hook(self._began)

    def end(self) -> None:
        """It has ended."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def _began(self, _gradients: Any) -> None:
        torch: Any = sys.modules["torch"]
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._computed)
        except Exception as error:  # noqa: BLE001  it would reach the script
            self._failed(error)


class Waits:
    """Each wait is part of the phase in which it happens, see clock.WAITING."""

    def __init__(self, steps: Steps, modules: Modules) -> None:
        self._steps, self._modules = steps, modules
        self._exchange = GradientExchange(self._computed, steps.missed)

    @property
    def replicated(self) -> bool:
        """Whether the script has called a DistributedDataParallel."""
        return bool(self._modules.replicas)

    def install(self, torch: Any, probes: Probes) -> Callable[[], None]:
        """Hook torch, in a process that exchanges data with others. Returns how what is no probe is undone."""
        c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
        functions = [getattr(c10d, name, None) for name in COLLECTIVES]
        replica = torch.nn.parallel.DistributedDataParallel
        self._modules.replica = replica
        functional = sys.modules.get(_FUNCTIONAL)
        functions += [replica._sync_buffers, getattr(functional, "wait_tensor", None)]
        begins, ends = self._hooks()
        for function in functions:
            if function is not None:
                probes.put(function, begins, ends, False)
        return self._wait(c10d.Work, begins, ends)

    def _hooks(self) -> tuple[Any, Any]:
        """Of a function whose time counts as waiting for other ranks."""
        depth = self._depth = [0]

        def begins(_probe: Any, zero: int) -> int:
            if S[TIMED] == get_ident():
                depth[0] += 1
                if S[CURRENT] < WAITING:
                    depth[0] = 1
                    t = now()
                    row[S[CURRENT]] += t - S[LAST]
                    S[LAST] = t
                    S[CURRENT] += WAITING
                    if marks:
                        mark(S[CURRENT])
            return zero

        def ends(_probe: Any, zero: int) -> int:
            if S[TIMED] == get_ident() and depth[0]:
                depth[0] -= 1
                if not depth[0] and S[CURRENT] >= WAITING:
                    t = now()
                    row[S[CURRENT]] += t - S[LAST]
                    S[LAST] = t
                    S[CURRENT] -= WAITING
                    if marks:
                        mark(S[CURRENT])
            return zero

        return begins, ends

    @staticmethod
    def _wait(work: Any, begins: Any, ends: Any) -> Callable[[], None]:
        """`Work.wait` is no function of Python: the method of the class is another object while this is in place."""
        original = work.wait

        @wraps(original)
        def wait(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            begins(None, 0)
            try:
                return original(self, *args, **kwargs)
            finally:
                ends(None, 0)

        work.wait = wait

        def undo() -> None:
            if work.wait is wait:
                work.wait = original

        return undo

    # A backward pass.

    def before_backward(self, loss: Any) -> None:
        """A timed backward pass begins: mark where its gradients are ready, if DDP exchanges them in it."""
        if any(getattr(one(), "require_backward_grad_sync", False) for one in self._modules.replicas):
            self._exchange.begin(loss)

    def after_backward(self) -> None:
        """It has ended."""
        self._exchange.end()

    @staticmethod
    def _computed() -> None:
        """All gradients are computed; on a GPU, in a thread of autograd, while the training thread waits for it."""
        if S[CURRENT] == BACKWARD and S[TIMED] > 0:
            t = now()
            row[BACKWARD] += t - S[LAST]
            S[LAST] = t
            S[CURRENT] = BACKWARD + WAITING
            if marks:
                mark(S[CURRENT])


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


def strategy_of(parameters: Any, replicated: bool) -> str:
    """ "ddp", "fsdp2", or "" for anything else. parameters: that are trained."""
    if replicated:
        return "ddp"
    sharded = "torch.distributed.fsdp._fully_shard" in sys.modules
    return "fsdp2" if sharded and any(type(item).__name__ == "DTensor" for item in parameters) else ""


def _number(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None
