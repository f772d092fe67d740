"""What a run reports of its steps: FLOPs and bytes against counts by hand, published peaks, and losses in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as f

from ndd_engine.hardware.gpus import Gpu, GpuProfile
from ndd_engine.measure.reporting import (
    NO_CPU_PEAK,
    LossReader,
    WorkCounter,
    _cudnn_rnn,
    _cudnn_rnn_backward,
    published_peak,
    work_event,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def count(run: Callable[[], Tensor]) -> WorkCounter:
    with WorkCounter() as counter:
        run().backward()  # type: ignore[no-untyped-call]
    return counter


def mean_of(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        out = module(x)
        return (out[0] if isinstance(out, tuple) else out).mean()

    return run


def parts(counter: WorkCounter) -> tuple[int, int]:
    return counter.flops - counter.flops_backward, counter.flops_backward


# Layer, shape of its input, and its FLOPs of a forward pass.
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "linear": (nn.Linear(32, 48), (7, 5, 32), 2 * 7 * 5 * 32 * 48),
    "convolution": (nn.Conv2d(8, 16, 3, padding=1), (2, 8, 10, 12), 2 * 2 * 10 * 12 * 16 * 8 * 9),
    "stride": (nn.Conv2d(8, 16, 3, stride=2, padding=1), (2, 8, 10, 12), 2 * 2 * 5 * 6 * 16 * 8 * 9),
    "groups": (nn.Conv2d(8, 16, 3, padding=1, groups=4), (2, 8, 10, 12), 2 * 2 * 10 * 12 * 16 * 2 * 9),
    "one dimension": (nn.Conv1d(6, 4, 1), (3, 6, 20), 2 * 3 * 20 * 6 * 4),
    "transposed": (nn.ConvTranspose1d(6, 4, 5), (2, 6, 9), 2 * 2 * 9 * 6 * 4 * 5),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("wants_input", [False, True])
def test_layers_by_hand(name: str, wants_input: bool) -> None:
    """Backward has the gradient of the weights, and that of the input where it is wanted."""
    layer, shape, one = LAYERS[name]
    found = count(mean_of(layer, torch.randn(shape, requires_grad=wants_input)))
    assert parts(found) == (one, 2 * one if wants_input else one)


@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 2)])
def test_recurrent_layers_by_hand(layers: int, directions: int) -> None:
    """The kernels of cuDNN need a GPU; their formulas need only shapes."""
    x = torch.randn(3, 7, 12, requires_grad=True)
    module = nn.LSTM(12, 10, layers, batch_first=True, bidirectional=directions == 2)
    counter, weights = count(mean_of(module, x)), list(module.parameters())
    widths = [12] + [10 * directions] * (layers - 1)
    one = sum(directions * 2 * 3 * 7 * 4 * 10 * (width + 10) for width in widths)
    assert parts(counter) == (one, 2 * one) and counter.uncounted == []
    assert _cudnn_rnn(x, weights) == one
    assert _cudnn_rnn_backward(x, weights, 4, [True, True, True, True]) == 2 * one
    assert _cudnn_rnn_backward(x, weights, 4, [True, True, True, False]) == one
    one = 2 * 3 * 7 * 3 * 10 * (12 + 10)
    # The first state needs no gradient: one product with the state's weights less.
    assert parts(count(mean_of(nn.GRU(12, 10, batch_first=True), x))) == (one, 2 * one - 2 * 3 * 3 * 10 * 10)
    forward, _ = parts(count(mean_of(nn.LSTMCell(12, 10), torch.randn(5, 12))))
    assert forward == 2 * 5 * 4 * 10 * (12 + 10)


def test_batched_products_by_hand() -> None:
    a, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 6, requires_grad=True)
    base = torch.randn(3, 4, 6)
    one = 2 * 3 * 4 * 5 * 6
    assert parts(count(lambda: torch.baddbmm(base, a, b).mean())) == (one, 2 * one)
    assert parts(count(lambda: torch.einsum("bij,bjk->bik", a, b).mean())) == (one, 2 * one)
    vector = torch.randn(5)
    assert count(lambda: (a[0] @ vector).mean()).flops == 2 * 4 * 5


def test_attention_by_hand_and_by_back_end() -> None:
    query = torch.randn(2, 4, 6, 8, requires_grad=True)
    key = torch.randn(2, 4, 9, 8, requires_grad=True)
    pair = 2 * 2 * 4 * 6 * 9 * 8  # one product of all queries with all keys
    # The backward pass of the first one computes the scores again.
    for dropout, backward, backend in ((0.0, 5, "flash (cpu)"), (0.1, 4, "math")):
        found = count(lambda p=dropout: f.scaled_dot_product_attention(query, key, key, dropout_p=p).mean())
        assert (parts(found), found.attention) == ((2 * pair, backward * pair), [backend])
    assert count(mean_of(nn.Linear(3, 3), torch.randn(2, 3))).attention == []


def test_bytes_are_what_operations_read_and_write() -> None:
    x, y = torch.randn(100, 4), torch.randn(100, 4)
    with WorkCounter() as counter:
        z = x + y  # two read, one written
        assert counter.bytes == 3 * 1600
        z.view(4, 100).t().unsqueeze(0)  # views move nothing
        torch.empty(10_000)
        assert counter.bytes == 3 * 1600
        z.add_(torch.ones(1).expand(100, 4))  # the expanded tensor has four bytes, written by ones
        assert counter.bytes == 3 * 1600 + 4 + (1600 + 4 + 1600)
    table = nn.Embedding(10_000, 16)
    with WorkCounter() as counter:  # it computes nothing, and moves its rows
        table(torch.tensor([[1, 2, 3]]))
    assert (counter.flops, counter.bytes, counter.uncounted) == (0, 2 * 3 * 16 * 4 + 3 * 8, [])


def test_mixed_precision_shows_in_the_types() -> None:
    module, x = nn.Linear(32, 48), torch.randn(5, 32)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x).float().mean()

    half, whole = count(run), count(mean_of(module, x))
    assert half.flops == whole.flops
    assert half.dtypes == {"bfloat16": half.flops}
    assert whole.dtypes == {"float32": whole.flops}


def test_counting_changes_no_result_and_draws_no_random_number() -> None:
    def train(around: Any) -> list[Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 8))
        x = torch.randn(4, 6, 8)
        with around:
            (f.scaled_dot_product_attention(model(x), x, x, dropout_p=0.2) ** 2).mean().backward()
        return [*(parameter.grad for parameter in model.parameters()), torch.rand(4)]

    assert all(map(torch.equal, train(nullcontext()), train(WorkCounter())))


def test_an_operation_that_cannot_be_counted_is_named_and_survived() -> None:
    @torch.library.custom_op("ndd_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    with WorkCounter() as counter:
        counter._formulas[torch.ops.aten.mm] = lambda *_, **__: 1 // 0
        out = twice(torch.ones(3))
        torch.fft.rfft(torch.ones(16))
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert out.tolist() == [2, 2, 2] and product.sum() == 8
    assert (counter.flops, counter.uncounted) == (0, ["twice", "_fft_r2c", "mm"])


def profile(**changes: Any) -> GpuProfile:
    made = GpuProfile(
        "x", "X 9000", 16, 700.0, {"bf16": 165.0, "tf32": 82.0}, (8, 9), "a sheet", ("X",), 40, 6.0
    )
    return replace(made, **changes)


def gpu(found: GpuProfile | None = None, **changes: Any) -> Gpu:
    return replace(Gpu(0, 0, None, "X 9000", None, None, profile=found), **changes)


def test_a_step_is_all_its_micro_batches_and_the_update() -> None:
    model = nn.Linear(32, 48)
    counter = count(mean_of(model, torch.randn(5, 32)))
    weights = (32 * 48 + 48) * 4
    plain = work_event(counter, model, 5, 1, False, 2 * weights, None, "fp32")
    assert plain.flops_per_step == counter.flops == 2 * (2 * 5 * 32 * 48)
    assert plain.flops_forward == 2 * 5 * 32 * 48
    assert plain.bytes_per_step == counter.bytes + 3 * weights + 4 * weights
    assert (plain.peak_tflops, plain.peak_kind, plain.reason) == (None, None, NO_CPU_PEAK)
    assert (plain.parameters, plain.micro, plain.accumulation) == (32 * 48 + 48, 5, 1)
    more = work_event(counter, model, 5, 4, False, 2 * weights, None, "")
    assert more.flops_per_step == 4 * counter.flops
    # Each further micro-batch adds to gradients that are there: read, read, written.
    assert more.bytes_per_step == 4 * counter.bytes + 3 * 3 * weights + 3 * weights + 4 * weights
    nothing = work_event(WorkCounter(), model, 5, 1, False, 0, None, "fp32")
    assert (nothing.flops_per_step, nothing.bytes_per_step) == (None, None)


def test_the_peak_is_that_of_the_precision_in_use_or_there_is_a_reason() -> None:
    assert published_peak(gpu(profile()), "bf16") == ("bf16", 165.0, 700.0, "a sheet", "")
    assert published_peak(gpu(profile()), "tf32")[:2] == ("tf32", 82.0)
    kind, peak, bandwidth, _, reason = published_peak(gpu(profile()), "fp16")
    assert (kind, peak, bandwidth) == (None, None, 700.0)
    assert "fp16" in reason and "X 9000" in reason
    _, peak, _, source, _ = published_peak(gpu(profile(note="72 W board")), "bf16")
    assert peak == 165.0 and source.endswith("72 W board")
    part = gpu(profile(note="figures are of the whole GPU"), mig=True)
    for chosen, why in (
        (None, NO_CPU_PEAK), (gpu(None, reasons={"profile": "no figures"}), "no figures"), (part, "the whole GPU"),
    ):  # fmt: skip
        kind, peak, _, _, reason = published_peak(chosen, "bf16")
        assert (kind, peak) == (None, None) and why in reason


@given(st.integers(1, 12), st.lists(st.floats(-1e3, 1e3, width=32), max_size=60), st.sets(st.integers(0, 60)))
def test_every_loss_arrives_once_in_order(every: int, losses: list[float], drains: set[int]) -> None:
    reader = LossReader(CPU, every)
    arrived: list[tuple[int, float]] = []
    waiting = 0
    for step, loss in enumerate(losses, start=1):
        new = reader.add(step, torch.tensor(loss), {})
        waiting += 1
        assert waiting <= every and len(new) in (0, waiting)
        if step in drains:
            new += reader.drain()
        waiting = 0 if new else waiting
        arrived += new
    arrived += reader.drain()
    assert arrived == list(enumerate(losses, start=1)) and reader.drain() == []
