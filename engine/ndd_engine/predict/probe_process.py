"""Probes in a subprocess: `python -m ndd_engine.predict.probe_process IN OUT FOLDER`, see `ndd_engine.child`.

Without a GPU, a step is traced as a GPU would run it, from fake tensors.
"""

from __future__ import annotations

import copy
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from ndd_engine.child import ChildServer, Json, Pipe, draft_of
from ndd_engine.config import Config
from ndd_engine.errors import UsageError
from ndd_engine.measure.clock import PhaseClock
from ndd_engine.measure.flops import WorkCounter
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Workload

from .allocations import FREED, Trace
from .estimate import MANY, ONE, Items, Memory, StepTime, TimedBatch
from .probes import longest_first
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
OWN_STEP = (
    "the factory has its own step, which works on its own modules, so it cannot be traced for a GPU that is not in "
    "this machine; check it on a machine with that GPU"
)


def traced(config: Config, workload: Workload, micro: int, longest: Sequence[int] = ()) -> tuple[Trace, int]:
    """Trace two steps with one micro-batch and one step with two. Returns the trace and the FLOPs of one micro-batch.

    longest: items to include in the batch, see `probing.extremes`. Raises what a step raises on fake tensors: a model
    with data-dependent control flow cannot be traced.
    """
    if workload.training.step is not None:
        raise UsageError(OWN_STEP)
    amp, config = config.precision.amp, _explicit(config)
    strategy = strategy_for_fakes(config, workload.training)
    batch = next(longest_first(workload, config, micro, longest))
    follow, counter = Follow(), WorkCounter()
    # Tensors that are neither parameters nor buffers become fake when they are used.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tree_map(lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)
    model, known = _faked(workload.model, fake)
    if is_sharded(config):
        # On the host, from which each layer moves to the GPU only as it is sharded.
        for whole in model.parameters():
            follow.ignore(whole)
    with fake, AsOnGpu(), follow, follow.resizing():
        stepper = Stepper(
            workload.with_model(model, known), config, torch.device(_ON), total_steps=1000, strategy=strategy
        )
        for parameter in (*stepper.model.parameters(), *stepper.model.buffers()):
            follow.note(parameter, "parameter")
        with _autocast(amp):
            for index, count in enumerate((1, 1, 2)):
                if count > 1:
                    follow.mark(ONE)
                single = stepper.config.batch.model_copy(update={"accumulation": count})
                stepper.config = stepper.config.model_copy(update={"batch": single})
                with nullcontext() if index else counter:
                    stepper.eager_step(_copies(fakes), PhaseClock(), index)
        follow.mark(MANY)
        return follow.trace(), counter.flops


def _copies(batch: Any) -> Iterator[Any]:
    """Endless copies of a batch, each with its own memory, as if copied to the GPU."""
    while True:
        yield tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def _explicit(config: Config) -> Config:
    """Replace `auto` settings that would be resolved differently for fake tensors."""
    precision = config.precision.model_copy(update={"amp": "off"})  # set for all steps by _autocast
    speed = config.speed.model_copy(update={"compile": "off", "cuda_graph": False, "attention": "auto"})
    return config.model_copy(update={"precision": precision, "speed": speed})


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
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(_ON, before[0])
        torch.set_autocast_dtype(_ON, before[1])


class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that an operation creates, and when it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events: list[tuple[int, int]] = []
        self._labels: list[str] = []
        self._marks: dict[str, int] = {}
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        for size in SCRATCH[name](args) if name in SCRATCH else ():
            self._scratch(size, name)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                self.note(leaf, name)
        return result

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

    def _scratch(self, size: int, name: str) -> None:
        key = len(self._labels)
        self._labels.append(f"{name}/scratch")
        self._events += [(key, size), (key, FREED)]


def _flash_backward(args: Any) -> tuple[int, ...]:
    """Bytes of the fp32 softmax sums and query gradients (FlashAttention-2, mha_bwd)."""
    batch, heads, length, width = args[1].shape
    rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
    return batch * heads * rows * 4, batch * heads * rows * columns * 4


SCRATCH: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
}


