"""Planted faults: every case can be configured and has its twin, what counts as right, and how a suite goes on."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.common import Options
from tests.waiting import LIMIT_S

from ndd_engine.config import read
from ndd_engine.config.workload_sections import WORKLOADS
from ndd_engine.diagnose import CAUSES
from ndd_engine.record.event import RanksEvent
from ndd_engine.train.request import preflight
from qa.faults import matrix, script_faults, suite, timed_hangs
from qa.faults.cases import SEVERITIES, Case, chosen
from qa.faults.innocent import all_cases
from qa.faults.observed import neighbours
from qa.faults.outcome import Measured, Outcome
from qa.faults.script_cases import FAULTS, UNPLANTED, Fault
from qa.faults.timed_hangs import KINDS, NAME, headless, on_screen
from qa.ranks import late
from qa.trials import nulls
from qa.trials.nulls import Null

CASES = all_cases(gpu=True)


def case_of(name: str) -> Case:
    (found,) = chosen(CASES, [name])
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
    assert {case.severity for case in chosen(CASES, ["gc:high"])} == {"high"}
    with pytest.raises(ValueError, match="gremlins"):
        chosen(CASES, ["gremlins"])


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
    cases = chosen(CASES, ["healthy"])[:3]
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
    # A planted gain of 4.5 to 5 % is in one of the intervals only.
    assert [nulls.counts(every, truth)[1] for truth in ((1.0, 1.0), (1.045, 1.05))] == ["2 of 3", "1 of 3"]
    assert ["not reached" in note for note in table.notes[:3]] == [True, True, False]


def test_the_binomial_interval_is_the_exact_one() -> None:
    # Clopper and Pearson, by the beta distribution.
    assert nulls.binomial_interval(5, 100) == pytest.approx((0.016432, 0.112835), abs=1e-5)
    assert nulls.binomial_interval(0, 100) == pytest.approx((0.0, 0.036217), abs=1e-5)
    assert nulls.binomial_interval(10, 10)[1] == 1.0


# Of observed scripts.


ROW = re.compile(r"^\| `([a-z0-9-]+)` \| (?:yes|no) \| (yes|no) \|", re.MULTILINE)
PAGE = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text("utf-8").partition("| cause |")[2]


def test_each_fault_has_two_levels_and_each_cause_a_fault() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert 0 < fault.levels[0] < fault.levels[1], fault.name
        assert (script_faults.FOLDER / fault.script).is_file() and set(fault.causes) <= set(CAUSES)
    planted = {cause for fault in FAULTS for cause in fault.causes}
    assert not planted & set(UNPLANTED)
    assert planted | set(UNPLANTED) == {cause for cause, script in ROW.findall(PAGE) if script == "yes"}


def finding(cause: str, ceiling: float | None = None, title: str = "") -> dict[str, object]:
    return {"cause": cause, "ceiling": ceiling, "title": title, "changes": []}


@pytest.mark.parametrize(
    ("found", "named", "accused"),
    [
        ([finding("data-wait", 1.5, "in work")], script_faults.FIRST, True),
        ([finding("neighbour-cores"), finding("data-wait", 1.5, "in work")], script_faults.LATER, True),
        ([finding("data-wait", 1.5, "elsewhere")], script_faults.MISSED, True),
        ([finding("data-wait", 1.05)], script_faults.MISSED, False),
        ([finding("optimizer", 1.5)], script_faults.MISSED, False),
        ([finding("healthy"), finding("leak")], script_faults.MISSED, True),
    ],
)
def test_what_counts_as_found_and_as_accused(
    found: list[dict[str, object]], named: str, accused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault("slow", ("data-wait",), (1, 2), "work")
    monkeypatch.setattr(script_faults, "FAULTS", (fault,))
    monkeypatch.setattr(script_faults, "_observed", lambda *_: found)
    tables = script_faults.measure(Options(effort="quick", only=("slow",)))
    assert [row[5] for row in tables[0].rows] == [named] * 2
    assert tables[1].rows[0][5] == ("ACCUSED" if accused else "")
    kinds, figures = tables[2:]
    counts = [
        str(2 * (named == one)) for one in (script_faults.FIRST, script_faults.LATER, script_faults.MISSED)
    ]
    assert kinds.lines()[2] == f"| `data-wait` | {' | '.join(counts)} | {int(accused)} of 1 |"
    assert figures.lines()[:2] == ["| measurement | result | target |", "| --- | --- | --- |"]
    assert figures.lines()[2].endswith(f"| {counts[0]} of 2 | 90 % |")


@pytest.mark.long
def test_scripts_of_a_missing_package_are_skipped_with_the_reason() -> None:
    lacking = Fault("lightning-leak", ("leak",), (1, 2), package="nothing_of_this_name")
    kept, reasons = script_faults._possible((FAULTS[0], lacking), sys.executable)
    assert kept == [FAULTS[0]] and "nothing_of_this_name is not installed" in reasons[0]


@pytest.mark.slow  # tests/script/test_runs.py has one of them
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("fault", KINDS, ids=lambda fault: fault.name)
def test_a_hang_is_named_with_the_default_settings_headless_and_on_a_small_screen(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_hangs, "PATIENCE_S", 120.0)  # the machine may be busy
    with ThreadPoolExecutor() as pool:  # both at once: a hang takes its time
        told, shown = pool.map(lambda way: way(tmp_path / way.__name__, fault, 1), (headless, on_screen))
    assert told.seconds is not None and told.placed, told.text
    assert shown.seconds is not None and NAME in shown.text, shown.text


# Of ranks.


STEP_NS = 50_000_000


def windows(factor: float = 1.0) -> list[RanksEvent]:
    """Of ten steps each. factor: of what was measured to what a step took."""
    each = [0.0, 0.0, 0.8 * factor * STEP_NS / 1e3, 0.0, 0.0]
    waited = round(STEP_NS * factor)
    return [
        RanksEvent(
            step, 10, 2, 1, "ddp", 10 * STEP_NS, waited, waited, 0, {"forward": each, "own": each}, {}, []  # type: ignore[arg-type]
        )
        for step in range(10, 60, 10)
    ]  # fmt: skip


@pytest.mark.parametrize("factor", [1.0, 0.99, 1.02])
def test_a_sum_that_is_not_the_time_of_the_steps_is_told(factor: float) -> None:
    # The wall time in the record is the same in all of them: it would not tell.
    ends = [[STEP_NS * (number + 1) + offset for number in range(60)] for offset in (0, 700)]
    found = late.by_second_clock(windows(factor), ends)
    assert found == pytest.approx(factor)
    assert (abs(factor - 1) <= late.CLOSE) is (factor == 1.0)
    assert late.by_second_clock(windows(factor)[:1], [[1, 2, 3]]) is None  # no whole window


def test_every_phase_is_planted_on_both_ranks_with_both_strategies() -> None:
    planted = {(case.strategy, case.rank, case.phase) for case in late.cases(quick=False)}
    phases = {"data_wait", "forward", "backward", "optimizer", *late.SHOWN}
    assert planted == {
        (strategy, rank, phase) for strategy in late.STRATEGIES for rank in (0, 1) for phase in phases
    }


def test_reading_takes_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("late_rank", late.FOLDER / "late_rank.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + 80e-6  # what a sleep takes longer

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    steps = 40
    for _ in range(steps * module.MICRO):
        module.read(0.005 / module.MICRO)
    assert now[0] / steps == pytest.approx(0.005, rel=0.01)
    assert Path(module.__file__).name == "late_rank.py"
