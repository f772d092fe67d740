"""Findings, trials and what `check` predicts, in words: lines of logs, and the blocks of pages and reports."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from ndd_console.render.rows import block_rows
from ndd_console.render.text import lines
from ndd_console.words.blocks import COMMAND, PLACE, Text
from ndd_console.words.finding import (
    DiagnosisResult,
    ceiling_text,
    choices,
    diagnosis_blocks,
    event_line,
    finding_line,
    first_command,
    urgent_line,
    verdict,
)
from ndd_console.words.machine import busy_cores, check_facts
from ndd_console.words.step import ENGINE
from ndd_console.words.trial import conditions, measurement, trial_blocks, trial_text
from ndd_engine.diagnose import Change, Evidence, Finding
from ndd_engine.record.event import MeasuredChange
from ndd_engine.record.events import FindingEvent, FunctionsEvent, MarkEvent, StacksEvent, TrialEvent
from ndd_engine.record.figures import others_text
from ndd_engine.record.snapshot import CoreUse
from ndd_engine.trial.outcome import Progress
from tests.ui.fakes import MEASURED, snapshot

HOIST = Change("Hoist it.", (), "m.py:3 in f")
WORKERS = Change("Load with workers.", ("loader.workers=4", "run.name=a b"))
WAITS = Finding(
    "few-workers", "the GPU waits 57 % of each step", (Evidence("waiting 31 ms", "host clock"),), "likely", 0.57, 2.33,
    (HOIST, WORKERS),
)  # fmt: skip


def test_the_block_has_evidence_changes_places_and_commands() -> None:
    block = verdict(WAITS, "my run", main=True)
    assert block.title == WAITS.title and block.ceiling == "at most 2.3x"
    assert block.tone == "warn" and block.main
    assert block.badges == ("too few loader workers", "likely", "costs up to 57 % of the time")
    assert block.rows == (
        ("evidence", "waiting 31 ms (host clock)"),
        ("try", "Hoist it."),
        (PLACE, "m.py:3 in f"),
        ("try", "Load with workers."),
        (COMMAND, "ndd-console try 'my run' --set loader.workers=4 --set 'run.name=a b'"),
    )
    assert COMMAND not in dict(verdict(WAITS).rows)


def test_what_a_trial_has_measured_is_told_and_not_proposed_again() -> None:
    measured = replace(WORKERS, measured=MeasuredChange("faster", 1.42, 1.35, 1.49))
    found = replace(WAITS, changes=(measured, HOIST))
    assert ("measured", "faster 1.42x (1.35 to 1.49)") in verdict(found, "my run").rows
    assert finding_line(found).endswith(
        "loader.workers=4 run.name=a b was measured: faster 1.42x (1.35 to 1.49)"
    )
    assert first_command("my run", [WAITS]) and not first_command("my run", [found])
    assert "1.42x" in ceiling_text(found) and "1.42x" not in ceiling_text(WAITS)
    unclear = replace(WORKERS, measured=MeasuredChange("stopped"))
    assert ("measured", "stopped") in verdict(replace(WAITS, changes=(unclear,))).rows


def test_a_change_that_is_not_worthwhile_is_no_warning() -> None:
    why = "the run ends before it pays off"
    block = verdict(Finding("optimizer", "the optimizer", (), "certain", leave=why))
    assert block.tone == "" and block.rows == (("leave as is", why),)
    assert verdict(Finding("healthy", "no bottleneck", (), "certain")).tone == "good"


@pytest.mark.parametrize(
    ("changes", "tail"),
    [
        ((), ""),
        ((HOIST,), "; Hoist it (m.py:3 in f)"),
        ((WORKERS,), "; try loader.workers=4 run.name=a b"),
        ((HOIST, WORKERS), "; Hoist it (m.py:3 in f); or try loader.workers=4 run.name=a b"),
        ((WORKERS, HOIST), "; try loader.workers=4 run.name=a b"),
    ],
)
def test_the_line_names_the_change_to_try(changes: tuple[Change, ...], tail: str) -> None:
    finding = Finding("few-workers", "waiting", (), "likely", 0.5, 2.0, changes)
    event = FindingEvent(9, finding.cause, finding.title, False, finding)
    assert finding_line(finding) == event_line(event) == f"finding: waiting, at most 2.0x{tail}"
    setting, other = choices(finding)
    assert setting == (WORKERS if WORKERS in changes else None)
    assert other == (HOIST if changes[:1] == (HOIST,) else None)


def test_the_line_of_a_finding_that_pays_off_late_is_cleared_or_is_no_news() -> None:
    changes = (HOIST, Change("use fewer threads", ("run.threads=1",)))
    finding = Finding("threads", "others use 1 core", (), "likely", changes=changes, from_steps=1200)
    assert finding_line(finding).endswith("1,200 steps and more, try run.threads=1")
    assert event_line(FindingEvent(9, "tf32", "TF32 is off", True)) == "finding cleared: TF32 is off"
    assert event_line(FindingEvent(9, "too-short", "too short")) == ""


def test_the_end_of_an_observation_is_told_at_once() -> None:
    ended = MarkEvent("warning", 3, "ValueError: odd", {"observed": "no more"})
    assert urgent_line(ended) == ended.text
    assert not urgent_line(MarkEvent("note", 3, "not timed: f", {"observed": "in part"}))
    assert not urgent_line(MarkEvent("warning", 3, "something else"))


# The diagnosis page: functions of a profiled step; of old records, stack samples

STACKS = StacksEvent(
    4_210, 1_204,
    [["data_wait", "/home/me/clips.py", 41, "load", 690, 1], ["backward", "loop.py", 9, ENGINE, 300, 0]],
)  # fmt: skip


def shown(width: int = 80, config: dict[str, Any] | None = None, **parts: Any) -> str:
    value = snapshot(**parts)
    assert value.run is not None
    value = replace(value, run=replace(value.run, config={**value.run.config, **(config or {})}))
    lines = block_rows(diagnosis_blocks(value, DiagnosisResult(), "a", True), width)
    return "\n".join("".join(text for text, _ in row) for row in lines)


def test_functions_are_shown_with_their_share_time_calls_and_phase() -> None:
    text = shown(100, {"loader": {"workers": 2}}, functions=MEASURED["functions"], stacks=STACKS)
    assert "4,210" in text
    assert re.search("58 %  31.4 ms    128  data_wait  clips.py:41 in load +Clips.__getitem__\n", text)
    assert "the 2" in text and "are listed by themselves" in text and "1,204" not in text


def test_an_old_record_shows_its_stack_samples() -> None:
    text = shown(stacks=STACKS)
    assert "(1,204" in text and "57 %  data_wait  /home/me/clips.py:41 in load" in text
    assert "all of backward" in text


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"config": {"log": {}}}, "no step was profiled yet"),
        ({"config": {"log": {"profile_every_s": 0.0}}}, "log.profile_every_s is 0"),
        ({"functions": FunctionsEvent(9, 10**7, [])}, "No function of your code"),
    ],
)
def test_without_functions_the_reason_is_shown(parts: dict[str, Any], text: str) -> None:
    assert text in shown(**parts)


@pytest.mark.parametrize(("status", "offered"), [("training", True), ("done", False)])
def test_a_capture_is_only_offered_while_a_run_can_make_one(status: str, offered: bool) -> None:
    assert ("press k" in shown(status=status, kernels=None)) == offered


@pytest.mark.parametrize("width", [20, 40, 60, 120])
def test_a_narrow_page_leaves_out_folders_but_never_the_file_the_line_and_the_function(width: int) -> None:
    rows = [["a/very/long/path/to/the/file/clips.py", 41, "load", 1, 10**6, 10**6, "", "data_wait"]]
    text = " ".join(shown(width, functions=FunctionsEvent(9, 10**7, rows)).split())
    assert "clips.py:41 in load" in text and ("a/very/long" in text) == (width >= 60)


def test_where_earlier_events_are_is_said() -> None:
    few, many = (shown(marks=snapshot().marks[:1] * count) for count in (20, 21))
    assert "Earlier events" not in few and "Earlier events" in many


# Trials


def test_both_sides_are_shown_in_a_table() -> None:
    side = {"prepare_s": 2.0, "step_s": 0.05, "items_per_s": 640.0, "peak_bytes": 1 << 30}
    change = {**side, "step_s": 0.025, "items_per_s": 1280.0, "prepare_s": 40.0, "compile_s": 38.0,
              "not_in_effect": ["loader.workers = 2 is 0: \x1b[2J"]}  # fmt: skip
    event = TrialEvent(
        ["speed.compile=default"], "run one", "faster", "", 2.0, abba_blocks=12, seconds=41.0, base=side, change=change,
        loss="close", loss_text="the first 10 losses differ by up to 0.1 %",
    )  # fmt: skip
    assert lines(trial_blocks(event)) == [
        "                        step     throughput                      setup  peak memory",
        "baseline               50 ms    640 items/s                      2.0 s      1.0 GiB",
        "speed.compile=default  25 ms  1,280 items/s  40.0 s (38.0 s compiling)      1.0 GiB",
        "",
        "faster 2.00x, 12 ABBA blocks in 41.0 s",
        "losses: close: the first 10 losses differ by up to 0.1 %",
        "! not in effect: loader.workers = 2 is 0: \\x1b[2J",
    ]
    assert lines(trial_blocks(TrialEvent(["x=1"], "y", "failed", "", reason="z"))) == ["failed: z"]
    windows = replace(event, base={**side, "unit": "segment"}, change={**change, "unit": "segment"})
    assert lines(trial_blocks(windows))[1].split()[3:5] == ["640", "segments/s"]


def test_the_conditions_of_a_trial() -> None:
    event = TrialEvent(
        ["a=1"], "run one", "faster", "faster", ratio=1.4, low=1.3, high=1.5, seconds=70.0, budget_s=60.0,
        device="CPU", in_effect=True,
    )  # fmt: skip
    assert trial_text(event) == "faster 1.40x (1.30 to 1.50)"
    assert conditions(event) == "measured against run one on CPU, for 60 s, and 10.0 s to finish"
    unknown = conditions(replace(event, seconds=42.0, in_effect=None))
    assert unknown.endswith("for 42 of 60 s; whether it is in effect cannot be verified")


def test_what_needs_attention_stands_out() -> None:
    event = TrialEvent(
        ["a=1"], "run one", "faster", "faster 1.40x", base={"prepare_s": 1.0}, change={"not_in_effect": ["tf32"]},
        loss="differs", loss_text="by 3 %",
    )  # fmt: skip
    _table, result, losses, effect = trial_blocks(event)
    assert isinstance(losses, Text) and isinstance(effect, Text) and isinstance(result, Text)
    assert (losses.tone, effect.tone, result.tone) == ("warn", "warn", "")


def test_the_progress_of_a_trial_is_one_line() -> None:
    assert measurement(Progress("starting", 3.0, 60.0)) == "3 of 60 s   starting"
    later = measurement(Progress("measuring", 18.0, 60.0, 3, 1.4, 1.2, 1.61, pairs=2))
    assert later == "18 of 60 s   measuring   3 ABBA blocks of 2 pairs of processes   1.40x (1.20 to 1.61)"


# `check`

MB = 1 << 20


# A way to fit, and what a budget asks for.
WAY = {
    "sets": ["batch.micro=5", "batch.accumulation=4"],
    "peak_bytes": 40 * MB,
    "step_s": 0.5,
    "note": "slower",
}
BUDGET = {
    "found": True, "levels": {"blocks.0": "all", "blocks.1": "cheap"}, "blocks": 6, "peak_bytes": 90 * MB,
    "slower": 1.21, "refused": {"mix": "it changes its buffers"}, "why": "",
}  # fmt: skip
REPORT: dict[str, Any] = {
    "data": "400 samples", "device": "cuda:0", "device_reason": "the only GPU", "parameters": 1, "model": "mlp",
    "size": None, "predicted_bytes": {"total": 115 * MB, "activations": 115 * MB}, "micro_batch": 10,
    "effective_batch": 20, "memory_source": "a probe", "memory_reliable": True, "memory_why_not": "", "nearest": None,
    "fits": True, "available_bytes": 214 * MB, "retries": 0, "bytes_without_retries": 215 * MB, "step_s": 1.0,
    "step_measured": True, "epoch_s": 1.0, "steps_per_epoch": 1, "total_s": 1.0, "total_steps": 1, "ranks": 1,
    "sharded": None, "ways": [], "budget": None, "step_doubt": "", "step_range_s": None, "decides": None, "busy": None,
    "notes": [], "advice": ["loader.workers exceeds the cores"],
}  # fmt: skip


def facts(**changes: Any) -> str:
    return "\n".join(f"{label}: {text}" for label, text in check_facts({**REPORT, **changes}).rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "115 MiB of 214 MiB available, fits: activations 115 MiB"),
        ({"fits": False}, "DOES NOT FIT"),
        ({"fits": None, "available_bytes": None}, "of n/a available"),
        ({"retries": 1}, "1 allocator retry in"),
        ({"retries": 2}, "2 allocator retries in"),
        ({"nearest": (5, 4)}, "fits: --set batch.micro=5 --set batch.accumulation=4"),
        (
            {"fits": False, "ways": [WAY]},
            "would fit: --set batch.micro=5 --set batch.accumulation=4: predicted 40.0 MiB, 500 ms a step; slower",
        ),
        (
            {"budget": BUDGET},
            "budget: 2 of 6 blocks keep less for backward; a micro-batch takes 1.21 times as long",
        ),
        ({"budget": BUDGET}, "except matrix products and attention: blocks.1"),
        ({"budget": BUDGET}, "mix keeps what it needs: it changes its buffers"),
        (
            {"budget": {**BUDGET, "found": False, "why": "too large"}},
            "budget: not reached: at least 90.0 MiB; too large",
        ),
        ({"epoch_s": None, "total_s": None}, "time: n/a:"),
        ({}, "advice: loader.workers"),
        (
            {"step_range_s": (0.1, 0.4), "decides": "host"},
            "(predicted, 100 ms to 400 ms, limited by the host)",
        ),
        (
            {"fits": False, "sharded": {"ranks": 4, "peak_bytes": 40 * MB, "fits": True}},
            "on 4 ranks 40.0 MiB each: --set parallel.ranks=4 --set parallel.strategy=fsdp2",
        ),
    ],
)
def test_the_facts_say_what_fits(changes: dict[str, Any], words: str) -> None:
    assert words in facts(**changes)


def test_a_step_time_measured_beside_other_processes_names_their_cores() -> None:
    busy = busy_cores(CoreUse(4.0, 2.5, 1.5, 4.0, 9, ((812, "blender", 1.4),)))
    assert (busy["cores"], busy["used_by_steps"], busy["used_by_others"]) == (4.0, 2.5, 1.5)
    assert busy["processes"] == [{"pid": 812, "name": "blender", "cores": 1.4}]
    assert "1.5 of 4 cores, mainly blender" in facts(busy=busy)


def test_a_process_that_uses_little_of_what_others_use_is_among_them() -> None:
    text = others_text(CoreUse(2.0, 0.4, 1.6, 2.0, 9, ((812, 'your run "it"', 0.3),)))
    assert text == 'other processes use 1.6 of 2 cores, your run "it" among them'
