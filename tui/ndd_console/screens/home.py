"""The home screen: shown immediately, while threads detect the hardware and read the runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from textual import events

from ndd_console.screens.interfaces import HomeSource, RunRow, StartRow
from ndd_console.view.home import DEFAULT_EPOCHS, HomeState, home_rows
from ndd_console.view.pager import HOME_KEYS
from ndd_console.view.style import Look

from .base import LEAVE, ViewScreen, bounded, call_from_thread, key_of, moved
from .pages import HelpScreen, StartScreen

MOST_DIGITS = 6


class HomeScreen(ViewScreen[HomeState]):
    """Lists what can be trained and the runs. attach: opens a run. start: trains an entry. wizard: opens the wizard."""

    def __init__(
        self,
        home: HomeSource,
        look: Look,
        attach: Callable[[RunRow], None],
        start: Callable[[StartRow], None],
        leave: Callable[[], None],
        on_painted: Callable[[], None] | None = None,
        wizard: Callable[[StartRow | None], None] | None = None,
    ) -> None:
        super().__init__(look, HomeState(), home_rows, on_painted)
        self._home = home
        self._wizard = wizard
        self._open_run = attach
        self._train = start
        self._leave = leave

    def on_mount(self) -> None:
        threading.Thread(target=self._read_gpu, name="ndd-home-gpu", daemon=True).start()
        self.refresh_runs()

    def refresh_runs(self) -> None:
        """Read the runs folder again."""
        threading.Thread(target=self._read_list, name="ndd-home-runs", daemon=True).start()

    def _read_gpu(self) -> None:
        try:
            lines = self._home.gpu_lines()
        except Exception as error:  # noqa: BLE001  without a message the screen would wait forever
            lines = [f"hardware detection failed: {error}"]
        call_from_thread(self, lambda: self.show(machine=tuple(lines)))

    def _read_list(self) -> None:
        try:
            call_from_thread(self, self._list, self._home.workloads(), self._home.runs())
        except Exception as error:  # noqa: BLE001
            call_from_thread(self, self._list, [], [], f"cannot read the runs folder: {error}")

    def _list(self, workloads: list[StartRow], runs: list[RunRow], problem: str = "") -> None:
        self.show(workloads=tuple(workloads), runs=tuple(runs))
        self.show(chosen=bounded(self.view.chosen, len(self.view.entries)))
        if problem:
            self.say(problem, bad=True)

    def say(self, text: str | None, bad: bool = False) -> None:
        """Show a message above the keys."""
        self.show(message=text, bad=bad)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        key = key_of(event)
        if self.view.asked is not None:
            self._answer(key, self.view.asked)
            return
        if key == "escape" and self.view.bad:
            self.say(None)
            return
        step = moved(key)
        entries = self.view.entries
        chosen = entries[self.view.chosen] if self.view.chosen < len(entries) else None
        if key in LEAVE:
            self._leave()
        elif key == "?":
            self.app.push_screen(HelpScreen(self.look, HOME_KEYS))
        elif key == "r":
            self.say(None)
            self.refresh_runs()
        elif key == "w" and self._wizard is not None:
            self._wizard(chosen if isinstance(chosen, StartRow) else None)
        elif key == "enter" and isinstance(chosen, RunRow):
            self._open_run(chosen)
        elif key == "enter" and isinstance(chosen, StartRow):
            self.app.push_screen(StartScreen(self.look, chosen, self._home, self._ask, self._wizard))
        elif key == "s" and isinstance(chosen, StartRow):
            self._ask(chosen)
        elif key == "s" and chosen is not None:
            self.say(f"press enter to open run {chosen.name}")
        elif step is not None:
            self.show(chosen=bounded(self.view.chosen + step, len(entries)))

    def _ask(self, row: StartRow) -> None:
        """Train an entry; ask for the length of the run first where nothing defines it."""
        if row.kind == "own":
            self.show(asked=row, typed="")
        else:
            self._train(row)

    def _answer(self, key: str, row: StartRow) -> None:
        typed = self.view.typed
        if key in LEAVE:
            self.show(asked=None)
        elif key == "backspace":
            self.show(typed=typed[:-1])
        elif key.isdecimal() and key.isascii():
            self.show(typed=(typed + key)[:MOST_DIGITS])
        elif key == "enter" and int(typed or DEFAULT_EPOCHS) > 0:
            self.show(asked=None)
            self._train(replace(row, epochs=int(typed or DEFAULT_EPOCHS)))
