"""On random records the figures on every screen, in every report and in every line agree with one another."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import PAIRS, Pair
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from planted_runs import NVML, Planted, alone, cores, data, evaluated, files, saved, work
from tests.records import write

from ndd_console.render import html, text
from ndd_console.report.model import load
from ndd_console.report.sections import page
from ndd_console.screens.trial import TrialState, entries, proposed_changes
from ndd_console.view.live import LiveState, finding_rows, live_rows
from ndd_console.words.finding import DiagnosisResult, ceiling_text, event_line
from ndd_console.words.run import progress_line, summary
from ndd_engine.diagnose import ENDINGS, Finding, diagnose
from ndd_engine.diagnose.view import LEAST_REST
from ndd_engine.record.events import Event, FindingEvent, KernelsEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot

SIZES = [(80, 24), (100, 30), (120, 40), (200, 50), (60, 20)]
MS = st.floats(0.02, 60.0)
PARTS = ("data_wait", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "log", "other")


@st.composite
def planted(draws: st.DrawFn) -> Planted:
    """A run with random times of its phases, on a CPU or a GPU, with what the rules look at."""
    scale = draws(st.sampled_from([0.5, 1.0, 40.0]))
    phases = {name: draws(MS) * scale for name in PARTS}
    cuda = draws(st.booleans())
    if cuda:
        phases["to_device"] = draws(MS) * scale
    heavy = draws(st.sampled_from([1.0, 30.0]))
    phases |= {name: heavy * phases[name] for name in ("forward", "backward")}
    step = sum(phases.values())
    workers = draws(st.sampled_from([0, 2]))
    sets = [f"loader.workers={workers}", "evaluate.every_steps=20", "checkpoint.every_steps=40"]
    if workers == 0 and draws(st.booleans()):
        sets.append("loader.fetch=item")
    aside: dict[int, tuple[Event, ...]] = {}
    for window in range(12):
        if draws(st.booleans()):
            aside[window] = evaluated(draws(MS) * scale, 20 * window + 20)
        elif draws(st.booleans()):
            aside[window] = saved(draws(MS) * scale, 20 * window + 20)
    model = phases["forward"] + phases["loss"] + phases["backward"]
    baseline = alone(micro_ns=model * 1e6 * draws(st.floats(0.1, 1.1)), by_threads=[[2.0, model * 0.4e6]])
    makes = draws(st.sampled_from([None, data(), files(), files(item_cpu_ns=2e4), files(epochs_differ=True)]))
    used = draws(st.floats(0.1, 2.0))
    others = [
        {"pid": draws(st.integers(1, 9999)), "name": "make", "cores": 0.9, "stoppable": draws(st.booleans())}
    ]
    host = cores(2.0, used, neighbours=others if used < 1.4 else None, cpu_throttled=draws(st.floats(0, 1)))
    capture = None
    if draws(st.booleans()):
        wall = round(5 * step * 1e6)
        gaps = int(wall * draws(st.floats(0, 0.9)))
        idle = {"launch gaps": gaps, "synchronising": (wall - gaps) // 3}
        rows = [["blocks.*.mlp", "Linear", (wall - gaps) // 4, (wall - gaps) // 3, 5, 1 << 20, 4096]]
        capture = KernelsEvent(
            wall, wall - sum(idle.values()), 0, idle, 300, [["gemm", (wall - gaps) // 3, 10]], modules=rows,
            convolution_ns=(wall - gaps) // 2, method="kernels" if cuda else "operators", step=200, steps=5,
        )  # fmt: skip
    device = {name: ms * draws(st.floats(0.3, 1.2)) for name, ms in phases.items()} if cuda else None
    run: dict[str, Any] = {
        "threads": draws(st.sampled_from([1, 2, 4])),
        "total_steps": draws(st.sampled_from([250, 9**6])),
    }
    gc_ns = int(draws(st.sampled_from([0.0, 0.02, 0.3])) * step * 1e6 * 20)
    return Planted(
        "summarise" if draws(st.booleans()) else "eeg", sets, phases, device, wobble=draws(st.sampled_from([0.0, 0.3])),
        run={**run, "precision": "fp32"}, loader=makes, baseline=baseline, work=work(), kernels=capture, host=host,
        gpu={**NVML, "util_percent": draws(st.integers(0, 100)), "processes": 1} if cuda else None, after=aside,
        window={"gc_ns": gc_ns, "gc_count": 3, "gc_max_ns": gc_ns // 2}, prepared_s=draws(st.sampled_from([0.1, 60.0])),
    )  # fmt: skip


def shown(rows: list[Any]) -> list[str]:
    return ["".join(part for part, _ in row) for row in rows]


def percents(line: str) -> list[float]:
    return [float(value) / 100 for value in re.findall(r"([0-9.]+) %", line)]


def allowed(share: float, digits: float = 0.005) -> float:
    """The largest ceiling that a share allows, if it was rounded."""
    return 1 / max(1 - share - digits, 0.01)


def ceilings(line: str) -> list[float]:
    return [float(value) for value in re.findall(r"at most ([0-9.]+)x", line)]


def assert_ceiling(line: str) -> None:
    """A ceiling on a line is no larger than the line's first share allows."""
    for bound in ceilings(line):
        found = percents(line)
        if found:
            assert bound <= allowed(found[0]) * 1.03, line


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(planted())
def test_ceilings_follow_from_the_shares_that_are_shown(run: Planted) -> None:
    for item in run.found():
        if item.ceiling is None:
            continue
        assert item.share is not None
        assert item.ceiling == pytest.approx(1 / max(1 - item.share, 0.01))
        # The first share of the title is that of the finding, or one of a phase that contains it.
        for share in percents(item.title)[:1]:
            assert item.share <= share + 0.0051, item
        # No other sentence of the finding has a share of the step that is larger, unless it says what it is of.
        event = FindingEvent(9, item.cause, item.title, False, item)
        assert json.loads(event.to_json(1.0))["finding"]["ceiling"] == item.ceiling
        assert_ceiling(event_line(event))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)
