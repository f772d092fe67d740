"""The callbacks for Lightning and for Hugging Face's Trainer, in scripts that use the real packages."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ndd_engine.record.events import EndEvent, MarkEvent, RunEvent, ScalarsEvent, WindowEvent, parse

from .test_extras import need

SUBJECTS = Path(__file__).parents[1] / "observe" / "subjects"
# Package -> (its subject, the line that is changed, what it becomes); the scripts train for three epochs of 16 steps.
SCRIPTS = {
    "lightning": (
        "lightning_fit.py",
        "    max_epochs=3,",
        "    max_epochs=3,\n    callbacks=[NddCallback('it')],",
    ),
    "transformers": (
        "hf_trainer.py",
        "train_dataset=Items())",
        "train_dataset=Items(), eval_dataset=Items(), callbacks=[NddCallback('it')])",
    ),
}


def run(folder: Path, package: str, callback: bool) -> subprocess.CompletedProcess[str]:
    name, before, after = SCRIPTS[package]
    text = (SUBJECTS / name).read_text()
    assert before in text
    if callback:
        text = f"from ndd_engine.callbacks.{package} import NddCallback\n" + text.replace(before, after)
        text = text.replace("logging_steps=5,", 'logging_steps=5, eval_strategy="epoch",')
    (folder / "train.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(SUBJECTS), "NDD_WATCH_WINDOW_S": "0.1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def words(text: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith("STEPS")).split()


@pytest.mark.parametrize("package", list(SCRIPTS))
def test_the_callback_records_what_the_framework_knows(tmp_path: Path, package: str) -> None:
    need(package)
    done = run(tmp_path, package, callback=True)
    found = ended(tmp_path / "runs" / "it" / "events.jsonl")
    runs = [event for event in found if isinstance(event, RunEvent)]
    assert (runs[-1].total_steps, runs[-1].epochs) == (48, 3)
    assert sum(event.steps for event in found if isinstance(event, WindowEvent)) == 48
    marks = [event for event in found if isinstance(event, MarkEvent) and event.kind == "evaluation"]
    if package == "transformers":
        assert len(marks) == 3 and "eval_loss" in marks[0].data["metrics"]
        assert any("loss" in event.values for event in found if isinstance(event, ScalarsEvent))
    assert (found[-1].status, found[-1].step) == ("done", 48)
    bare = tmp_path / "bare"
    bare.mkdir()
    assert words(done.stdout) == words(run(bare, package, callback=False).stdout)


def ended(path: Path) -> list[Any]:
    """The events of a run, once its follower has ended it."""
    deadline = time.monotonic() + 30
    while True:
        found = [item[1] for item in map(parse, path.read_bytes().splitlines()) if item is not None]
        if isinstance(found[-1], EndEvent) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)
