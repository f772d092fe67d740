"""The configuration that a ladder begins with: everything decided, so that each of its trials begins from the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ndd_engine.config import Config, Draft, read
from ndd_engine.errors import NddError

from .process import SideError, SideProcess
from .request import Base


class StoppedError(NddError):
    """Asked to stop before anything was decided."""


def start_config(
    base: Base, draft: Draft, folder: Path, tell: Callable[[str], None], stop: threading.Event
) -> Config:
    """The draft with its size chosen by measuring where it is "auto", and its data's path made absolute.

    folder: for a file in between. Raises NddError when no size can be chosen, or when asked to stop.
    """
    if draft.size != "auto":
        return _absolute(draft.resolve())

    def tick(stage: str | None) -> None:
        if stop.is_set():
            raise StoppedError("stopped before anything was measured")
        if stage is not None:
            tell(stage)

    path = None if base.config is None else str(base.config.absolute())
    side = SideProcess({"config": path, "workload": base.workload, "sets": list(base.sets)})
    try:
        text = side.choose(tick)
    except SideError as error:
        raise NddError(f"the size of the model cannot be chosen: {error}") from None
    finally:
        side.close()
    assert text is not None  # the size is "auto"
    chosen = folder / "chosen.toml"
    chosen.write_text(text, encoding="utf-8")
    return _absolute(read(chosen).resolve())


def _absolute(config: Config) -> Config:
    """The configuration is written into another folder, where a relative path would mean something else."""
    path = Path(config.workload.data)
    if path.is_absolute() or not path.exists():
        return config
    workload = config.workload.model_copy(update={"data": str(path.absolute())})
    return config.model_copy(update={"workload": workload})
