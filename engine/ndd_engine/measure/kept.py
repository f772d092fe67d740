"""A look at what a process keeps, as an event of the record, with the lines of the source where it grows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ndd_engine.record.events import Holder, HoldersEvent
from ndd_watch.own import user_file

from .source import growing_line

# Files beside those that are known to belong to the training, in which a line is searched.
MOST_FILES = 40


def placed(event: HoldersEvent, files: Iterable[str]) -> HoldersEvent:
    """The event with the lines where its holders grow. files: of the user's own code, as far as they are known."""
    known = list(dict.fromkeys(file for file in files if file))
    return replace(event, holders=[_placed(one, known) for one in event.holders])


def holders_event(found: dict[str, Any], files: Iterable[str]) -> HoldersEvent:
    """The event of a look, see `ndd_watch.holders`."""
    return placed(HoldersEvent(**{**found, "holders": [Holder(**one) for one in found["holders"]]}), files)


def _placed(holder: Holder, files: list[str]) -> Holder:
    if holder.kind == "cache":
        return replace(holder, at=(holder.file, holder.line))
    if not holder.name:
        return holder
    attribute = holder.kind in ("attribute", "class")
    own = [holder.file] if holder.file and user_file(holder.file) else []
    # The function that a variable belongs to is the place to look first.
    if own and holder.line and (line := growing_line(holder.file, holder.name, attribute, holder.line)):
        return replace(holder, at=(holder.file, line))
    for file in dict.fromkeys([*own, *files, *_beside(files)]):
        if line := growing_line(file, holder.name, attribute):
            return replace(holder, at=(file, line))
    return holder


def _beside(files: list[str]) -> list[str]:
    """Other files in the folders of these."""
    folders = dict.fromkeys(Path(file).parent for file in files)
    try:
        return [str(path) for folder in folders for path in sorted(folder.glob("*.py"))][:MOST_FILES]
    except OSError:
        return []
