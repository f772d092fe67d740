"""How the ranks share a model: whole on every rank (DistributedDataParallel), or sharded over them (FSDP2).

A Stepper calls `place` before the model moves to its device, so that only shards do, and before it creates its
optimizer, since FSDP2 replaces the parameters; `computing` comes after both. The default process group exists by then.
Both average the gradients over the ranks.
"""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from ndd_engine.batches import expanded
from ndd_engine.config.schema import Config, ParallelSection
from ndd_engine.errors import UsageError, shortened
from ndd_engine.text import counted
from ndd_engine.train.checkpoint_state import is_sharded
from ndd_engine.workloads.result import TrainingParts
from ndd_watch.clock import BACKWARD, CURRENT, PhaseClock
from ndd_watch.waits import GradientExchange

PART = "exchange"
# The functions of torch.distributed that FSDP2 calls. torch 2.13 renames them, and warns of the old names.
GATHER, SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


class _Marked:
    """A collective inside the sub-phase. Implements the interface of FSDP2's custom collectives."""

    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock, self._name = clock, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **more: Any) -> Any:
        with self._clock.part(PART):
            return getattr(dist, self._name)(output_tensor, input_tensor, **more)


def mark_collectives(modules: Iterable[nn.Module], clock: PhaseClock) -> bool:
    """Mark the collectives of FSDP2's modules; False if this version of torch has no interface for that."""
    marked = False
    for module in cast("Iterable[Any]", modules):
        if hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter"):
            module.set_custom_all_gather(_Marked(clock, GATHER))
            module.set_custom_reduce_scatter(_Marked(clock, SCATTER))
            marked = True
    return marked


class StreamWaits:
    """Marks the waits of the compute stream for other streams in forward, loss and backward.

    With FSDP2 these are the waits for its collectives. clock: records CUDA events on the compute stream, before and
    after the wait. kind: the class of streams, whose method is replaced until `stop`.
    """

    def __init__(self, clock: PhaseClock, compute: Any, kind: Any = torch.cuda.Stream) -> None:
        self._clock, self._compute, self._kind = clock, compute, kind
        self._wait_event = kind.wait_event

        # A method has to be a function: it is called with the stream.
        def wait_event(stream: Any, event: Any) -> None:
            self._wait(stream, event)

        kind.wait_event = wait_event

    def stop(self) -> None:
        """Mark no more."""
        self._kind.wait_event = self._wait_event

    def _wait(self, stream: Any, event: Any) -> None:
        clock = self._clock
        phase = clock.current.partition("/")[0]
        if phase not in ("forward", "loss", "backward") or stream != self._compute:
            self._wait_event(stream, event)
            return
        with clock.part(PART):
            self._wait_event(stream, event)


# An attribute of a model, for DDP: names of parameters and buffers that it leaves alone.
_IGNORED = "_ddp_params_and_buffers_to_ignore"
# A workload's forward: called with a model and a batch.
Forward = Callable[[nn.Module, Any], Any]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# A module without children is sharded on its own from this number of parameters: each costs an exchange per step.
LARGE_LEAF = 2**20
# DDP times one of so many steps on a CPU. Its default for GPUs, 100, stays: there it waits for the device each time.
SAMPLE_STEPS = 20
# Buffers are not exchanged in forward, see Strategy.sync_buffers. torch 2.13 renames the option.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BROADCAST: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


