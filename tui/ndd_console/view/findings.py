"""The finding on the live screen: the bottleneck with its ceiling, its evidence and the change to try."""

from __future__ import annotations

from ndd_console.words.diagnosis import DiagnosisResult
from ndd_console.words.finding import CALM, ceiling_text, change_text, choices, evidence_text
from ndd_engine.diagnose import ENDINGS, Finding
from ndd_engine.text import foreign

from .rows import cells, rule, shorten, wrap
from .style import Row

_MORE = 3  # further findings, one line each
_LINES = 2  # lines of evidence and of the change, if there is room


NOTHING = DiagnosisResult()


def title_room(ceiling: str, width: int) -> int:
    """Cells available for the title in the heading."""
    end = cells(ceiling)
    return max(width - 4, 1) if not end or width < end + 28 else width - end - 6


def title_row(title: str, ceiling: str, style: str, width: int) -> Row:
    """ "── input-bound: the GPU waits 57 % of each step for the loader ── at most 2.3x ──"."""
    room = title_room(ceiling, width)
    title = shorten(foreign(title), room)
    if not ceiling or room == width - 4:
        return rule(title, width, style)
    line = width - cells(title) - cells(ceiling) - 5
    tail = " ──" if line >= 4 else ""  # left out if the title needs the room
    return (
        ("── ", "dim"),
        (title, style),
        (" " + "─" * (line - len(tail)) + " ", "dim"),
        (ceiling, "bold"),
        (tail, "dim"),
    )


def _change_text(finding: Finding, can_try: bool, width: int) -> tuple[str, str, str]:
    """The recommendation, the key that measures it, and a change that cannot be measured; each may be ""."""
    if finding.leave:
        return f"Leave as is: {foreign(finding.leave)}", "", ""
    setting, other = choices(finding)
    shown = setting or other
    if shown is None:
        return "", "", ""
    text = foreign(change_text(finding, shown))
    text = text[:1].upper() + text[1:]
    if setting is None:
        return text, "", ""
    key = f"; press t to try {foreign(' '.join(setting.sets))}" if can_try else ""
    if cells(key) > width // 2 and cells(text + key) > width:
        key = "; press t to try it"
    return text, key, "" if other is None else f"; or {foreign(change_text(finding, other))}"


def finding_rows(result: DiagnosisResult, width: int, count: int, can_try: bool) -> list[Row]:
    """At most `count` rows: the first finding with evidence and change, then the titles of further findings."""
    if count < 1:
        return []
    if result.trouble or not result.findings:
        return [((shorten(result.trouble, width), "dim"),)] if result.trouble else []
    first, *others = result.findings
    title, more = _parted(first)
    style = CALM.get(first.cause, "dim" if first.leave else "warn")
    rows = [title_row(title, ceiling_text(first), style, width)]
    if first.cause not in CALM:
        text, key, other = _change_text(first, can_try, width)
        change = wrap(text + key + other, width)
        if len(change) > _LINES or count < 1 + len(change) + bool(more or first.evidence):
            change = wrap(text + key, width)  # a pid that is cut off is of no use
        evidence = wrap(foreign("; ".join(filter(None, [more, evidence_text(first)]))), width)
        # A single remaining row shows the change: the title already names the problem.
        shown = {"change": 0, "evidence": 0}
        for name, lines in (("change", change), ("evidence", evidence)) * _LINES:
            shown[name] += sum(shown.values()) < count - 1 and shown[name] < len(lines)
        if shown["change"] == 1 and len(change) > 1:
            change = [shorten(text, width - cells(key)) + key]  # the key must stay visible
        rows += [((line, "text"),) for line in _first(evidence, shown["evidence"], width)]
        rows += [((line, "accent"),) for line in _first(change, shown["change"], width)]
    rows += [_also(finding, width) for finding in others[:_MORE]]
    return rows[:count]


def wanted_rows(result: DiagnosisResult, width: int, can_try: bool) -> int:
    """Rows that `finding_rows` fills if there is room."""
    return len(finding_rows(result, width, 1 + 2 * _LINES + _MORE, can_try))


def least_rows(result: DiagnosisResult) -> int:
    """Rows of the first finding with one line of evidence and one line of its change."""
    if result.trouble or not result.findings:
        return 1 if result.trouble else 0
    first = result.findings[0]
    told = bool(first.evidence or _parted(first)[1])
    return 1 if first.cause in CALM else 1 + told + bool(first.changes or first.leave)


def _parted(finding: Finding) -> tuple[str, str]:
    """(the heading, what follows it): all of what has ended a run, or keeps it from going on, is to be read."""
    if finding.cause not in ENDINGS:
        return finding.title, ""
    title, _, more = finding.title.partition(": ")
    return title, more


def _also(finding: Finding, width: int) -> Row:
    lead, end = "also  ", ceiling_text(finding)
    room = width - cells(lead) - (cells(end) + 3 if end else 0)
    title = shorten(foreign(finding.title), max(room, 1))
    return ((lead, "dim"), (title, "text"), ((f"   {end}" if end else ""), "dim"))


def _first(lines: list[str], count: int, width: int) -> list[str]:
    """The first lines; the last one ends in "…" if some are left out."""
    if count < 1 or count >= len(lines):
        return lines[: max(count, 0)]
    return [*lines[: count - 1], shorten(lines[count - 1] + " …", width)]
