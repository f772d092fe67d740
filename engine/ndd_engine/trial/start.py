"""The fully resolved configuration that all trials of a tuning start from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ndd_engine.child import ChildError, StoppedError, spec_of, ticker
from ndd_engine.config import Config, Draft, anywhere, read
from ndd_engine.errors import NddError

from .process import SideProcess
from .request import Base


def start_config(
    base: Base, draft: Draft, folder: Path, tell: Callable[[str], None], stop: threading.Event
) -> Config:
    """Resolve the draft: choose size "auto" by measurement and make the data path absolute.

    folder: for an intermediate file. Raises NddError if no size can be chosen, or when stopped.
    """
    if draft.size != "auto":
        return anywhere(draft.resolve())
    try:
        with SideProcess(spec_of(base.config, base.workload, base.sets)) as side:
            text = side.choose(ticker("choosing the model size", tell, stop))
    except StoppedError:
        raise StoppedError("stopped before anything was measured") from None
    except ChildError as error:
        raise NddError(f"the model size cannot be chosen: {error}") from None
    chosen = folder / "chosen.toml"
    chosen.write_text(text, encoding="utf-8")
    return read(chosen).resolve()
