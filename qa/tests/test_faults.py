"""The fault suite: every case can be configured, what counts as right, and how it goes on; and trials of nothing."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import LIMIT_S

from ndd_engine.config import read
from ndd_engine.config.workload_sections import WORKLOADS
from ndd_engine.diagnose import CAUSES
from ndd_engine.train.request import preflight
from qa.faults import matrix, suite
from qa.faults.cases import SEVERITIES, Case, chosen
from qa.faults.innocent import all_cases
from qa.faults.observed import neighbours
from qa.faults.outcome import Measured, Outcome
from qa.trials import nulls
from qa.trials.nulls import Null

CASES = all_cases(gpu=True)


def case_of(name: str) -> Case:
    (found,) = chosen(CASES, [name], [])
    return found


def test_the_cases_are_as_many_and_as_varied_as_required() -> None:
    kinds = Counter(case.kind for case in CASES)
    assert kinds["fault"] >= 36 and kinds["innocent"] >= 8 and kinds["healthy"] >= 4
    assert len({case.name for case in CASES}) == len(CASES)
    severities = Counter((case.fault, case.severity) for case in CASES if case.kind == "fault")
    faults = {fault for fault, _ in severities}
    assert all(len({severities[fault, severity] for severity in SEVERITIES}) == 1 for fault in faults)
    assert {case.workload for case in CASES if case.kind == "fault"} >= set(WORKLOADS)
    assert all(case.suspects for case in CASES if case.kind == "innocent")
    assert {cause for case in CASES for cause in (case.truth, *case.suspects)} <= set(CAUSES)
    assert {case.severity for case in chosen(CASES, ["gc:high"], ["own"])} == {"high"}
    with pytest.raises(ValueError, match="gremlins"):
        chosen(CASES, ["gremlins"], [])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_and_its_cure_can_be_configured(case: Case) -> None:
    draft = read(sets=case.all_sets, workload=case.workload_name)
    # As a run does it before it writes anything: the data has to be there too.
    config = draft.resolve() if "run.device=cuda" in case.sets else preflight(draft)
    assert config.workload.size != "auto", "the size of the model would depend on the machine"
    if case.cure:
        cured = read(sets=[*case.all_sets, *case.cure], workload=case.workload_name).resolve()
        assert cured != draft.resolve(), "the cure changes nothing"


# What is right.


def measured(ratio: float, reach: float = 0.02) -> Measured:
    verdict = "faster" if ratio > 1 else "slower"
    return Measured(("loader.cache=true",), verdict, ratio, ratio - reach, ratio + reach)


HEALTHY: dict[str, Any] = {"named": "healthy", "found": (("healthy", None),)}
FAULT = Outcome(
    case_of("fault-on-the-fly-high-finetune"), "on-the-fly", (("on-the-fly", 3.0), ("optimizer", 1.1)),
    fix=("loader.cache=true",), tried=measured(2.0), cured=measured(2.0),
)  # fmt: skip
MISSED = replace(FAULT, **HEALTHY, fix=(), tried=None)
INNOCENT = Outcome(case_of("innocent-clipping-summarise"), **HEALTHY)  # suspects: clip and sync
OTHER = replace(INNOCENT, named="few-threads", found=(("few-threads", 1.5),), fix=("run.threads=2",))
ACCUSED = replace(INNOCENT, found=(("healthy", None), ("clip", 1.2)))


@pytest.mark.parametrize(
    ("outcome", "right"),
    [
        (FAULT, True),
        (replace(FAULT, named="optimizer"), False),
        (replace(FAULT, error="it hung"), False),
        (MISSED, False),
        (replace(MISSED, cured=measured(1.03)), True),  # it costs almost nothing
        (replace(MISSED, cured=None), False),  # a cost that was not measured excuses nothing
        (INNOCENT, True),
        (ACCUSED, False),
        (replace(ACCUSED, found=(("healthy", None), ("clip", 1.02))), True),
        (replace(INNOCENT, named="clip", found=(("clip", None),), tried=measured(1.3)), False),
        (OTHER, False),
        (replace(OTHER, tried=measured(1.3)), True),  # a cause that nobody planted, and whose fix gains
        (replace(OTHER, tried=measured(1.01)), False),
    ],
)
def test_a_verdict_is_right_or_wrong(outcome: Outcome, right: bool) -> None:
    assert outcome.right is right
    assert Outcome.from_json(outcome.to_json()) == outcome


def test_a_fault_that_is_felt_owes_a_cure_by_what_was_proposed() -> None:
    assert FAULT.owes_a_cure and FAULT.cures
    assert not replace(FAULT, tried=measured(1.01)).cures
    assert not replace(FAULT, cured=measured(1.08)).owes_a_cure
    assert not replace(FAULT, case=case_of("fault-leak-high-own")).owes_a_cure
    # A change of code is proved by the case's own cure, if that is what was named.
    code = replace(FAULT, fix=(), tried=None)
    assert code.cures and not replace(code, named="optimizer").cures
    # Where stopping other processes is proposed before a setting, either may prove it.
    assert replace(FAULT, outside=True, tried=measured(1.01)).cures


def test_a_gain_beyond_the_ceiling_is_seen_beyond_its_interval_only() -> None:
    assert not FAULT.exceeded
    assert replace(FAULT, tried=measured(3.5)).exceeded
    assert not replace(FAULT, tried=measured(3.01)).exceeded
    # Also where the true cause is not the first one.
    assert replace(FAULT, named="optimizer", found=(("optimizer", 4.0), ("on-the-fly", 1.2))).exceeded


def test_the_targets_count_what_they_say() -> None:
    rows = matrix.targets([FAULT, MISSED, INNOCENT, ACCUSED]).rows
    assert [row[1:3] for row in rows[:4]] == [("1", "2"), ("1", "2"), ("1", "2"), ("0", "2")]
    assert [row[-1] for row in rows] == ["NOT REACHED"] * 3 + ["reached"] * 2
    assert [row[-1] for row in matrix.targets([FAULT, INNOCENT]).rows] == ["reached"] * 5


# The suite.


def test_an_interrupted_suite_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = chosen(CASES, ["healthy"], [])[:3]
    carried: list[str] = []

    def carry_out(_self: suite.Suite, case: Case) -> Outcome:
        carried.append(case.name)
        return Outcome(case, **HEALTHY)

    monkeypatch.setattr(suite.Suite, "carry_out", carry_out)
    work = suite.Suite(tmp_path)
    work.run(cases[:2], resume=False)
    with work.record.open("a") as file:
        file.write('{"case": "torn')  # as a killed suite leaves it
    outcomes = work.run(cases, resume=True)
    assert carried == [case.name for case in cases]
    assert [outcome.case for outcome in outcomes] == cases == [outcome.case for outcome in work.kept()]
    work.run(cases[:1], resume=False)
    assert len(work.kept()) == 1


@pytest.mark.long
def test_a_run_that_fails_says_where_its_output_is(tmp_path: Path) -> None:
    case = replace(case_of("healthy-eeg-eeg"), sets=("batch.micro=0",))
    outcome = suite.Suite(tmp_path).carry_out(case)
    assert not outcome.right and "run.log" in outcome.error and "batch.micro" in outcome.error


@pytest.mark.long
def test_neighbours_end_with_the_case_and_with_the_suite() -> None:
    with neighbours(1, 1) as pids:
        assert len(pids) == 1
        assert psutil.Process(pids[0]).is_running()
    assert not psutil.pid_exists(pids[0])
    program = (
        "from qa.faults.observed import neighbours\nimport os\n"
        "with neighbours(1) as pids:\n    print(pids[0], flush=True)\n    os._exit(0)\n"
    )
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, check=True, text=True
    )
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(int(killed.stdout)).wait(LIMIT_S)
        psutil.Process(int(killed.stdout))


# Trials of nothing.


def test_trials_without_effect_are_counted_and_continued(tmp_path: Path) -> None:
    every = [
        Null(0, "eeg", "no difference", 1.0, 0.99, 1.01, 40.0),
        Null(1, "chartext", "faster", 1.05, 1.03, 1.07, 30.0, restarts=False),
        Null(2, "eeg", "inconclusive", 1.0, 0.96, 1.04, 60.0),
        Null(3, "summarise", "failed: no memory"),
    ]
    made: list[int] = []

    def one(number: int) -> Null:
        made.append(number)
        return every[number]

    record = tmp_path / "nulls.jsonl"
    nulls.run(record, 2, False, one)
    assert nulls.run(record, 4, True, one) == every and made == [0, 1, 2, 3]
    assert [len(table.rows) for table in nulls.tables(every, "")] == [3, 2]
    table = nulls.table(every, "")
    row = dict(zip(table.columns, table.rows[-1], strict=True))
    assert (row["subject"], row["trials"], row["contains 1"], row["other"]) == ("all", "4", "2 of 3", "1")
    assert [row[name] for name in nulls.VERDICTS] == ["1", "0", "1", "1"]
    assert ["not reached" in note for note in table.notes[:3]] == [True, True, False]


def test_the_binomial_interval_is_the_exact_one() -> None:
    # Clopper and Pearson, by the beta distribution.
    assert nulls.binomial_interval(5, 100) == pytest.approx((0.016432, 0.112835), abs=1e-5)
    assert nulls.binomial_interval(0, 100) == pytest.approx((0.0, 0.036217), abs=1e-5)
    assert nulls.binomial_interval(10, 10)[1] == 1.0
