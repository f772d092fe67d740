"""Measured gains: every trial with its confidence interval and its effect on memory and loss."""

from __future__ import annotations

import math
from collections.abc import Callable

from ndd_console.words.blocks import COMMAND, TONES, Block, Facts, Interval, Intervals, Table, Text
from ndd_console.words.finding import command_text
from ndd_console.words.trial import VERDICTS, ratio_text, trial_facts
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import MISSING, size

from .model import Report

_ROWS = 40
_EFFECT = {True: "yes", False: "NO", None: MISSING}


def trials(report: Report) -> list[Block]:
    """The trials of this run as plot, table and text."""
    kept = [trial for _, trial in report.data.trials]
    newest = kept[-_ROWS:]
    if not newest:
        command = command_text(report.name, ["KEY=VALUE"])
        return [Text("Nothing was measured against this run yet.", "note"), Facts.of((COMMAND, command))]
    out: list[Block] = []
    if intervals := tuple(row for trial in newest if (row := _interval(trial)) is not None):
        note = (
            "Throughput of the candidate relative to the baseline, measured in ABBA blocks. Bars show the "
            f"{newest[-1].confidence * 100:.0f} % CI; an interval that contains 1x shows no measurable difference."
        )
        out.append(Intervals("Candidate vs. baseline", intervals, note))
    rows = tuple(
        (
            _change(trial), str(trial.verdict), ratio_text(trial, MISSING), _sides(trial, "peak_bytes", size),
            str(trial.loss), _EFFECT.get(trial.in_effect, MISSING),
        )
        for trial in kept
    )  # fmt: skip
    columns = ("change", "verdict", "speed", "peak memory", "loss", "applied")
    out.append(Table("Trials", columns, rows, wide=0).newest(_ROWS))
    for trial in newest:
        facts = trial_facts(trial, _change(trial))
        out.append(facts._replace(rows=(("result", str(trial.text)), *facts.rows)))
    return out


def _change(trial: TrialEvent) -> str:
    return ", ".join(map(str, trial.sets)) or "no change"


def _interval(trial: TrialEvent) -> Interval | None:
    """None if nothing was compared."""
    ratio, low, high = trial.ratio, trial.low, trial.high
    if ratio is None or low is None or high is None or not 0 < low <= ratio <= high < math.inf:
        return None
    tone = TONES.get(VERDICTS.get(str(trial.verdict), ""), "")
    return Interval(_change(trial), ratio, low, high, str(trial.verdict), tone)


def _sides(trial: TrialEvent, key: str, form: Callable[[float | None], str]) -> str:
    """A figure of baseline and candidate: "1.5 GB → 2.1 GB"."""
    before, after = (side.get(key) for side in (trial.base, trial.change))
    return MISSING if before is None and after is None else f"{form(before)} → {form(after)}"
