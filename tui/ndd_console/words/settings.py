"""The settings of a run in words: as requested, as applied, and whether they are in effect."""

from __future__ import annotations

from collections.abc import Sequence

from ndd_engine.record.events import SettingEvent

from .blocks import Table

# in_effect: as shown. Those without effect come first.
_EFFECTS = {False: "✖ not in effect", True: "✔ in effect", None: "· not requested"}
_UNREQUESTED = "Not requested: left at its default, so nothing is verified."


def settings_table(settings: Sequence[SettingEvent]) -> Table:
    """Those that are not in effect first, defaults last."""
    order = list(_EFFECTS)
    ordered = sorted(settings, key=lambda setting: order.index(setting.in_effect))
    rows = []
    for setting in ordered:
        values = setting.requested, setting.applied, setting.verified or ""
        rows.append((_EFFECTS[setting.in_effect], setting.name, *values))
    lost = frozenset(index for index, setting in enumerate(ordered) if setting.in_effect is False)
    columns = ("effect", "setting", "requested", "applied", "verified by")
    note = _UNREQUESTED if ordered and ordered[-1].in_effect is None else ""
    return Table("", columns, tuple(rows), note=note, warn=lost)
