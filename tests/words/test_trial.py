"""The result of a trial in words."""

from __future__ import annotations

from dataclasses import replace

from ndd_console.render.text import lines
from ndd_console.words.blocks import Text
from ndd_console.words.trial import conditions, measurement, trial_blocks, trial_text
from ndd_engine.record.events import TrialEvent
from ndd_engine.trial.outcome import Progress


def test_both_sides_are_shown_in_a_table() -> None:
    side = {"prepare_s": 2.0, "step_s": 0.05, "items_per_s": 640.0, "peak_bytes": 1 << 30}
    change = {**side, "step_s": 0.025, "items_per_s": 1280.0, "prepare_s": 40.0, "compile_s": 38.0,
              "not_in_effect": ["loader.workers = 2 is 0: \x1b[2J"]}  # fmt: skip
    event = TrialEvent(
        ["speed.compile=default"], "run one", "faster", "faster 2.00x", base=side, change=change,
        loss="close", loss_text="the first 10 losses differ by up to 0.1 %",
    )  # fmt: skip
    assert lines(trial_blocks(event)) == [
        "                        step     throughput                      setup  peak memory",
        "baseline               50 ms    640 items/s                      2.0 s      1.0 GiB",
        "speed.compile=default  25 ms  1,280 items/s  40.0 s (38.0 s compiling)      1.0 GiB",
        "",
        "losses: close: the first 10 losses differ by up to 0.1 %",
        "! not in effect: loader.workers = 2 is 0: \\x1b[2J",
        "faster 2.00x",
    ]
    assert lines(trial_blocks(TrialEvent(["x=1"], "y", "failed", "failed: z"))) == ["failed: z"]
    windows = replace(event, base={**side, "unit": "window"}, change={**change, "unit": "window"})
    assert lines(trial_blocks(windows))[1].split()[3:5] == ["640", "windows/s"]


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
    _table, losses, effect, result = trial_blocks(event)
    assert isinstance(losses, Text) and isinstance(effect, Text) and isinstance(result, Text)
    assert (losses.tone, effect.tone, result.tone) == ("warn", "warn", "")


def test_the_progress_of_a_trial_is_one_line() -> None:
    assert measurement(Progress("starting", 3.0, 60.0)) == "3 of 60 s   starting"
    later = measurement(Progress("measuring", 18.0, 60.0, 3, 1.4, 1.2, 1.61, pairs=2))
    assert later == "18 of 60 s   measuring   3 ABBA blocks of 2 pairs of processes   1.40x (1.20 to 1.61)"
