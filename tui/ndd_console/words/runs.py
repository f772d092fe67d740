"""The runs of a folder in words: that there are none, and which are to be deleted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_engine.text import counted, size

from .blocks import Table, moment

if TYPE_CHECKING:
    from ndd_engine.run.deletion import RunToDelete


NO_RUNS = "no runs yet; to observe a script of your own: ndd-console run -- python train.py"


def no_runs_text(root: Path) -> str:
    return f"{root.absolute()}: {NO_RUNS}, or name another folder with --runs FOLDER"


def deletion_table(chosen: Sequence[RunToDelete]) -> Table:
    rows = tuple((each.run.name, each.status, moment(each.changed_t), size(each.bytes)) for each in chosen)
    return Table("", ("run", "status", "last event", "size"), rows, frozenset({3}))


def deletion_total(chosen: Sequence[RunToDelete]) -> str:
    """ "3 runs (1.2 GiB)"."""
    return f"{counted(len(chosen), 'run')} ({size(sum(each.bytes for each in chosen))})"
