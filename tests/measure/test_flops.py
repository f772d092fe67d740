"""FLOP counts against counts by hand for each kind of layer; counting does not change the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

from ndd_engine.hardware.gpus import Gpu, GpuProfile
from ndd_engine.measure.reporting import (
    NO_CPU_PEAK,
    WorkCounter,
    _cudnn_rnn,
    _cudnn_rnn_backward,
    published_peak,
    work_event,
)


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


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_lstm_by_hand(layers: int, directions: int) -> None:
    module = nn.LSTM(12, 10, layers, batch_first=True, bidirectional=directions == 2)
    counter = count(mean_of(module, torch.randn(3, 7, 12, requires_grad=True)))
    widths = [12] + [10 * directions] * (layers - 1)
    one = sum(directions * 2 * 3 * 7 * 4 * 10 * (width + 10) for width in widths)
    assert parts(counter) == (one, 2 * one)
    assert counter.uncounted == []


def test_gru_and_a_cell_by_hand() -> None:
    forward, backward = parts(
        count(mean_of(nn.GRU(12, 10, batch_first=True), torch.randn(3, 7, 12, requires_grad=True)))
    )
    assert forward == 2 * 3 * 7 * 3 * 10 * (12 + 10)
    # The first state needs no gradient: one product with the state's weights less.
    assert backward == 2 * forward - 2 * 3 * 3 * 10 * 10
    forward, _ = parts(count(mean_of(nn.LSTMCell(12, 10), torch.randn(5, 12))))
    assert forward == 2 * 5 * 4 * 10 * (12 + 10)


def test_cudnn_layers_count_as_the_processor_does() -> None:
    # The kernel needs a GPU; its formula needs only shapes. Two layers, two directions, with biases.
    module = nn.LSTM(12, 10, 2, batch_first=True, bidirectional=True)
    x, weights = torch.randn(3, 7, 12, requires_grad=True), list(module.parameters())
    forward, backward = parts(count(mean_of(module, x)))
    assert _cudnn_rnn(x, weights) == forward
    assert _cudnn_rnn_backward(x, weights, 4, [True, True, True, True]) == backward
    assert _cudnn_rnn_backward(x, weights, 4, [True, True, True, False]) == forward


def test_batched_products_by_hand() -> None:
    a, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 6, requires_grad=True)
    base = torch.randn(3, 4, 6)
    one = 2 * 3 * 4 * 5 * 6
    assert parts(count(lambda: torch.baddbmm(base, a, b).mean())) == (one, 2 * one)
    assert parts(count(lambda: torch.einsum("bij,bjk->bik", a, b).mean())) == (one, 2 * one)
    vector = torch.randn(5)
    assert count(lambda: (a[0] @ vector).mean()).flops == 2 * 4 * 5


def attention(query: Tensor, key: Tensor, **options: Any) -> Callable[[], Tensor]:
    return lambda: f.scaled_dot_product_attention(query, key, key, **options).mean()


def test_attention_by_hand_and_by_back_end() -> None:
    query = torch.randn(2, 4, 6, 8, requires_grad=True)
    key = torch.randn(2, 4, 9, 8, requires_grad=True)
    pair = 2 * 2 * 4 * 6 * 9 * 8  # one product of all queries with all keys
    fast = count(attention(query, key))
    assert parts(fast) == (2 * pair, 5 * pair)  # its backward computes the scores again
    assert fast.attention == ["flash (cpu)"]
    plain = count(attention(query, key, dropout_p=0.1))
    assert parts(plain) == (2 * pair, 4 * pair)
    assert plain.attention == ["math"]
    assert count(mean_of(nn.Linear(3, 3), torch.randn(2, 3))).attention == []


def test_an_embedding_computes_nothing_and_moves_its_rows() -> None:
    table = nn.Embedding(10_000, 16)
    ids = torch.tensor([[1, 2, 3]])
    with WorkCounter() as counter:
        table(ids)
    assert (counter.flops, counter.uncounted) == (0, [])
    assert counter.bytes == 2 * 3 * 16 * 4 + 3 * 8


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
    def train(counted: bool) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 8))
        x = torch.randn(4, 6, 8)
        loss = (f.scaled_dot_product_attention(model(x), x, x, dropout_p=0.2) ** 2).mean
        if counted:
            with WorkCounter():
                loss().backward()
        else:
            loss().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], torch.rand(
            4
        )

    plain, counted = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], counted[0], strict=True))
    assert torch.equal(plain[1], counted[1])


def test_an_unknown_operation_is_named_and_survived() -> None:
    @torch.library.custom_op("ndd_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    with WorkCounter() as counter:
        out = twice(torch.ones(3))
        torch.fft.rfft(torch.ones(16))
        out + 1
    assert out.tolist() == [2, 2, 2]
    assert counter.uncounted == ["twice", "_fft_r2c"]


def test_a_formula_that_fails_does_not_end_the_training() -> None:
    with WorkCounter() as counter:
        counter._formulas[torch.ops.aten.mm] = lambda *_, **__: 1 // 0
        out = torch.ones(2, 2) @ torch.ones(2, 2)
    assert out.sum() == 8
    assert (counter.flops, counter.uncounted) == (0, ["mm"])


def profile(**changes: Any) -> GpuProfile:
    made = GpuProfile("x", "X 9000", 16, 700.0, {"bf16": 165.0, "tf32": 82.0}, (8, 9), "a sheet", ("X",))
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


def test_the_peak_is_that_of_the_precision_in_use() -> None:
    assert published_peak(gpu(profile()), "bf16") == ("bf16", 165.0, 700.0, "a sheet", "")
    assert published_peak(gpu(profile()), "tf32")[:2] == ("tf32", 82.0)
    kind, peak, bandwidth, _, reason = published_peak(gpu(profile()), "fp16")
    assert (kind, peak, bandwidth) == (None, None, 700.0)
    assert "fp16" in reason and "X 9000" in reason
    _, peak, _, source, _ = published_peak(gpu(profile(note="72 W board")), "bf16")
    assert peak == 165.0 and source.endswith("72 W board")


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (None, NO_CPU_PEAK),
        (gpu(None, reasons={"profile": "no published figures are known for this GPU"}), "no published figures"),
        (gpu(profile(note="figures are of the whole GPU"), mig=True), "figures are of the whole GPU"),
    ],
)  # fmt: skip
def test_without_a_published_peak_there_is_a_reason(chosen: Gpu | None, reason: str) -> None:
    kind, peak, _, _, why = published_peak(chosen, "bf16")
    assert (kind, peak) == (None, None)
    assert reason in why