class Strategy:
    """One way of sharing a model. model: the plain module; None before `place`.

    gathers: whether forward and backward gather parameters, so that all ranks must call the model equally often.
    takes_batch: whether what `computing` returned is called with a batch, in place of the workload's forward.
    """

    gathers = False
    takes_batch = False

    def __init__(self, section: ParallelSection, device: torch.device) -> None:
        self.section, self.device = section, device
        self.model: nn.Module | None = None

    @property
    def module(self) -> nn.Module:
        """The plain module. Raises RuntimeError before `place`."""
        if self.model is None:
            raise RuntimeError("the model was not placed yet")
        return self.model

    def place(self, model: nn.Module) -> None:
        """Distribute the parameters of a model, in place; what stays whole may still be on the host.

        Raises UsageError for a model that cannot be shared in this way.
        """
        self.model = model

    def computing(self, forward: Forward | None = None) -> nn.Module:
        """The module that training calls in place of the model. Raises UsageError for what the backend lacks.

        forward: of a factory, which may call any part of the model. See takes_batch.
        """
        return self.module

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        """Context of forward and backward of a micro-batch. last: of the step; only then are gradients exchanged.

        Raises UsageError for parameters that get no gradient, where the configuration does not expect them.
        """
        raise NotImplementedError

    def before_backward(self, loss: Tensor) -> None:
        """The backward pass of a micro-batch begins."""

    def hidden_ns(self) -> float | None:
        """Nanoseconds of exchange during the computation of a recent step's backward; None if they are unknown."""
        return None

    def mean(self, value: Tensor | float, clock: PhaseClock | None = None) -> Tensor | float:
        """The mean of a number over the ranks: a scalar tensor for one on the device. All ranks must call it."""
        total = torch.as_tensor(value, dtype=torch.float64).clone()
        with nullcontext() if clock is None else clock.part(PART):
            dist.all_reduce(total)
        mean = total / dist.get_world_size()
        return mean if isinstance(value, Tensor) else float(mean)

    def sync_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, such as the statistics of batch norm. All ranks must call it.

        Training lets them diverge: exchanged in forward, they would make it wait for the slowest rank.
        """
        for buffer in self.module.buffers():
            if expanded(buffer):
                continue  # it cannot be written to, so it is as it was made
            # Bytes without gaps: backends take no other layout, and not all types.
            whole = buffer.detach().contiguous()
            dist.broadcast(whole.view(-1).view(torch.uint8), 0)
            if whole.data_ptr() != buffer.data_ptr():
                buffer.copy_(whole)


class Ddp(Strategy):
    """Every rank holds the whole model; gradients are averaged in buckets during backward."""

    def __init__(self, section: ParallelSection, device: torch.device) -> None:
        super().__init__(section, device)
        self.ddp: DistributedDataParallel | None = None
        self._exchange: GradientExchange | None = None

    def mark_exchange(self, clock: PhaseClock) -> None:
        """From now on, begin "backward/exchange" on this clock when the gradients of a step are computed."""

        def computed() -> None:
            if clock.state[CURRENT] == BACKWARD:
                clock.enter_part(PART)

        self._exchange = GradientExchange(computed, lambda _error: None)

    def before_backward(self, loss: Tensor) -> None:
        if self._exchange is not None and self.ddp is not None and self.ddp.require_backward_grad_sync:
            self._exchange.begin(loss)

    def computing(self, forward: Forward | None = None) -> nn.Module:
        section = self.section
        default = ParallelSection.model_fields["bucket_mb"].default
        self.takes_batch = forward is not None
        self.ddp = ddp = DistributedDataParallel(
            # DDP exchanges nothing, without an error, if its own forward is not called.
            self.module if forward is None else Whole(self.module, forward, section.find_unused),
            **_NO_BROADCAST,
            # None: PyTorch's size, and a smaller first bucket, whose exchange starts early in backward.
            bucket_cap_mb=None if section.bucket_mb == default else section.bucket_mb,
            find_unused_parameters=section.find_unused,
            gradient_as_bucket_view=True,
        )
        if (hook := _hook(section.compress, self.device)) is not None:
            ddp.register_comm_hook(None, hook)
        sample: Any = getattr(ddp, "_set_ddp_runtime_logging_sample_rate", None)
        if self.device.type == "cpu" and sample is not None:
            sample(SAMPLE_STEPS)
        return ddp

    def hidden_ns(self) -> float | None:
        with suppress(Exception):  # diagnostics of DDP, which other versions may lack
            found: Any = self.ddp
            overlap = found._get_ddp_logging_data().get("backward_compute_comm_overlap_time")
            return None if overlap is None else float(overlap)
        return None

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        return self._micro(last)

    @contextmanager
    def _micro(self, last: bool) -> Iterator[None]:
        assert self.ddp is not None
        try:
            with nullcontext() if last else self.ddp.no_sync():
                yield
        except RuntimeError as error:
            if (why := unused(error, self.module)) is None:
                raise
            raise UsageError(why) from None


class Whole(nn.Module):
    """A model that is called with a batch: a forward that may call any part of the model."""

    def __init__(self, model: nn.Module, forward: Forward, find_unused: bool) -> None:
        """find_unused: DDP searches the output for tensors. Then forward raises UsageError if it returns none."""
        super().__init__()
        self.model, self._whole, self._find_unused = model, forward, find_unused
        if ignored := getattr(model, _IGNORED, None):
            setattr(self, _IGNORED, {f"model.{name}" for name in ignored})

    def forward(self, batch: Any) -> Any:
        output = self._whole(self.model, batch)
        if self._find_unused and not any(True for _ in _find_tensors(output)):  # type: ignore[no-untyped-call]
            kinds = "a tensor, or a list, tuple, dict or dataclass of them"
            found = type(output).__name__
            raise UsageError(f"parallel.find_unused = true, but forward returned {found}: return {kinds}")
        return output


class Fsdp2(Strategy):
    """Parameters, gradients and optimizer state are sharded; a layer's parameters are gathered while it computes."""

    gathers = True
    # Whether the model is a copy, made for a prediction.
    copied = False
    # Whether the model was called.
    _called = False

    def __init__(self, section: ParallelSection, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(section, device)
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def place(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().place(model)
        if isinstance(model, (nn.ModuleDict, nn.ModuleList)) and type(model).forward is nn.Module.forward:
            raise UsageError(
                'parallel.strategy = "fsdp2" is not possible with several models in a dict or a list, which are not '
                'called as a whole: return one module that calls them, or set parallel.strategy = "ddp"'
            )
        section, mesh = self.section, self.mesh
        # A model in fp64 keeps its precision: "fp32" asks for no lower one.
        full = any(item.dtype == torch.float64 for item in model.parameters())
        gathered, reduced = (
            None if full and name == "fp32" else DTYPES[name]
            for name in (section.param_dtype, section.reduce_dtype)
        )
        policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced)
        for block in blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=section.reshard)
        # What no block holds. Backward begins with the root, so freeing it after forward would save nothing.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self._hook = model.register_forward_pre_hook(self._note_call)

    def _note_call(self, *_: object) -> None:
        self._called = True
        self._hook.remove()

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        model: Any = self.module
        model.set_requires_gradient_sync(last)
        return nullcontext() if self._called else self._first()

    @contextmanager
    def _first(self) -> Iterator[None]:
        if self.copied:
            why = "the memory with FSDP2 cannot be predicted: forward does not use the model that it receives"
        else:
            why = (
                'parallel.strategy = "fsdp2" gathers parameters where the model is called, but forward calls only '
                'parts of it, or none: call model(...) in forward, or set parallel.strategy = "ddp"'
            )
        try:
            yield
        except Exception as error:
            if self._called or "DTensor" not in str(error):
                raise
            raise UsageError(why) from error
        if not self._called:
            raise UsageError(why)


