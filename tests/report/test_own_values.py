"""Logged values and samples in the report, as HTML, text and JSON."""

from __future__ import annotations

from pathlib import Path

from ndd_engine.record.events import ScalarsEvent, TextsEvent

from .report_help import T0, pages, whole_life, write


def test_logged_values_and_samples_are_in_the_report(tmp_path: Path) -> None:
    life = whole_life()
    last = max(t for t, _ in life[:-1])
    own = [
        *((T0 + 20 + index, ScalarsEvent(index * 10, {"<b>score": 0.1 * index})) for index in range(1, 6)),
        (T0 + 26, TextsEvent(40, ["old"])),
        (T0 + 27, TextsEvent(50, ["once <upon>\n  a time \x1b[2J"])),
    ]
    merged = sorted([*life, *own], key=lambda item: item[0])
    assert merged[-1][0] >= last
    report, html, text = pages(write(tmp_path, merged))
    for shown in (html, text):
        assert "Samples at step 50" in shown
        assert "Logged: " in shown
        assert "\x1b[2J" not in shown
        assert "old" not in shown.partition("Samples at step 50")[2][:400]
    assert "&lt;upon&gt;" in html and "<b>score" not in html
    body = report.to_json()
    assert body["scalars"] == {"<b>score": 0.5}
    assert body["samples"] == {"step": 50, "texts": ["once <upon>\n  a time \x1b[2J"]}
