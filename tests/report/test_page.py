"""The report of a run, section by section, as self-contained HTML and as text."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from qa.ranks.simulated import Planted, beside

from ndd_console.render import html, text
from ndd_console.report.model import load
from ndd_console.report.sections import page
from ndd_console.view.rows import cells
from ndd_console.words.blocks import Curves, Stack, Table
from ndd_console.words.settings import differences
from ndd_engine.diagnose import diagnose
from ndd_engine.record.events import (
    Change,
    EndEvent,
    Event,
    Evidence,
    Finding,
    FindingEvent,
    FunctionsEvent,
    KernelsEvent,
    MarkEvent,
    ScalarsEvent,
    SettingEvent,
    StacksEvent,
    StageEvent,
    TextsEvent,
)
from ndd_engine.record.rundir import RunDir, RunLock
from ndd_engine.trial.compare import read_recorded
from tests import records

from .report_help import T0, Timed, pages, run_event, trial, whole_life, window, write

PARTS = (
    "Verdict", "Measured gains", "Run", "Where the time goes", "Idle time by cause", "Throughput and compute",
    "Learning", "Memory", "Machine", "Findings over time", "Events", "Settings", "How it was measured",
)  # fmt: skip
# The run and how it ended; measurements with their units; trials with interval, memory and losses; marks, findings over
# time and settings.
SHOWN = (
    "width 384", "torch 2.6.0", "all 4320 steps are done", "run.seed", "1337", "waiting for data",
    "data_wait", "p95", "segments/s", "TFLOP", "GiB", "loader.workers=4", "2.11x (2.02 to 2.20)", "2.1 GiB", "2.4 GiB",
    "out of memory", "20 steps, bit for bit", "2 losses were not finite", "collections take 2 %", "cleared",
    "✖ not in effect", "the mask needs another back end", "longest pause was 41 ms",
)  # fmt: skip
VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "nav", "article",
    "figure", "figcaption", "div", "p", "h1", "h2", "h3", "a", "span", "table", "thead", "tbody", "tr", "th", "td",
    "dl", "dt", "dd", "code", "b", "i", "svg", "desc", "text", "line", "rect", "polyline", "polygon", "path", "circle",
    "details", "summary",
}  # fmt: skip


class Checker(HTMLParser):
    """Parses a page like a browser: balanced tags, links, and anything that runs or is loaded."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.plots: list[list[str]] = []
        self.words: list[str] = []
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            value = value or ""
            if name.startswith("on") or name in ("src", "srcset", "action", "xlink:href"):
                self.outside.append(f"{tag} {name}={value}")
            if name == "href":
                self.links.append(value)
            if name == "id":
                self.ids.append(value)
        if tag == "svg":
            self.plots.append([])
        elif self.plots and "svg" in self.open:
            self.plots[-1].append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def check(document: str) -> Checker:
    """Check that a page is self-contained and that its plots have descriptions."""
    seen = Checker(document)
    assert seen.outside == [] and seen.tags <= ALLOWED, seen.tags - ALLOWED
    assert len(seen.ids) == len(set(seen.ids))
    assert all(link.startswith("#") and link[1:] in seen.ids for link in seen.links)
    lowered = document.lower()
    assert not re.search(r"url\(|@import|https?://|<script|javascript:", lowered)
    assert all(inside[:2] == ["title", "desc"] for inside in seen.plots)
    # A coordinate is a number.
    for value in re.findall(r'(?: points| d| [xy][12]?| width| height| c[xy])="([^"]*)"', document):
        assert "nan" not in value and "inf" not in value
    assert len(document) < 1_000_000
    return seen


def control_characters(shown: str) -> set[str]:
    return {char for char in shown if not char.isprintable()} - {"\n"}


