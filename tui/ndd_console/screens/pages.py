"""Pages that scroll: help, settings, diagnosis, ranks, values, the log, and what an entry of the home screen trains."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partialmethod
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from rich.text import Text as Words
from textual import events
from textual.geometry import Size
from textual.widgets import RichLog

from ndd_console.jobs.folder import details
from ndd_console.jobs.run_sources import code_folder
from ndd_console.render.rows import block_rows
from ndd_console.view import keys as tables
from ndd_console.view.bars import finite_values, sparkline
from ndd_console.view.blocks import heat_map
from ndd_console.view.glossary import GLOSSARY
from ndd_console.view.keys import APP_KEYS, LOG_KEYS, SCROLL_KEYS, Key
from ndd_console.view.rows import BLANK, as_it_is, cells, column, labelled, paragraph, rule, shorten
from ndd_console.view.style import Look, Row
from ndd_console.widgets.lines import Lines, bindings
from ndd_console.words.blocks import Block, Text, small
from ndd_console.words.finding import diagnosis_blocks
from ndd_console.words.ranks import ranks_blocks
from ndd_console.words.settings import settings_blocks
from ndd_console.words.step import work_facts
from ndd_console.words.workers import workers_blocks
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import foreign

from .base import TextQuestion, WidgetScreen

if TYPE_CHECKING:
    from ndd_console.jobs.folder import StartRow
    from ndd_console.jobs.run_sources import HomeFolder, RunSource

    from .live import LiveScreen

REFRESH_S = 1.0
_KEYS = 18  # width of the keys and terms on the help page
_HEAT_ROWS = 12
_NAME, _VALUE = 28, 12  # widths of logged values
_NO_VALUES = "This run records no values of its own: see log() and samples in the guide to your own model."

# The log page keeps these; the file has all.
MOST_LINES = 5000


def help_lines(keys: tuple[Key, ...], width: int) -> list[Row]:
    told = (key for key in keys if key.help)
    lines = [row for key in told for row in labelled(key.shown, key.help, width, _KEYS, label_style="key")]
    for title, terms in GLOSSARY:
        lines += [BLANK, rule(title, width)]
        lines += [row for term, text in terms for row in labelled(term, text, width, _KEYS)]
    return lines


def settings_lines(snapshot: Snapshot, width: int) -> list[Row]:
    """Settings that are not in effect first, defaults last; then the work per step."""
    work = [] if snapshot.work is None else [work_facts(snapshot, snapshot.work)]
    return block_rows([*settings_blocks(snapshot), *work], width)


def ranks_lines(snapshot: Snapshot, width: int) -> list[Row]:
    """The parts of a step, the slowest ranks with their phases, and a heat map."""
    lines, ranks = block_rows(ranks_blocks(snapshot), width), snapshot.ranks
    heat = heat_map(ranks, width, _HEAT_ROWS) if ranks is not None and ranks.newest.cells else []
    return [*lines, BLANK, *heat] if heat else lines


def own_values_lines(snapshot: Snapshot, width: int) -> list[Row]:
    """Each logged value with its trend, then the samples as they are, apart from control characters."""
    rows: list[Row] = []
    if snapshot.scalars:
        rows.append(rule("logged values", width))
    longest = max((cells(foreign(name)) for name, _ in snapshot.scalars), default=0) + 1
    names = min(longest, _NAME, max(width // 2, 1))
    for name, trend in snapshot.scalars:
        value = column(small(trend[-1][1], 4) if trend else "", _VALUE)
        line = sparkline(finite_values(trend), max(width - names - _VALUE, 0))
        rows.append(((column(foreign(name), names), "text"), (value, "accent"), (line, "trend")))
    if (texts := snapshot.texts) is not None:
        rows += [BLANK] if rows else []
        rows.append(rule(f"samples at step {texts.step:,}", width))
        for number, text in enumerate(texts.texts, 1):
            lines = (piece for line in text.split("\n") for piece in as_it_is(line, width))
            rows += [((f"{number}", "dim"),), *(((line, "text"),) for line in lines)]
    return rows or paragraph(_NO_VALUES, width, "dim")


class PageScreen(WidgetScreen):
    """Lines that scroll."""

    title_text = ""
    keys: ClassVar[tuple[Key, ...]] = tables.PAGE_KEYS
    body: Lines

    def __init__(self, look: Look) -> None:
        super().__init__(look, Lines(look, scrolls=True))

    def lines(self, width: int) -> list[Row]:
        """All lines of the page for this width."""
        raise NotImplementedError

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        self.body.show(self.lines(width))
        return [rule(self.title_text, width)], []


class HelpScreen(PageScreen):
    """The keys of a screen, and the glossary."""

    title_text = "help: keys and glossary"
    keys = tables.HELP_KEYS

    def __init__(self, look: Look, of: tuple[Key, ...]) -> None:
        super().__init__(look)
        self._of = of

    def lines(self, width: int) -> list[Row]:
        return help_lines((*self._of, *APP_KEYS), width)


class LoadedPage(PageScreen):
    """A page whose text takes a while to read. read: returns it, and the folder that its relative places belong to."""

    def __init__(
        self, look: Look, title: str, read: Callable[[], tuple[Sequence[Block], Path | None]]
    ) -> None:
        super().__init__(look)
        self.title_text = title
        self._read = read
        self.loaded: Sequence[Block] | None = None  # None while it is read

    def on_mount(self) -> None:
        self.beside(self._read, self._show, lambda text: self._show(([Text(text, "bad")], None)))

    def _show(self, read: tuple[Sequence[Block], Path | None]) -> None:
        self.loaded, folder = read
        self.set_folder(folder)
        self.paint_if_current()

    def lines(self, width: int) -> list[Row]:
        return block_rows(self.loaded or [Text("loading…", "note")], width)


class ComparisonScreen(LoadedPage):
    """Run b compared with run a."""

    keys = tables.COMPARISON_KEYS

    def __init__(self, look: Look, home: HomeFolder, a: str, b: str) -> None:
        super().__init__(look, f"{b} compared with {a}", lambda: home.compare(a, b))


class StartScreen(LoadedPage):
    """What an entry of the home screen would train. start: trains it."""

    keys = tables.START_KEYS

    def __init__(self, look: Look, row: StartRow, start: Callable[[StartRow], None]) -> None:
        super().__init__(look, row.name, lambda: ([Text("\n".join(details(row)))], None))
        self._row, self._train = row, start

    def has(self, need: str) -> bool:
        return self.console.new_wizard is not None

    def action_start(self) -> None:
        """Return to the home screen, and train the entry."""
        if self.is_current:
            self.action_back()
            self._train(self._row)

    def action_wizard(self) -> None:
        """Return to the home screen, and open the wizard."""
        if self.is_current:
            self.action_back()
            self.console.open_wizard(None, self._row)


class AboveRun(WidgetScreen):
    """A page over the live screen, updated every second, where the other keys of the live screen work, too."""

    every_s = REFRESH_S

    @property
    def live(self) -> LiveScreen:
        stack = self.app.screen_stack
        return cast("LiveScreen", stack[stack.index(self) - 1])

    def use_key(self, name: str) -> None:
        if self.key_named(name) is None and self.live.key_named(name) is not None:
            self.use_below(name)
        else:
            super().use_key(name)

    def use_below(self, name: str) -> None:
        """Return to the live screen, and use its key."""
        if self.is_current:
            live = self.live
            self.action_back()
            live.use_key(name)


class RunPage(AboveRun, PageScreen):
    """A page about a run."""

    def __init__(self, look: Look, source: RunSource) -> None:
        super().__init__(look)
        self._source = source
        self._latest: Snapshot = source.snapshot()

    def look_again(self) -> None:
        before, self._latest = self._latest, self._source.snapshot()
        if before is not self._latest:
            self.paint_if_current()

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        self.set_folder(code_folder(self._latest.run))
        return super().sections(width, height)


class SettingsScreen(RunPage):
    """Requested and applied settings, and whether they are in effect."""

    title_text = "settings"
    keys = tables.SETTINGS_KEYS

    def lines(self, width: int) -> list[Row]:
        return settings_lines(self._latest, width)


class OwnValuesScreen(RunPage):
    """What the user's own training code logged, and its samples."""

    title_text = "logged values and samples"
    keys = tables.VALUES_KEYS

    def lines(self, width: int) -> list[Row]:
        return own_values_lines(self._latest, width)


