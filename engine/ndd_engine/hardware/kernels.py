"""How long the kernels of an operation take on a GPU, from shapes and published specifications.

Each kernel takes the longest of its products at a share of the peak, its bytes at a share of the bandwidth, and its
elements at a rate for each multiprocessor, after a fixed start. The shares are fitted (profiles, kernels/fitted.toml).
Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import ndd_profiles
from ndd_engine.hardware.gpus import GpuProfile


class Shape(NamedTuple):
    """A tensor. width: bytes of an element. dtype: "fp32", "fp16", "bf16" or another name."""

    dims: tuple[int, ...]
    width: int
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return self.elements * self.width


class Op(NamedTuple):
    """An operation of a step. phase: see `mapped.PHASES`. name: without its namespace. args: a Shape, a tuple of
    them, or a plain value each. out: the dimensions of the first result, None without one."""

    phase: str
    name: str
    args: tuple[Any, ...]
    out: tuple[int, ...] | None


class Kernels(NamedTuple):
    """Equal kernels. flops, bytes, elements: of all of them. product: (batch, rows, columns, sum) of a product
    or (heads, queries, keys, width) of attention. steps: in time, each after the other; ways: directions of a
    recurrent layer. dtype: of the products.
    """

    kind: str
    bytes: float
    flops: float = 0.0
    elements: float = 0.0
    launches: float = 1.0
    product: tuple[int, ...] = ()
    dtype: str = "fp32"
    steps: int = 0
    ways: int = 1


@dataclass(frozen=True)
class Fitted:
    """The numbers of kernels/fitted.toml."""

    date: str
    source: str
    median_error: float
    p90_error: float
    kinds: dict[str, dict[str, float]]
    common: dict[str, float]
    host: dict[str, Any]


@cache
def fitted() -> Fitted:
    """Raises TypeError or KeyError if the profile is malformed (a packaging error)."""
    return Fitted(**ndd_profiles.read("kernels", "fitted"))


# Operations that change only how a tensor is seen, or allocate one.
WITHOUT_KERNEL = frozenset({
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select",
    "detach", "alias", "as_strided", "unbind", "split", "split_with_sizes", "chunk", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "narrow", "diagonal", "unfold", "is_same_size",
    "resize_", "set_", "_reshape_alias", "view_as_real", "view_as_complex", "sym_size",
})  # fmt: skip
_REDUCTIONS = frozenset({
    "sum", "mean", "amax", "amin", "max", "min", "norm", "linalg_vector_norm", "all", "any", "argmax", "argmin", "var",
    "std", "prod", "cumsum", "logsumexp", "var_mean", "nll_loss_forward", "cumprod", "count_nonzero",
})  # fmt: skip
# Passes over the largest operand, and kernels.
_NORMS = {
    "native_layer_norm": (2, 1), "native_layer_norm_backward": (3, 2.5), "native_group_norm": (3, 2.5),
    "native_group_norm_backward": (4, 4), "_fused_rms_norm": (2, 1), "_fused_rms_norm_backward": (3, 2),
    "native_batch_norm": (3, 1), "_native_batch_norm_legit": (3, 1), "_native_batch_norm_legit_functional": (3, 1),
    "_batch_norm_with_update": (3, 1), "batch_norm_backward": (5, 1), "native_batch_norm_backward": (5, 1),
    "_native_batch_norm_legit_no_training": (2, 1), "_batch_norm_no_update": (2, 1),
    "_softmax": (2, 1), "_log_softmax": (2, 1), "_safe_softmax": (2, 1), "_softmax_backward_data": (3, 1),
    "_log_softmax_backward_data": (3, 1),
}  # fmt: skip
_GATHERS = frozenset({
    "index_select", "embedding", "gather", "index", "take", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "_unsafe_index",
})  # fmt: skip
_ROWS = ("index_select", "embedding", "index")  # they take whole rows
_TO_BOOL = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "isnan", "isfinite", "logical_and", "bitwise_not",
})  # fmt: skip
_MAKE = frozenset(
    {"arange", "zeros", "ones", "full", "randn", "rand", "randint", "bernoulli", "scalar_tensor"}
)
_FILL = frozenset({
    "copy_", "fill_", "zero_", "zeros_like", "ones_like", "normal_", "uniform_", "new_zeros", "masked_fill_",
})  # fmt: skip
# Bytes moved per byte of the operands of a fused optimizer: it reads all and writes all but the gradients.
_FUSED = {"_fused_adam_": 7 / 4, "_fused_adamw_": 7 / 4, "_fused_sgd_": 5 / 3}
# Elements of a chunk and chunks of a kernel of the foreach functions; tensors of a kernel by the number of lists.
_CHUNK, _CHUNKS, _TENSORS = 65_536, 320, (110, 64, 48, 36)
# A backward pass of an embedding sorts the indices if there are more.
_UNSORTED = 3072
# More groups than that have no tiles.
_GROUPS = 8


def kernels_of(op: Op, tf32: bool) -> list[Kernels]:
    """The kernels that CUDA runs for an operation. tf32: whether products of fp32 use TF32."""
    if op.name in WITHOUT_KERNEL:
        return []
    tensors = [arg for arg in op.args if isinstance(arg, Shape)]
    for known in (_products, _convolutions, _attention, _recurrent, _lists, _rows):
        found = known(op, tensors, tf32)
        if found is not None:
            return found
    return _plain(op, tensors)


def _kind(shape: Shape, tf32: bool) -> str:
    return "tf32" if tf32 and shape.dtype == "fp32" else shape.dtype


def _product(batch: int, rows: int, columns: int, length: int, shape: Shape, tf32: bool) -> Kernels:
    moved = batch * (rows * length + length * columns + rows * columns) * shape.width
    flops = 2.0 * batch * rows * columns * length
    return Kernels("product", moved, flops, product=(batch, rows, columns, length), dtype=_kind(shape, tf32))


def _products(op: Op, tensors: list[Shape], tf32: bool) -> list[Kernels] | None:
    match op.name:
        case "mm" | "_scaled_mm":
            left, right = tensors[:2]
            return [_product(1, left.dims[0], right.dims[1], left.dims[1], left, tf32)]
        case "addmm" | "addmm_" | "_addmm_activation":
            left, right = tensors[1:3]
            return [_product(1, left.dims[0], right.dims[1], left.dims[1], left, tf32)]
        case "bmm" | "baddbmm" | "baddbmm_":
            left, right = tensors[-2:] if op.name == "bmm" else tensors[1:3]
            return [_product(left.dims[0], left.dims[1], right.dims[2], left.dims[2], left, tf32)]
        case "mv" | "dot" | "addmv" | "addmv_":
            left = tensors[1 if op.name.startswith("addmv") else 0]
            return [_product(1, left.dims[0], 1, left.dims[-1], left, tf32)]
    return None


def _convolution(
    kind: str, x: Sequence[int], weight: Shape, y: Sequence[int], tf32: bool, transposed: bool = False
) -> Kernels:
    """x, y: dimensions of input and output."""
    inner = x[1] if not transposed else y[1]
    groups = max(inner // weight.dims[1], 1)
    pixels = (x if transposed else y)[0] * math.prod((x if transposed else y)[2:])
    outer = x[1] if transposed else y[1]
    length = math.prod(weight.dims[1:])
    moved = (math.prod(x) + math.prod(y) + weight.elements) * weight.width
    flops = 2.0 * pixels * outer * length
    if groups > _GROUPS:
        return Kernels("depthwise", moved, flops)
    dtype = _kind(weight, tf32)
    if (
        dtype == "fp32"
        and weight.dims[2:] == (3, 3)
        and weight.dims[1] >= 16
        and tuple(x[2:]) == tuple(y[2:])
    ):
        flops /= fitted().common["winograd"]
    return Kernels(kind, moved, flops, product=(groups, pixels, outer // groups, length), dtype=dtype)


def _convolutions(op: Op, tensors: list[Shape], tf32: bool) -> list[Kernels] | None:
    if op.name in ("convolution", "cudnn_convolution", "_slow_conv2d_forward", "_conv_depthwise2d"):
        assert op.out is not None
        transposed = op.name == "convolution" and len(op.args) > 6 and op.args[6] is True
        return [_convolution("convolution", tensors[0].dims, tensors[1], op.out, tf32, transposed)]
    if op.name != "convolution_backward":
        return None
    y, x, weight = tensors[:3]
    transposed = len(op.args) > 7 and op.args[7] is True
    mask = op.args[-1] if isinstance(op.args[-1], tuple) and len(op.args[-1]) == 3 else (True, True, True)
    found = [
        _convolution(kind, x.dims, weight, y.dims, tf32, transposed)
        for kind, wanted in (("convolution_input", mask[0]), ("convolution_weight", mask[1]))
        if wanted
    ]
    return [*found, *([Kernels("reduction", y.bytes, elements=y.elements)] if mask[2] else [])]


def _attention(op: Op, tensors: list[Shape], tf32: bool) -> list[Kernels] | None:
    if "scaled_dot_product" not in op.name or len(tensors) < 3:
        return None
    back = "backward" in op.name
    query, key = tensors[1:3] if back else tensors[:2]
    batch, heads, queries, width = query.dims
    keys = key.dims[2]
    causal = 0.5 if "flash" in op.name and True in [arg for arg in op.args if isinstance(arg, bool)] else 1.0
    flops = 4.0 * batch * heads * queries * keys * width * causal * (2.5 if back else 1.0)
    moved = 2 * (query.bytes + key.bytes) * (2 if back else 1)
    kind, count = ("attention_backward", 3) if back else ("attention", 1)
    size = (batch * heads, queries, keys, width)
    return [Kernels(kind, moved, flops, launches=count, product=size, dtype=_kind(query, tf32))]


# Names of the operations that `fakes` notes for a layer of cuDNN's LSTM or GRU: (Shape of (time, batch, inputs),
# hidden size, directions, gates).
RECURRENT, RECURRENT_BACKWARD = "recurrent", "recurrent_backward"


def _recurrent(op: Op, tensors: list[Shape], tf32: bool) -> list[Kernels] | None:
    if op.name not in (RECURRENT, RECURRENT_BACKWARD):
        return None
    x, hidden, ways, gates = op.args
    length, batch, inputs = x.dims
    back = op.name == RECURRENT_BACKWARD
    found = [_product(1, length * batch, gates * hidden * ways, inputs, x, tf32)] * (2 if back else 1)
    if back:
        found += [_product(1, gates * hidden, hidden, length * batch, x, tf32)] * ways
    flops = 2.0 * length * ways * batch * gates * hidden * hidden
    moved = length * ways * (gates * hidden * hidden + 8 * batch * hidden) * x.width
    return [*found, Kernels(op.name, moved, flops, dtype=_kind(x, tf32), steps=length, ways=ways)]


def _lists(op: Op, tensors: list[Shape], tf32: bool) -> list[Kernels] | None:
    """Operations on lists of tensors."""
    lists = [arg for arg in op.args if isinstance(arg, tuple) and not isinstance(arg, Shape) and arg]
    lists = [each for each in lists if isinstance(each[0], Shape)]
    if op.name in ("cat", "stack"):
        return [Kernels("elementwise", 2.0 * sum(shape.bytes for each in lists for shape in each))]
    if not op.name.startswith(("_foreach", "_fused_adam", "_fused_sgd", "_amp_foreach")):
        return None
    if not lists:
        return []
    written = 1 + 1 / len(lists) if op.name.endswith("_") and "norm" not in op.name else 1.0
    share = _FUSED.get(op.name, written)
    chunks = sum(-(-shape.elements // _CHUNK) for shape in lists[0])
    count = max(chunks / _CHUNKS, len(lists[0]) / _TENSORS[min(len(lists), 4) - 1], 1.0)
    moved = share * sum(shape.bytes for each in lists for shape in each if isinstance(shape, Shape))
    return [Kernels("foreach", moved, launches=count)]


def _rows(op: Op, tensors: list[Shape], tf32: bool) -> list[Kernels] | None:
    """Norms, reductions and gathers."""
    if not tensors:
        return None
    largest = max(tensors, key=lambda shape: shape.elements)
    if op.name in _NORMS:
        passes, count = _NORMS[op.name]
        kind = "softmax" if "softmax" in op.name else "batch_norm" if "batch_norm" in op.name else "norm"
        return [Kernels(kind, passes * largest.bytes, elements=largest.elements, launches=count)]
    if op.name in _REDUCTIONS:
        return [Kernels("reduction", largest.bytes, elements=largest.elements)]
    if op.name in _GATHERS:
        lists = [
            each for arg in op.args if isinstance(arg, tuple) and not isinstance(arg, Shape) for each in arg
        ]
        indices = [*tensors[1:], *(shape for shape in lists if isinstance(shape, Shape))]
        if not indices:
            return None
        index = max(indices, key=lambda shape: shape.elements)
        row = tensors[0].dims[-1] if op.name in _ROWS and len(tensors[0].dims) > 1 else 1
        moved = 2.0 * index.elements * row * tensors[0].width + index.bytes
        return [Kernels("gather", moved, elements=index.elements * row)]
    if op.name in ("embedding_dense_backward", "embedding_backward") and len(tensors) > 1:
        grad, index = tensors[:2]
        rows = next((arg for arg in op.args if isinstance(arg, int) and arg > 1), 0)
        sorts = index.elements > _UNSORTED
        return [
            Kernels("elementwise", float(rows * grad.dims[-1] * grad.width)),
            Kernels("gather", 2.0 * grad.bytes, launches=_GROUPS if sorts else 1),
        ]
    return None


def _plain(op: Op, tensors: list[Shape]) -> list[Kernels]:
    """Everything else: each operand is read and the result written."""
    if not tensors:
        return [Kernels("elementwise", 4.0 * math.prod(op.out or ()))] if op.name in _MAKE else []
    first = tensors[0]
    if op.name in _FILL:
        source = tensors[1] if op.name == "copy_" and len(tensors) > 1 else None
        if source is not None and (source.dtype != first.dtype or source.elements != first.elements):
            return [Kernels("broadcast", first.bytes + source.bytes, elements=first.elements)]
        return [Kernels("elementwise", float(first.bytes + (source.bytes if source is not None else 0)))]
    operands = [shape for shape in tensors if shape.elements > 1]
    out = op.out if op.out is not None else first.dims
    written = math.prod(out) * (1 if op.name in _TO_BOOL else first.width)
    widths = {shape.width for shape in operands if shape.dtype != "bool"}
    mixed = len({shape.elements for shape in operands}) > 1 or len(widths) > 1
    moved = sum(shape.bytes for shape in operands) + written
    return [Kernels("broadcast" if mixed else "elementwise", float(moved), elements=math.prod(out))]


# Rows and columns of a tile of a product, and the share of the peak that it reaches; parts of a split sum.
_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.62), (32, 32, 0.3), (16, 64, 0.3))
_SPLITS, _SPLIT_SHARE, _SPLIT_LENGTH = (1, 4, 16), 0.85, 128
_QUERIES = 128  # of a tile of attention


@dataclass(frozen=True)
class Card:
    """A GPU, as kernels see it."""

    gpu: GpuProfile
    _known: dict[Kernels, float] = field(default_factory=dict, compare=False)

    @property
    def tf32(self) -> bool:
        return bool(self.gpu.peak_tflops("tf32"))

    def seconds(self, kernels: Kernels) -> float:
        """Seconds of these kernels alone on the GPU."""
        found = self._known.get(kernels)
        if found is None:
            found = self._known[kernels] = self._us(kernels) * 1e-6
        return found

    def _us(self, work: Kernels) -> float:
        numbers, common = fitted().kinds[work.kind], fitted().common
        start, share = numbers["start_us"], numbers["bandwidth"]
        if work.kind != "foreach" and work.bytes < 0.5e6 * self.gpu.l2_mb:
            share *= common["in_l2"]
        per_us = self.gpu.bandwidth_gb_s * 1e3
        if work.steps:
            each = (
                work.flops / (self._peak(work) * numbers["rate"]),
                work.bytes / (per_us * numbers["bandwidth"]),
            )
            return work.steps * start * work.ways + max(each)
        moving = work.bytes / (per_us * share)
        computing = 0.0
        if work.flops:
            computing = work.flops / (self._peak(work) * max(numbers["rate"] * self._used(work), 1e-4))
        elif work.elements and numbers["rate"]:
            computing = work.elements / (self.gpu.sms * numbers["rate"] * 1e3)
        # The factors were fitted to half precision, and say nothing of fp32 products.
        exact = work.dtype == "fp32" and work.product and work.kind != "attention"
        return (work.launches * start + max(moving, computing)) * (1.0 if exact else numbers["factor"])

    def _peak(self, work: Kernels) -> float:
        """Operations per microsecond."""
        peak = self.gpu.peak_tflops(work.dtype) or self.gpu.peak_tflops("fp32")
        assert peak is not None  # each profile has it
        return peak * 1e6

    def _used(self, work: Kernels) -> float:
        """The share of the rate that tiles and waves of multiprocessors leave."""
        depth = fitted().kinds[work.kind]["depth"]
        if not work.product:
            return 1.0
        if work.kind.startswith("attention"):
            heads, queries, keys, _ = work.product
            waves = heads * -(-queries // _QUERIES) / self.gpu.sms
            return waves / math.ceil(waves) * keys / (keys + depth)
        found = max(self._of_tiles(work.product, depth))
        aligned = not (work.product[2] % 8 or work.product[3] % 8)
        half = work.dtype in ("fp16", "bf16") and work.kind == "product"
        return found if aligned or not half else found * fitted().common["unaligned"]

    def _of_tiles(self, product: tuple[int, ...], depth: float) -> Iterator[float]:
        batch, rows, columns, length = product
        for tall, wide, reached in _TILES:
            tiles = batch * -(-rows // tall) * -(-columns // wide)
            full = batch * rows * columns / (tiles * tall * wide)
            for split in _SPLITS:
                if split > 1 and (length < _SPLIT_LENGTH * split or tiles >= self.gpu.sms):
                    continue
                waves, part = tiles * split / self.gpu.sms, length / split
                share = reached * full * waves / math.ceil(waves) * part / (part + depth)
                yield share if split == 1 else share * _SPLIT_SHARE
