"""The rows of speed and work on the live screen."""

from __future__ import annotations

from ndd_console.words.step import PAUSED, micro_steps, rates, work_short, work_texts
from ndd_engine.record.snapshot import Snapshot

from .rows import cells, shorten
from .style import Row

_LABEL = 9


def throughput_rows(snapshot: Snapshot, width: int, count: int) -> list[Row]:
    """At most `count` rows. A single row shows the work: the screen shows the main rates elsewhere."""
    room = width - _LABEL
    lines = [("speed", _speed(snapshot, room)), ("work", _work(snapshot, room))]
    lines = [(label, text) for label, text in lines if text]
    shown = lines[-count:] if count > 0 else []
    return [((label.ljust(_LABEL), "dim"), (shorten(text, room), "text")) for label, text in shown]


def _speed(snapshot: Snapshot, room: int) -> str:
    if snapshot.step_ns is None or snapshot.status == PAUSED:
        return ""
    found, micro = rates(snapshot), micro_steps(snapshot)
    full = [f"{found[0]} ({micro})" if micro else found[0], *found[1:]]
    return _first_that_fits([full, full[:-1], found, found[:-1]], room)


def _work(snapshot: Snapshot, room: int) -> str:
    texts = work_texts(snapshot)
    if not texts:
        return ""
    short, line = work_short(snapshot), texts[2]
    # The reason for a missing MFU may be long: drop it before the intensity.
    fewer = texts[:2] if snapshot.throughput.mfu is not None else [texts[0], line]
    return _first_that_fits([texts, fewer, [short, line], [short or texts[0]]], room)


def _first_that_fits(choices: list[list[str]], room: int) -> str:
    joined = ["   ".join(texts) for texts in choices]
    return next((text for text in joined if cells(text) <= room), joined[-1])
