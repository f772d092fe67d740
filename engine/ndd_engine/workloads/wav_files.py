"""WAV files with the standard library: finding them, and reading their headers and samples. Imports no torch."""

from __future__ import annotations

import os
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHORTEST_S = 0.1  # minimum length of a recording
RATES = (4_000, 192_000)  # Hz
UNREADABLE = (OSError, EOFError, wave.Error, ValueError)  # raised when a bad file is read

# Messages of the standard library, and what is shown instead.
_REASONS = {
    "file does not start with RIFF id": "this is not a WAV file: it does not start with RIFF",
    "not a WAVE file": "this is not a WAV file",
    "fmt chunk and/or data chunk missing": "it has no samples",
    "bad # of channels": "it has no channels",
    "": "the file is truncated",
}


def wav_files(folder: Path) -> Iterator[Path]:
    """Every .wav file in a folder and below it, except hidden ones. Raises OSError."""
    next(folder.iterdir(), None)  # os.walk ignores a folder that cannot be read
    for place, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith((".", "__"))]
        for name in names:
            if name.lower().endswith(".wav") and not name.startswith("."):
                yield Path(place) / name


def read_header(path: Path) -> tuple[int, float]:
    """(sample rate, seconds) of a WAV file. Raises UNREADABLE."""
    if not path.is_file():
        raise ValueError("this is not a regular file")
    with _opened(path) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        claimed = file.getnframes()
    if width not in (1, 2, 3, 4):
        raise ValueError(f"its samples have {8 * width} bits")
    if not RATES[0] <= rate <= RATES[1]:
        raise ValueError(f"its sample rate of {rate:,} Hz is not between {RATES[0]:,} and {RATES[1]:,} Hz")
    # The header of a truncated file, or of one written to a pipe, claims more than the file has.
    seconds = min(claimed, path.stat().st_size // (width * channels)) / rate
    if seconds < SHORTEST_S:
        raise ValueError(f"it lasts {seconds:.3f} s; the minimum is {SHORTEST_S:g} s")
    return rate, seconds


def read_samples(path: Path, seconds: float) -> tuple[bytes, int, int]:
    """(PCM bytes of the first `seconds` or less, bytes per sample, channels) of a WAV file. Raises UNREADABLE."""
    with _opened(path) as file:
        frames = min(file.getnframes(), round(seconds * file.getframerate()))
        return file.readframes(frames), file.getsampwidth(), file.getnchannels()


@contextmanager
def _opened(path: Path) -> Iterator[wave.Wave_read]:
    try:
        with wave.open(os.fspath(path), "rb") as file:
            yield file
    except RuntimeError:  # a chunk that ends outside the file
        raise ValueError("the chunk lengths in its header are inconsistent") from None


def reason(error: Exception) -> str:
    """Why a WAV file cannot be read, as a message."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    if text.startswith("unknown format"):
        number = text.rpartition(" ")[2]
        kinds = {"3": "floating-point samples", "65534": "the extensible format"}
        return f"it has {kinds.get(number, f'format {number}')}, not plain PCM"
    return _REASONS.get(text, text)