def strategy_of(config: Config, device: torch.device, parts: TrainingParts) -> Strategy | None:
    """The configured strategy; None for a single rank. parts: of the workload. Raises UsageError, see why_not."""
    section = config.parallel
    if section.ranks == 1:
        return None
    if (why := why_not(config, parts)) is not None:
        raise UsageError(why)
    if not dist.is_initialized():
        start = f"start the ranks with: ndd-console train --ranks {section.ranks}, or with torchrun"
        raise UsageError(f"parallel.ranks = {section.ranks}, but this process trains alone: {start}")
    return (Fsdp2 if section.strategy == "fsdp2" else Ddp)(section, device)


def why_not(config: Config, parts: TrainingParts) -> str | None:
    """Why the configured strategy cannot train what a factory returned, in one sentence, or None."""
    ranks = f"parallel.ranks = {config.parallel.ranks}"
    if parts.step is not None:
        return (
            f"{ranks} is not possible with a factory that has its own step, whose gradients are not exchanged: return "
            "forward and loss instead, or set parallel.ranks = 1"
        )
    if parts.state is not None:
        return (
            f"{ranks} is not possible with a factory that carries state from batch to batch, since neighbouring "
            "batches go to different ranks: leave out state, or set parallel.ranks = 1"
        )
    if config.parallel.strategy != "fsdp2":
        return None
    sharded, instead = 'parallel.strategy = "fsdp2" is not possible with', 'parallel.strategy = "ddp"'
    if parts.optimizers is not None:
        return (
            f"{sharded} an optimizer that the factory returns, which would update whole parameters, not shards: let "
            f"[optimizer] create it, or set {instead}"
        )
    if config.speed.channels_last:
        return (
            f"{sharded} speed.channels_last = true, since it shards contiguous parameters only: set "
            f"speed.channels_last = false, or {instead}"
        )
    if config.optimizer.name == "sgd" and config.optimizer.implementation == "fused":
        return (
            f'{sharded} optimizer.implementation = "fused", since PyTorch\'s fused SGD does not update shards: set '
            f'optimizer.implementation = "auto", or {instead}'
        )
    return None


