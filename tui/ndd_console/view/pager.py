"""Pages of text: the help, and the tail of the captured output."""

from __future__ import annotations

from collections.abc import Sequence

from .live import Keys, footer_row
from .rows import BLANK, cells, fit, rule, take, wrap
from .style import Row

HELP_KEYS: tuple[tuple[str, str], ...] = (
    ("t", "try a change: measure it against the present, the run is paused meanwhile"),
    ("d", "diagnosis: what holds the run back, with all evidence"),
    ("w", "wizard: what fits this machine, measured, and written as a configuration"),
    ("p", "pause, and go on"),
    ("c", "save a checkpoint now"),
    ("e", "evaluate now"),
    ("k", "record a few steps with the profiler: exactly when nothing is computed, and why"),
    ("i", "settings, and whether they took effect; what a step computes"),
    ("l", "the captured output (print, warnings)"),
    ("s", "stop a run that is watched from here"),
    ("q", "leave: stop after a checkpoint, or leave it running"),
    ("Ctrl-C", "stop after a checkpoint; again: stop at once"),
)
WIZARD_KEYS: tuple[tuple[str, str], ...] = (
    ("enter", "on; on the trade-offs and after a measurement: the file of the chosen row"),
    ("b, esc", "back; while something goes on: stop it"),
    ("← →", "on the goal: another answer"),
    ("s", "on the trade-offs: sort by the next column, named with ▾"),
    ("p", "on the trade-offs: the plot of memory against speed, or more rows"),
    ("space", "on the trade-offs: mark a row (✔) to be measured, or not"),
    ("v", "measure the marked rows, each in a process of its own"),
    ("d", "on the file: what would change in one that is there, or all of it"),
    ("w", "write the file; a new name, unless one was given"),
    ("t", "write it, close the wizard and train"),
    ("q, Ctrl-C", "close; what goes on is ended"),
)
HELP_WORDS: tuple[tuple[str, str], ...] = (
    ("item", "what a batch is made of, such as a window of text"),
    ("micro-step", "one forward and backward pass over one micro-batch"),
    ("optimizer step", "all its micro-steps and the update; what “step” means"),
    ("left", "by this run's own times; “+”: and what was not measured yet"),
    ("window", "the stretch of steps that one measurement covers"),
    ("phases", "parts of a step by the host's clock; they add up to 100 %"),
    ("device", "the same phase by the card's own clock, where it runs"),
    ("other", "wall time that is in no other phase"),
    ("idle", "share of time in which nothing is computed"),
    ("  kernels", "a profiler burst on the card: exact for its few steps"),
    ("  operators", "the same on the processor; the profiler slows small operators"),
    ("  events", "gaps between timed spans on the card: a lower bound"),
    ("  nvml", "what nvidia-smi says; it does not know causes"),
    ("  host clock", "a run on the processor: time outside the model"),
    ("launch gaps", "the host was too slow to hand over the next kernel or operator"),
    ("synchronising", "the card ran dry while the host waited for it"),
    ("finding", "what holds the run back, by its own measurements"),
    ("ceiling", "“at most 1.4x”: removing the cause gains no more than that"),
    ("trial", "steps with and without a change in turn, in processes of their own"),
    ("quad", "four blocks of steps: without, with, with, without"),
    ("interval", "where the ratio of speeds lies, at 95 % confidence"),
    ("gain, loss", "the whole interval is above 1, or below"),
    ("no gain", "the interval is narrow and holds 1"),
    ("undecided", "the interval is too wide to say: more time would tell"),
    ("ladder", "settings one on top of the other, each kept only if it helps"),
    ("● · ▲", "in the wizard: no other combination is better in everything; the others; the chosen one"),
    ("≥ ≤", "what a card's published peaks allow at best: never reached"),
    ("x", "micro-batches that are accumulated to one step"),
    ("guess", "predicted, and not to be relied on until it is measured"),
    ("MFU", "counted FLOPs a second, as a share of the card's dense peak"),
    ("intensity", "FLOPs for each byte that is moved, if nothing is fused"),
    ("predicted", "worked out, not measured"),
    ("n/a", "not measured here; never the same as 0"),
)


def help_lines(width: int, keys: tuple[tuple[str, str], ...] = HELP_KEYS) -> list[Row]:
    """Keys and words, wrapped to the width."""
    lines: list[Row] = []
    for pairs in (keys, HELP_WORDS):
        if lines:
            lines.append(())
        indent = 16 if width >= 48 else 2
        for word, text in pairs:
            style = "key" if pairs is keys else "accent"
            wrapped = wrap(text, width - indent)
            if indent == 2:
                lines.append(((word, style),))
            for index, line in enumerate(wrapped):
                lead = word if index == 0 and indent > 2 else ""
                lines.append(((lead.ljust(indent), style), (line, "text")))
    return lines


def log_view(lines: Sequence[str], width: int) -> list[Row]:
    """Lines of output, each broken where the screen ends."""
    rows: list[Row] = []
    for line in lines:
        rest = line
        while cells(rest) > width:
            head = take(rest, width)
            rows.append(((head or "?", "text"),))
            rest = rest[max(len(head), 1) :]
        rows.append(((rest, "text"),))
    return rows or [(("nothing was printed yet", "dim"),)]


def page_rows(lines: Sequence[Row], top: int, keys: Keys, title: str, width: int, height: int) -> list[Row]:
    """Exactly `height` rows: a heading, the lines from `top` on, and the keys."""
    margin = 1 if width >= 40 else 0
    inner = max(width - 2 * margin, 1)
    room = page_room(height)
    place = f" {min(top + room, len(lines))}/{len(lines)} " if len(lines) > room else ""
    rows = [rule(title, inner, "bold", place), *lines[top : top + room]][: max(height - 1, 0)]
    rows += [BLANK] * (height - 1 - len(rows))
    rows.append(footer_row(keys, inner))
    rows = rows[-height:] if height else []
    if margin:
        rows = [((" ", "text"), *row) for row in rows]
    return [fit(row, width) for row in rows]


def page_room(height: int) -> int:
    """Lines that a page shows between its heading and its keys."""
    return max(height - 2, 1)
