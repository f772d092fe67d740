"""Traces of a training step as a GPU would run it, recorded without a GPU from fake tensors.

Fake tensors run a step without computing or allocating; a dispatch mode records their storages and the operations with
their shapes. They are CPU tensors because autograd on "cuda" needs a CUDA build of torch, so `AsOnGpu` substitutes what
a GPU does differently:

- attention uses the flash or memory-efficient kernel, not the math kernel with its (B, H, T, T) scores;
- autocast runs more operations in fp32 than on the CPU;
- an LSTM or GRU is one cuDNN call with a reserve buffer, not thousands of small operations;
- gradients are clipped, and unscaled after fp16, by functions that take all of them at once.

Scratch memory inside kernels is only included where its size is known (`SCRATCH`). The result is a prediction that has
not been verified on the GPU.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from ndd_engine.config import Config
from ndd_engine.errors import UsageError
from ndd_engine.hardware.kernels import RECURRENT, RECURRENT_BACKWARD, Op, Shape
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Workload
from ndd_watch import recompute
from ndd_watch.clock import PhaseClock

from .estimate import FREED, MANY, ONE, Trace
from .rank_memory import is_sharded, strategy_for_fakes

aten = torch.ops.aten


HALVES = (torch.float16, torch.bfloat16)


# cuDNN's LSTM reserve buffer: values per time step, direction and unit (four gates, the cell and its tanh). The exact
# size differs by a few per cent between versions.
RESERVED = 6.0


# Functions that autocast runs in fp32 on a GPU but not on the CPU.
IN_FP32 = frozenset({
    "softmax", "log_softmax", "layer_norm", "group_norm", "rms_norm", "exp", "log", "log2", "log10", "log1p", "expm1",
    "pow", "rsqrt", "sum", "cumsum", "cumprod", "prod", "norm", "softplus", "cosine_similarity", "gelu_", "erfinv",
})  # fmt: skip


_ON = "cpu"
# The number of the second micro-batch of the second step, counted from 1.
_LAST = 3


OWN_STEP = (
    "the factory has its own step, which works on its own modules, so it cannot be traced for a GPU that is not in "
    "this machine; check it on a machine with that GPU"
)


class TooLongError(Exception):
    """A forward pass has more operations than asked for, so it probably loops over time."""


class Traced(NamedTuple):
    """A step as a GPU would run it. trace: its allocations; micro, update: operations of one micro-batch that adds to
    the gradients, and of the update after the last."""

    trace: Trace
    micro: list[Op]
    update: list[Op]


def traced(
    config: Config,
    workload: Workload,
    batch: Any,
    most_ops: int | None = None,
    watch: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
) -> Traced:
    """Trace a step with one micro-batch like `batch`, and a step with two. watch: around both, given the fake model.

    Raises TooLongError if a forward pass has more than `most_ops` operations, and what a step raises on fake tensors: a
    model with data-dependent control flow cannot be traced.
    """
    if workload.training.step is not None:
        raise UsageError(OWN_STEP)
    amp = config.precision.amp  # set for all steps by _autocast
    config = config.changed(
        precision={"amp": "off"}, speed={"compile": "off", "cuda_graph": False, "attention": "auto"}
    )
    strategy = strategy_for_fakes(config, workload.training)
    follow, clock = Follow(most_ops), PhaseClock()
    # Tensors that are neither parameters nor buffers become fake when they are used.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tree_map(lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)
    model, known = _faked(workload.model, fake)
    if is_sharded(config):
        # On the host, from which each layer moves to the GPU only as it is sharded.
        for whole in model.parameters():
            follow.ignore(whole)
    clock.gpu.listen(SimpleNamespace(mark=lambda phase: follow.enter(clock.names[phase].partition("/")[0])))
    as_on_gpu = AsOnGpu(follow, bool(config.memory.recompute))
    with fake, as_on_gpu, follow, follow.resizing(), recompute.second_passes_in(as_on_gpu):
        stepper = Stepper(
            workload.with_model(model, known), config, torch.device(_ON), total_steps=1000, strategy=strategy
        )
        for parameter in (*stepper.model.parameters(), *stepper.model.buffers()):
            follow.note(parameter, "parameter")
        follow.enter("other")
        with _autocast(amp), watch(stepper.model):
            for index, micros in enumerate((1, 2)):
                stepper.config = stepper.config.changed(batch={"accumulation": micros})
                stepper.eager_step(_copies(fakes), clock, index)
        follow.mark(MANY)
        weights = tuple(_shaped(item) for item in stepper.parameters)
    return Traced(follow.trace(), *_as_on_gpu(follow.ops, follow.last, weights, amp == "fp16"))


# Phases of the update, and those in which nothing of a step is computed on a GPU.
_UPDATE = ("clip", "optimizer", "zero_grad")
_OUTSIDE = ("data_wait", "to_device", "log", "other")


def _as_on_gpu(
    ops: Sequence[Op], last: int, weights: tuple[Shape, ...], scaled: bool
) -> tuple[list[Op], list[Op]]:
    """The operations of the last micro-batch, which begins at `last`, and of the update.

    The CPU clips one gradient after the other.
    """
    step = [op for op in ops[last:] if op.phase not in _OUTSIDE]
    update = [op for op in step if op.phase in _UPDATE and op.phase != "clip"]
    first = [Op("clip", "_amp_foreach_non_finite_check_and_unscale_", (weights,), None)] if scaled else []
    if any(op.phase == "clip" for op in step):
        norms = Shape((len(weights),), 4, "fp32")
        first += [
            Op("clip", "_foreach_norm", (weights,), None),
            Op("clip", "stack", ((Shape((1,), 4, "fp32"),) * len(weights),), norms.dims),
            Op("clip", "linalg_vector_norm", (norms,), ()),
            Op("clip", "_foreach_mul_", (weights,), None),
        ]
    return [op for op in step if op.phase not in _UPDATE], [*first, *update]


def _copies(batch: Any) -> Iterator[Any]:
    """Endless copies of a batch, each with its own memory, as if copied to the GPU."""
    while True:
        yield tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def _faked(model: nn.Module, fake: FakeTensorMode) -> tuple[nn.Module, dict[int, Any]]:
    """A copy with fake parameters and buffers, and the copies by id; shared tensors stay shared."""
    known: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        replaced: Tensor = fake.from_tensor(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            replaced = nn.Parameter(replaced, tensor.requires_grad)
        known[id(tensor)] = replaced
    copied = copy.deepcopy(model, known)
    # torch cannot move fake parameters, and they need not be moved.
    copied.to = lambda *_, **__: copied  # type: ignore[method-assign]
    return copied, known


@contextmanager
def _autocast(amp: str) -> Iterator[None]:
    """CPU autocast to the configured dtype, because CUDA autocast disables itself without a GPU."""
    if amp == "off":
        yield
        return
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    before = torch.is_autocast_enabled(_ON), torch.get_autocast_dtype(_ON)
    torch.set_autocast_enabled(_ON, True)
    torch.set_autocast_dtype(_ON, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            pass  # torch.clear_autocast_cache()
        torch.set_autocast_enabled(_ON, before[0])
        torch.set_autocast_dtype(_ON, before[1])


class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations, every storage that one creates, and when it is freed.

    most_ops: TooLongError is raised if a forward pass has more.
    """

    def __init__(self, most_ops: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The operations so far; the place of the last micro-batch among them; the phase of the step.
        self.ops: list[Op] = []
        self.last = 0
        self._phase, self._most, self._passes = "other", most_ops, 0
        self._events: list[tuple[int, int]] = []
        self._labels: list[str] = []
        self._marks: dict[str, int] = {}
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        for size in SCRATCH[name](args) if name in SCRATCH else ():
            key = len(self._labels)
            self._labels.append(f"{name}/scratch")
            self._events += [(key, size), (key, FREED)]
        result = func(*args, **(kwargs or {}))
        first: Tensor | None = None
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                first = leaf if first is None else first
                self.note(leaf, name)
        space, _, short = name.partition("::")
        if space == "aten":
            given = (*args, *(kwargs or {}).values())
            out = None if first is None else tuple(first.shape)
            self.ran(short, tuple(map(_shaped, given)), out)
        return result

    def ran(self, name: str, args: tuple[Any, ...], out: tuple[int, ...] | None) -> None:
        """Note an operation, of arguments as in `Op`."""
        self.ops.append(Op(self._phase, name, args, out))
        if self._most is not None and self._phase == "forward" and len(self.ops) - self.last > self._most:
            raise TooLongError

    def enter(self, phase: str) -> None:
        """A phase of the step begins, with a forward pass a micro-batch; the third one at the mark ONE."""
        if phase == "forward" != self._phase:
            self._passes, self.last = self._passes + 1, len(self.ops)
            if self._passes == _LAST:
                self.mark(ONE)
        self._phase = phase
        self.mark(f"phase {len(self._marks)}")

    def note(self, tensor: Tensor, label: str) -> None:
        """Record a tensor's storage unless it is already known; of a sharded tensor (DTensor) this rank's part."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage._cdata not in self._known and storage.nbytes():
            self._born(storage, label)

    def _born(self, storage: torch.UntypedStorage, label: str) -> None:
        address, key = storage._cdata, len(self._labels)
        self._known[address] = key
        self._labels.append(label)
        self._events.append((key, storage.nbytes()))
        weakref.finalize(storage, self._died, key, address).atexit = False  # type: ignore[misc]

    def ignore(self, tensor: Tensor) -> None:
        """Do not record the storage of a tensor, which has to outlive the trace."""
        self._known[tensor.untyped_storage()._cdata] = -1

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Also record storages that are resized: so FSDP2 frees gathered parameters and gathers them again."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            key = self._known.get(storage._cdata)
            if key is not None and key >= 0 and size != storage.nbytes():
                self._died(key, storage._cdata)
            found = resize(storage, size)
            if size and storage._cdata not in self._known:
                self._born(storage, "resize_")
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def mark(self, name: str) -> None:
        """Set a mark at the current event."""
        self._marks[name] = len(self._events)

    def trace(self) -> Trace:
        """Everything recorded so far."""
        return Trace(tuple(self._events), tuple(self._labels), dict(self._marks))

    def _died(self, key: int, address: int) -> None:
        if self._known.get(address) == key:  # else it was resized before
            self._events.append((key, FREED))
            del self._known[address]


def _flash_backward(args: Any) -> tuple[int, ...]:
    """Bytes of the fp32 softmax sums and query gradients (FlashAttention-2, mha_bwd)."""
    batch, heads, length, width = args[1].shape
    rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
    return batch * heads * rows * 4, batch * heads * rows * columns * 4


SCRATCH: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
}


def _shaped(value: Any) -> Any:
    """A tensor as its Shape, lists as tuples; other values than numbers as None."""
    if isinstance(value, Tensor):
        value = getattr(value, "_local_tensor", value)
        return Shape(tuple(value.shape), value.element_size(), _DTYPES.get(value.dtype, "other"))
    if isinstance(value, (list, tuple)):
        return tuple(map(_shaped, value))
    return value if isinstance(value, (bool, int, float)) else None


_DTYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.bool: "bool",
}  # fmt: skip


class AsOnGpu(TorchFunctionMode):
    """Calls the functions that a GPU would run instead of the CPU's. recomputes: whether blocks compute again."""

    def __init__(self, follow: Follow, recomputes: bool = False) -> None:
        super().__init__()
        self._follow, self._recomputes = follow, recomputes

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if self._recomputes and func is Tensor.backward:
            torch.clear_autocast_cache()  # autocast has ended with the forward pass
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **named)
        name = getattr(func, "__name__", "")
        if name in _GATES and len(args) == 9 and isinstance(args[3], bool):
            return _recurrent(self._follow, _GATES[name], *args)
        if name in IN_FP32 and torch.is_autocast_enabled(_ON):
            args = tree_map_only(Tensor, lambda leaf: leaf.float() if leaf.dtype in HALVES else leaf, args)
        return func(*args, **named)


