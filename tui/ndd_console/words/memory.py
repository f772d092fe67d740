"""Memory in words: what a run uses, what is left, and the batch that is predicted to fit."""

from __future__ import annotations

from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import number


def fits_text(snapshot: Snapshot, width: int = 100) -> str:
    """ "about batch 288 fits (predicted)", or a shorter form."""
    fits = snapshot.headroom.fits_micro
    if fits is None:
        return ""
    text = f"about batch {number(fits)} fits (predicted)"
    return text if len(text) <= width else f"predicted: batch {number(fits)} fits"
