"""The live screen at any size: its layout, and its lower blocks: finding, speed, loss, evaluations, events, the end."""

from __future__ import annotations

from dataclasses import dataclass

from ndd_console.words.blocks import small
from ndd_console.words.finding import CALM, DiagnosisResult, ceiling_text, change_text, choices, evidence_text
from ndd_console.words.memory import memory_heading
from ndd_console.words.ranks import late_words
from ndd_console.words.run import LOST, end_text, estimated_text, items_rate, loss_text, metrics_text, rates
from ndd_console.words.step import PAUSED, micro_steps, work_short, work_texts
from ndd_engine.diagnose import ENDINGS, Finding
from ndd_engine.record.event import Ranks
from ndd_engine.record.figures import is_script
from ndd_engine.record.rundir import resume_text
from ndd_engine.record.snapshot import Snapshot, TimedMark
from ndd_engine.text import MISSING, counted, foreign, number, size

from .bars import Points, bucket, finite_values, graph, sparkline
from .blocks import (
    StepTable,
    core_row,
    facts,
    header,
    idle_heading,
    idle_rows,
    machine_rows,
    memory_rows,
    panel,
    progress,
)
from .rows import (
    BLANK,
    Keys,
    cells,
    ends,
    fit,
    footer_row,
    framed,
    inner_width,
    paragraph,
    rule,
    short_places,
    shorten,
    side_by_side,
    titled,
    width_of,
    wrap,
)
from .style import STATUS, Row

_MORE = 3  # further findings, one line each
_LINES = 2  # lines of evidence and of the change, if there is room
_TORN = 12  # cells that words leave at the end of a line
_FINDINGS = 2 * (_LINES + 1 + _MORE)  # rows of all that is said of findings, with titles of two lines


NOTHING = DiagnosisResult()

_MARK_STYLE = {"warning": "warn", "error": "bad", "evaluation": "accent", "recompile": "warn"}
_GAP = 3
_MESSAGE = 3  # rows of what is said to the user
_LABEL = 9
_TWO_COLUMNS = 72  # narrower screens stack the blocks
_THREE_COLUMNS = 150
_SIDE = 48  # width of the third column
_TRENDS = (80, 24)  # smaller screens drop the trends first
_MAIN = 10  # rows of the step block with its heading
_RANKS = 28  # minimum width of the panel of ranks


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
    """At most `count` rows: the first finding with evidence and change, then the titles of further findings.

    A title has as many rows as it needs, and leaves one for the change.
    """
    if count < 1:
        return []
    if result.trouble or not result.findings:
        return [((shorten(result.trouble, width), "dim"),)] if result.trouble else []
    first, *others = result.findings
    rows, more = _title(first, width), _parted(first)[1]
    if first.cause not in CALM:
        rows = rows[: max(count - 1, 1)]
        text, key, other = _change_text(first, can_try, width)
        change = wrap(text + key + other, width)
        if len(change) > _LINES or count < len(rows) + len(change) + bool(more or first.evidence):
            text = short_places(text, _LINES * width - cells(key) - _TORN)
            change = wrap(text + key, width)  # a pid that is cut off is of no use
        told = foreign("; ".join(filter(None, [more, evidence_text(first)])))
        evidence = wrap(short_places(told, _LINES * width - _TORN), width)
        # A single remaining row shows the change where the title already names the problem.
        parts = [("change", change), ("evidence", evidence)]
        shown = {"change": 0, "evidence": 0}
        for name, lines in (parts[::-1] if more else parts) * _LINES:
            shown[name] += sum(shown.values()) < count - len(rows) and shown[name] < len(lines)
        if shown["change"] == 1 and len(change) > 1:
            change = [shorten(text, width - cells(key)) + key]  # the key must stay visible
        rows += [((line, "text"),) for line in _first(evidence, shown["evidence"], width)]
        rows += [((line, "accent"),) for line in _first(change, shown["change"], width)]
    for finding in others[:_MORE]:
        rows += _also(finding, width, count - len(rows))
    return rows[:count]


def _title(finding: Finding, width: int) -> list[Row]:
    """ "── input-bound: the GPU waits 57 % of each step for the loader ── at most 2.3x ──"."""
    style = CALM.get(finding.cause, "dim" if finding.leave else "warn")
    return titled(_parted(finding)[0], width, style, ceiling_text(finding))