@pytest.mark.parametrize("cuda", [True, False])
def test_html_and_text_have_every_section(tmp_path: Path, cuda: bool) -> None:
    run = write(tmp_path, whole_life(cuda))
    report, document, plain = pages(run)
    seen = check(document)
    assert len(seen.plots) > 8
    for shown in (document, plain):
        # The verdict is the first finding of the rules for the newest snapshot, with its evidence.
        finding = diagnose(report.snapshot)[0]
        assert finding.title in shown and finding.evidence[0].text in shown
        for text_shown in (*SHOWN, "lower bound" if cuda else "host clock"):
            assert text_shown in shown
    assert "predicted" in plain if cuda else "about batch" not in plain
    assert "ampere_bf16_gemm" in plain and "clips.py:41" in plain
    # The verdict and the measured gains come first.
    for shown, mark in ((document, "<h2>{}</h2>".format), (plain, "\n{} ═".format)):
        places = [shown.index(mark(part)) for part in PARTS]
        assert places == sorted(places)
    # Text has 100 columns, and can be ASCII.
    assert max(map(cells, plain.splitlines())) <= 100
    assert control_characters(plain) == set()
    assert any(block in plain for block in "▁▂▃▄▅▆▇█")
    only = text.page_text(page(report), ascii_only=True)
    assert only.isascii() and max(map(len, only.splitlines())) <= 100


def test_preparation_training_and_pauses_are_told_apart_without_the_time_between_processes(
    tmp_path: Path,
) -> None:
    report, document, plain = pages(write(tmp_path, whole_life()))
    assert 240 < report.time.length_s < 400
    ((begin, end),) = report.time.paused
    assert end - begin == pytest.approx(30, abs=0.1)
    assert [at.step for at in report.data.resumed] == [2718]
    body = report.to_json()
    # 13 s before the first steps, and 5 s after the resume a day later.
    assert body["preparation_s"] == pytest.approx(18, abs=0.1)
    assert body["paused_s"] == pytest.approx(30, abs=0.1)
    assert body["training_s"] == report.snapshot.elapsed_s
    rest = body["whole_s"] - body["preparation_s"] - body["training_s"] - body["paused_s"]
    assert rest == pytest.approx(0, abs=1)
    for shown in (document, " ".join(plain.split())):
        assert "18.0 s" in shown and "30.0 s" in shown


def test_a_run_that_ends_in_its_preparation_has_no_time_of_training(tmp_path: Path) -> None:
    end = EndEvent("failed", "no data", 0, 2, None)
    report, _, plain = pages(write(tmp_path, [(T0, StageEvent("prepare", "importing torch")), (T0 + 7, end)]))
    body = report.to_json()
    assert (body["preparation_s"], body["training_s"], body["whole_s"]) == (7, 0, 7)
    assert "after 7.0 s" in plain and "no data." in plain
    # Resumed, and killed before its first step; a day later it is resumed again.
    life = [(t, event) for t, event in whole_life() if t < T0 + 86_400 and not isinstance(event, EndEvent)]
    last = life[-1][0]
    again = [(last + t, StageEvent("resume", "importing torch")) for t in (100, 90_000)]
    body = load(write(tmp_path, [*life, *again, (last + 90_006, end)], "again")).to_json()
    assert body["preparation_s"] == pytest.approx(13 + 6, abs=0.1)


def test_a_trial_after_the_end_takes_no_time_of_the_run(tmp_path: Path) -> None:
    events = whole_life()
    length = load(write(tmp_path, events, "before")).time.length_s
    later = events[-1][0] + 7200
    run = write(tmp_path, [*events, (later, trial("batch.micro=256", "faster", (1.3, 1.2, 1.4), "faster"))])
    report, document, plain = pages(run)
    check(document)
    assert report.time.length_s == length
    assert "batch.micro=256" in plain and "1.30x (1.20 to 1.40)" in plain


NASTY = (
    "</title></text><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[31m\x00\n\u202e]]>--><!--"
)


