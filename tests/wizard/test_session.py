"""Preparing the wizard: memory, batches and workloads that cannot be had; probing in processes, and stopping it."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from situations import OPENED

from ndd_engine.child import draft_of
from ndd_engine.errors import MachineError, NddError, UsageError
from ndd_engine.wizard.planner import Planner, Situation, WizardStoppedError
from ndd_engine.wizard.proposals import Answers
from ndd_engine.wizard.session import propose

NDD = ("workload.samples=400", "batch.sequence=8", "batch.micro=16", "run.device=cpu", "run.max_steps=20")
SMALL = ("workload.size=tiny", "run.device=cpu", "run.max_steps=20")


def tell(text: str, share: float) -> None:
    assert 0 <= share <= 1


def test_an_own_workload_without_a_length_is_planned_for_one_epoch() -> None:
    own = Answers(workload="mine:factory")
    assert own.assumes_length and own.draft().resolve().run.epochs == 1
    for given in (("run.max_steps=20",), ("run.epochs=3",)):
        assert not Answers(workload="mine:factory", sets=given).assumes_length
    assert not Answers(workload="chartext").assumes_length


@pytest.mark.long
def test_stopping_ends_probing() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(WizardStoppedError):
        propose(Answers(workload="chartext", sets=SMALL), tell, stop)


DIES = """
import os, signal
import torch
from torch import nn


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if Items.length == 8:
            os.kill(os.getpid(), signal.SIGKILL)  # like the OOM killer
        return torch.ones(Items.length), torch.ones(1)


def make(settings):
    Items.length = settings.sequence
    return {
        "model": nn.Linear(settings.sequence, 1), "train_data": Items(), "eval_data": Items(), "item": "row",
        "loss": lambda output, batch: (output - batch[1]).pow(2).mean(),
        "forward": lambda model, batch: model(batch[0]),
    }
"""


@pytest.mark.slow
def test_a_model_that_kills_the_probe_process_does_not_affect_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    small = ("run.max_steps=5", "batch.micro=4", "batch.sequence=16", "run.device=cpu")
    sets = (f'workload.path=["{tmp_path}"]', *small)
    own = tmp_path / "temporary"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))  # separate from other tests
    proposed = propose(Answers(workload="dies:make", sets=sets, min_sequence=4), tell, threading.Event())
    why = {found.model.sequence: found.why for found in proposed.found}
    assert why.keys() == {16, 8, 4}
    assert "signal 9" in why[8] and not why[16] and not why[4]
    assert {one.model.sequence for one in proposed.rows} == {16, 4}
    assert not list(own.iterdir())


def prepared(monkeypatch: pytest.MonkeyPatch, answers: Answers, **found: Any) -> Situation:
    """The situation without a process. found: what the process of the probes says."""
    opened = replace(OPENED, **found)
    monkeypatch.setattr(Planner, "_start", lambda self: None)
    monkeypatch.setattr(Planner, "_ask", lambda self, command: {"opened": asdict(opened)})
    with Planner(answers, tell, threading.Event()) as planner:
        return planner.open()


def test_a_size_whose_model_a_small_gpu_has_already_is_no_alternative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers(workload="summarise", sets=("run.max_steps=5",), gpu="RTX 4070 Laptop")
    small = prepared(monkeypatch, answers, size="guide").known_sizes
    large = prepared(monkeypatch, replace(answers, gpu="A100 80GB SXM"), size="guide").known_sizes
    assert "middle" in large and set(large) - set(small) == {"middle"}


def test_what_the_memory_of_a_gpu_sets_is_for_the_configured_size_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[dict[str, Any]] = []

    def ask(_planner: Planner, command: dict[str, Any]) -> dict[str, Any]:
        commands.append(command)
        return {"opened": asdict(replace(OPENED, size="guide"))}

    monkeypatch.setattr(Planner, "_start", lambda self: None)
    monkeypatch.setattr(Planner, "_ask", ask)
    answers = Answers(workload="summarise", sets=("run.max_steps=5",), gpu="RTX 4070 Laptop")
    with Planner(answers, tell, threading.Event()) as planner:
        planner.open()
    (opened,) = commands
    asked = draft_of(opened, opened["tier"]), draft_of(opened, ["workload.size=narrow"])
    assert [draft.resolve().value("workload.hidden") for draft in asked] == [224, 192]


def test_the_memory_is_that_of_the_configured_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ndd_engine.wizard.planner.free_memory", lambda: 3 << 30)
    answers = Answers(workload="chartext", sets=SMALL)
    assert prepared(monkeypatch, answers, free_bytes=80 << 30).free_bytes == pytest.approx(0.92 * (3 << 30))
    # Of a budget nothing is kept free.
    limited = replace(answers, budget_memory="2 GiB")
    assert prepared(monkeypatch, limited, free_bytes=80 << 30).free_bytes == 2 << 30
    # NVML may not list a GPU, nor report its memory: the process of the probes asks CUDA.
    gpu = {"device": "cuda:0", "device_name": "GRID vGPU"}
    answers = Answers(workload="chartext", sets=("workload.size=tiny", "run.device=auto"))
    found = prepared(monkeypatch, answers, **gpu, free_bytes=5 << 30)
    assert found.free_bytes == pytest.approx(0.92 * (5 << 30))
    with pytest.raises(MachineError, match="--gpu"):
        prepared(monkeypatch, answers, **gpu, free_bytes=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"effective_batch": 100_000}, "100,000.*only 1600"), ({"reserve_bytes": 1 << 60}, "are free")],
)
def test_more_than_there_is_is_rejected(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        prepared(monkeypatch, Answers(workload="chartext", sets=SMALL, **changes))


def test_a_configured_size_keeps_its_batch_on_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(workload="chartext", sets=("workload.size=tiny",), gpu="H200")
    assert prepared(monkeypatch, answers).config.batch.items == 16


@pytest.mark.long
def test_a_workload_that_cannot_be_opened_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def make(settings):\n    raise ValueError('no data\\x1b[1m')\n")
    answers = Answers(workload="broken:make", sets=(f'workload.path=["{tmp_path}"]', "run.max_steps=5"))
    with pytest.raises(NddError, match=r"broken\.py:2") as caught:
        propose(answers, tell, threading.Event())
    assert "\x1b" not in str(caught.value)