@given(planted(), st.sampled_from(SIZES))
def test_the_live_screen_agrees_with_itself(run: Planted, size: tuple[int, int]) -> None:
    snapshot = run.snapshot()
    result = DiagnosisResult(diagnose(snapshot))
    state = LiveState("one", "training", (("t", "try"), ("q", "quit")), diagnosis=result, can_try=True)
    lines = shown(live_rows(snapshot, state, *size))
    assert_steps(snapshot, lines)
    for line in lines:
        if "at most" in line:
            assert_ceiling(line)
    assert_tried(result.findings, size[0])


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.id)
def test_the_first_title_is_whole_at_80_columns(pair: Pair) -> None:
    for run in (pair.guilty, pair.innocent):
        snapshot = run.snapshot()
        found = diagnose(snapshot)
        state = LiveState("one", "training", (("q", "quit"),), diagnosis=DiagnosisResult(found), can_try=True)
        words = " ".join(" ".join(shown(live_rows(snapshot, state, 80, 24))).replace("─", " ").split())
        title = " ".join(found[0].title.split())
        if found[0].cause in ENDINGS:  # what follows the colon is below the heading
            title = title.replace(": ", " ", 1)
        assert title in words.replace(f" {ceiling_text(found[0])} ", " "), words


def assert_steps(snapshot: Snapshot, lines: list[str]) -> None:
    """Rows add up to the heading, shares are of it, and so is the rate."""
    place = next(place for place, line in enumerate(lines) if re.match(r"\s*── step [0-9]", line))
    heading = re.search(r"── step ([0-9.,]+) ms", lines[place])
    assert heading is not None
    step, unit = number(heading[1]), 10 ** -len(heading[1].partition(".")[2])
    rows = list(phase_rows(lines[place + 1 :], len(heading[1].partition(".")[2])))
    names = [name for name, *_ in rows]
    if "other" in names:
        inside = [ms for name, ms, _, plus in rows if not plus and not name.startswith("  ")]
        assert sum(inside) == pytest.approx(step, abs=unit / 1000), (step, rows)
    for name, ms, share, _ in rows:
        assert share is None or ms / step == pytest.approx(share, abs=0.0051 + unit / step), (name, ms, share)
    rate = re.search(r"([0-9.,]+) steps/s", "\n".join(lines))
    if rate is not None:
        rounded = 0.51 * 10 ** -len(rate[1].partition(".")[2])
        assert number(rate[1]) == pytest.approx(1e3 / step, abs=rounded + unit / step * 1e3 / step)
    assert snapshot.step_ns is not None


