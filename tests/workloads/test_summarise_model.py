"""The pointer-generator: its size, both of its forms, padding, copying, and half precision."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ndd_profiles
from ndd_engine.train.step.stepper import PartTimer
from ndd_engine.workloads.summarise import (
    DecoderSteps,
    EncodedSources,
    Padder,
    Pairs,
    Pointer,
    PointerGenerator,
    StepwisePointer,
    negative_log_likelihood,
)
from ndd_engine.workloads.summarise_data import END, START, UNKNOWN

VOCABULARY = 40


def make(hoisted: bool, layers: int = 2, dropout: float = 0.0) -> PointerGenerator:
    torch.manual_seed(3)
    return PointerGenerator(VOCABULARY, 6, 5, layers, dropout, hoisted)


def draw_pair(draw: torch.Generator, source: int, target: int) -> Pairs:
    """A pair with words that the vocabulary lacks, some of them in the summary."""
    extended = torch.randint(4, VOCABULARY + 3, (source,), generator=draw)
    extended[1] = VOCABULARY
    words = torch.where(extended < VOCABULARY, extended, UNKNOWN)
    out = torch.randint(4, VOCABULARY, (target,), generator=draw)
    out[0], out[1], out[-1] = VOCABULARY, extended[0], END
    known = torch.where(out < VOCABULARY, out, UNKNOWN)
    return Pairs(words, extended, torch.cat((torch.tensor([START]), known[:-1])), out)


def items(*lengths: tuple[int, int]) -> list[Pairs]:
    draw = torch.Generator().manual_seed(0)
    return [draw_pair(draw, *length) for length in lengths]


def loss_of(model: nn.Module, batch: Pairs) -> Tensor:
    return negative_log_likelihood(model(*batch), batch.target_out)


def gradients(model: nn.Module, batch: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return loss.detach(), found


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_both_forms_have_the_same_loss_and_gradients(
    layers: int, dtype: torch.dtype, tolerance: float
) -> None:
    hoisted, stepwise = make(True, layers).to(dtype), make(False, layers).to(dtype)
    # A checkpoint of one form is one of the other.
    stepwise.load_state_dict(hoisted.state_dict())
    batch = Padder(None)(items((9, 6), (5, 3), (12, 4)))
    (left, ours), (right, theirs) = gradients(hoisted, batch), gradients(stepwise, batch)
    assert left.dtype == dtype and float(left) == pytest.approx(float(right), rel=tolerance)
    for name, gradient in ours.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("hoisted", [True, False])
def test_padding_changes_nothing(hoisted: bool) -> None:
    """A pair has the loss and the gradient of its own in any company, and with any padding."""
    model = make(hoisted).double()
    pairs = items((9, 6), (5, 3), (12, 8))
    alone = [gradients(model, Padder(None)([pair])) for pair in pairs]
    full = [gradients(model, Padder((20, 11))([pair])) for pair in pairs]
    together = gradients(model, Padder(None)(pairs))
    for (loss, own), (padded_loss, padded) in zip(alone, full, strict=True):
        assert float(padded_loss) == pytest.approx(float(loss), rel=1e-12)
        for name, gradient in own.items():
            torch.testing.assert_close(padded[name], gradient, rtol=1e-10, atol=1e-14, msg=name)
    assert float(together[0]) == pytest.approx(sum(float(loss) for loss, _ in alone) / 3, rel=1e-12)
    for name, gradient in together[1].items():
        mean = torch.stack([own[name] for _, own in alone]).mean(0)
        torch.testing.assert_close(gradient, mean, rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize("kind", [Pointer, StepwisePointer])
def test_probability_is_that_of_generating_or_copying(kind: type[Pointer]) -> None:
    """By hand: p_gen p_vocab(word) + (1 - p_gen) (attention on its places in the source)."""
    torch.manual_seed(0)
    pointer = kind(10, 2, 3).double()
    steps = DecoderSteps(
        torch.randn(1, 2, 3).double(),
        torch.randn(1, 2, 6).double(),
        torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.2, 0.0]]]).double(),
    )
    embedded = torch.randn(1, 2, 2).double()
    # Word 5, an unknown one (10), word 5 again, another unknown one (11).
    extended = torch.tensor([[5, 10, 5, 11]])
    memory = EncodedSources(torch.empty(0), None, torch.empty(0), extended)
    features = torch.cat((steps.hidden, steps.context, embedded), 2)
    generated = torch.softmax(features @ pointer.words.weight.T + pointer.words.bias, 2)[0]
    gate = torch.sigmoid(features @ pointer.gate.weight.T + pointer.gate.bias)[0, :, 0]
    for target, first, second in ((5, 0.4, 0.9), (10, 0.2, 0.1), (11, 0.4, 0.0), (7, 0.0, 0.0)):
        found = pointer(steps, embedded, memory, torch.full((1, 2), target))[0]
        expected = (1 - gate) * torch.tensor([first, second]).double()
        if target < 10:
            expected = expected + gate * generated[:, target]
        torch.testing.assert_close(found, expected)
    whole = pointer.distribution(steps, embedded, memory)
    assert whole.shape == (1, 2, 14)
    torch.testing.assert_close(whole.sum(2), torch.ones(1, 2).double())


@pytest.mark.parametrize("hoisted", [True, False])
def test_an_impossible_word_has_a_finite_loss_and_gradient(hoisted: bool) -> None:
    """A vocabulary that is sure of another word, and a target that is not in the source: probability 0 in fp32."""
    model = make(hoisted)
    with torch.no_grad():
        model.pointer.words.bias[7] = 1e4
        model.pointer.gate.bias.fill_(1e4)
    batch = Pairs(
        torch.tensor([[7, 8]]), torch.tensor([[7, 8]]), torch.tensor([[START]]), torch.tensor([[9]])
    )
    loss, found = gradients(model, batch)
    assert 20 < float(loss) < 30
    assert all(torch.isfinite(gradient).all() for gradient in found.values())


@pytest.mark.parametrize("hoisted", [True, False])
@pytest.mark.parametrize("size", ndd_profiles.read("workloads", "summarise")["sizes"])
def test_at_every_size_each_sub_phase_is_timed_or_named_as_left_out(size: str, hoisted: bool) -> None:
    settings: dict[str, Any] = ndd_profiles.read("workloads", "summarise")["sizes"][size]["workload"]
    torch.manual_seed(0)
    model = PointerGenerator(
        VOCABULARY, settings["embedding"], settings["hidden"], settings.get("layers", 2), 0.0, hoisted
    )
    calls: Counter[str] = Counter()
    for name, given in model.parts().items():
        for module in [given] if isinstance(given, nn.Module) else given:
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    model(*Padder(None)(items((9, 6), (5, 3))))
    # None of them would get lost without a word: each is called, and what is not timed is in the list of a note.
    assert calls.keys() == {"embedding", "encoder", "attention", "decoder", "pointer"}
    for micro_ns in (0.0, 1e5, 1e6, 1e7, 1e12):
        timer, heard = PartTimer(model.parts()), Counter[str]()
        left_out = timer.keep_cheap(calls, micro_ns)
        timer.calls = heard
        model(*Padder(None)(items((9, 6), (5, 3))))
        assert {*left_out} | heard.keys() == calls.keys() and not {*left_out} & heard.keys()
        timer.keep_cheap(calls, -1.0)  # no hook of it is left
