"""Whatever goes wrong in the observer, the script ends as it would without it."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from observed import SUBJECTS, recorded, run
from tests.tiers import few

from ndd_engine.script.records import Room
from ndd_watch import FOLDER, SITE

pytestmark = pytest.mark.long

BREAKS = Path(__file__).with_name("breaks.py")


@pytest.mark.parametrize("part", few([*"012345"], 2))
@pytest.mark.parametrize("call", ["1", pytest.param("3", marks=pytest.mark.slow)])
@pytest.mark.budget(30)
def test_an_error_in_any_function_that_a_hook_reaches_never_reaches_the_script(
    tmp_path: Path, call: str, part: str
) -> None:
    ran = run(
        tmp_path, str(BREAKS), call, part, "6", read=False, NDD_WATCH_PROFILE_S="0.01", NDD_WATCH_WINDOW_S="0.001",
        NDD_WATCH_CAPTURES=str(tmp_path),
    )  # fmt: skip
    assert ran.status == 0, ran.errors
    bare, *broken = map(json.loads, ran.out.splitlines())
    reached = {told["function"] for told in broken if told.get("hit")}
    # About as many as today: a test that reaches nothing shows nothing. Fewer are called three times.
    assert len(reached) >= (10 if call == "1" else 8), sorted(reached)
    wrong = [
        told for told in broken
        if told.get("died") or (told["loss"], told["steps"], told["errors"]) != (bare["loss"], bare["steps"], "")
    ]  # fmt: skip
    assert not wrong, [(told["function"], told["loss"], told["steps"], bare["loss"]) for told in wrong]


COUNTS = """
import os, sys
from common import *
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    optimizer.zero_grad(); model(torch.randn(4, 8)).sum().backward(); optimizer.step()
    os.write(1, b"%d " % (step + 1))
"""


@pytest.mark.promise
@pytest.mark.parametrize("times", [1, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_kill_costs_at_most_one_step(tmp_path: Path, times: int) -> None:
    moments = random.Random(0)
    for number in range(times):
        records = tmp_path / str(number)
        records.mkdir()
        with subprocess.Popen(
            [sys.executable, "-c", COUNTS], cwd=SUBJECTS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, FOLDER: str(records), "PYTHONPATH": str(SITE), "NDD_WATCH_WINDOW_S": "0.05"},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            process.stdout.read(1)
            time.sleep(moments.uniform(0.0, 0.3))
            process.kill()
            numbers = ("1" + process.stdout.read()).split()
        true = int(numbers[-1])
        ((_, found),) = recorded(records).items()
        told = sum(line["steps"] for line in found if line["type"] == "window")
        assert true <= told <= true + 1


def test_a_folder_that_cannot_be_written_costs_the_record_only(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("a file")
    ran = run(tmp_path, "plain.py", read=False)
    assert ran.status == 0 and ran.word("STEPS") == "40"
    assert "ndd" not in ran.errors


def test_a_process_that_may_write_no_file_takes_one_that_was_made_before(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))

    ran = run(tmp_path / "none", "plain.py", before=limit)
    assert ran.status == 0 and ran.word("STEPS") == "40" and not ran.records
    (tmp_path / "one" / "records").mkdir(parents=True)
    Room(tmp_path / "one" / "records", shared=False)
    ran = run(tmp_path / "one", "plain.py", before=limit)
    assert ran.status == 0 and sum(window["steps"] for window in ran.of("window")) == 40
