"""`make test-versions`: what it skips and why, and that a failure is one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ndd_watch import probes
from tests import versions
from tests.versions import Passed, main, passed


@pytest.mark.long
def test_what_is_not_here_is_skipped_with_the_reason_and_nothing_that_ran_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(versions, "PROMISED", {"3.4": ("torch",)})
    monkeypatch.setenv("PATH", "")
    assert main(["/no/python", "--folder", str(tmp_path / "none")]) == 1
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    skipped = {row[1]: row[4] for row in rows if len(row) > 4 and row[3] == "skipped:"}
    assert (
        list(skipped) == ["3.4", "/no/python"]
        and "3.4" in skipped["3.4"]
        and "torch" in skipped["/no/python"]
    )


@pytest.mark.parametrize(("failed", "status"), [(0, 0), (1, 1)])
def test_the_table_has_each_version_and_its_failures(
    failed: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = versions.Counter({"passed": 9, "failed": failed, "skipped": 2})
    monkeypatch.setattr(versions, "environment", lambda version, *_: (version, ""))
    monkeypatch.setattr(versions, "passed", lambda python: Passed(python, "2.1.2", counts))
    assert main([]) == status
    assert f"| 3.9 | 2.1.2 | 9 | {failed} | 2 |" in capsys.readouterr().out


def test_the_promised_versions_are_those_that_the_observer_names() -> None:
    import ndd_watch

    lowest, packages = next(iter(versions.PROMISED.items()))
    assert f"Python {lowest} and later, {packages[0].replace('==', ' ').removesuffix('.*')} and later" in (
        ndd_watch.__doc__ or ""
    )


def test_codes_of_python_3_9_are_compared_by_the_table_that_they_have() -> None:
    def code(table: bytes) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(probes._SAME), co_lnotab=table, co_consts=())

    assert probes._same(code(b"01"), code(b"01"))
    assert not probes._same(code(b"01"), code(b"02"))


@pytest.mark.slow
def test_a_pass_tells_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test_one(): pass\n\ndef test_two(): assert 0\n")
    found = passed(sys.executable, ((str(file), "slow or not slow"),))
    assert (found.counts["passed"], found.counts["failed"], found.why) == (1, 1, "")
