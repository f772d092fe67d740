"""Speech as tensors: log-mel spectrograms, resampling, synthetic voices, Griffin-Lim copies, augmentation.

Waveforms are float32 in -1..1. Random functions take a generator, see `seeded`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Generator, Tensor

from .antispoof_data import HOP, SAMPLE_RATE

N_FFT = 512
MELS = 128
FLOOR = 1e-6  # minimum power of a mel band; rounding to 16 bits is below it

GRIFFIN_LIM_ROUNDS = 4  # few enough that the copy is intelligible but audibly artificial
RESAMPLING_ZEROS = 16  # zero crossings of the sinc on each side

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
    """(samples,) at `rate` Hz -> (ceil(samples * target / rate),) at `target` Hz, by a polyphase windowed sinc.

    An output sample has one of target / gcd phases between two input samples; each phase has its own filter, with 16
    zero crossings per side, a Hann window and the cut-off at 95 % of the lower Nyquist frequency.
    """
    if rate == target or not len(wave):
        return wave
    divisor = math.gcd(rate, target)
    step, phases = rate // divisor, target // divisor
    cutoff = 0.95 * min(1.0, target / rate)
    reach = math.ceil(RESAMPLING_ZEROS / cutoff)
    taps = torch.arange(1 - reach, reach + 1)
    count = -(-len(wave) * phases // step)
    used = min(phases, count)
    late = torch.arange(used).double() * step % phases / phases  # offset from the previous input sample
    distance = (taps - late.unsqueeze(1)) * cutoff
    window = torch.cos(math.pi / 2 * (distance / RESAMPLING_ZEROS).clamp(-1, 1)).square()
    filters = torch.sinc(distance) * window
    filters = (filters / filters.sum(dim=1, keepdim=True)).float()
    padded = F.pad(wave, (reach, reach))
    out = torch.zeros(-(-count // used), used)
    for phase in range(used):
        # The outputs of a phase are `step` inputs apart.
        inputs = padded[phase * step // phases + 1 :].unfold(0, 2 * reach, step)
        rows = -(-(count - phase) // used)
        out[:rows, phase] = inputs[:rows] @ filters[phase]
    return out.flatten()[:count]


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


@dataclass(frozen=True)
class Voice:
    """A synthetic speaker. pitch: Hz. tract: formants relative to VOWELS. The rest: steadiness and breathiness."""

    pitch: float
    tract: float
    bandwidth: float
    breath: float
    tilt: float
    jitter: float
    vibrato_hertz: float
    vibrato: float

    @classmethod
    def draw(cls, generator: Generator) -> Voice:
        """A random voice; voices of high pitch tend to have short vocal tracts."""
        u = torch.rand(8, generator=generator, dtype=torch.float64).tolist()
        return cls(
            pitch=85 * 2 ** (1.5 * u[0]),
            tract=0.9 + 0.15 * u[0] + 0.12 * u[1],
            bandwidth=0.8 + 0.6 * u[2],
            breath=0.004 + 0.02 * u[3],
            tilt=0.86 + 0.09 * u[4],
            jitter=0.004 + 0.012 * u[5],
            vibrato_hertz=4 + 3 * u[6],
            vibrato=0.002 + 0.012 * u[7],
        )


def utterance(voice: Voice, generator: Generator) -> Tensor:
    """One to three seconds of speech at 16 kHz, 4 to 8 syllables: (samples,), with a peak of 0.3 to 0.9.

    A syllable is a glottal pulse train with breath noise, gliding from the resonators of one vowel to those of another;
    most gaps before a syllable have a hiss.
    """
    count = int(torch.randint(4, 9, (), generator=generator))
    draw = torch.rand(6, count, generator=generator, dtype=torch.float64)
    gaps = ((0.03 + 0.1 * draw[0]) * SAMPLE_RATE).long()
    lengths = ((0.12 + 0.2 * draw[1]) * SAMPLE_RATE).long()
    ends = (gaps + lengths).cumsum(0)
    length = int(ends[-1]) + SAMPLE_RATE // 10
    excitation = _pulses(voice, length, count, generator)

    vowels = torch.tensor(VOWELS, dtype=torch.float64)[torch.randint(10, (2, count), generator=generator)]
    vowels = voice.tract * vowels * (1 + 0.04 * torch.randn(vowels.shape, generator=generator))
    upper = (voice.tract * torch.tensor(UPPER_FORMANTS, dtype=torch.float64)).expand(2, count, -1)
    bandwidths = voice.bandwidth * torch.tensor(BANDWIDTHS, dtype=torch.float64)
    spoken, hiss = 8192, 4096  # the longest syllable and gap, with room for their resonators to decay
    throat = _glottis(voice.tilt, spoken) * _resonators(torch.cat((vowels, upper), dim=2), bandwidths, spoken)
    mouth = _resonators(2500 + 3500 * draw[2, :, None], torch.tensor([900.0]), hiss)

    wave = torch.zeros(length + spoken)
    places, envelope, along = _stretches(ends - lengths, lengths, spoken)
    loud = (0.5 + 0.5 * draw[3, :, None]) * envelope * F.pad(excitation, (0, spoken))[places]
    glide = torch.stack((loud * (1 - along), loud * along))
    voiced = torch.fft.irfft((torch.fft.rfft(glide) * throat).sum(dim=0), spoken)
    wave.index_add_(0, places.flatten(), voiced.float().flatten())

    level = 0.3 * float(wave.square().mean().sqrt())
    places, envelope, _ = _stretches(ends - lengths - gaps, gaps, hiss)
    noise = torch.randn(count, hiss, generator=generator) * envelope * (draw[4, :, None] > 0.3)
    hissed = torch.fft.irfft(torch.fft.rfft(noise) * mouth, hiss)
    hissed *= (
        level * (0.3 + draw[5, :, None]) / hissed.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-9)
    )
    wave.index_add_(0, places.flatten(), hissed.float().flatten())

    wave = wave[:length]
    room, peak = torch.rand(2, generator=generator).tolist()
    wave += level * 10 ** (-1.5 - room) * torch.randn(length, generator=generator)
    scaled: Tensor = wave * ((0.3 + 0.6 * peak) / float(wave.abs().max()))
    return scaled


def _pulses(voice: Voice, length: int, accents: int, generator: Generator) -> Tensor:
    """The excitation (length,): a pulse per glottal cycle, placed between samples, and breath modulated by it."""
    seconds = torch.arange(length, dtype=torch.float64) / SAMPLE_RATE
    accent = _line(0.15 * torch.randn(accents + 1, generator=generator), length)
    jitter = _line(voice.jitter * torch.randn(length // 80 + 2, generator=generator), length)  # every 5 ms
    start = float(torch.rand((), generator=generator))
    vibrato = voice.vibrato * torch.sin(2 * math.pi * (voice.vibrato_hertz * seconds + start))
    falling = 0.2 * torch.linspace(0, 1, length, dtype=torch.float64)
    cycles = voice.pitch * 2 ** (accent - falling) * (1 + jitter + vibrato) / SAMPLE_RATE  # per sample
    phase = cycles.cumsum(0)
    at = (phase[1:].floor() > phase[:-1].floor()).nonzero().flatten() + 1
    late = (phase[at] - phase[at].floor()) / cycles[at]
    height = 1 + 0.06 * torch.randn(len(at), generator=generator)
    source = torch.zeros(length, dtype=torch.float64)
    source[at] += height * (1 - late)
    source[at - 1] += height * late
    breath = voice.breath * torch.randn(length, generator=generator)
    return source + breath * (0.6 + 0.4 * torch.cos(2 * math.pi * phase))


def _line(points: Tensor, length: int) -> Tensor:
    """Linear interpolation of evenly spaced points: (length,) float64."""
    return F.interpolate(points.double()[None, None], size=length, mode="linear", align_corners=True)[0, 0]


def _stretches(starts: Tensor, lengths: Tensor, span: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices in the wave, envelope with soft ends, and position from 0 to 1: each (stretches, span)."""
    within = torch.arange(span)
    places = starts.unsqueeze(1) + within
    along = within / lengths.unsqueeze(1)
    edge = torch.minimum(within, lengths.unsqueeze(1) - within).clamp(min=0) / (0.025 * SAMPLE_RATE)
    envelope = torch.sin(math.pi / 2 * edge.clamp(max=1)).square()
    return places, envelope.double(), along.clamp(max=1).double()


def _circle(span: int) -> Tensor:
    """z^-1 at the frequencies of an rfft of `span` samples."""
    return torch.polar(
        torch.ones(span // 2 + 1, dtype=torch.float64),
        -2 * math.pi * torch.arange(span // 2 + 1, dtype=torch.float64) / span,
    )


def _resonators(hertz: Tensor, bandwidths: Tensor, span: int) -> Tensor:
    """Frequency response of two-pole resonators in series (Klatt 1980): (…, formants) -> (…, span // 2 + 1)."""
    radius = torch.exp(-math.pi * bandwidths.double() / SAMPLE_RATE)
    second = -radius.square()
    first = 2 * radius * torch.cos(2 * math.pi * hertz.clamp(max=0.48 * SAMPLE_RATE) / SAMPLE_RATE)
    back = _circle(span)
    response = (1 - first - second).unsqueeze(-1) / (
        1 - first.unsqueeze(-1) * back - second.unsqueeze(-1) * back.square()
    )
    return response.prod(dim=-2)


def _glottis(tilt: float, span: int) -> Tensor:
    """Frequency response of the glottal pulse (two equal real poles) and of the lips (a difference)."""
    back = _circle(span)
    return (1 - 0.97 * back) / (1 - tilt * back).square()


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
