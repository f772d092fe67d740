"""Speech as tensors against definitions: resampling, spectra, made-up voices, their copies and changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ndd_engine.workloads.antispoof import (
    FLOOR,
    N_FFT,
    LogMel,
    Voice,
    augmented,
    griffin_lim,
    mel_filters,
    resample,
    seeded,
    utterance,
)
from ndd_engine.workloads.antispoof_data import HOP


def tone(hertz: float, seconds: float, rate: int) -> Tensor:
    return 0.5 * torch.sin(2 * math.pi * hertz * torch.arange(round(seconds * rate)) / rate)


@pytest.mark.parametrize("rate", [4000, 8000, 11_025, 16_000, 22_050, 44_100, 48_000, 16_001])
def test_resampling_keeps_a_tone(rate: int) -> None:
    found = resample(tone(700, 0.5, rate), rate, 16_000)
    expected = tone(700, 0.5, 16_000)
    assert abs(len(found) - 8000) <= 1
    inner = slice(200, 7700)  # the ends miss what was before and after
    assert torch.allclose(found[inner], expected[inner], atol=1e-3)
    assert torch.allclose(resample(torch.ones(rate // 4), rate, 16_000)[200:-200], torch.ones(1), atol=1e-5)


def test_resampling_does_not_fold_what_is_too_high() -> None:
    assert float(resample(tone(10_000, 0.5, 44_100), 44_100, 16_000)[200:-200].abs().max()) < 0.01
    high = LogMel()(resample(tone(1000, 0.5, 8000), 8000, 16_000)[None])[0, 100:]  # above 4 kHz: no mirror
    assert float(high[:, 5:-5].exp().max()) < 1e-4 * float(
        LogMel()(tone(1000, 0.5, 16_000)[None]).exp().max()
    )


def test_log_mel_is_its_definition() -> None:
    """By a discrete Fourier transform written out, in double precision."""
    samples = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 0.1
    found = LogMel()(samples[None])[0]
    assert found.shape == (128, 7)
    half = N_FFT // 2
    padded = torch.cat((samples[1 : half + 1].flip(0), samples, samples[-half - 1 : -1].flip(0))).double()
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * torch.arange(N_FFT).double() / N_FFT)
    angles = 2 * math.pi / N_FFT * torch.outer(torch.arange(half + 1), torch.arange(N_FFT)).double()
    for frame in range(7):
        part = padded[frame * HOP : frame * HOP + N_FFT] * window
        power = (torch.cos(angles) @ part).square() + (torch.sin(angles) @ part).square()
        expected = torch.log(mel_filters().double() @ power + FLOOR)
        assert torch.allclose(found[:, frame].double(), expected, atol=1e-3)


def test_griffin_lim_keeps_magnitudes_and_changes_phases() -> None:
    original = utterance(Voice.draw(seeded("voice", 1)), seeded("utterance", 1))
    copy, again, other = (griffin_lim(original, 16_000, seeded("copy", key)) for key in (1, 1, 2))
    assert len(copy) == len(original) and torch.equal(copy, again) and not torch.equal(copy, other)
    spectra = [LogMel()(signal[None])[0].exp() for signal in (original, copy)]
    assert float(torch.corrcoef(torch.stack([s.log().flatten() for s in spectra]))[0, 1]) > 0.97
    assert float(spectra[1].sum() / spectra[0].sum()) == pytest.approx(1, abs=0.2)
    # Equal phases would make the waves equal.
    assert abs(float(torch.corrcoef(torch.stack((original, copy)))[0, 1])) < 0.5


def test_augmentation_is_a_filter_with_noise_and_gain() -> None:
    original = utterance(Voice.draw(seeded("voice", 1)), seeded("utterance", 1))
    ratios, likeness = [], []
    for number in range(40):
        changed = augmented(original, seeded("augment", number))
        assert changed.shape == original.shape and bool(changed.isfinite().all())
        ratios.append(float(20 * (changed.square().mean() / original.square().mean()).sqrt().log10()))
        likeness.append(float(torch.corrcoef(torch.stack((original, changed)))[0, 1]))
    assert -6.5 < min(ratios) < -3 and 3 < max(ratios) < 6.5
    assert max(likeness) < 0.9999 and sum(likeness) / 40 > 0.4
    assert not bool(augmented(torch.zeros(2000), seeded(1)).isnan().any())
