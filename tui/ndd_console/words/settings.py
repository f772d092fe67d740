"""Settings in words: the keys of the configuration, what a run requested, and whether that is in effect."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING

from ndd_engine.config import read
from ndd_engine.errors import ConfigError
from ndd_engine.record.events import RunEvent, SettingEvent
from ndd_engine.record.figures import is_script
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import MISSING, counted
from ndd_engine.trial.outcome import flatten

from .blocks import Block, NamedValues, Table, Text

if TYPE_CHECKING:
    from ndd_engine.config.schema import ConfigKey

# in_effect: as shown. Those without effect come first.
_EFFECTS = {False: "✖ not in effect", True: "✔ in effect", None: "· not requested"}
_UNREQUESTED = "Not requested: left at its default, so nothing is verified."


def settings_blocks(snapshot: Snapshot) -> list[Block]:
    """Every setting as requested and as applied; [] for a script, which has its own."""
    table = settings_table(snapshot.settings)
    if not table.rows:
        yet = "" if snapshot.final else " yet"
        return [] if is_script(snapshot.run) else [Text(f"No setting was applied{yet}.", "note")]
    if not table.warn:
        return [table]
    return [Text(f"{counted(len(table.warn), 'requested setting')} did not take effect.", "warn"), table]


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


# The name of a run is not a setting; `path` is where your own workload was found.
_LEFT_OUT = frozenset({"run.name", "workload.path"})


def differences(run: RunEvent) -> Block:
    """Every configuration value that differs from the defaults of the workload at its size."""
    workload = run.config.get("workload")
    size = workload.get("size") if isinstance(workload, dict) else None
    size = size if isinstance(size, str) else None
    own = run.config.get("run")
    length = {key: own[key] for key in ("epochs", "max_steps") if isinstance(own, dict) and own.get(key)}
    try:
        try:
            defaults = read(workload=run.workload).resolve(size)
        except ConfigError:  # a workload without a default length: that of the run
            defaults = read(workload=run.workload, overrides={"run": length}).resolve(size)
    except ConfigError as error:
        why = str(error).splitlines()[0]
        return Text(f"The configuration cannot be compared with the defaults: {why}", "note")
    base = flatten(defaults.model_dump(mode="json"))
    rows = tuple(
        (key, _toml(value), _toml(base[key]) if key in base else MISSING)
        for key, value in flatten(run.config).items()
        if key not in _LEFT_OUT and (key not in base or base[key] != value)
    )
    if not rows:
        return Text("All configuration values are the defaults.", "note")
    return Table("Configuration that differs from the defaults", ("key", "this run", "default"), rows)


def _toml(value: object) -> str:
    """The value as in TOML; None is a value that is chosen when the run is prepared."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
