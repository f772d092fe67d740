"""Tuning a script: which changes are tried, and which ones are kept; the measurements are given."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.records import run_event

from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.script.tuning import changes_for, tune_script
from ndd_engine.trial.request import TrialRequest


def identity(tmp_path: Path, **changes: Any) -> RunEvent:
    path = tmp_path / "train.py"
    path.write_text("import torch\nloader = DataLoader(data, batch_size=8)\n")
    config = {
        "script": {
            "command": ["python", "train.py"], "folder": str(tmp_path), "loader": [str(path), 2], "main": str(path),
        },
        "loader": {"workers": 0, "pin_memory": False, "prefetch": None, "persistent": False},
        "optimizer": {"implementation": "loop"},
    }  # fmt: skip
    body: dict[str, Any] = {
        "workload": "train.py", "config": config, "items_per_step": 8, "items_per_epoch": 0, "steps_per_epoch": 0,
        "epochs": 0, "total_steps": 0, "threads": 2,
    }  # fmt: skip
    return run_event(**{**body, **changes})


def test_what_applies_to_a_script_on_a_cpu(tmp_path: Path) -> None:
    assert changes_for(identity(tmp_path), (), 2, False) == [
        ("loader.workers=1",), ("loader.workers=2",), ("run.threads=1",), ("optimizer.implementation=fused",),
        ("speed.compile=default",),
    ]  # fmt: skip


def trials(ratios: dict[tuple[str, ...], float]) -> Any:
    """A measurement that gives these ratios; everything else makes no difference."""
    asked: list[tuple[str, ...]] = []

    def measure(request: TrialRequest, *_: Any) -> TrialEvent:
        asked.append(request.sets)
        ratio = ratios.get(request.sets, 1.0)
        verdict = "faster" if ratio > 1.02 else "slower" if ratio < 0.98 else "no difference"
        return TrialEvent(
            list(request.sets), "run r", verdict, "", ratio, ratio * 0.99, ratio * 1.01, loss="same"
        )

    measure.asked = asked  # type: ignore[attr-defined]
    return measure


@pytest.mark.parametrize(
    ("whole", "kept"), [(2.4, ("loader.workers=2", "run.threads=1")), (1.5, ("loader.workers=2",))]
)
def test_the_best_of_each_key_are_measured_together(
    tmp_path: Path, whole: float, kept: tuple[str, ...]
) -> None:
    run = identity(tmp_path)
    both = ("loader.workers=2", "run.threads=1")
    measure = trials(
        {("loader.workers=1",): 1.5, ("loader.workers=2",): 2.0, ("run.threads=1",): 1.1, both: whole}
    )
    changes = changes_for(run, (), 2, False)
    directory = RunDir(tmp_path / "r")
    directory.path.mkdir()
    directory.command.write_text(json.dumps(run.config["script"]))
    found = tune_script(directory, run, changes, 9.0, lambda *_: None, threading.Event(), measure=measure)
    assert measure.asked[-1] == both and len(measure.asked) == len(changes) + 1
    assert found.kept == kept and found.whole is not None and found.whole.ratio == max(whole, 2.0)
    assert found.edit is not None and "num_workers=2" in found.edit.after
    assert ("set_num_threads(1)" in found.edit.after) == (whole == 2.4)


def test_nothing_that_helps_is_no_edit(tmp_path: Path) -> None:
    run = identity(tmp_path)
    found = tune_script(
        RunDir(tmp_path / "r"), run, [("run.threads=1",)], 9.0, lambda *_: None, threading.Event(), trials({})
    )
    assert not found.kept and found.edit is None
