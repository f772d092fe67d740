"""Pages that scroll: help, settings, diagnosis, ranks, values, and what an entry of the home screen trains."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.binding import BindingType

from ndd_console.render.rows import block_rows
from ndd_console.view.bars import finite_values, sparkline
from ndd_console.view.glossary import GLOSSARY
from ndd_console.view.keys import APP_KEYS, DIAGNOSIS_KEYS, HELP_KEYS, PAGE_KEYS, START_KEYS, Key
from ndd_console.view.ranks import heat_map
from ndd_console.view.rows import BLANK, as_it_is, cells, column, labelled, paragraph, rule
from ndd_console.view.style import Look, Row
from ndd_console.widgets.lines import Lines, bindings
from ndd_console.words.blocks import Block, Text
from ndd_console.words.diagnosis import Diagnosis, diagnosis_blocks
from ndd_console.words.figures import small
from ndd_console.words.finding import first_command
from ndd_console.words.ranks import ranks_facts, slowest
from ndd_console.words.settings import settings_table
from ndd_console.words.step import work_facts
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import foreign

from .base import WidgetScreen

if TYPE_CHECKING:
    from ndd_console.jobs.folder import StartRow
    from ndd_console.jobs.run_sources import HomeFolder, RunSource

REFRESH_S = 1.0
_KEYS = 18  # width of the keys and terms on the help page
_HEAT_ROWS = 12
_NAME, _VALUE = 28, 12  # widths of logged values
_NO_VALUES = "This run records no values of its own: see log() and samples in the guide to your own model."


def help_lines(keys: tuple[Key, ...], width: int) -> list[Row]:
    """The keys of a screen, then the glossary in groups."""
    lines = [
        row
        for key in keys
        if key.help
        for row in labelled(key.shown, key.help, width, _KEYS, label_style="key")
    ]
    for title, terms in GLOSSARY:
        lines += [BLANK, rule(title, width)]
        lines += [row for term, text in terms for row in labelled(term, text, width, _KEYS)]
    return lines


def settings_lines(snapshot: Snapshot, width: int) -> list[Row]:
    """Settings that are not in effect first, defaults last; then the work per step."""
    table = settings_table(snapshot.settings)
    blocks: list[Block] = [table if table.rows else Text("No setting was applied yet.", "note")]
    if snapshot.work is not None:
        blocks.append(work_facts(snapshot, snapshot.work))
    return block_rows(blocks, width)


def ranks_lines(snapshot: Snapshot, width: int) -> list[Row]:
    """The parts of a step, the slowest ranks with their phases, and a heat map."""
    ranks = snapshot.ranks
    if ranks is None:
        return block_rows([Text("This run has one rank.", "note")], width)
    lines = block_rows([ranks_facts(snapshot, ranks), slowest(ranks.newest)], width)
    return [*lines, BLANK, *heat_map(ranks, width, _HEAT_ROWS)] if ranks.newest.cells else lines


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


def _closed_by(*names: str) -> list[BindingType]:
    """The key that opens a page closes it, too."""
    return bindings(Key(name, "back", "back") for name in names)


class PageScreen(WidgetScreen):
    """Lines that scroll."""

    title_text = ""
    keys: ClassVar[tuple[Key, ...]] = PAGE_KEYS
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
    keys = HELP_KEYS
    BINDINGS = _closed_by("question_mark", "h")

    def __init__(self, look: Look, of: tuple[Key, ...]) -> None:
        super().__init__(look)
        self._of = of

    def lines(self, width: int) -> list[Row]:
        return help_lines((*self._of, *APP_KEYS), width)


class LoadedPage(PageScreen):
    """A page whose text takes a while to read. read: returns it."""

    def __init__(self, look: Look, title: str, read: Callable[[], Sequence[Block]]) -> None:
        super().__init__(look)
        self.title_text = title
        self._read = read
        self.loaded: Sequence[Block] | None = None  # None while it is read

    def on_mount(self) -> None:
        self.beside(self._read, self._show, lambda text: self._show([Text(text, "bad")]))

    def _show(self, blocks: Sequence[Block]) -> None:
        self.loaded = blocks
        self.paint_if_current()

    def lines(self, width: int) -> list[Row]:
        return block_rows(self.loaded or [Text("loading…", "note")], width)


class ComparisonScreen(LoadedPage):
    """Run b compared with run a."""

    BINDINGS = _closed_by("c")

    def __init__(self, look: Look, home: HomeFolder, a: str, b: str) -> None:
        super().__init__(look, f"{b} compared with {a}", lambda: home.compare(a, b))


class StartScreen(LoadedPage):
    """What an entry of the home screen would train. start: trains it. wizard: opens the wizard for it."""

    keys = START_KEYS

    def __init__(
        self,
        look: Look,
        row: StartRow,
        home: HomeFolder,
        start: Callable[[StartRow], None],
        wizard: Callable[[StartRow | None], None] | None,
    ) -> None:
        super().__init__(look, row.name, lambda: [Text("\n".join(home.details(row)))])
        self._row, self._train, self._wizard = row, start, wizard

    def has(self, need: str) -> bool:
        return self._wizard is not None

    def action_start(self) -> None:
        """Return to the home screen, and train the entry."""
        if self.is_current:
            self.action_back()
            self._train(self._row)

    def action_wizard(self) -> None:
        """Return to the home screen, and open the wizard."""
        if self.is_current and self._wizard is not None:
            self.action_back()
            self._wizard(self._row)


class RunPage(PageScreen):
    """A page about a run, updated every second."""

    def __init__(self, look: Look, source: RunSource) -> None:
        super().__init__(look)
        self._source = source
        self._latest: Snapshot = source.snapshot()

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self.read_again)

    def read_again(self) -> None:
        """Redraw if something has changed."""
        before, self._latest = self._latest, self._source.snapshot()
        if before is not self._latest:
            self.paint_if_current()

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        self.body.folder = _code_folder(self._latest)
        return super().sections(width, height)


def _code_folder(snapshot: Snapshot) -> Path | None:
    """Where the code of a run is; None for a built-in workload and for a run of another machine."""
    run = snapshot.run
    if run is None or run.host != socket.gethostname():
        return None
    script, workload = run.config.get("script"), run.config.get("workload")
    if isinstance(script, dict):
        folder = script.get("folder")
    else:
        paths = workload.get("path") if isinstance(workload, dict) else None
        folder = paths[0] if isinstance(paths, list) and paths else None
    return Path(folder) if isinstance(folder, str) and folder else None


class SettingsScreen(RunPage):
    """Requested and applied settings, and whether they are in effect."""

    title_text = "settings"
    BINDINGS = _closed_by("i")

    def lines(self, width: int) -> list[Row]:
        return settings_lines(self._latest, width)


class OwnValuesScreen(RunPage):
    """What the user's own training code logged, and its samples."""

    title_text = "logged values and samples"
    BINDINGS = _closed_by("v")

    def lines(self, width: int) -> list[Row]:
        return own_values_lines(self._latest, width)


