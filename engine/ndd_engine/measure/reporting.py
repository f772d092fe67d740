"""What a loop reports while it trains: windows, losses, memory, recompilations, collections, stalls, and its FLOPs.

Losses are read without waiting for the device: each is kept as a tensor, and every N steps all of them are copied to
the host at once. On a GPU the copy is asynchronous, and is read when its event is done. FLOPs and bytes of one forward
and backward pass are counted, and compared with the GPU's published peak.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ndd_engine.batches import tensors
from ndd_engine.hardware.gpus import Gpu
from ndd_engine.measure.window import Window
from ndd_engine.record.events import Event, MarkEvent, MemoryEvent, ScalarsEvent, WindowEvent, WorkEvent
from ndd_engine.text import printable
from ndd_watch.clock import PhaseClock
from ndd_watch.finite import Finite
from ndd_watch.probes import Probes
from ndd_watch.receiving import Receiving
from ndd_watch.slowing import Garbage
from ndd_watch.window_facts import WindowFacts

from .process_watch import Children
from .trainer_watch import TrainerWatch, TrainingThread


@dataclass
class LossReader:
    """Collects (step, loss) and returns them as floats some steps later, in order.

    extras: newest values of the scalars beside the loss. skips: (step, whether its update was skipped) of those that
    arrived. scalars: (name, value) of those that were logged and arrived.
    """

    device: torch.device
    every: int
    extras: dict[str, float] = field(default_factory=dict)
    skips: list[tuple[int, bool]] = field(default_factory=list)
    scalars: list[tuple[str, float]] = field(default_factory=list)
    _steps: list[int] = field(default_factory=list)
    _losses: list[Tensor] = field(default_factory=list)
    _skips: list[tuple[int, Tensor]] = field(default_factory=list)
    _beside: dict[str, Tensor] = field(default_factory=dict)
    _logged: list[tuple[str, Tensor]] = field(default_factory=list)
    # Steps of the losses and of the skips, names of what is beside them and of what was logged, values, and an event.
    _flying: deque[tuple[list[int], list[int], list[str], list[str], Tensor, Any]] = field(
        default_factory=deque
    )

    def add(
        self, step: int, loss: Tensor, beside: dict[str, Tensor], skip: Tensor | None = None
    ) -> list[tuple[int, float]]:
        """Add the loss of optimizer step `step` (a detached scalar); returns the losses that have reached the host.

        beside: other scalars on the device; their newest values arrive in `extras`. skip: 0 if a gradient scaler has
        updated the parameters in this step, above 0 if it skipped that; None without one.
        """
        self._steps.append(step)
        self._losses.append(loss)
        self._beside = beside
        if skip is not None:
            self._skips.append((step, skip))
        if len(self._losses) >= self.every:
            self._send()
        return self._arrived() if self._flying else []

    def log(self, values: list[tuple[str, Tensor | float]]) -> None:
        """Add scalars by name; those on the device arrive together with the losses."""
        for name, value in values:
            if isinstance(value, Tensor):
                self._logged.append((name, value))
            else:
                self.scalars.append((name, value))

    def drain(self) -> list[tuple[int, float]]:
        """Return all outstanding losses; waits for the device. Used before checkpoints and at the end."""
        self._send()
        return self._arrived(wait=True)

    def _send(self) -> None:
        if not self._losses and not self._logged:
            return
        logged = [value for _, value in self._logged]
        skips = [skip for _, skip in self._skips]
        values = (*self._losses, *skips, *self._beside.values(), *logged)
        # The call alone takes a microsecond, also where it changes nothing.
        packed = torch.stack([item if item.dtype is torch.float32 else item.float() for item in values])
        event = None
        if self.device.type == "cuda":
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            packed = host
        names = [name for name, _ in self._logged]
        updates = [step for step, _ in self._skips]
        self._flying.append((self._steps, updates, list(self._beside), names, packed, event))
        self._steps, self._losses, self._skips, self._logged = [], [], [], []

    def _arrived(self, wait: bool = False) -> list[tuple[int, float]]:
        out: list[tuple[int, float]] = []
        while self._flying:
            steps, updates, names, logged, packed, event = self._flying[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    break
            self._flying.popleft()
            values = packed.tolist()
            out += zip(steps, values[: len(steps)], strict=True)
            begin, last = len(steps) + len(updates), len(values) - len(logged)
            self.skips += zip(updates, map(bool, values[len(steps) : begin]), strict=True)
            self.extras.update(zip(names, values[begin:last], strict=True))
            self.scalars += zip(logged, values[last:], strict=True)
        return out


def first_bad(losses: list[tuple[int, float]]) -> tuple[int, float] | None:
    """The first (step, loss) that is not finite."""
    return next(((step, value) for step, value in losses if not math.isfinite(value)), None)


@dataclass(frozen=True)
class StepWork:
    """What one optimizer step processes, and how many steps make an epoch.

    place: the (epoch, step in it) of the run, and made: the items so far, if they do not follow from the step.
    """

    items: int
    micro_steps: int
    tokens_per_item: float
    steps_per_epoch: int
    place: Callable[[], tuple[int, int]] | None = None
    made: Callable[[], int] | None = None


class Stepping(Protocol):
    """The part of a stepper that the reporter reads: the learning rate, and events waiting to be recorded.

    kept_steps: see WindowEvent.
    """

    reports: list[Event]

    @property
    def lr(self) -> float | None: ...

    @property
    def kept_steps(self) -> int: ...


class Reporter:
    """Turns what was measured since the last window into events; `put` records one.

    steps, passes: in the current window, see WindowEvent. arrived: (step, loss) pairs that reached the host in it.
    profiled: the window contains a profiler capture or a profiled step. windowed: called with each window that ends;
    returns what is recorded of it. paced: called with the usual time of a step, 0 if it is unknown.
    """

    def __init__(
        self,
        work: StepWork,
        stepping: Stepping,
        clock: PhaseClock,
        losses: LossReader,
        put: Callable[[Event], None],
        gc_every_steps: int = 0,
    ) -> None:
        self.clock, self.losses, self.put = clock, losses, put
        self.windowed: Callable[[Window, WindowEvent], WindowEvent] = lambda _window, event: event
        self.steps = self.passes = 0
        self.paced: Callable[[int], None] = lambda step_ns: None
        self.profiled = False
        self.arrived: list[tuple[int, float]] = []
        # Probes on receiving are put in place where training begins.
        self.facts = WindowFacts(Garbage(), Finite(), Receiving(lambda: False))
        self._gc_every_steps = gc_every_steps
        self._work, self._stepping = work, stepping
        self._watch: TrainerWatch | None = None
        self._probes = Probes()
        # Of this process, also after the end.
        self.children = Children()
        self._made = 0  # items at the end of the last window

    def begin(self, step: Callable[[], int], paused: Callable[[], bool], workers: Path | None = None) -> None:
        """Training begins on this thread; what was measured and compiled earlier belongs to no window.

        step: returns the optimizer steps done. paused: returns whether the run is paused. workers: the folder in which
        loader workers tell of themselves, or None.
        """
        self.facts.garbage.begin()
        self.facts.garbage.schedule(self._gc_every_steps)
        self._watch = TrainerWatch(TrainingThread(self.clock, step), self.put, paused, workers)
        self.children = self._watch.children
        self._watch.start()
        deque(self.facts.marks(), maxlen=0)  # drops those of earlier compilations
        if workers is not None:
            # It must not refer to this object: in a cycle, the loader's workers would outlive the run.
            clock, me = self.clock, get_ident()
            receiving = Receiving(lambda: clock.current.startswith("data_wait") and get_ident() == me)
            receiving.install(self._probes)
            self.facts.receiving = receiving
        self.skip()

    def switch(self, gc_every_steps: int) -> None:
        """Continue with another setting, between two steps."""
        self.facts.garbage.schedule(gc_every_steps)

    def end(self) -> None:
        """Stop measuring; call it however the loop ended."""
        self.facts.garbage.end()
        self._probes.remove()
        if self._watch is not None:
            self._watch.stop()
            # It refers to the loop: in a reference cycle with it, the loader's workers would outlive the run.
            self._watch = None

    def skip(self) -> None:
        """Drop the time since the last phase change (a pause). Call with an empty window."""
        self.clock.skip()
        self.facts.garbage.take()

    def window(self, step: int) -> None:
        """Record the time since the last window; `step` optimizer steps are done."""
        work, window = self._work, Window.of(self.clock)
        if not window.wall_ns:
            return
        steps, self.steps = self.steps, 0
        passes, self.passes = self.passes, 0
        arrived, self.arrived = self.arrived, []
        items = steps * work.items
        if work.made is not None:
            made = work.made()
            items, self._made = made - self._made, made
        epoch, epoch_step = divmod(step, work.steps_per_epoch) if work.place is None else work.place()
        extras, facts = self.losses.extras, self.facts
        for place, loss in arrived:
            facts.finite.read(place, loss)
        for place, skip in self.losses.skips:
            facts.finite.updated(skip, place - 1)
        self.losses.skips = []
        for kind, text, data in facts.marks(device=self.clock.gpu.failed):
            self.put(MarkEvent(kind, step, printable(text), data))
        fields = facts.fields(
            step=step,
            epoch=epoch,
            epoch_step=epoch_step,
            steps=steps,
            micro_steps=steps * work.micro_steps,
            items=items,
            tokens_per_item=work.tokens_per_item,
            losses=arrived,
            lr=self._stepping.lr,
            loss_scale=extras.get("loss_scale"),
            grad_norm=extras.get("grad_norm"),
            profiled=self.profiled,
            kept_steps=self._stepping.kept_steps,
            passes=passes,
        )
        event = WindowEvent(**fields, **window.figures())
        self.put(self.windowed(window, event))
        if not self.profiled:
            self.paced(event.step_p50_ns or 0)
        if self.losses.scalars:
            self.put(ScalarsEvent(step, _means(self.losses.scalars)))
            self.losses.scalars = []
        for report in self._stepping.reports:
            self.put(report)
        self._stepping.reports.clear()
        if (counters := facts.memory(self.losses.device)) is not None:
            self.put(MemoryEvent(**counters))


def _means(scalars: list[tuple[str, float]]) -> dict[str, float]:
    """The mean of the values of each name."""
    values: dict[str, list[float]] = {}
    for name, value in scalars:
        values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


METHOD = (
    "one forward and backward pass, operation by operation: matrix products, convolutions, recurrent layers and "
    "attention (causal attention in full); a multiply-add is 2 FLOPs; elementwise work counts as bytes only; "
    "bytes: read and written by each operation without fusion, and by the optimizer update"
)
NO_CPU_PEAK = "no published peak for this CPU"

aten = torch.ops.aten
Formula = Callable[..., int]
# Backends of scaled-dot-product attention, by the operation that only they call.
_ATTENTION = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash (cpu)",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "fused",
    "_scaled_dot_product_attention_math": "math",
    "_safe_softmax": "math",
}
# Allocate or view memory without reading or writing it.
_NO_TRAFFIC = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
                         "_reshape_alias", "lift_fresh"})  # fmt: skip
# Read about as much of their first argument as they return, not the whole table.
_LOOK_UP = frozenset({"embedding", "index_select", "gather", "index"})
# Potentially expensive operations without a formula. Namespaces other than torch's hold the user's kernels.
_HEAVY = ("_fft_", "_cdist", "linalg_", "_linalg", "_ctc", "_trilinear", "cholesky", "triangular_solve", "_grouped_mm",
          "_scaled_grouped_mm", "_weight_int", "miopen_rnn", "_thnn_differentiable")  # fmt: skip
_OWN_NAMES = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler"})


def _rows(shape: Iterable[int]) -> int:
    """Product of all dimensions but the last."""
    return prod(list(shape)[:-1])


def _add_product(_base: Tensor, a: Tensor, b: Tensor) -> int:
    """(…, m, k) x (…, k, n)."""
    return 2 * a.numel() * b.shape[-1]


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, _bias: Any, _stride: Any, _padding: Any, _dilation: Any,
    transposed: bool, _output_padding: Any, _groups: int, wanted: list[bool],
) -> int:  # fmt: skip
    """Each gradient costs as much as the forward pass; torch's own formula ignores groups."""
    places = x if transposed else grad
    forward = 2 * places.shape[0] * prod(places.shape[2:]) * weight.numel()
    return forward * (int(wanted[0]) + int(wanted[1]))


