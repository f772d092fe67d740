"""The finding on the live screen: the verdict with its ceiling, its evidence, and the change to try."""

from __future__ import annotations

from ndd_console.screens.diagnosis import Told
from ndd_engine.diagnose import Change, Finding

from .rows import cells, foreign, rule, shorten, wrap
from .style import Row

# Causes that are no accusation; they take one line, in this style.
CALM = {"healthy": "good", "too-short": "dim"}
_MORE = 3  # findings behind the verdict, a line each
_LINES = 2  # of evidence, and of the change, where there is room


def times(ratio: float) -> str:
    """A ratio of speeds: "1.42x", "12.3x"."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def at_most(ceiling: float) -> str:
    """ "at most 1.42x", "at most 2.3x": a bound needs no more digits."""
    return f"at most {ceiling:.1f}x" if ceiling >= 2 else f"at most {times(ceiling)}"


def ceiling_text(finding: Finding) -> str:
    """ "at most 2.3x"; "" where the gain cannot be bounded."""
    return "" if finding.ceiling is None else at_most(finding.ceiling)


def style_of(finding: Finding) -> str:
    """The style of a finding's title."""
    return CALM.get(finding.cause, "dim" if finding.leave else "warn")


def title_room(finding: Finding, width: int) -> int:
    """Cells that the heading has for the title."""
    end = cells(ceiling_text(finding))
    return max(width - 4, 1) if not end or width < end + 28 else width - end - 6


def title_row(finding: Finding, width: int) -> Row:
    """ "── input-bound: the GPU waits 57 % of each step for the loader ── at most 2.3x ──"."""
    end, room = ceiling_text(finding), title_room(finding, width)
    title = shorten(foreign(finding.title), room)
    if not end or room == width - 4:
        return rule(title, width, style_of(finding))
    line = width - cells(title) - cells(end) - 5
    # The line behind the ceiling yields to the title.
    tail = " ──" if line >= 4 else ""
    return (
        ("── ", "dim"),
        (title, style_of(finding)),
        (" " + "─" * (line - len(tail)) + " ", "dim"),
        (end, "bold"),
        (tail, "dim"),
    )


def evidence_text(finding: Finding) -> str:
    """All evidence in one run of words; what does not fit stands on the page of the diagnosis."""
    text = "; ".join(foreign(item.text).rstrip(".") for item in finding.evidence)
    return text[:1].upper() + text[1:]


def change_text(finding: Finding, can_try: bool) -> tuple[str, str]:
    """What to do about it: leave it, change the configuration, or the code and where; and the key that measures it."""
    if finding.leave:
        return f"Leave it: {foreign(finding.leave)}", ""
    if not finding.changes:
        return "", ""
    first = finding.changes[0]
    text = _change(first)
    text = text[:1].upper() + text[1:]
    # Where the first one is not of the configuration, there may be another that can be measured.
    setting = next((change for change in finding.changes if change.sets), None)
    if setting is None:
        return text, ""
    if setting is not first:
        text += f"; or {_change(setting)}"
    return text, ": press t to measure it here" if can_try else ""


def _change(change: Change) -> str:
    text = foreign(change.text).rstrip(".")
    where = f" ({foreign(change.where)})" if change.where and foreign(change.where) not in text else ""
    return text + where


def finding_rows(told: Told, width: int, count: int, can_try: bool) -> list[Row]:
    """At most `count` rows: the verdict, its evidence and its change; with more room, more of them and what else."""
    if count < 1:
        return []
    if told.trouble:
        return [((shorten(told.trouble, width), "dim"),)]
    if not told.findings:
        return []
    first, *others = told.findings
    rows = [title_row(first, width)]
    if first.cause not in CALM:
        text, key = change_text(first, can_try)
        change = wrap(text + key, width)
        evidence = wrap(evidence_text(first), width)
        spare = count - 1 - min(len(change), 1) - min(len(evidence), 1)
        # With one row left it is the change that is shown: the title says what is wrong.
        more_change = min(max(spare, 0), _LINES - 1, max(len(change) - 1, 0))
        more_evidence = min(max(spare - more_change, 0), _LINES - 1, max(len(evidence) - 1, 0))
        shown = min(len(change), 1) + more_change
        room = min(count - 1 - min(shown, count - 1), 1 + more_evidence)
        rows += [((line, "text"),) for line in _first(evidence, room, width)]
        if shown == 1 and len(change) > 1:
            change = [shorten(text, width - cells(key)) + key]  # the key is what must not be cut off
        rows += [((line, "accent"),) for line in _first(change, shown, width)]
    for finding in others[:_MORE]:
        rows.append(_also(finding, width))
    return rows[:count]


def wanted_rows(told: Told, width: int, can_try: bool) -> int:
    """Rows that the block could fill."""
    return len(finding_rows(told, width, 1 + 2 * _LINES + _MORE, can_try))


def least_rows(told: Told) -> int:
    """Rows of the verdict with one line of evidence and one of its change."""
    if told.trouble or not told.findings:
        return 1 if told.trouble else 0
    first = told.findings[0]
    calm = first.cause in CALM
    return 1 if calm else 1 + bool(first.evidence) + bool(first.changes or first.leave)


def _also(finding: Finding, width: int) -> Row:
    lead, end = "also  ", ceiling_text(finding)
    room = width - cells(lead) - (cells(end) + 3 if end else 0)
    title = shorten(foreign(finding.title), max(room, 1))
    return ((lead, "dim"), (title, "text"), ((f"   {end}" if end else ""), "dim"))


def _first(lines: list[str], count: int, width: int) -> list[str]:
    """The first lines; the last of them ends in "…" where some are left out."""
    if count >= len(lines):
        return lines
    if count < 1:
        return []
    return [*lines[: count - 1], shorten(lines[count - 1] + " …", width)]
