"""The trial screen: choosing a change, the measurement as it goes, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ndd_engine.record.events import Json, TrialEvent
from ndd_engine.text import MISSING, duration, number, size

from .bars import progress_bar
from .findings import at_most
from .interval import VERDICTS, interval_rows, interval_text, trial_text
from .live import Keys, footer_row
from .rows import BLANK, cells, fit, foreign, rule, shorten, take, wrap
from .style import Row

if TYPE_CHECKING:
    from ndd_engine.trial.request import Progress

_LABEL = 12
_PLOT = 60  # cells of the interval's scale at most
_EARLIER = 6


@dataclass(frozen=True, slots=True)
class Choice:
    """A change that can be tried, and the finding it comes from. ceiling: what it gains at most, None if unbounded."""

    sets: tuple[str, ...]
    title: str
    cause: str | None = None
    ceiling: float | None = None


@dataclass(frozen=True, slots=True)
class TrialState:
    """What the trial screen shows.

    base: what is compared with, in words. chosen: index over the choices, then the line of own edits. typed: that
    line; cursor: index into it. problem: why the change cannot be tried or the trial ended without a result.
    pauses: the run that stands still meanwhile, "" where none does. saved: where the configuration was written.
    """

    stage: Literal["choose", "measure", "result"]
    base: str
    choices: tuple[Choice, ...] = ()
    chosen: int = 0
    typed: str = ""
    cursor: int = 0
    problem: str = ""
    earlier: tuple[TrialEvent, ...] = ()
    trying: tuple[str, ...] = ()
    pauses: str = ""
    budget_s: float = 60.0
    progress: Progress | None = None
    stopping: bool = False
    result: TrialEvent | None = None
    saved: str = ""

    @property
    def own(self) -> bool:
        """Whether the line of own edits is chosen."""
        return self.chosen >= len(self.choices)


def trial_rows(state: TrialState, width: int, height: int) -> list[Row]:
    """Exactly `height` rows of exactly `width` cells."""
    margin = 1 if width >= 40 else 0
    inner = max(width - 2 * margin, 1)
    if state.stage == "choose":
        body, keys = _choose(state, inner, height - 1), _CHOOSE_OWN if state.own else _CHOOSE
    elif state.stage == "measure":
        body, keys = (
            _measure(state, inner),
            (("esc", "stop, and go on with the run" if state.pauses else "stop"),),
        )
    else:
        body, keys = _result(state, inner, height - 1), _result_keys(state)
    rows = [*body[: height - 1], *[BLANK] * (height - 1 - len(body)), footer_row(keys, inner)]
    rows = rows[-height:] if height > 0 else []
    if margin:
        rows = [((" ", "text"), *row) for row in rows]
    return [fit(row, width) for row in rows]


_CHOOSE: Keys = (
    ("↑↓", "choose"), ("enter", "measure it"), ("e", "edit it first"), ("m", "more time"), ("esc", "back")
)  # fmt: skip
_CHOOSE_OWN: Keys = (("↑↓", "choose"), ("enter", "measure it"), ("ctrl+t", "more time"), ("esc", "back"))


def _result_keys(state: TrialState) -> Keys:
    write: Keys = (("w", "write the changed configuration"),)
    can_write = state.result is not None and state.result.verdict != "failed" and not state.saved
    return (*(write if can_write else ()), ("t", "try another"), ("esc", "back"))


def sets_text(sets: Sequence[str]) -> str:
    """The edits of a change in one line."""
    return "  ".join(foreign(item) for item in sets)


# Choosing.


def _choose(state: TrialState, width: int, height: int) -> list[Row]:
    lines: list[Row] = [rule(f"measure a change against {foreign(state.base)}", width)]
    pauses = f" {foreign(state.pauses)} is paused meanwhile and goes on by itself." if state.pauses else ""
    about = (
        "Steps with and without the change in turn, in processes of their own, until the difference is clear or "
        f"{number(state.budget_s)} s are over.{pauses}"
    )
    small = height < 14
    if not small:
        lines += [((line, "dim"),) for line in wrap(about, width)]
        lines.append(())
    at = 0
    entries: list[Row] = []
    for index, choice in enumerate(state.choices):
        if index == state.chosen:
            at = len(entries)
        entries += _choice(choice, index == state.chosen, width)
    if state.own:
        at = len(entries)
    entries += _own(state, width)
    for part in state.problem.splitlines():
        entries += [(("  " + line, "bad"),) for line in wrap(foreign(part), width - 2)]
    room = max(height - len(lines), 1)
    earlier = _earlier(state.earlier, width, min(room - len(entries) - 2, _EARLIER))
    start = min(max(at + 3 - room, 0), max(len(entries) - room, 0))
    lines += entries[start : start + room]
    return [*lines, *([()] if earlier else []), *earlier]


def _choice(choice: Choice, chosen: bool, width: int) -> list[Row]:
    title = shorten(sets_text(choice.sets), max(width - 2, 1))
    end = "" if choice.ceiling is None else f", {at_most(choice.ceiling)}"
    return [
        (("▸ " if chosen else "  ", "accent"), (title, "select" if chosen else "bold")),
        (("  " + shorten(f"for: {foreign(choice.title)}", max(width - 2 - cells(end), 1)) + end, "dim"),),
    ]


def _own(state: TrialState, width: int) -> list[Row]:
    lead = "own edits: "
    mark = "▸ " if state.own else "  "
    if not state.own:
        hint = foreign(state.typed) or "section.key=value, several with blanks between them"
        return [((mark, "accent"), (lead, "bold"), (shorten(hint, max(width - len(lead) - 2, 1)), "dim"))]
    # What is typed stays in sight around the cursor.
    text = state.typed
    room = max(width - len(lead) - 3, 1)
    start = max(state.cursor - room, 0)
    before = text[start : state.cursor]
    under = text[state.cursor : state.cursor + 1] or " "
    after = take(text[state.cursor + 1 :], max(room - cells(before), 0))
    return [
        ((mark, "accent"), (lead, "bold"), (before, "text"), (under, "select"), (after, "text")),
        (("  section.key=value, as in loader.workers=2; several with blanks between them", "dim"),),
    ]


def _earlier(trials: Sequence[TrialEvent], width: int, count: int) -> list[Row]:
    """Earlier trials, the newest first."""
    if not trials or count < 1:
        return []
    rows: list[Row] = [rule("measured before", width)]
    shown = list(reversed(trials))[:count]
    longest = min(max(cells(sets_text(trial.sets)) for trial in shown), max(width - 34, 8))
    for trial in shown:
        sets = shorten(sets_text(trial.sets), longest)
        result = trial_text(trial)
        rows.append(
            (
                ("  " + sets + " " * (longest - cells(sets)) + "   ", "text"),
                (foreign(result), VERDICTS.get(trial.verdict, "text")),
            )
        )
    return rows


# Measuring.


def _measure(state: TrialState, width: int) -> list[Row]:
    progress = state.progress
    lines: list[Row] = [rule(f"measuring {sets_text(state.trying)}", width)]
    lines += [((line, "dim"),) for line in wrap(f"against {foreign(state.base)}", width)]
    lines.append(())
    stage = foreign(progress.stage) if progress is not None else "starting"
    if state.stopping:
        stage = (
            "stopping; the run goes on as soon as the processes have ended" if state.pauses else "stopping"
        )
    lines += [((line, "accent"),) for line in wrap(f"{stage}…", width)]
    elapsed = progress.elapsed_s if progress is not None else 0.0
    budget = progress.budget_s if progress is not None else state.budget_s
    text = f" {elapsed:.0f} of at most {budget:.0f} s"
    room = max(width - cells(text), 1)
    lines.append((*progress_bar(elapsed / budget if budget else 0.0, room), (text, "text")))
    lines.append(())
    if progress is not None:
        so_far = interval_text(progress.ratio, progress.low, progress.high) or "not yet"
        lines += _pair(
            "quads", f"{number(progress.quads)} of blocks without, with, with and without the change", width
        )
        lines += _pair("so far", so_far + (" of the speed now" if progress.ratio is not None else ""), width)
        lines += [(), *interval_rows(progress.ratio, progress.low, progress.high, min(width, _PLOT))]
    if state.pauses:
        lines += [(), ((f"{foreign(state.pauses)} is paused and goes on when this is over", "dim"),)]
    return lines


# The result.


def _result(state: TrialState, width: int, height: int) -> list[Row]:
    trial = state.result
    if trial is None:
        lines: list[Row] = [rule("the trial could not be made", width, "bad")]
        for part in state.problem.splitlines():
            lines += [((line, "text"),) for line in wrap(foreign(part), width)]
        return lines
    style = VERDICTS.get(trial.verdict, "text")
    lines = [rule(f"{trial_text(trial)}: {sets_text(trial.sets)}", width, style)]
    lines += [((line, "text"),) for line in wrap(foreign(trial.text), width)]
    plot = interval_rows(trial.ratio, trial.low, trial.high, min(width, _PLOT))
    if plot and height >= 16:
        lines += [(), *plot]
    lines.append(())
    for label, text, tone in _facts(trial):
        lines += _pair(label, text, width, tone)
    if state.problem:
        lines += [(), *(((line, "bad"),) for line in wrap(foreign(state.problem), width))]
    if state.saved:
        lines += [(), *(((line, "good"),) for line in wrap(f"written: {foreign(state.saved)}", width))]
    return lines


def _facts(trial: TrialEvent) -> list[tuple[str, str, str]]:
    """(label, words, style) of a result."""
    facts: list[tuple[str, str, str]] = []
    if trial.ratio is not None:
        facts.append(
            (
                "interval",
                f"{trial.confidence * 100:.0f} % confidence, from {number(trial.quads)} quads",
                "text",
            )
        )
    where = f", on {foreign(trial.device)}" if trial.device else ""
    took = f"{trial.seconds:.0f} of at most {number(trial.budget_s)} s{where}"
    facts.append(("against", f"{foreign(trial.against)}; {took}", "text"))
    if trial.in_effect is False:
        facts.append(("in effect", f"no: {foreign(trial.not_in_effect) or 'it changed nothing'}", "warn"))
    else:
        facts.append(("in effect", "yes" if trial.in_effect else f"{MISSING}: that cannot be told", "text"))
    loss = foreign(trial.loss) + (f": {foreign(trial.loss_text)}" if trial.loss_text else "")
    facts.append(("loss path", loss, "warn" if trial.loss == "differs" else "text"))
    facts.append(("memory", _both(trial.base, trial.change, "peak_bytes", size), "text"))
    facts.append(("step", _both(trial.base, trial.change, "step_s", duration), "text"))
    facts.append(("preparing", _both(trial.base, trial.change, "prepare_s", duration), "text"))
    if trial.break_even_steps is not None:
        steps = trial.break_even_steps
        word = f"after {number(steps)} optimizer steps what it costs before training is repaid"
        facts.append(
            ("break-even", word if steps else "at once: it costs nothing more before training", "text")
        )
    return facts


def _both(base: Json, change: Json, key: str, shown: Callable[[float | None], str]) -> str:
    """A figure of both sides: "2.1 GB now, 2.4 GB with the change"."""
    return f"{shown(base.get(key))} now, {shown(change.get(key))} with the change"


def _pair(label: str, text: str, width: int, style: str = "text") -> list[Row]:
    indent = _LABEL if width >= 48 else 0
    lines = wrap(text if indent else f"{label}: {text}", max(width - indent, 1))
    return [
        (((label if index == 0 and indent else "").ljust(indent), "accent"), (line, style))
        for index, line in enumerate(lines)
    ]
