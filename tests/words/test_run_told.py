"""A run in words: lines with units, what is left, settings and findings once, ranks, and the summary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ndd_console.output.run_log import RunProgress
from ndd_console.words.ranks import late_text, late_words, ranks_facts, ranks_words, slowest
from ndd_console.words.run import introduction, progress_line, summary
from ndd_engine.diagnose import Change, Finding
from ndd_engine.record.events import FindingEvent, parse
from ndd_engine.record.snapshot import Evaluation, NotFinite, Snapshot, Throughput, TimeLeft
from tests.ui.fake_ranks import PLANTED, planted_snapshot
from tests.ui.fakes import FINDING, SECOND, SETTINGS, ended, mark, run_event, snapshot, trial_event


def teller(lines: list[str], **options: Any) -> RunProgress:
    return RunProgress(lines.append, **{"every_s": 1e9, "since": 0.0, **options})


def test_a_line_names_its_units() -> None:
    line = progress_line(snapshot())
    for part in (
        "4,218/6,900", "18.3 steps/s", "4,687 segments/s", "1,199,872 characters/s", "2 micro-steps of 27.3 ms",
        "35.5 TFLOP/s, MFU 34 %", "2 min 26 s",
    ):  # fmt: skip
        assert part in line, part
    assert "micro" not in progress_line(snapshot(micro_steps=1.0))
    plain = progress_line(snapshot(run=run_event(token=None), work=None, throughput=Throughput()))
    assert "character" not in plain and "FLOP" not in plain


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (
            TimeLeft(90.0, 3, checkpoints=2),
            "s+ left, excluding evaluations and checkpoints (not measured yet)",
        ),
        (TimeLeft(90.0, 3, 2.0, 2, None), "left, excluding checkpoints (not measured yet)"),
        (TimeLeft(90.0, 3, 2.0), "1 min 30 s left"),
        (TimeLeft(), "time left n/a"),
    ],
)
def test_what_is_left_says_what_it_is_without(left: TimeLeft, words: str) -> None:
    assert progress_line(snapshot(left=left)).endswith(words)


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        (
            {},
            ("6,900", "256 segments of 256 characters (2 micro-steps of 128)", "276", "70,656", "18,087,936"),
        ),
        (
            {"config": {"batch": {"micro": 256, "accumulation": 1}}, "item": "clip", "token": None},
            ("256 clips;", "70,656 clips"),
        ),
        (
            {"config": {"batch": {"micro": 64, "accumulation": 2}, "parallel": {"ranks": 2}}},
            ("(2 micro-steps of 64 on each of 2 ranks)",),
        ),
        ({"tokens_per_item": float("nan")}, ("70,656 segments",)),
    ],
)
def test_the_introduction_says_what_a_step_and_an_epoch_are(
    changes: dict[str, Any], figures: tuple[str, ...]
) -> None:
    text = "\n".join(introduction(snapshot(run=run_event(**changes))))
    assert [figure for figure in figures if figure not in text] == []


def test_settings_are_told_once_and_again_when_they_change() -> None:
    lines: list[str] = []
    progress = teller(lines)
    # One that is not in effect is a mark, too.
    value = snapshot(marks=(mark(0, "warning", "speed.attention = flash", setting="speed.attention"),))

    def told() -> list[str]:
        found = [line for line in lines if any(setting.name in line for setting in SETTINGS)]
        lines.clear()
        return found

    progress.look(value)
    (*good, bad) = told()
    assert [line.split()[1] for line in good] == ["loader.workers", "loader.pin_memory", "precision.amp"]
    assert all(each.verified in line for each, line in zip((SETTINGS[0], *SETTINGS[2:4]), good, strict=True))
    assert bad.startswith("warning: speed.attention = flash")
    progress.look(replace(value, step=4_219))
    assert told() == []
    found = replace(SETTINGS[1], in_effect=True, verified="fused is set")
    progress.look(replace(value, settings=(SETTINGS[0], found, *SETTINGS[2:])))
    (line,) = told()
    assert line == "setting optimizer.implementation = auto, applied as fused, in effect: fused is set"


def test_compiling_is_told() -> None:
    lines: list[str] = []
    marks = (mark(0, "compile", "in 31 s", seconds=31.0), mark(9, "recompile", "another shape"))
    teller(lines).look(snapshot(marks=marks, settings=()))
    assert {"in 31 s", "another shape"} <= set(lines)


def test_a_stage_that_counts_is_said_now_and_then() -> None:
    lines: list[str] = []
    now = [0.0]
    progress = teller(lines, every_s=5.0, clock=lambda: now[0])
    preparing = snapshot(status="preparing", run=None, marks=(), settings=(), steps_per_s=None)
    for done in range(0, 1000, 100):
        now[0] += 1.0
        progress.look(replace(preparing, stage=f"encoding: {done:,} of 1,000"))
    progress.look(replace(preparing, stage="building"))
    assert [line.rpartition(": ")[2] for line in lines] == ["0 of 1,000", "500 of 1,000", "building"]


def test_findings_and_trials_are_told_as_they_come() -> None:
    lines: list[str] = []
    progress = teller(lines, since=100.0)
    event = FindingEvent(40, FINDING.cause, FINDING.title, False, FINDING)
    progress.hear(99.0, event)  # before this narrator's time
    assert lines == []
    progress.hear(101.0, event)
    again = parse(FindingEvent(50, SECOND.cause, SECOND.title, False, SECOND).to_json(102.0))
    assert again is not None
    progress.hear(*again)
    progress.hear(103.0, FindingEvent(60, "too-short", "too short"))
    progress.hear(104.0, FindingEvent(70, FINDING.cause, FINDING.title, True))
    progress.hear(105.0, trial_event())
    progress.hear(105.0, snapshot().settings[0])
    assert [line.partition(": ")[0] for line in lines] == [
        "finding", "finding", "finding cleared",
        "trial of loader.workers=4, loader.pin_memory=true vs. run charlm-001",
    ]  # fmt: skip
    for line, parts in zip(
        lines,
        (
            (FINDING.title, "2.3x", "try loader.workers=4 loader.pin_memory=true"),
            (SECOND.title, "1.04x", SECOND.leave),
            (FINDING.title,),
            (trial_event().text,),
        ),
        strict=True,
    ):
        assert all(part in line for part in parts)


def test_a_finding_whose_ceiling_moves_is_one_line() -> None:
    lines: list[str] = []
    progress = teller(lines)

    def hear(share: float, workers: int = 4, gone: bool = False) -> None:
        changes = (Change("load", (f"loader.workers={workers}",)),)
        finding = Finding("few-workers", f"{share:.0%}", (), "likely", share, 1 / (1 - share), changes)
        progress.hear(1.0, FindingEvent(9, finding.cause, finding.title, gone, finding))

    for share in (0.5, 0.2, 0.7, 0.5):
        hear(share)
    assert len(lines) == 1 and "50%, at most 2.0x" in lines[0]
    # Other advice is news, and so are its end and its return.
    hear(0.5, 8)
    hear(0.5, 8, gone=True)
    hear(0.5, 8)
    assert [line.split()[1].rstrip(",") for line in lines[1:]] == ["50%", "cleared:", "50%"]


# The summary


def last_words(value: Snapshot) -> str:
    return "\n".join(summary(value, value.end, Path("runs/x")))


def test_the_last_words_hold_the_rates_and_the_work() -> None:
    text = last_words(ended("done", ""))
    for part in (
        "4,218 ", "1,079,808 segments", "3 min 51 s", "54.6 ms (2 micro-steps of 27.3 ms)", "18.3 steps/s",
        "4,687 segments/s", "1,199,872 characters/s", "15.1 s", "35.5 TFLOP/s, MFU 34 % of 104 TFLOP/s", "62.6 FLOP/B",
        "speed.attention",
    ):  # fmt: skip
        assert part in text, part
    assert "MFU n/a: no published peak for this CPU" in last_words(snapshot(False))


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        # The mean of the window is another figure.
        ({"step": 300, "last_loss": (298, 0.25), "loss": 0.5}, "loss 0.2500 at step 298", "0.5000"),
        ({"step": 300, "last_loss": (300, 0.25), "loss": 0.5}, "loss 0.2500\n", "at step"),
        ({"not_finite": NotFinite(skipped=2, updates=40)}, "; 2 updates skipped", "40"),
        ({}, "", "skipped"),
    ],
)
def test_the_summary_says_what_became_of_the_losses(changes: dict[str, Any], said: str, unsaid: str) -> None:
    text = last_words(snapshot(checkpoint=None, **changes))
    assert said in text and unsaid not in text.partition("last loss")[2].partition("\n")[0]


def test_a_stopped_run_gives_its_reason_once_and_how_to_resume() -> None:
    first, *_, last = last_words(ended("stopped", "stopped as asked")).splitlines()
    assert first == "stopped as asked" and last.endswith("ndd-console train --resume charlm-001")
    done = last_words(ended("done", "all 10 steps"))
    assert done.startswith("done: all 10 steps\n") and "resume" not in done


def test_the_summary_names_three_findings_with_their_commands() -> None:
    found = [FINDING, *(replace(SECOND, cause=cause, changes=()) for cause in ("gc", "log", "clip"))]
    failed = summary(snapshot(), None, Path("runs/x"), lambda _: 1 / 0)  # type: ignore[arg-type]
    assert failed[-1].startswith("the diagnosis failed: ZeroDivisionError")
    lines = summary(snapshot(), None, Path("runs/x"), lambda _: tuple(found))
    told = [index for index, line in enumerate(lines) if line.startswith("finding: ")]
    assert len(told) == 3
    assert ": ndd-console try charlm-001 --set loader.workers=4" in lines[told[0]]


def test_a_run_that_is_too_short_to_judge_says_so_unless_something_else_is_known() -> None:
    short = replace(SECOND, cause="too-short", title="too short to judge: 4 steps", changes=())
    for found, told in (((short,), True), ((FINDING, short), False), ((), False)):
        *lines, record = summary(snapshot(), None, Path("runs/x"), lambda _, found=found: found)
        assert (short.title in lines) == told and record.startswith("record")
    # A command that ended without a step says why, and is not judged.
    nothing = replace(snapshot(), step=0, last_loss=None)
    assert short.title not in summary(nothing, None, Path("runs/x"), lambda _: (short,))


def test_out_of_memory_ends_with_what_needs_less_and_the_commands() -> None:
    reason = "out of memory on cuda:0 at step 11 in forward: tried to allocate 2.0 GiB"
    config = {"batch": {"micro": 12, "accumulation": 1}, "memory": {}, "speed": {}}
    own = replace(ended("failed", reason), run=run_event(config=config))
    text = last_words(own)
    first, second = "--set batch.micro=6 --set batch.accumulation=2", "--set memory.budget=auto"
    assert text.index(f"ndd-console train runs/x/config.toml {first}") < text.index(second)
    assert "ndd-console check runs/x/config.toml" in text
    script = replace(own, run=run_event(config={"script": {}}))
    assert f"ndd-console try charlm-001 {second}" in last_words(script)
    # Without a step there is nothing that a trial could measure.
    assert "ndd-console" not in last_words(replace(script, step=0)).partition("ran out")[2]
    other = replace(own, end=replace(own.end, reason="ValueError at step 11"))
    assert "ran out" not in last_words(other)


def test_names_from_the_users_code_cannot_control_the_terminal() -> None:
    best = Evaluation(9, {"los\x1b[2Js": 1.0}, None)
    value = snapshot(run=run_event(workload="m\x1b]0;x:f", model="a\nb"), best=best)
    heard: list[str] = []
    RunProgress(heard.append).look(value)
    assert all(line.isprintable() for line in (*heard, *summary(value, None, Path("runs/\x9bx"))))


# Ranks


def test_ranks_and_hosts_are_counted_and_progress_names_the_slowest() -> None:
    assert ranks_words(planted_snapshot(2)) == "2 ranks, DDP, 1 host"
    assert ranks_words(planted_snapshot(1024)) == "1,024 ranks, FSDP2, 128 hosts"
    assert late_words(snapshot(False)) == ranks_words(snapshot(False)) == ""
    value = planted_snapshot(64)
    assert value.ranks is not None
    part = replace(value.ranks, newest=replace(value.ranks.newest, launched=256, first_rank=64))
    assert ranks_words(replace(value, ranks=part)).startswith("64 of 256 ranks")
    slow = late_words(planted_snapshot(2))
    assert "1 (+7.6 ms data_wait)" in slow and slow in progress_line(planted_snapshot(2))
    assert "(+" not in late_words(value)


@pytest.mark.parametrize("world", PLANTED)
def test_the_straggler_is_named_and_needs_attention(world: int) -> None:
    value = planted_snapshot(world)
    ranks, planted = value.ranks, PLANTED[world].late
    assert ranks is not None
    facts, table = ranks_facts(value, ranks), slowest(ranks.newest)
    assert dict(facts.rows)["straggler"] == late_text(ranks)
    if planted:
        assert late_text(ranks).startswith(f"rank {planted[0]}") and facts.warn == {"straggler"}
        assert table.rows[0][0] == str(planted[0]) and table.warn == {0}
    else:
        assert late_text(ranks) == "none" and not facts.warn and not table.warn
    assert [row[0] for row in table.rows[-4:]] == ["least", "median", "mean", "most"]