def _lowered(tensor: Tensor) -> Tensor:
    """Cast to the autocast dtype if autocast is enabled, as it does for attention and LSTMs."""
    if torch.is_autocast_enabled(_ON) and tensor.is_floating_point():
        return tensor.to(torch.get_autocast_dtype(_ON))
    return tensor


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    query, key, value = _lowered(query), _lowered(key), _lowered(value)
    if query.dim() != 4:
        return _attention_of(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if enable_gqa and key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if query.dtype in HALVES and attn_mask is None:
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    else:
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )
    result: Tensor = found[0]
    return result


def _attention_of(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """Attention for inputs that are not (B, H, T, D), reshaped to one head because the kernels require it."""
    before = query.shape[:-2]

    def four(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, 1, *tensor.shape[-2:])

    mask = None if attn_mask is None else attn_mask.expand(*before, *attn_mask.shape[-2:])
    mask = None if mask is None else four(mask)
    found = _attention(four(query), four(key), four(value), mask, dropout_p, is_causal, scale)
    return found.reshape(*before, *found.shape[-2:])


_GATES = {"lstm": 4, "gru": 3}


def _recurrent(
    follow: Follow, gates: int, x: Tensor, state: Any, weights: list[Tensor], _bias: bool, layers: int,
    _dropout: float, _train: bool, both_ways: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    states = state if isinstance(state, (tuple, list)) else (state,)
    inputs = [_lowered(tensor) for tensor in (x, *states, *weights)]
    of = _Layers(weights[1].shape[1], layers, both_ways, batch_first, gates, len(states))
    found: tuple[Tensor, ...] = _Recurrent.apply(follow, of, *inputs)  # type: ignore[no-untyped-call]
    return found


class _Layers(NamedTuple):
    """Layers of an LSTM or GRU."""

    hidden: int
    layers: int
    both_ways: bool
    batch_first: bool
    gates: int
    states: int

    def note(self, follow: Follow, name: str, x: Tensor) -> None:
        """The operations of all layers, each with its inputs as (time, batch, width)."""
        ways = 2 if self.both_ways else 1
        batch, length = (x.shape[0], x.shape[1]) if self.batch_first else (x.shape[1], x.shape[0])
        for layer in range(self.layers):
            width = x.shape[2] if not layer else self.hidden * ways
            shape = Shape((length, batch, width), x.element_size(), _DTYPES.get(x.dtype, "other"))
            follow.ran(name, (shape, self.hidden, ways, self.gates), None)


class _Recurrent(torch.autograd.Function):
    """Allocates what cuDNN does (output, states, reserve, packed weights) without computing anything."""

    @staticmethod
    def forward(ctx: Any, follow: Follow, of: _Layers, x: Tensor, *rest: Tensor) -> Any:
        batch, length = (x.shape[0], x.shape[1]) if of.batch_first else (x.shape[1], x.shape[0])
        ways = 2 if of.both_ways else 1
        of.note(follow, RECURRENT, x)
        y = x.new_empty((length, batch, of.hidden * ways))
        values = RESERVED * of.gates / _GATES["lstm"]
        reserve = x.new_empty(int(values * batch * length * of.hidden * of.layers * ways))
        packed = x.new_empty(sum(weight.numel() for weight in rest[of.states :]))
        ctx.follow, ctx.of = follow, of
        ctx.save_for_backward(x, y, reserve, packed, *rest)
        return (y.transpose(0, 1) if of.batch_first else y), *map(torch.empty_like, rest[: of.states])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        x, _, _, packed, *rest = ctx.saved_tensors
        ctx.of.note(ctx.follow, RECURRENT_BACKWARD, x)
        scratch = torch.empty_like(packed)
        gradients = [torch.empty_like(tensor) for tensor in (x, *rest)]
        del scratch
        return None, None, *gradients