def phase_rows(lines: list[str], decimals: int) -> Iterator[tuple[str, float, float | None, bool]]:
    """(name, milliseconds, share, whether it comes on top) of the table of the step."""
    figure = rf"([0-9,]+\.[0-9]{{{decimals}}})" if decimals else r"([0-9][0-9,]*)"
    for line in lines:
        found = re.match(rf" (  \S+|\S+|\d+ smaller) [ █▏▎▍▌▋▊▉]*?(\+?){figure} +\+?(<?[0-9]+) %", line)
        if found is None:
            return
        share = None if found[4].startswith("<") else float(found[4]) / 100
        yield found[1], number(found[3]), share, found[2] == "+"


def number(shown: str) -> float:
    return float(shown.replace(",", ""))


def assert_tried(found: tuple[Finding, ...], width: int) -> None:
    """Key t measures what the sentence beside it says."""
    lines = shown(finding_rows(DiagnosisResult(found), width, 8, True))
    words = " ".join(lines)
    offered = proposed_changes(found)
    if "press t to try" not in words or found[0].cause in ("healthy", "too-short"):
        return
    first = next(change for change in found[0].changes if change.sets)
    assert offered[0].change.sets == first.sets
    named = re.search(r"press t to try (\S+=\S+)", words)
    if named is not None:
        assert named[1].rstrip(";…") in " ".join(first.sets)
    # The screen that it opens has it selected, with the same ceiling.
    screen = shown(list(entries(TrialState("choose", "one", offered), 120)[0].rows))
    selected = 0
    assert first.sets[0] in screen[selected]
    if found[0].ceiling is not None and found[0].ceiling < 1 / LEAST_REST:  # above it: "100x or more"
        (bound,) = ceilings(screen[selected + 1])
        assert bound == pytest.approx(found[0].ceiling, rel=0.03)


# A report takes half a second: a failing example is shown as it is.
@settings(
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
    max_examples=6,
    phases=[Phase.explicit, Phase.generate],
)
@given(planted())
def test_the_report_agrees_with_itself_in_all_formats(run: Planted) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = load(write(RunDir(Path(folder, "one")), run.events()))
        made = page(report)
        as_text, as_html, as_json = text.page_text(made), html.render(made), report.to_json()
    words = " ".join(as_text.split())
    for item in as_json["findings"]:
        if item["ceiling"] is not None:
            assert item["ceiling"] == pytest.approx(1 / max(1 - item["share"], 0.01))
    bounds = ceilings(as_text)
    assert bounds == ceilings(as_html)[: len(bounds)]
    assert bounds == [
        pytest.approx(item["ceiling"], rel=0.03) for item in as_json["findings"] if item["ceiling"]
    ]
    # The phases of the whole run add up to its mean step, apart from what comes on top.
    mean = re.search(r"a mean of ([^,]+?) per step", words)
    assert mean is not None
    table = as_text[as_text.index("-- Phases") :].partition("Over ")[0]
    rows = [re.split(r"\s{2,}", line) for line in table.splitlines() if re.match(r"[a-z_]+ ", line)]
    parts = sum(seconds(row[3]) for row in rows[1:] if row[0] not in ("evaluate", "checkpoint"))
    # From a second on, each figure is rounded to a tenth of a second.
    rounded = 0.05 * len(rows) if seconds(mean[1]) > 1 else 0.0
    assert parts == pytest.approx(seconds(mean[1]), rel=0.03, abs=rounded)
    assert all(row[3].startswith("+") for row in rows[1:] if row[0] in ("evaluate", "checkpoint"))


def seconds(shown: str) -> float:
    words = shown.lstrip("+").split()
    return sum(float(value) * UNITS[unit] for value, unit in zip(words[::2], words[1::2], strict=True))


UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)
@given(planted())
def test_lines_of_a_headless_run_agree(run: Planted) -> None:
    snapshot = run.snapshot()
    line, lines = progress_line(snapshot), summary(snapshot, None, Path("runs/one"))
    rates = [re.findall(r"([0-9.,]+) steps/s", part) for part in (line, *lines)]
    assert len({value for found in rates for value in found}) == 1
    shares = next(part for part in lines if part.startswith("recent steps by phase"))
    # "<1 %" is less than half a percent.
    assert sum(percents(shares.replace("<1 %", "0 %"))) <= 1.02
    assert "/" not in shares