def least_rows(result: DiagnosisResult, width: int) -> int:
    """Rows of the first finding with its title, one line of evidence and one line of its change."""
    if result.trouble or not result.findings:
        return 1 if result.trouble else 0
    first = result.findings[0]
    title, more = len(_title(first, width)), _parted(first)[1]
    told = min(len(wrap(foreign(more), width)), _LINES) or bool(first.evidence)
    return title if first.cause in CALM else title + told + bool(first.changes or first.leave)


def _parted(finding: Finding) -> tuple[str, str]:
    """(the heading, what follows it): all of what has ended a run, or keeps it from going on, is to be read."""
    if finding.cause not in ENDINGS:
        return finding.title, ""
    title, _, more = finding.title.partition(": ")
    return title, more


def _also(finding: Finding, width: int, count: int) -> list[Row]:
    """The title of a further finding, cut to at most `count` rows."""
    lead, end = "also  ", ceiling_text(finding)
    room = max(width - cells(lead) - (cells(end) + 3 if end else 0), 1)
    first, *rest = _first(wrap(foreign(finding.title), room), count, room) or [""]
    row: Row = ((lead, "dim"), (first, "text"), ((f"   {end}" if end else ""), "dim"))
    return [row, *(((" " * cells(lead), "dim"), (line, "text")) for line in rest)]


def _first(lines: list[str], count: int, width: int) -> list[str]:
    """The first lines; the last one ends in "…" if some are left out."""
    if count < 1 or count >= len(lines):
        return lines[: max(count, 0)]
    return [*lines[: count - 1], shorten(lines[count - 1] + " …", width)]


def figures_row(snapshot: Snapshot, width: int, with_trends: bool, speed_rows: int = 2) -> Row:
    """Learning rate, gradient norm and loss scale; loss, rate, its estimate and FLOP/s if no other row shows them.

    speed_rows: rows that the screen has of `throughput_rows`.
    """
    parts = [] if with_trends else [loss_text(snapshot), items_rate(snapshot)]
    parts += [f"lr {small(snapshot.lr)}", f"gradient norm {small(snapshot.grad_norm)}"]
    if snapshot.loss_scale is not None and snapshot.loss_scale != 1:
        parts.append(f"loss scale {number(snapshot.loss_scale)}")
    if speed_rows < 2 and (estimated := estimated_text(snapshot)):
        parts.append(estimated)
    if not speed_rows and (work := work_short(snapshot)):
        parts.append(work)
    while len(parts) > 1 and sum(map(cells, parts)) + 3 * (len(parts) - 1) > width:
        parts.pop()
    return (("   ".join(parts), "text"),)


def evaluation_row(snapshot: Snapshot, width: int) -> Row:
    if not snapshot.evaluations:
        return (("evaluation n/a", "dim"),)
    last, best = snapshot.evaluations[-1], snapshot.best
    text = f"evaluation {foreign(metrics_text(last.metrics))} at step {last.step:,}"
    if best is None:
        return ((shorten(text, width), "text"),)
    name, value = next(iter(best.metrics.items()), ("", None))
    note = "best so far" if best.step == last.step else f"best {number(value, 4)} at step {best.step:,}"
    room = width - cells(note) - 3
    if room < 20:
        return ((shorten(f"{name} {note}", width), "text"),)
    return ((shorten(text, room), "text"), ("   " + note, "good" if best.step == last.step else "text"))


def trend_row(snapshot: Snapshot, width: int) -> Row:
    half = (width - _GAP) // 2
    first = _trend(loss_text(snapshot), snapshot.loss_trend, half)
    second = _trend(items_rate(snapshot), snapshot.rate_trend, width - _GAP - half)
    return (*fit(first, half), (" " * _GAP, "text"), *second)


def _trend(title: str, points: Points, width: int) -> Row:
    line = sparkline(finite_values(points), width - cells(title) - 1)
    return ((title + " ", "text"), (line, "trend"))


def trend_graphs(snapshot: Snapshot, width: int, height: int) -> list[Row]:
    """Loss and rate as graphs side by side, `height` rows with their headings."""
    half = (width - _GAP) // 2
    left = _graph(loss_text(snapshot), finite_values(snapshot.loss_trend), half, height)
    right = _graph(items_rate(snapshot), finite_values(snapshot.rate_trend), width - _GAP - half, height)
    return side_by_side(left, right, half, _GAP, width - _GAP - half)