class AsOnGpu(TorchFunctionMode):
    """Calls the functions that a GPU would run instead of the CPU's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **named)
        name = getattr(func, "__name__", "")
        if name == "lstm" and len(args) == 9 and isinstance(args[3], bool):
            return _lstm(*args)
        if name in IN_FP32 and torch.is_autocast_enabled(_ON):
            args = tree_map(_widened, args)
        return func(*args, **named)


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALVES else leaf


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


def _lstm(
    x: Tensor, state: tuple[Tensor, Tensor], weights: list[Tensor], _bias: bool, layers: int, _dropout: float,
    _train: bool, both_ways: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    hidden = weights[1].shape[1]
    inputs = [_lowered(tensor) for tensor in (x, *state, *weights)]
    found: tuple[Tensor, Tensor, Tensor] = _Lstm.apply(hidden, layers, both_ways, batch_first, *inputs)  # type: ignore[no-untyped-call]
    return found


class _Lstm(torch.autograd.Function):
    """Allocates what cuDNN's LSTM does (output, states, reserve, packed weights) without computing anything."""

    @staticmethod
    def forward(
        ctx: Any, hidden: int, layers: int, both_ways: bool, batch_first: bool, x: Tensor, h: Tensor, c: Tensor,
        *weights: Tensor,
    ) -> Any:  # fmt: skip
        batch, length = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
        ways = 2 if both_ways else 1
        y = x.new_empty((length, batch, hidden * ways))
        reserve = x.new_empty(int(RESERVED * batch * length * hidden * layers * ways))
        packed = x.new_empty(sum(weight.numel() for weight in weights))
        ctx.save_for_backward(x, h, c, y, reserve, packed, *weights)
        return (y.transpose(0, 1) if batch_first else y), torch.empty_like(h), torch.empty_like(c)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        x, h, c, _, _, packed, *weights = ctx.saved_tensors
        scratch = torch.empty_like(packed)
        gradients = [torch.empty_like(weight) for weight in weights]
        del scratch
        return None, None, None, None, *map(torch.empty_like, (x, h, c)), *gradients


# Maximum seconds for sampling the lengths of items.
LOOK_S = 1.0
# Share of the free memory that a probe may use.
GPU_SHARE = 0.95
# Memory of the CUDA context and libraries on a GPU that is not in this machine (measured on others: 287 to 667 MB).
ABSENT_CONTEXT = 667 << 20


@dataclass(frozen=True)
class Opened:
    """The prepared configuration and its device.

    device: torch device name. chosen_threads: intra-op threads if they were chosen by measurement, else None. size,
    sequence: of the model. memory_gb: memory of the GPU if the size was chosen for it. process_bytes: resident bytes
    after a step, without the model. context_bytes: GPU memory outside the allocator. free_bytes: of the GPU before this
    process took its share, None if unknown or without a GPU. setup_s: seconds to prepare the data. train_items: None if
    the number is unknown. lengths: tokens per sampled item, ascending, if they vary. not_shared: why several ranks
    cannot train it, or "".
    """

    device: str
    device_name: str
    chosen_threads: int | None
    item: str
    token: str | None
    tokens_per_item: float
    train_items: int | None
    parameters: int
    model: str
    data: str
    size: str | None
    memory_gb: float | None
    sequence: int
    process_bytes: int
    context_bytes: int
    free_bytes: int | None
    items: Items
    setup_s: float
    lengths: list[int]
    not_shared: str = ""


@dataclass(frozen=True)
class Probed:
    """The result of a probe. time: None if no micro-batch fits. lower_bound: time is from published peak FLOP/s."""

    parameters: int
    tokens_per_item: float
    memory: Memory
    time: StepTime | None
    lower_bound: bool = False


