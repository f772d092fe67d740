"""Probing, verification and writing with real processes."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from situations import OPENED

from ndd_engine.errors import MachineError, NddError, UsageError
from ndd_engine.wizard.planner import Planner, WizardStoppedError
from ndd_engine.wizard.proposals import Answers
from ndd_engine.wizard.session import propose, to_verify, verify

NDD = ("workload.samples=400", "batch.sequence=8", "batch.micro=16", "run.device=cpu", "run.max_steps=20")
SMALL = ("workload.size=tiny", "run.device=cpu", "run.max_steps=20")
TOLD: list[str] = []


def tell(text: str, share: float) -> None:
    assert 0 <= share <= 1
    TOLD.append(text)


@pytest.mark.slow  # 15 s; tests of the command line cover most of it
def test_proposals_are_verified_in_processes_of_their_own() -> None:
    answers = Answers(workload="chartext", sets=SMALL, min_sequence=32)
    proposed = propose(answers, tell, threading.Event())
    assert {one.model.sequence for one in proposed.rows} == {64, 32}
    assert all(one.memory_bytes and one.step_s and not one.doubt for one in proposed.rows)
    chosen = to_verify(proposed, answers, 2)
    for one in verify(proposed.situation, answers, chosen, 20.0, tell, threading.Event()):
        assert one.measured is not None and one.measured.step_s
        # The benchmark measures the accuracy of predicted times.
        assert 0.5 < one.memory_bytes / one.measured.memory_bytes < 2


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


@pytest.mark.slow
@pytest.mark.long
def test_stopping_between_two_models_keeps_the_first() -> None:
    stop = threading.Event()
    answers = Answers(workload="eeg", sets=("workload.hidden=[8]", *NDD), min_sequence=4)
    proposed = propose(answers, tell, stop, lambda now: stop.set() if now.rows else None)
    assert {one.model.sequence for one in proposed.rows} == {8}


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
    sets = (
        f'workload.path=["{tmp_path}"]',
        "run.max_steps=5",
        "batch.micro=4",
        "batch.sequence=16",
        "run.device=cpu",
    )
    own = tmp_path / "temporary"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))  # separate from other tests
    proposed = propose(Answers(workload="dies:make", sets=sets, min_sequence=4), tell, threading.Event())
    why = {found.model.sequence: found.why for found in proposed.found}
    assert why.keys() == {16, 8, 4}
    assert "signal 9" in why[8] and not why[16] and not why[4]
    assert {one.model.sequence for one in proposed.rows} == {16, 4}
    assert not list(own.iterdir())


@pytest.mark.slow
@pytest.mark.long
def test_the_memory_is_that_of_the_configured_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ndd_engine.wizard.planner.free_memory", lambda: 3 << 30)
    monkeypatch.setattr("ndd_engine.hardware.gpus.free_memory", lambda: 80 << 30)  # such as of a GPU
    answers = Answers(workload="eeg", sets=("workload.hidden=[8]", *NDD))
    with Planner(answers, tell, threading.Event()) as planner:
        assert planner.open().free_bytes == pytest.approx(0.92 * (3 << 30), rel=0.01)


@pytest.mark.parametrize("free", [5 << 30, None])
def test_the_memory_of_a_gpu_is_what_the_probes_find(
    monkeypatch: pytest.MonkeyPatch, free: int | None
) -> None:
    """NVML may not list the GPU, nor report its memory: the process of the probes asks CUDA."""
    opened = replace(OPENED, device="cuda:0", device_name="GRID vGPU", free_bytes=free)
    monkeypatch.setattr(Planner, "_start", lambda self: None)
    monkeypatch.setattr(Planner, "_ask", lambda self, command: {"opened": asdict(opened)})
    answers = Answers(workload="chartext", sets=("workload.size=tiny", "run.device=auto"))
    with Planner(answers, tell, threading.Event()) as planner:
        if free is None:
            with pytest.raises(MachineError, match="--gpu"):
                planner.open()
            return
        assert planner.open().free_bytes == pytest.approx(0.92 * free, rel=0.01)


@pytest.mark.slow
@pytest.mark.long
def test_an_effective_batch_larger_than_the_data_is_rejected() -> None:
    answers = Answers(workload="eeg", sets=("workload.hidden=[8]", *NDD), effective_batch=100_000)
    with pytest.raises(UsageError, match="100,000"):
        propose(answers, tell, threading.Event())


@pytest.mark.long
def test_a_configured_size_keeps_its_batch_on_any_gpu() -> None:
    sets = ("workload.size=tiny", "precision.amp=bf16")
    proposed = propose(Answers(workload="chartext", sets=sets, gpu="H200"), tell, threading.Event())
    assert {one.batch.items for one in proposed.rows} == {16}


@pytest.mark.long
def test_more_memory_than_is_free_cannot_be_reserved() -> None:
    answers = Answers(workload="chartext", sets=SMALL, reserve_bytes=1 << 60)
    with pytest.raises(UsageError, match="are free"):
        propose(answers, tell, threading.Event())


@pytest.mark.long
def test_a_workload_that_cannot_be_opened_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def make(settings):\n    raise ValueError('no data\\x1b[1m')\n")
    answers = Answers(workload="broken:make", sets=(f'workload.path=["{tmp_path}"]', "run.max_steps=5"))
    with pytest.raises(NddError, match=r"broken\.py:2") as caught:
        propose(answers, tell, threading.Event())
    assert "\x1b" not in str(caught.value)
