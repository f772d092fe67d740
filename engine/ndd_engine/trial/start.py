"""The configuration that a ladder begins with: everything decided, so that each of its trials begins from the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ndd_engine.child import ChildError
from ndd_engine.config import Config, Draft, anywhere, read
from ndd_engine.errors import NddError

from .process import SideProcess
from .request import Base


class TuningStoppedError(NddError):
    """Asked to stop before anything was decided."""


def start_config(
    base: Base, draft: Draft, folder: Path, tell: Callable[[str], None], stop: threading.Event
) -> Config:
    """The draft with its size chosen by measuring where it is "auto", and its data's path made absolute.

    folder: for a file in between. Raises NddError when no size can be chosen, or when asked to stop.
    """
    if draft.size != "auto":
        return anywhere(draft.resolve())

    def tick(stage: str | None) -> None:
        if stop.is_set():
            raise TuningStoppedError("stopped before anything was measured")
        if stage is not None:
            tell(stage)

    path = None if base.config is None else str(base.config.absolute())
    side = SideProcess({"config": path, "workload": base.workload, "sets": list(base.sets)})
    try:
        text = side.choose(tick)
    except ChildError as error:
        raise NddError(f"the size of the model cannot be chosen: {error}") from None
    finally:
        side.close()
    chosen = folder / "chosen.toml"
    chosen.write_text(text, encoding="utf-8")
    return read(chosen).resolve()
