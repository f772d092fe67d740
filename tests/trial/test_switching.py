"""Trials in one process that switches between both sides."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from trial_help import measured, planted

from ndd_engine.config import Config, read
from ndd_engine.train.prepare import prepare_run
from ndd_engine.train.run import Run, RunRequest
from ndd_engine.train.step.precision import Precision, make_precision, set_tf32
from ndd_engine.trial import switching
from ndd_engine.trial.request import Base
from ndd_engine.trial.side import SideFacts
from ndd_engine.trial.switching import SwitchingBlocks
from ndd_engine.trial.toggles import METHOD


@pytest.mark.long
def test_workers_are_switched_with_their_own_loaders(tmp_path: Path) -> None:
    seen: set[int] = set()

    def tell(_: object) -> None:
        processes = psutil.Process().children(recursive=True)
        seen.add(
            sum(
                "ndd_engine.trial.side" in " ".join(process.cmdline())
                for process in processes
                if alive(process)
            )
        )

    base = planted(tmp_path, sleep=0.002)
    event = measured(base, "loader.workers=2", "loader.persistent=true", budget_s=20.0, tell=tell)
    assert event.method == METHOD and event.pairs == 0, event.text
    assert event.ratio is not None, event.text
    assert event.in_effect is True and "both sides in one process" in event.text
    # From the same state and batches.
    assert event.loss == "same" and len(event.base["losses"]) >= 2
    assert event.change["peak_bytes"] > event.base["peak_bytes"] > 1 << 25
    assert event.change["prepare_s"] > 0 < event.base["prepare_s"]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE and bool(process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.slow
def test_the_precision_is_switched_and_verified() -> None:
    base = Base(
        "it", None, "chartext", ("run.epochs=100", "run.device=cpu", "workload.size=mini", "run.threads=1")
    )
    event = measured(base, "precision.amp=bf16", budget_s=20.0)
    assert event.method == METHOD and event.in_effect is True, event.text
    assert event.loss == "close", event.loss_text
    # What one side needs cannot be told from what the other one did.
    assert event.base["peak_bytes"] is None and event.change["peak_bytes"] is None


def test_each_side_warms_up_with_its_own_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # TF32 is a switch of the process (`set_float32_matmul_precision`), and preparing the candidate sets it. On the CPU
    # nothing sets it: the two functions that do so on a GPU do it here, too.
    monkeypatch.delitem(sys.modules, "planted", raising=False)  # that of another test in this process

    def made(config: Config, device: torch.device) -> Precision:
        set_tf32(config.precision.tf32)
        return make_precision(config, device)

    base = planted(tmp_path)
    draft = read(base.config, ["precision.tf32=true"], None)
    run = Run.open(RunRequest(draft, tmp_path / "runs", probes=False))
    try:
        prepared = prepare_run(run)
        prepared.sampler.stop()
        loop, switch = prepared.loop, prepared.loop.switch

        def switched(config: Config, precision: Precision) -> None:
            set_tf32(config.precision.tf32)
            switch(config, precision)

        monkeypatch.setattr(loop, "switch", switched)
        monkeypatch.setattr(switching, "make_precision", made)
        side: Any = SimpleNamespace(
            facts=SideFacts(), workers=(), hear=lambda *_: None, pipe=SimpleNamespace(tell=lambda _: None)
        )
        command: dict[str, Any] = {
            "config": base.config, "sets": [], "workload": None, "overrides": None, "warmup_s": 1.0,
            "change": {"sets": ["precision.tf32=false"]},
        }  # fmt: skip
        set_tf32(True)  # as the preparation of the baseline leaves it
        blocks = SwitchingBlocks(side, run, prepared, 0.0, command)
        seen: list[tuple[int, str]] = []
        step = blocks._step

        def noted(*given: Any) -> Any:
            seen.append((blocks._current, torch.get_float32_matmul_precision()))
            return step(*given)

        monkeypatch.setattr(blocks, "_step", noted)
        blocks._before(0.0)
        before = [list(one.facts.losses) for one in blocks._sides]
        blocks._before(0.0)  # from the same state, after the other side has trained
    finally:
        run.close()
        set_tf32(False)
        torch.backends.cudnn.allow_tf32 = True  # torch's default
    assert set(seen) == {(0, "high"), (1, "highest")}
    assert [one.facts.losses for one in blocks._sides] == before


@pytest.mark.long
def test_a_side_that_fails_is_named_by_processes_of_its_own(tmp_path: Path) -> None:
    event = measured(planted(tmp_path, fault="broken"), "log.every_steps=1", budget_s=20.0)
    assert event.verdict == "failed" and "this model is broken" in event.text and event.pairs == 0


@pytest.mark.slow
def test_stopped_workers_of_both_sides_end_with_a_killed_process(tmp_path: Path) -> None:
    killed: list[int] = []

    def tell(progress: object) -> None:
        if killed or getattr(progress, "abba_blocks", 0) < 2:
            return
        for child in psutil.Process().children():
            if "ndd_engine.trial.side" in " ".join(child.cmdline()):
                killed.append(child.pid)
                os.kill(child.pid, signal.SIGKILL)

    base = planted(tmp_path, sleep=0.001)
    # `measured` asserts that no process is left.
    event = measured(base, "loader.workers=2", budget_s=15.0, tell=tell)
    assert killed and event.verdict in (
        "faster",
        "slower",
        "no difference",
        "inconclusive",
        "failed",
        "out of memory",
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "change", [pytest.param("loader.workers=1", marks=pytest.mark.slow), "run.gc_every_steps=5"]
)
def test_short_epochs_are_no_problem(tmp_path: Path, change: str) -> None:
    event = measured(planted(tmp_path, count=12, sleep=0.001), change, budget_s=8.0)
    assert event.method == METHOD and event.ratio is not None and event.abba_blocks >= 2, event.text
