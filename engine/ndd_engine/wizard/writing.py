"""The chosen configuration as commented TOML: a new file, or edited into an existing one. Does not import torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from ndd_engine.config import Config, changed_toml
from ndd_engine.errors import UsageError
from ndd_engine.text import printable


def fresh(config: Config, heading: str, reasons: Mapping[str, str]) -> str:
    """A new file: what differs from the defaults or was chosen, with its reason; paths as they were given."""
    return changed_toml(config, heading, reasons)


def into(text: str, values: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Change values in the text of a TOML file; everything else, including comments, is preserved.

    values: by dotted key, None to remove a key. reasons: by dotted key, a comment to append to a changed value, after
    the user's own. Raises UsageError if the text is not valid TOML.
    """
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise UsageError(f"the file is not valid TOML: {printable(str(error))}") from None
    for key, value in values.items():
        *sections, name = key.split(".")
        table = _section(document, sections, make=value is not None)
        if table is None:
            continue
        if value is None:
            if name in table:
                table.remove(name)
            continue
        before = table.get(name)
        if before is not None and before == value:
            continue
        item = tomlkit.item(value)
        reason = printable(reasons.get(key, ""))
        theirs = "" if before is None else str(before.trivia.comment or "").lstrip("# ")
        item.comment(" | ".join(part for part in (theirs, reason) if part)) if theirs or reason else None
        table[name] = item
    return tomlkit.dumps(document)


def _section(document: Any, names: Sequence[str], make: bool) -> Any:
    """The nested table, created if `make`, else None if it does not exist. Raises UsageError if it is a value."""
    table = document
    for name in names:
        if name not in table:
            if not make:
                return None
            if table is document and document.body:
                document.add(tomlkit.nl())
            table.add(name, tomlkit.table())
        table = table[name]
        if not isinstance(table, MutableMapping):
            raise UsageError(f"[{'.'.join(names)}] must be a section, but the file has a value there")
    return table


def difference(before: str, after: str, name: str) -> list[str]:
    """Lines of the unified diff between the current and the new text; [] if nothing changes."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name} (current)", f"{name} (new)", lineterm="", n=2
    )
    return [printable(line) for line in lines]
