"""Names and keys of earlier releases, which old files, records and command lines contain."""

from __future__ import annotations

from typing import Any

# Workloads: old name -> name of today.
OLD_WORKLOADS = {"ndd": "eeg"}
# Stack samples a second, which profiled steps replace.
OLD_STACKS = "stacks_hz"


def with_todays_names(table: dict[str, Any]) -> dict[str, Any]:
    """A configuration as tables, with today's names; the same object if nothing changes."""
    return _with_todays_log(_with_todays_workload(table))


def _with_todays_log(table: dict[str, Any]) -> dict[str, Any]:
    """Without log.stacks_hz; where it was 0, log.profile_every_s is 0, too."""
    log = table.get("log")
    if not isinstance(log, dict) or OLD_STACKS not in log:
        return table
    kept = {name: value for name, value in log.items() if name != OLD_STACKS}
    if log[OLD_STACKS] == 0:
        kept.setdefault("profile_every_s", 0.0)
    return {**table, "log": kept}


def _with_todays_workload(table: dict[str, Any]) -> dict[str, Any]:
    workload = table.get("workload")
    name = workload.get("name") if isinstance(workload, dict) else None
    if not isinstance(workload, dict) or not isinstance(name, str) or name not in OLD_WORKLOADS:
        return table
    return {**table, "workload": {**workload, "name": OLD_WORKLOADS[name]}}
