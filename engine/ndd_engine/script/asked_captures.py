"""Reads the traces of profiler captures that a script's processes have written on request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ndd_engine.errors import UsageError, error_text
from ndd_engine.measure.captured import Noted, captured
from ndd_engine.measure.module_times import COMPILED, shown_names
from ndd_engine.record.events import Event, KernelsEvent, MarkEvent
from ndd_engine.record.figures import capture_text
from ndd_engine.record.rundir import RunDir
from ndd_engine.recordings.trace_file import read_trace
from ndd_engine.text import printable

# Longer traces would take the console minutes to read.
LONGEST = 1 << 28


class Captures:
    """Those of a run."""

    def __init__(self, directory: RunDir) -> None:
        self._directory = directory

    def taken(self, mark: MarkEvent, rank: int | None = None) -> Iterator[Event]:
        """The process has taken a capture, and tells its file. Raises ValueError for another place.

        rank: of a process that is not the leading one; its trace is only kept.
        """
        step, name = mark.step, str(mark.data["trace"])
        if name != Path(name).name:
            raise ValueError("not a name")
        made, kept = self._directory.path / name, self._directory.trace
        if rank is not None:
            with contextlib.suppress(OSError):
                made.replace(kept.with_name(f"{kept.stem}.rank-{rank}{kept.suffix}"))
            return
        try:
            event = folded(made, step, int(mark.data["steps"]))
            made.replace(kept)
        except (UsageError, OSError, ValueError, RuntimeError, KeyError, TypeError, IndexError) as error:
            with contextlib.suppress(OSError):
                made.unlink()
            yield _failed(step, error_text(error))
            return
        event = replace(event, trace=str(kept))
        yield event
        yield MarkEvent("note", step, capture_text(event))


def folded(path: Path, step: int, steps: int) -> KernelsEvent:
    """The event of a trace that an observed process has written.

    Raises UsageError, and ValueError, RuntimeError, KeyError, TypeError or IndexError for what is no such trace.
    """
    if path.stat().st_size > LONGEST:
        raise ValueError("its trace is too long to be read")
    trace = read_trace(path)
    noted = trace.noted
    names = [(str(name), str(kind)) for name, kind in noted["modules"]]
    compiled = bool(noted["compiled"]) or any(kind in COMPILED for _, kind in names)
    calls = [(int(t), int(module), int(line), bool(begins)) for t, module, line, begins in noted["calls"]]
    device: Any = noted["device"]
    return captured(
        trace.events,
        Noted(
            int(noted["begin"]), int(noted["end"]), [int(t) for t in noted["anchors"]],
            [(int(t), str(name)) for t, name in noted["marks"]],
            None if device is None else int(device), shown_names(names),
            [(str(file), int(at), str(name)) for file, at, name in noted["lines"]],
            [] if compiled else calls,
        ),
        step,
        steps,
    )  # fmt: skip


def _failed(step: int, reason: str) -> MarkEvent:
    return MarkEvent("warning", step, f"no profiler capture: {printable(reason)}")
