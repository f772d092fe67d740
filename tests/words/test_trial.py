"""The result of a trial in words."""

from __future__ import annotations

from dataclasses import replace

from ndd_console.render.text import lines
from ndd_console.words.trial import trial_blocks, trial_facts, trial_text
from ndd_engine.record.events import TrialEvent


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
        "not in effect: loader.workers = 2 is 0: \\x1b[2J",
        "faster 2.00x",
    ]
    assert lines(trial_blocks(TrialEvent(["x=1"], "y", "failed", "failed: z"))) == ["failed: z"]


def test_the_facts_name_what_needs_attention() -> None:
    event = TrialEvent(
        ["a=1"], "run one", "faster", "faster", ratio=1.4, low=1.3, high=1.5, abba_blocks=12, pairs=6, between=0.012,
        seconds=70.0, budget_s=60.0, device="CPU", in_effect=True, loss="close", break_even_steps=0,
        base={"step_s": 0.05}, change={"step_s": 0.04},
    )  # fmt: skip
    facts = trial_facts(event)
    assert trial_text(event) == "faster 1.40x (1.30 to 1.50)" and not facts.warn
    assert dict(facts.rows) == {
        "interval": "95 % CI from 12 ABBA blocks of 6 pairs of processes and the usual difference between processes, "
        "1.2 %",
        "baseline": "run one; measured for 60 s, and 10.0 s to finish on CPU",
        "in effect": "yes",
        "loss": "close",
        "step": "baseline 50 ms, candidate 40 ms",
        "break-even": "immediately: no extra setup time",
    }
    worse = trial_facts(
        replace(event, in_effect=False, not_in_effect="tf32", loss="differs", break_even_steps=9)
    )
    assert worse.warn == {"in effect", "loss"} and dict(worse.rows)["in effect"] == "no: tf32"
    assert dict(worse.rows)["break-even"] == "after 9 optimizer steps"
    busy = "other processes used 1.6 of 2 cores"
    loaded = trial_facts(replace(event, load=busy))
    assert loaded.warn == {"load"} and dict(loaded.rows)["load"] == busy
