"""The keys of the configuration in words: their defaults, values and effects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from typing import TYPE_CHECKING

from .blocks import Block, NamedValues

if TYPE_CHECKING:
    from ndd_engine.config.schema import ConfigKey


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