def nasty_life() -> list[Timed]:
    """A record in which every text is an attack."""
    t = T0
    finding = Finding(
        NASTY, NASTY, (Evidence(NASTY, NASTY),), "likely", changes=(Change(NASTY, (NASTY,), NASTY),)
    )
    out: list[Timed] = [
        (t, StageEvent(NASTY, NASTY)),
        (
            t,
            run_event(
                name=NASTY, workload=NASTY, host=NASTY, device_name=NASTY, versions={NASTY: NASTY}, precision=NASTY,
                item=NASTY, token=NASTY, model=NASTY, data=NASTY, config={NASTY: {NASTY: NASTY}},
            ),
        ),
        (t, SettingEvent(NASTY, NASTY, NASTY, False, NASTY)),
    ]  # fmt: skip
    for index in range(30):
        item = window((index + 1) * 18)
        phases = {
            **item.phases,
            f"forward/{NASTY}": dict(item.phases["forward"]),
            NASTY: dict(item.phases["loss"]),
        }
        t += 1
        out.append((t, window(item.step, phases=phases)))
    out += [
        (t, MarkEvent("evaluation", 9, NASTY, {"metrics": {NASTY: 1.5, "loss": 2.0}, "seconds": 1.0})),
        (t, MarkEvent(NASTY, 9, NASTY)),
        (t, MarkEvent("warning", 9, NASTY)),
        (t, FindingEvent(9, NASTY, NASTY, False, finding)),
        (t, trial(NASTY, NASTY, (1.2, 1.1, 1.3), NASTY, not_in_effect=NASTY, loss_text=NASTY)),
        (t, KernelsEvent(
            1000, 400, 0, {NASTY: 600}, 4, [[NASTY, 300, 2]], method=NASTY, step=9, steps=3, trace=NASTY
        )),
        (t, StacksEvent(9, 10, [[NASTY, NASTY, 4, NASTY, 5, 1]])),
        (t, FunctionsEvent(9, 10, [[NASTY, 4, NASTY, 1, 5, 5, NASTY, NASTY]])),
        (t, EndEvent("failed", NASTY, 540, 1, NASTY)),
    ]  # fmt: skip
    return out


def test_foreign_text_becomes_neither_markup_nor_terminal_control(tmp_path: Path) -> None:
    name = "<script>alert(3)<"
    report, document, plain = pages(write(tmp_path, nasty_life(), name))
    seen = check(document)
    assert "img" not in seen.tags
    assert control_characters(document) == set() and control_characters(plain) == set()
    # It is shown literally.
    words = "".join(seen.words)
    assert name in words and "onerror=alert(2)" in words and r"\x1b[31m" in words
    assert report.data.skipped == 0
    assert max(map(cells, plain.splitlines())) <= 100


def hole(folder: Path) -> RunDir:
    """A record with a third missing and with torn and unknown lines."""
    events = whole_life(cuda=False)
    times = [t for t, _ in events]
    begin, end = T0 + 40, T0 + 80
    run = write(folder, [item for item in events if not begin < item[0] < end])
    lines = run.events.read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    lines[middle:middle] = [
        b'{"v":2,"type":"window","t":17500\n',
        b"\xff\xfe not JSON\n",
        b'{"v":2,"type":"new","t":1}\n',
    ]
    lines.insert(middle, b'{"v":2,"type":"window","t":Infinity}\n')
    run.events.write_bytes(b"".join(lines) + b'{"v":2,"type":"wind')
    assert times[0] < begin
    return run


def test_a_gap_in_the_record_is_a_gap_in_the_plots(tmp_path: Path) -> None:
    report, document, plain = pages(hole(tmp_path))
    check(document)
    assert report.data.skipped == 3 and "3 lines of events.jsonl" in plain
    found = {
        block.title: block
        for section in page(report).sections
        for block in section.blocks
        if hasattr(block, "title")
    }
    stack = found["Share of wall time by phase"]
    assert isinstance(stack, Stack)
    middle = {int(seconds / stack.width_s) for seconds in (50, 60, 70)}
    assert not middle & set(stack.slots)
    loss = found["Loss"]
    assert isinstance(loss, Curves)
    assert not any(a[0] < 45 and b[0] > 75 for piece in loss.lines[0].pieces for a, b in pairwise(piece))