class RanksScreen(RunPage):
    """The ranks of a run with several: their work, waiting and phases."""

    title_text = "ranks"
    keys = tables.RANKS_KEYS

    def lines(self, width: int) -> list[Row]:
        return ranks_lines(self._latest, width)


class WorkersScreen(RunPage):
    """The workers of a loader, from inside: times, functions, slowest items and memory."""

    title_text = "workers"
    keys = tables.WORKERS_KEYS

    def lines(self, width: int) -> list[Row]:
        return block_rows(workers_blocks(self._latest), width)


class DiagnosisScreen(RunPage):
    """All findings with their evidence."""

    title_text = "diagnosis"
    keys = tables.DIAGNOSIS_KEYS

    def has(self, need: str) -> bool:
        return self.live.has(need)

    def lines(self, width: int) -> list[Row]:
        result = self.live.diagnosis.of(self._latest)
        return block_rows(
            diagnosis_blocks(self._latest, result, self._source.name, self.has("change")), width
        )

    action_try = partialmethod(AboveRun.use_below, "t")
    action_copy = partialmethod(AboveRun.use_below, "y")


class OutputView(RichLog):
    """The last lines of output. It follows the end until the user scrolls up."""

    BINDINGS = bindings(SCROLL_KEYS)

    def __init__(self) -> None:
        super().__init__(min_width=1, wrap=True, markup=False, highlight=False, auto_scroll=False)
        self._texts: list[tuple[int, str]] = []  # (first row, line)
        self._wrapped_at = Size()
        self.cut = False  # whether older lines are gone
        self.searched = ""
        # The first rows of the lines that contain what is searched, and which of them is on the screen.
        self.places: list[int] = []
        self.place = 0

    def add(self, lines: list[str]) -> None:
        at_end = self.scroll_offset.y >= self.max_scroll_y
        top, before = self.scroll_offset.y, len(self.lines)
        self._put(lines)
        removed = self._trim()
        if at_end and lines:
            self.scroll_end(animate=False, immediate=True, force=True)
        elif removed and before:
            self._show_row(top - removed)

    def _put(self, lines: Sequence[str]) -> None:
        lines = lines if len(lines) <= MOST_LINES else lines[-MOST_LINES - 1 :]
        if not self._wrapped_at.width:  # they are wrapped when the width is known
            self._texts += ((0, line) for line in lines)
            return
        searched = self.searched.casefold()
        for line in lines:
            if searched and searched in line.casefold():
                self.places.append(len(self.lines))
            self._texts.append((len(self.lines), line))
            text = Words(line, overflow="fold")
            if self.searched:
                text.highlight_words([self.searched], "reverse", case_sensitive=False)
            self.write(text)

    def _trim(self) -> int:
        """Forget all but the last lines, and their rows. Returns the number of rows."""
        count = len(self._texts) - MOST_LINES
        if count <= 0:
            return 0
        self.cut = True
        rows = self._texts[count][0]
        self._texts = [(first - rows, line) for first, line in self._texts[count:]]
        places = [place - rows for place in self.places if place >= rows]
        self.place = max(self.place - (len(self.places) - len(places)), 0)
        self.places = places
        del self.lines[:rows]
        self.virtual_size = Size(self.virtual_size.width, len(self.lines))
        self.notify_style_update()  # Textual keeps drawn rows by their number
        self.refresh()
        return rows

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)  # it renders nothing before it knows its size
        before, self._wrapped_at = self._wrapped_at, event.size
        top = self.scroll_offset.y
        at_end = top + max(before.height, event.size.height) >= len(self.lines)
        if event.size.width != before.width:
            line = bisect_right(self._texts, top, key=itemgetter(0)) - 1
            self._put_again()
            top = self._texts[line][0] if line >= 0 else 0
        if at_end:
            self.scroll_end(animate=False, immediate=True, force=True)
        else:
            self._show_row(top)

    def _show_row(self, row: int) -> None:
        self.scroll_to(y=max(row, 0), animate=False, immediate=True, force=True)

    def _put_again(self) -> None:
        texts = [line for _, line in self._texts]
        self.clear()
        self._texts.clear()
        self.places.clear()
        self._put(texts)

    def search(self, text: str) -> None:
        self.searched = text
        self._put_again()

    def go(self, place: int) -> None:
        """Show this match, or the nearest one that exists."""
        self.place = min(max(place, 0), len(self.places) - 1)
        self._show_row(self.places[self.place])


