"""Signals for the forecasters: the synthetic EEG, and clipping and scaling of any recording."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .windows import Parts

RHYTHMS = ((10.0, 1.0), (6.0, 0.6), (40.0, 0.3))  # alpha, theta, gamma: Hz and relative amplitude
NOISE = 0.3
SEIZURE = (0.4, 0.7)  # its start and end, as fractions of the evaluation part
SEIZURE_RATE = 3.0  # Hz, of a spike-and-wave
SEIZURE_GAIN = 1.2  # of the background; small, so that amplitude alone does not reveal the seizure
SEIZURE_SPIKE = 1.0
OUTLIER_SIGMAS = 15.0


def synthetic(parts: Parts, channels: int, sample_rate: float, seed: int) -> tuple[Tensor, Tensor]:
    """(samples, channels) float32 and labels (samples,) uint8: 1 inside the planted seizure.

    Each channel has alpha, theta and gamma sinusoids with random amplitudes and phases, and white noise. The seizure
    is in the evaluation part: the background grows and a sharp 3 Hz spike-and-wave is added. The same seed gives
    the same signal; channel k does not depend on the number of channels.
    """
    generator = torch.Generator().manual_seed(seed)
    seconds = torch.arange(parts.total, dtype=torch.float64) / sample_rate
    begin, end = (parts.train + math.floor(share * parts.evaluation) for share in SEIZURE)
    labels = torch.zeros(parts.total, dtype=torch.uint8)
    labels[begin:end] = 1
    signal = torch.empty(parts.total, channels)
    for channel in range(channels):
        draws = torch.rand(2, len(RHYTHMS) + 1, generator=generator, dtype=torch.float64)
        wave = NOISE * torch.randn(parts.total, generator=generator, dtype=torch.float64)
        for (hertz, amplitude), size, phase in zip(RHYTHMS, draws[0], draws[1], strict=False):
            rhythm = min(hertz, 0.4 * sample_rate)  # always below the Nyquist frequency
            wave += amplitude * (0.5 + size) * torch.sin(2 * math.pi * (rhythm * seconds + phase))
        cycle = (SEIZURE_RATE * seconds[begin:end] + 0.1 * draws[1, -1]) % 1
        spike = 2.5 * torch.exp(-(((cycle - 0.2) / 0.03) ** 2)) - torch.sin(math.pi * cycle) ** 2
        wave[begin:end] = SEIZURE_GAIN * wave[begin:end] + SEIZURE_SPIKE * (0.5 + draws[0, -1]) * spike
        signal[:, channel] = wave
    return signal, labels


def clip_outliers(signal: Tensor, train: int) -> tuple[Tensor, int, int]:
    """(clipped signal (samples, channels), number of clipped values, number of channels with clipped values).

    A value further from its channel's median than OUTLIER_SIGMAS robust standard deviations (1.4826 times the
    median absolute deviation) is clipped to that distance. Median and deviation are those of the first `train`
    samples. A channel without deviation is not changed.
    """
    known = signal[:train]
    median = known.median(dim=0).values
    reach = OUTLIER_SIGMAS * 1.4826 * (known - median).abs().median(dim=0).values
    reach = torch.where(reach > 0, reach, math.inf)
    outside = (signal - median).abs() > reach
    clipped = torch.minimum(torch.maximum(signal, median - reach), median + reach)
    return clipped, int(outside.sum()), int(outside.any(dim=0).sum())


def standardise(signal: Tensor, train: int) -> tuple[Tensor, list[int]]:
    """(signal (samples, channels) float32, indices of the channels constant over the first `train` samples).

    Mean 0 and standard deviation 1 over those samples; constant channels are only shifted to 0.
    """
    known = signal[:train].double()
    mean, deviation = known.mean(dim=0), known.std(dim=0, correction=0)
    constant = deviation <= 1e-12 * mean.abs().clamp(min=1)
    deviation = torch.where(constant, 1.0, deviation)
    scaled = ((signal - mean) / deviation).float().contiguous()
    return scaled, [int(index) for index in constant.nonzero().flatten()]
