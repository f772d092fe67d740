"""The home screen: shown immediately, while threads detect the hardware and read the runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from textual import events
from textual.message import Message

from ndd_console.screens.interfaces import HomeSource
from ndd_console.view.entries import RunRow, StartRow
from ndd_console.view.home import HomeState, entry_count, home_rows
from ndd_console.view.style import Row

from .base import LEAVE, CanvasScreen, Look, key_of, moved, post_from_thread
from .pages import HelpScreen

_PAGE = 8


class HomeScreen(CanvasScreen):
    """Lists workloads and runs. `choose` is called with the selected entry, `wizard` opens the wizard."""

    class GpuRead(Message):
        """The hardware was detected."""

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
        post_from_thread(self, self.GpuRead(lines))

    def _read_list(self) -> None:
        try:
            message = self.ListRead(self._home.workloads(), self._home.runs())
        except Exception as error:  # noqa: BLE001
            message = self.ListRead([], [], f"cannot read the runs folder: {error}")
        post_from_thread(self, message)

    def on_home_screen_gpu_read(self, message: GpuRead) -> None:
        self.show(replace(self.state, machine=tuple(message.lines)))

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
        """Show a message above the keys."""
        self.show(replace(self.state, message=text, bad=bad))

    def show(self, state: HomeState) -> None:
        """Draw a new state."""
        self.state = state
        if self.is_current:
            self.paint()

    def on_screen_resume(self) -> None:
        self.paint()

    def draw(self, width: int, height: int) -> list[Row]:
        return home_rows(self.state, width, height)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        key = key_of(event)
        step = moved(key, _PAGE)
        if key in LEAVE:
            self._leave()
        elif key == "?":
            self.app.push_screen(HelpScreen(self.look))
        elif key == "r":
            self.say(None)
            self.refresh_runs()
        elif key == "w" and self._wizard is not None:
            self._wizard()
        elif key == "enter":
            entries: list[StartRow | RunRow] = [*(self.state.workloads or ()), *(self.state.runs or ())]
            if self.state.chosen < len(entries):
                self._choose(entries[self.state.chosen])
        elif step is not None:
            last = max(entry_count(self.state.workloads, self.state.runs) - 1, 0)
            self.show(replace(self.state, chosen=min(max(self.state.chosen + step, 0), last)))
