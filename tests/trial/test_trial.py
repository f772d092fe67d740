"""Trials of real runs in real processes: a planted fault is found, also with several ranks, and failures are results.

How the budget is used, what fails later and stops are in test_simulated_trials.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tests.cli.program import call
from tests.tiers import few
from tests.waiting import LIMIT_S, lives, until
from trial_help import descendants, measured, planted, with_lengths

from ndd_engine.config import Config, read
from ndd_engine.errors import UsageError
from ndd_engine.run.run import Run
from ndd_engine.train.prepare import prepare_run
from ndd_engine.train.request import RunRequest
from ndd_engine.train.step.optimizers import Precision, make_precision, set_tf32
from ndd_engine.train.training_run import TrainingRun
from ndd_engine.trial import side as side_module
from ndd_engine.trial.estimates import METHOD
from ndd_engine.trial.outcome import Base, Parts, Progress, SideFacts
from ndd_engine.trial.side import OwnTrainer
from ndd_watch.trying import gate


@pytest.mark.long
@pytest.mark.promise
def test_a_planted_fault_taken_away_is_a_gain(tmp_path: Path) -> None:
    """Items take long to make, by a clock that the test moves; workers make them while the model computes."""
    told: list[Progress] = []
    base = planted(tmp_path, sleep=0.02, step=0.01)
    event = measured(base, "loader.workers=1", "loader.persistent=true", tell=told.append)
    assert (event.verdict, event.method, event.pairs) == ("faster", METHOD, 0), event.text
    # Four items of 20 ms in a step of 10 ms.
    assert event.ratio == pytest.approx(9) and event.low == pytest.approx(9) == event.high
    for side, step_s in ((event.base, 0.09), (event.change, 0.01)):
        assert side["items_per_step"] == 4 and side["threads"] == 1
        assert side["step_s"] == pytest.approx(step_s) and side["items_per_s"] == pytest.approx(4 / step_s)
        assert side["prepare_s"] > 0
    assert event.abba_blocks >= 3 and event.break_even_steps is not None
    assert event.in_effect is True and event.change["not_in_effect"] == []
    # From the same state and batches.
    assert event.loss == "same" and len(event.base["losses"]) >= 2
    assert event.change["peak_bytes"] > event.base["peak_bytes"] > 1 << 25
    assert told[-1].abba_blocks == event.abba_blocks and told[-1].ratio == pytest.approx(event.ratio)


@pytest.mark.slow
def test_pairs_of_processes_show_what_another_workload_gains(tmp_path: Path) -> None:
    told: list[Progress] = []
    base = planted(tmp_path, sleep=0.02, step=0.01)
    event = measured(base, "workload.options.sleep=0.0", tell=told.append)
    assert event.verdict == "faster" and event.pairs >= 1, event.text
    assert event.ratio == pytest.approx(9)
    for side in (event.base, event.change):
        assert side["peak_bytes"] > 1 << 25 and len(side["losses"]) == 10
    # Other options are another workload to the comparison, though these give the same losses.
    assert event.base["losses"] == event.change["losses"]
    assert event.loss == "not comparable"
    assert any("candidate" in progress.stage for progress in told)
    written = {path.name for path in tmp_path.iterdir()}
    assert written <= {"planted.py", "planted.toml", "__pycache__"}


@pytest.mark.slow
def test_the_precision_is_switched_and_verified() -> None:
    sets = ("run.epochs=100", "run.device=cpu", "workload.size=mini", "run.threads=1")
    event = measured(Base("it", None, "chartext", sets), "precision.amp=bf16", budget_s=20.0)
    assert event.method == METHOD and event.in_effect is True, event.text
    assert event.loss == "close", event.loss_text
    # What one side needs cannot be told from what the other one did.
    assert event.base["peak_bytes"] is None and event.change["peak_bytes"] is None


@pytest.mark.long
@pytest.mark.parametrize("fault", few(["huge", "killed"], 1))
def test_a_candidate_that_fails_is_a_result(tmp_path: Path, fault: str) -> None:
    event = measured(planted(tmp_path), f'workload.options.fault="{fault}"')
    assert event.verdict == "out of memory", event.text
    assert "console.log" not in event.text
    assert event.ratio is None and event.abba_blocks == 0


PARENT = """
import sys
from pathlib import Path
from ndd_engine.trial.outcome import Base, TrialRequest
from ndd_engine.trial.trial import run_trial
base = Base("planted", Path(sys.argv[1]), None, ("workload.options.sleep=0.002",))
request = TrialRequest(base, ("loader.workers=1",), 1000.0, restarts=sys.argv[2] == "2")
print(run_trial(request, lambda told: print(told.stage, told.abba_blocks, flush=True)).text)
"""


@pytest.mark.long
@pytest.mark.promise
@pytest.mark.parametrize(
    ("victim", "processes"),
    [
        ("the trial", 1),
        pytest.param("the trial", 2, marks=pytest.mark.slow),
        pytest.param("a side", 2, marks=pytest.mark.slow),
    ],
)
def test_kill_9_leaves_nothing_behind(tmp_path: Path, victim: str, processes: int) -> None:
    planted(tmp_path)
    # Temporary folders lie here, so that what is left of them can be seen; a short path, as sockets lie there too.
    with tempfile.TemporaryDirectory(prefix="ndd-test-", dir="/tmp") as temporary:
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(tmp_path / "planted.toml"), str(processes)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "TMPDIR": temporary},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            # The loader worker is stopped in every other run.
            lines = list(takewhile(lambda line: not line.startswith("measuring"), process.stdout))
            assert process.poll() is None, lines
            found = descendants(process.pid)
            direct = [child for child in found if child.ppid() == process.pid]
            assert len(direct) == processes and len(found) > processes
            for each in [process] if victim == "the trial" else direct:
                each.send_signal(signal.SIGKILL)
            until(lambda: not any(map(lives, found)))
            # Without its sides the trial starts again with one at a time.
            found = descendants(process.pid) if process.poll() is None else []
            process.kill()
            until(lambda: not any(map(lives, found)))
            assert not list(Path(temporary).glob(".ndd-*")) or victim == "a side"
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("sets", "budget_s", "named"),
    [
        ((), 120.0, "settings"),
        (("batch.micro=4",), 120.0, r"batch\.micro=4"),  # already set
        (("batch.mico=4",), 120.0, r"batch\.mico"),
        (("batch.micro=8",), 0.0, "more than 0"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_starts(
    tmp_path: Path, sets: tuple[str, ...], budget_s: float, named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        measured(planted(tmp_path), *sets, budget_s=budget_s)


def test_each_side_warms_up_with_its_own_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # TF32 is a switch of the process (`set_float32_matmul_precision`), and preparing the candidate sets it. On the CPU
    # nothing sets it: the two functions that do so on a GPU do it here, too.
    monkeypatch.delitem(sys.modules, "planted", raising=False)  # that of another test in this process

    def made(config: Config, device: torch.device) -> Precision:
        set_tf32(config.precision.tf32)
        return make_precision(config, device)

    base = planted(tmp_path)
    draft = read(base.config, ["precision.tf32=true"], None)
    training = TrainingRun(RunRequest(draft, tmp_path / "runs", probes=False))
    run = Run.open(training)
    try:
        prepared = prepare_run(training.opened)
        prepared.sampler.stop()
        loop, switch, step = prepared.loop, prepared.loop.switch, prepared.loop.stepper.step

        def switched(config: Config, *others: Any) -> None:
            set_tf32(config.precision.tf32)
            switch(config, *others)

        monkeypatch.setattr(loop, "switch", switched)
        monkeypatch.setattr(side_module, "make_precision", made)
        pipe = SimpleNamespace(tell=lambda _: None)
        side: Any = SimpleNamespace(facts=SideFacts(), parts=Parts(), workers=(), pipe=pipe)
        command: dict[str, Any] = {
            "config": base.config, "sets": [], "workload": None, "overrides": None,
            "change": {"sets": ["precision.tf32=false"]},
        }  # fmt: skip
        set_tf32(True)  # as the preparation of the baseline leaves it
        own = OwnTrainer(side, training, prepared, 0.0, command)
        seen: list[tuple[int, str]] = []

        def noted(*given: Any) -> Any:
            seen.append((own._current, torch.get_float32_matmul_precision()))
            return step(*given)

        monkeypatch.setattr(loop.stepper, "step", noted)
        command = {"do": "train", "lead": 0, "steps": 4, "within": False, "measured": False}
        commands = iter([{**command, "side": index} for index in (0, 1, 1, 0)] + [{"do": "facts"}])
        answers: list[dict[str, Any]] = []
        loop.gate = gate(own, lambda: next(commands), answers.append)
        with pytest.raises(RuntimeError, match="StopIteration"):  # there is no further command
            loop.run()
    finally:
        run.close()
        set_tf32(False)
        torch.backends.cudnn.allow_tf32 = True  # torch's default
    assert seen == [(0, "high")] * 4 + [(1, "highest")] * 8 + [(0, "high")] * 4
    first, second = answers[-1]["sides"]
    # From the same state, after the other side has trained.
    assert len(first["losses"]) == 4 and first["losses"] == second["losses"][:4]


# Several ranks.


def shared(folder: Path) -> Base:
    base = planted(folder, count=4096)
    return replace(base, sets=(*base.sets, "parallel.ranks=2", "batch.micro=8"))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.budget(60)
def test_a_setting_of_the_exchange_is_measured_with_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_lengths(monkeypatch, 1.0, 1.25)
    event = measured(shared(tmp_path), "parallel.bucket_mb=100")
    assert event.ratio is not None and event.pairs >= 1, event.text
    for side in (event.base, event.change):
        assert side["ranks"] == 2 and len(side["rank_peaks"]) == 2
        assert side["items_per_step"] == 16 and len(side["losses"]) >= 2
        assert side["parts_ns"]["exchange"] > 0 and side["parts_ns"]["forward"] > 0
    assert event.loss in ("same", "close"), event.loss_text
    assert event.in_effect is not False


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("fault", "verdict"),
    few([("huge", "out of memory"), ("broken", "failed"), ("killed", "out of memory")], 1),
)
@pytest.mark.budget(40)
def test_the_rank_that_fails_is_named(tmp_path: Path, fault: str, verdict: str) -> None:
    event = measured(shared(tmp_path), f'workload.options.fault="{fault}"')
    assert (event.verdict, "rank 1: " in event.text) == (verdict, True), event.text


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.budget(60)
def test_two_ranks_against_one_on_the_command_line(tmp_path: Path) -> None:
    planted(tmp_path)
    done = call("scaling", "planted.toml", "--ranks", "1,2", "--budget", "120", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first, second = found["rows"]
    assert found["scaling"] == "weak" and first["effective_batch"] * 2 == second["effective_batch"] == 8
    assert 0 < second["efficiency_low"] <= second["efficiency"] <= second["efficiency_high"]
    assert second["exchange_s"] > 0 and len(second["rank_peak_bytes"]) == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.budget(30)
@pytest.mark.parametrize("number", few([signal.SIGINT, signal.SIGKILL], 1))
def test_ctrl_c_and_kill_of_scaling_leave_no_rank(tmp_path: Path, number: signal.Signals) -> None:
    planted(tmp_path)
    words = ["-m", "ndd_console", "scaling", "planted.toml", "--ranks", "1,2", "--budget", "300"]
    process = subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    next(line for line in process.stderr if "measuring" in line and "ABBA" in line)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 3
    process.send_signal(number)
    out, _ = process.communicate(timeout=LIMIT_S)
    if number == signal.SIGINT:  # what is known is printed
        assert process.returncode == 130 and "1 rank" in out and "2 ranks" in out
    assert not psutil.wait_procs(ranks, 10)[1]