def test_no_mean_of_a_phase_is_above_its_longest(tmp_path: Path) -> None:
    between = {"host_ns": 50_000_000, "p50_ns": 0, "p95_ns": 0, "max_ns": 0, "device_ns": None}
    life: list[Timed] = [(T0, run_event(cuda=False))]
    life += [
        (T0 + at, records.window(at, phases={"forward": records.phase(40_000_000), "evaluate": between}))
        for at in range(1, 5)
    ]
    report, _, _ = pages(write(tmp_path, life))
    (table,) = (
        block for section in page(report).sections for block in section.blocks
        if isinstance(block, Table) and block.title == "Phases"
    )  # fmt: skip
    figures = {row[0]: row[-4:] for row in table.rows}
    assert figures["evaluate"] == ("50 ms", "n/a", "n/a", "n/a")
    assert figures["forward"] == ("40 ms",) * 4


@pytest.mark.parametrize(
    "events",
    [
        [],
        [(T0, StageEvent("prepare", "importing torch"))],
        [(T0, StageEvent("prepare", "x")), (T0 + 3, EndEvent("failed", "no such file: data.txt", 0, 1))],
        [(T0, run_event()), (T0 + 3, EndEvent("failed", "out of memory in a test step", 0, 1))],
    ],
    ids=["nothing", "preparing", "failed early", "failed after its identity"],
)  # fmt: skip
def test_a_run_without_steps_says_so(tmp_path: Path, events: list[Timed]) -> None:
    run = write(tmp_path, events)
    report, document, plain = pages(run)
    check(document)
    assert "<svg" not in document and report.snapshot.step == 0
    for _, event in events:
        if isinstance(event, EndEvent):
            assert event.reason in plain and event.reason in document
    if not events:  # a folder with a configuration alone is a run, too
        run.events.unlink()
        run.config.write_text("[run]\n")
        assert "lost" in pages(run)[2]


def test_a_live_run_is_live_and_one_that_died_is_lost(tmp_path: Path) -> None:
    run = write(tmp_path, [item for item in whole_life(False)[:40] if not isinstance(item[1], EndEvent)])
    lock = RunLock(run)
    lock.acquire()
    try:
        assert pages(run)[0].to_json()["status"] == "training" and "live" in pages(run)[2]
    finally:
        lock.release()
    report, document, plain = pages(run)
    check(document)
    assert report.to_json()["status"] == "lost" and "kill -9" in " ".join(plain.split())


def test_your_own_workload_is_compared_with_the_defaults_and_its_own_length() -> None:
    config = {"run": {"epochs": 2}, "loader": {"workers": 1}}
    run = run_event(workload="denoise:factory", config=config)
    found = differences(run)
    assert isinstance(found, Table) and found.rows == (("loader.workers", "1", "0"),)


@pytest.mark.long
def test_a_long_run_is_a_page_of_the_same_size(tmp_path: Path) -> None:
    events: list[Timed] = [(T0, run_event(False))]
    for index in range(4000):
        step = (index + 1) * 18
        t = T0 + (index + 1)
        events.append((t, window(step, cuda=False, loss=2 + math.sin(index / 7))))
        if index % 4 == 0:
            events.append((t, MarkEvent("checkpoint", step, "checkpoint " + "x" * 50)))
            events.append((t, MarkEvent("evaluation", step, "e", {"metrics": {"loss": 1.0}, "seconds": 0.1})))
            events.append((t, FindingEvent(step, "gc", "y" * 200, index % 8 == 0)))
        if index % 50 == 0:
            events.append((t, trial(f"batch.micro={index}", "faster", (1.2, 1.1, 1.3), "better")))
    _, document, plain = pages(write(tmp_path, events))
    check(document)
    for points in re.findall(r'points="([^"]*)"', document):
        assert points.count(",") <= 1200  # a band has an upper and a lower edge
    assert all(points.count(",") <= 600 for points in re.findall(r'<polyline[^>]*points="([^"]*)"', document))
    assert len(plain.splitlines()) < 1200
    assert "40 of" in plain  # evaluations are thinned out, with a note


