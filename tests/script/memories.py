"""Processes that train, as their memories show them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ndd_watch import mapped
from ndd_watch.mapped import BACKWARD, DATA_WAIT, FORWARD, WAITING, Memory

MS = 10**6


def run_line(**more: Any) -> dict[str, Any]:
    """The event of a run, as a process writes it."""
    return {
        "name": "", "workload": "", "config": {"script": {}}, "pid": 7, "host": "h", "device": "cpu",
        "device_name": "", "gpu": None, "versions": {}, "parameters": 1, "precision": "", "item": "item",
        "token": None, "tokens_per_item": 0, "items_per_step": 0, "items_per_epoch": 0, "steps_per_epoch": 0,
        "epochs": 0, "total_steps": 0, "model": "SGD", "data": "", **more,
    }  # fmt: skip


class Trained:
    """steps take 10 ms of forward."""

    def __init__(self, folder: Path, name: str, pid: int = 0) -> None:
        self.memory = Memory()
        self.memory.attach(str(folder), name)
        self.values = self.memory.values
        self.values[mapped.PID] = pid or os.getpid()
        self._shown = 0

    def put(self, kind: str, /, **body: Any) -> None:
        self.memory.put(kind, body)

    def step(self, rows: bool = True, seen: bool = True, data_ms: float = 0, wait_ms: float = 0) -> None:
        """rows: it is timed by phase. seen: it is timed at all. wait_ms: for other ranks, in the backward pass."""
        done, spent = self.values[mapped.DONE], [0] * mapped.COLUMNS
        spent[FORWARD], spent[DATA_WAIT] = 10 * MS, round(data_ms * MS)
        spent[BACKWARD + WAITING] = round(wait_ms * MS)
        if rows and seen:
            at = mapped.ROWS_AT + self.values[mapped.ROWS] % mapped.MOST_ROWS * mapped.ROW_WIDTH
            self.values[at] = done
            for phase, ns in enumerate(spent):
                self.values[at + 1 + phase] = ns
            self.values[mapped.ROWS] += 1
        self.values[mapped.LENGTHS_AT + done % mapped.MOST_LENGTHS] = (sum(spent) << 1 | rows) if seen else 0
        self.values[mapped.DONE] = done + 1

    def window(
        self, wall_ms: float, items: int = 0, timed: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """End a window that took so long."""
        done = self.values[mapped.DONE]
        steps, self._shown = done - self._shown, done
        self.put("window", **{
            "step": done, "epoch": 0, "epoch_step": done, "steps": steps, "micro_steps": steps, "items": items,
            "tokens": 0, "wall_ns": round(wall_ms * MS), "step_p50_ns": None, "step_p95_ns": None,
            "step_max_ns": None, "phases": {}, "passes": 0, "timed": {
                "end": done, "shown": done, "rest": [0] * mapped.COLUMNS, "device": [], "outside": {}, "first_ns": 0,
                **(timed or {}),
            }, **more,
        })  # fmt: skip
