"""The report of one trace, or of the traces of several ranks, as the sections of a page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ndd_console.words.blocks import Block, Facts, Page, Section, Table, Text
from ndd_console.words.figures import moment, ns
from ndd_console.words.finding import verdict
from ndd_console.words.trace import (
    device_blocks,
    device_text,
    examined,
    main_device,
    phases,
    ranks_table,
)
from ndd_engine.record.events import PHASES
from ndd_engine.recordings.traces import TraceUse, findings
from ndd_engine.text import counted, printable

# Rows of the table of steps.
STEPS = 200
METHODS = (
    ("busy", "the exact union of kernels, copies and fills; nothing else on the GPU's line is work"),
    ("idle by cause", "what the host was doing, or that the next kernel had been launched before the gap"),
    ("phases", "ranges first, then the work of the autograd engine and uploads, then the other operators"),
    ("communication", "exposed: no other kernel runs beside the collective; hidden: the rest"),
    ("potential gain", "upper bound: the speedup without this cause if no other bottleneck took its place"),
)


def trace_page(uses: Sequence[TraceUse], made_t: float) -> Page:
    """The page. uses: in the order of their ranks; of several, one is shown in detail."""
    use, device, why = main_device(uses)
    found = tuple(verdict(finding, main=index == 0) for index, finding in enumerate(findings(use, device)))
    name = printable(use.path.name)
    shown: list[tuple[str, str, tuple[Block, ...]]] = [
        ("verdict", "Verdict", found),
        ("trace", "Trace", (_identity(use),)),
    ]
    if len(uses) > 1:
        shown.insert(1, ("ranks", "Ranks", (ranks_table(uses), Text(f"Shown below: {name} {why}."))))
    shown += [
        (f"device-{one.index}", device_text(one), tuple(device_blocks(one)))
        for one in (use.devices if len(uses) == 1 else (device,))
    ]
    if use.operators:
        shown.append(("phases", "Phases", (phases(use),)))
        shown.append(("steps", "Steps", tuple(_steps(use))))
    shown.append(("methods", "How it was measured", (Facts.of(*METHODS),)))
    title = name if len(uses) == 1 else counted(len(uses), "trace")
    return Page(
        name=title,
        subtitle=device_text(device),
        status=("trace", ""),
        summary=Text(f"{examined(use)[:1].upper()}{examined(use)[1:]}."),
        made=f"written {moment(made_t)}",
        sections=tuple(Section(key, heading, blocks) for key, heading, blocks in shown if blocks),
    )


def _identity(use: TraceUse) -> Facts:
    started = (
        None if use.begin_t is None else f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(use.begin_t))} UTC"
    )
    return Facts.of(
        ("examined", examined(use)),
        ("started", started),
        ("devices", ", ".join(device_text(device) for device in use.devices)),
        ("damaged events", f"{use.skipped:,}, which were skipped" if use.skipped else ""),
        ("record", printable(str(use.path))),
    )


def trace_blocks(uses: Sequence[TraceUse]) -> list[Block]:
    """The page for a terminal, without its single steps and its methods."""
    shown = (section for section in trace_page(uses, 0.0).sections if section.key not in ("steps", "methods"))
    return [block for section in shown for block in section.blocks]


def _steps(use: TraceUse) -> Iterator[Block]:
    """The phases of each step."""
    spent = [use.phase_ns(begin, end) for begin, end in use.steps]
    names = [name for name in PHASES if any(name in found for found in spent)]
    rows = tuple(
        (str(number), ns(end - begin), *(ns(found.get(name, 0)) for name in names))
        for number, ((begin, end), found) in enumerate(zip(use.steps, spent, strict=True), start=1)
    )
    if rows:
        columns = ("step", "time", *names)
        yield Table("", columns, rows, frozenset(range(len(columns)))).newest(STEPS)
