"""The fault suite's own arithmetic: correct, cured, false positives; and that every case can be configured."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ndd_engine.config import read
from ndd_engine.config.workload_sections import WORKLOADS
from ndd_engine.train.preflight import preflight
from qa.faults import matrix, null, suite
from qa.faults.cases import SEVERITIES, Case, chosen, only_last
from qa.faults.catalogue import all_cases
from qa.faults.outcome import Counts, Measured, Outcome, same_change
from qa.faults.plants import neighbours, write_module

CASES = all_cases()


def measured(ratio: float, reach: float = 0.02, sets: tuple[str, ...] = ("loader.cache=true",)) -> Measured:
    return Measured(
        sets, "faster" if ratio > 1 else "slower", ratio, ratio - reach, ratio + reach, 10.0, "text"
    )


FAULT = Outcome(
    "a", "fault", "on-the-fly", "high", "finetune", "on-the-fly", named="on-the-fly",
    found=(("on-the-fly", 3.0), ("optimizer", 1.1)), fix=("loader.cache=true",),
    tried=measured(2.0), cured=measured(2.0),
)  # fmt: skip
INNOCENT = Outcome(
    "b", "innocent", "clipping", "", "eeg", "healthy", named="healthy", found=(("healthy", None),),
    suspects=("clip", "sync"),
)  # fmt: skip


# The cases.


def test_the_cases_are_as_many_and_as_varied_as_required() -> None:
    kinds = Counter(case.kind for case in CASES)
    assert kinds["fault"] >= 24
    assert kinds["innocent"] >= 8
    assert kinds["healthy"] >= 4
    assert len({case.name for case in CASES}) == len(CASES)
    severities = Counter((case.fault, case.severity) for case in CASES if case.kind == "fault")
    faults = {fault for fault, _ in severities}
    assert all(len({severities[fault, severity] for severity in SEVERITIES}) == 1 for fault in faults)
    assert {case.workload for case in CASES if case.kind == "fault"} >= set(WORKLOADS)
    assert all(case.suspects for case in CASES if case.kind == "innocent")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_and_its_cure_can_be_configured(case: Case, tmp_path: Path) -> None:
    write_module(tmp_path)
    sets = case.all_sets(tmp_path)
    # As a run does it before it writes anything: the data has to be there too.
    config = preflight(read(sets=sets, workload=case.workload_name))
    assert config.workload.name == case.workload_name
    assert config.workload.size != "auto", "the size of the model would depend on the machine"
    if case.cure:
        cured = preflight(read(sets=[*sets, *case.cure], workload=case.workload_name))
        assert cured != config, "the cure changes nothing"


def test_a_case_with_a_cause_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown cause gremlins"):
        Case("fault", "gremlins", "low", "eeg", "", ())


def test_cases_are_chosen_by_fault_severity_kind_and_workload() -> None:
    assert {case.fault for case in chosen(CASES, ["gc"], [])} == {"gc"}
    assert [case.severity for case in chosen(CASES, ["gc:high"], [])] == ["high"]
    assert {case.kind for case in chosen(CASES, ["healthy"], [])} == {"healthy"}
    assert {case.workload for case in chosen(CASES, [], ["finetune"])} == {"finetune"}
    assert len(chosen(CASES, [], [])) == len(CASES)
    with pytest.raises(ValueError, match="unknown case gremlins"):
        chosen(CASES, ["gremlins"], [])


def test_the_value_that_is_given_last_counts() -> None:
    assert only_last(["a.b=1", "a.c=2", "a.b=3"]) == ("a.b=3", "a.c=2")
    assert same_change(['loader.fetch="auto"'], ["loader.fetch=auto"])
    assert not same_change(["loader.workers=0"], ["loader.workers=0", "loader.cache=true"])


# What is right.


def test_a_named_fault_is_right_and_another_cause_is_wrong() -> None:
    assert FAULT.right
    other = replace(FAULT, named="optimizer")
    assert not other.right
    assert not replace(FAULT, error="it hung").right


def test_healthy_is_right_only_where_the_fault_costs_almost_nothing() -> None:
    missed = replace(FAULT, named="healthy", found=(("healthy", None),), fix=(), tried=None)
    assert not missed.right
    assert replace(missed, cured=measured(1.03)).right
    assert not replace(missed, cured=None).right, "a cost that was not measured excuses nothing"


def test_a_suspect_with_a_ceiling_that_matters_is_a_false_positive() -> None:
    assert INNOCENT.right
    assert not INNOCENT.charges
    accused = replace(INNOCENT, found=(("healthy", None), ("clip", 1.2)))
    assert accused.charges == ("clip",)
    assert not accused.right
    assert replace(INNOCENT, found=(("healthy", None), ("clip", 1.02))).right
    assert replace(INNOCENT, suspects=("leak",), named="leak", found=(("leak", None),)).charges == ("leak",)


def test_another_verdict_without_a_fault_has_to_be_proved() -> None:
    other = replace(INNOCENT, named="few-threads", found=(("few-threads", 1.5),), fix=("run.threads=2",))
    assert other.charges == ("few-threads",)
    assert replace(other, tried=measured(1.3)).right
    assert not replace(other, tried=measured(1.01)).right
    # A suspect stays one, whatever a trial says.
    assert not replace(other, suspects=("few-threads",), tried=measured(1.3)).right


def test_a_fault_that_is_felt_owes_a_cure_by_what_was_proposed() -> None:
    assert FAULT.owes_a_cure
    assert FAULT.cures
    assert not replace(FAULT, tried=measured(1.01)).cures
    assert not replace(FAULT, cured=measured(1.08)).owes_a_cure
    assert not replace(FAULT, speed=False).owes_a_cure
    # A change of code is proved by the case's own cure, if that is what was named.
    code = replace(FAULT, fix=(), tried=None)
    assert code.cures
    assert not replace(code, named="optimizer").cures
    # Where stopping other processes is proposed before a setting, either may prove it.
    assert replace(FAULT, outside=True, tried=measured(1.01)).cures


def test_a_gain_beyond_the_ceiling_is_seen_beyond_its_interval_only() -> None:
    assert not FAULT.exceeded
    assert replace(FAULT, tried=measured(3.5)).exceeded
    assert not replace(FAULT, tried=measured(3.01)).exceeded
    # Also where the true cause is not the first one.
    later = replace(FAULT, named="optimizer", found=(("optimizer", 4.0), ("on-the-fly", 1.2)))
    assert later.exceeded


def test_an_outcome_comes_back_from_disk_as_it_was() -> None:
    for outcome in (FAULT, INNOCENT, replace(FAULT, error="it hung", tried=None)):
        assert Outcome.from_json(outcome.to_json()) == outcome


def test_the_targets_count_what_they_say() -> None:
    missed = replace(FAULT, named="healthy", found=(("healthy", None),), fix=(), tried=None)
    guilty = replace(INNOCENT, found=(("healthy", None), ("clip", 1.2)))
    counts = Counts([FAULT, missed, INNOCENT, guilty])
    assert counts.first == (1, 2)
    assert counts.accusations == (1, 2)
    assert counts.cured == (1, 2)
    assert counts.exceeded == (0, 2)
    rows = matrix.targets([FAULT, missed, INNOCENT, guilty]).rows
    assert [row[-1] for row in rows] == ["NOT REACHED"] * 3 + ["reached"] * 2
    assert [row[-1] for row in matrix.targets([FAULT, INNOCENT]).rows] == ["reached"] * 5


def test_the_confusion_matrix_holds_every_case_once() -> None:
    table = matrix.confusion([FAULT, FAULT, replace(FAULT, named="optimizer"), INNOCENT])
    cells = [int(cell) for row in table.rows for cell in row[1:] if cell != "."]
    assert sorted(cells) == [1, 1, 2]
    rows = {row[0].split()[1]: row[1:] for row in table.rows}
    column = table.columns.index(next(row[0].split()[0] for row in table.rows if "on-the-fly" in row[0]))
    assert rows["on-the-fly"][column - 1] == "2"


# The suite.


def test_an_interrupted_suite_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = chosen(CASES, ["healthy"], [])[:3]
    carried: list[str] = []

    def carry_out(_self: suite.Suite, case: Case) -> Outcome:
        carried.append(case.name)
        return Outcome.of(case, named="healthy", found=(("healthy", None),))

    monkeypatch.setattr(suite.Suite, "carry_out", carry_out)
    work = suite.Suite(tmp_path)
    work.run(cases[:2], resume=False)
    with work.record.open("a") as file:
        file.write('{"case": "torn')  # as a killed suite leaves it
    outcomes = work.run(cases, resume=True)
    assert carried == [case.name for case in cases]
    assert [outcome.case for outcome in outcomes] == carried
    assert [outcome.case for outcome in work.kept()] == carried
    work.run(cases[:1], resume=False)
    assert len(work.kept()) == 1


@pytest.mark.long
def test_a_task_that_fails_says_where_its_output_is(tmp_path: Path) -> None:
    with pytest.raises(suite.TaskError, match=r"workload\.name.*run\.log"):
        suite.task(
            tmp_path, "run", {"workload": "nowhere", "sets": [], "folder": str(tmp_path), "seconds": 1}
        )


@pytest.mark.long
def test_neighbours_end_with_the_case_and_with_the_suite(tmp_path: Path) -> None:
    with neighbours(1, 1) as pids:
        assert len(pids) == 1
        assert psutil.Process(pids[0]).is_running()
    assert not psutil.pid_exists(pids[0])
    program = (
        "from qa.faults.plants import neighbours\nimport os\n"
        "with neighbours(1) as pids:\n    print(pids[0], flush=True)\n    os._exit(0)\n"
    )
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, check=True, text=True
    )
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(int(killed.stdout)).wait(20)
        psutil.Process(int(killed.stdout))


@pytest.mark.long
def test_the_module_of_own_workloads_needs_nothing_else(tmp_path: Path) -> None:
    write_module(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", "import planted, sys; assert 'qa' not in sys.modules"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


# Trials of nothing.


def test_the_binomial_interval_is_the_exact_one() -> None:
    # Clopper and Pearson, by the beta distribution.
    low, high = null.binomial_interval(5, 100)
    assert (low, high) == pytest.approx((0.016432, 0.112835), abs=1e-5)
    assert null.binomial_interval(0, 100) == pytest.approx((0.0, 0.036217), abs=1e-5)
    assert null.binomial_interval(10, 10)[1] == 1.0


def test_calls_of_null_trials_are_counted() -> None:
    verdicts = ["no difference"] * 17 + ["faster", "slower", "inconclusive"]
    nulls = [null.Null(index, "eeg", verdict, 1.0, 0.9, 1.1, 9.0) for index, verdict in enumerate(verdicts)]
    failed = null.Null(20, "eeg", "failed: it hung", None, None, None, 0.0)
    table = null.table([*nulls, failed])
    assert table.rows[-1][:7] == ("all", "21", "1", "1", "17", "1", "1")
    assert "2 of 20" in table.notes[0]
    assert "NOT REACHED" in table.notes[0]
