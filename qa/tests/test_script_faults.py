"""Faults of observed scripts: two levels and a twin of each, and of each cause; a hang is named on a screen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.common import Options
from tests.tiers import few

from ndd_engine.diagnose import CAUSES
from qa.faults import script_faults, timed_hangs
from qa.faults.script_cases import FAULTS, HANGS, UNPLANTED, Fault
from qa.faults.timed_hangs import KINDS, NAME, headless, on_screen

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


@pytest.mark.long
def test_a_case_that_does_not_exist_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "script_faults", "--only", "gremlins"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "gremlins" in done.stderr and "hangs" in done.stderr


@pytest.mark.long
@pytest.mark.budget(40)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    "fault", few([fault for fault in KINDS if fault.name != "collective"], 1), ids=lambda fault: fault.name
)
def test_a_hang_is_named_with_the_default_settings_headless_and_on_a_small_screen(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_hangs, "PATIENCE_S", 120.0)  # the machine may be busy
    assert fault.script == HANGS
    told = headless(tmp_path / "headless", fault, 1)
    assert told.seconds is not None and told.placed, told.text
    shown = on_screen(tmp_path / "screen", fault, 1)
    assert shown.seconds is not None and NAME in shown.text, shown.text
