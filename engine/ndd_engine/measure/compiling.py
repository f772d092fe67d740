"""What torch's compiler did in a window, as marks of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from ndd_engine.record.events import MarkEvent
from ndd_engine.text import counted, duration, printable


def compile_marks(found: Mapping[str, Any], step: int) -> Iterator[MarkEvent]:
    """The marks of what `Compilations.take` returns. step: optimizer steps done.

    Raises KeyError, TypeError or ValueError for values of another format.
    """
    if graphs := int(found["compiled"]):
        seconds = float(found["compiled_s"])
        text = f"compiled {counted(graphs, 'graph')} in {duration(seconds)}"
        yield MarkEvent("compile", step, text, {"seconds": seconds, "graphs": graphs})
    again, limit = int(found["again"]), bool(found["limit"])
    if not again and not limit:
        return
    seconds, reason = float(found["again_s"]), guard(str(found["reason"]))
    data: dict[str, Any] = {"seconds": seconds, "graphs": again, "reason": reason, "limit": limit}
    text = f"recompiled {counted(again, 'graph')} in {duration(seconds)}"
    if found["function"] is not None:
        file, line, name = found["function"]
        data |= {"file": str(file), "line": int(line), "function": str(name)}
        text += f": {printable(str(name))} ({printable(PurePath(str(file)).name)}:{int(line)})"
    if reason:
        text += f", since {printable(reason)} no longer held"
    if limit:
        text += "; the limit of recompilations is reached, so it runs uncompiled from now on"
    yield MarkEvent("recompile", step, text, data)


def guard(reason: str) -> str:
    """The assumption and its place: "bins == 0 (train.py:13 in forward)"."""
    number, colon, rest = reason.partition(": ")
    text = rest if colon and number.replace("/", "").isdigit() else reason
    # The assumption, the line of code if torch has it, and its place.
    parts = [part.strip() for part in text.split("#") if part.strip()]
    if len(parts) < 2:
        return "".join(parts)
    path, found, line = parts[-1].rpartition(".py:")
    place = f"{PurePath(path).name}.py:{line}" if found else parts[-1]
    return f"{parts[0]} ({place})"
