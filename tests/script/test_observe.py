"""`ndd_engine.observe()`: a script observes itself in a line, and says what hooks cannot know."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ndd_engine.record.events import EndEvent, MarkEvent, RunEvent, ScalarsEvent, WindowEvent, parse

LOOP = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{before}
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
step = 0
{begin}
for epoch in range(4):
    for x, y in DataLoader(data, batch_size=16):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        step += 1
    {each}
{end}
print("LOSS", float(loss.detach()).hex())
"""


def run(folder: Path, status: int = 0, **parts: str) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(LOOP.format(**{"before": "", "begin": "", "each": "pass", "end": "", **parts}))
    done = subprocess.run(
        [sys.executable, path.name], cwd=folder, capture_output=True, text=True, timeout=100,
        env={**os.environ, "NDD_WATCH_WINDOW_S": "0.02"}, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done


def events(folder: Path, name: str) -> list[Any]:
    """Of the run, once its follower has ended it."""
    path, deadline = folder / "runs" / name / "events.jsonl", time.monotonic() + 30
    while True:
        found = [item[1] for item in map(parse, path.read_bytes().splitlines()) if item is not None]
        if isinstance(found[-1], EndEvent) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


@pytest.mark.long
def test_a_with_statement_with_epochs_and_metrics(tmp_path: Path) -> None:
    done = run(
        tmp_path, before="from ndd_engine import observe\nseen = observe('mine').__enter__()",
        begin="seen.totals(total_steps=64, epochs=4)",
        each="seen.epoch(step, epoch + 1); seen.log(step, size=epoch); seen.evaluation(step, loss=float(loss))",
        end="seen.close()",
    )  # fmt: skip
    assert done.stdout == run(tmp_path).stdout
    found = events(tmp_path, "mine")
    assert sum(event.steps for event in found if isinstance(event, WindowEvent)) == 64
    runs = [event for event in found if isinstance(event, RunEvent)]
    assert (runs[-1].total_steps, runs[-1].epochs, runs[-1].workload) == (64, 4, "train.py")
    assert next(event.values for event in found if isinstance(event, ScalarsEvent)) == {"size": 0.0}
    assert sum(isinstance(event, MarkEvent) and event.kind == "evaluation" for event in found) == 4
    assert found[-1].status == "done" and found[-1].step == 64


@pytest.mark.long
def test_a_call_at_the_top_and_an_error(tmp_path: Path) -> None:
    run(
        tmp_path,
        status=1,
        before="import ndd_engine\nndd_engine.observe()",
        end="raise ValueError('too late')",
    )
    found = events(tmp_path, "train-001")
    assert found[-1].status == "failed" and "too late" in found[-1].reason and found[-1].step == 64


@pytest.mark.long
def test_it_never_stops_the_training(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file in the way")
    done = run(
        tmp_path,
        before="import ndd_engine\nseen = ndd_engine.observe('it')",
        end="seen.log(3, a=1); seen.close()",
    )
    assert "nothing is observed" in done.stderr
