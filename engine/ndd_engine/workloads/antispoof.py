"""Anti-spoofing: an SE-ResNet on log-mel spectrograms tells real speech from copies made by an algorithm.

A factory like your own; docs/own-model.md describes what it may return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torch.utils.data import Dataset

from ndd_engine.workloads import GatherItems, Settings, build_checked

from .antispoof_data import SAMPLE_RATE, UNREADABLE, SpeechData, VoiceRecording, read, read_samples, reason
from .speech_signals import (
    REAL,
    SPOOF,
    LogMel,
    Voice,
    augmented,
    decode_pcm,
    griffin_lim,
    resample,
    seeded,
    to_int16,
    utterance,
)

PROGRESS_EVERY = 20  # recordings
ATTENTION = 128  # width of the attention in the pooling layer
EPS = 1e-6  # added to the pooled variance: the gradient of its root is infinite at zero

Clip = tuple[Tensor, int]  # samples (n,) int16 at 16 kHz, and label


def factory(settings: Settings) -> dict[str, Any]:
    """Clips of speech and a classifier with logits (B, 2) of spoof and real.

    Raises ConfigError for a recording that cannot be read.
    """
    data, options, augment = read(settings), settings.options, settings.options["augment"]
    train, evaluation = (SpeechClips.of(part, data.samples) for part in make_clips(data, settings))
    blocks, channels, reduction = options["blocks"], options["channels"], options["reduction"]
    settings.progress("building the model")
    model = build_checked(lambda: SeResNet(blocks, channels, reduction, options["dropout"]))
    return {
        "model": model,
        "train_data": AugmentedClips(train, settings.seed) if augment else train,
        "eval_data": evaluation,
        "epochs_differ": augment,
        "loss": partial(weighted_loss, options["class_weights"]),
        "weight": partial(total_weight, options["class_weights"]),
        "metric": EqualErrorRate,
        "item": "clip",
        "token": "frame",
        "tokens_per_item": data.facts.tokens_per_item,
        "parts": model.parts(),
        "describe_model": f"SE-ResNet {blocks}, channels {'-'.join(map(str, channels))}, reduction {reduction}"
        + ", augmented" * augment,
        "describe_data": data.facts.text,
        "notes": [*data.notes, *evaluation_notes(settings, evaluation)],
    }


@dataclass(eq=False)
class SpeechClips(GatherItems):
    """Waveforms in one int16 tensor; an item is (log-mel (128, frames) float32, label () int64).

    The spectrogram is computed in __getitem__. A clip is the first `sequence` samples of its recording at 16 kHz;
    shorter recordings are repeated. starts, lengths, labels: (clips,) int64.
    """

    samples: Tensor
    starts: Tensor
    lengths: Tensor
    labels: Tensor
    sequence: int
    log_mel: LogMel = field(default_factory=LogMel)

    @classmethod
    def of(cls, clips: Sequence[Clip], sequence: int) -> SpeechClips:
        """The dataset of recordings (samples,) int16 with labels."""
        lengths = torch.tensor([len(samples) for samples, _ in clips])
        labels = torch.tensor([label for _, label in clips])
        starts = lengths.cumsum(0) - lengths
        return cls(torch.cat([samples for samples, _ in clips]), starts, lengths, labels, sequence)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.check(index)
        indices = torch.tensor([index], device=self.samples.device)
        return self.log_mel(self.waves(indices))[0], self.labels[index]

    def waves(self, indices: Tensor) -> Tensor:
        """The clips at `indices` (B,) int64 on the samples' device: (B, sequence) float32 in -1..1."""
        within = torch.arange(self.sequence, device=indices.device)
        starts, lengths = (part[indices].unsqueeze(1) for part in (self.starts, self.lengths))
        return self.samples[starts + within % lengths].float() / 32768

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The items at `indices` (B,) int64 on the samples' device, as a collated batch.

        On the CPU they are computed one by one, bit-identical to the items, while each clip fits into the caches. On a
        GPU all are transformed at once, which agrees with the CPU up to float32 rounding.
        """
        if indices.device.type == "cpu":
            return torch.stack([self[index][0] for index in indices.tolist()]), self.labels[indices]
        return self.log_mel(self.waves(indices)), self.labels[indices]


class AugmentedClips(Dataset[Any]):
    """The same clips with random augmentation: item i of epoch e has the index e * len + i."""

    def __init__(self, clips: SpeechClips, seed: int) -> None:
        self.clips, self.seed = clips, seed

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index < 0:
            raise IndexError(f"clip {index}")
        epoch, item = divmod(index, len(self))
        clips = self.clips
        generator = seeded("augment", self.seed, item, epoch)
        changed = augmented(clips.waves(torch.tensor([item]))[0], generator)
        return clips.log_mel(changed.unsqueeze(0))[0], clips.labels[item]


@dataclass
class EqualErrorRate:
    """eer_percent (see `equal_error_rate`), which is absent if all clips are of one kind.

    Keeps a score and a label per clip on the device.
    """

    scores: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    def update(self, output: Any, batch: Any, loss: Tensor) -> None:
        logits = output.detach().float()
        self.scores.append(logits[:, REAL] - logits[:, SPOOF])
        self.labels.append(batch[1].detach())

    def parts(self) -> Any:
        return [torch.cat(kept).cpu() for kept in (self.scores, self.labels) if kept]

    def merge(self, parts: Sequence[Any]) -> None:
        """Continue with the clips of all ranks."""
        self.scores, self.labels = ([part[place] for part in parts if part] for place in range(2))

    def result(self) -> dict[str, float]:
        rate = None
        if self.scores:
            rate = equal_error_rate(torch.cat(self.scores).cpu(), torch.cat(self.labels).cpu())
        return {} if rate is None else {"eer_percent": rate}


def clip_weights(of_class: Sequence[float], batch: Any) -> Tensor:
    """The weight (B,) of each clip in the loss. of_class: the weights of spoof and real."""
    spoof, real = of_class
    # Computed from the labels: a tensor of weights would have to be copied to the device.
    weights: Tensor = spoof + (real - spoof) * batch[1].float()
    return weights


def total_weight(of_class: Sequence[float], batch: Any) -> Tensor:
    """The sum of `clip_weights`, a scalar."""
    return clip_weights(of_class, batch).sum()


def weighted_loss(of_class: Sequence[float], output: Tensor, batch: Any) -> Tensor:
    """Cross-entropy, a mean over clips weighted by class."""
    weights = clip_weights(of_class, batch)
    losses = F.cross_entropy(output.float(), batch[1], reduction="none")
    mean: Tensor = (weights * losses).sum() / weights.sum()
    return mean


def make_clips(data: SpeechData, settings: Settings) -> tuple[list[Clip], list[Clip]]:
    """Clips to train on and clips to evaluate on. Raises ConfigError for a file that cannot be read.

    A copy is made at its recording's own sample rate and then processed like the recording, so that only its phases
    differ.
    """
    seed = settings.seed
    parts: tuple[list[Clip], list[Clip]] = ([], [])
    what = "synthesising voices" if settings.data == "builtin" else "reading recordings"
    what += " and spoofed copies" if data.copied else ""
    for position, recording in enumerate(data.recordings):
        if not position % PROGRESS_EVERY:
            settings.progress(f"{what} {position:,} of {len(data.recordings):,}")
        try:
            made = _wave(recording, seed, data.samples / SAMPLE_RATE)
        except UNREADABLE as error:
            # Its header was readable.
            settings.problems.stop(f"{recording.path}: {reason(error)}")
        rate, part = recording.sample_rate, parts[recording.held_out]
        pair = [(made, REAL if recording.real else SPOOF)]
        if data.copied:
            pair.append((griffin_lim(made, rate, seeded("copy", seed, recording.number)), SPOOF))
        part += [(to_int16(resample(wave, rate, SAMPLE_RATE)[: data.samples]), label) for wave, label in pair]
    return parts


def _wave(recording: VoiceRecording, seed: int, seconds: float) -> Tensor:
    """Up to `seconds` of a recording at its own rate: (samples,) float32. Raises UNREADABLE for a file."""
    if recording.path is None:
        voice = Voice.draw(seeded("voice", seed, recording.speaker))
        made = utterance(voice, seeded("utterance", seed, recording.number))
        return made[: round(seconds * SAMPLE_RATE)]
    found = decode_pcm(*read_samples(recording.path, seconds))
    if not len(found):
        raise ValueError("it has no samples, although its header says so")
    return found


def evaluation_notes(settings: Settings, clips: SpeechClips) -> list[str]:
    """A note if the evaluation is too short for an equal error rate."""
    batches = settings.eval_batches
    labels = clips.labels if batches is None else clips.labels[: batches * settings.micro]
    if 0 < int(labels.sum()) < len(labels):
        return []
    return ["All evaluated clips are of one kind, so there is no eer_percent: raise evaluate.batches."]


def equal_error_rate(scores: Tensor, labels: Tensor) -> float | None:
    """The error in percent at which the rates of accepted spoofed clips and rejected real clips are equal.

    scores: (N,), higher for real speech. labels: (N,) of SPOOF and REAL. Rates are interpolated linearly between
    thresholds, so equal scores of both kinds count half and a constant score gives 50. None if all clips are of one
    kind or a score is NaN.
    """
    real = labels == REAL
    reals, spoofs = int(real.sum()), int((~real).sum())
    if not reals or not spoofs or bool(scores.isnan().any()):
        return None
    thresholds = torch.unique(scores)  # ascending
    below = [torch.searchsorted(scores[kind].sort().values, thresholds, right=True) for kind in (real, ~real)]
    zero = torch.zeros(1, dtype=torch.float64)
    rejected = torch.cat((zero, below[0].double() / reals))  # real clips at or below each threshold
    accepted = torch.cat((zero + 1, 1 - below[1].double() / spoofs))  # spoofed clips above it
    gap = rejected - accepted  # from -1 up to 1
    last = int((gap > 0).nonzero()[0])
    share = float(-gap[last - 1] / (gap[last] - gap[last - 1]))
    return 100 * float(rejected[last - 1] + share * (rejected[last] - rejected[last - 1]))


# The model.


class SqueezeExcite(nn.Module):
    """Scales each channel of (B, C, F, T) by a factor in 0..1 computed from the means of all channels."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // reduction, bias=False)
        self.excite = nn.Linear(channels // reduction, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean(dim=(2, 3))))))
        return x * scale[:, :, None, None]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and squeeze-and-excitation with a skip connection; stride 2 halves the map."""

    def __init__(self, inputs: int, channels: int, stride: int, reduction: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.se = SqueezeExcite(channels, reduction)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != channels:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.se(self.norm2(self.conv2(y)))
        return F.relu(y + self.skip(x))


class AttentivePooling(nn.Module):
    """(B, C, F, T) -> (B, 2C): the mean over frequency, then its mean and standard deviation over time.

    Frames are weighted by attention (Okabe et al. 2018). The statistics are in float32: the variance of half-precision
    numbers would be mostly rounding error.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.Conv1d(channels, ATTENTION, 1), nn.Tanh(), nn.Conv1d(ATTENTION, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        frames = x.mean(dim=2)
        weights = torch.softmax(self.attention(frames).float(), dim=-1)
        frames = frames.float()
        mean = (weights * frames).sum(dim=-1)
        variance = (weights * (frames - mean.unsqueeze(-1)).square()).sum(dim=-1)
        return torch.cat((mean, (variance + EPS).sqrt()), dim=1)


class SeResNet(nn.Module):
    """(B, mels, frames) float32 -> logits (B, 2).

    blocks, channels: per stage. reduction: of squeeze-and-excitation. dropout: of the two hidden layers of the head.
    """

    def __init__(
        self, blocks: Sequence[int], channels: Sequence[int], reduction: int, dropout: float
    ) -> None:
        super().__init__()
        first, last = channels[0], channels[-1]
        self.stem = nn.Sequential(
            nn.Conv2d(1, first, 7, 2, 3, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.stages = nn.ModuleList()
        width = first
        for position, (count, size) in enumerate(zip(blocks, channels, strict=True)):
            layers = []
            for block in range(count):
                stride = 2 if position and not block else 1
                layers.append(ResidualBlock(width, size, stride, reduction))
                width = size
            self.stages.append(nn.Sequential(*layers))
        self.pooling = AttentivePooling(last)
        hidden, narrow = last, last // 2
        self.head = nn.Sequential(
            nn.Linear(2 * last, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(hidden, narrow), nn.BatchNorm1d(narrow), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(narrow, 2),
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, spectrogram: Tensor) -> Tensor:
        x = self.stem(spectrogram.unsqueeze(1))
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.head(self.pooling(x))
        return logits

    def parts(self) -> Mapping[str, nn.Module]:
        stages = {f"stage{number}": stage for number, stage in enumerate(self.stages, 1)}
        return {"stem": self.stem, **stages, "pooling": self.pooling, "head": self.head}
