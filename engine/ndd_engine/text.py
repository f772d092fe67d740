"""Formats numbers with units, and escapes untrusted text for a terminal."""

from __future__ import annotations

import contextlib
import math

MISSING = "n/a"
# Makes the character before it wider on some terminals only.
_WIDE = "\ufe0f"


def printable(text: str) -> str:
    """The text with all non-printable characters escaped, so that it cannot control the terminal."""
    if text.isprintable() and _WIDE not in text:
        return text
    return "".join(
        char if char.isprintable() and char != _WIDE else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def foreign(text: object) -> str:
    """Untrusted text on one line, with control characters escaped."""
    return printable(" ".join(str(text).split()))


def finite(value: object) -> float | None:
    """A finite number as a float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def size(count: float | None) -> str:
    """Bytes in binary units: 1.5 GiB, 512 MiB, 17 B."""
    value = finite(count)
    if value is None:
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            digits = 0 if unit in ("B", "KiB") or abs(value) >= 100 else 1
            return f"{value:,.{digits}f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def duration(seconds: float | None) -> str:
    """A duration in at most two units: 850 ms, 12.3 s, 4 min 10 s, 1 h 12 m, 3 d 4 h."""
    seconds = finite(seconds)
    if seconds is None:
        return MISSING
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    minutes = total // 60
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} m"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def number(value: float | None, digits: int = 3) -> str:
    """A number with thousands separators, or with `digits` significant digits below 1000."""
    if finite(value) is None:
        return str(value) if isinstance(value, float) else MISSING
    assert value is not None
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == int(value) and abs(value) < 1000:
        return f"{int(value)}"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(digits - whole, 0)}f}" if abs(value) >= 1e-3 else f"{value:.{digits}g}"


def plural(word: str) -> str:
    """The plural of a unit: "windows", "batches", "epochs", "entries", "series"."""
    if word.endswith("epoch"):
        return f"{word}s"
    if word.endswith(("ch", "sh", "x", "z", "ss")):
        return f"{word}es"
    if word.endswith("s"):
        return word
    if word.endswith("y") and word[-2:-1] not in tuple("aeiou"):
        return f"{word[:-1]}ies"
    return f"{word}s"


def counted(value: float, word: str) -> str:
    """A number with its unit: "1 thread", "2 threads", "1,600 batches"."""
    return f"{number(value)} {word if value == 1 else plural(word)}"


def rate(value: float | None, unit: str) -> str:
    """A rate with its unit: 18.3 step/s."""
    return f"{number(value)} {unit}/s" if value is not None else f"{MISSING} {unit}/s"


def percent(share: float | None) -> str:
    """A share as a percentage, with one more digit below 10 %: "57 %", "1.2 %", "<0.1 %"."""
    share = finite(share)
    if share is None:
        return MISSING
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{share * 100:.0f} %" if share >= 0.0995 or share == 0 else f"{share * 100:.1f} %"


def factor(ratio: float) -> str:
    """A ratio with three digits: "1.42", "12.3", "1,420"; below 1 with two, "0.64"; below 0.1 with three, "0.0123"."""
    return f"{ratio:.2f}" if 0.1 <= ratio < 10 else f"{ratio:.3g}" if ratio < 999.5 else f"{ratio:,.0f}"


def times(ratio: float) -> str:
    """ "1.42x"."""
    return f"{factor(ratio)}x"


def span(ns: float) -> str:
    """Nanoseconds as text: "850 µs", "12.3 s"."""
    return f"{ns / 1e3:.3g} µs" if ns < 999_500 else duration(ns * 1e-9)
