"""Scripts that keep something for each step, in many ways: is what holds it named, with the line that keeps it?

Each case is `ndd-console run --headless -- python leaks.py WAY BYTES`. Those that keep a limited amount must
not be accused at the end.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Table, say
from benchmarks.engine import events_of

from ndd_engine.record.rundir import RunDir

from .script_faults import FOLDER, observe

SCRIPT = "leaks.py"
WAYS = (
    "local", "global", "dict", "attribute", "deque", "writer", "class", "dataset", "cache", "default", "closure",
    "hooks", "state", "numbers", "bytes", "view", "buffer",
)  # fmt: skip
LIMITED = ("none", "not-deque", "not-ring")
SIZES = (10e3, 100e3, 1e6, 10e6)
SECONDS = 40.0


def measure(options: Options) -> list[Table]:
    """All cases."""
    table = Table(
        "leaks: memory that grows, and what holds it",
        ("way", "bytes a step", "found", "named at", "after", ""),
    )
    named = cases = 0
    for way in options.cases(WAYS):
        for size in options.cases(SIZES):
            row, right = _planted(way, size)
            table.add(*row)
            cases, named = cases + 1, named + right
    table.note(f"named with the line that keeps: {named} of {cases}")
    accused = 0
    for way in () if options.smoke else LIMITED:
        row, right = _planted(way, 100e3)
        table.add(*row)
        accused += not right
    if not options.smoke:
        table.note(f"accused: {accused} of {len(LIMITED)} that keep a limited amount")
    return [table]


def _planted(way: str, size: float) -> tuple[tuple[str, ...], bool]:
    say(f"leaks: {way} {size:g}")
    with tempfile.TemporaryDirectory(prefix="ndd-leaks-") as text:
        folder = Path(text)
        found = observe(folder, SCRIPT, way, f"{size:g}", seconds=SECONDS)
        events = events_of(RunDir(folder / "runs" / "it"))
    leaks = [one for one in found if one["cause"] == "leak"]
    where = next((change["where"] or "" for one in leaks for change in one["changes"]), "")
    line = _line(way)
    after = _after(events, f"{SCRIPT}:{line}")
    right = where == f"{SCRIPT}:{line}" if line else not leaks
    title = leaks[0]["title"] if leaks else "-"
    return (way, f"{size:g}", title, where, after, "" if right else "WRONG"), right


def _after(events: list[dict[str, Any]], where: str) -> str:
    """When the finding first had the line: seconds since the first window, and the growth since then."""
    sizes = [
        (one["t"], size)
        for one in events
        if one["type"] == "sample" and (size := one["host"].get("rss_bytes"))
    ]
    begin = next((one["t"] for one in events if one["type"] == "window"), 0.0)
    for one in events:
        told = one["type"] == "finding" and one["cause"] == "leak" and not one["gone"]
        if told and one["finding"]["changes"][0]["where"] == where:
            before = next((size for t, size in sizes if t >= begin), 0)
            now = next((size for t, size in sizes if t >= one["t"]), before)
            return f"{one['t'] - begin:.0f} s, {(now - before) / 2**20:.0f} MiB"
    return "-"


def _line(way: str) -> int:
    """The line of the script that keeps; 0 for a way that keeps a limited amount."""
    lines = (FOLDER / SCRIPT).read_text(encoding="utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if line.endswith(f"# keeps {way}")), 0)
