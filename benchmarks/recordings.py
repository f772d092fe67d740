"""Reading recordings of others: `ndd-console trace` and `ndd-console memory` on files of 100 MB, as whole processes.

The files are written here: a trace of steps with operators, launches and kernels, and a snapshot whose history
allocates and frees with a stack for each entry. Shown are the time from start to end and the most memory of the
process, without that of its subprocess.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ndd_engine.text import size

from .common import STATISTICS, Options, Table, as_seconds, say, statistics_cells, whole_process

TITLE = "recordings: seconds to read files of others"
_MIB = 1 << 20
_FRAMES = 12


def measure(options: Options) -> Table:
    """One row for each command."""
    table = Table(TITLE, ("command", *STATISTICS))
    megabytes = options.repeats(100, 20, 1)
    with tempfile.TemporaryDirectory(prefix="ndd-bench-") as folder:
        for command, path in (
            ("trace", _trace(Path(folder) / "trace.json", megabytes)),
            ("memory", _snapshot(Path(folder) / "snapshot.pickle", megabytes)),
        ):
            taken, most = [], 0
            for turn in range(options.repeats(5, 3)):
                say(f"recordings: {command}, {turn + 1}")
                seconds, peak = whole_process([sys.executable, "-m", "ndd_console", command, str(path)])
                taken.append(seconds)
                most = max(most, peak)
            shown = f"{command} of {size(path.stat().st_size)}"
            table.add(shown, *statistics_cells(taken, as_seconds))
            table.note(f"{shown}: at most {size(most)} of memory")
    return table


def _trace(path: Path, megabytes: int) -> Path:
    with path.open("w") as file:
        file.write('{"deviceProperties": [{"id": 0, "name": "Benchmark GPU"}], "traceEvents": [\n')
        written, step = 0, 0
        while written < megabytes * 10**6:
            for event in _step(step):
                written += file.write(json.dumps(event) + ",\n")
            step += 1
        file.write('{"ph": "M"}]}')
    return path


def _step(step: int) -> Iterator[dict[str, Any]]:
    """100 ms with 400 operators, of which each launches a kernel."""
    begin = step * 100_000

    def event(name: str, cat: str, at: float, length: float, **args: int) -> dict[str, Any]:
        tid = 7 if cat == "kernel" else 100
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 1,
            "tid": tid,
            "ts": at,
            "dur": length,
            "args": args,
        }

    yield event(f"ProfilerStep#{step}", "user_annotation", begin, 100_000)
    for place in range(400):
        at, identity = begin + place * 240, step * 400 + place + 1
        yield event("aten::linear", "cpu_op", at, 200)
        yield event("aten::addmm", "cpu_op", at + 20, 150)
        yield event("cudaLaunchKernel", "cuda_runtime", at + 100, 6, correlation=identity)
        yield event("sgemm_128x64", "kernel", at + 120, 180, device=0, stream=7, correlation=identity)
    yield event("Optimizer.step#AdamW.step", "user_annotation", begin + 96_000, 3_000)


def _snapshot(path: Path, megabytes: int) -> Path:
    """64 segments, whose blocks are allocated and freed in turns."""
    addresses = [(place + 1) << 32 for place in range(64)]
    entries: list[dict[str, Any]] = []
    for address in addresses:
        entries.append(_entry("segment_alloc", address, len(entries)))
    # An entry takes about 0.63 KB.
    while len(entries) < megabytes * 1600:
        address = addresses[len(entries) // 3 % len(addresses)]
        entries += [
            _entry(action, address, len(entries)) for action in ("alloc", "free_requested", "free_completed")
        ]
    block = {"size": 12 * _MIB, "requested_size": 12 * _MIB, "state": "inactive", "frames": []}
    segments = [
        {"device": 0, "address": address, "total_size": 12 * _MIB, "stream": 0, "segment_type": "large",
         "segment_pool_id": (0, 0), "blocks": [{"address": address, **block}]}
        for address in addresses
    ]  # fmt: skip
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [entries]}))
    return path


def _entry(action: str, address: int, number: int) -> dict[str, Any]:
    frames = [
        {
            "filename": f"/home/me/project/part_{depth}.py",
            "line": number * 31 % 9_000 + depth,
            "name": f"call_{depth}",
        }
        for depth in range(_FRAMES)
    ]
    return {
        "action": action,
        "addr": address,
        "size": 12 * _MIB,
        "stream": 0,
        "time_us": number,
        "frames": frames,
    }