class RanksScreen(RunPage):
    """The ranks of a run with several: their work, waiting and phases."""

    title_text = "ranks"
    BINDINGS = _closed_by("r")

    def lines(self, width: int) -> list[Row]:
        return ranks_lines(self._latest, width)


class DiagnosisScreen(RunPage):
    """All findings with their evidence. try_it: opens the trial screen; None if nothing can be tried."""

    title_text = "diagnosis"
    keys = DIAGNOSIS_KEYS
    BINDINGS = _closed_by("d")

    def __init__(
        self, look: Look, source: RunSource, diagnosis: Diagnosis, try_it: Callable[[], None] | None
    ) -> None:
        super().__init__(look, source)
        self._diagnosis = diagnosis
        self._try = try_it

    @property
    def _command(self) -> str:
        return first_command(self._source.name, self._diagnosis.of(self._latest).findings)

    def has(self, need: str) -> bool:
        return self._try is not None if need == "change" else bool(self._command)

    def lines(self, width: int) -> list[Row]:
        result = self._diagnosis.of(self._latest)
        blocks = diagnosis_blocks(self._latest, result, self._source.name, self._try is not None)
        return block_rows(blocks, width)

    def action_try(self) -> None:
        """Return to the live screen, and open the trial screen."""
        if self._try is not None and self.is_current:
            self.action_back()
            self._try()

    def action_copy(self) -> None:
        """Copy the command to the clipboard of the terminal."""
        self.app.copy_to_clipboard(self._command)
        self.say(f"copied: {self._command}")