class LogScreen(AboveRun):
    """The captured output."""

    keys = LOG_KEYS
    body: OutputView

    def __init__(self, look: Look, source: RunSource) -> None:
        super().__init__(look, OutputView())
        self._log = source.log()

    def has(self, need: str) -> bool:
        return bool(self.body.places)

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        self.body.add(self._log.read())
        unfinished = self._log.unfinished
        below: list[Row] = [((shorten(unfinished, width), "text"),)] if unfinished else []
        if not self.body.lines and not unfinished:
            below = [(("no output yet", "dim"),)]
        last = f"last {MOST_LINES:,} lines of the " if self.body.cut else ""
        return [rule(f"{last}log of the run", width)], below

    def action_search(self) -> None:
        self.app.push_screen(TextQuestion(self.look, "text to find"), self._search)

    def _search(self, text: str | None) -> None:
        """Show the newest match."""
        if text:
            self.body.search(text)
            self._go(len(self.body.places) - 1)

    def action_older(self) -> None:
        self._go(self.body.place - 1)

    def action_newer(self) -> None:
        self._go(self.body.place + 1)

    def _go(self, place: int) -> None:
        places = self.body.places
        text = foreign(self.body.searched)
        if not places:
            self.say(f"no line contains {text!r}")
            return
        self.body.go(place)
        self.say(f"match {self.body.place + 1:,} of {len(places):,}: {text}")
