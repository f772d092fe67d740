"""What ranks, the wizard, tuning, trials, comparisons and the list of runs show twice agrees, for random figures."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from qa.ranks.simulated import Planted

from ndd_console.jobs.run_sources import HomeFolder
from ndd_console.render import text
from ndd_console.render.rows import block_rows
from ndd_console.screens import home as home_screen
from ndd_console.screens import trial as trial_screen
from ndd_console.screens.trial import TrialState
from ndd_console.screens.tuning import table_row
from ndd_console.screens.wizard import BY_SPEED, proposal_table
from ndd_console.view.blocks import panel, progress
from ndd_console.words.blocks import Intervals, Table
from ndd_console.words.comparison import several_compared, two_compared
from ndd_console.words.ranks import late_text, late_words, phases_table, rank_rows, ranks_facts, slowest
from ndd_console.words.run import summary
from ndd_console.words.trial import setting_line, trial_text, trials_blocks, tuning_blocks
from ndd_console.words.wizard import ITEMS as RATE
from ndd_console.words.wizard import PROPOSAL_COLUMNS, about_text, remark, verified_texts
from ndd_engine.diagnose import diagnose
from ndd_engine.record.event import ranks_figures
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.file import RunReader
from ndd_engine.text import duration, factor, number, span
from ndd_engine.trial.compare import compare, compare_several
from ndd_engine.trial.estimates import abba_log_ratio, judged, trimmed
from ndd_engine.trial.outcome import Base, SideFacts, TrialRequest
from ndd_engine.trial.outcome import result as trial_result
from ndd_engine.trial.tuning import TuningRow, TuningState, _summary
from ndd_engine.wizard.proposals import Layout, Measured
from ndd_watch.changes import Candidate
from tests.trial.written_runs import ITEMS, STEPS, evaluation, steady, windows, write_run
from tests.ui.fake_ranks import ranks_snapshot
from tests.ui.fake_wizard import ROWS, proposal

checked = settings(
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
    max_examples=12,
    phases=[Phase.explicit, Phase.generate],
)
UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
RATIO = r"[0-9][0-9.,]*(?:e[+-][0-9]+)?"
INTERVAL = re.compile(rf"({RATIO})x \((?:95 % CI )?({RATIO}) to ({RATIO})\)")


def shown(rows: Any) -> str:
    return "\n".join("".join(part for part, _ in row) for row in rows)


def seconds(words: str) -> float:
    parts = words.replace("+", "").replace(",", "").split()
    return sum(float(value) * UNITS[unit] for value, unit in zip(parts[::2], parts[1::2], strict=True))


def rounding(words: str) -> float:
    """How far a time may be off, as a share: it has three digits, or tenths of a second, or seconds."""
    value = seconds(words)
    step = 0.055 if value < 60 else 0.55 if value < 3600 else 62.0
    return max(0.006, step / value if value >= 1 else 0.0)


def intervals(words: str) -> set[tuple[str, ...]]:
    return set(INTERVAL.findall(words))


@settings(max_examples=300)
@given(st.floats(1e-6, 8e4) | st.sampled_from([0.99951, 0.9999999, 59.94, 59.96]))
def test_a_figure_is_itself_in_words_at_the_edge_of_a_unit_too(value: float) -> None:
    for words in (duration(value), span(value * 1e9)):
        assert "e" not in words and seconds(words) == pytest.approx(value, rel=rounding(words)), words
    ratio = factor(value)
    assert "e+" not in ratio
    assert float(ratio.replace(",", "")) == pytest.approx(
        value, rel=0.006, abs=0.0051 if value >= 0.0995 else 0.0
    )


# Ranks.


@st.composite
def several_ranks(draws: st.DrawFn) -> Planted:
    world = draws(st.sampled_from([2, 3, 5, 8, 24]))
    late = (draws(st.integers(0, world - 1)),) if draws(st.booleans()) else ()
    return Planted(
        world, late, draws(st.floats(5.0, 90.0)), draws(st.sampled_from(["data_wait", "forward", "backward"])),
        noise=(0.001, draws(st.sampled_from([0.002, 0.02]))), exchange_ms=draws(st.floats(0.5, 30.0)),
        strategy=draws(st.sampled_from(["ddp", "fsdp2"])),
    )  # fmt: skip


@checked
@given(several_ranks())
def test_ranks_are_told_alike_on_all_pages(planted: Planted) -> None:
    snapshot = ranks_snapshot(planted)
    ranks = snapshot.ranks
    assert ranks is not None
    facts, as_json = dict(ranks_facts(snapshot, ranks).rows), ranks_figures(ranks)
    parts = {name: facts[name].partition(" (") for name in ("work", "exchange", "skew")}
    whole = facts["step"].partition(" on")[0]
    assert sum(seconds(time) for time, _, _ in parts.values()) == pytest.approx(seconds(whole), rel=0.02)
    for name, (time, _, share) in parts.items():
        assert seconds(time) == pytest.approx(as_json[f"{name}_s"], rel=0.01), name
        assert float(share.split()[0].strip("<")) / 100 == pytest.approx(
            seconds(time) / seconds(whole), abs=0.006 + rounding(time) + rounding(whole)
        )
    # The phases of the table add up to the step, with exchange and skew.
    rows = phases_table(snapshot, ranks).rows
    assert sum(seconds(row[1]) for row in rows) == pytest.approx(seconds(whole), rel=0.03)
    # Each bar of the live screen is a row of the page.
    table = slowest(ranks.newest)
    own = {row[0]: row[table.columns.index("work")] for row in table.rows}
    if planted.world <= 8:
        for line in shown(panel(ranks, 60, 12)).splitlines()[1:]:
            rank, *_, figure = re.sub(r"\+[0-9.]+\s*$", "", line).split()
            assert float(figure) * 1e-3 == pytest.approx(seconds(own[rank]), abs=6e-5, rel=0.006), line
    longest = [
        seconds(row[table.columns.index("work")]) for row in table.rows[: len(rank_rows(ranks.newest))]
    ]
    assert all(first >= second for first, second in pairwise(longest))
    # The straggler of the live screen, of the page, of the finding and of the JSON.
    late = late_words(snapshot), late_text(ranks), as_json["late"]
    if late[2] is None:
        assert "no straggler" in late[0] and late[1] == "none"
        return
    (short,) = re.findall(r"\+([0-9.]+ m?s)", late[0])
    assert f"+{short} a step" in late[1]
    assert seconds(short) == pytest.approx(late[2]["late_ns"] * 1e-9, rel=0.06)
    for one in diagnose(snapshot):
        if one.cause == "straggler":
            assert one.ceiling == pytest.approx(late[2]["ceiling"])


# The wizard.


@st.composite
def proposals(draws: st.DrawFn) -> list[Any]:
    rows = []
    for micro in draws(st.lists(st.sampled_from([1, 3, 16, 64, 500]), min_size=1, max_size=5, unique=True)):
        one = proposal("guide", 256, micro, draws(st.integers(1, 6)), draws(st.floats(0.2, 30.0)), 0.0)
        measured = Measured(draws(st.floats(1e-4, 30.0)), int(draws(st.floats(1e7, 2e10))))
        ranks = draws(st.sampled_from([1, 1, 4]))
        rows.append(
            replace(
                one, step_s=draws(st.floats(1e-4, 30.0)), layout=Layout(ranks, "ddp" if ranks > 1 else ""),
                measured=measured if draws(st.booleans()) else None, setup_s=draws(st.floats(0.0, 100.0)),
            )
        )  # fmt: skip
    return rows


@pytest.mark.parametrize(("steps", "few"), [(1, True), (9, True), (10, False), (None, False)])
def test_few_steps_an_epoch_are_a_remark(steps: int | None, few: bool) -> None:
    one = replace(ROWS[0], steps_per_epoch=steps)
    assert ("an epoch" in remark(one)) == few
    assert ("an epoch" in about_text(one)) == (steps is not None and not few)


@checked
@given(proposals())
def test_a_proposal_is_told_alike_in_its_row_and_below_it(rows: list[Any]) -> None:
    cell = {column.name: column.text for column in PROPOSAL_COLUMNS}
    table = {text for _, cells in proposal_table(rows, (), (), BY_SPEED)[1] for text, _ in cells}
    for one in rows:
        rate, step = cell[RATE](one), cell["step"](one)
        items = one.batch.items * one.layout.ranks
        assert float(rate.replace(",", "")) * seconds(step) == pytest.approx(
            items, rel=0.01 + rounding(step), abs=6e-4 * seconds(step)
        )
        assert f"{rate} segments/s" in about_text(one)
        assert f"peak {cell['memory'](one)} of" in about_text(one)
        tokens = cell["tokens/s"](one)
        assert f"{tokens} characters/s" in about_text(one)
        assert {rate, step, tokens, cell["memory"](one)} <= table
        if one.measured is None:
            continue
        memory, known, off, predicted, took, error = verified_texts(one)
        assert (memory, predicted) == (cell["memory"](one), step)
        assert f"measured {took} per step" in remark(one)
        assert f"measured {known}, {took} per step" in remark(one, details=True)
        off_by = rounding(predicted) + rounding(took)
        assert float(error.split()[0]) == pytest.approx(
            (seconds(predicted) / seconds(took) - 1) * 100,
            rel=0.02,
            abs=0.1 + 100 * off_by * seconds(predicted) / seconds(took),
        )
        assert (float(off.split()[0]) > 0) == (one.memory_bytes > one.measured.memory_bytes) or "0.0" in off


# Trials and tuning.


@st.composite
def measured_trial(draws: st.DrawFn, sets: tuple[str, ...] = ("loader.workers=4",)) -> TrialEvent:
    """The event that the engine makes of random blocks."""
    true, noise = (
        draws(st.sampled_from([0.03, 0.5, 0.97, 1.0, 1.05, 1.6, 13.0, 1234.0])),
        draws(st.floats(1e-4, 0.2)),
    )
    shifts = draws(st.lists(st.floats(-1, 1), min_size=4, max_size=9))
    logs = [abba_log_ratio(true, 1.0, 1.0, true) + noise * shift for shift in shifts]
    found = trimmed(logs)
    base = SideFacts(
        items_per_step=16, prepare_s=draws(st.floats(0.1, 99.0)), step_s=draws(st.floats(1e-4, 20.0)),
        peak_bytes=draws(st.integers(1, 10**11)),
    )  # fmt: skip
    change = replace(base, step_s=(base.step_s or 0) / found.ratio)
    return trial_result(
        TrialRequest(Base("run one"), sets), judged(found.ratio, found.low, found.high), "", found, (base, change), (),
        draws(st.floats(0.5, 300.0)),
    )  # fmt: skip


@checked
@given(measured_trial())
def test_a_trial_is_told_alike_wherever_it_is_told(trial: TrialEvent) -> None:
    words = trial_text(trial)
    ((ratio, low, high),) = intervals(words)
    verdict = words.partition(f" {ratio}x")[0]
    ends = [float(value.replace(",", "")) for value in (low, ratio, high)]
    assert ends == sorted(ends)
    assert verdict not in ("faster", "slower") or not ends[0] < 1 < ends[2]
    state = TrialState("result", "run one", (), result=trial)
    screen = shown(trial_screen.result(state, 400, 50))
    blocks = [block for block in trials_blocks([trial], "one") if not isinstance(block, Intervals)]
    for told in (trial.text, screen, "\n".join(text.lines(blocks, 400))):
        assert intervals(told) == {(ratio, low, high)}, told
        assert verdict in told
    # Both sides are as far apart as the ratio says.
    (sides,) = (block.rows for block in blocks if isinstance(block, Table) and "step" in block.columns)
    before, after = (seconds(row[1]) for row in sides)
    off = sum(rounding(row[1]) for row in sides) + 0.005 / ends[1] * (ends[1] >= 0.1)
    assert before / after == pytest.approx(ends[1], rel=0.01 + off)


@checked
@given(st.lists(measured_trial(), min_size=1, max_size=4), measured_trial())
def test_tuning_is_told_alike_in_its_table_its_lines_and_its_result(
    trials: list[TrialEvent], total: TrialEvent
) -> None:
    rows = tuple(
        TuningRow(
            Candidate(f"setting-{place}", f"setting {place}", trial.sets),
            "kept" if trial.verdict == "faster" else "dropped", trial=trial,
            to_start=total if trial.verdict == "faster" else None,
        )
        for place, trial in enumerate(trials)
    )  # fmt: skip
    state = TuningState(rows, "done", None, 60.0, done=True)
    state = replace(state, text=_summary(state))
    kept = [row for row in rows if row.state == "kept"]
    assert state.text.startswith(f"{len(kept)} of {len(rows)} measured")
    printed = shown(block_rows(list(tuning_blocks(state)), 400))
    for row in rows:
        own, line = intervals(trial_text(row.trial)), "  ".join(text for text, _ in table_row(row))
        assert intervals(setting_line(row)) == own
        assert intervals(line) == own | intervals(trial_text(row.to_start)) <= intervals(printed)
    if kept:
        assert intervals(state.text) == intervals(trial_text(total))


# Runs: the list of them, and comparisons.


@checked
@given(st.integers(4, 30), st.floats(1e-3, 2.0), st.floats(-1e4, 1e4), st.booleans())
def test_a_run_is_told_alike_in_the_list_on_its_screen_and_in_its_summary(
    count: int, step_s: float, best: float, evaluated: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        events = windows(steady(count, step_s * STEPS))
        more = [evaluation(count * STEPS, loss=best)] if evaluated else []
        run = write_run(Path(folder) / "one", [*events, *more])
        (row,) = HomeFolder(Path(folder)).runs()
        reader = RunReader(run)
        reader.poll()
        snapshot = reader.snapshot()
    name, status, step, told, _, workload = row.texts
    (entry,) = (item for item in home_screen.entries((), (row,), 300) if item.value is not None)
    line = shown(entry.rows)
    assert all(value in line for value in (name, status, step, told, workload))
    done, _, total = step.partition(" of ")
    assert f"step {done}" in " ".join(shown([progress(snapshot, 120, None)]).split())
    assert (done, total) == (number(snapshot.step), number(snapshot.run.total_steps if snapshot.run else 0))
    assert (snapshot.best is not None) == evaluated
    told_below = [part for part in summary(snapshot, None, Path("runs/one")) if "best evaluation" in part]
    assert (told == "n/a") != evaluated and all(told in part for part in told_below)
    assert len(told_below) == evaluated


@checked
@given(st.floats(1e-3, 3.0), st.floats(0.3, 3.0), st.integers(8, 40), st.floats(0.0, 0.1))
def test_a_comparison_is_told_alike_for_two_runs_for_several_and_as_json(
    first_s: float, times: float, count: int, noise: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        a = write_run(Path(folder) / "a", windows(steady(count, first_s * STEPS, 1, noise)))
        b = write_run(Path(folder) / "b", windows(steady(count, first_s * times * STEPS, 2, noise)))
        found, several = compare(a, b), compare_several([a, b])
        as_json = found.to_dict()
    two, more = list(two_compared(found)), list(several_compared(several))
    words = "\n".join(text.lines(two, 300))
    assert words.split() == shown(block_rows(two, 300)).replace("─", "").split()
    (ratio,) = re.findall(r"B/A ([0-9.]+)x", words)
    assert float(ratio) == pytest.approx(as_json["items_per_s_ratio"], abs=6e-4)
    rates = [float(value.replace(",", "")) for value in re.findall(r"[AB] ([0-9.,]+) segments/s", words)]
    assert rates[1] / rates[0] == pytest.approx(float(ratio), rel=0.02)
    assert f"{ratio}x" in shown(block_rows(more, 300))
    if as_json["low"] is not None:
        assert f"{as_json['low']:.3f} to {as_json['high']:.3f}" in words
        assert as_json["low"] <= as_json["items_per_s_ratio"] <= as_json["high"]
    # Items per second are those of a step of the table.
    step = next(line for line in words.splitlines() if line.startswith("step, median"))
    times_told = re.findall(r"([0-9.,]+ (?:ns|µs|ms|s|min)(?: [0-9.]+ s)?)", step)
    for told, rate in zip(times_told, rates, strict=True):
        assert ITEMS / seconds(told) == pytest.approx(rate, rel=noise * 1.1 + 0.02 + rounding(told))
