"""Exported weights in words: what was written, and how it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_engine.text import number, size

if TYPE_CHECKING:
    from ndd_engine.train.checkpoint import Exported


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
