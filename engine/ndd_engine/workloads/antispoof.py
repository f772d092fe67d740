"""Anti-spoofing: an SE-ResNet on log-mel spectrograms tells real speech from copies made by an algorithm.

Speech becomes tensors by log-mel spectrograms, resampling, synthetic voices, Griffin-Lim copies and augmentation.
Waveforms are float32 in -1..1. Random functions take a generator, see `seeded`.

The factory is like your own; docs/own-model.md describes what it may return.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset

from ndd_engine.workloads import GatherItems, Settings, build_checked

from .antispoof_data import HOP, SAMPLE_RATE, UNREADABLE, Recording, SpeechData, read, read_samples, reason

N_FFT = 512
MELS = 128
FLOOR = 1e-6  # minimum power of a mel band; rounding to 16 bits is below it

GRIFFIN_LIM_ROUNDS = 4  # few enough that the copy is intelligible but audibly artificial

# Formants of English vowels in Hz (Peterson and Barney 1952, men's means).
VOWELS = (
    (270, 2290, 3010), (390, 1990, 2550), (530, 1840, 2480), (660, 1720, 2410), (730, 1090, 2440),
    (570, 840, 2410), (440, 1020, 2240), (300, 870, 2240), (640, 1190, 2390), (490, 1350, 1690),
)  # fmt: skip
UPPER_FORMANTS = (3500, 4500)
BANDWIDTHS = (60, 90, 120, 180, 250)


def seeded(*parts: object) -> Generator:
    """A generator seeded with a hash of `parts`, such as ("voice", seed, 3); only 32 bits of a seed matter to torch."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return Generator().manual_seed(int.from_bytes(digest, "big"))


def decode_pcm(content: bytes, width: int, channels: int) -> Tensor:
    """Decodes little-endian PCM of 1 to 4 bytes per sample, as in WAV files, to one channel (samples,) in -1..1.

    Single bytes are unsigned, wider samples signed; channels are averaged.
    """
    usable = len(content) // (width * channels) * width * channels
    if not usable:
        return torch.zeros(0)
    octets = torch.frombuffer(bytearray(content[:usable]), dtype=torch.uint8).view(-1, width)
    if width == 1:
        octets = octets ^ 128
    values = F.pad(octets, (4 - width, 0)).view(torch.int32).double() / 2**31
    return values.view(-1, channels).mean(dim=1).float()


def to_int16(wave: Tensor) -> Tensor:
    """16-bit samples; a wave above full scale is scaled down, since clipping would reveal a copy."""
    peak = wave.abs().max().clamp(min=1.0) if len(wave) else 1.0
    return (wave / peak * 32767).round().to(torch.int16)