def _attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Query-key scores and their product with the values; all (B, H, L, E)."""
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> int:
    """Recomputed scores, and the gradients of values, scores, queries and keys."""
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _mkldnn_rnn(x: Tensor, weight0: Tensor, weight1: Tensor) -> int:
    """One direction of one layer: input and state weights for each position (T, B)."""
    return 2 * _rows(x.shape) * (weight0.numel() + weight1.numel())


def _cudnn_rnn(x: Tensor, weights: list[Tensor]) -> int:
    """All layers and directions: every weight matrix once per position or packed row."""
    return 2 * _rows(x.shape) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _cudnn_rnn_backward(x: Tensor, weights: list[Tensor], *args: Any, **_more: Any) -> int:
    """Gradients of input and state, plus those of the weights if `output_mask` requests them."""
    mask = args[-1] if args and isinstance(args[-1], (list, tuple)) else [True] * 4
    return (2 if mask[3] else 1) * _cudnn_rnn(x, weights)


def _of_first(count: int, formula: Formula) -> Formula:
    """The formula of an operation's first `count` arguments."""
    return lambda *args, **_more: formula(*args[:count])


def _formulas() -> dict[Any, Formula]:
    """FLOP formulas: torch's registry with additions and corrections."""
    linear = _of_first(2, lambda x, weight: 2 * _rows(x.shape) * weight.numel())
    vector, add_product = _of_first(1, lambda matrix: 2 * matrix.numel()), _of_first(3, _add_product)
    own: dict[str, Formula] = {
        "linear": linear, "mv": vector, "dot": vector, "vdot": vector,
        "addmv": _of_first(2, lambda _base, matrix: 2 * matrix.numel()),
        "baddbmm": add_product, "addbmm": add_product, "_addmm_activation": add_product,
        "convolution_backward": _of_first(11, _convolution_backward), "mkldnn_rnn_layer": _of_first(3, _mkldnn_rnn),
        "mkldnn_rnn_layer_backward": _of_first(3, lambda *args: 2 * _mkldnn_rnn(*args)),
        "_cudnn_rnn": _of_first(2, _cudnn_rnn), "_cudnn_rnn_backward": _cudnn_rnn_backward,
    }  # fmt: skip
    for kind in ("flash_attention_for_cpu", "cudnn_attention", "fused_attention_overrideable"):
        own[f"_scaled_dot_product_{kind}"] = _of_first(3, _attention)
        own[f"_scaled_dot_product_{kind}_backward"] = _of_first(4, _attention_backward)
    mine = {getattr(aten, name): formula for name, formula in own.items() if hasattr(aten, name)}
    return {**flop_registry, **mine}


