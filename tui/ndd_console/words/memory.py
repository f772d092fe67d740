"""Memory in words: what a run uses, what is left, and the batch that is predicted to fit."""

from __future__ import annotations

from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import number, size

from .blocks import NamedValues


def memory_facts(snapshot: Snapshot, lowest_bytes: float | None) -> NamedValues:
    """Used and free memory of the GPU, or of the host. lowest_bytes: that was available on the host."""
    room, counts = snapshot.headroom, snapshot.memory
    return NamedValues.of(
        ("total", size(room.total_bytes)),
        ("free now" if room.kind == "gpu" else "available now", size(room.free_bytes)),
        ("used by this run", size(room.used_bytes)),
        ("peak", size(room.peak_bytes) if room.peak_bytes is not None else ""),
        ("used by others", size(room.others_bytes)),
        ("lowest available", size(lowest_bytes) if lowest_bytes is not None and room.kind == "host" else ""),
        ("predicted", fits_text(snapshot)),
        ("allocation retries", number(counts.retries) if counts else ""),
        ("out of memory", number(counts.ooms) if counts else ""),
    )


def fits_text(snapshot: Snapshot, width: int = 100) -> str:
    """ "about batch 288 fits (predicted)", or a shorter form."""
    fits = snapshot.headroom.fits_micro
    if fits is None:
        return ""
    text = f"about batch {number(fits)} fits (predicted)"
    return text if len(text) <= width else f"predicted: batch {number(fits)} fits"


def memory_heading(snapshot: Snapshot) -> str:
    """ "memory 16.0 GiB" of the GPU, or of the host."""
    what = "memory" if snapshot.headroom.kind == "gpu" else "host memory"
    return f"{what} {size(snapshot.headroom.total_bytes)}"