def unused(error: Exception, model: nn.Module) -> str | None:
    """What DistributedDataParallel means by its error about parameters without a gradient; None for another error."""
    text = str(error)
    if "Expected to have finished reduction" not in text:
        return None
    trained = [name for name, item in model.named_parameters() if item.requires_grad]
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    places = [int(place) for place in found[1].split()] if found else []
    names = [trained[place] for place in places if place < len(trained)]
    which = shortened(", ".join(names), 120) or "some of the parameters"
    return f"parallel.find_unused = false, but the loss does not use {which}: set parallel.find_unused = true"


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model, outermost first: equal children of a ModuleList, ModuleDict or Sequential.

    A layer that shares parameters with the rest of the model is left out, as is a small one without children.
    """
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(id(item) for item in module._parameters.values() if item is not None)
    return list(_blocks(model, uses))


def _blocks(module: nn.Module, uses: Counter[int]) -> Iterator[nn.Module]:
    repeats = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    kinds = Counter(type(child) for child in module.children())
    for child in module.children():
        if repeats and kinds[type(child)] > 1 and _is_block(child, uses):
            yield child
        else:
            yield from _blocks(child, uses)


def _is_block(module: nn.Module, uses: Counter[int]) -> bool:
    # FSDP2 gathers where a module is called, which those that only hold others are not.
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    own: Counter[int] = Counter()
    elements = 0
    for part in module.modules():
        for item in part._parameters.values():
            if item is not None:
                own[id(item)] += 1
                elements += item.numel()
    large = elements >= (1 if any(True for _ in module.children()) else LARGE_LEAF)
    return large and all(uses[key] == count for key, count in own.items())


def _hook(compress: str, device: torch.device) -> Any:
    """The communication hook that exchanges gradients in half precision, or None. Raises UsageError."""
    if dist.get_backend() == "fake":  # its futures carry no tensor, which DDP's own reduction does not accept
        return fake_hook(compress)
    if compress == "off":
        return None
    # Where each type of device has a backend of its own, the name of the backend is "cpu:gloo,cuda:nccl".
    if compress == "bf16" and device.type != "cuda":
        message = f"parallel.compress: PyTorch exchanges gradients in bf16 by NCCL only, not by {dist.get_backend()}; "
        raise UsageError(message + 'allowed here: "off", "fp16"')
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.fp16_compress_hook if compress == "fp16" else default_hooks.bf16_compress_hook


def fake_hook(compress: str) -> Any:
    """A hook that allocates what the configured one does and exchanges nothing, for a fake process group."""

    def reduced(bucket: Any) -> Any:
        buffer = bucket.buffer()
        if compress != "off":
            buffer.copy_(buffer.to(DTYPES[compress]).div_(dist.get_world_size()))
        done: Any = torch.futures.Future()
        done.set_result(buffer)
        return done

    # DistributedDataParallel rejects annotations that are text, as all are in this module.
    return lambda _state, bucket: reduced(bucket)


# (key without its section, what is applied, how that was verified)
Effect = tuple[str, object, str]
_OF_DDP = ("bucket_mb", "compress", "find_unused")
_OF_FSDP2 = ("reshard", "param_dtype", "reduce_dtype")
_MIB = 2**20


def effects(strategy: Strategy, section: ParallelSection, watched_s: float) -> Iterator[Effect]:
    """Every setting of the section. watched_s: after how many seconds this rank's hang watch compares the ranks."""
    yield "ranks", dist.get_world_size(), f"read back from the process group ({dist.get_backend()})"
    yield from _of_ddp(strategy, section) if isinstance(strategy, Ddp) else _of_fsdp2(strategy)
    unused, name = (_OF_FSDP2, "ddp") if isinstance(strategy, Ddp) else (_OF_DDP, "fsdp2")
    for key in unused:
        yield key, "off", f'parallel.strategy = "{name}" does not use it'
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    how = "no launcher that restarts ranks started this one"
    if restarts is not None:
        how = "read back from the launcher (TORCHELASTIC_MAX_RESTARTS)"
    yield "restarts", int(restarts or 0), how
    yield "hang_s", watched_s, "read back from the thread that watches the steps of this rank"