@dataclass(frozen=True, slots=True)
class _Op:
    """Static facts about an operation."""

    name: str
    formula: Formula | None
    moves: bool  # reads and writes memory, unlike a view
    returns: bool
    heavy: bool  # potentially expensive, without a formula


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations inside `with WorkCounter() as counter:`, usually one forward, loss and backward.

    flops, flops_backward: floating-point operations, and the part inside backward. bytes: read and written by every
    operation that is not a view, assuming no fusion and no cache: an upper bound of the memory traffic. attention:
    backends in the order in which they ran. dtypes: FLOPs by the dtype of the result ("bfloat16"), which shows whether
    mixed precision took effect. uncounted: potentially expensive operations without a formula, and custom kernels.

    The results do not change: every operation runs unmodified and no random numbers are drawn. The model must not be
    compiled, because compiled code calls its own kernels.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.flops_backward = 0
        self.bytes = 0
        self.operations = 0
        self.attention: list[str] = []
        self.dtypes: Counter[str] = Counter()
        self.uncounted: list[str] = []
        self._formulas = _formulas()
        self._known: dict[Any, _Op] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        op = self._known.get(func)
        if op is None:
            op = self._known[func] = self._look_at(func)
            if (backend := _ATTENTION.get(op.name)) is not None:
                _add_once(self.attention, backend)
            if op.heavy:
                _add_once(self.uncounted, op.name)
        self.operations += 1
        if op.formula is not None:
            try:
                self._add(int(op.formula(*args, **kwargs, out_val=out)), out)
            except Exception:  # noqa: BLE001  a formula that does not know this call must not end the training
                _add_once(self.uncounted, op.name)
        if op.moves:
            self.bytes += _traffic(op, args, kwargs, out)
        return out

    def _add(self, flops: int, out: Any) -> None:
        self.flops += flops
        if torch._C._current_graph_task_id() != -1:  # inside autograd's engine
            self.flops_backward += flops
        first = next(tensors(out), None)
        if first is not None:
            self.dtypes[str(first.dtype).removeprefix("torch.")] += flops

    def _look_at(self, func: Any) -> _Op:
        packet = getattr(func, "overloadpacket", func)
        space, _, name = str(packet).rpartition(".")
        schema = getattr(func, "_schema", None)
        formula = self._formulas.get(packet)
        returns = list(schema.returns) if schema is not None else []
        alias = returns[0].alias_info if returns else None
        view = alias is not None and not alias.is_write
        moves = not view and name not in _NO_TRAFFIC
        heavy = formula is None and (space not in _OWN_NAMES or name.startswith(_HEAVY))
        return _Op(name, formula, moves, bool(returns) or schema is None, heavy)


