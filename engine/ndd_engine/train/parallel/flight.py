"""The collective that this process waits in, from torch's flight recorder."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

from ndd_engine.errors import shortened

# Python code that waits for a collective of the group for values.
_WAITS = ("torch/distributed/distributed_c10d.py", "parallel/agreement.py", "parallel/team.py")


def waiting_in(values: Any, frame: FrameType | None) -> tuple[int | None, str]:
    """(collectives begun, the one this process waits in or ""); (None, "") where torch does not record them.

    values: the group for values, in which votes are always under way; it counts only if `frame`, the innermost one of
    the thread that trains, waits for it.
    """
    traces = list(_traces())
    if not traces:
        return None, ""
    own: list[Any] = []
    training: list[Any] = []
    begun = 0
    for trace in traces:
        ours = {str(entry["pg_id"]) for entry in trace["entries"] if _group(entry) == values.group_name}
        begun += sum(
            int(status["last_enqueued_collective"])
            for name, status in trace["pg_status"].items()
            if name not in ours
        )
        for entry in trace["entries"]:
            if not entry["retired"]:
                (own if str(entry["pg_id"]) in ours else training).append(entry)
    if training:
        return begun, _words(training[0])
    waits = frame is not None and frame.f_code.co_filename.endswith(_WAITS)
    return begun, _words(own[-1]) if waits and own else ""


def _traces() -> Iterator[Any]:
    """What was recorded. NCCL has a recorder of its own, beside that of the other backends, with groups of its own."""
    with suppress(ImportError):
        c10d: Any = importlib.import_module("torch._C._distributed_c10d")
        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
            with suppress(Exception):  # another torch, a backend that is missing, or nothing was recorded
                trace = json.loads(getattr(c10d, name)(True, False))
                if trace["entries"] and trace["pg_status"] is not None:
                    yield trace


def _group(entry: Any) -> str:
    return str(entry["process_group"][0])


def _words(entry: Any) -> str:
    name = str(entry["profiling_name"]).removeprefix("gloo:").removeprefix("nccl:")
    return shortened(f"{name} of {entry['input_sizes']}", 120)
