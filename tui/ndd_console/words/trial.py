"""What is measured, in words: trials, tuning, scaling and the claims of guides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ndd_engine.record.events import TrialEvent
from ndd_engine.text import MISSING, counted, duration, number, percent, plural, rate, size
from ndd_engine.trial.outcome import breaks_even, verdict_parts

from .blocks import COMMAND, TONES, Block, Intervals, NamedInterval, NamedValues, Table, Text, interval_text
from .finding import command_text

if TYPE_CHECKING:
    from ndd_engine.script.edits import Edit
    from ndd_engine.trial.outcome import Progress
    from ndd_engine.trial.tuning import TuningRow, TuningState

# verdict: style of it on a screen.
VERDICTS = {
    "faster": "good",
    "no difference": "text",
    "slower": "bad",
    "inconclusive": "warn",
    "out of memory": "bad",
    "failed": "bad",
    "stopped": "warn",
}
# Trials that a report shows.
_NEWEST = 40

SETTING_COLUMNS = ("state", "setting", "vs. best so far", "vs. baseline", "memory", "losses", "why")


def trial_text(trial: TrialEvent | None) -> str:
    """ "faster 1.42x (1.35 to 1.49)"."""
    return f"{trial.verdict} {ratio_text(trial)}".strip() if trial is not None else ""


def ratio_text(trial: TrialEvent | None, missing: str = "") -> str:
    """ "1.42x (1.35 to 1.49)"; `missing` without a ratio."""
    return (interval_text(trial.ratio, trial.low, trial.high) if trial is not None else "") or missing


class ProgressTexts(NamedTuple):
    """The progress of a trial: time of the budget, what it does, ABBA blocks so far, ratio so far; "" for none yet."""

    time: str
    doing: str
    blocks: str
    ratio: str


def measured(progress: Progress) -> ProgressTexts:
    """The parts of a progress."""
    spent, blocks = f"{progress.spent_s:.0f} of {progress.budget_s:.0f} s", ""
    if progress.abba_blocks:
        blocks = counted(progress.abba_blocks, "ABBA block")
    if blocks and progress.pairs:
        blocks += f" of {counted(progress.pairs, 'pair')} of processes"
    ratio = interval_text(progress.ratio, progress.low, progress.high)
    return ProgressTexts(spent, progress.doing, blocks, ratio)


def measurement(progress: Progress) -> str:
    """ "12 of 60 s   measuring   4 ABBA blocks   1.41x (1.33 to 1.50)"."""
    return "   ".join(filter(None, measured(progress)))


def trial_blocks(trial: TrialEvent, title: str = "") -> Iterator[Block]:
    """Both sides as a table, the verdict, whether the losses agree, and what is not in effect."""
    rows = []
    for name, side in (("baseline", trial.base), (_change(trial), trial.change)):
        if side.get("prepare_s") is not None:
            setup, speed = duration(side["prepare_s"]), side.get("items_per_s")
            if side.get("compile_s") is not None:
                setup += f" ({duration(side['compile_s'])} compiling)"
            throughput = MISSING if speed is None else rate(speed, plural(side.get("unit") or "item"))
            rows.append((name, duration(side.get("step_s")), throughput, setup, size(side.get("peak_bytes"))))
    if rows:
        columns = ("", "step", "throughput", "setup", "peak memory")
        yield Table(title, columns, tuple(rows), frozenset(range(1, 5)), wide=0)
    told = [*verdict_parts(trial), *(["the change is in effect"] if trial.in_effect else [])]
    if trial.break_even_steps:
        told.append(breaks_even(trial.break_even_steps))
    yield Text(f"{title}: {'; '.join(told)}" if title and not rows else "; ".join(told))
    if trial.loss_text:
        yield Text(f"losses: {trial.loss}: {trial.loss_text}", "warn" if trial.loss == "differs" else "")
    for name in trial.change.get("not_in_effect") or filter(None, [trial.not_in_effect]):
        yield Text(f"not in effect: {name}", "warn")


def about_trial(budget_s: float, pauses: str) -> str:
    """What a trial does. pauses: the run that is paused meanwhile, or ""."""
    paused = f" {paused_text(pauses)}." if pauses else ""
    both = "Baseline and candidate train alternately until the difference is clear"
    return f"{both}, for up to {number(budget_s)} s.{paused}"


def paused_text(name: str) -> str:
    return f"{name} is paused and resumes after the trial"


def trial_line(trial: TrialEvent) -> str:
    """The line of a log."""
    return f"trial of {_change(trial)} vs. {trial.against}: {trial.text}"


def conditions(trial: TrialEvent) -> str:
    """What it was measured against, on what, and for how long."""
    where = f" on {trial.device}" if trial.device else ""
    took, over_s = duration(trial.seconds), trial.seconds - trial.budget_s
    if trial.budget_s and over_s < 0.5:
        took = f"{min(trial.seconds, trial.budget_s):.0f} of {number(trial.budget_s)} s"
    elif trial.budget_s:
        took = f"{number(trial.budget_s)} s, and {duration(over_s)} to finish"
    text = f"measured against {trial.against}{where}, for {took}"
    return text + ("; whether it is in effect cannot be verified" if trial.in_effect is None else "")


def left_out_text(share: float) -> str:
    """What a trial of an argument of a script leaves out. share: of the recorded time."""
    return (
        f"evaluations and checkpoints, {percent(share)} of the recorded run, are left out of a trial; if the argument "
        "is about them, run the script with it and compare the two runs"
    )


def edit_lines(edit: Edit) -> list[str]:
    """The edit that makes a change in a script, and what has to be done by hand."""
    return ["", "to make this change in your script:", *edit.diff, *(f"  {text}" for text in edit.advice)]


def trials_blocks(trials: Sequence[TrialEvent], name: str) -> list[Block]:
    """The newest trials of a run, as a plot and one by one. name: of the run, for the command."""
    newest = trials[-_NEWEST:]
    if not newest:
        command = NamedValues.of((COMMAND, command_text(name, ["KEY=VALUE"])))
        return [Text("Nothing was measured against this run yet.", "note"), command]
    out: list[Block] = []
    intervals = []
    for trial in newest:
        ratio, low, high = trial.ratio, trial.low, trial.high
        if ratio is not None and low is not None and high is not None and 0 < low <= ratio <= high < math.inf:
            tone = TONES.get(VERDICTS.get(trial.verdict, ""), "")
            intervals.append(NamedInterval(_change(trial), ratio, low, high, trial.verdict, tone))
    if intervals:
        note = (
            "Throughput of the candidate relative to the baseline, measured in ABBA blocks. Bars show the "
            f"{newest[-1].confidence * 100:.0f} % CI; an interval that contains 1x shows no measurable difference."
        )
        out.append(Intervals("Candidate vs. baseline", tuple(intervals), note))
    if len(trials) > _NEWEST:
        out.append(Text(f"The newest {_NEWEST} of {len(trials):,} trials.", "note"))
    for trial in newest:
        out += [*trial_blocks(trial, _change(trial)), Text(conditions(trial), "note")]
    return out


def _change(trial: TrialEvent) -> str:
    return ", ".join(map(str, trial.sets)) or "no change"


def setting_texts(row: TuningRow) -> tuple[str, ...]:
    """The cells of a setting; those that say nothing are ""."""
    trial, figures = row.trial, ("", "", "", "")
    if trial is not None and trial.ratio is not None:
        losses = "n/a" if trial.loss == "not comparable" else trial.loss
        memory = size(trial.change.get("peak_bytes"))
        figures = (ratio_text(trial), ratio_text(row.to_start), memory, losses)
    verdict = trial.verdict if trial is not None else ""
    return row.state, row.candidate.title, *figures, row.reason or verdict


def to_measure_text(rows: Sequence[TuningRow]) -> str:
    """The settings that tuning begins with."""
    waiting = [row.candidate.name for row in rows if row.state == "waiting"]
    return f"{counted(len(waiting), 'setting')} to measure: {', '.join(waiting) or 'none'}"


def setting_line(row: TuningRow) -> str:
    """ "kept workers-4: 1.42x (1.35 to 1.49) faster"."""
    ratio = f" {ratio_text(row.trial)}" if row.trial and row.trial.ratio is not None else ""
    return f"{row.state} {row.candidate.name}:{ratio} {row.reason}"


def tuning_blocks(state: TuningState) -> Iterator[Block]:
    """The settings that were asked for, and the result in a sentence."""
    from ndd_engine.trial.tuning import NOT_ASKED

    rows = tuple(setting_texts(row) for row in state.rows if row.reason != NOT_ASKED)
    if rows:
        yield Table("", SETTING_COLUMNS, rows)
    yield Text(state.text)
