"""The runs of a folder in words: that there are none, which are to be deleted, and weights that are exported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_engine.text import counted, number, size

from .blocks import Table, moment

if TYPE_CHECKING:
    from ndd_engine.run.deletion import RunToDelete
    from ndd_engine.train.checkpoint import Exported


NO_RUNS = "no runs yet; to observe your script: ndd-console run -- python train.py"


def no_runs_text(root: Path) -> str:
    return f"{root.absolute()}: {NO_RUNS}, or name another folder with --runs FOLDER"


def deletion_table(chosen: Sequence[RunToDelete]) -> Table:
    rows = tuple((each.run.name, each.status, moment(each.changed_t), size(each.bytes)) for each in chosen)
    return Table("", ("run", "status", "last event", "size"), rows, frozenset({3}))


def deletion_total(chosen: Sequence[RunToDelete]) -> str:
    """ "3 runs (1.2 GiB)"."""
    return f"{counted(len(chosen), 'run')} ({size(sum(each.bytes for each in chosen))})"


def exported_texts(done: Exported, run: str) -> Iterator[str]:
    """The file, then one line for each tensor that is stored once for two names. run: its name."""
    part = f"{done.module} of " if done.module else ""
    yield (
        f"wrote {done.path}: {part}{run} at step {number(done.saved.step)}, {number(done.tensors)} tensors, "
        f"{number(done.parameters)} elements, {size(done.bytes)}"
    )
    for name, kept in done.tied.items():
        yield f"{name} is tied to {kept} and stored once; safetensors.torch.load_model restores both"


def loading_text(path: Path, kind: str) -> str:
    """The Python statement that loads the file. kind: "torch" or "safetensors"."""
    if kind == "torch":
        return f"model.load_state_dict(torch.load({str(path)!r}, weights_only=True))"
    return f"safetensors.torch.load_model(model, {str(path)!r})"
