"""Pages of text: help and captured output."""

from __future__ import annotations

from collections.abc import Sequence

from .frame import Keys, footer_row, framed, inner_width
from .glossary import GLOSSARY
from .rows import BLANK, cells, labelled, rule, take
from .style import Row

HELP_KEYS: Keys = (
    ("t", "try a change: measure it against the current configuration"),
    ("d", "diagnosis: all findings with their evidence"),
    ("r", "ranks: work, waiting and phases of each, slowest first"),
    ("w", "wizard: propose and measure configurations for this machine"),
    ("p", "pause or resume"),
    ("c", "save a checkpoint"),
    ("e", "evaluate"),
    ("k", "profile a few steps: exact idle time and its causes"),
    ("i", "settings and whether they are in effect; work per step"),
    ("v", "values that your own training code logs, and its samples"),
    ("l", "log: captured output (print, warnings)"),
    ("s", "stop an attached run"),
    ("q", "quit: stop after a checkpoint, or keep the run running"),
    ("Ctrl-C", "stop after a checkpoint; again: stop immediately"),
)
HOME_KEYS: Keys = (
    ("enter", "open: a run, or what an entry would train"),
    ("s", "start the selected configuration or workload"),
    ("w", "wizard for the selected configuration or workload"),
    ("r", "read the folder and the runs again"),
    ("q, Ctrl-C", "quit"),
)
WIZARD_KEYS: Keys = (
    ("enter", "next page; on the trade-offs: file of the selected row"),
    ("b, esc", "back; while work is running: stop it"),
    ("← →", "goal: change the answer"),
    ("s", "trade-offs: sort by the next column, marked with ▾"),
    ("p", "trade-offs: plot memory against speed, or show more rows"),
    ("space", "trade-offs: mark a row (✔) for measurement"),
    ("v", "measure the marked rows and the present configuration"),
    ("d", "file: changes to an existing file, or the whole file"),
    ("w", "write the file; a new name unless one was given"),
    ("t", "write the file, close the wizard and train"),
    ("q, Ctrl-C", "close; cancels running work"),
)
_INDENT = 18


def help_lines(width: int, keys: Keys = HELP_KEYS) -> list[Row]:
    """The keys, then the glossary in groups."""
    lines = [row for key, text in keys for row in labelled(key, text, width, _INDENT, label_style="key")]
    for title, terms in GLOSSARY:
        lines += [BLANK, rule(title, width)]
        lines += [row for term, text in terms for row in labelled(term, text, width, _INDENT)]
    return lines


def log_view(lines: Sequence[str], width: int) -> list[Row]:
    """Lines of output, broken at the width."""
    rows: list[Row] = []
    for line in lines:
        rest = line
        while cells(rest) > width:
            head = take(rest, width)
            rows.append(((head or "?", "text"),))
            rest = rest[max(len(head), 1) :]
        rows.append(((rest, "text"),))
    return rows or [(("no output yet", "dim"),)]


def page_rows(lines: Sequence[Row], top: int, keys: Keys, title: str, width: int, height: int) -> list[Row]:
    """Exactly `height` rows: a heading, the lines from `top` on, and the keys."""
    inner, room = inner_width(width), page_room(height)
    place = f" {min(top + room, len(lines))}/{len(lines)} " if len(lines) > room else ""
    body = [rule(title, inner, "bold", place), *lines[top : top + room]]
    return framed(body, [footer_row(keys, inner)], width, height)


def page_room(height: int) -> int:
    """Lines between the heading and the keys of a page."""
    return max(height - 2, 1)
