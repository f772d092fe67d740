"""The views: every row fits at any size, missing is "n/a", and ASCII is ASCII."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndd_console.view.bars import bar, graph, levels, progress_bar, sparkline, stacked_bar
from ndd_console.view.live import LiveState, end_rows, live_rows, small
from ndd_console.view.rows import aligned, cells, cut, fit, shorten, width_of, wrap
from ndd_console.view.style import COLOUR, MONOCHROME, STATUS, Row, ascii_rows
from ndd_console.words.diagnosis import DiagnosisResult
from ndd_console.words.run import LOST, progress_line
from ndd_engine.diagnose import diagnose
from ndd_engine.record.events import PHASES, StallEvent
from ndd_engine.record.figures import throughput
from ndd_engine.record.snapshot import (
    STATUSES,
    Evaluation,
    Headroom,
    Idle,
    Snapshot,
    Throughput,
    TimeLeft,
    Totals,
)

from .fake_ranks import PLANTED, planted_snapshot
from .fakes import empty_snapshot, ended, mark, run_event, sample, snapshot, work_event

KEYS = (("p", "pause"), ("c", "checkpoint"), ("e", "evaluate"), ("l", "log"), ("?", "help"), ("q", "quit"))


def text_of(rows: list[Row]) -> str:
    return "\n".join("".join(text for text, _ in row) for row in rows)


def screen(value: Snapshot, width: int = 80, height: int = 24, **changes: object) -> str:
    state = LiveState("charlm-001", value.status, KEYS)
    return text_of(live_rows(value, replace(state, **changes), width, height))  # type: ignore[arg-type]


def assert_fits(rows: list[Row], width: int, height: int) -> None:
    assert len(rows) == height
    for row in rows:
        assert width_of(row) == width, row
        assert all(style in COLOUR and style in MONOCHROME for _, style in row)


SNAPSHOTS = {
    "gpu": snapshot(),
    "host": snapshot(False),
    "empty": empty_snapshot(),
    "prepared": empty_snapshot(run=run_event(), sample=sample()),
    "failed": ended("failed", "CUDA out of memory: " + "tried to allocate " * 40),
    "lost": ended("lost", ""),
    "stopped": ended("stopped", "stopped from the console", None),
    "foreign": snapshot(
        marks=(mark(3, "warning", "\x1b[31m数据已损坏\n" * 9),), run=run_event(data="数据" * 60)
    ),
    "many cores": snapshot(sample=sample(cores=256)),
    **{f"{world} ranks": planted_snapshot(world) for world in PLANTED},
    "no trends": snapshot(loss_trend=(), rate_trend=((1, float("nan")),)),
}
# Fields that a run may lack, each with what it is then.
MISSING: dict[str, Any] = {
    "run": None, "sample": None, "memory": None, "loss": None, "lr": None, "grad_norm": None, "left": TimeLeft(),
    "steps_per_s": None, "items_per_s": None, "tokens_per_s": None, "step_ns": None, "phases": (),
    "marks": (), "settings": (), "work": None, "throughput": Throughput(), "micro_steps": None,
    "evaluations": (), "best": None, "checkpoint": None, "loss_trend": (), "rate_trend": (),
    "idle": Idle(None, "events", (), "no device clock and no NVML"),
    "headroom": Headroom(None, None, None, None, None, None, "gpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", SNAPSHOTS)
@pytest.mark.parametrize(
    "size",
    [(20, 5), (39, 9), (40, 12), (71, 24), (72, 20), (80, 24), (100, 30), (120, 40), (200, 50), (149, 24)],
)
def test_every_row_fits(name: str, size: tuple[int, int]) -> None:
    value = SNAPSHOTS[name]
    rows = live_rows(value, LiveState("charlm-001", value.status, KEYS, "a message", 3.0), *size)
    assert_fits(rows, *size)
    assert_fits(ascii_rows(rows), *size)


def test_the_use_of_the_cores_is_that_of_all_ranks_on_the_host() -> None:
    host = {**sample(False).host, "ranks_cpu_percent": 98.0}
    text = screen(snapshot(False, sample=replace(sample(False), host=host)), 120, 40)
    assert "ranks 2.0 cores" in text and "run 1.0 cores" not in text
    assert "run 1.0 cores" in screen(snapshot(False), 120, 40)


def test_processes_of_a_script_are_not_called_workers_and_none_have_no_memory() -> None:
    def shown(count: int, size: int) -> str:
        host = {**sample(False).host, "workers": count, "workers_rss_bytes": size}
        run = run_event(False, config={"script": {"file": "train.py"}})
        return screen(snapshot(False, run=run, sample=replace(sample(False), host=host)))

    assert "2 subprocesses" in shown(2, 7 << 20) and "subprocesses 7.0 MiB" in shown(2, 7 << 20)
    assert "0 subprocesses" in shown(0, 0) and "subprocesses 0 B" not in shown(0, 0)
    assert "worker" not in shown(2, 7 << 20)


def test_memory_in_swap_is_a_warning_and_none_takes_no_room() -> None:
    for swapped, shown in ((3 << 30, True), (0, False), (None, False)):
        host = {**sample(False).host, "swap_bytes": swapped}
        text = screen(snapshot(False, sample=replace(sample(False), host=host)), 120, 40)
        assert ("3.0 GiB in swap" in text or "3.2 GiB in swap" in text) is shown


def test_missing_is_never_zero() -> None:
    value = snapshot(
        lr=None, grad_norm=None, loss=None, left=TimeLeft(), steps_per_s=None, items_per_s=None,
        sample=replace(sample(), gpu={"util_percent": None}, host={}), idle=MISSING["idle"],
        headroom=MISSING["headroom"],
    )  # fmt: skip
    text = screen(value, 120, 40)
    for part in ("lr n/a", "gradient norm n/a", "loss n/a", "n/a steps/s", "time left n/a",
    "busy n/a", "cpu n/a",
                 "RSS n/a", "n/a available", "throttling n/a", "GPU idle n/a", "no device clock and no NVML",
                 "memory n/a", "n/a free"):  # fmt: skip
        assert part in text, part
    assert "busy 0" not in text and "idle 0" not in text


def test_no_gpu_counters() -> None:
    assert "n/a: NVML" in screen(snapshot(sample=replace(sample(), gpu=None)))


def test_throttling_is_shown() -> None:
    hot = sample()
    assert hot.gpu is not None
    text = screen(snapshot(sample=replace(hot, gpu={**hot.gpu, "throttle": ["power cap", "thermal"]})))
    assert "throttled:" in text


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_is_symbol_and_word(status: str) -> None:
    symbol, style = STATUS[status]
    assert f"{symbol} {status}" in screen(snapshot(status=status)) and style in COLOUR


def test_nvml_knows_no_causes() -> None:
    text = screen(snapshot(idle=Idle(0.4, "nvml", ())))
    assert "40 % (nvml)" in text and "causes n/a" in text


def test_phases_add_up() -> None:
    for height in (12, 14, 24, 40):
        table = re.findall(r"^ (\d+ smaller|\w+) .* (<?\d+) % ", screen(snapshot(False), 60, height), re.M)
        shares = [
            0.3 if share == "<1" else float(share)
            for name, share in table
            if name in PHASES or "smaller" in name
        ]
        assert 97 <= sum(shares) <= 103, (height, table)
        assert "other" in dict(table)


def test_sub_phases_stand_below_their_phase() -> None:
    value = snapshot()
    forward = next(phase for phase in value.phases if phase.name == "forward")
    part = replace(forward, name="forward/encoder", host_ns=4e6, share=0.07)
    index = value.phases.index(forward)
    phases = (*value.phases[: index + 1], part, *value.phases[index + 1 :])
    lines = screen(replace(value, phases=phases), 120, 50).splitlines()
    assert next(i for i, line in enumerate(lines) if "  encoder" in line) == 1 + next(
        i for i, line in enumerate(lines) if " forward" in line
    )
    assert "encoder" not in screen(replace(value, phases=phases))


def test_small_screens_drop_trends_then_machine() -> None:
    assert "▇" in screen(snapshot()) and "▇" not in screen(snapshot(), 79, 24)
    assert "▇" not in screen(snapshot(), 80, 23) and "machine" in screen(snapshot(), 80, 23)
    assert "machine" not in screen(snapshot(), 80, 18) and "loss 1.482" in screen(snapshot(), 80, 18)


def test_without_a_peak_the_share_is_missing_and_says_why() -> None:
    text = screen(snapshot(False), 120, 40)
    assert "MFU n/a: no" in text and "62.6 FLOP/B" in text
    assert "35.5 TFLOP/s" in screen(snapshot(False)) and "MFU" not in screen(snapshot(False))
    assert "MFU 34 %" in screen(snapshot(), 60, 20)
    # Where the reason leaves no room, the intensity stays.
    assert "62.6 FLOP/B" in screen(snapshot(False), 80, 40)
    early = snapshot(work=None, throughput=Throughput())
    assert "FLOP" not in screen(early, 120, 40) and "MFU" not in screen(early, 120, 40)


def test_small_work_keeps_its_digits() -> None:
    little = replace(work_event(), flops_per_step=30_000_000, bytes_per_step=10**6)
    text = screen(snapshot(work=little, throughput=throughput(little, 54.6e6)), 120, 40)
    assert "549 MFLOP/s" in text and "MFU 0.00053 %" in text


def test_micro_steps_are_shown_with_accumulation() -> None:
    for count in (2.0, 1.0, None):
        assert ("micro" in screen(snapshot(micro_steps=count))) == (count == 2.0)


def test_time_left_marks_what_was_not_measured() -> None:
    assert "1 min 30 s left" in screen(snapshot(left=TimeLeft(90.0, 2, 1.5, 1, 0.5)))
    assert "30 s+ left" in screen(snapshot(left=TimeLeft(90.0, 2, None)))
    assert "1 min 30 s left" in screen(snapshot(left=TimeLeft(90.0, 0, None)))


def test_a_paused_run_shows_no_speed_and_no_time_left() -> None:
    running, paused = snapshot(), snapshot(status="paused")
    for size in ((60, 20), (80, 24), (120, 40), (200, 50)):
        assert "/s" in screen(running, *size)
        text = screen(paused, *size)
        assert not re.search(r"\d+ (steps|windows|characters|items)/s", text), text
        assert " left" not in text and "FLOP/s" not in text.split("work")[0]
        assert "paused" in text
    assert "paused" in progress_line(paused) and "left" not in progress_line(paused)


def test_units_are_the_runs_own() -> None:
    run = run_event(item="pair", token="entry", tokens_per_item=311.25)
    text = screen(snapshot(run=run), 140, 45)
    assert "4,687 pairs/s" in text and "entries/s" in text and "311 entries" in text
    none = screen(snapshot(run=run_event(token=None, tokens_per_item=0.0)), 140, 45)
    assert "character" not in none.split("465,231")[0]


def test_compile_off_is_not_compiled() -> None:
    for value, shown in (("off", False), ("default", True), (True, True), (False, False)):
        run = run_event(config={"speed": {"compile": value}})
        assert ("+ compile" in screen(snapshot(run=run))) is shown


def test_recompiling_stands_out() -> None:
    value = snapshot(marks=(mark(3, "compile", "compiled in 31 s"), mark(9, "recompile", "compiled again")))
    text = screen(value, 120, 40)
    assert "in 31 s" in text and "compiled again" in text


def test_ends() -> None:
    assert "3 min 51 s" in screen(ended("done", "all steps done")) and "✔ done" in screen(ended("done", ""))
    text = " ".join(screen(ended("failed", "CUDA out of memory; lower batch.micro " * 4)).split())
    assert (
        text.count("batch.micro") == 4 and "checkpoints/step-00004218" in text and "took 3 min 51 s" in text
    )
    lost = " ".join(screen(ended("lost", "")).split())
    assert LOST in lost and "--resume charlm-001" in lost
    assert "checkpoint n/a" in text_of(end_rows(ended("stopped", "asked", None, checkpoint=None), "x", 60, 7))


def test_the_end_of_a_script_speaks_of_no_checkpoint_and_does_not_resume() -> None:
    script = run_event(config={"script": {"file": "train.py"}})
    for status in ("stopped", "interrupted", "lost", "done"):
        text = screen(ended(status, "asked", None, checkpoint=None, run=script))
        assert "--resume" not in text and "checkpoint n" not in text and f"{status} at step" in text


def test_the_row_of_a_phase_stays_where_it_is() -> None:
    def names(value: Snapshot) -> list[str]:
        return re.findall(r"^ (\d+ smaller|\w+) .* <?\d+ % ", screen(value, 60, 20), re.M)

    before = snapshot(False)
    totals = Totals(steps=100, phases={one.name: round(one.host_ns * 100) for one in before.phases})
    before = replace(before, totals=totals)
    # In the newest windows, nothing was logged, and small phases have changed their order.
    factor = {"clip": 1.8, "to_device": 0.3, "loss": 0.2}
    after = tuple(
        replace(one, host_ns=one.host_ns * factor.get(one.name, 1.0))
        for one in before.phases
        if one.name != "log"
    )
    assert names(replace(before, phases=after)) == names(before)
    grown = tuple(replace(one, host_ns=9e6) if one.name == "log" else one for one in before.phases)
    assert "log" in names(replace(before, phases=grown)) and "log" not in names(before)


def test_foreign_text_cannot_steer_the_terminal() -> None:
    text = screen(
        snapshot(marks=(mark(3, "warning", "\x1b[2J\x07bad"),), run=run_event(model="\x1b]0;x\x07")), 120, 40
    )
    assert "\x1b" not in text and "\x07" not in text and "\\x1b[2J" in text


def test_best_and_last_evaluation() -> None:
    best = Evaluation(4_140, {"loss": 1.4}, None)
    assert "best so far" in screen(snapshot(evaluations=(best,), best=best))
    assert "evaluation n/a" in screen(snapshot(evaluations=(), best=None))


def test_bars() -> None:
    assert bar(0, 4) == "    " and bar(1, 4) == "████" and bar(0.5, 4) == "██  " and bar(1e-9, 4) == "▏   "
    assert width_of(progress_bar(0.333, 17)) == 17 and progress_bar(2.0, 5)[0][0] == "━" * 5
    assert width_of(stacked_bar(((0.5, "█", "used"), (0.01, "▒", "others"), (0.49, "░", "dim")), 20)) == 20
    assert (
        sparkline([1, 2, 3], 5) == "▁▅█  " and sparkline([], 3) == "   " and sparkline([2.0] * 9, 3) == "▄▄▄"
    )
    assert levels([0, 0.5, 1.0, 7], 3) == "▁▅█"
    lines = graph([0.0, 1.0], 4, 2)
    assert [len(line) for line in lines] == [4, 4] and lines[0].strip() and lines[1].strip()
    assert graph([5.0], 3, 2)[0].strip() or graph([5.0], 3, 2)[1].strip()
    assert (
        small(1e-4) == "0.0001"
        and small(None) == "n/a"
        and small(0.0) == "0"
        and small(float("nan")) == "nan"
    )


@given(st.text("ab数 …█", max_size=12), st.integers(0, 14), st.integers(0, 14))
def test_cutting_keeps_cells(text: str, start: int, length: int) -> None:
    row: Row = ((text, "text"), ("cd", "bold"))
    whole = fit(row, 40)
    assert width_of(whole) == 40
    assert width_of(cut(whole, start, start + length)) == length
    assert cells(shorten(text, start)) <= start
    for line in wrap(text, max(start, 2)):
        assert cells(line) <= max(start, 2)


WORDS = st.text("ab数 \x1b", max_size=30)


@given(st.lists(st.tuples(WORDS, WORDS, st.just("2.4 GiB"), WORDS), max_size=4), st.integers(30, 120))
def test_columns_stand_below_each_other_and_fit(texts: list[tuple[str, ...]], width: int) -> None:
    grid = [[(text, "text") for text in row] for row in (*texts, ("name", "no figures " * 20))]
    rows = aligned(grid, width, wide=1, drop=(3, 2))
    assert all(width_of(row) <= width and "\x1b" not in text_of([row]) for row in rows)
    assert len({cells(row[0][0]) for row in rows}) == 1
    assert len({width_of(row[:2]) for row in rows[:-1] if len(row) > 2}) <= 1
    assert texts == [] or width_of(rows[-1]) == width  # the last text takes the rest of its row


def test_a_hang_before_the_first_step_is_shown_with_its_place_and_advice() -> None:
    title = "no progress for 8.1 s in data_wait: the main process (pid 39) waits for loader worker 1, which reads /data"
    stall = StallEvent(0, 8.1, "storage", title, "check the disk or mount", "data.py:12")
    value = empty_snapshot(run=run_event(), sample=sample(), stall=stall)
    shown = " ".join(screen(value, diagnosis=DiagnosisResult(diagnose(value))).replace("│", " ").split())
    assert "loader worker 1, which reads /data" in shown
    assert "Check the disk or mount (data.py:12)" in shown
    # Other findings wait for steps.
    waiting = empty_snapshot(run=run_event(), sample=sample())
    assert screen(waiting, diagnosis=DiagnosisResult(diagnose(waiting))) == screen(waiting)
