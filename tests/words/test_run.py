"""A run as text: named units, settings once, remaining time, and the summary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ndd_console.output.run_log import RunProgress
from ndd_console.words.run import introduction, progress_line, summary
from ndd_engine.diagnose import Change, Finding
from ndd_engine.record.events import FindingEvent, parse
from ndd_engine.record.snapshot import Evaluation, NotFinite, Throughput, TimeLeft
from tests.ui.fakes import FINDING, SECOND, SETTINGS, ended, mark, run_event, snapshot, trial_event


def teller(lines: list[str]) -> RunProgress:
    return RunProgress(lines.append, every_s=1e9, since=0.0)


def test_a_line_names_its_units() -> None:
    line = progress_line(snapshot())
    for part in (
        "step 4,218/6,900", "18.3 steps/s", "4,687 windows/s", "1,199,872 characters/s",
        "2 micro-steps of 27.3 ms", "35.5 TFLOP/s, MFU 34 %", "2 min 26 s left",
    ):  # fmt: skip
        assert part in line, part
    assert "micro" not in progress_line(snapshot(micro_steps=1.0))
    plain = progress_line(snapshot(run=run_event(token=None), work=None, throughput=Throughput()))
    assert "character" not in plain and "FLOP" not in plain


def test_what_is_left_says_what_it_is_without() -> None:
    for left, words in (
        (
            TimeLeft(90.0, 3, checkpoints=2),
            "s+ left, excluding evaluations and checkpoints (not measured yet)",
        ),
        (TimeLeft(90.0, 3, 2.0, 2, None), "left, excluding checkpoints (not measured yet)"),
        (TimeLeft(90.0, 3, 2.0), "1 min 30 s left"),
        (TimeLeft(), "time left n/a"),
    ):
        assert progress_line(snapshot(left=left)).endswith(words)


def test_the_introduction_says_what_a_step_and_an_epoch_are() -> None:
    text = "\n".join(introduction(snapshot()))
    assert "6,900 optimizer steps of 256 windows of 256 characters (2 micro-steps of 128);" in text
    assert "one epoch is 276 steps, 70,656 windows, 18,087,936 characters" in text
    single = run_event(config={"batch": {"micro": 256, "accumulation": 1}}, item="clip", token=None)
    text = "\n".join(introduction(snapshot(run=single)))
    assert "optimizer steps of 256 clips;" in text and text.endswith("70,656 clips")
    ranks = run_event(config={"batch": {"micro": 64, "accumulation": 2}, "parallel": {"ranks": 2}})
    assert "(2 micro-steps of 64 on each of 2 ranks);" in "\n".join(introduction(snapshot(run=ranks)))
    damaged = run_event(tokens_per_item=float("nan"))
    assert introduction(snapshot(run=damaged))[-1].endswith("70,656 windows")


def test_settings_are_told_once_and_again_when_they_change() -> None:
    lines: list[str] = []
    progress = teller(lines)
    value = snapshot(marks=())
    progress.look(value)
    told = [line for line in lines if line.startswith(("setting ", "warning: speed."))]
    assert told == [
        "setting loader.workers = 4, in effect: 4 worker processes answered the first batch",
        "setting loader.pin_memory = true, in effect: the first batch was in pinned memory",
        "setting precision.amp = bf16, in effect: 98 % of the products were computed in bfloat16",
        "warning: speed.attention = flash, applied as efficient, not in effect: the mask needs another back end",
    ]
    lines.clear()
    progress.look(replace(value, step=4_219))
    assert not [line for line in lines if "setting" in line or "speed." in line]
    found = replace(SETTINGS[1], in_effect=True, verified="fused is set")
    progress.look(replace(value, settings=(SETTINGS[0], found, *SETTINGS[2:])))
    assert lines[-1] == "setting optimizer.implementation = auto, applied as fused, in effect: fused is set"


def test_a_setting_that_is_not_in_effect_is_told_once_though_it_is_a_mark_too() -> None:
    lines: list[str] = []
    lost = mark(0, "warning", "speed.attention = flash", setting="speed.attention")
    teller(lines).look(snapshot(marks=(lost,)))
    assert len([line for line in lines if "speed.attention" in line]) == 1


def test_compiling_is_told() -> None:
    lines: list[str] = []
    marks = (
        mark(0, "compile", "compiled in 31 s (default)", seconds=31.0, mode="default"),
        mark(9, "recompile", "compiled again: another shape"),
    )
    teller(lines).look(snapshot(marks=marks, settings=()))
    assert "compiled in 31 s (default)" in lines and "compiled again: another shape" in lines


def test_the_last_words_hold_the_rates_and_the_work() -> None:
    value = ended("done", "all steps done")
    text = "\n".join(summary(value, value.end, "runs/x"))
    for part in (
        "4,218 optimizer steps, 1,079,808 windows in 3 min 51 s",
        "step 54.6 ms (2 micro-steps of 27.3 ms): 18.3 steps/s, 4,687 windows/s, 1,199,872 characters/s, epoch 15.1 s",
        "35.5 TFLOP/s, MFU 34 % of 104 TFLOP/s (bf16 dense), intensity 62.6 FLOP/B: bandwidth-bound side",
        "requested but not in effect: speed.attention",
    ):
        assert part in text, part
    host = "\n".join(summary(snapshot(False), None, "runs/x"))
    assert "MFU n/a: no published peak for this CPU" in host


def test_a_stopped_run_gives_its_reason_once_and_how_to_resume() -> None:
    value = ended("stopped", "stopped from the console; checkpoint at step 4,218")
    lines = summary(value, value.end, "runs/x")
    assert lines[0] == "stopped from the console; checkpoint at step 4,218"
    assert value.run is not None
    assert lines[-1] == f"resume with: ndd-console train --resume {value.run.name}"
    done = ended("done", "finished all 10 steps")
    lines = summary(done, done.end, "runs/x")
    assert lines[0] == "done: finished all 10 steps" and not any("resume" in line for line in lines)


def test_a_stage_that_counts_is_said_now_and_then() -> None:
    lines: list[str] = []
    now = [0.0]
    progress = RunProgress(lines.append, every_s=5.0, since=0.0, clock=lambda: now[0])
    preparing = snapshot(status="preparing", run=None, marks=(), settings=(), steps_per_s=None)
    for done in range(0, 1000, 100):
        now[0] += 1.0
        progress.look(replace(preparing, stage=f"encoding items once: {done:,} of 1,000"))
    progress.look(replace(preparing, stage="building the model"))
    assert [line.rpartition(": ")[2] for line in lines] == [
        "0 of 1,000",
        "500 of 1,000",
        "building the model",
    ]


def test_findings_and_trials_are_told_as_they_come() -> None:
    lines: list[str] = []
    progress = RunProgress(lines.append, since=100.0)
    event = FindingEvent(40, FINDING.cause, FINDING.title, False, FINDING)
    progress.hear(99.0, event)  # before this narrator's time
    assert lines == []
    progress.hear(101.0, event)
    line = FindingEvent(50, SECOND.cause, SECOND.title, False, SECOND).to_json(102.0)
    again = parse(line)
    assert again is not None
    progress.hear(*again)
    progress.hear(103.0, FindingEvent(60, "too-short", "too short to judge"))
    progress.hear(104.0, FindingEvent(70, FINDING.cause, FINDING.title, True))
    progress.hear(105.0, trial_event())
    progress.hear(105.0, snapshot().settings[0])
    assert lines == [
        "finding: input-bound: the GPU waits 57 % of each step for the loader, at most 2.3x; "
        "try loader.workers=4 loader.pin_memory=true",
        "finding: the optimizer's step takes 4 % of each step, at most 1.04x; "
        "leave as is: the run ends in 2 min 26 s, before the change breaks even",
        "finding cleared: input-bound: the GPU waits 57 % of each step for the loader",
        "trial of loader.workers=4, loader.pin_memory=true vs. run charlm-001: "
        "faster: 1.42 times as many windows per second as the baseline",
    ]


def test_a_finding_whose_ceiling_moves_is_one_line() -> None:
    lines: list[str] = []
    progress = teller(lines)

    def hear(share: float, workers: int = 4, gone: bool = False) -> None:
        changes = (Change("load with workers", (f"loader.workers={workers}",)),)
        finding = Finding(
            "few-workers", f"{share:.0%} waiting", (), "likely", share, 1 / (1 - share), changes
        )
        progress.hear(1.0, FindingEvent(9, finding.cause, finding.title, gone, finding))

    for share in (0.5, 0.2, 0.7, 0.5):
        hear(share)
    assert lines == ["finding: 50% waiting, at most 2.0x; try loader.workers=4"]
    # Other advice is news, and so are its end and its return.
    hear(0.5, 8)
    hear(0.5, 8, gone=True)
    hear(0.5, 8)
    assert [line.split()[1] for line in lines[1:]] == ["50%", "cleared:", "50%"]


def test_names_from_the_users_code_cannot_control_the_terminal() -> None:
    best = Evaluation(9, {"los\x1b[2Js": 1.0}, None)
    value = snapshot(run=run_event(workload="m\x1b]0;x:f", model="a\nb"), best=best)
    heard: list[str] = []
    RunProgress(heard.append).look(value)
    for line in (*heard, *summary(value, None, "runs/\x9bx")):
        assert line.isprintable()


def test_the_summary_names_three_findings_with_their_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [FINDING, *(replace(SECOND, cause=cause, changes=()) for cause in ("gc", "log", "clip"))]
    monkeypatch.setattr("ndd_console.words.run.diagnose", lambda snapshot: found)
    lines = summary(snapshot(), None, "runs/mine")
    told = [index for index, line in enumerate(lines) if line.startswith("finding: ")]
    assert len(told) == 3
    assert ": ndd-console try charlm-001 --set loader.workers=4" in lines[told[0]]


def test_the_summary_says_at_which_step_its_last_loss_was() -> None:
    value = snapshot(step=300, last_loss=(298, 0.25), loss=0.5)  # the mean of the window is another figure
    assert any("; last loss 0.2500 at step 298" in line for line in summary(value, None, "runs/mine"))
    value = replace(value, last_loss=(300, 0.25))
    assert any(line.endswith("; last loss 0.2500") for line in summary(value, None, "runs/mine"))


def test_the_summary_tells_updates_that_the_gradient_scaler_skipped() -> None:
    value = snapshot(step=40, not_finite=NotFinite(skipped=2, updates=40))
    assert any(
        "; 2 updates skipped by the gradient scaler" in line for line in summary(value, None, "runs/mine")
    )
    assert not any("skipped" in line for line in summary(snapshot(step=40), None, "runs/mine"))