def test_very_long_texts_are_cut(tmp_path: Path) -> None:
    """In tables and on plots."""
    events = [*whole_life()[:40], (T0 + 100, MarkEvent("warning", 9, "w" * 3_000_000))]
    report = load(write(tmp_path, events))
    assert len(html.render(page(report))) < 1_000_000
    assert len(text.page_text(page(report))) < 200_000


def test_the_newest_events_of_a_long_run_are_shown_and_the_others_can_be_opened(tmp_path: Path) -> None:
    long = "saved " + "x" * 300
    marks = [(T0 + step, MarkEvent("checkpoint", step, f"{long} {step}")) for step in range(1, 101)]
    report = page(load(write(tmp_path, [(T0, run_event()), (T0 + 0.5, window(1)), *marks])))
    document, plain = html.render(report), text.page_text(report)
    assert "<summary>40 " in document and document.index(f"{long} 40<") < document.index(f"{long} 41<")
    assert f"{long} 100<" in document and "60 of 100" in plain and f"{long} 40" not in plain


def test_logged_values_and_samples_are_in_the_report(tmp_path: Path) -> None:
    own = [
        *((T0 + 20 + index, ScalarsEvent(index * 10, {"<b>score": 0.1 * index})) for index in range(1, 6)),
        (T0 + 26, TextsEvent(40, ["old"])),
        (T0 + 27, TextsEvent(50, ["once <upon>\n  a time \x1b[2J"])),
    ]
    merged = sorted([*whole_life(), *own], key=lambda item: item[0])
    report, document, plain = pages(write(tmp_path, merged))
    for shown in (document, plain):
        assert "Samples" in shown and "Logged: " in shown and "\x1b[2J" not in shown
        assert "old" not in shown.rpartition("Samples")[2][:400]
    assert "&lt;upon&gt;" in document and "<b>score" not in document
    body = report.to_json()
    assert body["scalars"] == {"<b>score": 0.5}
    assert body["samples"] == {"step": 50, "texts": ["once <upon>\n  a time \x1b[2J"]}


# Several ranks


def recorded(folder: Path, planted: Planted, name: str = "one", compared: bool = True) -> RunDir:
    events: list[Timed] = [(T0, run_event(False))]
    for index, event in enumerate(planted.events(30)):
        both: tuple[Event, ...] = (beside(event), event) if compared else (beside(event),)
        events += [(T0 + 1 + 0.4 * index, item) for item in both]
    return write(folder, events, name)


def test_a_late_rank_is_in_the_report(tmp_path: Path) -> None:
    planted = Planted(8, late=(5,), late_ms=20.0, phase="backward", places=("model.py:9 forward",), on_host=4)
    report, document, words = pages(recorded(tmp_path, planted))
    assert report.diagnosis.findings[0].cause == "straggler"
    for shown in (document, words):
        assert "Stragglers" in shown and "node1" in shown and "model.py:9 forward" in shown
    body = report.to_json()["ranks"]
    assert (body["world"], body["hosts"], body["late"]["rank"]) == (8, 2, 5)
    assert body["late"]["phase"] == "backward"
    total = sum(body["phases_s"].values()) + body["exchange_s"] + body["skew_s"]
    assert abs(total - body["step_s"]) < 1e-9
    assert [(span.rank, span.phase) for span in report.data.late] == [(5, "backward")]


def test_a_run_with_one_rank_has_no_such_section(tmp_path: Path) -> None:
    report, document, words = pages(recorded(tmp_path, Planted(2), compared=False))
    assert report.to_json()["ranks"] is None
    assert "Ranks" not in words and 'id="ranks"' not in document


def test_exchange_and_skew_are_compared(tmp_path: Path) -> None:
    slow = read_recorded(recorded(tmp_path, Planted(4, exchange_ms=10.0), "slow"))
    fast = read_recorded(recorded(tmp_path, Planted(4, exchange_ms=5.0), "fast"))
    assert slow.exchange_ns is not None and slow.exchange_ns == 2 * (fast.exchange_ns or 0)
    one = read_recorded(recorded(tmp_path, Planted(2), compared=False))
    assert (one.exchange_ns, one.skew_ns) == (None, None)
