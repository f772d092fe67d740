"""What the live screen and the pages show of a run: every row fits at any size, and missing is "n/a"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ndd_console.render.rows import block_rows
from ndd_console.screens.pages import help_lines, own_values_lines, ranks_lines
from ndd_console.view.blocks import heat_map, idle_heading, idle_rows, panel
from ndd_console.view.glossary import GLOSSARY
from ndd_console.view.keys import LIVE_KEYS, WIZARD_KEYS
from ndd_console.view.live import LiveState, end_rows, live_rows
from ndd_console.view.rows import width_of
from ndd_console.view.style import COLOUR, MONOCHROME, STATUS, Row, to_ascii
from ndd_console.words.blocks import Block
from ndd_console.words.finding import DiagnosisResult
from ndd_console.words.run import LOST, progress_line
from ndd_console.words.workers import workers_blocks
from ndd_engine.diagnose import diagnose
from ndd_engine.record.events import PHASES, StallEvent, TextsEvent
from ndd_engine.record.figures import CHECKPOINT, GRAPH_REASON, IDLE_CAUSES, LOWER_BOUND, throughput
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
from .fakes import (
    MEASURED,
    empty_snapshot,
    ended,
    mark,
    run_event,
    sample,
    snapshot,
    work_event,
    workers_event,
)

SMALL, LARGE = (80, 24), (120, 40)
SIZES = (
    (20, 5), (39, 9), (40, 12), (71, 24), (72, 20), SMALL, (100, 30), LARGE, (200, 50), (149, 24),
)  # fmt: skip
KEYS = (("p", "pause"), ("c", "checkpoint"), ("e", "evaluate"), ("l", "log"), ("?", "help"), ("q", "quit"))


def text_of(rows: list[Row]) -> str:
    return "\n".join("".join(text for text, _ in row) for row in rows)


def screen(value: Snapshot, width: int = 80, height: int = 24, **changes: object) -> str:
    state = LiveState("charlm-001", value.status, KEYS)
    return text_of(live_rows(value, replace(state, **changes), width, height))  # type: ignore[arg-type]


def folded(text: str) -> str:
    """In one line."""
    return " ".join(text.replace("│", " ").split())


def assert_fits(rows: list[Row], width: int, height: int) -> None:
    assert len(rows) == height
    for row in rows:
        assert width_of(row) == width, row
        assert all(style in COLOUR and style in MONOCHROME for _, style in row)


ESTIMATED = replace(
    MEASURED["kernels"],
    estimated_ns={
        "kernels": 60_000_000,
        "measured": 50_000_000,
        "usual": 45_000_000,
        "low": 33_000_000,
        "high": 62_000_000,
    },
)  # fmt: skip
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
def test_every_row_fits(name: str) -> None:
    value = SNAPSHOTS[name]
    for width, height in SIZES:
        rows = live_rows(value, LiveState("charlm-001", value.status, KEYS, "a message", 3.0), width, height)
        assert_fits(rows, width, height)
        assert_fits([tuple((to_ascii(text), style) for text, style in row) for row in rows], width, height)


def test_missing_is_never_zero() -> None:
    value = snapshot(
        lr=None, grad_norm=None, loss=None, left=TimeLeft(), steps_per_s=None, items_per_s=None,
        sample=replace(sample(), gpu={"util_percent": None}, host={}), idle=MISSING["idle"],
        headroom=MISSING["headroom"],
    )  # fmt: skip
    text = screen(value, *LARGE)
    for part in (
        "lr n/a", "norm n/a", "loss n/a", "n/a steps/s", "left n/a", "busy n/a", "cpu n/a", "RSS n/a", "n/a available",
        "throttling n/a", "idle n/a", MISSING["idle"].reason, "memory n/a", "n/a free",
    ):  # fmt: skip
        assert part in text, part
    assert "busy 0" not in text and "idle 0" not in text


def host(**figures: Any) -> Snapshot:
    """A run on the CPU with these counters of its machine."""
    return snapshot(False, sample=replace(sample(False), host={**sample(False).host, **figures}))


def gpu(**figures: Any) -> Snapshot:
    return snapshot(sample=replace(sample(), gpu={**(sample().gpu or {}), **figures}))


def compiled(value: object) -> Snapshot:
    return snapshot(run=run_event(config={"speed": {"compile": value}}))


SCRIPT = {"script": {"file": "train.py"}}
LITTLE = replace(work_event(), flops_per_step=30_000_000, bytes_per_step=10**6)
FIRST = Evaluation(4_140, {"loss": 1.4}, None)
# A run, the size of the screen, what it shows, and what it does not.
SHOWN: dict[str, tuple[Snapshot, tuple[int, int], tuple[str, ...], tuple[str, ...]]] = {
    "cores of all ranks": (host(ranks_cpu_percent=98.0), LARGE, ("ranks 2.0 cores",), ("run 1.0 cores",)),
    "cores of one rank": (host(), LARGE, ("run 1.0 cores",), ()),
    "subprocesses of a script": (
        replace(host(workers=2, workers_rss_bytes=7 << 20), run=run_event(False, config=SCRIPT)), SMALL,
        ("2 subprocesses", "subprocesses 7.0 MiB"), ("worker",),
    ),
    "no subprocess": (
        replace(host(workers=0, workers_rss_bytes=0), run=run_event(False, config=SCRIPT)), SMALL, ("0 subprocesses",),
        ("subprocesses 0 B",),
    ),
    "swap": (host(swap_bytes=5 << 30), LARGE, ("5.0 GiB",), ()),
    "no swap": (host(swap_bytes=0), LARGE, (), ("swap",)),
    "unknown swap": (host(swap_bytes=None), LARGE, (), ("swap",)),
    "no counters": (snapshot(sample=replace(sample(), gpu=None)), SMALL, ("n/a: NVML",), ()),
    "throttled": (gpu(throttle=["power cap", "thermal"]), SMALL, ("throttled:",), ()),
    "no causes": (snapshot(idle=Idle(0.4, "nvml", ())), SMALL, ("40 % (nvml)", "causes n/a"), ()),
    "no peak": (snapshot(False), LARGE, ("MFU n/a: no", "62.6 FLOP/B"), ()),
    "no peak in little room": (snapshot(False), (80, 40), ("62.6 FLOP/B",), ()),
    "no peak in no room": (snapshot(False), SMALL, ("35.5 TFLOP/s",), ("MFU",)),
    "a peak": (snapshot(), (60, 20), ("MFU 34 %",), ()),
    "no work": (snapshot(work=None, throughput=Throughput()), LARGE, (), ("FLOP", "MFU")),
    "little work": (
        snapshot(work=LITTLE, throughput=throughput(LITTLE, 54.6e6)), LARGE, ("549 MFLOP/s", "MFU 0.00053 %"), (),
    ),
    # Of five sixths of the kernels; the capture is busy for 64 of 164 ms.
    "an estimate for the GPU": (
        snapshot(kernels=ESTIMATED), LARGE, ("4,687 segments/s", "estimated for this GPU"), (),
    ),
    "an estimate in little room": (
        snapshot(kernels=ESTIMATED), (100, 30), ("4,687 segments/s", "9,674 to 18,175 segments/s estimated"), (),
    ),
    "an estimate at 80x24": (
        snapshot(kernels=ESTIMATED), SMALL,
        ("4,687 segments/s", "gradient norm 0.832   9,674 to 18,175 segments/s estimated"), ("for this GPU",),
    ),
    "no estimate": (snapshot(), LARGE, (), ("estimated",)),
    "accumulation": (snapshot(micro_steps=2.0), SMALL, ("micro",), ()),
    "no accumulation": (snapshot(micro_steps=1.0), SMALL, (), ("micro",)),
    "unknown accumulation": (snapshot(micro_steps=None), SMALL, (), ("micro",)),
    "measured time": (snapshot(left=TimeLeft(90.0, 2, 1.5, 1, 0.5)), SMALL, ("1 min 30 s left",), ()),
    "evaluations to come": (snapshot(left=TimeLeft(90.0, 2, None)), SMALL, ("30 s+ left",), ()),
    "no evaluation": (snapshot(left=TimeLeft(90.0, 0, None)), SMALL, ("1 min 30 s left",), ()),
    "units": (
        snapshot(run=run_event(item="pair", token="entry", tokens_per_item=311.25)), LARGE,
        ("4,687 pairs/s", "entries/s", "311 entries"), (),
    ),
    "no token": (
        snapshot(run=run_event(token=None, tokens_per_item=0.0, data="d")), LARGE, (), ("character",),
    ),
    "compiled": (compiled("default"), SMALL, ("+ compile",), ()),
    "compiled by a flag": (compiled(True), SMALL, ("+ compile",), ()),
    "not compiled": (compiled("off"), SMALL, (), ("+ compile",)),
    "not compiled by a flag": (compiled(False), SMALL, (), ("+ compile",)),
    "compiled again": (
        snapshot(marks=(mark(3, "compile", "in 31 s"), mark(9, "recompile", "shapes"))), LARGE, ("in 31 s", "shapes"),
        (),
    ),
    "no evaluation yet": (snapshot(evaluations=(), best=None), SMALL, ("evaluation n/a",), ()),
    "the best is the last": (snapshot(evaluations=(FIRST,), best=FIRST), SMALL, ("best so",), ()),
    "trends": (snapshot(), SMALL, ("▇",), ()),
    "no room for trends": (snapshot(), (79, 24), (), ("▇",)),
    "no height for trends": (snapshot(), (80, 23), ("machine",), ("▇",)),
    "no height for the machine": (snapshot(), (80, 18), ("loss 1.482",), ("machine",)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_a_figure_is_shown_or_left_out(name: str) -> None:
    value, size, shown, left_out = SHOWN[name]
    text = screen(value, *size)
    assert [part for part in shown if part not in text] == []
    assert [part for part in left_out if part in text] == []


def test_a_status_is_symbol_and_word() -> None:
    for status in STATUSES:
        symbol, style = STATUS[status]
        assert f"{symbol} {status}" in screen(snapshot(status=status)) and style in COLOUR


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
    part = replace(forward, name="forward/long_encoder", host_ns=4e6, share=0.07)
    index = value.phases.index(forward)
    phases = (*value.phases[: index + 1], part, *value.phases[index + 1 :])
    lines = screen(replace(value, phases=phases), 120, 50).splitlines()
    assert next(i for i, line in enumerate(lines) if "  long_encoder " in line) == 1 + next(
        i for i, line in enumerate(lines) if " forward" in line
    )
    assert "encoder" not in screen(replace(value, phases=phases))


def test_a_paused_run_shows_no_speed_and_no_time_left() -> None:
    running, paused = snapshot(), snapshot(status="paused")
    for size in ((60, 20), SMALL, LARGE, (200, 50)):
        assert "/s" in screen(running, *size)
        text = screen(paused, *size)
        assert not re.search(r"\d+ (steps|windows|characters|items)/s", text), text
        assert " left" not in text and "FLOP/s" not in text.split("work")[0]
        assert "paused" in text
    assert "paused" in progress_line(paused) and "left" not in progress_line(paused)


def test_ends() -> None:
    assert "3 min 51 s" in screen(ended("done", "")) and "✔ done" in screen(ended("done", ""))
    text = folded(screen(ended("failed", "CUDA out of memory; lower batch.micro " * 4)))
    assert text.count("batch.micro") == 4 and "checkpoints/step-00004218" in text and "3 min 51 s" in text
    lost = folded(screen(ended("lost", "")))
    assert LOST in lost and "--resume charlm-001" in lost
    assert "checkpoint n/a" in text_of(end_rows(ended("stopped", "asked", None, checkpoint=None), "x", 60, 7))


def test_the_end_of_a_script_speaks_of_no_checkpoint_and_does_not_resume() -> None:
    script = run_event(config=SCRIPT)
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


def test_a_hang_before_the_first_step_is_shown_with_its_place_and_advice() -> None:
    title = "no progress for 8.1 s in data_wait: the main process (pid 39) waits for loader worker 1, which reads /data"
    stall = StallEvent(0, 8.1, "storage", title, "check the disk or mount", "data.py:12")
    value = empty_snapshot(run=run_event(), sample=sample(), stall=stall)
    shown = folded(screen(value, diagnosis=DiagnosisResult(diagnose(value))))
    assert title.partition("waits for ")[2] in shown and "(data.py:12)" in shown
    # Other findings wait for steps.
    waiting = empty_snapshot(run=run_event(), sample=sample())
    assert screen(waiting, diagnosis=DiagnosisResult(diagnose(waiting))) == screen(waiting)


# Idle time

CAUSES = (("waiting for data", 0.57), ("launch gaps", 0.04), ("synchronising", 0.02))


def block(shot: Snapshot, width: int = 34, count: int = 6) -> list[str]:
    return [text_of([row]).rstrip() for row in idle_rows(shot, width, count)]


@pytest.mark.parametrize(
    ("cuda", "method", "heading", "narrow"),
    [
        (True, "kernels", "GPU idle 63 % (kernels)", "GPU idle 63 % (kernels)"),
        (False, "operators", "compute idle 63 % (operators)", "idle 63 % (operators)"),
    ],
)
def test_a_capture_shows_its_method_and_its_step(cuda: bool, method: str, heading: str, narrow: str) -> None:
    shot = snapshot(cuda, idle=Idle(0.63, method, CAUSES, step=4_200))
    assert (idle_heading(shot, 40), idle_heading(shot, 26)) == (heading, narrow)
    rows = block(shot)
    assert [row.split("  ")[0] for row in rows[:3]] == [cause for cause, _ in CAUSES]
    assert rows[0].endswith("57 %") and rows[3].endswith("4,200")
    # The causes come first where there is little room.
    assert len(block(shot, count=3)) == 3 and "4,200" not in "".join(block(shot, count=3))
    # A step without idle time has no causes, but an age.
    assert [row[-6:] for row in block(snapshot(idle=Idle(0.0, "kernels", (), step=7)))] == ["step 7"]


def test_a_lower_bound_is_marked_and_unknown_idle_time_names_the_key_that_measures_it() -> None:
    shot = snapshot(idle=Idle(0.1, "events", CAUSES[:1], LOWER_BOUND))
    assert ">10 % (events)" in idle_heading(shot, 40) and " ".join(block(shot)[1:]) == LOWER_BOUND
    idle = Idle(None, "events", (), GRAPH_REASON)
    assert " ".join(block(snapshot(idle=idle))).endswith("press k")
    # Not for a run that has ended.
    assert "press" not in " ".join(block(replace(ended("done", ""), idle=idle)))


# Ranks, besides the pictures of test_snapshots.py and the words of tests/words


def test_ranks_that_are_only_a_part_of_those_launched_keep_their_numbers() -> None:
    ranks = planted_snapshot(64).ranks
    assert ranks is not None
    part = replace(ranks, newest=replace(ranks.newest, launched=256, first_rank=64))
    rows = text_of(heat_map(part, 28, 10))
    assert " 64 " in rows and " 0 " not in rows
    assert "rank" not in screen(snapshot(False)) and "rank" in text_of(ranks_lines(snapshot(False), 78))


def test_the_page_of_workers_names_items_and_functions() -> None:
    shown = rows_text(workers_blocks(snapshot(workers=workers_event())))
    assert "clips.py:14 in Clips.decode" in shown and "71 %" in shown
    assert "worker 1" in shown and "50.3 ms" in shown and "77" in shown
    assert "loader workers" in rows_text(workers_blocks(snapshot()))


def rows_text(blocks: Sequence[Block]) -> str:
    return text_of(block_rows(blocks, 160))


@pytest.mark.parametrize(
    "change",
    [
        {"cells": "?x9", "cell_ranks": 0},
        {"hosts": 0, "world": 1 << 40},
        {"rows_us": {"x": [1.0], "7": []}, "row_names": ["own"], "world": 2},
        {"columns_us": {}, "cells": ""},
    ],
)
def test_a_strange_record_of_ranks_is_shown_without_an_error(change: dict[str, Any]) -> None:
    ranks = planted_snapshot(1024).ranks
    assert ranks is not None
    strange = replace(ranks, newest=replace(ranks.newest, **change))
    panel(strange, 28, 10)
    heat_map(strange, 28, 10)
    ranks_lines(replace(planted_snapshot(1024), ranks=strange), 78)


# Pages


def test_values_and_samples_that_were_logged_are_a_page() -> None:
    scalars = (("accuracy", ((1, 0.25), (2, 0.5))), ("x" * 70, ((1, 1e-6),)), ("数据\x1b[2J", ()))
    texts = TextsEvent(1200, ["def f(x):\n    return x\x1b[31m", "数" * 90, ""])
    shown = text_of(own_values_lines(snapshot(scalars=scalars, texts=texts), 80))
    for part in ("accuracy", "0.5000", "1e-06", "1,200", "  return x\\x1b["):  # with its indentation
        assert part in shown, part
    assert "log()" in text_of(own_values_lines(snapshot(), 120))


def test_the_glossary_has_every_phase_cause_method_and_status() -> None:
    groups = {title: dict(terms) for title, terms in GLOSSARY}
    terms = [term for group in groups.values() for term in group]
    assert {*PHASES, *IDLE_CAUSES, CHECKPOINT} <= set(terms)
    assert {"kernels", "operators", "events", "nvml", "host clock"} <= set(groups["idle time"])
    assert {term.split()[-1] for term in groups["status"]} == set(STATUSES)
    # At 80 columns a definition is one line, or two for a long term.
    for keys in (LIVE_KEYS, WIZARD_KEYS):
        lines = help_lines(keys, 78)
        assert all(width_of(row) <= 78 for row in lines)
        twice = sum(1 for term in terms if len(term) >= 18)
        assert len(lines) == sum(1 for key in keys if key.help) + len(terms) + twice + 2 * len(groups)
