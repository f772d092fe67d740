"""The collective that this process waits in, from torch's flight recorder."""

from __future__ import annotations

import importlib
import json
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
    try:
        c10d: Any = importlib.import_module("torch._C._distributed_c10d")
        trace = json.loads(c10d._dump_fr_trace_json(True, False))
        entries = trace.get("entries", ())
        own = {str(entry["pg_id"]) for entry in entries if entry["process_group"][0] == values.group_name}
        begun = sum(
            int(status["last_enqueued_collective"])
            for name, status in trace["pg_status"].items()
            if name not in own
        )
        unfinished = [entry for entry in entries if not entry["retired"]]
        training = [entry for entry in unfinished if str(entry["pg_id"]) not in own]
        if training:
            return begun, _words(training[0])
        waits = frame is not None and frame.f_code.co_filename.endswith(_WAITS)
        return begun, _words(unfinished[-1]) if waits and unfinished else ""
    except Exception:  # noqa: BLE001  an older torch, or nothing was recorded
        return None, ""


def _words(entry: Any) -> str:
    name = str(entry["profiling_name"]).removeprefix("gloo:").removeprefix("nccl:")
    return shortened(f"{name} of {entry['input_sizes']}", 120)
