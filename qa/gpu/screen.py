"""Part "screen": the engine under the live screen vs. headless, while the steps run on the GPU."""

from __future__ import annotations

from benchmarks.common import Options, Table

from benchmarks import screen

from .figures import FAIL, INFO, PASS, Task

PAIRS = 8


def measure(given: Task) -> None:
    """Measure in a real terminal."""
    full = given.effort == "full"
    put(given, screen.beside_a_run(Options(given.effort, given.device, pairs=PAIRS if full else None)))


def put(given: Task, table: Table) -> None:
    """A figure for each row, and its notes with the first."""
    place = {name: index for index, name in enumerate(table.columns)}
    notes = "; ".join(table.notes)
    for row in table.rows:
        cells = {name: row[index] for name, index in place.items()}
        interval = cells["95 % CI of the median"]
        value = cells["median"] + (f" (95 % CI {interval})" if interval else "")
        verdict = {"reached": PASS, "not reached": FAIL}.get(cells["by the median"], INFO)
        given.put(row[0], value, cells["target"], verdict, notes)
        notes = ""
