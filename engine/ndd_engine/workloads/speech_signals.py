"""Speech as tensors: log-mel spectrograms, resampling, synthetic voices, Griffin-Lim copies and augmentation.

Waveforms are float32 in -1..1. Random functions take a generator, see `seeded`.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Generator, Tensor

from .antispoof_data import HOP, SAMPLE_RATE

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
