"""The home screen: shows at once, and reads hardware and runs in a thread meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from textual import events
from textual.message import Message

from ndd_console.screens.interfaces import HomeSource, RunRow, StartRow
from ndd_console.view.home import HomeState, entry_count, home_rows
from ndd_console.view.style import Row

from .base import CanvasScreen, Look, post_from_thread
from .pages import HelpScreen


class HomeScreen(CanvasScreen):
    """Lists what can be started and opened. `choose` is called with the chosen entry. wizard: opens it."""

    class GpuRead(Message):
        """The hardware was looked at."""

        def __init__(self, lines: list[str]) -> None:
            self.lines = lines
            super().__init__()

    class ListRead(Message):
        """The runs folder was read."""

        def __init__(self, workloads: list[StartRow], runs: list[RunRow], problem: str | None = None) -> None:
            self.workloads, self.runs, self.problem = workloads, runs, problem
            super().__init__()

    def __init__(
        self,
        home: HomeSource,
        look: Look,
        choose: Callable[[StartRow | RunRow], None],
        leave: Callable[[], None],
        on_painted: Callable[[], None] | None = None,
        wizard: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(look, on_painted)
        self._home = home
        self._wizard = wizard
        self._choose = choose
        self._leave = leave
        self.state = HomeState(None, None, None)

    def on_mount(self) -> None:
        threading.Thread(target=self._read_gpu, name="ndd-home-card", daemon=True).start()
        self.refresh_runs()

    def refresh_runs(self) -> None:
        """Read the runs folder again."""
        threading.Thread(target=self._read_list, name="ndd-home-runs", daemon=True).start()

    def _read_gpu(self) -> None:
        try:
            lines = self._home.gpu_lines()
        except Exception as error:  # noqa: BLE001  told, or the screen would wait for ever
            lines = [f"the hardware could not be read: {error}"]
        post_from_thread(self, self.GpuRead(lines))

    def _read_list(self) -> None:
        try:
            message = self.ListRead(self._home.workloads(), self._home.runs())
        except Exception as error:  # noqa: BLE001
            message = self.ListRead([], [], f"the runs could not be read: {error}")
        post_from_thread(self, message)

    def on_home_screen_gpu_read(self, message: GpuRead) -> None:
        self.show(replace(self.state, card=tuple(message.lines)))

    def on_home_screen_list_read(self, message: ListRead) -> None:
        count = entry_count(message.workloads, message.runs)
        self.show(
            replace(
                self.state,
                workloads=tuple(message.workloads),
                runs=tuple(message.runs),
                chosen=min(self.state.chosen, max(count - 1, 0)),
                message=message.problem or self.state.message,
                bad=self.state.bad or message.problem is not None,
            )
        )

    def say(self, text: str | None, bad: bool = False) -> None:
        """A line for the user above the keys."""
        self.show(replace(self.state, message=text, bad=bad))

    def show(self, state: HomeState) -> None:
        """Take a new state and draw it."""
        self.state = state
        if self.is_current:
            self.paint()

    def on_screen_resume(self) -> None:
        self.paint()

    def draw(self, width: int, height: int) -> list[Row]:
        return home_rows(self.state, width, height)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        key = event.character if event.is_printable and event.character else event.key
        moves = {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "pageup": -8,
            "pagedown": 8,
            "home": -9999,
            "end": 9999,
        }
        if key in ("q", "ctrl+q", "ctrl+c", "escape"):
            self._leave()
        elif key == "?":
            self.app.push_screen(HelpScreen(self.look))
        elif key == "r":
            self.say(None)
            self.refresh_runs()
        elif key == "w" and self._wizard is not None:
            self._wizard()
        elif key == "enter":
            self._open()
        elif key in moves:
            count = entry_count(self.state.workloads, self.state.runs)
            chosen = min(max(self.state.chosen + moves[key], 0), max(count - 1, 0))
            self.show(replace(self.state, chosen=chosen))

    def _open(self) -> None:
        entries: list[StartRow | RunRow] = [*(self.state.workloads or ()), *(self.state.runs or ())]
        if self.state.chosen < len(entries):
            self._choose(entries[self.state.chosen])