def _graph(title: str, values: list[float], width: int, height: int) -> list[Row]:
    rows: list[Row] = [rule(title, width)]
    if not values:
        return [*rows, (("no values yet", "dim"),)]
    values = bucket(values, 2 * (width - 6))  # the scale must show the range that is drawn
    top, bottom = number(max(values)), number(min(values))
    scale = max(len(top), len(bottom), 5)
    lines = graph(values, width - scale - 1, height - 1)
    for index, line in enumerate(lines):
        mark = top if index == 0 else bottom if index == len(lines) - 1 else ""
        rows.append(((mark.rjust(scale) + " ", "dim"), (line, "trend")))
    return rows


def mark_row(timed: TimedMark, width: int, digits: int = 0) -> Row:
    """An event on one line, its step in `digits` cells."""
    mark = timed.mark
    lead = f"step {mark.step:>{digits},}  "
    room = max(width - len(lead), 0)
    text = foreign(mark.text) or foreign(mark.kind)
    if mark.kind in ("warning", "error"):
        text = f"{mark.kind}: {text}"
    return ((lead, "dim"), (shorten(short_places(text, room), room), _MARK_STYLE.get(mark.kind, "text")))


def newest_rows(snapshot: Snapshot, message: str | None, width: int, count: int) -> list[Row]:
    """The newest events, oldest first, then the message for the user if there is one."""
    said = message_rows(message, width)[:count]
    rows: list[Row] = []
    room = count - len(said)
    if room > 0 and snapshot.marks:
        shown = snapshot.marks[-room:]
        digits = max(len(f"{timed.mark.step:,}") for timed in shown)
        rows = [mark_row(timed, width, digits) for timed in shown]
    if rows and snapshot.warnings:
        note = counted(snapshot.warnings, "warning")
        if width >= 60 and shown[-1].mark.kind != "warning":
            newest = mark_row(shown[-1], width - len(note) - 2, digits)
            rows[-1] = ends(newest, ((note, "warn"),), width)
    return [*rows, *said]


def message_rows(message: str | None, width: int) -> list[Row]:
    """What is said to the user, on up to _MESSAGE rows."""
    return paragraph(message or "", width, "warn", _MESSAGE)


def end_rows(snapshot: Snapshot, name: str, width: int, count: int) -> list[Row]:
    """How the run ended: reason, final loss, and the checkpoint from which an own run resumes."""
    style = STATUS.get(snapshot.status, ("", "text"))[1]
    tail: list[Row] = []
    if snapshot.loss is not None and not snapshot.evaluations:
        tail.append((("final      ", "dim"), (loss_text(snapshot), "text")))
    reason, resume = snapshot.reason, ""
    if not is_script(snapshot.run):
        saved = snapshot.end.checkpoint if snapshot.end else None
        if saved is None and snapshot.checkpoint is not None:
            saved = snapshot.checkpoint.mark.data.get("file")
        tail.append((("checkpoint ", "dim"), (foreign(saved) if saved else MISSING, "text")))
        resume = resume_text(foreign(name))
    if snapshot.status == "lost":
        reason = "; ".join(filter(None, (LOST, resume)))
    elif resume and snapshot.status not in ("done", "failed"):
        tail.append(((resume, "dim"),))
    room = max(count - 1 - len(tail), 1)
    rows = [rule(end_text(snapshot), width, style), *paragraph(reason, width, limit=room), *tail]
    return rows[: max(count, 0)]


def throughput_rows(snapshot: Snapshot, width: int, count: int) -> list[Row]:
    """At most `count` rows. A single row shows the work: the screen shows the main rates elsewhere."""
    room = width - _LABEL
    lines = [("speed", _speed(snapshot, room)), ("work", _work(snapshot, room))]
    lines = [(label, text) for label, text in lines if text]
    shown = lines[-count:] if count > 0 else []
    return [((label.ljust(_LABEL), "dim"), (shorten(text, room), "text")) for label, text in shown]


def _speed(snapshot: Snapshot, room: int) -> str:
    if snapshot.step_ns is None or snapshot.status == PAUSED:
        return ""
    texts, micro = rates(snapshot), micro_steps(snapshot)
    full = [f"{texts[0]} ({micro})" if micro else texts[0], *texts[1:]]
    choices = [full, full[:-1], texts, texts[:-1]]
    if estimated := estimated_text(snapshot):
        estimated = f"{estimated} for this GPU"
        beside = ([*each, estimated] for each in (full, full[:-1], texts[:-1], texts[:2], texts[1:2]))
        choices = [*beside, *choices]
    return _first_that_fits(choices, room)


