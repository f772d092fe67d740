"""Multichannel EEG: forecasts the next sample of every channel; a large error indicates a seizure.

A factory like your own; docs/own-model.md describes what it may return.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from ndd_engine.workloads import (
    GatherItems,
    SeriesLayout,
    Settings,
    build_checked,
    overlapping_segments,
    segment_count,
)

from .eeg_data import EegData, read

RHYTHMS = ((10.0, 1.0), (6.0, 0.6), (40.0, 0.3))  # alpha, theta, gamma: Hz and relative amplitude
NOISE = 0.3
SEIZURE = (0.4, 0.7)  # its start and end, as fractions of the evaluation part
SEIZURE_RATE = 3.0  # Hz, of a spike-and-wave
SEIZURE_GAIN = 1.2  # of the background; small, so that amplitude alone does not reveal the seizure
SEIZURE_SPIKE = 1.0
OUTLIER_SIGMAS = 15.0


def factory(settings: Settings) -> dict[str, Any]:
    """Segments of a recording, with the next sample of every channel, and a forecaster."""
    data, options = read(settings), settings.options
    sequence, train = settings.sequence, data.layout.train
    signal, labels, notes = make_signal(settings, data)
    kind, hidden = options["model"], options["hidden"]
    settings.progress("building the model")
    model = build_checked(lambda: build_model(kind, data.channels, sequence, hidden, options["dropout"]))
    return {
        "model": model,
        "train_data": SignalSegments(signal[:train], sequence),
        "eval_data": SignalSegments(signal[train:], sequence, None if labels is None else labels[train:]),
        "loss": lambda output, batch: F.mse_loss(output.float(), batch[1]),
        "metric": partial(ForecastError, span=sequence),
        "item": "segment",
        "token": "sample",
        "tokens_per_item": sequence,
        "parts": {"hidden": model.hidden, "head": model.head},
        "describe_model": f"{kind} {'-'.join(map(str, hidden))}, {data.channels} channels",
        "describe_data": data.facts.text,
        "notes": notes,
    }


class SignalSegments(GatherItems):
    """Segments of stride 1 over one tensor (samples, channels): samples - sequence items.

    An item is (segment (sequence, channels), next sample (1, channels)); with labels (samples,) also the label of that
    next sample, a scalar.
    """

    def __init__(self, signal: Tensor, sequence: int, labels: Tensor | None = None) -> None:
        self.signal, self.sequence, self.labels = signal, sequence, labels

    def __len__(self) -> int:
        return segment_count(len(self.signal), self.sequence + 1)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.check(index)
        end = index + self.sequence
        item = (self.signal[index:end], self.signal[end : end + 1])
        return item if self.labels is None else (*item, self.labels[end])

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The items at `indices` (B,) int64 on the signal's device, as a collated batch, by one gather."""
        ends = indices + self.sequence
        segments = overlapping_segments(self.signal, self.sequence).index_select(0, indices)
        found = (segments, self.signal[ends].unsqueeze(1))
        return found if self.labels is None else (*found, self.labels[ends])


@dataclass
class ForecastError:
    """rmse: the mean over channels and spans of `span` predictions; auroc: of the error, if there are labels.

    Errors are in standard deviations of the channel. Batches must come in the order of the recording, so ranks cannot
    share them. Keeps one float per prediction and channel on the device: 4 MB for 10,000 samples of 100 channels.
    """

    span: int
    squares: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    def update(self, output: Any, batch: Any, loss: Tensor) -> None:
        self.squares.append((output.detach().float() - batch[1]).square().flatten(1))
        if len(batch) > 2:
            self.labels.append(batch[2].detach())

    def result(self) -> dict[str, float]:
        if not self.squares:
            return {"rmse": math.nan}
        squares = torch.cat(self.squares).cpu()  # (N, channels)
        result = {"rmse": windowed_rmse(squares, self.span)}
        if self.labels:
            # The mean over channels: a seizure shows in many of them.
            score = area_under_roc(squares.mean(dim=1), torch.cat(self.labels).cpu())
            if score is not None:
                result["auroc"] = score
        return result


def windowed_rmse(squares: Tensor, span: int) -> float:
    """Squared errors (N, channels), in order -> mean over channels and spans of the root mean square.

    A shorter last span is weighted by its length.
    """
    spans = (squares[start : start + span] for start in range(0, len(squares), span))
    total = sum(float(part.mean(dim=0).sqrt().mean()) * len(part) for part in spans)
    return total / len(squares)