def resample(wave: Tensor, rate: int, target: int) -> Tensor:
    """(samples,) at `rate` Hz -> (ceil(samples * target / rate),) at `target` Hz, by the discrete Fourier transform.

    The wave is continued by its mirror image, so that it is periodic without a jump.
    """
    if rate == target or not len(wave):
        return wave
    step = rate // math.gcd(rate, target)
    whole = F.pad(wave[None], (0, -len(wave) % step), mode="replicate")[0]
    mirrored = torch.cat((whole, whole.flip(0)))
    found = torch.fft.irfft(torch.fft.rfft(mirrored), len(mirrored) * target // rate) * (target / rate)
    resampled: Tensor = found[: -(-len(wave) * target // rate)]
    return resampled


def mel_filters(mels: int = MELS, n_fft: int = N_FFT, rate: int = SAMPLE_RATE) -> Tensor:
    """Triangular filters over the bins of a spectrum, evenly spaced in mel (O'Shaughnessy's formula): (mels, bins).

    Each has a peak of 1. The lowest filters would be narrower than the distance between bins and could miss all of
    them, so each side of a filter is at least as wide as that distance.
    """
    highest = 2595 * math.log10(1 + rate / 2 / 700)
    points = 700 * (10 ** (torch.linspace(0, highest, mels + 2, dtype=torch.float64) / 2595) - 1)
    spacing = rate / n_fft
    centre = points[1:-1].unsqueeze(1)
    below = (centre.squeeze(1) - points[:-2]).clamp(min=spacing).unsqueeze(1)
    above = (points[2:] - centre.squeeze(1)).clamp(min=spacing).unsqueeze(1)
    distance = torch.arange(n_fft // 2 + 1) * spacing - centre
    return (1 - torch.where(distance < 0, -distance / below, distance / above)).clamp(min=0).float()


class LogMel(NamedTuple):
    """Waveforms (B, samples) -> natural log of mel power (B, 128, 1 + samples // 160), both float32.

    Hann windows of 512 samples, centred on every 160th sample; the ends are reflected.
    """

    window: Tensor = torch.hann_window(N_FFT)
    filters: Tensor = mel_filters()

    def __call__(self, waves: Tensor) -> Tensor:
        spectrum = torch.stft(
            waves, N_FFT, HOP, window=self.window, center=True, pad_mode="reflect", return_complex=True
        )
        power = spectrum.real.square() + spectrum.imag.square()
        return (self.filters @ power + FLOOR).log()


def griffin_lim(wave: Tensor, rate: int, generator: Generator) -> Tensor:
    """A copy of a wave (samples,) at `rate` Hz with the same magnitudes, and phases estimated from random ones.

    A few iterations of Griffin and Lim (1984) with windows of about 32 ms and a hop of a quarter window.
    """
    n_fft = 1 << max(round(math.log2(0.032 * rate)), 4)
    hop = n_fft // 4
    window = torch.hann_window(n_fft)

    def analyse(signal: Tensor) -> Tensor:
        return torch.stft(
            signal, n_fft, hop, window=window, center=True, pad_mode="constant", return_complex=True
        )

    def synthesise(spectrum: Tensor) -> Tensor:
        return torch.istft(spectrum, n_fft, hop, window=window, center=True, length=len(wave))

    magnitude = analyse(wave).abs()
    spectrum = torch.polar(magnitude, 2 * math.pi * torch.rand(magnitude.shape, generator=generator))
    for _ in range(GRIFFIN_LIM_ROUNDS):
        spectrum = magnitude * torch.sgn(analyse(synthesise(spectrum)))
    return synthesise(spectrum)


class Voice(NamedTuple):
    """A synthetic speaker. pitch: Hz. tract: formants relative to VOWELS. breath: noise relative to the pulses."""

    pitch: float
    tract: float
    breath: float

    @classmethod
    def draw(cls, generator: Generator) -> Voice:
        """A random voice; voices of high pitch tend to have short vocal tracts."""
        u = torch.rand(3, generator=generator).tolist()
        return cls(85 * 2 ** (1.5 * u[0]), 0.9 + 0.15 * u[0] + 0.12 * u[1], 0.004 + 0.02 * u[2])


def utterance(voice: Voice, generator: Generator) -> Tensor:
    """One to three seconds of speech at 16 kHz, 4 to 8 syllables: (samples,), with a peak of 0.3 to 0.9.

    A syllable is a glottal pulse train with breath noise, through the resonances of a vowel. Noise is everywhere.
    """
    count = int(torch.randint(4, 9, (), generator=generator))
    parts = []
    for vowel in torch.randint(len(VOWELS), (count,), generator=generator).tolist():
        gap, length, glide, loud = torch.rand(4, generator=generator).tolist()
        length = int((0.12 + 0.2 * length) * SAMPLE_RATE)
        along = torch.linspace(0, 1, length)
        # Every cycle of the voice is a little longer or shorter than the one before.
        cycles = voice.pitch * 2 ** (0.3 * (glide - 0.5) * along) * (1 + 0.02 * _wander(length, generator))
        phase = (cycles / SAMPLE_RATE).cumsum(0)
        source = phase.floor().diff(prepend=torch.zeros(1))
        source += voice.breath * torch.randn(length, generator=generator)
        formants = torch.tensor([*VOWELS[vowel], *UPPER_FORMANTS]) * voice.tract
        hertz = torch.fft.rfftfreq(length, 1 / SAMPLE_RATE).unsqueeze(1)
        resonances = 1 / (1 + ((hertz - formants) / torch.tensor(BANDWIDTHS)).square())
        spoken = torch.fft.irfft(torch.fft.rfft(source) * resonances.sum(dim=1), length)
        parts += [
            torch.zeros(int((0.03 + 0.1 * gap) * SAMPLE_RATE)),
            (0.5 + loud) * spoken * along.mul(math.pi).sin(),
        ]
    wave = torch.cat(parts)
    noise, peak = torch.rand(2, generator=generator).tolist()
    wave += 10 ** (-2 - noise) * wave.square().mean().sqrt() * torch.randn(len(wave), generator=generator)
    scaled: Tensor = wave * (0.3 + 0.6 * peak) / wave.abs().max()
    return scaled


def _wander(length: int, generator: Generator) -> Tensor:
    """A random line (length,) with a point every 5 ms."""
    points = torch.randn(length // 80 + 2, generator=generator)
    return F.interpolate(points[None, None], size=length, mode="linear")[0, 0]


def augmented(wave: Tensor, generator: Generator) -> Tensor:
    """The wave (samples,) after a random filter of 20 to 100 taps, a gain of -6 to 6 dB and coloured noise.

    The noise is 10 to 40 dB below the wave.
    """
    taps = int(torch.randint(20, 101, (), generator=generator))
    gain, noise_level, colour = torch.rand(3, generator=generator).tolist()
    decay = torch.exp(-torch.arange(taps + 1) / (taps / 5))
    kernel = 0.3 * torch.randn(taps + 1, generator=generator) * decay
    kernel[0] = 1.0
    filtered = F.conv1d(F.pad(wave, (taps, 0))[None, None], kernel.flip(0)[None, None])[0, 0]
    noise = torch.randn(len(wave) + 1, generator=generator)
    noise = noise[1:] + (2 * colour - 1) * noise[:-1]
    level = filtered.square().mean().sqrt()
    strength = level / noise.square().mean().sqrt() * 10 ** (-(10 + 30 * noise_level) / 20)
    loudness = wave.square().mean().sqrt() / level.clamp(min=1e-9) * 10 ** ((12 * gain - 6) / 20)
    changed: Tensor = (filtered + strength * noise) * loudness
    return changed


SPOOF, REAL = 0, 1  # labels, and indices of the logits
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


def _wave(recording: Recording, seed: int, seconds: float) -> Tensor:
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
