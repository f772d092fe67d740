"""The anti-spoofing workload: tells real speech from copies made by an algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor
from torch.utils.data import Dataset

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import AntispoofSection

from .antispoof_data import SAMPLE_RATE, SpeechData, SpeechRecording
from .antispoof_model import SeResNet
from .base import Batch, BuiltinWorkload, GatherItems, MeanLoss
from .problems import Problems, Progress
from .speech_signals import (
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
from .wav_files import UNREADABLE, read_samples, reason

SPOOF, REAL = 0, 1  # labels, and indices of the logits
PROGRESS_EVERY = 20  # recordings

Clip = tuple[Tensor, int]  # samples (n,) int16 at 16 kHz, and label


class SpeechClips(GatherItems):
    """Waveforms in one int16 tensor; an item is (log-mel (128, frames) float32, label () int64).

    The spectrogram is computed in __getitem__. A clip is the first `sequence` samples of its recording at 16 kHz;
    shorter recordings are repeated. starts, lengths, labels: (clips,) int64.
    """

    def __init__(
        self,
        samples: Tensor,
        starts: Tensor,
        lengths: Tensor,
        labels: Tensor,
        sequence: int,
        log_mel: LogMel | None = None,
    ) -> None:
        self.samples, self.starts, self.lengths, self.labels = samples, starts, lengths, labels
        self.sequence = sequence
        self.log_mel = log_mel or LogMel()

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
class EqualErrorRate(MeanLoss):
    """The loss and eer_percent (see `equal_error_rate`), which is absent if all clips are of one kind.

    Keeps a score and a label per clip on the device.
    """

    scores: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        super().update(output, batch, loss)
        logits = output.detach().float()
        self.scores.append(logits[:, REAL] - logits[:, SPOOF])
        self.labels.append(batch[1].detach())

    def parts(self) -> Any:
        kept = [torch.cat(kept).cpu() for kept in (self.scores, self.labels) if kept]
        return [super().parts(), *kept]

    def merge(self, parts: Sequence[Any]) -> None:
        super().merge([part[0] for part in parts])
        kept = [part for part in parts if len(part) > 1]
        self.scores, self.labels = [part[1] for part in kept], [part[2] for part in kept]

    def result(self) -> dict[str, float]:
        loss = super().result()
        if not self.scores:
            return loss
        rate = equal_error_rate(torch.cat(self.scores).cpu(), torch.cat(self.labels).cpu())
        return loss if rate is None else {"eer_percent": rate, **loss}


def clip_weights(of_class: Sequence[float], batch: Batch) -> Tensor:
    """The weight (B,) of each clip in the loss. of_class: the weights of spoof and real."""
    spoof, real = of_class
    # Computed from the labels: a tensor of weights would have to be copied to the device.
    weights: Tensor = spoof + (real - spoof) * batch[1].float()
    return weights


def total_weight(of_class: Sequence[float], batch: Batch) -> Tensor:
    """The sum of `clip_weights`, a scalar."""
    return clip_weights(of_class, batch).sum()


class Antispoof(BuiltinWorkload):
    """A prepared classifier; implements Workload. Its output is logits (B, 2) of spoof and real."""

    name = "antispoof"
    item = "clip"
    token: str | None = "frame"

    def __init__(
        self, config: Config, section: AntispoofSection, data: SpeechData, progress: Progress
    ) -> None:
        """Raises ConfigError for a recording that cannot be read."""
        clips = make_clips(data, config.run.seed, section.data, progress)
        train, evaluation = (SpeechClips.of(part, data.samples) for part in clips)
        super().__init__(data.line(), [*data.notes, *evaluation_notes(config, evaluation)])
        self.tokens_per_item = data.frames
        self.epochs_differ = section.augment
        self._section = section
        self.weight = partial(total_weight, section.class_weights)
        self.train_data = AugmentedClips(train, config.run.seed) if section.augment else train
        self.eval_data = evaluation
        self._build(
            lambda: SeResNet(section.blocks, section.channels, section.reduction, section.dropout), progress
        )

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Cross-entropy, a mean over clips weighted by class."""
        weights = clip_weights(self._section.class_weights, batch)
        losses = F.cross_entropy(output.float(), batch[1], reduction="none")
        mean: Tensor = (weights * losses).sum() / weights.sum()
        return mean

    def metric(self) -> EqualErrorRate:
        return EqualErrorRate(weight=self.weight)

    def describe_model(self) -> str:
        section = self._section
        channels = "-".join(map(str, section.channels))
        augmenting = ", augmented" if section.augment else ""
        return f"SE-ResNet {section.blocks}, channels {channels}, reduction {section.reduction}{augmenting}"


def make_clips(data: SpeechData, seed: int, source: str, progress: Progress) -> tuple[list[Clip], list[Clip]]:
    """Clips to train on and clips to evaluate on. Raises ConfigError for a file that cannot be read.

    A copy is made at its recording's own sample rate and then processed like the recording, so that only its phases
    differ. source: workload.data, for errors.
    """
    parts: tuple[list[Clip], list[Clip]] = ([], [])
    what = "synthesising voices" if source == "builtin" else "reading recordings"
    what += " and spoofed copies" if data.copied else ""
    for position, recording in enumerate(data.recordings):
        if not position % PROGRESS_EVERY:
            progress(f"{what} {position:,} of {len(data.recordings):,}")
        try:
            made = _wave(recording, seed, data.samples / SAMPLE_RATE)
        except UNREADABLE as error:
            # Its header was readable.
            Problems("workload", source).stop(f"{recording.path}: {reason(error)}")
        rate, part = recording.sample_rate, parts[recording.held_out]
        pair = [(made, REAL if recording.real else SPOOF)]
        if data.copied:
            pair.append((griffin_lim(made, rate, seeded("copy", seed, recording.number)), SPOOF))
        part += [(to_int16(resample(wave, rate, SAMPLE_RATE)[: data.samples]), label) for wave, label in pair]
    return parts


def _wave(recording: SpeechRecording, seed: int, seconds: float) -> Tensor:
    """Up to `seconds` of a recording at its own rate: (samples,) float32. Raises UNREADABLE for a file."""
    if recording.path is None:
        voice = Voice.draw(seeded("voice", seed, recording.speaker))
        made = utterance(voice, seeded("utterance", seed, recording.number))
        return made[: round(seconds * SAMPLE_RATE)]
    found = decode_pcm(*read_samples(recording.path, seconds))
    if not len(found):
        raise ValueError("it has no samples, although its header says so")
    return found


def evaluation_notes(config: Config, clips: SpeechClips) -> list[str]:
    """A note if the evaluation is too short for an equal error rate."""
    batches = config.evaluate.batches
    labels = clips.labels if batches is None else clips.labels[: batches * config.batch.micro]
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
