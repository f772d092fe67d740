"""The report, its JSON and the comparison of runs with several simulated ranks."""

from __future__ import annotations

from pathlib import Path

from qa.ranks.simulated import Planted, beside

from ndd_engine.record.events import Event
from ndd_engine.record.rundir import RunDir
from ndd_engine.trial.compare import read_recorded

from .report_help import T0, Timed, pages, run_event, write


def recorded(folder: Path, planted: Planted, name: str = "one", compared: bool = True) -> RunDir:
    events: list[Timed] = [(T0, run_event(False))]
    for index, event in enumerate(planted.events(30)):
        both: tuple[Event, ...] = (beside(event), event) if compared else (beside(event),)
        events += [(T0 + 1 + 0.4 * index, item) for item in both]
    return write(folder, events, name)


def test_a_late_rank_is_in_the_report(tmp_path: Path) -> None:
    planted = Planted(8, late=(5,), late_ms=20.0, phase="backward", places=("model.py:9 forward",), on_host=4)
    report, page, words = pages(recorded(tmp_path, planted))
    assert report.findings[0].cause == "straggler"
    for text in (page, words):
        assert "Phases of all ranks" in text
        assert "Slowest ranks" in text
        assert "Stragglers" in text
        assert "node1" in text
        assert "model.py:9 forward" in text
    body = report.to_json()["ranks"]
    assert (body["world"], body["hosts"], body["late"]["rank"]) == (8, 2, 5)
    assert body["late"]["phase"] == "backward"
    total = sum(body["phases_s"].values()) + body["exchange_s"] + body["skew_s"]
    assert abs(total - body["step_s"]) < 1e-9
    assert [(span.rank, span.phase) for span in report.data.late] == [(5, "backward")]


def test_a_run_with_one_rank_has_no_such_section(tmp_path: Path) -> None:
    report, page, words = pages(recorded(tmp_path, Planted(2), compared=False))
    assert report.to_json()["ranks"] is None
    assert "Ranks" not in words
    assert 'id="ranks"' not in page


def test_exchange_and_skew_are_compared(tmp_path: Path) -> None:
    slow = read_recorded(recorded(tmp_path, Planted(4, exchange_ms=10.0), "slow"))
    fast = read_recorded(recorded(tmp_path, Planted(4, exchange_ms=5.0), "fast"))
    assert slow.exchange_ns is not None
    assert fast.exchange_ns is not None
    assert slow.exchange_ns == 2 * fast.exchange_ns
    one = read_recorded(recorded(tmp_path, Planted(2), "one", compared=False))
    assert (one.exchange_ns, one.skew_ns) == (None, None)
