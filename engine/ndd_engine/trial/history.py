"""How much pairs of processes differ on this machine, as earlier trials measured it. A small file in the user's cache.

It only affects the intervals of trials with few pairs. The file is bounded, checked when it is read, and replaced as a
whole; a trial does without it if it cannot be read or written.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ndd_engine.errors import UsageError
from ndd_engine.files import open_regular, write_text
from ndd_engine.text import finite

from .blocks import MOST_PAIRS
from .estimates import Usual, pooled

# Devices, and trials of each, that are kept.
MOST_DEVICES, MOST_TRIALS = 16, 40
_MOST_BYTES = 1 << 18
# Variances are clipped to this: more comes from a disturbed machine.
_MOST = 0.03**2


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/ndd-console, or ~/.cache/ndd-console."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if Path(named).is_absolute() else Path("~/.cache").expanduser()) / "ndd-console"


class History:
    """Variances between pairs of processes, by device. path: of the file (default: in the user's cache)."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "processes.json"

    def usual(self, device: str) -> Usual:
        """The usual difference on a device: that of earlier trials pooled with the default."""
        return pooled(self._read().get(device, []))

    def add(self, device: str, measured: Usual) -> None:
        """Keep what a trial measured; the oldest are forgotten."""
        if not device or not math.isfinite(measured.variance):
            return
        found = self._read()
        trials = [*found.pop(device, []), _clipped(measured.variance, measured.df)][-MOST_TRIALS:]
        devices = dict([*found.items(), (device, trials)][-MOST_DEVICES:])
        body = {name: [[one.variance, one.df] for one in some] for name, some in devices.items()}
        with suppress(OSError, UsageError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps({"version": 1, "devices": body}, indent=1))

    def _read(self) -> dict[str, list[Usual]]:
        """What is plausible of the file, {} without one."""
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                body = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        devices = body.get("devices") if isinstance(body, dict) else None
        if not isinstance(devices, dict):
            return {}
        known = {name: _usuals(some) for name, some in list(devices.items())[-MOST_DEVICES:]}
        return {name: some for name, some in known.items() if some}


def _usuals(entries: Any) -> list[Usual]:
    found = []
    for entry in entries[-MOST_TRIALS:] if isinstance(entries, list) else []:
        if isinstance(entry, list) and len(entry) == 2:
            value, df = map(finite, entry)
            if value is not None and df is not None and df > 0:
                found.append(_clipped(value, df))
    return found


def _clipped(variance: float, df: float) -> Usual:
    return Usual(min(max(variance, -_MOST), _MOST), min(df, float(MOST_PAIRS)))
