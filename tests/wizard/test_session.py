"""The wizard on this machine: probed, verified and written, with real processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import tomli

from ndd_engine.config import read
from ndd_engine.errors import NddError, UsageError
from ndd_engine.wizard.answers import Answers
from ndd_engine.wizard.plan import StoppedError
from ndd_engine.wizard.session import best_measured, configuration, plan, to_verify, written, written_into
from ndd_engine.wizard.verify import verify

SMALL = ("workload.size=tiny", "run.device=cpu", "run.max_steps=20")
TOLD: list[str] = []


def tell(text: str, share: float) -> None:
    assert 0 <= share <= 1
    TOLD.append(text)


@pytest.mark.slow  # 15 s; the command line's test below shows most of it
def test_from_answers_to_a_file_that_trains(tmp_path: Path) -> None:
    answers = Answers(workload="chartext", sets=SMALL, shortest=32)
    planned = plan(answers, tell, threading.Event())
    assert {one.model.sequence for one in planned.rows} == {64, 32}
    assert all(one.batch.items == 16 for one in planned.rows)
    assert all(one.memory_bytes and one.step_s and not one.doubt for one in planned.rows)
    chosen = to_verify(planned, answers, 2)
    measured = verify(planned.situation, answers, chosen, 20.0, tell, threading.Event())
    for one in measured:
        assert one.measured is not None and one.measured.step_s is not None
        # How good a prediction of time is, the benchmark tells.
        assert one.step_s and one.measured.step_s
        assert 0.5 < one.memory_bytes / one.measured.memory_bytes < 2
    best = best_measured(measured, answers)
    assert best in measured
    path = tmp_path / "wizard.toml"
    path.write_text(written(answers, planned.situation, best))
    config = read(path).resolve()
    assert config.batch.micro == best.batch.micro
    assert config == configuration(answers, best).model_copy(update={"run": config.run})
    text = path.read_text()
    assert "measured" in text and "predicted" in text
    theirs = tmp_path / "mine.toml"
    theirs.write_text('# mine\n[workload]\nname = "chartext"\nsize = "tiny" # small\n[run]\nmax_steps = 20\n')
    changed = written_into(Answers(config=theirs, sets=SMALL), planned.situation, best, theirs)
    assert changed.startswith("# mine\n")
    assert tomli.loads(changed)["batch"]["micro"] == best.batch.micro


def test_stopping_ends_the_probes() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        plan(Answers(workload="chartext", sets=SMALL), tell, stop)


def test_more_memory_than_there_is_cannot_be_left_free() -> None:
    answers = Answers(workload="chartext", sets=SMALL, leave_bytes=1 << 60)
    with pytest.raises(UsageError, match="are free"):
        plan(answers, tell, threading.Event())


def test_a_workload_that_cannot_be_opened_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def make(settings):\n    raise ValueError('no data\\x1b[1m')\n")
    answers = Answers(workload="broken:make", sets=(f'workload.path=["{tmp_path}"]', "run.max_steps=5"))
    with pytest.raises(NddError, match=r"broken.py:2.*no data") as caught:
        plan(answers, tell, threading.Event())
    assert "\x1b" not in str(caught.value)
