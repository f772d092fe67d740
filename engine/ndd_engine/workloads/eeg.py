"""The EEG workload: forecasts the next sample of every channel; a large error indicates a seizure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import EegSection
from ndd_engine.text import printable

from .base import Batch, BuiltinWorkload, GatherItems, MeanLoss, sliding_windows
from .eeg_data import EegData
from .eeg_model import build_model
from .eeg_signals import OUTLIER_SIGMAS, clip_outliers, standardise, synthetic
from .problems import Progress
from .windows import window_count


class SampleWindows(GatherItems):
    """Windows of stride 1 over one tensor (samples, channels): samples - sequence items.

    An item is (window (sequence, channels), next sample (1, channels)); with labels (samples,) also the label of that
    next sample, a scalar.
    """

    def __init__(self, signal: Tensor, sequence: int, labels: Tensor | None = None) -> None:
        self.signal, self.sequence, self.labels = signal, sequence, labels

    def __len__(self) -> int:
        return window_count(len(self.signal), self.sequence + 1)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.check(index)
        end = index + self.sequence
        item = (self.signal[index:end], self.signal[end : end + 1])
        return item if self.labels is None else (*item, self.labels[end])

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The items at `indices` (B,) int64 on the signal's device, as a collated batch, by one gather."""
        ends = indices + self.sequence
        windows = sliding_windows(self.signal, self.sequence).index_select(0, indices)
        found = (windows, self.signal[ends].unsqueeze(1))
        return found if self.labels is None else (*found, self.labels[ends])


@dataclass
class ForecastError(MeanLoss):
    """rmse: the mean over channels and spans of `span` predictions; auroc: of the error, if there are labels.

    Errors are in standard deviations of the channel. Batches must come in the order of the recording. Keeps one float
    per prediction and channel on the device: 4 MB for 10,000 samples of 100 channels.
    """

    span: int = 64
    mergeable: ClassVar[bool] = False  # the order of the batches matters
    squares: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        super().update(output, batch, loss)
        self.squares.append((output.detach().float() - batch[1]).square().flatten(1))
        if len(batch) > 2:
            self.labels.append(batch[2].detach())

    def result(self) -> dict[str, float]:
        if not self.squares:
            return {"rmse": float("nan"), **super().result()}
        squares = torch.cat(self.squares).cpu()  # (N, channels)
        result = {"rmse": windowed_rmse(squares, self.span), **super().result()}
        if self.labels:
            # The mean over channels: a seizure shows in many of them.
            score = area_under_roc(squares.mean(dim=1), torch.cat(self.labels).cpu())
            if score is not None:
                result["auroc"] = score
        return result


class Eeg(BuiltinWorkload):
    """A prepared forecaster; implements Workload. Its output is the predicted next sample (B, 1, channels)."""

    name = "eeg"
    item = "window"
    token: str | None = "sample"

    def __init__(self, config: Config, section: EegSection, data: EegData, progress: Progress) -> None:
        signal, labels, notes = make_signal(section, config.run.seed, data)
        super().__init__(data.line(), notes)
        sequence, train = data.layout.sequence, data.layout.parts.train
        self.tokens_per_item = sequence
        self._section, self._channels = section, data.channels
        self.train_data = SampleWindows(signal[:train], sequence)
        self.eval_data = SampleWindows(signal[train:], sequence, None if labels is None else labels[train:])
        self._build(lambda: build_model(section, data.channels, sequence), progress)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        return F.mse_loss(output.float(), batch[1])

    def metric(self) -> ForecastError:
        """RMSE over spans of the length of a window, and AUROC."""
        return ForecastError(span=int(self.tokens_per_item))

    def describe_model(self) -> str:
        hidden = "-".join(map(str, self._section.hidden))
        return f"{self._section.model} {hidden}, {self._channels} channels"


def make_signal(
    section: EegSection, seed: int, data: EegData
) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    """(the standardised recording (samples, channels) float32, labels (samples,) uint8, notes).

    Synthesised from the seed, or read and clipped.
    """
    parts, recording = data.layout.parts, data.recording
    if recording is None:
        signal, labels = synthetic(parts, section.channels, section.sample_rate, seed)
        return standardise(signal, parts.train)[0], labels, ()
    notes = list(recording.notes)
    values = torch.frombuffer(recording.values, dtype=torch.float64).reshape(parts.total, data.channels)
    clipped, count, channels = clip_outliers(values, parts.train)
    if count:
        notes.append(
            f"{count:,} outliers in {channels} channels are clipped to {OUTLIER_SIGMAS:g} robust standard "
            "deviations from the median."
        )
    signal, constant = standardise(clipped, parts.train)
    if constant:
        names = printable(", ".join(recording.channels[index] for index in constant[:8]))
        notes.append(f"Channels that are constant in the training part: {names}.")
    file_labels = None
    if recording.labels is not None:
        file_labels = torch.frombuffer(recording.labels, dtype=torch.uint8).clone()
        evaluated = file_labels[parts.train + data.layout.sequence :]
        if not 0 < int(evaluated.sum()) < len(evaluated):
            notes.append("The evaluation part has only one label, so there is no auroc.")
            file_labels = None
    return signal, file_labels, tuple(notes)


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
