"""The settings page: requested and applied values, whether they are in effect, and the work per step."""

from __future__ import annotations

from ndd_console.words.figures import percent
from ndd_engine.record.events import SettingEvent, WorkEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import MISSING, number, size

from .rows import cells, column, foreign, labelled, rule, shorten, wrap
from .style import Row
from .throughput import PREFIXES, work_texts

# in_effect: (order on the page, symbol, words, style).
_STATES: dict[bool | None, tuple[int, str, str, str]] = {
    False: (0, "✖", "not in effect", "bad"),
    True: (1, "✔", "in effect", "good"),
    None: (2, "·", "not requested", "dim"),
}
_UNREQUESTED = "not requested: left at its default, so nothing is verified"
_STATE = 15  # width of the column "in effect"
_VALUE = 14
_ONE_LINE = 100  # from this width on, "verified" is on the same line
_WHY = 24  # minimum width of the column "verified"
_LABEL = 16


def settings_lines(snapshot: Snapshot, width: int) -> list[Row]:
    """Settings that are not in effect first, defaults last; then the work per step."""
    settings = sorted(snapshot.settings, key=lambda item: _STATES[item.in_effect][0])
    if not settings:
        lines: list[Row] = [(("no settings applied yet", "dim"),)]
    elif width >= _VALUE * 2 + _STATE + 24:
        lines = _table(settings, width)
    else:
        lines = [line for setting in settings for line in _stacked(setting, width)]
    if settings and settings[-1].in_effect is None:
        lines += [((line, "dim"),) for line in wrap(_UNREQUESTED, width)]
    if snapshot.work is not None:
        lines += [(), rule("work per step", width), *_work(snapshot, snapshot.work, width)]
    return lines


def _table(settings: list[SettingEvent], width: int) -> list[Row]:
    one_line = width >= _ONE_LINE
    name = max(cells(foreign(setting.name)) for setting in settings) + 4
    name = min(name, width - 2 * _VALUE - _STATE - (_WHY if one_line else 0))
    rest = width - name - 2 * _VALUE - _STATE
    heading = "  setting".ljust(name) + "requested".ljust(_VALUE) + "applied".ljust(_VALUE)
    heading += "in effect".ljust(_STATE) + ("verified" if one_line else "")
    lines: list[Row] = [((heading.rstrip(), "dim"),)]
    for setting in settings:
        _, symbol, words, style = _STATES[setting.in_effect]
        values = "".join(column(foreign(value), _VALUE) for value in (setting.requested, setting.applied))
        text = column(foreign(setting.name), name - 2) + values
        first: Row = ((f"{symbol} ", style), (text, "text"), (words.ljust(_STATE), style))
        room, indent = (rest, width - rest) if one_line else (width - 4, 4)
        why = wrap(foreign(setting.verified), room)
        lines.append((*first, (why.pop(0), "dim")) if one_line and why else first)
        lines += [((" " * indent + line, "dim"),) for line in why]
    return lines


def _stacked(setting: SettingEvent, width: int) -> list[Row]:
    _, symbol, words, style = _STATES[setting.in_effect]
    values = f"requested {foreign(setting.requested)}, applied {foreign(setting.applied)}"
    why = f": {foreign(setting.verified)}" if setting.verified else ""
    return [
        ((f"{symbol} ", style), (shorten(foreign(setting.name), max(width - 2, 0)), "text")),
        *((("  " + line, "text"),) for line in wrap(values, width - 2)),
        *((("  " + line, style),) for line in wrap(words + why, width - 2)),
    ]


def _work(snapshot: Snapshot, work: WorkEvent, width: int) -> list[Row]:
    """The counts behind FLOP/s and MFU, and how they were made."""
    counted = work.flops_per_step
    share = ""
    if counted and work.flops_forward is not None:
        share = f", {percent(work.flops_forward / counted)} in the forward pass"
    total = sum(work.dtypes.values())
    types = ", ".join(
        f"{name} {percent(value / total)}" if total else name
        for name, value in sorted(work.dtypes.items(), key=lambda item: -item[1])
    )
    pairs = [
        ("operations", f"{_large(counted)} FLOP{share}"),
        ("bytes", f"{size(work.bytes_per_step)} read and written without fusion (upper bound)"),
        ("now", ", ".join(work_texts(snapshot)) or MISSING),
        ("matmul types", types or MISSING),
        ("attention", ", ".join(work.attention) or "none detected"),
        ("not counted", ", ".join(work.uncounted)),
        ("peak", _peak(work)),
        ("method", work.method),
    ]
    return [row for label, text in pairs for row in labelled(label, text, width, _LABEL)]


def _large(value: int | None) -> str:
    """A count with an SI prefix: "4.21 T"."""
    if value is None:
        return MISSING
    scale, letter = next(((scale, letter) for scale, letter in PREFIXES if value >= scale), (1, ""))
    return f"{number(value / scale)} {letter}"


def _peak(work: WorkEvent) -> str:
    if work.peak_tflops is None:
        return f"{MISSING}: {foreign(work.reason)}" if work.reason else MISSING
    memory = f", memory {number(work.bandwidth_gb_s)} GB/s" if work.bandwidth_gb_s else ""
    source = f"; {foreign(work.peak_source)}" if work.peak_source else ""
    return f"{number(work.peak_tflops)} TFLOP/s ({foreign(work.peak_kind)} dense){memory}{source}"