def _work(snapshot: Snapshot, room: int) -> str:
    texts = work_texts(snapshot)
    if not texts:
        return ""
    short, line = work_short(snapshot), texts[2]
    # The reason for a missing MFU may be long: drop it before the intensity.
    fewer = texts[:2] if snapshot.throughput.mfu is not None else [texts[0], line]
    return _first_that_fits([texts, fewer, [short, line], [short or texts[0]]], room)


def _first_that_fits(choices: list[list[str]], room: int) -> str:
    joined = ["   ".join(texts) for texts in choices]
    return next((text for text in joined if cells(text) <= room), joined[-1])


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything that the live screen shows in addition to the snapshot.

    status: may be ahead of the snapshot ("stopping"). keys: available now; early: those that a narrow footer drops
    first. waited_s: seconds of setup so far.
    can_try: whether changes can be measured.
    """

    name: str
    status: str
    keys: Keys
    message: str | None = None
    waited_s: float | None = None
    diagnosis: DiagnosisResult = NOTHING
    can_try: bool = False
    early: Keys = ()


def live_rows(snapshot: Snapshot, state: LiveState, width: int, height: int) -> list[Row]:
    """Exactly `height` rows of exactly `width` cells."""
    inner = inner_width(width)
    bottom = [footer_row(state.keys, inner, state.early)] if height > 2 else []
    return framed(_body(snapshot, state, inner, height), bottom, width, height)


@dataclass
class _Room:
    """Rows that are free. Blocks take them in order of importance."""

    left: int

    def take(self, wanted: int, whole: bool = False) -> int:
        """Up to so many rows; whole: or none."""
        taken = 0 if whole and wanted > self.left else max(min(wanted, self.left), 0)
        self.left -= taken
        return taken


def _body(snapshot: Snapshot, state: LiveState, width: int, height: int) -> list[Row]:
    rows = [header(snapshot, state.name, state.status, width), progress(snapshot, width, state.waited_s)]
    room = _Room(height - 3)
    if room.left < 1:
        return rows
    ended, phases, tall = snapshot.final, snapshot.phases, height >= 28
    side = width >= _THREE_COLUMNS and bool(phases)  # the machine is next to the step block
    wanted = max(len(message_rows(state.message, width)), not ended)
    notes = room.take(min(wanted, room.left // 3))
    end = end_rows(snapshot, state.name, width, min(7, max(room.left * 2 // 3, 1))) if ended else []
    room.take(len(end))
    main = room.take(_MAIN if phases else 2)
    learning = room.take(3, whole=True) if phases or ended else 0
    # Before the first step, only what may be the reason that there is none.
    findings = state.diagnosis.findings
    diagnosis = state.diagnosis if phases or (findings and findings[0].cause in ENDINGS) else NOTHING
    finding = room.take(least_rows(diagnosis, width))
    machine: list[Row] = []
    if not ended and (snapshot.sample is not None or snapshot.run is not None):
        span = _SIDE if side else width
        machine = [rule("machine", span), *machine_rows(snapshot, span)]
    below = room.take(len(machine), whole=True) if not side else 0
    trends = 0
    if learning and (below or side or ended) and width + 2 >= _TRENDS[0] and height >= _TRENDS[1]:
        trends = room.take(1)
    # Optional rows: more findings, blank lines, cores, facts, graphs, more phases, more events.
    if tall:
        finding += room.take(len(finding_rows(diagnosis, width, _FINDINGS, state.can_try)) - finding)
    gaps = room.take(3 if tall else 2)
    speed = throughput_rows(snapshot, width, min(room.left, 2)) if learning else []
    room.take(len(speed))
    cores = core_row(snapshot, width) if below and room.left >= 2 else None
    room.take(1 if cores else 0)
    about = facts(snapshot, width) if room.left >= 9 else []
    room.take(len(about) + 1 if about else 0)
    main += room.take(min(room.left // 2, _wanted(snapshot, width) - main)) if phases else 0
    marks = min(room.left // 3, 8) if not ended else 0
    if trends and room.left - marks >= 3:
        trends += room.take(min(room.left - marks, 17))
    notes += room.take(8) if not ended else 0

    rows += [BLANK] if gaps > 1 and tall else []
    rows += _main_and_machine(snapshot, width, main, machine) if side else _main(snapshot, width, main)
    rows += [*speed, *finding_rows(diagnosis, width, finding, state.can_try), *end]
    if about:
        rows += [rule("run", width), *about]
    if below:
        rows += [*machine, *([cores] if cores else [])]
    if trends > 1:
        rows += trend_graphs(snapshot, width, trends)
    elif learning:
        rows.append(rule("metrics", width))
        rows += [trend_row(snapshot, width)] if trends else []
    if learning:
        rows += [figures_row(snapshot, width, bool(trends), len(speed)), evaluation_row(snapshot, width)]
    newest = newest_rows(snapshot, state.message, width, notes)
    if newest:
        rows += [BLANK] if gaps > 0 else []
        rows += newest
    return rows


def _main_and_machine(snapshot: Snapshot, width: int, count: int, machine: list[Row]) -> list[Row]:
    """The step block with the machine as its third column."""
    room = width - _GAP - _SIDE
    main = _main(snapshot, room, count)
    if not machine:
        return _main(snapshot, width, count)
    cores = core_row(snapshot, _SIDE)
    if cores and len(machine) < count:
        machine = [*machine, cores]
    return side_by_side(main, machine[:count], room, _GAP, _SIDE)


def _right_width(width: int) -> int:
    return min(max(26, width * 3 // 10), 46)


def _wanted(snapshot: Snapshot, width: int) -> int:
    phases = len(StepTable(snapshot, width).phases)
    if snapshot.ranks is not None:
        return 1 + max(phases, min(snapshot.ranks.newest.world, _MAIN) + 7)
    right = len(snapshot.idle.causes) + 1 + len(memory_rows(snapshot, _right_width(width), 9)) + 1
    return 1 + max(phases, right)


def _main(snapshot: Snapshot, width: int, count: int) -> list[Row]:
    """The phases of a step, with idle time and memory next to or below them."""
    if count < 1:
        return []
    if width < _TWO_COLUMNS:
        return _stacked(snapshot, width, count)
    right_width = max(_right_width(width), _RANKS if snapshot.ranks is not None else 0)
    left_width = width - _GAP - right_width
    table = StepTable(snapshot, left_width)
    left = [table.heading(), *table.rows(count - 1)]
    if snapshot.ranks is not None:
        right = _ranks_and_memory(snapshot, snapshot.ranks, right_width, count)
        return side_by_side(left[:count], right[:count], left_width, _GAP, right_width)[:count]
    memory = memory_rows(snapshot, right_width, max(count - 3, 1))
    room = count - 1
    idle = idle_rows(snapshot, right_width, max(room - len(memory) - 1, 1))
    right = [rule(idle_heading(snapshot, right_width), right_width), *idle]
    # Memory stays at the bottom of the block, so that changing idle causes do not move it.
    space = max(count - len(right) - len(memory) - 1, 0)
    right += [*[BLANK] * space, rule(memory_heading(snapshot), right_width), *memory]
    return side_by_side(left[:count], right[:count], left_width, _GAP, right_width)[:count]


def _ranks_and_memory(snapshot: Snapshot, ranks: Ranks, width: int, count: int) -> list[Row]:
    """The ranks; below them idle time and memory as far as there is room."""
    out = panel(ranks, width, count)
    spare = count - len(out)
    idle = idle_rows(snapshot, width, max(spare - 4, 0))
    if spare >= 4:
        memory = memory_rows(snapshot, width, 2)
        blank = max(spare - len(idle) - len(memory) - 2, 0)
        out += [rule(idle_heading(snapshot, width), width), *idle, *[BLANK] * blank]
        out += [rule(memory_heading(snapshot), width), *memory]
    elif spare >= 1:
        free: Row = ((f"{size(snapshot.headroom.free_bytes)} free", "text"),)
        title: Row = (("memory" if snapshot.headroom.kind == "gpu" else "host memory", "bold"),)
        out += [*[BLANK] * (spare - 1), ends(title, free, width)]
    return out


def _stacked(snapshot: Snapshot, width: int, count: int) -> list[Row]:
    table = StepTable(snapshot, width)
    below: list[Row] = []
    if snapshot.ranks is not None and count >= 5:
        below.append(((shorten(late_words(snapshot), width), "bold"),))
    elif count >= 5:
        below.append(((idle_heading(snapshot, width), "bold"),))
    if count >= 6:
        free = memory_rows(snapshot, width, 1)[0]
        title: Row = ((memory_heading(snapshot) + "  ", "bold"),)
        rest = width - width_of(title)
        below.append(ends(title, memory_rows(snapshot, rest, 1)[0], width) if rest >= 24 else free)
    return [table.heading(), *table.rows(count - 1 - len(below)), *below][:count]
