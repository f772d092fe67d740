"""Deleting runs that have ended: whole folders, below the folder of the runs, and never one that a process writes."""

from __future__ import annotations

import fnmatch
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ndd_engine.errors import UsageError
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir, RunLock, all_runs
from ndd_engine.text import printable

FAILED = ("failed", "lost")


@dataclass(frozen=True)
class RunToDelete:
    """A run to delete. bytes: on disk; changed_t: Unix time of its last event; live: whether a process writes it."""

    run: RunDir
    status: str
    bytes: int
    changed_t: float
    live: bool


def candidates(
    root: Path, patterns: Sequence[str], older_than_s: float | None = None, failed: bool = False
) -> list[RunToDelete]:
    """The runs that match any of the names or globs (all runs without one) and every filter.

    Raises UsageError for a name that is no run of this folder, and for a glob without a match.
    """
    every = list(all_runs(root))
    known = {run.name: run for run in every if not run.path.is_symlink()}
    chosen: dict[str, RunDir] = {} if patterns else dict(known)
    for pattern in patterns:
        found = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not found and pattern in known:
            found = [pattern]  # a name with a bracket
        if not found:
            raise UsageError(_unknown(root, pattern, [run.name for run in every], known))
        chosen |= {name: known[name] for name in found}
    now = time.time()
    listed = (_candidate(run) for run in chosen.values())
    return [
        each
        for each in listed
        if (older_than_s is None or now - each.changed_t > older_than_s)
        and (not failed or (each.status in FAILED and not each.live))
    ]


def delete(run: RunDir) -> None:
    """Delete the folder of a run, with its locks. Raises RunLockedError if a process writes it, OSError."""
    locks = RunLock(run), RunLock(run, run.launcher)
    try:
        for lock in locks:
            lock.acquire()
        shutil.rmtree(run.path)
    except FileNotFoundError:
        return  # deleted by somebody else
    finally:
        for lock in locks:
            lock.release()


def _candidate(run: RunDir) -> RunToDelete:
    total, changed = 0, 0.0
    for folder, _, files in os.walk(run.path):
        for name in files:
            try:
                found = os.lstat(os.path.join(folder, name))  # noqa: PTH118
            except OSError:
                continue
            total += found.st_blocks * 512
            if folder == str(run.path) and name in (run.events.name, run.config.name):
                changed = max(changed, found.st_mtime)
    live = run.live_owner() is not None
    try:
        status = load_state(run).status
    except Exception:  # noqa: BLE001  a damaged record must not prevent deleting it
        status = "unreadable"
    if status not in ("done", "stopped", "interrupted", "terminated", "failed", "unreadable"):
        status = "running" if live else "lost"
    return RunToDelete(run, status, total, changed, live)


def _unknown(root: Path, pattern: str, names: Sequence[str], known: dict[str, RunDir]) -> str:
    shown = printable(pattern)
    if pattern in names and pattern not in known:
        return f"{printable(str(root / pattern))} is a symbolic link; delete it yourself"
    if "/" in pattern or pattern in (".", ".."):
        return f"{shown} is a path; only runs in {printable(str(root.absolute()))} are deleted, by name"
    what = "no run matches" if any(char in pattern for char in "*?[") else "there is no run"
    there = ", ".join(map(printable, names[-8:]))
    return f"{what} {shown} in {printable(str(root.absolute()))}" + (
        f"; existing runs: {there}" if there else ""
    )