# torch wraps the method so that torch.compile skips it, and imports torch.compile (over a second) at the first call.
WorkCounter.__torch_dispatch__ = inspect.unwrap(WorkCounter.__torch_dispatch__)  # type: ignore[method-assign]


def _add_once(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; expanded dimensions count once."""
    try:
        count = prod(
            length for length, step in zip(tensor.shape, tensor.stride(), strict=True) if step or length == 0
        )
    except (RuntimeError, TypeError):  # a layout without strides
        count = tensor.numel()
    return int(count) * tensor.element_size()


def _traffic(op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    written = sum(map(_size, tensors(out)))
    if op.name in _LOOK_UP:
        return 2 * written + sum(map(_size, tensors(args[1:])))
    read = sum(map(_size, tensors((args, kwargs))))
    return read + written if op.returns else 2 * read


def work_event(
    counter: WorkCounter, model: nn.Module, micro: int, accumulation: int, clips: bool, optimizer_bytes: int,
    gpu: Gpu | None, precision: str,
) -> WorkEvent:  # fmt: skip
    """FLOPs and bytes of one optimizer step, from the count of one micro-batch.

    clips: gradients are clipped. optimizer_bytes: size of the optimizer state. gpu: the chosen GPU, None on a CPU.
    precision: "bf16", "fp16", "tf32" or "fp32".
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(parameter.nbytes for parameter in trained)
    # The update reads gradients, and reads and writes parameters and moments; clipping reads and scales gradients.
    update = 3 * weights + 2 * optimizer_bytes + (3 * weights if clips else 0)
    adding = 3 * weights * (accumulation - 1)
    counted = counter.operations > 0
    kind, peak, bandwidth, source, reason = published_peak(gpu, precision)
    return WorkEvent(
        flops_per_step=counter.flops * accumulation if counted else None,
        bytes_per_step=counter.bytes * accumulation + adding + update if counted else None,
        flops_forward=(counter.flops - counter.flops_backward) * accumulation if counted else None,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        micro=micro,
        accumulation=accumulation,
        precision=precision,
        peak_tflops=peak,
        peak_kind=kind,
        bandwidth_gb_s=bandwidth,
        peak_source=source,
        reason=reason,
        attention=list(counter.attention),
        dtypes=dict(counter.dtypes),
        uncounted=list(counter.uncounted),
        method=METHOD,
    )


def published_peak(
    gpu: Gpu | None, precision: str
) -> tuple[str | None, float | None, float | None, str | None, str]:
    """(kind, dense peak TFLOP/s, bandwidth in GB/s, source, "") of a GPU, or Nones and the reason."""
    if gpu is None:
        return None, None, None, None, NO_CPU_PEAK
    if (profile := gpu.profile) is None:
        return None, None, None, None, gpu.reasons.get("profile", "no published figures for this GPU")
    if gpu.mig:
        return None, None, None, None, profile.note or "a MIG instance is only a part of its GPU"
    if (peak := profile.peak_tflops(precision)) is None:
        reason = f"no published {precision} peak for {profile.name}"
        return None, None, profile.bandwidth_gb_s, profile.source, reason
    source = f"{profile.source}; {profile.note}" if profile.note else profile.source
    return precision, peak, profile.bandwidth_gb_s, source, ""
