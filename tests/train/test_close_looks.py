"""What a run of one's own does without need is seen in profiled steps of real trainings; their twins are silent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train_help import Result, Trainer

from ndd_engine.diagnose import diagnose
from ndd_engine.measure import capture, close_looks
from ndd_engine.record.events import FunctionsEvent
from ndd_watch.slowing import RETAINED_STEPS

SOURCE = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self, rows, sparse, tied):
        super().__init__()
        self.table = nn.Embedding(rows, 8, sparse=sparse)
        self.out = nn.Linear(8, 1)
        self.tied = tied

    def forward(self, x):
        vectors = self.table(x).mean(1)
        return (vectors @ self.table.weight.t()).mean(1, True) if self.tied else self.out(vectors)


def factory(settings, rows=5000, sparse=False, tied=False, keep=None, both=False, anomaly=False):
    torch.manual_seed(0)
    x, y = torch.randint(0, rows, (400, 2)), torch.rand(400, 1)
    model = Net(rows, sparse, tied)
    parts = {"model": model, "train_data": TensorDataset(x, y), "loss": lambda out, b: (out - b[1]).square().mean()}
    if sparse:
        parts["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.01)
    if anomaly:
        torch.autograd.set_detect_anomaly(True)
    if keep is not None:
        def step(batch, train):
            loss = (train.model(batch[0]) - batch[1]).square().mean()
            loss.backward(retain_graph=keep)
            if both:
                loss.backward()
            train.update()
            return loss
        parts["step"] = step
    return parts


def made(**more):
    return lambda settings: factory(settings, **more)


"""
KINDS = {
    "dense": "made()", "few_rows": "made(rows=50)", "sparse": "made(sparse=True)", "tied": "made(tied=True)",
    "keeps": "made(rows=50, keep=True)", "drops": "made(rows=50, keep=False)",
    "needs": "made(rows=50, keep=True, both=True)", "anomaly": "made(rows=50, anomaly=True)",
    "own_step": "made(keep=False)",
}  # fmt: skip
RETAINS = SOURCE.splitlines().index("            loss.backward(retain_graph=keep)") + 1


@pytest.fixture
def train(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trains a kind; the second step and every twelfth one after it is profiled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(capture, "FIRST_S", 0.0)
    monkeypatch.setattr(capture, "FIRST_STEPS", 2)
    monkeypatch.setattr(capture, "BETWEEN_STEPS", RETAINED_STEPS + 4)
    monkeypatch.setattr(capture.FunctionProfiles, "_wait", lambda self: setattr(self, "due_ns", 0))
    # Other tests of this process may have compiled something.
    monkeypatch.setattr(close_looks, "_compiled", lambda: False)
    sys.modules.pop("rows_data", None)
    (tmp_path / "rows_data.py").write_text(
        SOURCE + "".join(f"{kind} = {call}\n" for kind, call in KINDS.items())
    )
    before = torch.autograd.backward.__code__

    def run(kind: str) -> Result:
        quiet = ("evaluate.at_end=false", "evaluate.every_epochs=0", "checkpoint.at_end=false")
        fixed = ("batch.micro=4", "run.threads=1", "run.max_steps=40", *quiet)
        result = trainer.train(f"workload.name=rows_data:{kind}", "checkpoint.every_epochs=0", *fixed)
        assert result.end.status == "done", result.end
        return result

    yield run
    torch.autograd.set_detect_anomaly(False)
    sys.modules.pop("rows_data", None)
    assert torch.autograd.backward.__code__ is before


def seen(result: Result) -> list[FunctionsEvent]:
    return [event for event in result.events if isinstance(event, FunctionsEvent)]


@pytest.mark.parametrize("kind", ["dense", "own_step"])
def test_a_table_of_which_few_rows_are_read_is_seen(train: Any, kind: str) -> None:
    (found, *_) = seen(train(kind))[1:]
    (table,) = found.tables
    assert table[:5] == ("Net.table", "Embedding", 5000, 8, 8) and table[6] == "AdamW"


@pytest.mark.parametrize("kind", ["few_rows", "sparse", "tied"])
def test_a_table_whose_rows_are_needed_is_not(train: Any, kind: str) -> None:
    events = seen(train(kind))
    assert len(events) > 1 and not any(event.tables for event in events)
    # Hooks that were there for a step are gone.
    assert not any(key.startswith("hooks:") for key in events[-1].sizes)


@pytest.mark.parametrize(
    ("kind", "told"), [("keeps", True), ("drops", False), ("needs", False), ("dense", False)]
)
def test_graphs_that_a_step_of_ones_own_keeps_are_seen(train: Any, kind: str, told: bool) -> None:
    result = train(kind)
    where = {event.retains for event in seen(result)} - {None}
    assert where == ({("rows_data.py", RETAINS)} if told else set())
    causes = {item.cause: item for item in diagnose(result.snapshot, few_steps=True)}
    assert ("retain-graph" in causes) is told
    if told:
        assert causes["retain-graph"].changes[0].where == f"rows_data.py:{RETAINS}"


@pytest.mark.parametrize("kind", ["anomaly", "few_rows"])
def test_anomaly_detection_is_seen(train: Any, kind: str) -> None:
    assert {event.anomaly for event in seen(train(kind))} == {kind == "anomaly"}