def area_under_roc(scores: Tensor, labels: Tensor) -> float | None:
    """Probability that a positive (label 1) scores above a negative; ties count half. None if there is one class.

    scores: (N,). labels: (N,) of 0 and 1. Computed from ranks (Mann-Whitney), with one sort.
    """
    positive = labels.bool()
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return None
    ordered = scores.sort().values
    below, upto = (torch.searchsorted(ordered, scores, right=right) for right in (False, True))
    ranks = (below + upto + 1).double() / 2  # equal scores share the mean of their ranks
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


# The signal.


def make_signal(settings: Settings, data: EegData) -> tuple[Tensor, Tensor | None, list[str]]:
    """(the standardised recording (samples, channels) float32, labels (samples,) uint8, notes).

    Synthesised from the seed, or read and clipped.
    """
    layout, recording = data.layout, data.recording
    if recording is None:
        signal, labels = synthetic(layout, data.channels, settings.options["sample_rate"], settings.seed)
        return standardise(signal, layout.train)[0], labels, []
    notes = list(recording.notes)
    values = torch.frombuffer(recording.values, dtype=torch.float64).reshape(-1, data.channels)
    clipped, count, channels = clip_outliers(values, layout.train)
    if count:
        notes.append(
            f"{count:,} outliers in {channels} channels are clipped to {OUTLIER_SIGMAS:g} robust standard "
            "deviations from the median."
        )
    signal, constant = standardise(clipped, layout.train)
    if constant:
        names = ", ".join(recording.channels[index] for index in constant[:8])
        notes.append(f"Channels that are constant in the training part: {names}.")
    if recording.labels is None:
        return signal, None, notes
    labels = torch.frombuffer(recording.labels, dtype=torch.uint8).clone()
    if len(set(labels[layout.train + layout.sequence :].tolist())) < 2:
        notes.append("The evaluation part has only one label, so there is no auroc.")
        return signal, None, notes
    return signal, labels, notes


def synthetic(layout: SeriesLayout, channels: int, sample_rate: float, seed: int) -> tuple[Tensor, Tensor]:
    """(samples, channels) float32 and labels (samples,) uint8: 1 inside the planted seizure.

    Each channel has alpha, theta and gamma sinusoids with random amplitudes and phases, and white noise. The seizure
    is in the evaluation part: the background grows and a sharp 3 Hz spike-and-wave is added. The same seed gives
    the same signal; channel k does not depend on the number of channels.
    """
    generator, total = torch.Generator().manual_seed(seed), layout.train + layout.evaluation
    seconds = torch.arange(total, dtype=torch.float64) / sample_rate
    begin, end = (layout.train + math.floor(share * layout.evaluation) for share in SEIZURE)
    labels = torch.zeros(total, dtype=torch.uint8)
    labels[begin:end] = 1
    signal = torch.empty(total, channels)
    for channel in range(channels):
        draws = torch.rand(2, len(RHYTHMS) + 1, generator=generator, dtype=torch.float64)
        wave = NOISE * torch.randn(total, generator=generator, dtype=torch.float64)
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


# The model.


class Forecaster(nn.Module):
    """Hidden layers and a linear head: (B, sequence, channels) float32 -> the next sample (B, 1, channels)."""

    def __init__(self, hidden: nn.Module, width: int, channels: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.head = nn.Linear(width, channels)

    def forward(self, segment: Tensor) -> Tensor:
        hidden = self.hidden(segment)
        # Of a recurrent layer, the last state.
        prediction: Tensor = self.head(hidden[0][:, -1] if isinstance(hidden, tuple) else hidden)
        return prediction.unsqueeze(1)


def build_model(kind: str, channels: int, sequence: int, hidden: Sequence[int], dropout: float) -> Forecaster:
    """Linear layers with BatchNorm, ReLU and Dropout ("mlp"), or one layer of LSTM or GRU."""
    if kind != "mlp":
        layer = nn.LSTM if kind == "lstm" else nn.GRU
        return Forecaster(layer(channels, hidden[0], batch_first=True), hidden[0], channels)
    layers: list[nn.Module] = [nn.Flatten()]
    width = channels * sequence
    for size in hidden:
        layers += [nn.Linear(width, size), nn.BatchNorm1d(size), nn.ReLU(), nn.Dropout(dropout)]
        width = size
    return Forecaster(nn.Sequential(*layers), width, channels)
