"""Settings in words: the keys of the configuration, what a run requested, and whether that is in effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING

from ndd_engine.record.events import SettingEvent

from .blocks import Block, NamedValues, Table

if TYPE_CHECKING:
    from ndd_engine.config.schema import ConfigKey

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


def keys_listed(keys: Iterable[ConfigKey]) -> Iterator[Block]:
    """Each key with its default and its allowed values, and its effect below."""
    for section, group in groupby(keys, lambda key: key.name.partition(".")[0]):
        rows = [((key.name, f"{key.default_text} ({key.allowed})"), ("", key.effect)) for key in group]
        yield NamedValues(tuple(chain(*rows)), f"[{section}]")


def key_in_full(key: ConfigKey, workload: str) -> NamedValues:
    """One key, and how it is set in a file and in a shell."""
    section, _, name = key.name.partition(".")
    value = key.choices[-1] if key.choices else "VALUE"
    return NamedValues.of(
        ("key", key.name),
        ("effect", key.effect),
        ("type", key.type),
        ("allowed", key.allowed + (", or none to remove it" if key.unset else "")),
        ("default", f"{key.default_text} (workload {workload})"),
        ("in a file", f"[{section}] {name} = …"),
        ("in a shell", f"--set {key.name}={value}"),
    )