def _of_ddp(strategy: Ddp, section: ParallelSection) -> Iterator[Effect]:
    assert strategy.ddp is not None
    said: dict[str, Any] = strategy.ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    where = "read back from DistributedDataParallel"
    parameters = counted(sum(item.requires_grad for item in strategy.module.parameters()), "parameter")
    yield "strategy", "ddp", f"DistributedDataParallel exchanges the gradients of {parameters}"
    size = said["bucket_cap_bytes"]  # a whole number of bytes
    yield "bucket_mb", section.bucket_mb if size == int(section.bucket_mb * _MIB) else size / _MIB, where
    hook = str(said.get("comm_hook") or "")
    exchanged = next((name for name in DTYPES if f"{name}_compress" in hook), "off")
    yield "compress", exchanged, f"{where}: {f'its hook is {hook}' if hook else 'it has no hook'}"
    yield "find_unused", bool(said["find_unused_parameters"]), where


def _of_fsdp2(strategy: Strategy) -> Iterator[Effect]:
    parameters = list(strategy.module.parameters())
    sharded = sum(map(is_sharded, parameters))
    applied = "fsdp2" if isinstance(strategy, Fsdp2) and sharded == len(parameters) else "off"
    yield "strategy", applied, f"{sharded} of {counted(len(parameters), 'parameter')} are sharded (DTensor)"
    modules: list[Any] = [item for item in strategy.module.modules() if hasattr(item, "_get_fsdp_state")]
    groups = [group for item in modules for group in _groups(item)]
    of = f"read back from the {counted(len(groups), 'group')} that FSDP2 gathers and reduces"
    root = set(_groups(strategy.module))
    layers = [group for group in groups if group not in root]
    freed = bool(layers) and all(group.post_forward_mesh_info is not None for group in layers)
    alone = "; there is only one, which is always kept until backward" if not layers else ""
    yield "reshard", freed, of + alone
    shards = [item for group in groups for item in group.fsdp_params]
    gathered = {item.param_dtype or item.orig_dtype for item in shards}
    reduced = {item.reduce_dtype or item.param_dtype or item.orig_dtype for item in shards}
    for key, dtypes in (("param_dtype", gathered), ("reduce_dtype", reduced)):
        yield key, _names(dtypes), of


def _groups(module: Any) -> list[Any]:
    """What FSDP2 gathers and reduces together in a module that it shards."""
    state = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return groups


def _names(dtypes: set[torch.dtype]) -> str:
    """The dtypes as in the configuration; those that it lacks by torch's names."""
    short = {dtype: name for name, dtype in DTYPES.items()}
    return ", ".join(sorted(short.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes))
