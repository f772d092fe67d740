"""Trials of real runs in real processes: a planted fault is found, and every failure is a result."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from itertools import takewhile
from pathlib import Path

import pytest
from tests.waiting import children, lives, until
from trial_help import descendants, measured, planted

from ndd_engine.errors import ConfigError, UsageError
from ndd_engine.text import size
from ndd_engine.trial.request import Base, Progress, TrialRequest
from ndd_engine.trial.trial import run_trial

SLOW = {"sleep": 0.002}
FIXED = "workload.options.sleep=0.0"


@pytest.mark.slow
def test_a_planted_fault_taken_away_is_a_gain(tmp_path: Path) -> None:
    told: list[Progress] = []
    before = set(tmp_path.iterdir())
    event = measured(planted(tmp_path, **SLOW), FIXED, tell=told.append)
    assert event.verdict == "faster", event.text
    assert event.ratio is not None and event.low is not None and event.high is not None
    assert 2 < event.low <= event.ratio <= event.high
    assert event.abba_blocks >= 3
    assert re.match(r"faster [\d.]+x \(95 % CI [\d.]+ to [\d.]+\), \d+ ABBA blocks in ", event.text)
    assert event.break_even_steps is not None
    for side in (event.base, event.change):
        assert side["items_per_step"] == 4 and side["threads"] == 1
        assert 0 < side["step_s"] < 1 and side["items_per_s"] == pytest.approx(4 / side["step_s"])
        assert side["prepare_s"] > 0 and side["peak_bytes"] > 1 << 25
        assert len(side["losses"]) == 10
    # Other options are another workload to the comparison, though these give the same losses.
    assert event.base["losses"] == event.change["losses"]
    assert event.loss == "not comparable"
    stages = [progress.stage for progress in told]
    assert any(stage.startswith("preparing the candidate") for stage in stages) and "measuring" in stages
    assert told[-1].abba_blocks == event.abba_blocks and told[-1].ratio == pytest.approx(event.ratio)
    assert {path.name for path in set(tmp_path.iterdir()) - before} <= {
        "planted.py",
        "planted.toml",
        "__pycache__",
    }


@pytest.mark.slow
def test_a_setting_says_whether_it_took_effect_and_what_the_losses_did(tmp_path: Path) -> None:
    sets = ("loader.workers=1", "loader.persistent=true")
    event = measured(planted(tmp_path, count=2000, **SLOW), *sets, budget_s=20)
    assert event.verdict in ("faster", "no difference", "slower", "inconclusive")
    assert event.in_effect is True, event.not_in_effect
    assert (event.loss, event.change["not_in_effect"]) == ("same", [])


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "verdict", "words"),
    [
        ("huge", "out of memory", "tried to allocate"),
        ("killed", "out of memory", "killed by signal 9"),
    ],
)
def test_a_candidate_that_fails_is_a_result(tmp_path: Path, fault: str, verdict: str, words: str) -> None:
    event = measured(planted(tmp_path), f'workload.options.fault="{fault}"')
    assert event.verdict == verdict, event.text
    assert event.text.startswith(verdict) and words in event.text
    assert "console.log" not in event.text
    assert event.ratio is None and event.abba_blocks == 0


@pytest.mark.long
def test_a_baseline_that_fails_is_not_blamed_on_the_candidate(tmp_path: Path) -> None:
    event = measured(planted(tmp_path, fault="huge"), 'workload.options.fault=""')
    assert event.verdict == "failed"
    assert "the baseline itself fails: out of memory" in event.text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_memory_for_one_process_only_each_run_opens_its_own(tmp_path: Path) -> None:
    room = str(tmp_path / "room")
    stages: list[str] = []
    event = measured(
        planted(tmp_path, room=room, **SLOW), FIXED, budget_s=150, tell=lambda told: stages.append(told.stage)
    )
    assert event.verdict == "faster", event.text
    assert event.abba_blocks >= 3
    opened = [stage for index, stage in enumerate(stages) if stage != stages[index - 1]]
    assert opened.count("preparing the candidate") > 3 and opened.count("preparing the baseline") > 3


@pytest.mark.long
def test_a_budget_that_is_too_small_says_what_is_needed(tmp_path: Path) -> None:
    event = measured(planted(tmp_path), "batch.accumulation=2", budget_s=0.5)
    assert event.verdict == "inconclusive"
    assert "; raise --budget" in event.text
    assert event.ratio is None


@pytest.mark.long
def test_a_trial_can_be_stopped(tmp_path: Path) -> None:
    stop = threading.Event()

    def look(progress: Progress) -> None:
        if progress.stage == "measuring":
            stop.set()

    before = children()
    event = run_trial(TrialRequest(planted(tmp_path, **SLOW), ("batch.accumulation=2",)), look, stop)
    assert event.verdict == "stopped"
    assert event.text == "stopped before there was a result; peak memory {}, unchanged".format(
        size(event.change["peak_bytes"])
    )
    assert event.abba_blocks == 0 and event.change["prepare_s"] > 0
    assert children() <= before


@pytest.mark.slow
def test_an_interval_of_evaluations_or_checkpoints_is_verified(tmp_path: Path) -> None:
    stop = threading.Event()

    def look(progress: Progress) -> None:
        if progress.stage == "measuring":
            stop.set()

    for change in ("evaluate.every_steps=5", "checkpoint.every_epochs=0"):
        stop.clear()
        event = run_trial(TrialRequest(planted(tmp_path), (change,)), look, stop)
        assert event.in_effect is True, (change, event.text)


PARENT = """
import sys
from pathlib import Path
from ndd_engine.trial.request import Base, TrialRequest
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
            until(lambda: not any(map(lives, found)), 30)
            # Without its sides the trial starts again with one at a time.
            found = descendants(process.pid) if process.poll() is None else []
            process.kill()
            until(lambda: not any(map(lives, found)), 30)
            assert not list(Path(temporary).glob(".ndd-*")) or victim == "a side"
        finally:
            process.kill()
            process.communicate()


def test_what_cannot_be_tried_is_refused_before_anything_starts(tmp_path: Path) -> None:
    base = planted(tmp_path)
    with pytest.raises(UsageError, match="no settings to try"):
        measured(base)
    with pytest.raises(UsageError, match=r"batch\.micro=4: already set in planted\.toml"):
        measured(base, "batch.micro=4")
    with pytest.raises(ConfigError, match=r"batch\.mico.*did you mean micro"):
        measured(base, "batch.mico=4")
    with pytest.raises(UsageError, match="allowed: more than 0"):
        measured(base, "batch.micro=8", budget_s=0)
    with pytest.raises(ConfigError, match="there is no such workload"):
        measured(Base("x", None, "chartxt"), "batch.micro=8")
