"""Tries the changes that apply to a script one after the other, and measures those that helped together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ndd_engine.diagnose import Finding
from ndd_engine.errors import UsageError
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.trial.candidates import MOST_WORKERS
from ndd_engine.trial.request import Base, Progress, TrialRequest
from ndd_watch.changes import KINDS

from .edits import Edit
from .trials import edit_for, run_script_trial

# Runs a trial, as `run_script_trial` does.
Measure = Callable[
    [TrialRequest, dict[str, Any], str, Callable[[Progress], None], threading.Event | None], TrialEvent
]
# Losses with which a change may be kept.
_SAME = frozenset({"same", "close", "not comparable"})


@dataclass(frozen=True)
class Row:
    """A change and its trial; None before it was measured. reason: why it was left out, "" otherwise."""

    sets: tuple[str, ...]
    trial: TrialEvent | None = None
    reason: str = ""

    @property
    def helps(self) -> bool:
        """Whether it is faster with losses that do not differ."""
        return self.trial is not None and self.trial.verdict == "faster" and self.trial.loss in _SAME


@dataclass(frozen=True)
class Tuned:
    """rows: all changes. kept: those that help together; whole: their trial, the edit that makes them."""

    rows: tuple[Row, ...]
    kept: tuple[str, ...] = ()
    whole: TrialEvent | None = None
    edit: Edit | None = None


def changes_for(run: RunEvent, findings: Sequence[Finding], cores: int, bf16: bool) -> list[tuple[str, ...]]:
    """The changes to try: those of the findings first. bf16: whether the CPU has native bf16."""
    seen = run.config
    loader = seen.get("loader") if isinstance(seen.get("loader"), Mapping) else None
    optimizer = seen.get("optimizer") if isinstance(seen.get("optimizer"), Mapping) else None
    gpu = run.device.startswith("cuda")
    found = [item.sets for item in findings if item.sets]
    if loader is not None:
        now = loader.get("workers")
        found += [
            (f"loader.workers={count}",)
            for count in (0, *(2**power for power in range(min(cores, MOST_WORKERS).bit_length())))
            if count != now
        ]
        if now and not loader.get("persistent"):
            found.append(("loader.persistent=true",))
        if gpu and not loader.get("pin_memory"):
            found.append(("loader.pin_memory=true",))
    if not gpu:
        found += [(f"run.threads={count}",) for count in dict.fromkeys((cores, 1)) if count != run.threads]
    if optimizer is not None and optimizer.get("implementation") in ("loop", "foreach"):
        found.append(("optimizer.implementation=fused",))
    if gpu:
        found += [("precision.tf32=true",), ("speed.cudnn_benchmark=true",)]
    if gpu or bf16:
        found.append(("precision.amp=bf16",))
    found.append(("speed.compile=default",))
    known = [sets for sets in found if all(item.partition("=")[0] in KINDS for item in sets)]
    return list(dict.fromkeys(known))


def tune_script(
    directory: RunDir,
    run: RunEvent,
    changes: Sequence[tuple[str, ...]],
    budget_s: float,
    tell: Callable[[Sequence[Row], Progress | None], None],
    stop: threading.Event,
    outside: bool = False,
    measure: Measure = run_script_trial,
) -> Tuned:
    """Measure every change against the script as it is, then the best ones of each key together.

    tell: called with the rows and the progress of the current trial. outside: see TrialRequest. Ratios are never
    multiplied: the gain of the whole is measured, and if it is not faster than its best part, that part is the result.
    """
    base = Base(f"run {directory.name}", run=directory)
    rows = [Row(sets) for sets in changes]

    def measured(sets: tuple[str, ...]) -> TrialEvent:
        request = TrialRequest(base, sets, budget_s, outside=outside)
        return measure(request, run.config, run.device, lambda progress: tell(rows, progress), stop)

    for place, row in enumerate(rows):
        if stop.is_set():
            return Tuned(tuple(rows))
        try:
            rows[place] = replace(row, trial=measured(row.sets))
        except UsageError as error:
            rows[place] = replace(row, reason=str(error))
        tell(rows, None)
    best: dict[str, Row] = {}
    for row in rows:
        key = row.sets[0].partition("=")[0]
        if row.helps and _ratio(row) > _ratio(best.get(key)):
            best[key] = row
    chosen = sorted(best.values(), key=_ratio, reverse=True)
    if not chosen or stop.is_set():
        return Tuned(tuple(rows))
    kept, whole = chosen[0].sets, chosen[0].trial
    if len(chosen) > 1:
        together = tuple(dict.fromkeys(item for row in chosen for item in row.sets))
        found = measured(together)
        if found.verdict == "faster" and found.loss in _SAME and (found.ratio or 0.0) > _ratio(chosen[0]):
            kept, whole = together, found
    edit = edit_for(TrialRequest(base, kept), run)
    return Tuned(tuple(rows), kept, whole, edit)


def _ratio(row: Row | None) -> float:
    return (row.trial.ratio or 0.0) if row is not None and row.trial is not None else 0.0
