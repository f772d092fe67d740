"""Names of earlier releases, which old files, records and command lines contain."""

from __future__ import annotations

from typing import Any

# Workloads: old name -> name of today.
OLD_WORKLOADS = {"ndd": "eeg"}


def with_todays_names(table: dict[str, Any]) -> dict[str, Any]:
    """A configuration as tables, with today's name of its workload; the same object if nothing changes."""
    workload = table.get("workload")
    name = workload.get("name") if isinstance(workload, dict) else None
    if not isinstance(workload, dict) or not isinstance(name, str) or name not in OLD_WORKLOADS:
        return table
    return {**table, "workload": {**workload, "name": OLD_WORKLOADS[name]}}