class Probes(ChildServer):
    """The process: the opened workload and the probes of it."""

    def __init__(self, pipe: Pipe, folder: Path) -> None:
        super().__init__(pipe, folder)
        self._spec: Json = {}
        self._opened: Opened | None = None
        self.commands = {"open": self.open, "probe": self.probe}

    def open(self, command: Json) -> Json:
        """Prepare the workload. Returns {"opened": …}, see Opened."""
        self.pipe.tell("importing torch")
        import torch

        from ndd_engine.hardware.detect import detect, with_free_memory
        from ndd_engine.train.parallel.strategy import why_not
        from ndd_engine.train.prepare import seed
        from ndd_engine.train.probes.autosize import decide
        from ndd_engine.workloads.base import parameter_count
        from ndd_engine.workloads.order import item_count
        from ndd_engine.workloads.registry import prepare

        from .probes import Prober, context_bytes, items_of
        from .rank_memory import pretended, replaced

        self._spec = command
        draft = draft_of(command)
        machine = with_free_memory(detect(draft.resolve().run.device))
        device = torch.device(machine.device)
        config, choice = decide(draft, machine, self.pipe.tell)
        product = torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)  # loads the libraries
        del product
        free = machine.chosen.free_bytes if machine.chosen is not None else None
        context = context_bytes(device, free)
        self.pipe.tell("reading the data")
        seed(config.run.seed)
        begin = time.monotonic()
        workload = prepare(config, self.pipe.tell)
        setup_s = time.monotonic() - begin
        weights = _weights(workload)
        with pretended(config.parallel.ranks, device):
            process = Prober(config, workload, device, self.pipe.tell).warm() - weights
        self._opened = Opened(
            device=machine.device,
            device_name=machine.chosen.name if machine.chosen is not None else machine.host.cpu,
            chosen_threads=None if choice is None else choice.threads,
            item=workload.item,
            token=workload.token,
            tokens_per_item=workload.tokens_per_item,
            train_items=item_count(workload.train_data),
            parameters=parameter_count(workload.model),
            model=workload.describe_model(),
            data=workload.describe_data(),
            size=getattr(config.workload, "size", None),
            memory_gb=None if choice is None else choice.memory_gb,
            sequence=config.batch.sequence,
            process_bytes=max(process, 0),
            context_bytes=context,
            free_bytes=free,
            items=items_of(workload),
            setup_s=setup_s,
            lengths=lengths(workload),
            not_shared=why_not(replaced(config, 2, "ddp"), workload.training) or "",
        )
        return {"opened": asdict(self._opened)}

    def probe(self, command: Json) -> Json:
        """Probe one model. Returns {"probed": …}, see Probed."""
        import torch

        from ndd_engine.train.prepare import seed
        from ndd_engine.workloads.base import parameter_count
        from ndd_engine.workloads.registry import prepare

        from .rank_memory import pretended

        draft = draft_of(self._spec, command["sets"])
        # Little data: preparing all of it for each model would take longer than the probe.
        config = draft.resolve(few=True)
        seed(config.run.seed)
        workload = prepare(config, self.pipe.tell)
        if command["gpu"] is not None:
            with pretended(config.parallel.ranks, torch.device("cuda")):
                memory, time = _absent(config, workload, command["gpu"])
        else:
            assert self._opened is not None  # "open" comes first
            with pretended(config.parallel.ranks, torch.device(self._opened.device)):
                memory, time = self._present(config, workload, command)
        known = parameter_count(workload.model), workload.tokens_per_item
        return {"probed": asdict(Probed(*known, memory, time, lower_bound=command["gpu"] is not None))}

    def _present(self, config: Config, workload: Any, command: Json) -> tuple[Memory, StepTime | None]:
        """A model on the device of this machine."""
        import torch

        from ndd_engine.workloads.order import item_count

        from .probes import Prober
        from .rank_memory import is_sharded

        opened = self._opened
        assert opened is not None  # "open" comes first
        device = torch.device(opened.device)
        weights = _weights(workload)
        free = command["free_bytes"]
        if device.type == "cuda":
            total = torch.cuda.mem_get_info(device)[1]
            torch.cuda.set_per_process_memory_fraction(min(GPU_SHARE * free / total, 1.0), device)
            outside = opened.context_bytes
        else:
            # A sharded model is created within the recorded steps.
            outside = opened.process_bytes + (0 if is_sharded(config) else weights)
        prober = Prober(config, workload, device, self.pipe.tell)
        memory = prober.memory(outside)
        few = item_count(workload.train_data)  # larger batches are extrapolated
        micros = sorted({micro if few is None else min(micro, few) for micro in command["micros"]})
        times = prober.time(
            micros, command["longest_s"], lambda micro: memory.peak(micro) <= GPU_SHARE * free
        )
        return prober.with_heap(memory), times


def _absent(config: Config, workload: Any, slug: str) -> tuple[Memory, StepTime | None]:
    """A model on a GPU that is not in this machine: memory from fake tensors, time from published peak FLOP/s."""
    from ndd_engine.hardware.gpus import load

    from .probes import alike, caveat, extremes, sizes

    gpu = next(gpu for gpu in load() if gpu.slug == slug)
    flops: dict[int, float] = {}
    longest, _ = extremes(workload)

    def trace(micro: int) -> Trace:
        found, flops[micro] = traced(config, workload, micro, longest)
        if longest:  # memory of the longest batch, FLOPs of an ordinary one
            flops[micro] = traced(config, workload, micro)[1]
        return found

    family = alike(trace, sizes(workload))
    source = f"steps traced with fake tensors for {gpu.name}"
    memory = Memory(family, "gpu", ABSENT_CONTEXT, source, caveat=caveat(config))
    amp = config.precision.amp
    kind = amp if amp in ("bf16", "fp16") else "tf32" if config.precision.tf32 else "fp32"
    peak = gpu.peak_tflops(kind) or gpu.peak_tflops("fp32")
    if not peak:
        return memory, None
    points = tuple(TimedBatch(micro, flops[micro] / (peak * 1e12), 0.0, 0.0) for micro in family.at)
    return memory, StepTime(points, 0.0, on_gpu=True)


def _weights(workload: Any) -> int:
    """Bytes of the parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*workload.model.parameters(), *workload.model.buffers()))


def lengths(workload: Any, most: int = 256) -> list[int]:
    """Tokens of items sampled across the data, ascending; [] if all have the same length."""
    import torch

    from ndd_engine.workloads.order import Stream

    if workload.collate is None or isinstance(workload.train_data, Stream):
        return []
    data, found = workload.train_data, []
    count = len(data)
    end = time.monotonic() + LOOK_S
    for place in range(0, count, max(count // most, 1)):
        if time.monotonic() > end:
            break  # reading an item may encode it
        item = data[place]
        first = item[0] if isinstance(item, (tuple, list)) else item
        if not isinstance(first, torch.Tensor) or not first.ndim:
            return []
        found.append(int(first.shape[0]))
    return sorted(found) if len(set(found)) > 1 else []


if __name__ == "__main__":
    Probes.main(sys.argv[1:])
