"""WAV files by the standard library: which there are, what their headers say, their samples. No torch here."""

from __future__ import annotations

import os
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHORTEST_S = 0.1  # of a recording
RATES = (4_000, 192_000)  # Hz
UNREADABLE = (OSError, EOFError, wave.Error, ValueError)  # what reading a bad file raises

# The standard library's words, and ours.
_REASONS = {
    "file does not start with RIFF id": "it does not begin as a WAV file does",
    "not a WAVE file": "it is no WAV file",
    "fmt chunk and/or data chunk missing": "it holds no samples",
    "bad # of channels": "it has no channels",
    "": "it ends early",
}


def wav_files(folder: Path) -> Iterator[Path]:
    """Every .wav file in a folder and below it, hidden ones left out. Raises OSError."""
    next(folder.iterdir(), None)  # os.walk keeps silent about a folder that may not be read
    for place, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith((".", "__"))]
        for name in names:
            if name.lower().endswith(".wav") and not name.startswith("."):
                yield Path(place) / name


def read_header(path: Path) -> tuple[int, float]:
    """(sample rate, seconds) of a WAV file. Raises UNREADABLE."""
    if not path.is_file():
        raise ValueError("it is no regular file")
    with _opened(path) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        claimed = file.getnframes()
    if width not in (1, 2, 3, 4):
        raise ValueError(f"its samples have {8 * width} bits")
    if not RATES[0] <= rate <= RATES[1]:
        raise ValueError(f"its sample rate of {rate:,} Hz is not from {RATES[0]:,} to {RATES[1]:,}")
    # A file that was cut off, or written to a pipe, claims more than it holds.
    seconds = min(claimed, path.stat().st_size // (width * channels)) / rate
    if seconds < SHORTEST_S:
        raise ValueError(f"it lasts {seconds:.3f} s, and {SHORTEST_S:g} s are the least")
    return rate, seconds


def read_samples(path: Path, seconds: float) -> tuple[bytes, int, int]:
    """(PCM bytes of at most the first `seconds`, bytes a sample, channels) of a WAV file.

    Raises UNREADABLE.
    """
    with _opened(path) as file:
        frames = min(file.getnframes(), round(seconds * file.getframerate()))
        return file.readframes(frames), file.getsampwidth(), file.getnchannels()


@contextmanager
def _opened(path: Path) -> Iterator[wave.Wave_read]:
    try:
        with wave.open(os.fspath(path), "rb") as file:
            yield file
    except RuntimeError:  # a chunk that ends outside the file
        raise ValueError("the lengths that it states do not fit together") from None


def reason(error: Exception) -> str:
    """Why a file is no WAV file that can be read, for people."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    if text.startswith("unknown format"):
        number = text.rpartition(" ")[2]
        kinds = {"3": "floating-point samples", "65534": "the extensible format"}
        return f"it holds {kinds.get(number, f'format {number}')}, not plain PCM"
    return _REASONS.get(text, text)
